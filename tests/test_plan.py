"""Plans: never above the budget, refused with a sum that adds up, and moving no byte that need not move.

Scope: `tiering/plan.py` and the closed forms of `tiering/costs.py`, over toy workloads.
Not here: that the schedules of a plan are right (`test_lower.py`), predicted times (`test_simulate.py`).
"""

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import MODES, parameters, toy_units, toy_workload

from megatrain.programs import training_workload
from tiering.check import check
from tiering.costs import step_io_bytes
from tiering.errors import BudgetError
from tiering.hardware import assumed_hardware
from tiering.homes import place
from tiering.lower import lower
from tiering.plan import MiB, Plan, make_plan, refuse
from tiering.schedule import Schedule, Verb, moved_bytes
from tiering.turns import Knobs
from tiering.workload import PAGE, Workload

HARDWARE = assumed_hardware()
FEW = settings(max_examples=12, derandomize=True, deadline=None)
PLENTY = 1 << 50


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Models of a few MiB, with awkward sizes: layers of a page or more, an embedding of up to twenty layers."""
    layer = draw(st.sampled_from([PAGE, 5 * PAGE, MiB // 4 + PAGE, MiB, MiB + 7 * PAGE]))
    embedding = min(draw(st.integers(1, 20)) * layer, 6 * MiB)
    units = toy_units(draw(st.integers(1, 3)), layer, embedding // PAGE * PAGE, tied=draw(st.booleans()))
    return toy_workload(units, draw(st.sampled_from(MODES)))


shares = st.sampled_from([None, 0.0, 0.25, 0.5, 0.9, 1.0])


def refusal(workload: Workload, budget: int, resident: float | None) -> str:
    """What `make_plan` says about a budget that is too small."""
    with pytest.raises(BudgetError) as caught:
        make_plan(workload, HARDWARE, budget, resident)
    return str(caught.value)


def named_budget(message: str) -> int:
    """Bytes of the smallest budget that a refusal names."""
    found = re.search(r"Fix: host_budget >= (\d+)MiB", message)
    assert found, message
    return int(found[1]) * MiB


def fits(workload: Workload, budget: int, resident: float | None) -> Plan | None:
    try:
        return make_plan(workload, HARDWARE, budget, resident)
    except BudgetError:
        return None


def total(workload: Workload) -> int:
    return sum(block.nbytes for block in workload.blocks.values())


@given(workloads(), shares, st.floats(0.0, 1.5))
@FEW
def test_the_arena_never_exceeds_the_budget(workload: Workload, resident: float | None, share: float) -> None:
    """P2: whatever the budget, a plan keeps to it, its lines add up to its arena, and its schedules are proven."""
    budget = round(share * total(workload)) + MiB
    plan = fits(workload, budget, resident)
    if plan is None:
        return
    assert plan.host_bytes <= budget
    assert sum(line.nbytes for line in plan.lines) == plan.host_bytes, plan.lines
    assert all(line.nbytes >= 0 for line in plan.lines), plan.lines
    for schedule in plan.schedules.values():
        assert schedule.host_bytes <= plan.host_bytes
        if len(schedule.actions) < 400:
            check(workload, plan.placement, schedule)
    check(workload, plan.placement, plan.save, whole=False)


@given(workloads(), shares)
@FEW
def test_a_refusal_names_a_budget_that_works_and_none_below_it_does(workload: Workload, resident: float | None) -> None:
    """P2: planning with the very figure of the Fix line succeeds, a MiB less is refused with the same figure."""
    least = named_budget(refusal(workload, 1, resident))
    plan = fits(workload, least, resident)
    assert plan is not None, f"refused with the budget it named: {refusal(workload, least, resident)}"
    assert plan.host_bytes <= least
    below = refusal(workload, least - MiB, resident)
    assert named_budget(below) == least, below


@given(workloads(), shares)
@FEW
def test_the_lines_of_a_refusal_add_up_to_what_it_names(workload: Workload, resident: float | None) -> None:
    """P2: a person can redo the sum: its lines, the sum line, the need and the budget of the Fix line agree."""
    message = refusal(workload, 1, resident)
    rows = re.findall(r"^  (\S.*?) +([\d.]+) MiB$", message, re.MULTILINE)
    *lines, (last, sum_) = [(what, float(mib)) for what, mib in rows]
    assert last == "sum", message
    assert sum(mib for _, mib in lines) == pytest.approx(sum_, abs=0.05 * (len(lines) + 1)), message
    needed = re.match(r"HOST needs ([\d.]+) MiB, the budget is ([\d.]+) MiB", message)
    assert needed and float(needed[1]) == sum_ and float(needed[2]) == 0.0, message
    assert sum_ - 0.05 <= named_budget(message) / MiB < sum_ + 1.05, message


@given(workloads(), shares, st.integers(0, 40))
@settings(FEW, max_examples=25)
def test_the_quick_answer_agrees_with_the_planner(workload: Workload, resident: float | None, mib: int) -> None:
    """P2: `refuse`, which knows no machine, refuses exactly what `make_plan` refuses."""
    plan = fits(workload, mib * MiB + 1, resident)
    try:
        refuse(workload, mib * MiB + 1, resident)
    except BudgetError as error:
        assert plan is None, f"refused, but {plan.knobs} fit in {plan.host_bytes} bytes:\n{error}"
    else:
        assert plan is not None, refusal(workload, mib * MiB + 1, resident)


def durable_at_home(plan: Plan) -> int:
    return sum(plan.placement.host_bytes.get(block.name, 0) for block in plan.workload.of_life("durable"))


def moved(plan: Plan) -> int:
    return plan.timeline.read_bytes + plan.timeline.written_bytes


@given(workloads())
@FEW
def test_resident_0_pins_no_durable_byte_and_1_moves_none(workload: Workload) -> None:
    """P2: the two ends of `tiers.resident`."""
    none = make_plan(workload, HARDWARE, PLENTY, 0.0)
    assert durable_at_home(none) == 0, none.placement
    full = make_plan(workload, HARDWARE, PLENTY, 1.0)
    assert durable_at_home(full) == sum(block.nbytes for block in workload.of_life("durable"))
    assert moved(full) == 0, f"{moved(full)} bytes move although all have a home in HOST"
    for name, schedule in full.schedules.items():
        assert {action.verb for action in schedule.actions} <= {Verb.RUN, Verb.DROP}, name


@given(workloads(), st.sampled_from([0.25, 0.5, 0.75]))
@FEW
def test_a_share_is_pinned_to_within_one_block(workload: Workload, share: float) -> None:
    """Homes come in blocks and tiles, so a share can be met only so far; it is never exceeded."""
    durable = [block.nbytes for block in workload.of_life("durable")]
    found = durable_at_home(make_plan(workload, HARDWARE, PLENTY, share))
    wanted = share * sum(durable)
    assert wanted - max(durable) < found <= wanted + 1, f"{found} of {sum(durable)}, wanted {wanted}"


def turn_around_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of weights that a second use found in HOST: no DROP lies between it and the use before.

    The sum of 28 bytes counts a use in forward and one in backward for each unit. A head has both in one op (loss):
    one use less, and so one hit. A tied weight has three uses, the loss among them: one hit only makes up for that.
    """
    hits = 0
    for block in workload.blocks.values():
        if block.kind != "weight":
            continue
        events = [
            "drop" if action.verb is Verb.DROP else "use"
            for action in schedule.actions
            if (action.verb is Verb.DROP or action.lane == "compute")
            and block.name in {x.block for x in action.operands}
        ]
        found = sum(here == "use" and before == "use" for before, here in pairwise([events[-1], *events]))
        uses = events.count("use")
        hits += (found + 2 - uses) * block.nbytes
    return hits


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("layers", [1, 2, 5, 9])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_fused_step_moves_28_bytes_a_parameter_less_its_turn_arounds(
    tied: bool, layers: int, lag: int, lookahead: int
) -> None:
    """Design, section 3: 16 read and 12 written a parameter; what is still there at a turn-around is not read again."""
    workload = training_workload(toy_units(layers, 6 * PAGE, 16 * PAGE, tied=tied), deferred=False)
    knobs = Knobs(lookahead=lookahead, lag=lag, tile_bytes=2 * PAGE, ring=4)
    schedule = lower(workload, workload.programs["step"], place({}), knobs)
    read, written = moved_bytes(schedule.actions, Verb.READ), moved_bytes(schedule.actions, Verb.WRITE)
    assert written == 12 * parameters(workload)
    bound = step_io_bytes(parameters(workload))
    assert read + written == bound - turn_around_bytes(workload, schedule), (
        f"{(read + written) / parameters(workload)} bytes a parameter\n{schedule.text()}"
    )
    assert read + written <= bound


def test_a_deferred_step_moves_8_more_for_gradients_on_nvme_at_most() -> None:
    """Design, section 7: gradients that do not fit in RAM cost a write and a read, 36 bytes a parameter."""
    workload = training_workload(toy_units(9, 6 * PAGE, 16 * PAGE), deferred=True)
    knobs = Knobs(lookahead=1, lag=0, tile_bytes=2 * PAGE, ring=4)
    schedule = lower(workload, workload.programs["step"], place({}), knobs)
    found = moved_bytes(schedule.actions, Verb.READ) + moved_bytes(schedule.actions, Verb.WRITE)
    assert 28 * parameters(workload) < found <= 36 * parameters(workload), found / parameters(workload)


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.5, 0.8])
@pytest.mark.parametrize("layers", [4, 12])
def test_a_resident_share_saves_what_the_closed_form_says(layers: int, share: float) -> None:
    """Design, section 3: weights first (3 bytes moved for each), then moments (2 for each)."""
    workload = training_workload(toy_units(layers, 4 * MiB, 4 * MiB, norm=0), deferred=False)
    plan = make_plan(workload, HARDWARE, PLENTY, share)
    bound = step_io_bytes(parameters(workload), durable_at_home(plan))
    turn_arounds = 8 * 4 * MiB  # units kept over the turn of the pass and over its border
    assert bound - turn_arounds <= moved(plan) <= bound, f"{moved(plan)} bytes, the formula says {bound}"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
def test_more_memory_moves_fewer_bytes_or_makes_a_faster_step(deferred: bool, tied: bool) -> None:
    """P2, P5: with `resident` left to the planner, bytes may go up only where they buy time (a longer lookahead)."""
    workload = training_workload(toy_units(3, MiB, 3 * MiB, tied=tied), deferred=deferred)
    least = named_budget(refusal(workload, 1, None))
    budgets = [least, *range(least + MiB, 2 * total(workload), total(workload) // 5), PLENTY]
    plans = [make_plan(workload, HARDWARE, budget) for budget in budgets]
    for less, more in pairwise(plans):
        faster = more.timeline.pass_s < less.timeline.pass_s * 0.999
        assert moved(more) <= moved(less) or faster, (
            f"{less.host_bytes} bytes of HOST: {moved(less)} moved in {less.timeline.pass_s} s with {less.knobs}\n"
            f"{more.host_bytes} bytes of HOST: {moved(more)} moved in {more.timeline.pass_s} s with {more.knobs}"
        )
    assert moved(plans[-1]) == 0, "with all the memory in the world a byte still moves"


def test_load_and_save_move_each_durable_home_once() -> None:
    """P3: what lives in HOST is read when a run starts and written when it commits; carried bytes are not state."""
    workload = training_workload(toy_units(3, MiB, 3 * MiB), deferred=True)
    plan = make_plan(workload, HARDWARE, total(workload) // 2, 0.4)
    homes = {b.name: n for b in workload.of_life("durable") if (n := plan.placement.host_bytes.get(b.name, 0))}
    for schedule, verb in ((plan.load, Verb.READ), (plan.save, Verb.WRITE)):
        assert {action.verb for action in schedule.actions} == {verb}
        found = {x.block: (x.lo, x.hi, x.address) for action in schedule.actions for x in action.operands}
        assert found == {name: (0, held, plan.placement.address[name]) for name, held in homes.items()}


def test_bytes_at_home_count_every_byte_once() -> None:
    """P2: HOST and NVME shares of a kind add up to all of it."""
    workload = training_workload(toy_units(3, MiB, 3 * MiB), deferred=True)
    plan = make_plan(workload, HARDWARE, total(workload) // 2)
    for kind in ("weight", "exp_avg", "exp_avg_sq", "grad"):
        host, nvme = plan.bytes_at(kind)
        assert host >= 0 and nvme >= 0
        assert host + nvme == sum(block.nbytes for block in workload.blocks.values() if block.kind == kind)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
def test_a_model_of_100_billion_parameters_is_planned_within_a_minute(deferred: bool) -> None:
    """P2: 80 layers of 1.25e9 parameters and 128 GiB of HOST: the question is answered before anything is loaded."""
    layer, embedding = 5_000_003_584, 4_194_304_000
    workload = training_workload(toy_units(80, layer // PAGE * PAGE, embedding // PAGE * PAGE), deferred=deferred)
    begin_s = time.perf_counter()
    plan = make_plan(workload, HARDWARE, 128 << 30)
    took_s = time.perf_counter() - begin_s
    actions = sum(len(schedule.actions) for schedule in plan.schedules.values())
    print(f"planned {parameters(workload)} parameters, {actions} actions, in {took_s:.1f} s with {plan.knobs}")
    assert plan.host_bytes <= 128 << 30
    assert took_s < 60, f"{took_s:.1f} s"
