"""Predicted times: sums by hand, and bounds that no prediction may cross.

Scope: `tiering/simulate.py` on hand-made schedules whose times one can add up, and on toy workloads.
Not here: whether a machine keeps to the prediction, which only a run can say.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toy import toy_units

from megatrain.programs import training_workload
from tiering.errors import BudgetError
from tiering.hardware import Hardware, Rate, assumed_hardware
from tiering.homes import choose_homes, place
from tiering.lower import lower
from tiering.plan import MiB, make_plan
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import Timeline, op_seconds, seconds, simulate
from tiering.turns import Knobs
from tiering.workload import PAGE, Block, Lane, Op, Program, Touch, Workload, make_workload

ROUNDING = 1e-6


def rate(per_s: float) -> Rate:
    return Rate(per_s=per_s, source="derived", how="round figures for sums by hand")


PAGE_A_SECOND = Hardware(read=rate(PAGE), write=rate(PAGE), compute=rate(1.0), update=rate(PAGE))
"""A page takes one second to move or to update, and one flop takes one second."""


def by_hand(*lines: str, cyclic: bool = False, lead_in: str = "") -> tuple[Schedule, Workload]:
    """A schedule from words: "READ a@0" moves block a, "RUN f=2 a@0" computes for 2 s on it; a "*" marks next_pass.

    Every block has one page; `@` is its page in HOST. An op "u..." updates instead of computing.
    """
    actions = [_line(line) for line in lines]
    names = {x.block for action in actions for x in action.operands}
    blocks = [Block(name=name, unit=name, kind="weight", nbytes=PAGE, life="durable") for name in sorted(names)]
    ops = [
        Op(
            name=action.op,
            lane=action.lane,
            touches=tuple(Touch(block=x.block, reads=True, writes=x.writes) for x in action.operands),
            flops=float(line.split()[1].partition("=")[2] or 0),
        )
        for action, line in zip(actions, lines, strict=True)
        if action.verb is Verb.RUN
    ]
    waits = order(actions, cyclic)
    schedule = Schedule(
        name="hand",
        actions=tuple(replace(action, after=after) for action, after in zip(actions, waits, strict=True)),
        cyclic=cyclic,
        lead_in=tuple(_line(line) for line in lead_in.split(", ") if line),
        host_bytes=8 * PAGE,
    )
    return schedule, make_workload(blocks, [Program(name="hand", ops=tuple(ops), cyclic=cyclic)])


def _line(text: str) -> Action:
    verb, *words = text.replace("*", "").split()
    name = words.pop(0).partition("=")[0] if verb == "RUN" else text
    lane: Lane = "io" if verb != "RUN" else "update" if name.startswith("u") else "compute"
    operands = []
    for word in words:
        block, _, page = word.partition("@")
        writes = lane == "update"
        runs = verb == "RUN"
        operands.append(
            Operand(block=block, lo=0, hi=PAGE, address=int(page) * PAGE, reads=runs, writes=runs and writes)
        )
    return Action(verb=Verb(verb), name=name, lane=lane, operands=tuple(operands), next_pass="*" in text)


def test_reads_run_beside_computing_where_there_is_room() -> None:
    """READ a 0-1, RUN f 1-3 with READ b 1-2 beside it, RUN g 3-5."""
    timeline = simulate(*by_hand("READ a@0", "RUN f=2 a@0", "READ b@1", "RUN g=2 b@1"), PAGE_A_SECOND)
    assert (timeline.pass_s, timeline.io_s, timeline.compute_s) == (5.0, 2.0, 4.0)


def test_a_read_waits_for_the_place_it_goes_to() -> None:
    """READ a 0-1, RUN f 1-3, READ b 3-4 into the same page, RUN g 4-6."""
    timeline = simulate(*by_hand("READ a@0", "RUN f=2 a@0", "DROP a@0", "READ b@0", "RUN g=2 b@0"), PAGE_A_SECOND)
    assert timeline.pass_s == 6.0


def test_a_write_takes_the_same_lane_as_a_read() -> None:
    """One drive: READ a 0-1, RUN u 1-2, WRITE a 2-3 and READ b 1-2 share it; RUN f 2-3 is the last whole op."""
    schedule, workload = by_hand("READ a@0", "RUN u a@0", "WRITE a@0", "READ b@1", "RUN f=1 b@1")
    timeline = simulate(schedule, workload, replace(PAGE_A_SECOND, update_beside_compute=True))
    assert (timeline.pass_s, timeline.io_s, timeline.update_s) == (3.0, 3.0, 1.0)
    assert (timeline.read_bytes, timeline.written_bytes) == (2 * PAGE, PAGE)


def test_an_update_takes_the_time_of_computing_where_both_share_a_processor() -> None:
    """u 0-1, then f 1-2 on one processor; side by side f ends at 1."""
    schedule, workload = by_hand("RUN u a@0", "RUN f=1 b@1")
    assert simulate(schedule, workload, PAGE_A_SECOND).pass_s == 2.0
    assert simulate(schedule, workload, replace(PAGE_A_SECOND, update_beside_compute=True)).pass_s == 1.0


def test_a_pass_in_the_steady_state_hides_reads_for_the_next() -> None:
    """One pass alone: READ a 0-1, f 1-3. Repeating itself it reads a for the next pass while g computes."""
    alone = by_hand("READ a@0", "RUN f=2 a@0", "DROP a@0", "RUN g=2 b@1")
    ahead = by_hand("RUN f=2 a@0", "DROP a@0", "READ a@0*", "RUN g=2 b@1", cyclic=True, lead_in="READ a@0")
    assert simulate(*alone, PAGE_A_SECOND).pass_s == 5.0
    assert simulate(*ahead, PAGE_A_SECOND).pass_s == 4.0


def test_a_whole_op_is_never_overtaken_by_a_later_one() -> None:
    """The caller enters ops in order: f waits 5 s for its bytes; g, whose bytes are there, ends at 7 and not at 1."""
    reads = [f"READ {block}@{page}" for page, block in enumerate("abcde")]
    schedule, workload = by_hand(*reads, "RUN f=1 e@4", "RUN g=1 h@5")
    assert simulate(schedule, workload, PAGE_A_SECOND).pass_s == 7.0


def machines() -> Iterator[Hardware]:
    """Slow, usual and fast drives; one processor for all, or one of its own for the updates."""
    for beside, per_s in product((False, True), (2e8, 1.7e9, 2e10)):
        usual = assumed_hardware()
        drive = replace(usual.read, per_s=per_s)
        yield replace(usual, read=drive, write=drive, update_beside_compute=beside)


KNOBS = (
    Knobs(lookahead=0, lag=0, tile_bytes=MiB // 4, ring=1),
    Knobs(lookahead=2, lag=1, tile_bytes=MiB // 2, ring=4),
    Knobs(lookahead=4, lag=1, tile_bytes=MiB, ring=8),
)


def predictions(workload: Workload, share: float) -> Iterator[tuple[str, Schedule, Hardware, Timeline]]:
    """The step with `share` of the durable and half as much of the carried bytes at home in HOST."""
    gain = {name: float(len(block.kind)) for name, block in workload.blocks.items()}
    room = {life: sum(b.nbytes for b in workload.of_life(life)) for life in ("durable", "carried")}
    for knobs in KNOBS:
        homes = choose_homes(
            workload, gain, knobs.tile_bytes, round(share * room["durable"]), round(share * room["carried"] / 2)
        )
        schedule = lower(workload, workload.programs["step"], place(homes), knobs)
        for hardware in machines():
            yield f"{knobs}\n{hardware}", schedule, hardware, simulate(schedule, workload, hardware)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_pass_lies_between_its_busiest_resource_and_the_serial_sum(tied: bool, deferred: bool, share: float) -> None:
    """P4, P5: no overlap beats the bound, and overlap never costs time over doing one action after the other."""
    workload = training_workload(toy_units(4, MiB, 3 * MiB, tied=tied), deferred=deferred)
    for case, schedule, hardware, timeline in predictions(workload, share):
        serial_s = sum(seconds(action, op_seconds(workload, hardware), hardware) for action in schedule.actions)
        least_s = max(timeline.limit_s, timeline.update_s)
        assert least_s * (1 - ROUNDING) <= timeline.pass_s <= serial_s * (1 + ROUNDING), (
            f"{case}\nat least {least_s} s, predicted {timeline.pass_s} s, one after the other {serial_s} s"
        )


def test_lookahead_hides_what_a_drive_as_fast_as_the_processor_can_hide() -> None:
    """P4: with everything on NVME, I/O and compute balanced, a step far ahead takes at most 1/0.8 of the bound."""
    workload = training_workload(toy_units(12, MiB, MiB), deferred=False)
    schedule = lower(workload, workload.programs["step"], place({}), KNOBS[2])
    hardware = assumed_hardware()
    busy = simulate(schedule, workload, hardware)
    drive = replace(hardware.read, per_s=hardware.read.per_s * busy.io_s / busy.compute_s)
    timeline = simulate(schedule, workload, replace(hardware, read=drive, write=drive))
    assert timeline.io_s == pytest.approx(timeline.compute_s)
    assert timeline.pass_s <= timeline.limit_s / 0.8, f"{timeline.pass_s} s, the bound is {timeline.limit_s} s"


@pytest.mark.parametrize("resident", [None, 0.0, 0.3])
@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
def test_more_memory_never_predicts_a_slower_step(deferred: bool, resident: float | None) -> None:
    """P5: a bigger budget is worth something or nothing, never less than nothing.

    With a fixed share the spare room goes to gradients of some units, whose I/O then comes elsewhere in the pass; a
    lane that takes the first ready action can lose 5 % by that (a known anomaly of list scheduling).
    """
    workload = training_workload(toy_units(3, MiB + 12288, 2 * MiB, tied=True), deferred=deferred)
    total = sum(block.nbytes for block in workload.blocks.values())
    predicted: list[tuple[int, float]] = []
    for budget in range(6 * MiB, 2 * total + 40 * MiB, total // 3):
        try:
            plan = make_plan(workload, assumed_hardware(), budget, resident)
        except BudgetError:
            assert not predicted, f"{budget} bytes do not fit, fewer did"
            continue
        predicted.append((budget, plan.timeline.pass_s))
    slack = 1.001 if resident is None else 1.05
    slower = [(less, more) for less, more in pairwise(predicted) if more[1] > less[1] * slack]
    assert len(predicted) > 3 and not slower, f"(budget, seconds): {slower}"


UNSHRUNK = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # a problem is planned several times: shrinking one takes minutes
)


def rates() -> st.SearchStrategy[Rate]:
    """Of a slow drive up to memory, in bytes/s."""
    return st.floats(2e8, 2e11).map(rate)


@st.composite
def any_machine(draw: st.DrawFn, *, device: bool) -> Hardware:
    read, write = draw(rates()), draw(rates())
    return Hardware(
        read=read,
        write=write,
        mixed=draw(st.one_of(st.none(), st.just(rate(min(read.per_s, write.per_s) * 0.8)))),
        compute=rate(draw(st.floats(1e9, 1e13))),
        update=draw(rates()),
        h2d=draw(rates()) if device else None,
        d2h=draw(rates()) if device else None,
        update_beside_compute=device or draw(st.booleans()),
        io_steals=0.0 if device else draw(st.sampled_from([0.0, 0.1, 0.4])),
    )


@st.composite
def planning_problems(draw: st.DrawFn) -> tuple[Workload, Hardware, bool]:
    """A training step of any shape, on any machine, with or without memory of its own to compute in."""
    device = draw(st.booleans())
    units = toy_units(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 700)) * PAGE,
        draw(st.integers(1, 3000)) * PAGE,
        tied=draw(st.booleans()),
        norm=draw(st.sampled_from([0, PAGE])),
        activation=draw(st.sampled_from([0, 0, 40, 900])) * PAGE,
        flops_per_byte=draw(st.floats(1, 1e5)),
    )
    return training_workload(units, deferred=draw(st.booleans())), draw(any_machine(device=device)), device


@given(planning_problems(), st.floats(0, 1.2))
@settings(UNSHRUNK)
def test_a_plan_of_any_step_lies_between_its_bounds(problem: tuple[Workload, Hardware, bool], share: float) -> None:
    """P4, P5: no plan beats its busiest resource, and none is slower than one action after the other."""
    workload, hardware, device = problem
    total = sum(block.nbytes for block in workload.blocks.values())
    try:
        plan = make_plan(workload, hardware, round(share * total), None, 2 * total if device else None)
    except BudgetError:
        return
    timeline = plan.timeline
    assert timeline.limit_s * (1 - ROUNDING) <= timeline.pass_s <= timeline.serial_s * (1 + ROUNDING), (
        f"{plan.knobs}\nbusy {timeline.busy()} s, predicted {timeline.pass_s} s, in a row {timeline.serial_s} s"
    )


@given(planning_problems(), st.lists(st.floats(0.05, 1.2), min_size=2, max_size=4))
@settings(UNSHRUNK)
def test_more_memory_never_predicts_a_slower_step_of_any_kind(
    problem: tuple[Workload, Hardware, bool], shares: list[float]
) -> None:
    """P5: who buys memory is never promised less speed for it, to two percent: lanes that take the first ready action
    can lose that much by having more room, and the planner does not look at every way to use a budget.
    """
    workload, hardware, device = problem
    total = sum(block.nbytes for block in workload.blocks.values())
    found: list[tuple[int, float, object]] = []
    for budget in sorted(round(share * total) for share in shares):
        try:
            plan = make_plan(workload, hardware, budget, None, 2 * total if device else None)
        except BudgetError:
            assert not found, f"{budget} bytes do not fit, {found[-1][0]} did"
            continue
        found.append((budget, plan.timeline.pass_s, plan.knobs))
    slower = [(less, more) for less, more in pairwise(found) if more[1] > less[1] * 1.02]
    assert not slower, f"(budget, seconds, knobs): {slower}"
