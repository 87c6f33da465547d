"""The I/O engine on kvikio, which uses GPUDirect Storage where the driver has it.

Scope: `KvikioEngine` (the `IOEngine` protocol for RAM and for device memory), `probe` and `probe_device`, real
transfers that say whether it works here. All calls of kvikio are in this file.
Not here: the choice between engines (`choose.py`), the POSIX one (`posix.py`), threads and futures (`pooled.py`), which
settings are best (`gds_settings.py`, `gds_trial.py`).

State of proof: on machines without CUDA kvikio 26.10 imports, takes its settings and opens files, and every transfer
fails for want of libcuda.so.1. The transfers below follow its interface and have met a stand-in only.
"""

import errno
import importlib
import os
import re
import tempfile
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiering.engine import DeviceArray, Extent, Verb, View, deleted_file, failed_sync, failed_transfer, on_device
from tiering.errors import IOFailedError
from tiering.gds_settings import ASSUMED, GdsSettings
from tiering.open_files import OpenFiles
from tiering.place import filesystem_of, folder_beside
from tiering.pooled import MOST_THREADS, PooledEngine
from tiering.traffic import Traffic
from tiering.watchdog import Watchdog

if TYPE_CHECKING:  # torch takes seconds to import, and host memory needs none of it
    import torch

PROBE_NBYTES = 4096
DEVICE_PROBE_NBYTES = 1 << 20
"""Far above kvikio's `gds_threshold` (16 KiB), below which device memory goes through RAM in any case."""
MAX_OPEN_FILES = 128
"""kvikio holds two descriptors a file."""
TOLD = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EINVAL, errno.ENOENT, errno.EROFS, errno.EACCES)
"""What kvikio tells in words where the system has a number."""
END = "EOF"
"""In what kvikio says where a file ends before a read does."""
OTHER = "kvikio read back other bytes than it wrote"
COMPAT = "compat"
"""The path of device memory through a buffer in RAM."""
DEVICE_PATHS = ("gds", COMPAT, "uncounted")
FAULTS = (OSError, RuntimeError, ValueError, TypeError, AttributeError)
"""What kvikio raises; the last ones: another version's names and arguments."""


class _File:
    """kvikio's file. writable: False on a medium that can only be read."""

    __slots__ = ("cu", "writable")

    def __init__(self, cu: Any, *, writable: bool) -> None:
        self.cu = cu
        self.writable = writable


class KvikioEngine(PooledEngine):
    """RAM and device memory to files through kvikio. Raises ImportError if it is made without kvikio: `probe` first.

    kvikio waits for the device's default stream before it moves memory of the device. Its settings are of the process:
    the engine that was made last sets them.
    """

    name = "kvikio"
    device_refusal = ""

    def __init__(
        self,
        threads: int = MOST_THREADS,
        *,
        watchdog: Watchdog | None = None,
        settings: GdsSettings = ASSUMED,
        device_refusal: str = "",
    ) -> None:
        """device_refusal: why memory of the device is not moved here, where a probe has shown that."""
        import kvikio

        super().__init__(threads, watchdog)
        self._kvikio = kvikio
        self._open = kvikio.CuFile
        self._files = OpenFiles(self._opened, lambda file: file.cu.close(), lambda: MAX_OPEN_FILES)
        self._warned = False
        self._registered: dict[int, DeviceArray] = {}
        self._lock = threading.Lock()
        self._monitor: Any = None
        self._gds_bytes: int | None = None
        self.device_refusal = device_refusal
        self.use(settings)
        with suppress(*FAULTS):  # a version that does not count
            self._monitor = kvikio.SummaryMonitor()

    def use(self, settings: GdsSettings) -> bool:
        """From now on; nothing may be in progress. False where this version of kvikio cannot be told."""
        try:
            defaults = _module("defaults")
            defaults.set({"num_threads": settings.threads, "task_size": settings.task_bytes})
        except (ImportError, KeyError, *FAULTS):
            return False
        for name in ("auto_direct_io_read", "auto_direct_io_write"):  # without them RAM goes through the page cache
            with suppress(KeyError, *FAULTS):
                defaults.set({name: True})
        return True

    def register(self, view: View) -> str:
        """See `IOEngine`. kvikio registers the whole allocation that `view` lies in, and moves RAM with plain calls."""
        if not on_device(view):
            return ""
        size = f"device memory of {view.nbytes / (1 << 20):.1f} MiB"
        if _compat():
            return f"{size}: not registered with cuFile, kvikio is in its compatibility mode"
        try:
            self._kvikio.memory_register(view)
        except FAULTS as error:
            return f"{size}: not registered with cuFile, {_plain(error)}; its own buffers are in between"
        with self._lock:
            self._registered[_address(view)] = view
        return f"{size}: registered with cuFile"

    def deregister(self, view: View) -> None:
        if on_device(view):
            with self._lock:
                known = self._registered.pop(_address(view), None)
            if known is not None:
                with suppress(*FAULTS):
                    self._kvikio.memory_deregister(known)

    def traffic(self) -> Traffic:
        if self._monitor is not None:
            with suppress(KeyError, *FAULTS):
                self._gds_bytes = int(self._monitor.get().by_backend["GDS"]["bytes_transferred"])
        return self._moved.traffic(self._gds_bytes)

    def _transfer(self, verb: Verb, extent: Extent, view: memoryview) -> int:
        return self._moved_by_kvikio(verb, extent, np.frombuffer(view, dtype=np.uint8))

    def _device_transfer(self, verb: Verb, extent: Extent, view: DeviceArray) -> int:
        return self._moved_by_kvikio(verb, extent, view)

    def _moved_by_kvikio(self, verb: Verb, extent: Extent, buffer: Any) -> int:
        """buffer: of bytes, in one dimension."""
        moved = 0
        try:
            with self._files.lease(extent.path) as file:
                if verb == "write" and not file.writable:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                start = file.cu.pread if verb == "read" else file.cu.pwrite
                while moved < extent.nbytes:
                    left, at = extent.nbytes - moved, extent.offset + moved
                    try:
                        done = int(start(buffer[moved:], size=left, file_offset=at).get())  # waits for this transfer
                    except RuntimeError as error:
                        if verb == "read" and END in str(error):
                            return _there(extent)
                        raise
                    moved += done
                    if done == 0:
                        break
        except FAULTS as error:
            raise failed_transfer(verb, extent, _numbered(error, extent.path)) from error
        return moved

    def _opened(self, path: Path) -> _File:
        writable = os.access(path, os.W_OK)
        # "r+" never creates; a store on a read-only medium can still be read
        cu = self._open(path, "r+" if writable or not path.exists() else "r")
        with suppress(*FAULTS):
            if not cu.is_direct_io_supported() and not self._warned:
                self._warned = True
                fs = filesystem_of(path)
                warnings.warn(
                    f"{path}: {fs.fs_type} at {fs.mount_point} refuses direct I/O; using the page cache, which takes "
                    f"RAM beyond the budget and hides the disk's speed",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _File(cu, writable=writable)

    def _sync_one(self, path: Path) -> None:
        try:
            with self._files.lease(path) as file:
                fd = file.cu.fileno()
                os.fdatasync(fd)
                if os.fstat(fd).st_nlink == 0:
                    raise deleted_file(path)
        except (OSError, RuntimeError) as error:
            raise failed_sync(path, _plain(error)) from error

    def _close_files(self) -> None:
        for view in list(self._registered.values()):
            self.deregister(view)
        self._files.close()
        self.traffic()
        if self._monitor is not None:
            with suppress(*FAULTS):
                self._monitor.stop()
            self._monitor = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """What a transfer of device memory showed. refusal: why it does not work, empty where it does. path: how the bytes
    went, of the names of `Traffic.by_path`.
    """

    refusal: str = ""
    path: str = ""

    def line(self) -> str:
        if self.refusal:
            return f"device memory: not, {self.refusal}"
        how = {
            "gds": f"by GPUDirect Storage ({driver_line()})",
            "compat": "through a buffer in RAM (kvikio's compatibility mode)",
        }
        return f"device memory: {how.get(self.path, 'it works; this version of kvikio does not say by which path')}"


def probe(path: Path) -> str | None:
    """None if kvikio moves RAM to a file below `path` and back, otherwise the reason why not, in one line."""
    try:
        import kvikio  # noqa: F401
    except ImportError as error:
        return f"kvikio is not installed ({error}): pip install 'megatrain[gds]'"
    except Exception as error:  # a native library that does not match the machine can raise anything
        return f"kvikio cannot be imported ({type(error).__name__}: {_plain(error)})"
    payload = os.urandom(PROBE_NBYTES)
    page = bytearray(payload)
    try:
        _there_and_back(path, memoryview(bytearray(payload)), memoryview(page), PROBE_NBYTES)
    except (IOFailedError, *FAULTS) as error:
        return _plain(error.__cause__ or error)
    return None if page == payload else OTHER


def probe_device(path: Path, device: "torch.device") -> DeviceProbe:
    """The same for memory of `device`. Only where `probe` works: it says whether kvikio is there at all."""
    if device.type != "cuda":
        return DeviceProbe(refusal=f"kvikio knows no device of the type {device.type}")
    payload = os.urandom(DEVICE_PROBE_NBYTES)
    try:
        back = _to_device(bytes(len(payload)), device)
        traffic = _there_and_back(path, _to_device(payload, device), back, DEVICE_PROBE_NBYTES)
        same = _from_device(back) == payload
    except (IOFailedError, *FAULTS) as error:
        return DeviceProbe(refusal=_plain(error.__cause__ or error))
    if not same:
        return DeviceProbe(refusal=OTHER)
    return DeviceProbe(path=max(DEVICE_PATHS, key=lambda name: traffic.by_path().get(name, 0)))


def driver_line() -> str:
    """What stands behind cuFile, as far as it can be told. Without its driver cuFile may use PCI peer-to-peer copies of
    the kernel, or go through RAM itself.
    """
    with suppress(ImportError, KeyError, *FAULTS):
        ask = _module("cufile_driver").get
        if ask("is_gds_available"):
            return f"nvidia-fs {ask('major_version')}.{ask('minor_version')}"
    return "cuFile without the nvidia-fs driver: peer-to-peer, or by way of RAM"


def _there_and_back(path: Path, sent: View, back: View, nbytes: int) -> Traffic:
    """A new file is filled from `sent` and read into `back`. Raises what kvikio raises, and `IOFailedError`."""
    with (
        tempfile.NamedTemporaryFile(dir=folder_beside(path), prefix=".probe-") as file,
        warnings.catch_warnings(),
        KvikioEngine(threads=1) as engine,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        file.truncate(nbytes)
        extent = Extent(path=Path(file.name), offset=0, nbytes=nbytes, block="probe")
        engine.submit_write(extent, sent).result()  # waits for the probe's write
        engine.submit_read(extent, back).result()  # waits for the probe's read
        return engine.traffic()


def _to_device(payload: bytes, device: "torch.device") -> Any:
    """A copy of `payload` there, whole when this returns."""
    import torch

    there = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    torch.cuda.synchronize(device)
    return there


def _from_device(there: Any) -> bytes:
    return there.cpu().numpy().tobytes()


def _module(name: str) -> Any:
    """A module of kvikio that it does not import by itself."""
    return importlib.import_module(f"kvikio.{name}")


def _compat() -> bool:
    """Is kvikio in its compatibility mode, for all files? False where it cannot be asked."""
    with suppress(ImportError, *FAULTS):
        return bool(_module("defaults").is_compat_mode_preferred())
    return False


def _address(view: DeviceArray) -> int:
    return int(view.__cuda_array_interface__["data"][0])


def _there(extent: Extent) -> int:
    """Bytes of `extent` that its file has."""
    return max(0, min(extent.nbytes, os.stat(extent.path).st_size - extent.offset))


def _numbered(error: Exception, path: Path) -> OSError:
    """The error as the system would have raised it, as far as its words tell. It may be a library that is missing, and
    not the file at `path`.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error
    text = _plain(error)
    number = next((code for code in TOLD if os.strerror(code) in text), 0)
    return OSError(0 if number == errno.ENOENT and path.exists() else number, text)


def _plain(error: BaseException) -> str:
    """kvikio's message without the path of its source file, on one line."""
    return re.sub(r"^KvikIO failure at: \S+: ", "", " ".join(str(error).split()))
