"""What an I/O engine is: whole transfers between files and memory, or a typed error.

Scope: `Extent`, the `IOEngine` protocol, and the errors that every engine raises for the same faults.
Not here: the engines (`posix.py`, `gds.py`), the choice between them (`choose.py`), where a block's bytes are
(`store.py`), when they move (`pipeline.py`).

Invariants: I6 (a short transfer is an error). An engine never creates a file and never makes a store file longer.
"""

import errno
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from tiering.errors import DamagedStateError, DiskFullError, IOFailedError
from tiering.place import free_bytes

Verb = Literal["read", "write"]


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
