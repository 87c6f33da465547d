"""P5: what a step really did, made from spans and measurements.

Scope: figures from spans, causes of waits, and the unit costs that the plan reckons with.
Not here: measurements of the machine (`test_measure.py`), whole runs (`test_run.py`), the simulation
(`test_simulate.py`).
"""

import threading
from dataclasses import replace

import pytest
from models import MODELS

from megatrain.model import build, find_units, model_config
from megatrain.profile import profile
from megatrain.programs import UnitSize, training_workload
from megatrain.timing import time_units
from tiering.hardware import assumed_hardware
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import op_seconds
from tiering.trace import UPDATE, WAIT, InPass, Span, Trace, figures, name_waits
from tiering.workload import PAGE


def span(what: str, begin_s: float, end_s: float, nbytes: int = 0, name: str = "x") -> Span:
    return Span(what=what, name=name, begin_s=begin_s, end_s=end_s, nbytes=nbytes)


def test_overlapping_transfers_keep_the_lane_busy_once() -> None:
    """Two reads from 0 to 2 and 1 to 3 and a write from 5 to 6: four seconds of I/O, not five."""
    found = figures(
        [
            span("READ", 0, 2, 10),
            span("READ", 1, 3, 20),
            span("WRITE", 5, 6, 7),
            span("update", 2, 4),
            span(WAIT, 3, 3.5, name="READ L7.weight"),
            span(WAIT, 6, 6.25, name="READ L7.weight"),
        ],
        wall_s=7.0,
    )
    assert (found.io_s, found.read_s, found.write_s, found.update_s) == (4, 3, 1, 2)
    assert (found.read_bytes, found.written_bytes) == (30, 7)
    assert found.stalls == {"READ L7.weight": 0.75}
    assert found.stall_s == 0.75


def hand_made() -> Schedule:
    """READ a, READ b, an update of b, DROP b, and an op on a where b was: it waits for all of them."""

    def action(verb: Verb, name: str, lane: str, *places: tuple[str, int, bool]) -> Action:
        operands = tuple(
            Operand(block=block, lo=0, hi=PAGE, address=page * PAGE, reads=verb is Verb.RUN, writes=writes)
            for block, page, writes in places
        )
        return Action(verb=verb, name=name, lane=lane, operands=operands)  # type: ignore[arg-type]

    actions = [
        action(Verb.READ, "READ a/weight[0:4096]", "io", ("a/weight", 0, False)),
        action(Verb.READ, "READ b/exp_avg[0:4096]", "io", ("b/exp_avg", 1, False)),
        action(Verb.RUN, "upd.b#0", "update", ("b/exp_avg", 1, True)),
        action(Verb.DROP, "DROP b/exp_avg[0:4096]", "io", ("b/exp_avg", 1, False)),
        action(Verb.RUN, "fwd.a", "compute", ("a/weight", 0, False), ("a/activation", 1, True)),
    ]
    waits = order(actions, False)
    return Schedule(
        name="hand", actions=tuple(replace(a, after=after) for a, after in zip(actions, waits, strict=True))
    )


@pytest.mark.parametrize(
    ("read_a_ends", "read_b_ends", "update", "cause"),
    [
        (5.0, 2.0, (2.0, 3.0), "READ a/weight[0:4096]"),
        (2.0, 5.0, (5.0, 6.0), "READ b/exp_avg[0:4096]"),
        (2.0, 0.5, (0.5, 6.0), "upd.b#0"),
    ],
    ids=["the weight came last", "the moment came last, and its update ran in the wait", "the update ran before"],
)
def test_a_wait_is_put_down_to_the_action_that_ended_it(
    read_a_ends: float, read_b_ends: float, update: tuple[float, float], cause: str
) -> None:
    """P5: of all that an op comes after, also through a DROP, the last one to end; an update that the waiting thread
    itself ran is no cause, what it came after is.
    """
    schedule = hand_made()

    def at(line: int) -> InPass:
        return InPass(pass_number=3, schedule=schedule, line=line)

    begun, ended = update
    wait = Span(what=WAIT, name="?", begin_s=1, end_s=6.5, paused_s=1.0 if begun > 1 else 0.0, at=at(4))
    spans = [
        wait,
        Span(what="READ", name="READ a/weight[0:4096]", begin_s=0, end_s=read_a_ends, nbytes=PAGE, at=at(0)),
        Span(what="READ", name="READ b/exp_avg[0:4096]", begin_s=0, end_s=read_b_ends, nbytes=PAGE, at=at(1)),
        Span(what=UPDATE, name="upd.b#0", begin_s=begun, end_s=ended, nbytes=PAGE, at=at(2)),
        Span(what="READ", name="another pass's", begin_s=0, end_s=6.4, at=replace(at(0), pass_number=4)),
    ]
    named = name_waits(spans)
    assert named[1:] == spans[1:], "only waits are renamed"
    assert (named[0].name, named[0].nbytes) == (cause, PAGE), f"{named[0]}"
    stalls = figures(named, 7.0).stalls
    assert list(stalls) == [cause.partition("[")[0].partition("#")[0]], f"{stalls}"
    assert stalls == {next(iter(stalls)): pytest.approx(5.5 - wait.paused_s)}


def test_a_trace_loses_no_span_of_any_thread() -> None:
    trace = Trace()

    def note() -> None:
        for _ in range(500):
            trace.add("READ", "x", 0.0, 1)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans, found = trace.take()
    assert len(spans) == found.read_bytes == 2000
    assert trace.take()[0] == []


@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2", "qwen3"])
def test_flops_are_two_a_weight_and_token_and_three_times_that_backward(model: str) -> None:
    """Matrix products of one micro-batch by hand: 2 flops a weight and token, twice that for gradients, and once more
    for the recompute; attention scores come on top.
    """
    units = find_units(build(model_config(MODELS[model])))
    rows, tokens = 2, 16
    costs = profile(units, rows, tokens)
    for unit in units:
        cost = costs[unit.name]
        assert not cost.assumed, unit.name
        matrices = sum(b.slice.numel for b in unit.bindings if len(b.slice.shape) == 2)
        if "embed" in unit.name or ".w" in unit.name or "norm" in unit.name or "ln_f" in unit.name:
            assert cost.forward_flops == 0, unit.name
            continue
        products = 2 * rows * tokens * matrices
        attention = 4 * rows * tokens * tokens * 32 if unit is not units.head else 0  # scores and values, width 32
        assert products <= cost.forward_flops <= products + 2 * attention, unit.name
        assert 2.9 * products <= cost.backward_flops <= 3.1 * products + 6 * attention, unit.name


def test_the_workspace_covers_the_logits_and_the_largest_gradient() -> None:
    """PL-12: one micro-batch of logits with its gradient, in FP32; and a layer's own gradient of a matrix."""
    units = find_units(build(model_config(MODELS["llama"])))
    costs = profile(units, 4, 16)
    logits = 4 * 4 * 16 * 256
    assert 2 * logits <= costs["lm_head"].workspace_bytes <= 6 * logits
    largest = max(4 * place.numel for place in units.units[1].slices)
    assert costs["model.layers.0"].workspace_bytes > largest
    assert costs["model.layers.0"].output_bytes == 4 * 4 * 16 * 32


def test_a_cost_that_could_not_be_seen_is_called_assumed() -> None:
    """Style rule 9: routing to experts looks at values; of four experts two are reckoned with."""
    units = find_units(build(model_config(MODELS["mixtral"])))
    costs = profile(units, 2, 16)
    layer = units.units[1]
    assert costs[layer.name].assumed
    experts = sum(s.numel for s in layer.slices if len(s.shape) == 3)
    others = sum(s.numel for s in layer.slices if len(s.shape) < 3)
    assert costs[layer.name].forward_flops == 2 * 2 * 16 * (experts / 2 + others)


def test_units_are_timed_by_running_them_and_left_as_they_were() -> None:
    """P5: every unit has a time, units of one kind the same one, and the model runs its own forwards again after."""
    units = find_units(build(model_config(MODELS["llama-tied"])))
    times = time_units(units, 2, 16)
    assert times.keys() == {unit.name for unit in units}
    layers = [times[f"model.layers.{number}"] for number in range(3)]
    assert layers[0] == layers[1] == layers[2]
    assert all(time.forward_s > 0 for time in times.values())
    assert all(time.backward_s > 0 for name, time in times.items() if name != "lm_head")
    assert layers[0].backward_s > layers[0].forward_s
    assert all("forward" not in vars(module) for module in units.model.modules())
    assert all(parameter.is_meta for parameter in units.model.parameters())


def test_measured_seconds_go_before_flops() -> None:
    """P5: an op that was timed takes that long, whatever its flops; another one is reckoned."""
    hardware = assumed_hardware()
    sizes = [UnitSize(name="a", nbytes=4096, forward_flops=1e9, forward_s=0.5), UnitSize(name="b", nbytes=4096)]
    a_second = hardware.compute.per_s
    sizes[1] = replace(sizes[1], forward_flops=a_second, backward_flops=2 * a_second)  # with its forward, done once
    found = op_seconds(training_workload(sizes, deferred=False), hardware)
    assert found["fwd.a"] == 0.5
    assert found["loss"] == pytest.approx(2.0)
