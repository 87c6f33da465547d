"""All work on the computing device: another device is another implementation, not another code path.

Scope: the protocols `Lanes` and `Event`; `InlineLanes`, where DEVICE is HOST; `lent`, a view of a device's arena.
Not here: when a copy or an op is issued and for what it waits (`pipeline.py`), CUDA (`cuda.py`).

A device with memory of its own does what it is given later, in streams: one for copies to it, one for copies from it,
one for updates, one for computing. What is issued on a stream waits there for the events that it is given, and never
on the host.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tiering.arena import Arena
from tiering.workload import Lane


class Event(Protocol):
    """The end of one copy or one op. begin_s, end_s: when the device did it, in seconds of `time.perf_counter`; known
    once `synchronize` has returned.
    """

    begin_s: float
    end_s: float

    def synchronize(self) -> None:
        """Return when it has happened. Called by one thread a lane, in the order of issue. Raises what failed."""
        ...


class Lanes(Protocol):
    """Copies and computing of one device. own_memory: False where DEVICE is HOST; there are no copies then."""

    device: torch.device
    own_memory: bool

    def open(self, host: Arena, device_bytes: int) -> None:
        """Take the arena of DEVICE, in one piece, and make `host` fit for copies. Raises `TieringError`."""
        ...

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        """Bytes [lo, hi) of the arena of DEVICE as a flat uint8 tensor; no copy."""
        ...

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        """Issue a copy in lane h2d or d2h that begins after these events. Called by any thread, by one at a time."""
        ...

    def update(self, work: Callable[[], None], operands: Sequence[torch.Tensor], after: Sequence[Event]) -> Event:
        """Issue an update that begins after these events: what `work` issues. It touches `operands` and, besides
        them, only what was computed before them. Called by any thread, by one at a time.
        """
        ...

    def begin_compute(self, after: Sequence[Event]) -> None:
        """What the calling thread issues from here on begins after these events."""
        ...

    def end_compute(self) -> Event | None:
        """The end of all that the calling thread has issued since `begin_compute`; None if it is over already."""
        ...

    def close(self) -> None:
        """Wait for the device and give back what `open` took; twice is harmless."""
        ...


class InlineLanes:
    """DEVICE is HOST: ops compute on HOST itself, at once, and schedules have no copies."""

    device = torch.device("cpu")
    own_memory = False

    def open(self, host: Arena, device_bytes: int) -> None:
        assert device_bytes == 0, f"{device_bytes} bytes of DEVICE, which is HOST here"

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        raise AssertionError(f"[{lo}, {hi}) of DEVICE, which is HOST here")

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        raise AssertionError(f"a copy in {lane}, where DEVICE is HOST")

    def update(self, work: Callable[[], None], operands: Sequence[torch.Tensor], after: Sequence[Event]) -> Event:
        raise AssertionError("an update on a device, where DEVICE is HOST")

    def begin_compute(self, after: Sequence[Event]) -> None:
        assert not after, "an event of a device, where DEVICE is HOST"

    def end_compute(self) -> None:
        return None

    def close(self) -> None:
        return None


def lent(arena: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Bytes [lo, hi) of an arena as a tensor with a version of its own: autograd would take a write to any other view
    for a change of this one.
    """
    assert 0 <= lo <= hi <= arena.numel(), f"[{lo}, {hi}) is not inside an arena of {arena.numel()} bytes"
    return arena[lo:hi].data
