"""The plan of a training run: homes, knobs, where updates run, and which units are updated late.

Scope: host or device for the updates, and the share of late ones, by simulating candidates.
Not here: the ops (`programs.py`), everything else that a plan decides (`tiering/plan.py`), who asks (`prepare.py`,
`tierplan/question.py`).

Without clipping a unit is updated in backward, which then moves 24 of the 28 bytes a parameter in three quarters of
the computing. Where reading and writing take about as long as computing, backward waits for the drive and forward for
the processor. Updates that wait for the next forward even that out, for 4 bytes of RAM (or 8 of NVMe traffic) a
parameter that is updated late. GreedySnake (arXiv 2512.17570) names the share alpha. Looking ahead evens it out by
itself; where memory is too short for that, a few percent are left to win, near the balance.

On a device AdamW is as fast as its memory, but both moments cross the link and come back: 16 bytes a parameter there
and 12 back without clipping, where updates on the host need 8 and 4. A slow host or a fast link speaks for the device.
With BF16 copies it is 16 and 14 (the weight crosses with its moments, the copy comes back too), where the host needs 4
and 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.programs import UnitSize, late_units, training_workload
from tiering.errors import BudgetError
from tiering.hardware import Hardware
from tiering.plan import Plan, ShortError, make_plan
from tiering.turns import Knobs

_SHARE = 1 / 8
_WORTH = 0.985
"""A plan with late updates takes at most this part of the time: a commit has to apply them first."""


_FASTER = 0.999
"""Updates go to the device where a step takes at most this part of the time: a tie is the host's."""

UpdateOn = Literal["auto", "host", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, and the seconds of a step with updates in the other place: None where that does not fit, where there is
    none, or where it was not tried.
    """

    plan: Plan
    other_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use. resident: the share of durable bytes in HOST; device_bytes: None where the CPU computes.
    update_on: where updates run; auto: where a step is faster.
    """

    host_bytes: int
    resident: float | None = None
    device_bytes: int | None = None
    update_on: UpdateOn = "auto"


def plan_training(
    units: Sequence[UnitSize],
    hardware: Hardware,
    limits: Limits,
    *,
    deferred: bool,
    late: float | None = None,
    validates: bool = False,
    bf16: bool = False,
    candidates: Sequence[Knobs] | None = None,
) -> Choice:
    """The fastest plan of a training step by simulation; with `auto`, what a step is with updates in the other place.

    deferred: all updates are late, as clipping needs it. late: the share of them without clipping; None: chosen.
    validates: forwards alone can run too, over the same homes. bf16: ops compute with BF16 copies of the weights, which
    updates make. candidates: knobs to try instead of the planner's own, quickly, with `late` as given.
    Raises `ShortError` where nothing fits: that of updates on the host, where both are tried.
    """

    def planned(there: bool) -> Plan:
        return _plan_for(units, hardware, limits, there, deferred, late, validates, bf16, candidates)

    return _chosen(planned, hardware, limits)


def weigh_places(
    units: Sequence[UnitSize], hardware: Hardware, limits: Limits, *, deferred: bool, bf16: bool = False
) -> Choice:
    """As `plan_training`; the other place is tried where one is asked for too, to say what it would be."""

    def planned(there: bool) -> Plan:
        return _plan_for(units, hardware, limits, there, deferred, None, False, bf16, None)

    found = _chosen(planned, hardware, limits)
    if limits.update_on == "auto" or limits.device_bytes is None or hardware.device_update is None:
        return found
    try:
        return replace(found, other_s=planned(limits.update_on == "host").timeline.pass_s)
    except ShortError:
        return found


def _chosen(planned: Callable[[bool], Plan], hardware: Hardware, limits: Limits) -> Choice:
    """planned: by whether updates run on the device."""
    if limits.update_on == "device":
        return Choice(plan=planned(True))
    if limits.update_on == "host" or limits.device_bytes is None or hardware.device_update is None:
        return Choice(plan=planned(False))
    try:
        on_host = planned(False)
    except ShortError as short:
        try:
            return Choice(plan=planned(True))  # gradients that are used there need no room in HOST
        except ShortError:
            raise short from None
    try:
        on_device = planned(True)
    except ShortError:
        return Choice(plan=on_host)
    host_s, device_s = on_host.timeline.pass_s, on_device.timeline.pass_s
    if device_s < _FASTER * host_s:
        return Choice(plan=on_device, other_s=host_s)
    return Choice(plan=on_host, other_s=device_s)


def _plan_for(
    units: Sequence[UnitSize],
    hardware: Hardware,
    limits: Limits,
    there: bool,
    deferred: bool,
    late: float | None,
    validates: bool,
    bf16: bool,
    candidates: Sequence[Knobs] | None,
) -> Plan:
    """there: updates run on the device. Everything else as for `plan_training`."""

    def planned(share: float, knobs: Sequence[Knobs] | None) -> Plan:
        late_ones = late_units(units, share)
        workload = training_workload(units, deferred=deferred, late=late_ones, validates=validates, bf16=bf16)
        host, resident, device = limits.host_bytes, limits.resident, limits.device_bytes
        return make_plan(workload, hardware, host, resident, device, update_there=there, candidates=knobs)

    plain = planned(late or 0.0, candidates)
    most_s = _WORTH * plain.timeline.pass_s
    if deferred or late is not None or candidates is not None or plain.timeline.limit_s > most_s:
        return plain
    knobs = replace(plain.knobs, direct=False)  # it is tried again
    thrifty = replace(knobs, lookahead=min(2, knobs.lookahead), ring=min(4, knobs.ring))
    try:
        other = planned(_SHARE, list(dict.fromkeys([knobs, thrifty])))
    except BudgetError:  # gradients that wait need room of their own
        return plain
    return other if other.timeline.pass_s <= most_s else plain
