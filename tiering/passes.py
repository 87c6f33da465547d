"""The bookkeeping of a pass: which actions are issued and done, and how many others each still waits for.

Scope: `Pass`: the edges of `after`, within a pass and into the next one, and when each lets its follower go; `lead_in`.
Not here: issuing and doing (`pipeline.py`), where the edges come from (`schedule.py`).

An edge lets its follower go when the action before is *done*. Between two actions of a device with memory of its own
it does so when that is *issued*: the follower's stream then waits for its event, and the host does not. A DROP of
DEVICE bytes does no work. It stands for the events of what it comes after.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from tiering.lanes import Event
from tiering.schedule import Action, Operand, Schedule, Verb
from tiering.trace import InPass

Line = tuple["Pass", int]
"""An action of a pass, by its index."""

Queued = tuple[int, int, int, "Pass"]
"""A ready action in the order of its lane: its rank, counted on through passes, the number of its pass, its index."""


def on_device(action: Action) -> bool:
    """True for what a device with memory of its own does in a stream."""
    if action.verb is Verb.DROP:
        return action.operands[0].tier == "DEVICE"
    return action.lane in ("h2d", "compute", "d2h") or action.updates_there


class _Followers:
    """For each action those that an edge leads to: in its own pass and in the next one."""

    def __init__(self, count: int) -> None:
        self.here: list[list[int]] = [[] for _ in range(count)]
        self.next: list[list[int]] = [[] for _ in range(count)]


class Pass:
    """One pass through a schedule. after, before: the passes that it flows into and on from.

    own_memory: its device has memory of its own. events: by index, those of device actions that are issued.
    """

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        before: "Pass | None",
        *,
        serial: bool,
        last: bool,
        own_memory: bool,
        context: Any,
    ) -> None:
        self.number = number
        self.ranks = schedule.ranks or range(len(schedule.actions))
        self.schedule = schedule
        self.context = context
        self.before = before
        self.after: Pass | None = None
        count = len(schedule.actions)
        self.left = count
        self.is_done = bytearray(count)
        self.is_issued = bytearray(count)
        self.missing = [0] * count
        self.skipped = [last and action.next_pass for action in schedule.actions]
        self.on_device = [on_device(action) for action in schedule.actions] if own_memory else [False] * count
        self.events: dict[int, tuple[Event, ...]] = {}
        self._if_done, self._if_issued = _Followers(count), _Followers(count if own_memory else 0)
        early = own_memory and not serial
        for index, action in enumerate(schedule.actions):
            waits = set(action.after) if self.on_device[index] or not own_memory else self._told(action)
            if serial:
                waits.add((index - 1, 0) if index else (count - 1, 1))
            for waited, back in waits:
                issued = early and self._at_issue(waited, index)
                followers = self._if_issued if issued else self._if_done
                if back == 0:
                    followers.here[waited].append(index)
                    self.missing[index] += 1
                    continue
                followers.next[waited].append(index)
                if before is not None:
                    self.missing[index] += not (before.is_issued if issued else before.is_done)[waited]
        self.computes = deque(i for i, a in enumerate(schedule.actions) if a.verb is Verb.RUN and a.lane == "compute")

    def _at_issue(self, waited: int, index: int) -> bool:
        """True if `index` only waits until `waited` is issued."""
        if not self.on_device[waited]:
            return False
        # The host is never told when those that a DROP of the device stands for are done.
        assert self.on_device[index] or self.schedule.actions[waited].verb is not Verb.DROP, f"line {index}"
        return self.on_device[index]

    def _told(self, action: Action) -> set[tuple[int, int]]:
        """What an action of the host waits for, with what a DROP of the device stands for in its place: that is done
        when it is issued, and the host is told of the others. What is two passes back is over.
        """
        actions = self.schedule.actions
        todo, found = list(action.after), set[tuple[int, int]]()
        while todo:
            waited, back = todo.pop()
            if actions[waited].verb is Verb.DROP and self.on_device[waited]:
                todo += [(before, back + more) for before, more in actions[waited].after if back + more < 2]
            else:
                found.add((waited, back))
        return found

    def written_next(self, index: int) -> list[Operand]:
        """What `index` writes and a WRITE that comes after it takes to NVME."""
        actions = self.schedule.actions
        wrote = {(x.block, x.lo, x.hi) for x in actions[index].operands if x.writes}
        after = (actions[follower] for follower in self._if_done.here[index])
        writes = [action.operands[0] for action in after if action.verb is Verb.WRITE]
        return [x for x in writes if (x.block, x.lo, x.hi) in wrote]

    def issued(self, index: int, events: Sequence[Event]) -> list[Line]:
        """A device action is issued, and `events` tell when it has happened; returns what became ready by that."""
        self.is_issued[index] = 1
        self.events[index] = tuple(events)
        return self._let_go(self._if_issued, index)

    def done(self, index: int) -> list[Line]:
        """`index` is done; returns what became ready by that."""
        self.is_done[index] = 1
        self.left -= 1
        return self._let_go(self._if_done, index)

    def _let_go(self, followers: _Followers, index: int) -> list[Line]:
        ready: list[Line] = []
        for follower in followers.here[index]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                ready.append((self, follower))
        after = self.after
        for follower in followers.next[index] if after is not None else ():
            assert after is not None
            after.missing[follower] -= 1
            if not after.missing[follower]:
                ready.append((after, follower))
        return ready

    def events_before(self, index: int) -> list[Event]:
        """What a device action has to wait for on its stream; what is done already is left out."""
        found: dict[int, Event] = {}
        for waited, back in self.schedule.actions[index].after:
            pass_ = self.before if back else self
            if pass_ is not None:
                found |= {id(event): event for event in pass_.events.get(waited, ())}
        return list(found.values())

    def blocker(self, index: int) -> str:
        """Name of an action that `index` is waiting for now; empty if it waits for nothing."""
        if not self.missing[index]:
            return ""
        actions = self.schedule.actions
        for waited, back in actions[index].after:
            reached = self.is_issued if self.on_device[waited] else self.is_done
            if back == 0 and not reached[waited] and actions[waited].verb is not Verb.DROP:
                return actions[waited].title
        return "an earlier action"

    def queued(self, index: int) -> Queued:
        """How `index` stands in the queue of its lane."""
        return self.number * len(self.ranks) + self.ranks[index], self.number, index, self

    def at(self, index: int) -> InPass:
        """Where a span of `index` comes from."""
        return InPass(pass_number=self.number, schedule=self.schedule, line=index)


def lead_in(schedule: Schedule) -> Schedule:
    """The lead-in as a schedule of its own: its reads touch different bytes, so none waits for another."""
    return Schedule(name=f"{schedule.name}, lead-in", actions=schedule.lead_in, host_bytes=schedule.host_bytes)
