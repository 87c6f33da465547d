"""Moves bytes between files and memory: whole transfers or a typed error.

Scope: `Extent`, the `IOEngine` protocol, `PosixEngine` (direct I/O on a thread pool), `choose_engine`.
Not here: kvikio (`tiering/gds.py`), transfers off the page grid (`tiering/bounce.py`), where a block's bytes are
(`tiering/store.py`), when they move (`tiering/pipeline.py`).

Invariants: I6 (a short transfer is an error). An engine never creates a file and never makes a store file longer.
"""

import errno
import fcntl
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from tiering import bounce
from tiering.errors import DamagedStateError, DiskFullError, EngineError, IOFailedError
from tiering.place import filesystem_of, free_bytes
from tiering.workload import PAGE

EngineName = Literal["auto", "posix", "kvikio"]
Verb = Literal["read", "write"]
MAX_OPEN_FILES = 256  # two slots of 1,000 blocks are more files than the usual limit of 1,024 descriptors
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A byte range of a file; `block` names it in errors. The trainer's extents are multiples of 4096."""

    path: Path
    offset: int
    nbytes: int
    block: str


class IOEngine(Protocol):
    """One future a request, which completes with the bytes moved: always `extent.nbytes`.

    The engine owns `view` from submission until the future completes: the caller neither reads, writes nor lends it
    in between.
    """

    name: str

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]: ...

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]: ...

    def sync(self, paths: Iterable[Path]) -> None:
        """Makes completed writes to these files durable; the caller has waited for their futures."""

    def close(self) -> None:
        """Waits for every outstanding request, then closes the files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def short_transfer(verb: Verb, extent: Extent, moved: int) -> IOFailedError:
    """What a person reads when a file gave or took fewer bytes than asked."""
    where = f"block {extent.block}: {extent.path} at offset {extent.offset}"
    if verb == "read":
        return DamagedStateError(
            f"{where}: wanted {extent.nbytes} bytes, found {moved}: the file is damaged. "
            f"Fix: resume from an earlier commit."
        )
    return IOFailedError(
        f"{where}: {moved} of {extent.nbytes} bytes were written. "
        f"Fix: check the disk (dmesg), then resume from the last commit."
    )


def failed_transfer(verb: Verb, extent: Extent, error: OSError) -> IOFailedError:
    """The typed error for what the kernel said about a transfer."""
    where = f"block {extent.block}: {verb} of {extent.nbytes} bytes at offset {extent.offset} of {extent.path}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{where}: {error.strerror}: wanted {extent.nbytes} bytes, "
            f"{free_bytes(extent.path)} bytes are free. "
            f"Fix: make room, then resume from the last commit."
        )
    if error.errno == errno.ENOENT:
        return DamagedStateError(
            f"{where}: the file is missing: wanted {extent.nbytes} bytes, found 0. Fix: resume from an earlier commit."
        )
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    return IOFailedError(
        f"{where} failed: {name} ({error.strerror}). Fix: check the disk (dmesg), then resume from the last commit."
    )


class _File:
    """An open descriptor. `direct` falls to False at most once, and only before a direct transfer has worked."""

    __slots__ = ("direct", "fd", "lock", "path", "proven", "users")

    def __init__(self, path: Path, fd: int, *, direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self.proven = False
        self.users = 0
        self.lock = threading.Lock()


class PosixEngine:
    """`os.preadv`/`os.pwritev` with O_DIRECT on a thread pool; both release the GIL.

    A file system that refuses O_DIRECT, at open or at a file's first transfer, is used through the page cache, with
    one warning.
    """

    name = "posix"

    def __init__(self, threads: int = 8, *, direct: bool = True) -> None:
        self._direct = direct
        self._files: OrderedDict[Path, _File] = OrderedDict()  # least recently used first
        self._buffered: set[Path] = set()
        self._warned: set[Path] = set()
        self._lock = threading.RLock()  # opening a file inside it may have to note that it is buffered
        self._edge_lock = threading.Lock()  # two writes off the page grid may share a page
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="io")

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pool.submit(self._transfer, "read", extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pool.submit(self._transfer, "write", extent, view)

    def sync(self, paths: Iterable[Path]) -> None:
        for done in [self._pool.submit(self._sync_one, path) for path in paths]:
            done.result()  # waits for the fdatasync of one file

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1].fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        view = view.cast("B")
        assert view.nbytes == extent.nbytes, f"{extent.block}: a view of {view.nbytes} bytes for {extent.nbytes}"
        if extent.nbytes == 0:
            return 0
        try:
            with self._lease(extent.path) as file:
                on_grid = bounce.on_grid(extent.offset, view)
                moved = (self._move if on_grid else self._bounced)(verb, file, extent.offset, view)
        except OSError as error:
            raise failed_transfer(verb, extent, error) from error
        if moved != extent.nbytes:
            raise short_transfer(verb, extent, moved)
        return moved

    def _bounced(self, verb: Verb, file: _File, offset: int, view: memoryview) -> int:
        def read(at: int, into: memoryview) -> int:
            return self._move("read", file, at, into)

        def write(at: int, data: memoryview) -> int:
            return self._move("write", file, at, data)

        if verb == "read":
            return bounce.read(read, offset, view) if file.direct else read(offset, view)
        # Through the page cache too: another request may be rewriting this page as a whole while it falls back.
        with self._edge_lock:
            return bounce.write(read, write, file.fd, offset, view) if file.direct else write(offset, view)

    def _move(self, verb: Verb, file: _File, offset: int, view: memoryview) -> int:
        """Repeats the call until all is moved, the file ends, or it leaves the page grid; returns the bytes moved."""
        move = os.preadv if verb == "read" else os.pwritev
        done = 0
        while done < view.nbytes:
            direct = file.direct
            try:
                moved = move(file.fd, [view[done:]], offset + done)
            except OSError as error:
                if direct and error.errno in NO_DIRECT and self._fall_back(file):
                    continue
                raise
            file.proven = True
            done += moved
            if moved == 0 or (file.direct and done % PAGE):
                break
        return done

    def _fall_back(self, file: _File) -> bool:
        """Turns O_DIRECT off for a file whose direct transfers never worked; True if it is off now."""
        with file.lock:
            if not file.direct:
                return True  # another request got here first
            if file.proven:
                return False
            fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            file.direct = False
        self._note_buffered(file.path)
        return True

    def _note_buffered(self, path: Path) -> None:
        fs = filesystem_of(path)
        with self._lock:
            self._buffered.add(path)
            if fs.mount_point in self._warned:
                return
            self._warned.add(fs.mount_point)
        warnings.warn(
            f"{path}: {fs.fs_type} at {fs.mount_point} refuses direct I/O; using the page cache, which takes "
            f"RAM beyond the budget and hides the disk's speed",
            RuntimeWarning,
            stacklevel=2,
        )

    @contextmanager
    def _lease(self, path: Path) -> Iterator[_File]:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self._open(path)
            file.users += 1
            self._files.move_to_end(path)
            self._close_idle()
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def _close_idle(self) -> None:
        """Closes the files that were idle longest, until the table is no longer too long. The caller holds the lock."""
        excess = max(0, len(self._files) - MAX_OPEN_FILES)
        for file in [file for file in self._files.values() if file.users == 0][:excess]:
            os.close(self._files.pop(file.path).fd)

    def _open(self, path: Path) -> _File:
        if self._direct and path not in self._buffered:
            try:
                return _File(path, _open_fd(path, os.O_DIRECT), direct=True)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise
            self._note_buffered(path)
        return _File(path, _open_fd(path, 0), direct=False)

    def _sync_one(self, path: Path) -> None:
        try:
            with self._lease(path) as file:
                os.fdatasync(file.fd)
        except OSError as error:
            raise IOFailedError(
                f"{path}: flushing to the disk failed: {error.strerror}. "
                f"Fix: check the disk (dmesg), then resume from the last commit."
            ) from error


def _open_fd(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)  # a store on a read-only medium can still be read


def refuse_engine(name: EngineName, path: Path) -> None:
    """Raises `EngineError` if the engine asked for by name cannot work on the drive of `path`."""
    if name == "kvikio":
        choose_engine(name, path)[0].close()


def choose_engine(name: EngineName, path: Path) -> tuple[IOEngine, str]:
    """The engine for the store at `path`, and one line that says which and why.

    Raises `EngineError` if kvikio is asked for by name and a real transfer with it fails.
    """
    from tiering import gds  # after this module: gds needs Extent and the errors from here

    if name == "posix":
        return PosixEngine(), "I/O engine: posix direct I/O (asked for)"
    reason = gds.probe(path)
    if reason is None:
        why = "asked for, a probe transfer worked" if name == "kvikio" else "a probe transfer worked"
        return gds.KvikioEngine(), f"I/O engine: kvikio ({why})"
    if name == "kvikio":
        raise EngineError(
            f"the kvikio I/O engine cannot work here: {reason}. "
            f"Fix: engine auto or posix (direct I/O, no GPU driver needed)."
        )
    return PosixEngine(), f"I/O engine: posix direct I/O (kvikio cannot work here: {reason})"
