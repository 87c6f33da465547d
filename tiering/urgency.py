"""Which ready action of a lane goes first: the one that has to begin first, so that no computing waits.

Scope: `by_urgency`: when each action has to begin at the latest, in passes without end, and its rank by that.
Not here: how long actions take (`simulate.py`), who waits for whom (`schedule.py`), the queues (`pipeline.py`).
Source: earliest due date first (Jackson 1955), with due dates passed back along what waits.

A write that nobody waits for soon gives way to a read that is needed soon, also to one of the next pass. A write whose
place in memory such a read needs does not: the read's due date is its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import floor

from tiering.schedule import Schedule, Verb

_PASSES = 3
"""What has to be done now serves this pass, the next, or writes what the one after reads."""


def by_urgency(schedule: Schedule, seconds: Sequence[float]) -> Schedule:
    """The same schedule with `ranks`. seconds: of each action alone."""
    period_s = _period_s(schedule, seconds)
    if not period_s:
        return schedule
    begins = _latest_begins(schedule, seconds, period_s)
    passes = [floor(begin / period_s) for begin in begins]
    count = len(begins)
    within = sorted(range(count), key=lambda line: (begins[line] - passes[line] * period_s, line))
    ranks = [0] * count
    for place, line in enumerate(within):
        ranks[line] = passes[line] * count + place
    return replace(schedule, ranks=tuple(ranks))


def _period_s(schedule: Schedule, seconds: Sequence[float]) -> float:
    """A pass cannot be shorter: its busiest lane, updates and computing taken together."""
    busy: dict[str, float] = {}
    for action, duration in zip(schedule.actions, seconds, strict=True):
        lane = "compute" if action.lane == "update" else action.lane
        busy[lane] = busy.get(lane, 0.0) + duration
    return max(busy.values(), default=0.0)


def _latest_begins(schedule: Schedule, seconds: Sequence[float], period_s: float) -> list[float]:
    """Seconds from the opening of a pass: if each action begins by then, computing ops follow each other evenly in
    passes of `period_s`. Negative: in the pass before, whose own actions it then competes with.
    """
    actions, count = schedule.actions, len(schedule.actions)
    ops = [line for line, action in enumerate(actions) if action.verb is Verb.RUN and action.lane == "compute"]
    computed_s = list(accumulate(seconds[line] for line in ops))
    pace = period_s / computed_s[-1] if computed_s and computed_s[-1] else 1.0
    due = {line: pace * end_s for line, end_s in zip(ops, computed_s, strict=True)}
    waits = [action.after for action in actions]
    for earlier, later in pairwise(ops):  # computing ops are entered in order
        waits[later] = (*waits[later], (earlier, 0))
    passes = _PASSES if schedule.cyclic else 1
    latest = [passes * period_s] * (count * passes)  # ends, as far as it is known who waits; then begins
    for at in reversed(range(count * passes)):
        number, line = divmod(at, count)
        end_s = min(latest[at], number * period_s + due[line]) if line in due else latest[at]
        latest[at] = begin_s = end_s - seconds[line]
        for waited, back in waits[line]:
            before = at - line + waited - back * count
            if before >= 0 and latest[before] > begin_s:
                latest[before] = begin_s
    return latest[:count]
