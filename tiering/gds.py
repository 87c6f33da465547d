"""The I/O engine on kvikio, which uses GPUDirect Storage where the driver has it.

Scope: `KvikioEngine` (the `IOEngine` protocol) and `probe`, a real transfer that says whether it works here.
Not here: the choice between engines (`choose.py`), the POSIX one (`posix.py`), threads and futures (`pooled.py`).

State of proof: on machines without CUDA only `probe` and its refusal have been run (kvikio 26.10 imports and opens
files there, and every transfer fails for want of libcuda.so.1); the transfers below follow kvikio's interface.
"""

import errno
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tiering.engine import Extent, Verb, deleted_file, failed_sync, failed_transfer
from tiering.errors import IOFailedError
from tiering.place import folder_beside
from tiering.pooled import MOST_THREADS, PooledEngine
from tiering.watchdog import Watchdog

PROBE_NBYTES = 4096
TOLD = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EINVAL, errno.ENOENT, errno.EROFS)
"""What kvikio tells in words where the system has a number."""


class KvikioEngine(PooledEngine):
    """Host memory to files through kvikio. Raises ImportError if it is made without kvikio: `probe` first."""

    name = "kvikio"

    def __init__(self, threads: int = MOST_THREADS, *, watchdog: Watchdog | None = None) -> None:
        import kvikio

        super().__init__(threads, watchdog)
        self._open = kvikio.CuFile
        self._files: dict[Path, Any] = {}
        self._read_only: set[Path] = set()
        self._lock = threading.Lock()

    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        host = np.frombuffer(view, dtype=np.uint8)
        moved = 0
        try:
            file = self._file(extent.path)
            if verb == "write" and extent.path in self._read_only:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            start = file.pread if verb == "read" else file.pwrite
            while moved < extent.nbytes:
                left, at = extent.nbytes - moved, extent.offset + moved
                done = int(start(host[moved:], size=left, file_offset=at).get())  # waits for this transfer
                moved += done
                if done == 0:
                    break
        except (OSError, RuntimeError) as error:
            raise failed_transfer(verb, extent, _numbered(error)) from error
        return moved

    def _file(self, path: Path) -> Any:
        with self._lock:
            if path not in self._files:
                writable = os.access(path, os.W_OK)
                # "r+" never creates; a store on a read-only medium can still be read
                self._files[path] = self._open(path, "r+" if writable or not path.exists() else "r")
                if not writable:
                    self._read_only.add(path)
            return self._files[path]

    def _sync_one(self, path: Path) -> None:
        try:
            fd = self._file(path).fileno()
            os.fdatasync(fd)
            if os.fstat(fd).st_nlink == 0:
                raise deleted_file(path)
        except (OSError, RuntimeError) as error:
            raise failed_sync(path, _plain(error)) from error

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def probe(path: Path) -> str | None:
    """None if kvikio moves bytes to a file below `path` and back, otherwise the reason why not, in one line."""
    try:
        import kvikio  # noqa: F401
    except ImportError as error:
        return f"kvikio is not installed ({error}): pip install 'megatrain[gds]'"
    except Exception as error:  # a native library that does not match the machine can raise anything
        return f"kvikio cannot be imported ({type(error).__name__}: {_plain(error)})"
    payload = os.urandom(PROBE_NBYTES)
    page = bytearray(payload)
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder_beside(path), prefix=".probe-") as file,
            KvikioEngine(threads=1) as engine,
        ):
            file.truncate(PROBE_NBYTES)
            extent = Extent(path=Path(file.name), offset=0, nbytes=PROBE_NBYTES, block="probe")
            engine.submit_write(extent, memoryview(page)).result()  # waits for the probe's write
            page[:] = bytes(PROBE_NBYTES)
            engine.submit_read(extent, memoryview(page)).result()  # waits for the probe's read
    except (IOFailedError, OSError, RuntimeError, AttributeError) as error:  # the last one: another version's names
        return _plain(error.__cause__ or error)
    return None if page == payload else "kvikio read back other bytes than it wrote"


def _numbered(error: Exception) -> OSError:
    """The error as the system would have raised it, as far as its words tell."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    text = _plain(error)
    number = next((code for code in TOLD if os.strerror(code) in text), 0)
    return OSError(number, text)


def _plain(error: BaseException) -> str:
    """kvikio's message without the path of its source file, on one line."""
    return re.sub(r"^KvikIO failure at: \S+: ", "", " ".join(str(error).split()))
