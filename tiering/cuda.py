"""A CUDA (or HIP) device as lanes: two streams for copies, one for updates, one for computing, one allocation.

Scope: `CudaLanes`; locking the arena of HOST for copies, or what it costs not to, on the NUMA node of the device; times
of the device in the clock of the host.
Not here: what is issued when (`pipeline.py`), how much may be locked (`pinning.py`), which node (`numa.py`), what an op
computes (the caller).

Computing has a stream of its own, which is the current one of the thread that opened the lanes for as long as they are
open: kvikio waits for the default stream before it moves memory of the device, and nothing is on that.

Updates have a stream of their own: on that of computing, the next op would wait for the moments of the one before,
which are still on their way. torch's allocator gives memory back to the stream that it was taken on. What an update
takes for itself it takes and gives back on the stream of updates, so that nothing of it is in use on two.

Nothing here touches the driver before a `CudaLanes` is made.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from tiering.arena import Arena
from tiering.errors import BudgetError, DeviceError
from tiering.lanes import Event, lent
from tiering.limits import memory_limit
from tiering.numa import Node, device_node, memory_nodes, placed
from tiering.pin_probe import refusal
from tiering.pinning import PinFacts, pin_budget
from tiering.workload import Lane

MiB = 1 << 20
RESET_S = 10.0
"""The device's clock drifts from the host's, and milliseconds in 32 bits lose their microseconds in minutes."""
MOSTLY = 0.95
"""From this share on an arena is said to lie on a node."""
PAGEABLE = "copies go through a buffer of the driver: they are slower, and the host may wait for them"


class _Clock:
    """Pairs of moments, on the device and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # nothing else is on it, so that an event on it happens at once
        self._lock = threading.Lock()
        self.base = self._now()

    def _now(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        before_s = time.perf_counter()
        event.record(self._stream)
        event.synchronize()
        return event, (before_s + time.perf_counter()) / 2

    def keep(self) -> None:
        """Take a new pair where the last one is old. Called by any thread."""
        with self._lock:
            if time.perf_counter() - self.base[1] > RESET_S:
                self.base = self._now()


class CudaEvent:
    """Work on a stream, between two events of the driver. See `lanes.Event`."""

    def __init__(self, clock: _Clock, stream: torch.cuda.Stream) -> None:
        self._clock = clock
        self._base = clock.base  # older than what is timed against it
        self._stream = stream
        self._begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)  # the waiting thread takes no processor
        self.begin_s = self.end_s = 0.0
        self._begin.record(stream)

    def ends(self) -> None:
        """All of the work has been issued."""
        self.end.record(self._stream)

    def synchronize(self) -> None:
        self.end.synchronize()
        base, base_s = self._base
        self.begin_s = base_s + base.elapsed_time(self._begin) / 1e3
        self.end_s = base_s + base.elapsed_time(self.end) / 1e3
        self._clock.keep()


class CudaLanes:
    """See `lanes.Lanes`. pin_line: once open, one line on whether the arena of HOST is locked, and what that costs.
    node_line: on which NUMA node it lies; empty on a machine with one.
    """

    own_memory = True

    def __init__(self, device_index: int = 0, *, pin_limit_bytes: int | None = None) -> None:
        """pin_limit_bytes: of HOST may be locked, where a person knows better. Raises `DeviceError` if there is no such
        device.
        """
        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            why = f"built for {built}, it finds none" if built else "it is built for the CPU alone"
            raise DeviceError(
                f"torch {torch.__version__} sees no CUDA device ({why}). Fix: compute on the CPU, or install a torch "
                f"that is built for the device, and its driver (nvidia-smi shows it)."
            )
        count = torch.cuda.device_count()
        if not 0 <= device_index < count:
            raise DeviceError(f"there is no CUDA device {device_index}, torch sees {count}. Fix: 0 to {count - 1}.")
        self.device = torch.device("cuda", device_index)
        self.pin_line = self.node_line = ""
        self._pin_limit_bytes = pin_limit_bytes
        self._host: Arena | None = None
        self._arena: torch.Tensor | None = None
        self._computing: CudaEvent | None = None
        self._before: torch.cuda.Stream | None = None
        self._near: int | None = None

    def open(self, host: Arena, device_bytes: int) -> None:
        """See `lanes.Lanes`. By the thread that will compute. Raises `BudgetError` where the device has no room for its
        arena.
        """
        try:
            self._arena = torch.empty(device_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            raise BudgetError(
                f"DEVICE needs one allocation of {device_bytes} bytes; {torch.cuda.get_device_name(self.device)} has "
                f"{free_bytes} of {total_bytes} free. Fix: a smaller device budget, or end what else uses the device."
            ) from error
        self._host = host
        lanes: tuple[Lane, ...] = ("h2d", "d2h", "update", "compute")
        self._streams: dict[Lane, torch.cuda.Stream] = {lane: torch.cuda.Stream(self.device) for lane in lanes}
        with torch.cuda.device(self.device):
            self.pin_line = self._pin(host)
        torch.cuda.empty_cache()  # what the default stream has freed is of no use to another one
        torch.cuda.synchronize(self.device)  # whoever had the arena's memory before
        self._clock = _Clock(self.device)
        self._before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._streams["compute"])

    def _pin(self, host: Arena) -> str:
        facts = PinFacts(
            has_cuda=True,
            memory_bytes=memory_limit()[0],
            release=os.uname().release,
            limit_bytes=self._pin_limit_bytes,
        )
        budget = pin_budget(facts)
        why: str | None = None
        if host.nbytes > budget.ring_bytes:
            if budget.nbytes is None:
                why = refusal(host.nbytes)
            else:
                why = f"at most {budget.nbytes} bytes may be ({budget.why})"
        nodes = memory_nodes()
        self._place(host, nodes, locked=why is None)
        if why is None:
            why = host.pin()
            if why is not None:
                self._forget_error()
                self._place(host, nodes, locked=False)
            elif self._near is not None:
                share = host.share_on((self._near,))
                if share is not None and share < MOSTLY:
                    self.node_line += f"; only {share:.0%} of it lies there"
        size = f"HOST arena of {host.nbytes / MiB:.1f} MiB"
        return f"{size}: locked for copies" if why is None else f"{size}: not locked, {why}; {PAGEABLE}"

    def _place(self, host: Arena, nodes: Sequence[Node], *, locked: bool) -> None:
        """Asks for memory near the device, where there is a choice."""
        address = pci_address(self.device)
        near = None if address is None else device_node(address)
        placement = placed(nodes, near, host.nbytes, locked=locked)
        refused = host.place(placement)
        self._near = near if placement.nodes == (near,) and refused is None else None
        self.node_line = f"HOST arena: {placement.line}" if placement.line else ""
        if refused is not None:
            self.node_line += f". The kernel refuses that ({refused}): memory comes from where it is first touched"

    def _forget_error(self) -> None:
        """What the driver refused would be raised by the next kernel; that one takes the error with it."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        assert self._arena is not None, "the lanes are not open"
        return lent(self._arena, lo, hi)

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> CudaEvent:
        return self._issue(lane, lambda: target.copy_(source, non_blocking=True), after)

    def update(self, work: Callable[[], None], operands: Sequence[torch.Tensor], after: Sequence[Event]) -> CudaEvent:
        return self._issue("update", work, after)

    def _issue(self, lane: Lane, work: Callable[[], object], after: Sequence[Event]) -> CudaEvent:
        stream = self._streams[lane]
        _wait(stream, after)
        event = CudaEvent(self._clock, stream)
        with torch.cuda.stream(stream):
            work()
        event.ends()
        return event

    def begin_compute(self, after: Sequence[Event]) -> None:
        stream = self._streams["compute"]
        torch.cuda.set_stream(stream)  # others may have been opened since
        _wait(stream, after)
        self._computing = CudaEvent(self._clock, stream)

    def end_compute(self) -> CudaEvent:
        event, self._computing = self._computing, None
        assert event is not None, "no op has begun"
        event.ends()
        return event

    def close(self) -> None:
        if self._host is None:
            return
        with suppress(RuntimeError):  # a device that failed has been told of by then
            torch.cuda.synchronize(self.device)
        if self._before is not None:
            torch.cuda.set_stream(self._before)
        self._arena = self._before = None
        self._host.unpin()
        self._host = None


def pci_address(device: torch.device) -> str | None:
    """Such as `0000:3b:00.0`, as the system names it; None where torch does not tell."""
    with suppress(AttributeError, RuntimeError, AssertionError):
        found: Any = torch.cuda.get_device_properties(device)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return None


def _wait(stream: torch.cuda.Stream, after: Sequence[Event]) -> None:
    """What is issued on `stream` from here on begins after these events."""
    for event in after:
        assert isinstance(event, CudaEvent), f"an event of other lanes: {event}"
        stream.wait_event(event.end)
