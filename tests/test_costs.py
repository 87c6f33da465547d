"""Closed forms: sums worked by hand, laws that hold for all sizes, and the tool's own plans beside them.

Scope: `tiering/costs.py`. Not here: schedules against `step_io_bytes` (`test_plan.py`, `test_tierplan.py`), the sums of
docs/planning.md (`test_docs.py`), the doctests of the module (`test_layers.py`).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.catalog.estimate import estimate
from megatrain.catalog.known_models import resolve_model
from megatrain.catalog.shapes import active_parameters
from megatrain.programs import UnitSize, training_workload
from tiering.costs import (
    Busy,
    activation_bytes,
    activation_io_bytes,
    attention_flops,
    balancing_share,
    d2h_bytes,
    disk_bytes,
    drive_life_days,
    durable_bytes,
    export_bytes,
    h2d_bytes,
    hiding_tokens,
    hiding_tokens_rule,
    io_seconds,
    ram_knees,
    state_bytes,
    step_flops,
    step_io_bytes,
    step_read_bytes,
    step_written_bytes,
    update_bytes,
    written_bytes_per_day,
)
from tiering.hardware import Hardware, Rate
from tiering.plan import make_plan

MiB = 1 << 20
SEVEN = 7_000_000_000
HUNDRED = 100_000_000_000
MANY = settings(max_examples=60, derandomize=True, deadline=None)

parameters_ = st.integers(1, 10**13)
shares = st.floats(0.0, 1.5)
seconds_ = st.floats(0.0, 1e6)
rates = st.floats(1e6, 1e12)


@st.composite
def busy_steps(draw: st.DrawFn) -> Busy:
    """Steps of any proportions, on a machine with a device or without one."""
    shared = draw(st.booleans())
    return Busy(
        nvme_s=draw(seconds_),
        compute_s=draw(seconds_),
        update_s=draw(seconds_),
        h2d_s=0.0 if shared else draw(seconds_),
        d2h_s=0.0 if shared else draw(seconds_),
        shared=shared,
        io_steals=draw(st.floats(0.0, 0.9)),
    )


@pytest.mark.parametrize(
    ("resident", "gradients", "moved"),
    [(0, 0, 28), (0, 4, 36), (2, 0, 22), (4, 0, 16), (4, 4, 24), (8, 0, 8), (12, 0, 0), (12, 4, 8), (99, 0, 0)],
)
def test_bytes_a_parameter_are_the_hand_worked_ones(resident: int, gradients: int, moved: int) -> None:
    """P5; design, sections 3 and 5: 28 without clipping, 36 with all gradients on NVMe, 3 and then 2 saved a byte."""
    found = step_io_bytes(SEVEN, resident * SEVEN, gradients * SEVEN) / SEVEN
    assert found == moved, f"{found} bytes a parameter, by hand {moved}"


def test_seven_billion_parameters_on_disk_move_196_gb() -> None:
    """P5: 112 GB read and 84 GB written; 16 and 12 bytes a parameter."""
    read, written = step_read_bytes(SEVEN), step_written_bytes(SEVEN)
    assert (read, written) == (112 * 10**9, 84 * 10**9), f"read {read}, written {written}"
    assert read + written == step_io_bytes(SEVEN) == 196 * 10**9, f"{read + written}, {step_io_bytes(SEVEN)}"


def test_a_step_is_read_and_written_as_a_table_of_kinds_says() -> None:
    """P5: half of the weights resident: 2P weights on NVMe are read twice and written once, moments once each."""
    read, written = step_read_bytes(SEVEN, 2 * SEVEN), step_written_bytes(SEVEN, 2 * SEVEN)
    by_hand = (2 * 2 + 8) * SEVEN, (2 + 8) * SEVEN
    assert (read, written) == by_hand, f"{(read, written)}, by hand {by_hand}"


@MANY
@given(parameters_, shares, shares, st.floats(0.0, 1.0))
def test_more_resident_bytes_never_move_more(parameters: int, one: float, other: float, spilled: float) -> None:
    """P5: read, written and both fall or stay as more is resident; nothing falls below zero."""
    low, high = sorted(round(share * durable_bytes(parameters)) for share in (one, other))
    gradients = round(spilled * 4 * parameters)
    for cost in (step_read_bytes, step_written_bytes, step_io_bytes):
        less, more = cost(parameters, low, gradients), cost(parameters, high, gradients)
        assert 0 <= more <= less, f"{cost.__name__}: {less} bytes with {low} resident, {more} with {high}"


@MANY
@given(parameters_, shares)
def test_both_spellings_of_the_formula_are_one(parameters: int, share: float) -> None:
    """Design, section 3: `IO(C) = 28 P - 3 min(C, 4P) - 2 max(0, min(C, 12P) - 4P)`."""
    resident = round(share * durable_bytes(parameters))
    P, C = parameters, resident
    by_hand = 28 * P - 3 * min(C, 4 * P) - 2 * max(0, min(C, 12 * P) - 4 * P)
    assert step_io_bytes(P, C) == by_hand, f"{step_io_bytes(P, C)} bytes, by hand {by_hand}"


@MANY
@given(parameters_, st.floats(0.0, 14.0))
def test_copies_in_bf16_move_what_the_formula_says(parameters: int, share: float) -> None:
    """Design, section 6: `30 P - 3 min(C, 2P) - 2 max(0, min(C, 14P) - 2P)`; read and written are its two parts."""
    P, C = parameters, round(share * parameters)
    by_hand = 30 * P - 3 * min(C, 2 * P) - 2 * max(0, min(C, 14 * P) - 2 * P)
    assert step_io_bytes(P, C, bf16=True) == by_hand, f"{step_io_bytes(P, C, bf16=True)} bytes, by hand {by_hand}"
    read, written = step_read_bytes(P, bf16=True), step_written_bytes(P, bf16=True)
    assert (read, written) == (16 * P, 14 * P), f"{(read, written)} with nothing resident, by hand {(16 * P, 14 * P)}"
    assert h2d_bytes(P, number_bytes=2) * 2 == h2d_bytes(P)


@MANY
@given(parameters_)
def test_a_byte_of_ram_saves_3_then_2_then_nothing(parameters: int) -> None:
    """Design, section 3: the knees are where the saving changes."""
    weights, everything = ram_knees(parameters)

    def saved(at: int) -> int:
        return step_io_bytes(parameters, at) - step_io_bytes(parameters, at + 1)

    found = [saved(at) for at in (0, weights - 1, weights, everything - 1, everything)]
    assert found == [3, 3, 2, 2, 0], f"saved at 0 and around {weights} and {everything}: {found}"


def test_knees_are_where_one_looks_for_them() -> None:
    """P5: 7e9 parameters: 28 GB of weights, 84 GB with moments, 112 GB with the gradients that clipping keeps."""
    found = ram_knees(SEVEN), ram_knees(SEVEN, clipping=True)
    by_hand = (28 * 10**9, 84 * 10**9), (28 * 10**9, 112 * 10**9)
    assert found == by_hand, f"{found}, by hand {by_hand}"


def test_rooms_are_the_hand_worked_ones() -> None:
    """P2; 100e9 parameters: 1.6 TB of state, 2.4 TB in two slots, what is spilled once, 400 and 200 GB exported."""
    found = state_bytes(HUNDRED), disk_bytes(HUNDRED), disk_bytes(HUNDRED, spilled_bytes=98), export_bytes(HUNDRED)
    by_hand = 16 * 10**11, 24 * 10**11, 24 * 10**11 + 98, 4 * 10**11
    assert found == by_hand, f"{found}, by hand {by_hand}"
    assert export_bytes(HUNDRED, number_bytes=2) == 2 * 10**11, export_bytes(HUNDRED, number_bytes=2)


def test_activations_are_one_vector_a_token_and_boundary() -> None:
    """P2: 2048 tokens, width 1024, 3 layers and the final norm: 4 x 8 MiB, spilled once each way."""
    found = activation_bytes(2048, hidden=1024, layers=3)
    assert found == 4 * 8 * MiB, f"{found / MiB} MiB, by hand {4 * 8}"
    assert activation_io_bytes(found) == 64 * MiB, f"{activation_io_bytes(found) / MiB} MiB moved, by hand 64"


def test_copies_are_12_bytes_a_parameter_and_8_with_weights_kept() -> None:
    """P5: 8 to the device and 4 back; a weight that stays from forward to backward is copied once. Activations ride
    along both ways.
    """
    found = h2d_bytes(SEVEN), h2d_bytes(SEVEN, kept_bytes=4 * SEVEN), d2h_bytes(SEVEN)
    by_hand = 8 * SEVEN, 4 * SEVEN, 4 * SEVEN
    assert found == by_hand, f"{found}, by hand {by_hand}"
    moved = h2d_bytes(SEVEN, activations=5) + d2h_bytes(SEVEN, activations=5)
    assert moved == 12 * SEVEN + 10, f"{moved} bytes, by hand {12 * SEVEN + 10}"


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "qwen3-4b", "mixtral-8x7b"])
def test_flops_in_closed_form_are_those_of_the_estimate(model: str) -> None:
    """P5: 8 A T and attention, against the sum over units; an embedding is looked up, a tied one multiplies too."""
    _, config = resolve_model(model)
    tokens, seq_len = 8192, 2048
    active, costs = active_parameters(config), estimate(config, tokens // seq_len, seq_len, gpu=True)
    assert active is not None and costs is not None
    looked_up = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    by_hand = step_flops(active - looked_up, tokens)
    by_hand += attention_flops(tokens, seq_len, width, config["num_hidden_layers"])
    found = sum(cost.forward_flops + cost.backward_flops for cost in costs.values())
    assert found == pytest.approx(by_hand, rel=0.01), f"{found:.4g} FLOP estimated, by hand {by_hand:.4g}"


def test_seconds_of_100_billion_parameters_are_the_hand_worked_ones() -> None:
    """P5: nothing resident, 7 and 6 GB/s: 1600 / 7 + 1200 / 6 s with one drive, a quarter of it with four."""
    read, written = step_read_bytes(HUNDRED), step_written_bytes(HUNDRED)
    for drives in (1, 4):
        found = io_seconds(read, written, drives * 7e9, drives * 6e9)
        by_hand = (1600 / 7 + 1200 / 6) / drives
        assert found == pytest.approx(by_hand), f"{drives} drives: {found} s, by hand {by_hand} s"
    assert io_seconds(read, written, 7e9, 6e9, stretch=1.5) == pytest.approx(1.5 * (1600 / 7 + 1200 / 6))


@MANY
@given(busy_steps())
def test_the_lower_bound_never_exceeds_the_upper(step: Busy) -> None:
    """P5: and every resource lies between zero and the lower bound."""
    assert 0 <= step.lower_s <= step.upper_s * (1 + 1e-12), f"{step}: {step.lower_s} s at least, {step.upper_s} at most"
    alone = (step.nvme_s, step.h2d_s, step.d2h_s, step.compute_s, step.update_s)
    assert max(alone) <= step.lower_s, f"{step}: the busiest takes {max(alone)} s, the bound is {step.lower_s} s"


def test_updates_add_to_computing_where_they_share_processors() -> None:
    """P5: 60 s of computing and 3 s of updates beside 61 s of I/O: the cores are the bottleneck only if shared."""
    apart = Busy(nvme_s=61.0, compute_s=60.0, update_s=3.0)
    shared = Busy(nvme_s=61.0, compute_s=60.0, update_s=3.0, shared=True)
    found = (apart.lower_s, apart.bottleneck), (shared.lower_s, shared.bottleneck)
    assert found == ((61.0, "NVMe"), (63.0, "compute")), str(found)
    assert apart.upper_s == shared.upper_s == 124.0, f"{apart.upper_s} s and {shared.upper_s} s, by hand 124"


@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
def test_the_simulation_has_the_bounds_of_the_closed_form(deferred: bool) -> None:
    """P5: `Busy` from a plan's bytes and flops is the timeline's limit and serial time, and the step is between."""
    units = [
        UnitSize(name=name, nbytes=4 * MiB, forward_flops=4e6, backward_flops=12e6)
        for name in ("embed", *(f"L{i}" for i in range(8)), "head")
    ]
    rate = Rate(per_s=1e9, source="derived", how="round figures")
    machine = Hardware(read=rate, write=rate, compute=rate, update=rate)
    plan = make_plan(training_workload(units, deferred=deferred), machine, 48 * MiB)
    timeline = plan.timeline
    by_hand = Busy(
        nvme_s=io_seconds(timeline.read_bytes, timeline.written_bytes, 1e9, 1e9),
        compute_s=((len(units) - 1) * 16e6 + 12e6) / 1e9,  # the head computes nothing again
        update_s=update_bytes(len(units) * MiB) / 1e9,
        shared=True,
    )
    found, wanted = (timeline.limit_s, timeline.serial_s), (by_hand.lower_s, by_hand.upper_s)
    assert found == pytest.approx(wanted, rel=0.01), f"bounds {found} s, by hand {wanted} s"
    assert by_hand.lower_s * 0.99 <= timeline.pass_s <= by_hand.upper_s * 1.01, f"{timeline.pass_s} s, bounds {wanted}"


@MANY
@given(parameters_, rates, rates)
def test_the_rule_for_hidden_io_knows_no_parameters(parameters: int, compute: float, drive: float) -> None:
    """Design, section 3: `3.5 F / B` is the exact form with nothing resident and nothing spilled, whatever P is."""
    rule = hiding_tokens_rule(compute, drive)
    exact = hiding_tokens(step_io_bytes(parameters) / drive, step_flops(parameters, 1) / compute)
    assert exact == pytest.approx(rule, rel=1e-9), f"{exact} tokens, the rule says {rule}"


@MANY
@given(st.floats(1e-3, 1e6), st.floats(1e-9, 1.0), st.floats(0.0, 1.0))
def test_from_the_tokens_that_hide_io_on_computing_takes_longer(fixed: float, compute: float, spilled: float) -> None:
    """P5: at that number computing and I/O are equal; None where activations take longer to move than to compute."""
    tokens = hiding_tokens(fixed, compute, spilled)
    if tokens is None:
        assert spilled >= compute, f"never, with {compute} s of computing and {spilled} s of I/O a token"
        return
    busy, moving = tokens * compute, fixed + tokens * spilled
    assert busy == pytest.approx(moving, rel=1e-6), f"{tokens} tokens: {busy} s of computing, {moving} s of I/O"


def test_no_io_is_hidden_from_the_first_token_on() -> None:
    """P5: everything resident, or an update on the same cores that takes longer than the I/O."""
    assert hiding_tokens(0.0, 0.001) == hiding_tokens(-3.0, 0.001) == 0.0


@MANY
@given(parameters_, shares)
def test_the_balancing_share_gives_forward_a_quarter_of_the_io(parameters: int, share: float) -> None:
    """Design, section 3: 0.15 with nothing resident, and the same seconds a flop in both passes."""
    assert balancing_share(SEVEN) == pytest.approx(0.15), f"{balancing_share(SEVEN)}, by hand 3 / 20"
    resident = round(share * durable_bytes(parameters))
    moved, alpha = step_io_bytes(parameters, resident), balancing_share(parameters, resident)
    weights = max(0, 4 * parameters - resident)
    forward = weights + alpha * (moved - 2 * weights)
    assert 0.0 <= alpha <= 1.0, f"{alpha} is no share"
    assert forward == pytest.approx(moved / 4, rel=1e-9, abs=1e-6), f"forward moves {forward} bytes of {moved}"


def test_a_drive_lasts_as_many_steps_as_its_endurance_holds() -> None:
    """P5: 100e9 parameters write 1.2 TB a step: 1,200 TBW are 1,000 steps, at 86.4 s each one day; four drives last
    four times as long.
    """
    per_day = written_bytes_per_day(step_written_bytes(HUNDRED), step_s=86.4)
    assert per_day == pytest.approx(1200e12), f"{per_day} bytes a day, by hand 1.2e15"
    days = [drive_life_days(1200e12, per_day, drives) for drives in (1, 4)]
    assert days == pytest.approx([1.0, 4.0]), f"{days} days, by hand 1 and 4"
