"""P5: which units are updated late is chosen by simulation, and only where it is worth it.

Scope: the share of late updates. Not here: that it changes no number (`test_same_numbers.py`), the proof of the
schedules (`test_lower.py`, `test_plan.py`).
"""

from dataclasses import replace

import pytest
from conftest import slow
from hypothesis import given
from hypothesis import strategies as st
from toy import toy_units

from megatrain.programs import late_units
from megatrain.training_plan import Limits, plan_training
from tiering.hardware import Rate, assumed_hardware
from tiering.plan import Plan

MiB = 1 << 20
LAYERS, LAYER = 48, 8 * MiB
LIMITS = Limits(host_bytes=300 * MiB, resident=0.0)


def planned(balance: float, late: float | None = None, *, limits: Limits = LIMITS) -> Plan:
    """A plan for a machine that computes a step in `balance` times the seconds that its drive is busy."""
    units = toy_units(LAYERS, LAYER, LAYER)
    flops = sum(unit.forward_flops + unit.backward_flops for unit in units)
    parameters = sum(unit.nbytes for unit in units) / 4
    machine = assumed_hardware()
    io_s = 28 * parameters / machine.read.per_s
    compute = Rate(per_s=flops / (balance * io_s), source="assumed")
    update = Rate(per_s=1e12, source="assumed")
    return plan_training(
        units, replace(machine, compute=compute, update=update), limits, deferred=False, late=late
    ).plan


def late_of(plan: Plan) -> set[str]:
    return {block.unit for block in plan.workload.of_life("carried")}


def test_where_memory_is_short_and_the_drive_as_slow_as_computing_some_updates_wait_for_forward() -> None:
    """P4: backward moves 24 of 28 bytes in three quarters of the computing; late updates even that out."""
    short = replace(LIMITS, host_bytes=90 * MiB)
    plain, chosen = planned(0.95, 0.0, limits=short), planned(0.95, limits=short)
    shown = (plain.timeline.pass_s, chosen.timeline.pass_s, chosen.timeline.limit_s)
    assert late_of(chosen), shown
    assert chosen.timeline.pass_s < 0.985 * plain.timeline.pass_s, shown


def test_with_room_to_look_ahead_a_step_takes_as_long_as_its_busiest_resource() -> None:
    """P4: what is urgent goes first, so forward makes up for backward, and no update has to wait for that."""
    for balance in (0.8, 0.95, 1.1):
        plan = planned(balance)
        shown = (balance, plan.timeline.pass_s, plan.timeline.limit_s)
        assert not late_of(plan), shown
        assert plan.timeline.pass_s <= 1.002 * plan.timeline.limit_s, shown


@pytest.mark.parametrize("balance", [0.1, 10.0])
def test_where_one_resource_is_the_limit_no_update_waits(balance: float) -> None:
    """P5: late updates buy nothing there, and a commit would have to apply them first."""
    assert not late_of(planned(balance))


@pytest.mark.parametrize("late", [slow(0.25), 0.5, slow(1.0)])
def test_a_share_that_is_asked_for_is_the_share_of_the_plan(late: float) -> None:
    """P5: `tiers.late_updates` is a setting, not a hint."""
    plan = planned(1.0, late)
    weights = {block.unit: block.nbytes for block in plan.workload.of_life("durable") if block.kind == "weight"}
    found = sum(weights[unit] for unit in late_of(plan)) / sum(weights.values())
    assert found == pytest.approx(late, abs=1 / LAYERS), (found, late)


@given(
    layers=st.integers(1, 100),
    embedding=st.integers(1, 20),
    share=st.floats(0, 1),
)
def test_late_units_are_the_share_that_was_asked_for(layers: int, embedding: int, share: float) -> None:
    """To half of the largest unit; none for 0, all for 1."""
    units = toy_units(layers, 4096, embedding * 4096)
    sizes = {unit.name: unit.nbytes for unit in units if unit.nbytes}
    late = late_units(units, share)
    assert abs(sum(sizes[name] for name in late) - share * sum(sizes.values())) <= max(sizes.values()), late
    assert late_units(units, 0) == frozenset()
    assert late_units(units, 1) == frozenset(sizes)
