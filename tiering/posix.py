"""The engine that works everywhere: direct I/O with `preadv` and `pwritev` on a thread pool.

Scope: `PosixEngine`, its open files, the fall-back to the page cache where a file system refuses O_DIRECT.
Not here: the protocol and its errors (`engine.py`), threads and futures (`pooled.py`), transfers off the page grid
(`bounce.py`).
"""

import errno
import fcntl
import os
import threading
import warnings
from pathlib import Path

from tiering import bounce
from tiering.engine import Extent, Verb, deleted_file, failed_sync, failed_transfer
from tiering.open_files import OpenFiles
from tiering.place import filesystem_of
from tiering.pooled import MOST_THREADS, PooledEngine
from tiering.watchdog import Watchdog
from tiering.workload import PAGE

MAX_OPEN_FILES = 256  # two slots of 1,000 blocks are more files than the usual limit of 1,024 descriptors
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class _File:
    """An open descriptor. `direct` falls to False at most once, and only before a direct transfer has worked.
    refused: the error number for which it could be opened for reading alone; 0 if it can be written.
    """

    __slots__ = ("direct", "fd", "lock", "path", "proven", "refused")

    def __init__(self, path: Path, flags: int, *, direct: bool) -> None:
        self.path = path
        self.fd, self.refused = _open_fd(path, flags)
        self.direct = direct
        self.proven = False
        self.lock = threading.Lock()


class PosixEngine(PooledEngine):
    """`os.preadv`/`os.pwritev` with O_DIRECT on a thread pool; both release the GIL.

    A file system that refuses O_DIRECT, at open or at a file's first transfer, is used through the page cache, with
    one warning.
    """

    name = "posix"

    def __init__(self, threads: int = MOST_THREADS, *, direct: bool = True, watchdog: Watchdog | None = None) -> None:
        super().__init__(threads, watchdog)
        self._direct = direct
        self._files = OpenFiles(self._open, lambda file: os.close(file.fd), lambda: MAX_OPEN_FILES)
        self._buffered: set[Path] = set()
        self._warned: set[Path] = set()
        self._lock = threading.Lock()
        self._edge_lock = threading.Lock()  # two writes off the page grid may share a page

    def _close_files(self) -> None:
        self._files.close()

    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        try:
            with self._files.lease(extent.path) as file:
                if verb == "write" and file.refused:
                    raise OSError(file.refused, os.strerror(file.refused))
                on_grid = bounce.on_grid(extent.offset, view)
                return (self._move if on_grid else self._bounced)(verb, file, extent.offset, view)
        except OSError as error:
            raise failed_transfer(verb, extent, error) from error

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

    def _open(self, path: Path) -> _File:
        if self._direct and path not in self._buffered:
            try:
                return _File(path, os.O_DIRECT, direct=True)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise
            self._note_buffered(path)
        return _File(path, 0, direct=False)

    def _sync_one(self, path: Path) -> None:
        try:
            with self._files.lease(path) as file:
                os.fdatasync(file.fd)
                if os.fstat(file.fd).st_nlink == 0:
                    raise deleted_file(path)
        except OSError as error:
            raise failed_sync(path, error.strerror or str(error)) from error


def _open_fd(path: Path, flags: int) -> tuple[int, int]:
    """A descriptor, and 0 or the error number for which it is one for reading alone."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags), 0
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        refused = error.errno
    # a store on a read-only medium can still be read
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags), refused
