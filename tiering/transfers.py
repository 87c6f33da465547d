"""The I/O lane: transfers by rank, cut into requests, so many in flight; what has moved is summed.

Scope: `Transfers`: the queue of the drives, the landing of requests, checksums of what they moved.
Not here: who waits for a transfer (`passes.py`, `pipeline.py`), moving bytes (`engine.py`), their files (`store.py`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from tiering.checksums import Sums
from tiering.engine import Extent, IOEngine
from tiering.lending import Lender
from tiering.passes import Pass, Queued
from tiering.schedule import Operand, Verb
from tiering.store import BlockStore
from tiering.trace import Trace

REQUEST_BYTES = 8 << 20
"""Drives are measured with requests of this size, so many in flight: never more than so many bytes are here."""
LONGEST_BYTES = 2 * REQUEST_BYTES
"""Of a request here. A request costs the processors that compute about as much whatever its size; a longer one would
keep waiting what is urgent.
"""

Landed = Callable[[Pass, int, BaseException | None], None]
"""Told with the lock held when a transfer is done, and when it has failed, which may be more than once."""


class _Request(NamedTuple):
    """Bytes of its block from `begin` on. view: a tensor where they are memory of a device."""

    pass_: Pass
    line: int
    extent: Extent
    begin: int
    view: memoryview | torch.Tensor

    @property
    def operand(self) -> Operand:
        """What moves, by its block."""
        return self.pass_.schedule.actions[self.line].operands[0]

    @property
    def verb(self) -> Verb:
        return self.pass_.schedule.actions[self.line].verb


class Transfers:
    """Shares the lock of the pipeline, and is called with it held, but for `sum_up` and `close`."""

    def __init__(
        self,
        lender: Lender,
        store: BlockStore,
        engine: IOEngine,
        trace: Trace,
        changed: threading.Condition,
        landed: Landed,
        queue_depth: int,
    ) -> None:
        self.queue_depth = queue_depth
        self._lender, self._store, self._engine, self._trace = lender, store, engine, trace
        self._changed = changed
        self._tell = landed
        self._ready: list[Queued] = []
        self._requests: deque[_Request] = deque()
        self._in_flight = self._in_flight_bytes = 0  # of requests that the engine has
        self._landing = 0  # those that it has moved, whose bytes are being summed
        self._issuing = 0  # the thread that submits requests at this moment
        self._stopped = False
        self._left: dict[tuple[int, int], list[float]] = {}  # of a transfer: requests, and when it was cut
        self._sums: dict[tuple[str, int], Sums | None] = {}  # by block and first byte, of what will be written
        self._comparing = threading.Lock()  # bytes of a device, of which HOST has no more than one request at a time
        self._late = ThreadPoolExecutor(1, thread_name_prefix="io-late")

    def put(self, pass_: Pass, index: int) -> None:
        """A transfer whose bytes and place are there."""
        heappush(self._ready, pass_.queued(index))

    def issue(self) -> None:
        """Submit requests by rank, as many as may be in flight."""
        self._issuing = threading.get_ident()
        most_bytes = self.queue_depth * REQUEST_BYTES
        while not self._stopped and self._in_flight < self.queue_depth and self._in_flight_bytes < most_bytes:
            if not self._requests:
                if not self._ready:
                    break
                *_, index, pass_ = heappop(self._ready)
                self._cut(pass_, index)
                continue
            request = self._requests.popleft()
            self._in_flight += 1
            self._in_flight_bytes += request.extent.nbytes
            submit = self._engine.submit_write if request.verb is Verb.WRITE else self._engine.submit_read
            submit(request.extent, request.view).add_done_callback(partial(self._landed, request))
        self._issuing = 0

    def sum_up(self, x: Operand, view: memoryview) -> None:
        """Make the checksums of bytes that will be written next. What changes on its way to the drive is noticed, and
        no thread of the drives takes the processor for it later.
        """
        self._sums[x.block, x.lo] = self._store.sums(x.block, x.lo, view)

    def stop(self) -> None:
        """Submit nothing more."""
        self._stopped = True
        self._requests.clear()
        self._ready.clear()

    def close(self) -> None:
        """Submit nothing more and wait for what is in flight."""
        with self._changed:
            self.stop()
            self._changed.wait_for(lambda: self._in_flight + self._landing == 0)  # requests whose bytes are in use
        self._late.shutdown()

    def _cut(self, pass_: Pass, index: int) -> None:
        """Cut a transfer into requests of at most LONGEST_BYTES."""
        action = pass_.schedule.actions[index]
        x = action.operands[0]
        view = self._lender.for_engine(action.operands[-1])
        extents = self._store.write_extents if action.verb is Verb.WRITE else self._store.read_extents
        count = 0
        for lo in range(x.lo, x.hi, LONGEST_BYTES):
            for extent, begin, end in extents(x.block, lo, min(lo + LONGEST_BYTES, x.hi)):
                self._requests.append(_Request(pass_, index, extent, begin, view[begin - x.lo : end - x.lo]))
                count += 1
        self._left[pass_.number, index] = [count, time.perf_counter()]

    def _landed(self, request: _Request, future: "Future[int]") -> None:
        """A request has completed; runs on the engine's thread.

        Checksums are compared here, and made here but for what `sum_up` had. Until the transfer is done nobody changes
        the bytes in `view`. The next request is on its way meanwhile. A request that was over before it could be waited
        for lands on the thread that submits, which has the lock and may be the one that computes: not there.
        """
        error = future.exception()
        if error is None and threading.get_ident() == self._issuing:
            self._late.submit(self._landed, request, future)
            return
        with self._changed:
            self._in_flight -= 1
            self._in_flight_bytes -= request.extent.nbytes
            self._landing += 1
            if error is None:
                self.issue()
        error = error or self._summed(request)
        with self._changed:
            self._landing -= 1
            self._note(request, error)

    def _note(self, request: _Request, error: BaseException | None) -> None:
        """The lock is held."""
        pass_, index = request.pass_, request.line
        if error is not None:
            self._tell(pass_, index, error)
            return
        left = self._left[pass_.number, index]
        left[0] -= 1
        if left[0]:
            self.issue()
            return
        del self._left[pass_.number, index]
        x = request.operand
        self._sums.pop((x.block, x.lo), None)
        action = pass_.schedule.actions[index]
        self._trace.add(action.verb, action.title, left[1], x.nbytes, at=pass_.at(index))
        self._tell(pass_, index, None)

    def _summed(self, request: _Request) -> BaseException | None:
        """Tells the store of the bytes that have moved; what is wrong with them, if anything is."""
        x, begin, view = request.operand, request.begin, request.view
        end = begin + view.nbytes
        try:
            if request.verb is Verb.WRITE:
                assert isinstance(view, memoryview), f"{x.block} is written from HOST, where its checksums are made"
                self._store.wrote(x.block, begin, end, view, self._sums.get((x.block, x.lo)))
            elif isinstance(view, memoryview):
                self._store.compare(x.block, begin, view)
            elif self._store.to_compare(x.block, begin, end):  # once a run: after that nothing comes to HOST
                with self._comparing:
                    self._store.compare(x.block, begin, view.cpu().numpy().data)
        except BaseException as error:  # raised in a callback it would be lost, and everybody would wait for ever
            return error
        return None
