"""The pass that the plan predicts, as spans: the same records and figures as those of a measured one.

Scope: when each action of a pass in the steady state would run, what compute would wait for.
Not here: the simulation (`simulate.py`), measured spans (`trace.py`), the file that a viewer opens (`perfetto.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiering.hardware import Hardware
from tiering.schedule import Schedule, Verb
from tiering.simulate import Slot, sharing, slots
from tiering.trace import COMPUTE, UPDATE, WAIT, Figures, InPass, Span, figures, kind_of, name_waits
from tiering.workload import Workload

SHORTEST_WAIT_S = 1e-9
"""Less is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """One predicted pass. Its spans count from the moment at which it is opened; writes may end after it."""

    spans: Sequence[Span]
    figures: Figures

    @property
    def pass_s(self) -> float:
        return self.figures.wall_s


def timetable(schedule: Schedule, workload: Workload, hardware: Hardware) -> Timetable:
    """The pass that `simulate` reports: one in the steady state, or the only one of a schedule that is not cyclic."""
    found = slots(schedule, workload, hardware)
    shared, _ = sharing(schedule, hardware)
    updates = [slot for slot in found if schedule.actions[slot.line].lane == UPDATE] if shared else []
    spans = {0: list[Span](), 1: list[Span]()}
    for slot in found:
        if schedule.actions[slot.line].verb is not Verb.DROP:
            spans[slot.back].append(_span(schedule, slot, updates))
    computes = [span for span in spans[0] if span.what == COMPUTE]
    waits = list(_waits(computes, updates))
    ends = [span.end_s for span in computes or spans[0]]
    mine = name_waits(sorted([*spans[0], *waits], key=lambda span: span.begin_s), spans[1])
    return Timetable(spans=mine, figures=figures(mine, max(ends, default=0.0)))


def _span(schedule: Schedule, slot: Slot, updates: Sequence[Slot]) -> Span:
    action = schedule.actions[slot.line]
    what, nbytes = kind_of(action)
    return Span(
        what=what,
        name=action.title,
        begin_s=slot.begin_s,
        end_s=slot.end_s,
        nbytes=nbytes,
        paused_s=_shared_s(slot.begin_s, slot.end_s, updates) if what == COMPUTE else 0.0,
        at=InPass(pass_number=-slot.back, schedule=schedule, line=slot.line),
    )


def _waits(computes: Sequence[Span], updates: Sequence[Slot]) -> Iterator[Span]:
    """Gaps between computing ops, which are entered in order."""
    end_s = 0.0
    for span in computes:
        if span.begin_s - end_s > SHORTEST_WAIT_S:
            paused_s = _shared_s(end_s, span.begin_s, updates)
            yield Span(
                what=WAIT, name="an earlier action", begin_s=end_s, end_s=span.begin_s, paused_s=paused_s, at=span.at
            )
        end_s = span.end_s


def _shared_s(begin_s: float, end_s: float, updates: Sequence[Slot]) -> float:
    """Seconds between `begin_s` and `end_s` that updates take on the processors that compute."""
    return sum(max(0.0, min(end_s, update.end_s) - max(begin_s, update.begin_s)) for update in updates)
