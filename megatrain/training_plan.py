"""The plan of a training run: homes, knobs, and which units are updated late.

Scope: the share of late updates, by simulating candidates.
Not here: the ops (`programs.py`), everything else that a plan decides (`tiering/plan.py`), who asks (`prepare.py`,
`tierplan/question.py`).

Without clipping a unit is updated in backward, which then moves 24 of the 28 bytes a parameter in three quarters of
the computing. Where reading and writing take about as long as computing, backward waits for the drive and forward for
the processor. Updates that wait for the next forward even that out, for 4 bytes of RAM (or 8 of NVMe traffic) a
parameter that is updated late. GreedySnake (arXiv 2512.17570) names the share alpha. Looking ahead evens out most of it
by itself; what is left to win is a few percent, near the balance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.programs import UnitSize, late_units, training_workload
from tiering.errors import BudgetError
from tiering.hardware import Hardware
from tiering.lower import Knobs
from tiering.plan import Plan, make_plan

_SHARE = 1 / 8
_WORTH = 0.985
"""A plan with late updates takes at most this part of the time: a commit has to apply them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use. resident: the share of durable bytes in HOST; device_bytes: None where the CPU computes."""

    host_bytes: int
    resident: float | None = None
    device_bytes: int | None = None


def plan_training(
    units: Sequence[UnitSize],
    hardware: Hardware,
    limits: Limits,
    *,
    deferred: bool,
    late: float | None = None,
    validates: bool = False,
    candidates: Sequence[Knobs] | None = None,
) -> Plan:
    """The fastest plan of a training step by simulation.

    deferred: all updates are late, as clipping needs it. late: the share of them without clipping; None: chosen.
    validates: forwards alone can run too, over the same homes. candidates: knobs to try instead of the planner's own,
    quickly, with `late` as given. Raises `ShortError` where nothing fits.
    """

    def planned(share: float, knobs: Sequence[Knobs] | None) -> Plan:
        late_ones = late_units(units, share)
        workload = training_workload(units, deferred=deferred, late=late_ones, validates=validates)
        return make_plan(workload, hardware, limits.host_bytes, limits.resident, limits.device_bytes, candidates=knobs)

    plain = planned(late or 0.0, candidates)
    most_s = _WORTH * plain.timeline.pass_s
    if deferred or late is not None or candidates is not None or plain.timeline.limit_s > most_s:
        return plain
    knobs = plain.knobs
    thrifty = replace(knobs, lookahead=min(2, knobs.lookahead), ring=min(4, knobs.ring))
    try:
        other = planned(_SHARE, list(dict.fromkeys([knobs, thrifty])))
    except BudgetError:  # gradients that wait need room of their own
        return plain
    return other if other.timeline.pass_s <= most_s else plain
