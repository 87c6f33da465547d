"""A stand-in for a device with streams: copies happen late and out of order, as far as what they wait for allows.

Scope: `OutOfOrderLanes`, in which a missing dependency shows as wrong bytes; `DirectEngine`, which reads into them.
Not here: tests. Nothing here knows a schedule: an order that nobody declared is not kept.

A copy that is issued is *pending*. It *begins* as soon as the events that it was given have happened: from then on its
target is poison, as a real device may have written any part of it. It *happens* as late as can be: when an op begins
after it, when something that happens has to come after it, or when the host has nothing else to do and waits. It takes
its source when it begins or when it happens, by lot.

An update that is issued is pending too. It takes what is there when it begins, and leaves poison until it happens, or
when it happens, by lot.

An op computes at once, between `begin_compute` and `end_compute`: a host cannot do it later. But by lot it happens
later. Until then a copy to bytes that were lent to it, or from bytes that it wrote, brings poison: on a real device the
op could still be waiting. What could happen next is drawn by lot too, from a seed.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from tiering.arena import Arena
from tiering.engine import Extent, View
from tiering.errors import IOFailedError
from tiering.lanes import Event, lent
from tiering.posix import PosixEngine
from tiering.workload import Lane

POISON = 0xFF
"""Four of these are a NaN."""
QUIET_S = 0.002
"""The host is taken to wait for the device when it has issued nothing for so long."""
FORGOTTEN_S = 0.5
"""An op that has been open for so long is taken to have failed."""


class StandInEvent:
    """A copy or an op of the stand-in. See `lanes.Event`."""

    def __init__(self, lanes: "OutOfOrderLanes", after: Sequence["StandInEvent"]) -> None:
        self.lanes = lanes
        self.after = tuple(after)
        self.has_begun = False
        self.has_happened = False
        self.begin_s = self.end_s = 0.0

    def synchronize(self) -> None:
        self.lanes.wait_for(self)

    def happen(self) -> None:
        self.has_happened = True
        self.end_s = time.perf_counter()


class _Op(StandInEvent):
    """lent: bytes of the device, each with what was in them. written: those that have changed."""

    def __init__(self, lanes: "OutOfOrderLanes", after: Sequence[StandInEvent]) -> None:
        super().__init__(lanes, after)
        self.lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: list[torch.Tensor] = []

    def is_left(self) -> None:
        self.written = [now for now, before in self.lent if not torch.equal(now, before)]
        self.has_begun = True


class _Copy(StandInEvent):
    def __init__(
        self, lanes: "OutOfOrderLanes", after: Sequence[StandInEvent], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        super().__init__(lanes, after)
        self.source = source
        self.target = target
        self.taken: torch.Tensor | None = None

    def begin(self, ops: Sequence[_Op], *, takes_source: bool) -> None:
        """ops: those that have not happened."""
        self.begin_s = time.perf_counter()
        self.has_begun = True
        if any(_share(self.target, lent) for op in ops for lent, _ in op.lent):
            self.taken = torch.full_like(self.source, POISON)
        elif takes_source:
            self._take(ops)
        self.target.fill_(POISON)

    def end(self, ops: Sequence[_Op]) -> None:
        if self.taken is None:
            self._take(ops)
        assert self.taken is not None
        self.target.copy_(self.taken)
        self.happen()

    def _take(self, ops: Sequence[_Op]) -> None:
        early = any(_share(self.source, written) for op in ops for written in op.written)
        self.taken = torch.full_like(self.source, POISON) if early else self.source.clone()


class _Update(StandInEvent):
    """work: changes operands in place."""

    def __init__(
        self,
        lanes: "OutOfOrderLanes",
        after: Sequence[StandInEvent],
        work: Callable[[], None],
        operands: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(lanes, after)
        self.work = work
        self.operands = operands
        self.taken: list[torch.Tensor] | None = None
        self.spoiled = False

    def begin(self, ops: Sequence[_Op], *, takes_source: bool) -> None:
        self.begin_s = time.perf_counter()
        self.has_begun = True
        self._look_at(ops)
        if takes_source:
            self.taken = [operand.clone() for operand in self.operands]
            for operand in self.operands:
                operand.fill_(POISON)

    def end(self, ops: Sequence[_Op]) -> None:
        if self.taken is None:
            self._look_at(ops)
        for operand, held in zip(self.operands, self.taken or (), strict=self.taken is not None):
            operand.copy_(held)
        self.work()
        for operand in self.operands if self.spoiled else ():
            operand.fill_(POISON)
        self.happen()

    def _look_at(self, ops: Sequence[_Op]) -> None:
        used = [lent for op in ops for lent, _ in op.lent]
        self.spoiled = self.spoiled or any(_share(operand, lent) for operand in self.operands for lent in used)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if flat tensors of bytes share some of them."""
    return one.data_ptr() < other.data_ptr() + other.numel() and other.data_ptr() < one.data_ptr() + one.numel()


class DirectEngine(PosixEngine):
    """Reads into memory of `lanes` too, but not into bytes that the device still uses. read_bytes: so many were read
    into it.
    """

    device_refusal = ""

    def __init__(self, lanes: "OutOfOrderLanes") -> None:
        super().__init__()
        self.lanes = lanes
        self.read_bytes = 0

    def submit_read(self, extent: Extent, view: View) -> "Future[int]":
        if isinstance(view, torch.Tensor):
            self.read_bytes += extent.nbytes
            if self.lanes.is_used(view):
                early: Future[int] = Future()
                early.set_exception(IOFailedError(f"{extent.block} was read into bytes that the device still uses"))
                return early
        return super().submit_read(extent, view)


class OutOfOrderLanes:
    """See `lanes.Lanes`. copies, updates: so many were issued. top: the highest byte of the arena that was lent."""

    device = torch.device("cpu")
    own_memory = True

    def __init__(self, seed: int = 0) -> None:
        self.copies = 0
        self.updates = 0
        self.top = 0
        self.host: Arena | None = None
        self.arena: torch.Tensor | None = None
        self._random = random.Random(seed)
        self._late_ops = 1.0 if seed % 4 < 2 else 0.5  # the share of ops that happen later than they are computed
        self._early_copies = 0.2 if seed % 2 else 0.0  # of copies that happen whenever something else does
        self._changed = threading.Condition()
        self._pending: list[_Copy | _Update] = []
        self._ops: list[_Op] = []  # those that have not happened, in the order in which they were entered
        self._op: _Op | None = None  # the one that is computing
        self._computing = 0  # its thread
        self._issued_s = time.perf_counter()

    def open(self, host: Arena, device_bytes: int) -> None:
        self.host = host
        self.arena = torch.full((device_bytes,), POISON, dtype=torch.uint8)

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        assert self.arena is not None, "the lanes are not open"
        self.top = max(self.top, hi)
        view = lent(self.arena, lo, hi)
        if self._op is not None and threading.get_ident() == self._computing:
            self._op.lent.append((view, view.clone()))
        return view

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        assert (self._is_here(source), self._is_here(target)) == (lane == "d2h", lane == "h2d"), f"a copy in {lane}"
        assert source.numel() == target.numel(), f"{source.numel()} bytes to {target.numel()}"
        with self._changed:
            self.copies += 1
            if self._op is not None:  # what its own thread copies meanwhile was not lent to it
                self._op.lent = [pair for pair in self._op.lent if pair[0] is not source and pair[0] is not target]
            event = _Copy(self, self._known(after), source, target)
            self._pending.append(event)
            self._go_on()
            return event

    def update(self, work: Callable[[], None], operands: Sequence[torch.Tensor], after: Sequence[Event]) -> Event:
        assert all(self._is_here(operand) for operand in operands), "an update of bytes of HOST"
        with self._changed:
            self.updates += 1
            if self._op is not None:  # see `copy`
                self._op.lent = [pair for pair in self._op.lent if not any(pair[0] is operand for operand in operands)]
            event = _Update(self, self._known(after), work, operands)
            self._pending.append(event)
            self._go_on()
            return event

    def is_used(self, view: torch.Tensor) -> bool:
        """True for bytes that something still uses: a copy, an update or an op that has not happened."""
        with self._changed:
            if self._op is not None:  # see `copy`; a part of what was lent
                self._op.lent = [pair for pair in self._op.lent if pair[0] is not view._base]
            used = [lent for op in self._ops for lent, _ in op.lent]
            for event in self._pending:
                used += [event.source, event.target] if isinstance(event, _Copy) else event.operands
            return any(_share(view, one) for one in used)

    def begin_compute(self, after: Sequence[Event]) -> None:
        with self._changed:
            assert self._op is None, "an op begins inside another one"
            self._op, self._computing = _Op(self, self._known(after)), threading.get_ident()
            self._ops.append(self._op)
            for event in self._drawn(self._op.after):
                if isinstance(event, _Copy | _Update):  # ops are entered in the order of their stream
                    self._force(event)
            self._go_on()
            self._op.begin_s = time.perf_counter()

    def end_compute(self) -> Event:
        with self._changed:
            event, self._op = self._op, None
            assert event is not None, "no op has begun"
            event.is_left()
            if self._random.random() >= self._late_ops:
                self._force(event)
            self._go_on()
            return event

    def wait_for(self, event: StandInEvent) -> None:
        """Let something happen whenever the host is quiet, until `event` has."""
        with self._changed:
            while not event.has_happened:
                quiet_s = time.perf_counter() - self._issued_s
                if quiet_s < (QUIET_S if self._op is None else FORGOTTEN_S):
                    self._changed.wait(QUIET_S)
                    continue
                copies = [copy for copy in self._pending if copy.has_begun]
                possible = copies if copies and self._late_ops == 1.0 else [*copies, *self._ops[:1]]
                self._force(self._random.choice(possible))
                self._go_on()

    def close(self) -> None:
        with self._changed:
            assert not self._pending, f"{len(self._pending)} copies and updates were issued and not waited for"
        self.arena = None

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """True for bytes of the arena of DEVICE, False for those of HOST."""
        assert self.arena is not None and self.host is not None, "the lanes are not open"
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), tensor.shape
        base, host = self.arena.data_ptr(), self.host.tensor(0, 1).data_ptr()
        here = base <= tensor.data_ptr() < base + self.arena.numel()
        assert here or host <= tensor.data_ptr() < host + self.host.nbytes, "bytes of neither arena"
        return here

    def _known(self, after: Sequence[Event]) -> list[StandInEvent]:
        known = [event for event in after if isinstance(event, StandInEvent)]
        assert len(known) == len(after), f"events of other lanes: {after}"
        return known

    def _drawn(self, events: Sequence[StandInEvent]) -> list[StandInEvent]:
        return self._random.sample(list(events), len(events))

    def _go_on(self) -> None:
        """Begin what may begin. The lock is held."""
        self._issued_s = time.perf_counter()
        for copy in self._pending.copy():
            if not copy.has_begun and all(event.has_happened for event in copy.after):
                copy.begin(self._ops, takes_source=self._random.random() < 0.5)
            if copy.has_begun and self._random.random() < self._early_copies:
                self._force(copy)
        self._changed.notify_all()

    def _force(self, event: StandInEvent) -> None:
        """Let `event` happen now, and before it all that it comes after; nothing else."""
        if event.has_happened:
            return
        before = self._ops[: self._ops.index(event)] if isinstance(event, _Op) else self._drawn(event.after)
        for earlier in before:
            self._force(earlier)
        if isinstance(event, _Op):
            assert event.has_begun, "a copy comes after an op that has not been left"
            self._ops.remove(event)
            event.happen()
            return
        assert isinstance(event, _Copy | _Update)
        if not event.has_begun:
            event.begin(self._ops, takes_source=False)
        event.end(self._ops)
        self._pending.remove(event)
