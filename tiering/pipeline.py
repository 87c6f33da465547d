"""Runs schedules: issues every action as soon as what it waits for has completed.

Scope: passes and their bookkeeping, the I/O and update lanes, the rendezvous with the code that computes.
Not here: what to do and where (`lower.py`), the transfers themselves (`engine.py`), what an op computes (the caller).

One loop, two modes: a serial run has one more wait a line, for the line before it. Reading order of the states:
*waiting* (its `missing` count is not 0) -> *ready* (in its lane's heap) -> *running* -> *done*. Only `_done` moves an
action to done, under the lock, and it wakes whoever waits. After a failure (I10) nothing more is issued, and every
call raises that failure.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch

from tiering.arena import Arena
from tiering.engine import Extent, IOEngine
from tiering.errors import ScheduleError
from tiering.lanes import Lanes
from tiering.schedule import Action, Schedule, Verb
from tiering.store import BlockStore
from tiering.trace import COMPUTE, UPDATE, WAIT, InPass, Trace

REQUEST_BYTES = 8 << 20

Views = Mapping[str, torch.Tensor]
"""Block name to its bytes in HOST (flat uint8): the whole block, or the tile that the action names."""

Updater = Callable[[Action, Views, Any], None]
"""Runs one tile of an update op; the last argument is what `begin` was given for its pass."""


class _Pass:
    """One pass through a schedule: which lines are done, and how many others each still waits for."""

    def __init__(
        self, number: int, schedule: Schedule, serial: bool, before: "_Pass | None", last: bool, context: Any
    ) -> None:
        self.number = number
        self.schedule = schedule
        self.context = context
        count = len(schedule.actions)
        self.is_done = bytearray(count)
        self.left = count
        self.missing = [0] * count
        self.followers: list[list[int]] = [[] for _ in range(count)]
        self.next_followers: list[list[int]] = [[] for _ in range(count)]
        self.after: _Pass | None = None
        self.skipped = [last and action.next_pass for action in schedule.actions]
        for index, action in enumerate(schedule.actions):
            waits = set(action.after)
            if serial:
                waits.add((index - 1, 0) if index else (count - 1, 1))
            for waited, back in waits:
                if back == 0:
                    self.followers[waited].append(index)
                    self.missing[index] += 1
                    continue
                self.next_followers[waited].append(index)
                self.missing[index] += before is not None and not before.is_done[waited]
        self.computes = deque(i for i, a in enumerate(schedule.actions) if a.verb is Verb.RUN and a.lane == "compute")


class Pipeline:
    """Runs one schedule after the other over one arena, store and engine. Not for use from several threads."""

    def __init__(
        self,
        arena: Arena,
        store: BlockStore,
        engine: IOEngine,
        lanes: Lanes,
        update: Updater,
        *,
        serial: bool,
        trace: Trace,
        queue_depth: int = 8,
    ) -> None:
        self.arena = arena
        self.store = store
        self.engine = engine
        self.lanes = lanes
        self.serial = serial
        self.trace = trace
        self.updates = 0  # tiles updated so far
        self._update = update
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._passes: dict[int, _Pass] = {}
        self._current: _Pass | None = None
        self._numbers = 0
        self._io: list[tuple[int, int]] = []
        self._requests: deque[tuple[_Pass, int, Extent, int, memoryview]] = deque()
        self._in_flight = 0  # requests that the engine has
        self._landing = 0  # those that it has moved, whose bytes are being summed
        self._issuing = 0  # the thread that submits requests at this moment
        self._queue_depth = queue_depth
        self._updating_s = 0.0  # spent in updates so far
        self._io_left: dict[tuple[int, int], list[float]] = {}
        self._updates: list[tuple[int, int]] = []
        self._closing = False
        self._late = ThreadPoolExecutor(1, thread_name_prefix="io-late")

    def begin(self, schedule: Schedule, *, last: bool = False, context: Any = None) -> None:
        """Open a pass; its updates are given `context`, whenever they run.

        A cyclic schedule flows on from its own pass before, unless that was a last one.
        """
        before = self._current
        flows = before is not None and before.schedule is schedule and schedule.cyclic and not any(before.skipped)
        if not flows:
            self.drain()
            before = None
            if schedule.lead_in:
                self.run(_lead_in(schedule))
        with self._changed:
            for older in list(self._passes.values()):
                if older is not before:
                    self._wait(lambda older=older: older.left == 0)  # type: ignore[misc]  # every action of it
            self._numbers += 1
            new = _Pass(self._numbers, schedule, self.serial, before, last, context)
            self._current = new
            if new.left:
                self._passes[new.number] = new
            if before is not None:
                before.after = new
            for index in range(len(schedule.actions)):
                if not new.missing[index] and not new.is_done[index]:
                    self._ready(new, index)
            self._issue()

    def run(self, schedule: Schedule, *, context: Any = None) -> None:
        """A whole schedule that needs nobody to compute: loading, saving, a flush."""
        self.drain()
        self.begin(schedule, context=context)
        self.drain()
        self._current = None

    @contextmanager
    def op(self, name: str) -> Iterator[Views]:
        """The rendezvous: wait until compute op `name` may run, lend its blocks, and take them back."""
        pass_, index = self._expect(name)
        action = pass_.schedule.actions[index]
        with self._changed:
            begin_s, updating_s = time.perf_counter(), self._updating_s
            blocker = self._blocker(pass_, index)
            self._wait(lambda: pass_.missing[index] == 0)  # everything that this op's bytes wait for
            if blocker:
                self.trace.add(WAIT, blocker, begin_s, paused_s=self._updating_s - updating_s, at=_at(pass_, index))
        begin_s, updating_s = time.perf_counter(), self._updating_s
        try:
            with self._lent(action) as views:
                yield views
        except BaseException as error:
            self.fail(error)
            raise
        paused_s = self._updating_s - updating_s
        self.trace.add(COMPUTE, name, begin_s, action.nbytes, paused_s=paused_s, at=_at(pass_, index))
        with self._changed:
            self._done(pass_, index)
            self._issue()

    def catch_up(self) -> None:
        """Run the updates that are ready. Called from inside an op, wherever its computing can pause for a moment."""
        if self._updates:
            with self._changed:
                while self._update_next():
                    pass

    def drain(self) -> None:
        """Wait until every action of every open pass has completed."""
        with self._changed:
            left = self._current
            if left is not None and left.computes and self._failure is None:
                raise ScheduleError(f"a pass was left open:\n{left.schedule.around(left.computes[0])}")
            self._wait(lambda: not self._passes)  # all reads, updates and writes in flight

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, other schedules may run that only read HOST; the last pass still flows on into its next one."""
        self.drain()
        current = self._current
        yield
        self._current = current

    def fail(self, error: BaseException) -> None:
        """Enter the error state: nothing more is issued, every call raises `error`."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Stop issuing and wait for what is in flight."""
        with self._changed:
            self._closing = True
            self._requests.clear()
            self._io.clear()
            self._updates.clear()
            self._changed.wait_for(lambda: self._in_flight + self._landing == 0)  # requests whose bytes are in use
        self._late.shutdown()

    def _expect(self, name: str) -> tuple[_Pass, int]:
        pass_ = self._current
        if pass_ is None or not pass_.computes:
            raise ScheduleError(f"{name} was entered, but no pass is open that has an op left")
        index = pass_.computes[0]
        expected = pass_.schedule.actions[index].name
        if expected != name:
            raise ScheduleError(f"{name} was entered, the schedule expects {expected}:\n{pass_.schedule.around(index)}")
        pass_.computes.popleft()
        return pass_, index

    def _views(self, action: Action) -> dict[str, torch.Tensor]:
        return {x.block: self.arena.tensor(x.address, x.address + x.nbytes) for x in action.operands}

    @contextmanager
    def _lent(self, action: Action) -> Iterator[Views]:
        """The device's views of an op's operands; what the op wrote is back in HOST after it."""
        host = self._views(action)
        device = {x.block: self.lanes.h2d(host[x.block], fill=x.reads) for x in action.operands}
        yield device
        for x in action.operands:
            if x.writes:
                self.lanes.d2h(device[x.block], host[x.block])
        self.lanes.wait()  # the copies back of this op

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Wait (the lock is held) until `reached` or a failure, which is raised; ready updates run meanwhile."""
        while self._failure is None and not reached():
            if not self._update_next():
                self._changed.wait_for(lambda: self._failure is not None or self._updates or reached())
        if self._failure is not None:
            raise self._failure

    def _blocker(self, pass_: _Pass, index: int) -> str:
        """Name of an action that `index` is waiting for now; empty if it waits for nothing."""
        if not pass_.missing[index]:
            return ""
        actions = pass_.schedule.actions
        for waited, back in actions[index].after:
            if back == 0 and not pass_.is_done[waited] and actions[waited].verb is not Verb.DROP:
                return actions[waited].name
        return "an earlier action"

    def _ready(self, pass_: _Pass, index: int) -> None:
        """Everything that `index` waited for is done: hand it to its lane. The lock is held."""
        todo = [(pass_, index)]
        while todo:
            pass_, index = todo.pop()
            action = pass_.schedule.actions[index]
            if pass_.skipped[index] or action.verb is Verb.DROP:
                todo += self._completed(pass_, index)
            elif action.lane == "io":
                heappush(self._io, (pass_.number, index))
            elif action.lane == "update":
                heappush(self._updates, (pass_.number, index))
        self._changed.notify_all()

    def _completed(self, pass_: _Pass, index: int) -> list[tuple[_Pass, int]]:
        """Mark `index` done; returns what became ready by that. The lock is held."""
        pass_.is_done[index] = 1
        pass_.left -= 1
        ready = []
        for follower in pass_.followers[index]:
            pass_.missing[follower] -= 1
            if not pass_.missing[follower]:
                ready.append((pass_, follower))
        after = pass_.after
        for follower in pass_.next_followers[index] if after is not None else ():
            assert after is not None
            after.missing[follower] -= 1
            if not after.missing[follower]:
                ready.append((after, follower))
        if pass_.left == 0:
            del self._passes[pass_.number]
        return ready

    def _done(self, pass_: _Pass, index: int) -> None:
        for ready in self._completed(pass_, index):
            self._ready(*ready)
        self._changed.notify_all()

    def _issue(self) -> None:
        """Submit requests in list order, as many as may be in flight. The lock is held."""
        self._issuing = threading.get_ident()
        while self._failure is None and not self._closing and self._in_flight < self._queue_depth:
            if not self._requests:
                if not self._io:
                    break
                number, index = heappop(self._io)
                self._split(self._passes[number], index)
                continue
            pass_, index, extent, begin, view = self._requests.popleft()
            reads = pass_.schedule.actions[index].verb is Verb.READ
            self._in_flight += 1
            future = self.engine.submit_read(extent, view) if reads else self.engine.submit_write(extent, view)
            future.add_done_callback(partial(self._landed, pass_, index, begin, view))
        self._issuing = 0

    def _split(self, pass_: _Pass, index: int) -> None:
        """Cut a transfer into requests of at most REQUEST_BYTES."""
        action = pass_.schedule.actions[index]
        (x,) = action.operands
        extents = self.store.read_extents if action.verb is Verb.READ else self.store.write_extents
        count = 0
        for lo in range(x.lo, x.hi, REQUEST_BYTES):
            for extent, begin, end in extents(x.block, lo, min(lo + REQUEST_BYTES, x.hi)):
                at = x.address - x.lo
                self._requests.append((pass_, index, extent, begin, self.arena.view(begin + at, end + at)))
                count += 1
        self._io_left[pass_.number, index] = [count, time.perf_counter()]

    def _landed(self, pass_: _Pass, index: int, begin: int, view: memoryview, future: "Future[int]") -> None:
        """A request for the bytes from `begin` on has completed; runs on the engine's thread.

        Checksums are made and compared here: until the action is done nobody changes the bytes in `view`. The next
        request is on its way meanwhile. A request that was over before it could be waited for lands on the thread that
        submits, which has the lock and may be the one that computes: not there.
        """
        error = future.exception()
        if error is None and threading.get_ident() == self._issuing:
            self._late.submit(self._landed, pass_, index, begin, view, future)
            return
        action = pass_.schedule.actions[index]
        with self._changed:
            self._in_flight -= 1
            self._landing += 1
            if error is None:
                self._issue()
        error = error or self._summed(action, begin, view)
        with self._changed:
            self._landing -= 1
            if error is not None:
                self._failure = self._failure or error
                self._changed.notify_all()
                return
            left = self._io_left[pass_.number, index]
            left[0] -= 1
            if left[0]:
                self._issue()
                return
            del self._io_left[pass_.number, index]
            (x,) = action.operands
            self.trace.add(action.verb, action.name, left[1], x.nbytes, at=_at(pass_, index))
            self._done(pass_, index)
            self._issue()

    def _summed(self, action: Action, begin: int, view: memoryview) -> BaseException | None:
        """Tells the store of the bytes that have moved; what is wrong with them, if anything is."""
        block = action.operands[0].block
        try:
            if action.verb is Verb.WRITE:
                self.store.wrote(block, begin, begin + view.nbytes, view)
            else:
                self.store.compare(block, begin, view)
        except BaseException as error:  # raised in a callback it would be lost, and everybody would wait for ever
            return error
        return None

    def _update_next(self) -> bool:
        """Run the first update that is ready, with the lock given up meanwhile; False if there is none."""
        if not self._updates or self._failure is not None:
            return False
        number, index = heappop(self._updates)
        pass_ = self._passes[number]
        action = pass_.schedule.actions[index]
        begin_s = time.perf_counter()
        self._changed.release()
        try:
            self.lanes.run(partial(self._update, action, self._views(action), pass_.context))
            self.trace.add(UPDATE, action.name, begin_s, action.nbytes, at=_at(pass_, index))
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._changed.acquire()
            self._updating_s += time.perf_counter() - begin_s
        self.updates += 1
        self._done(pass_, index)
        self._issue()
        return True


def _at(pass_: _Pass, index: int) -> InPass:
    return InPass(pass_number=pass_.number, schedule=pass_.schedule, line=index)


def _lead_in(schedule: Schedule) -> Schedule:
    """The lead-in as a schedule of its own: its reads touch different bytes, so none waits for another."""
    return Schedule(name=f"{schedule.name}, lead-in", actions=schedule.lead_in, host_bytes=schedule.host_bytes)
