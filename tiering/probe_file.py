"""A file to measure a drive with: made, filled, moved to and from, and removed.

Scope: `probe_file`, the requests of a run on it, what each figure has to say about itself.
Not here: which runs make up a measurement (`measure_disk.py`), the transfers (`engine.py`).

What makes a figure honest: a buffer for each request (one buffer for all stays in the processor's cache), random bytes,
and a file whose blocks were all written before (unwritten ones are read at memory speed, and a first write has to
allocate). A figure that the page cache gave, or that no link can carry, says so.
"""

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch

from tiering.arena import Arena
from tiering.engine import Extent, IOEngine
from tiering.errors import DiskFullError, PlaceError
from tiering.hardware import READ_SHARE, Rate
from tiering.place import RAM_FILE_SYSTEMS, filesystem_of, folder_beside, free_bytes
from tiering.posix import NO_DIRECT
from tiering.workload import PAGE

MiB = 1 << 20
BUFFERS = 16
BUFFER_BYTES = 128 * MiB
"""All buffers together, however small a request: more than the caches of a processor hold."""
RANDOM_BYTES = 8 * MiB

What = Literal["read", "write", "mixed"]
MIXES: dict[What, str] = {"read": "R", "write": "W", "mixed": "RWRWRWR"}
assert MIXES["mixed"].count("R") == READ_SHARE * len(MIXES["mixed"]), "the mix of hardware.READ_SHARE"


class ProbeFile:
    """A file whose blocks have all been written, with buffers to move to and from it. Made by `probe_file`."""

    def __init__(
        self, engine: IOEngine, path: Path, nbytes: int, views: Sequence[memoryview], *, cached: str, link: float
    ) -> None:
        self.path = path
        self.nbytes = nbytes
        self.written_bytes = 0
        self._engine = engine
        self._views = views
        self._cached = cached
        self._link_bytes_per_s = link
        self._at = {"R": 0, "W": 0}

    def rate(
        self, what: What, *, depth: int, request_bytes: int, most_bytes: int, most_s: float = float("inf")
    ) -> Rate:
        """Bytes/s of about `most_bytes` (at least one of each request of the mix), or of `most_s` seconds if that is
        less. Raises what the engine raises.
        """
        moved, took_s = self.timed(what, depth, request_bytes, most_bytes, most_s)
        return self.named(what, moved / took_s, moved, depth, request_bytes)

    def rate_into(self, device: torch.device, *, depth: int, request_bytes: int) -> Rate:
        """Bytes/s of reading the whole file into memory of `device`. Raises what the engine and the allocator raise."""
        there = torch.empty(depth * request_bytes, dtype=torch.uint8, device=device)
        self._engine.register(there)
        try:
            begin_s = time.perf_counter()
            moved = self._move("R", depth, request_bytes, self.nbytes, lambda: True, there.split(request_bytes))
            took_s = max(time.perf_counter() - begin_s, 1e-9)
        finally:
            self._engine.deregister(there)
        rate = self.named("read", moved / took_s, moved, depth, request_bytes)
        return replace(rate, how=f"into memory of {device.type}, {rate.how}")

    def timed(
        self, what: What, depth: int, request_bytes: int, most_bytes: int, most_s: float = float("inf")
    ) -> tuple[int, float]:
        """Bytes moved and seconds taken, bounded as those of `rate`."""
        begin_s = time.perf_counter()
        until_s = begin_s + most_s
        moved = self._move(MIXES[what], depth, request_bytes, most_bytes, lambda: time.perf_counter() <= until_s)
        return moved, max(time.perf_counter() - begin_s, 1e-9)

    def completions(
        self, what: What, depth: int, request_bytes: int, most_bytes: int, go_on: Callable[[list[float]], bool]
    ) -> list[float]:
        """Seconds from the start to the end of each request, until `go_on` of them so far says no or all are done."""
        begin_s = time.perf_counter()
        ends: list[float] = []

        def note() -> bool:
            ends.append(time.perf_counter() - begin_s)
            return go_on(ends)

        self._move(MIXES[what], depth, request_bytes, most_bytes, note)
        return ends

    def named(self, what: What, per_s: float, moved: int, depth: int, request_bytes: int) -> Rate:
        """The rate with what was done to get it, and with what makes it doubtful."""
        depth = min(depth, len(self._views))
        how = (
            f"{what}: {_sized(moved)} in requests of {_sized(request_bytes)}, {depth} in flight, "
            f"{self._engine.name}, at {self.path.parent}{self._cached}"
        )
        if 0 < self._link_bytes_per_s < per_s:
            how += f"; invalid: above the link ({self._link_bytes_per_s / 1e9:.2f} GB/s)"
        return Rate(per_s=per_s, source="measured", how=how, date=date.today().isoformat())

    def fill(self, request_bytes: int) -> None:
        """Writes every block once, untimed. From then on writes go on half a file away from reads."""
        self._move("W", BUFFERS, request_bytes, self.nbytes, lambda: True)
        self._at["W"] = self.nbytes // request_bytes // 2 * request_bytes

    def _move(
        self,
        mix: str,
        depth: int,
        request_bytes: int,
        most_bytes: int,
        go_on: Callable[[], bool],
        views: Sequence[memoryview | torch.Tensor] | None = None,
    ) -> int:
        """Keeps `depth` requests in flight; returns the bytes moved, when the last of them is done. `go_on` is asked
        after each request; a no ends the run with a whole mix. views: buffers to use instead of the file's own.
        """
        views = self._views if views is None else views
        count = max(1, most_bytes // (request_bytes * len(mix))) * len(mix)
        depth = min(depth, len(views))
        free = deque(views)
        done: SimpleQueue[Future[int]] = SimpleQueue()
        running: dict[Future[int], memoryview | torch.Tensor] = {}
        moved, wanted = 0, True

        def finish_one() -> None:
            nonlocal moved, wanted
            future = done.get()  # waits for whichever request completes first
            free.append(running.pop(future))
            moved += future.result()
            wanted = go_on() and wanted

        try:
            for number, verb in enumerate(islice(cycle(mix), count)):
                if len(running) == depth:
                    finish_one()
                if number % len(mix) == 0 and not wanted:
                    break
                view = free.popleft()
                future = self._submit(verb, request_bytes, view)
                running[future] = view
                future.add_done_callback(done.put)
            while running:
                finish_one()
        finally:
            for _ in running:
                done.get()  # after an error too: buffers are in use until their requests have landed
        return moved

    def _submit(self, verb: str, nbytes: int, view: memoryview | torch.Tensor) -> Future[int]:
        offset = self._at[verb] if self._at[verb] + nbytes <= self.nbytes else 0
        self._at[verb] = offset + nbytes
        extent = Extent(path=self.path, offset=offset, nbytes=nbytes, block="measure")
        if verb == "R":
            return self._engine.submit_read(extent, view[:nbytes])
        self.written_bytes += nbytes
        return self._engine.submit_write(extent, view[:nbytes])


@contextmanager
def probe_file(
    path: Path,
    engine: IOEngine,
    *,
    nbytes: int,
    request_bytes: int,
    memory: int,
    link_bytes_per_s: float = 0.0,
    buffered: bool = False,
) -> Iterator[ProbeFile]:
    """A filled file of about `nbytes` on the drive of `path`, with buffers of `request_bytes`; gone afterwards.

    memory: bytes that all buffers together may take. buffered: the engine is known to use the page cache. Raises
    `DiskFullError` or `PlaceError` before anything is written, and what the engine raises.
    """
    folder = folder_beside(path)
    nbytes = max(2, nbytes // request_bytes) * request_bytes
    count = max(1, min(memory, max(BUFFERS * request_bytes, BUFFER_BYTES)) // request_bytes)
    remove_stale(folder)
    _check_room(folder, nbytes)
    file = folder / f".measure-{os.getpid()}"
    fd = _created(file)
    try:
        _allocate(fd, file, nbytes)
        cached = _page_cache(file, fd, buffered)
        with Arena(count * request_bytes) as arena:
            _randomize(arena)
            views = [arena.view(n * request_bytes, (n + 1) * request_bytes) for n in range(count)]
            probe = ProbeFile(engine, file, nbytes, views, cached=cached, link=link_bytes_per_s)
            probe.fill(request_bytes)
            yield probe
            views.clear()
    finally:
        file.unlink(missing_ok=True)
        os.close(fd)


def _randomize(arena: Arena) -> None:
    """Random words, drawn for the first bytes; further on each is another function of them, which is quicker."""
    words = arena.tensor(0, arena.nbytes).view(torch.int64)
    first, *others = words.split(RANDOM_BYTES // words.itemsize)
    first.random_()
    for number, piece in enumerate(others, start=1):
        torch.add(first[: len(piece)], (0x9E3779B97F4A7 * number) % (1 << 62), out=piece)


def remove_stale(folder: Path) -> None:
    """Removes probe files that a process left behind when it was killed: those that nobody holds a lock on."""
    for file in folder.glob(".measure-*"):
        with suppress(OSError):  # somebody else's, in use, or gone by now
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
            finally:
                os.close(fd)


def _created(file: Path) -> int:
    try:
        fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise PlaceError(f"{file} is in use: this process measures there already. Fix: one at a time.") from None
    except OSError as error:
        raise PlaceError(
            f"{file.parent}: no file can be made there to measure with: {error.strerror}. "
            f"Fix: name a folder that you own, on a writable disk."
        ) from error
    with suppress(OSError):  # a file system without locks: nobody else can tell that the file is in use
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _check_room(folder: Path, nbytes: int) -> None:
    free = free_bytes(folder)
    if nbytes > free:
        raise DiskFullError(
            f"{folder}: measuring needs a file of {nbytes} bytes, {free} bytes are free. "
            f"Fix: make room for {nbytes - free} more bytes, or name a folder on a larger disk."
        )


def _allocate(fd: int, file: Path, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise DiskFullError(
            f"{file}: no room for {nbytes} bytes to measure with: {error.strerror}. Fix: make room, or another disk."
        ) from error


def _page_cache(file: Path, fd: int, buffered: bool) -> str:
    """What a figure has to say where bytes do not come from the drive; empty with direct I/O."""
    fs_type = filesystem_of(file).fs_type
    if fs_type in RAM_FILE_SYSTEMS:
        return f"; cached: page cache ({fs_type} is RAM)"
    if buffered:
        return "; cached: page cache (asked for)"
    with mmap.mmap(-1, PAGE) as page:
        try:
            direct = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            return f"; cached: page cache ({fs_type} refuses direct I/O)"
        try:
            os.preadv(direct, [page], 0)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            return f"; cached: page cache ({fs_type} refuses direct I/O)"
        finally:
            os.close(direct)
    return ""


def _sized(nbytes: int) -> str:
    return f"{nbytes / MiB:.0f} MiB" if nbytes >= MiB else f"{nbytes / 1024:.0f} KiB"
