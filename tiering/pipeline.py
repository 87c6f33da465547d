"""Runs schedules: issues every action as soon as what it waits for has completed.

Scope: the update and copy lanes, the rendezvous with the code that computes.
Not here: what to do and where (`lower.py`), who waits for whom (`passes.py`), the I/O lane (`transfers.py`), copies
themselves (`lanes.py`), what an op computes (the caller).

One loop, two modes: a serial run has one more wait a line, for the line before it. Reading order of the states:
*waiting* (its `missing` count is not 0) -> *ready* (in its lane's heap) -> *running* -> *done*. Only `_done` moves an
action to done, under the lock, and it wakes whoever waits. After a failure (I10) nothing more is issued, and every
call raises that failure.

On a device with memory of its own, copies and ops are *issued* before they are done, and others of the device follow
at once. `Completions` tells when they are done; transfers, updates of HOST and the host's own memory wait for that. An
update on the device is issued as a copy is, by whichever thread made it ready; nobody waits for it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import Any

from tiering.arena import Arena
from tiering.completions import Completions
from tiering.engine import IOEngine
from tiering.errors import ScheduleError
from tiering.lanes import Event, Lanes
from tiering.lending import Lender, Views
from tiering.passes import Line, Pass, Queued, lead_in
from tiering.schedule import Action, Schedule, Verb
from tiering.store import BlockStore
from tiering.trace import COMPUTE, UPDATE, WAIT, Trace, kind_of
from tiering.transfers import Transfers

Updater = Callable[[Action, Views, Any], None]
"""Runs one tile of an update op, or issues a whole one on the device, on any thread; the last argument is what `begin`
was given for its pass.
"""


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
        self.updates = 0  # tiles, and whole blocks of a device, updated so far
        self._update = update
        self._lender = Lender(arena, lanes)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._passes: dict[int, Pass] = {}
        self._current: Pass | None = None
        self._numbers = 0
        self._transfers = Transfers(self._lender, store, engine, trace, self._changed, self._transferred, queue_depth)
        self._updating_s = 0.0  # spent in updates so far
        self._updates: list[Queued] = []
        self._closing = False
        self._device: list[Queued] = []  # copies and updates of a device that may be issued
        self._computing = 0  # ops that the device has and has not done yet
        self._completions = Completions[Line](self._happened, self.fail)

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
                self.run(lead_in(schedule))
        with self._changed:
            for older in list(self._passes.values()):
                if older is not before:
                    self._wait(lambda older=older: older.left == 0)  # type: ignore[misc]  # every action of it
            self._numbers += 1
            own_memory = self.lanes.own_memory
            new = Pass(
                self._numbers, schedule, before, serial=self.serial, last=last, own_memory=own_memory, context=context
            )
            self._current = new
            if new.left:
                self._passes[new.number] = new
            if before is not None:
                before.after = new
                before.before = None  # all of it is done
            count = len(schedule.actions)
            self._ready([(new, index) for index in range(count) if not new.missing[index]])
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
        after = self._rendezvous(pass_, index)
        begin_s, updating_s = time.perf_counter(), self._updating_s
        try:
            self.lanes.begin_compute(after)
            yield self._lender.views(action)
            event = self.lanes.end_compute()
        except BaseException as error:
            self.fail(error)
            raise
        if event is None:
            paused_s = self._updating_s - updating_s
            self.trace.add(COMPUTE, name, begin_s, action.nbytes, paused_s=paused_s, at=pass_.at(index))
        with self._changed:
            if event is None:
                self._done(pass_, index)
            else:
                self._computing += 1
                self._issued(pass_, index, event)
            self._issue()

    def computed(self) -> None:
        """Return when the device has done every op that was entered and left so far. Ready updates run meanwhile."""
        with self._changed:
            self._wait(lambda: not self._computing)  # ops that were issued

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
            self._note_failure(error)

    def close(self) -> None:
        """Stop issuing and wait for what is in flight."""
        with self._changed:
            self._closing = True
            self._updates.clear()
            self._device.clear()
        self._transfers.close()
        self._completions.close()

    def _expect(self, name: str) -> tuple[Pass, int]:
        pass_ = self._current
        if pass_ is None or not pass_.computes:
            raise ScheduleError(f"{name} was entered, but no pass is open that has an op left")
        index = pass_.computes[0]
        expected = pass_.schedule.actions[index].name
        if expected != name:
            raise ScheduleError(f"{name} was entered, the schedule expects {expected}:\n{pass_.schedule.around(index)}")
        pass_.computes.popleft()
        return pass_, index

    def _rendezvous(self, pass_: Pass, index: int) -> list[Event]:
        """Wait until the op may be issued; returns the events that it comes after on its device."""
        with self._changed:
            begin_s, updating_s = time.perf_counter(), self._updating_s
            blocker = pass_.blocker(index)
            self._wait(lambda: pass_.missing[index] == 0)  # everything that this op's bytes wait for
            if blocker:
                self.trace.add(WAIT, blocker, begin_s, paused_s=self._updating_s - updating_s, at=pass_.at(index))
            return pass_.events_before(index)

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Wait (the lock is held) until `reached` or a failure, which is raised; ready updates run meanwhile."""
        while self._failure is None and not reached():
            if not self._update_next():
                self._changed.wait_for(lambda: self._failure is not None or self._updates or reached())
        if self._failure is not None:
            raise self._failure

    def _ready(self, lines: Iterable[Line]) -> None:
        """Everything that these lines waited for is there: hand them to their lanes. The lock is held."""
        todo = list(lines)
        while todo:
            pass_, index = todo.pop()
            action = pass_.schedule.actions[index]
            if pass_.skipped[index] or action.verb is Verb.DROP:
                if pass_.on_device[index]:
                    todo += pass_.issued(index, pass_.events_before(index))
                todo += self._completed(pass_, index)
            elif action.lane == "io":
                self._transfers.put(pass_, index)
            elif action.lane == "update" and not pass_.on_device[index]:
                heappush(self._updates, pass_.queued(index))
            elif action.lane != "compute":
                heappush(self._device, pass_.queued(index))
        self._changed.notify_all()

    def _completed(self, pass_: Pass, index: int) -> list[Line]:
        """Mark `index` done; returns what became ready by that. The lock is held."""
        ready = pass_.done(index)
        if pass_.left == 0:
            del self._passes[pass_.number]
        return ready

    def _done(self, pass_: Pass, index: int) -> None:
        self._ready(self._completed(pass_, index))

    def _transferred(self, pass_: Pass, index: int, error: BaseException | None) -> None:
        """A request has landed, of a transfer that is done by that or has failed. The lock is held."""
        if error is None:
            self._done(pass_, index)
            self._issue()
        else:
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> None:
        """The first one counts. The lock is held."""
        self._failure = self._failure or error
        self._transfers.stop()
        self._changed.notify_all()

    def _issued(self, pass_: Pass, index: int, event: Event) -> None:
        """The device has an action and will do it later; what follows it there is ready now. The lock is held."""
        self._ready(pass_.issued(index, [event]))
        self._completions.put(pass_.schedule.actions[index].lane, (pass_, index), event)

    def _happened(self, line: Line, event: Event) -> None:
        """The device has done an action; runs on the thread of its lane."""
        pass_, index = line
        action = pass_.schedule.actions[index]
        what, nbytes = kind_of(action)
        self.trace.add(what, action.name, event.begin_s, nbytes, at=pass_.at(index), end_s=event.end_s)
        with self._changed:
            self._computing -= what == COMPUTE
            self.updates += what == UPDATE
            del pass_.events[index]
            self._done(pass_, index)
            self._issue()

    def _issue_device(self) -> None:
        """Issue copies and updates by rank, each behind the events that it comes after. The lock is held."""
        while self._device and self._failure is None and not self._closing:
            *_, index, pass_ = heappop(self._device)
            action, after = pass_.schedule.actions[index], pass_.events_before(index)
            try:
                if action.lane == "update":
                    views = self._lender.views(action)
                    work = partial(self._update, action, views, pass_.context)
                    event = self.lanes.update(work, list(views.values()), after)
                else:
                    source, target = map(self._lender.bytes, action.operands)
                    event = self.lanes.copy(action.lane, source, target, after)
            except Exception as error:  # on a thread of the engine nobody would hear of it
                self._note_failure(error)
                return
            self._issued(pass_, index, event)

    def _issue(self) -> None:
        """Issue to the device and to the drives what is ready. The lock is held."""
        if self._device:
            self._issue_device()
        self._transfers.issue()

    def _update_next(self) -> bool:
        """Run the first update that is ready, with the lock given up meanwhile; False if there is none."""
        if not self._updates or self._failure is not None:
            return False
        *_, index, pass_ = heappop(self._updates)
        action = pass_.schedule.actions[index]
        begin_s = time.perf_counter()
        self._changed.release()
        try:
            self._update(action, self._lender.views(action), pass_.context)
            for x in pass_.written_next(index):
                self._transfers.sum_up(x, self._lender.view(x))
            self.trace.add(UPDATE, action.name, begin_s, action.nbytes, at=pass_.at(index))
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
