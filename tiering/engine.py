"""What an I/O engine is: whole transfers between files and memory, or a typed error.

Scope: `Extent`, the `IOEngine` protocol, and the errors that every engine raises for the same faults.
Not here: the engines (`posix.py`, `gds.py`), the choice between them (`choose.py`), where a block's bytes are
(`store.py`), when they move (`pipeline.py`).

Invariants: I6 (a short transfer is an error). An engine never creates a file and never makes a store file longer.
"""

import errno
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeGuard

import numpy as np

from tiering.errors import DamagedStateError, DiskFullError, IOFailedError
from tiering.place import free_bytes
from tiering.traffic import Traffic

Verb = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A byte range of a file; `block` names it in errors. The trainer's extents are multiples of 4096."""

    path: Path
    offset: int
    nbytes: int
    block: str


class HostArray(Protocol):
    """Host memory that knows its shape and strides: a numpy array, or a torch tensor of the CPU."""

    def __array__(self, *args: Any, **kwargs: Any) -> "np.ndarray": ...


class DeviceArray(Protocol):
    """Memory of a device, flat and of bytes: a torch tensor there (uint8, one dimension), or whatever else has CUDA's
    array interface.
    """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


View = memoryview | HostArray | DeviceArray


def on_device(view: View) -> TypeGuard[DeviceArray]:
    """Does a view lie in the memory of a device?"""
    return hasattr(view, "__cuda_array_interface__")


class IOEngine(Protocol):
    """One future a request, which completes with the bytes moved: always `extent.nbytes`.

    The engine owns `view` from submission until the future completes: the caller neither reads, writes nor lends it
    in between. What is moved are the elements of `view` in their logical order, whatever its strides. The trainer's
    views are flat; others are copied on their way. After `close` a request is refused with `IOFailedError`.

    A view of device memory is flat bytes. An engine that cannot move it (`device_refusal` says why; empty where it can)
    refuses the request with `IOFailedError`. No stream is waited for: what the device still has to do with those bytes
    has to be over before the request, and the request before the device uses them.
    """

    name: str
    device_refusal: str

    def submit_read(self, extent: Extent, view: View) -> Future[int]: ...

    def submit_write(self, extent: Extent, view: View) -> Future[int]: ...

    def register(self, view: View) -> str:
        """Tells the engine of memory that many requests will use; in one line whether that helps, empty where there is
        nothing to tell. Never an error.
        """

    def deregister(self, view: View) -> None:
        """Before the memory goes; harmless where it is not registered. `close` does it for what is left."""

    def traffic(self) -> Traffic:
        """What has been moved so far; after `close` too."""

    def sync(self, paths: Iterable[Path]) -> None:
        """Makes completed writes to these files durable; the caller has waited for their futures."""

    def close(self) -> None:
        """Waits for every outstanding request, then closes the files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@contextmanager
def flat(verb: Verb, extent: Extent, view: View) -> Iterator[memoryview]:
    """The bytes of `view`, one after the other: its own memory where they lie so, a copy otherwise, which is brought
    back after a read.
    """
    array: np.ndarray = np.asarray(view)
    assert array.nbytes == extent.nbytes, f"{extent.block}: a view of {array.nbytes} bytes for {extent.nbytes}"
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
        return
    copy = np.ascontiguousarray(array)
    yield copy.reshape(-1).view(np.uint8).data
    if verb == "read":
        np.copyto(array, copy)


def closed_engine(verb: Verb, extent: Extent) -> IOFailedError:
    """What a request meets that comes after `close`."""
    return IOFailedError(
        f"block {extent.block}: {verb} of {extent.nbytes} bytes at offset {extent.offset} of {extent.path}: "
        f"the I/O engine is closed. Fix: open the store anew."
    )


def refused_device(name: str, why: str, verb: Verb, extent: Extent) -> IOFailedError:
    """What a request for device memory meets in an engine that cannot move it."""
    return IOFailedError(
        f"block {extent.block}: {verb} of {extent.nbytes} bytes at offset {extent.offset} of {extent.path}: the {name} "
        f"engine moves no memory of a device: {why}. Fix: by way of HOST, or engine kvikio where it can "
        f"(megatrain doctor)."
    )


def failed_sync(path: Path, reason: str) -> IOFailedError:
    """What a person reads when a file could not be made durable."""
    return IOFailedError(
        f"{path}: flushing to the disk failed: {reason}. Fix: check the disk (dmesg), then resume from the last commit."
    )


def deleted_file(path: Path) -> DamagedStateError:
    """What a person reads when a file that is open was deleted: a commit would name what nobody can open any more."""
    return DamagedStateError(
        f"{path}: the file was deleted while it was in use, so it cannot be part of a commit. "
        f"Fix: find out who deleted it, then resume from the last commit."
    )


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
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "raise the limit of a file's size (ulimit -f)" if error.errno == errno.EFBIG else "make room"
        return DiskFullError(
            f"{where}: {error.strerror}: wanted {extent.nbytes} bytes, {free_bytes(extent.path)} bytes are free. "
            f"Fix: {fix}, then resume from the last commit."
        )
    if error.errno == errno.ENOENT and not extent.path.parent.is_dir():
        return IOFailedError(
            f"{where}: its folder is gone: the drive has vanished, or somebody moved it. "
            f"Fix: bring {extent.path.parent} back, then resume from the last commit."
        )
    if error.errno == errno.ENOENT:
        return DamagedStateError(
            f"{where}: the file is missing: wanted {extent.nbytes} bytes, found 0. Fix: resume from an earlier commit."
        )
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    refused = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    fix = "make it writable (a disk with faults is remounted read-only: dmesg)" if refused else "check the disk (dmesg)"
    return IOFailedError(f"{where} failed: {name} ({error.strerror}). Fix: {fix}, then resume from the last commit.")
