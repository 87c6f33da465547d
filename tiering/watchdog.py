"""Tells a person which I/O request hangs, while it hangs.

Scope: `Watchdog`: requests in progress, one line for each that takes too long, at growing intervals, and one when it
is done after all.
Not here: the requests (`posix.py`, `gds.py`); giving one up. Nothing does that: its bytes may still be on their way.

A request waits in the kernel, where nothing can be asked of it. So an own thread looks at the list of requests. It
works while every other thread waits, and costs a request an entry in a dict.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tiering.engine import Extent, Verb

LATE_S = 30.0
"""Linux gives an NVMe command up after this time (`nvme_core.io_timeout`) and resets the drive. A request of at most
16 MiB takes milliseconds: one that is older than this hangs, or waits for a drive that does.
"""
LOOKS = 4
"""Looks per `LATE_S`: a request is told of between 1 and 1 + 1/LOOKS times that late."""
GROWTH = 2.0
"""A request is told of again when it is this many times as old."""


def to_stderr(line: str) -> None:
    """Not a warning of Python's: a filter could turn that into an error, here in a thread that nobody waits for."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


class _Request:
    """A request in progress. told_s: its age when it is told of next."""

    __slots__ = ("began_s", "extent", "told_s", "verb")

    def __init__(self, verb: Verb | Literal["flush"], extent: Extent | Path, late_s: float) -> None:
        self.verb = verb
        self.extent = extent
        self.began_s = time.monotonic()
        self.told_s = late_s

    def __str__(self) -> str:
        if isinstance(self.extent, Path):
            return f"{self.verb} of {self.extent}"
        at = self.extent
        return f"block {at.block}: {self.verb} of {at.nbytes} bytes at offset {at.offset} of {at.path}"


class Watchdog:
    """Requests that an engine has begun. Its thread starts with the first of them and ends with `close`."""

    def __init__(self, late_s: float = LATE_S, tell: Callable[[str], None] = to_stderr) -> None:
        self.late_s = late_s
        self.tell = tell
        self._open: dict[int, _Request] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, verb: Verb | Literal["flush"], extent: Extent | Path) -> Iterator[None]:
        """Inside, the request is in progress. extent: of a flush the whole file."""
        request = _Request(verb, extent, self.late_s)
        key = id(request)
        self._open[key] = request
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            del self._open[key]
            if request.told_s > self.late_s:
                self.tell(f"{request} ended after {time.monotonic() - request.began_s:.1f} s")

    def close(self) -> None:
        """Ends the thread. No request is in progress any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._look, name="io watchdog", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while not self._closed.wait(self.late_s / LOOKS):
            now_s = time.monotonic()
            for request in self._open.copy().values():
                age_s = now_s - request.began_s
                if age_s >= request.told_s:
                    request.told_s = GROWTH * age_s
                    self.tell(f"{request} has taken {age_s:.1f} s so far. Check the disk (dmesg); the run waits for it")
