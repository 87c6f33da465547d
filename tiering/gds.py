"""The I/O engine on kvikio, which uses GPUDirect Storage where the driver has it.

Scope: `KvikioEngine` (the `IOEngine` protocol) and `probe`, a real transfer that says whether it works here.
Not here: the choice between engines and the POSIX one (`tiering/engine.py`).

State of proof: on machines without CUDA only `probe` and its refusal have been run (kvikio 26.10 imports and opens
files there, and every transfer fails for want of libcuda.so.1); the transfers below follow kvikio's interface.
"""

import os
import re
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tiering.engine import Extent, Verb, short_transfer
from tiering.errors import DiskFullError, IOFailedError
from tiering.place import folder_beside, free_bytes

PROBE_NBYTES = 4096


class KvikioEngine:
    """Host memory to files through kvikio. Raises ImportError if it is made without kvikio: `probe` first."""

    name = "kvikio"

    def __init__(self, threads: int = 8) -> None:
        import kvikio

        self._open = kvikio.CuFile
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="io")

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pool.submit(self._transfer, "read", extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pool.submit(self._transfer, "write", extent, view)

    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        assert view.nbytes == extent.nbytes, f"{extent.block}: a view of {view.nbytes} bytes for {extent.nbytes}"
        if extent.nbytes == 0:
            return 0
        host = np.frombuffer(view, dtype=np.uint8)
        try:
            file = self._file(extent.path)
            start = file.pread if verb == "read" else file.pwrite
            moved = int(start(host, size=extent.nbytes, file_offset=extent.offset).get())  # waits for this transfer
        except (OSError, RuntimeError) as error:
            where = f"block {extent.block}: {verb} of {extent.nbytes} bytes at offset {extent.offset} of {extent.path}"
            if "No space left" in str(error):
                raise DiskFullError(
                    f"{where}: no room: wanted {extent.nbytes} bytes, {free_bytes(extent.path)} bytes "
                    f"are free. Fix: make room, then resume from the last commit."
                ) from error
            raise IOFailedError(
                f"{where} failed: {_plain(error)}. Fix: check the disk (dmesg), then resume from the last commit."
            ) from error
        if moved != extent.nbytes:
            raise short_transfer(verb, extent, moved)
        return moved

    def _file(self, path: Path) -> Any:
        with self._lock:
            if path not in self._files:
                # "r+" never creates; a store on a read-only medium can still be read
                self._files[path] = self._open(path, "r+" if os.access(path, os.W_OK) else "r")
            return self._files[path]

    def sync(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                os.fdatasync(self._file(path).fileno())
            except (OSError, RuntimeError) as error:
                raise IOFailedError(
                    f"{path}: flushing to the disk failed: {_plain(error)}. "
                    f"Fix: check the disk (dmesg), then resume from the last commit."
                ) from error

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def _plain(error: BaseException) -> str:
    """kvikio's message without the path of its source file, on one line."""
    return re.sub(r"^KvikIO failure at: \S+: ", "", " ".join(str(error).split()))
