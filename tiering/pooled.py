"""What every engine on a thread pool does around a transfer: a future a request, typed errors, the watchdog, an end.

Scope: `PooledEngine`, the part of the `IOEngine` contract that does not depend on how bytes are moved.
Not here: moving them (`posix.py`, `gds.py`), the words of the errors (`engine.py`), what is late (`watchdog.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tiering.engine import (
    DeviceArray,
    Extent,
    Verb,
    View,
    closed_engine,
    failed_sync,
    flat,
    on_device,
    refused_device,
    short_transfer,
)
from tiering.traffic import Counter, Traffic
from tiering.watchdog import Watchdog

MOST_THREADS = 64  # several drives at their queue depths, and the threads that sum what has landed


class PooledEngine(ABC):
    """An `IOEngine` for whoever can move the bytes of one request, flush one file, and close its files."""

    name: str
    device_refusal = "it makes calls of the system, which know RAM alone"

    def __init__(self, threads: int, watchdog: Watchdog | None) -> None:
        """threads: at most; each starts when a request finds none idle."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="io")
        self._watchdog = watchdog or Watchdog()
        self._moved = Counter()
        self._closed = False

    def submit_read(self, extent: Extent, view: View) -> Future[int]:
        return self._submit("read", extent, view)

    def submit_write(self, extent: Extent, view: View) -> Future[int]:
        return self._submit("write", extent, view)

    def register(self, view: View) -> str:
        return ""

    def deregister(self, view: View) -> None:
        return None

    def traffic(self) -> Traffic:
        return self._moved.traffic(gds_bytes=None)

    def sync(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        if paths and self._closed:
            raise failed_sync(paths[0], "the I/O engine is closed")
        for done in [self._pool.submit(self._flush, path) for path in paths]:
            done.result()  # waits for the fdatasync of one file

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True)
        self._watchdog.close()
        self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, verb: Verb, extent: Extent, view: View) -> Future[int]:
        if self._closed:
            return _failed(closed_engine(verb, extent))
        if not on_device(view):
            return self._pool.submit(self._whole, verb, extent, view)
        if self.device_refusal:
            return _failed(refused_device(self.name, self.device_refusal, verb, extent))
        assert view.nbytes == extent.nbytes, f"{extent.block}: a view of {view.nbytes} bytes for {extent.nbytes}"
        return self._pool.submit(self._whole_on_device, verb, extent, view)

    def _whole(self, verb: Verb, extent: Extent, view: View) -> int:
        with flat(verb, extent, view) as data, self._watchdog.watching(verb, extent):
            moved = self._transfer(verb, extent, data) if extent.nbytes else 0
            self._moved.add(verb, "host", moved)
            if moved != extent.nbytes:
                raise short_transfer(verb, extent, moved)
        return moved

    def _whole_on_device(self, verb: Verb, extent: Extent, view: DeviceArray) -> int:
        with self._watchdog.watching(verb, extent):
            moved = self._device_transfer(verb, extent, view) if extent.nbytes else 0
            self._moved.add(verb, "device", moved)
            if moved != extent.nbytes:
                raise short_transfer(verb, extent, moved)
        return moved

    def _flush(self, path: Path) -> None:
        with self._watchdog.watching("flush", path):
            self._sync_one(path)

    @abstractmethod
    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        """Moves what it can of a request that is not empty; returns the bytes. Raises `IOFailedError`."""

    def _device_transfer(self, verb: Verb, extent: Extent, view: DeviceArray) -> int:
        """The same for memory of a device; asked of an engine without a `device_refusal` alone."""
        raise NotImplementedError

    @abstractmethod
    def _sync_one(self, path: Path) -> None:
        """Makes completed writes to one file durable. Raises `IOFailedError`."""

    @abstractmethod
    def _close_files(self) -> None:
        """Called once nothing is in progress."""


def _failed(error: Exception) -> Future[int]:
    refused: Future[int] = Future()
    refused.set_exception(error)
    return refused
