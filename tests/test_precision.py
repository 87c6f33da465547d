"""`train.precision`: BF16 copies of FP32 masters, streamed as half the bytes, come to the bits of a plain BF16 loop.

Scope: whole runs in BF16 on the CPU and on a pretend device, what they move, cost and say; TF32 where there is no GPU.
Not here: FP32 (`test_same_numbers.py`), schedules with blocks of half the bytes over all homes and knobs
(`test_lower.py`, `test_check.py`, `test_device_lanes.py`), closed forms (`test_costs.py`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, TIGHT, parameters, run_in, same_bits, trained
from conftest import RunFile
from models import MODELS, TIED
from streams import OutOfOrderLanes
from toy import parameters as elements
from toy import toy_units
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import megatrain.goodbye
import megatrain.prepare
import megatrain.trainer
from megatrain.accelerator import Accelerator
from megatrain.cli import app
from megatrain.config import load_run
from megatrain.data import batches_in_order, open_data
from megatrain.exactness import compute_exactly
from megatrain.inputs import tensors
from megatrain.model import model_config
from megatrain.prepare import Prepared, prepare
from megatrain.programs import CAST, WEIGHT_BF16, training_workload
from megatrain.reference import in_bf16
from megatrain.report import PlanReport, device_line
from megatrain.timing import time_units
from megatrain.verify import verify
from tiering.costs import step_io_bytes
from tiering.device import on_device
from tiering.errors import WrongStateError
from tiering.hardware import Rate, assumed_hardware
from tiering.homes import place
from tiering.lower import lower
from tiering.measure_device import DeviceRates
from tiering.plan import make_plan
from tiering.schedule import Verb, moved_bytes
from tiering.turns import Knobs
from tiering.workload import Workload

MiB = 1 << 20
BF16 = {**TIGHT, "train.precision": "bf16", "optimizer.lr": 0.01}
DEEP = {**MODELS["llama"], "num_hidden_layers": 6}

pytestmark = pytest.mark.usefixtures("known_machine")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def settings(model: str, clip: float | None, micro_batch: int, **changes: Any) -> dict[str, Any]:
    own = {"model.config": MODELS[model], "train.max_grad_norm": clip, "train.micro_batch": micro_batch}
    return {**BF16, **own, **{key.replace("__", "."): value for key, value in changes.items()}}


def verified(run_file: RunFile, changes: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """The comparison of a run with the plain loop; fails unless all is equal."""
    result = verify(load_run(run_file(changes)), steps, QUIET)
    shown = ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "max_abs_diff", "differing")
    assert result["identical"], {key: result[key] for key in shown}
    return result


_SLOW = {"qwen3", "gemma3", "llama-tied"}
_SLOW_FUSED = [pytest.param(None, marks=pytest.mark.slow), 0.5]
_EVERY = [pytest.param(m, marks=pytest.mark.slow if m in _SLOW else ()) for m in MODELS]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", _EVERY)
def test_a_bf16_run_equals_the_plain_bf16_loop_bit_for_bit(run_file: RunFile, model: str, clip: float | None) -> None:
    """P1: everything on NVMe and half of it, one micro-batch and two. Of tied weights, one (the stated exception)."""
    for micro_batch, resident in ((4, 0),) if model in TIED else ((2, 0.5),) if clip is None else ((4, 0), (2, 0)):
        result = verified(run_file, settings(model, clip, micro_batch, tiers__resident=resident))
        assert result["losses"][0] > result["losses"][-1], result["losses"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tiers__resident": 1},
        {"train__loss_chunk": 20, "tiers__serial": True},
        {"tiers__late_updates": 0.5},
        {"model__freeze": ["model.embed_tokens.*", "*.q_proj.*"]},
        {"tiers__host_memory": "320KiB", "train__max_grad_norm": 0.5},
    ],
    ids=["resident", "chunks, serial", "late", "frozen", "copies and gradients spilled"],
)
def test_no_setting_that_moves_bytes_changes_a_bit_of_a_bf16_run(run_file: RunFile, changes: dict[str, Any]) -> None:
    """P1, I8: where copies live, when they are made anew, in which pieces the loss is computed."""
    result = verified(run_file, {**settings("llama", None, 2), **settings("llama", None, 2, **changes)})
    if "tiers__host_memory" in changes:
        spilled = {kind: result["placement"]["NVME"][kind] for kind in (WEIGHT_BF16, "grad")}
        assert all(spilled.values()), spilled


def test_a_bf16_run_of_odd_sizes_equals_the_plain_loop(run_file: RunFile) -> None:
    """P1: tensors that begin at multiples of 32 bytes where torch's own begin at 64, as 16 elements of BF16 do."""
    verified(run_file, {**BF16, "train.max_grad_norm": 0.5}, steps=4)


def test_a_bf16_run_is_another_run_than_one_in_fp32(run_file: RunFile) -> None:
    """P1 has something to say: losses and weights differ in their first digits' tail, and the state is FP32."""
    losses = {
        precision: verified(run_file, settings("llama", None, 4, train__precision=precision), steps=2)["losses"]
        for precision in ("fp32", "bf16")
    }
    assert losses["fp32"] != losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02), losses


@pytest.fixture
def no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


@torch.no_grad()
def plain_validation(run_dir: Path) -> float:
    """The mean over all held-out tokens: transformers in BF16, with the weights of the run's last commit."""
    run = run_in(run_dir)
    model = AutoModelForCausalLM.from_config(model_config(run.model.json_config())).eval()
    named = dict(model.named_parameters())
    for name, values in parameters(run.tiers.nvme[0]).items():
        named[name].copy_(values)
    data = open_data(run.data, 256, run_dir / "tokens", run.train.seed)
    assert data.validation is not None
    (batch,) = batches_in_order(data.validation, len(data.validation))
    with in_bf16(model):
        out = model(**tensors(batch), use_cache=False, num_items_in_batch=batch.supervised)
    return float(out.loss)


@pytest.mark.parametrize("clip", _SLOW_FUSED, ids=["fused", "clipped"])
def test_a_bf16_run_is_resumed_and_validated_with_the_same_bits(
    run_file: RunFile, tmp_path: Path, no_sample: None, clip: float | None
) -> None:
    """P1, P3: copies are no state: they are made again from the committed weights. A validation computes with them."""

    def changes(name: str, steps: int) -> dict[str, Any]:
        where = {"output.dir": str(tmp_path / name), "tiers.nvme": str(tmp_path / name / "nvme")}
        held_out = {"data.validation": 4, "train.eval_every": 2, "train.commit_every": 2, "train.micro_batch": 4}
        return {**BF16, **where, **held_out, "train.max_grad_norm": clip, "train.steps": steps}

    trained(run_file, changes("whole", 4))
    trained(run_file, changes("halves", 2))
    trained(run_file, changes("halves", 4), resume=True)
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        one, other = (parameters(tmp_path / name / "nvme", kind) for name in ("whole", "halves"))
        assert [name for name in one if not same_bits(one[name], other[name])] == [], kind
    said = [
        [json.loads(line)["validation_loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "halves")
    ]
    assert said[0] == said[1], said
    assert said[0][-1] == plain_validation(tmp_path / "whole"), said[0]


def test_a_state_does_not_go_on_in_another_precision(run_file: RunFile, no_sample: None) -> None:
    """P3: what decides the numbers is the run's identity; the error names it, and the state is as it was."""
    trained(run_file, {**BF16, "train.steps": 1})
    with pytest.raises(WrongStateError, match="precision"):
        trained(run_file, {**BF16, "train.steps": 2, "train.precision": "fp32"}, resume=True)
    trained(run_file, {**BF16, "train.steps": 2}, resume=True)


def test_the_store_holds_no_copy(run_file: RunFile, no_sample: None) -> None:
    """P3: blocks of the hierarchy are those of an FP32 run, and FP32."""
    run_dir = trained(run_file, {**BF16, "train.steps": 1})
    root = run_in(run_dir).tiers.nvme[0]
    kinds = {path.parent.name for path in root.glob("*/*/zarr.json")}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}, kinds


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OutOfOrderLanes]]:
    """Runs of this test compute on a pretend device; yields the lanes that they open."""
    opened: list[OutOfOrderLanes] = []

    def lanes() -> OutOfOrderLanes:
        opened.append(OutOfOrderLanes(len(opened)))
        return opened[-1]

    rate = Rate(per_s=1e9, source="assumed", how="assumed: a pretend device")
    device = Accelerator(
        device=torch.device("cpu"),
        name="a pretend device",
        memory_bytes=4096 * MiB,
        free_bytes=4096 * MiB,
        lanes=lanes,
        rates=lambda *shape: DeviceRates(compute=rate, h2d=rate, d2h=rate),
    )
    monkeypatch.setattr(megatrain.prepare, "find_accelerator", lambda run: device)
    yield opened


@pytest.mark.parametrize("clip", _SLOW_FUSED, ids=["fused", "clipped"])
@pytest.mark.parametrize("model", ["llama", "gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_bf16_run_on_a_device_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, pretend: list[OutOfOrderLanes], model: str, clip: float | None
) -> None:
    """P1, I8: gradients are added in FP32 on the device; copies come late and out of order."""
    verified(run_file, settings(model, clip, 4 if model in TIED else 2))
    assert pretend[0].copies > 0


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("precision", "place"),
    [pytest.param(*case, marks=on_gpu) for case in (("bf16", "host"), ("bf16", "device"), ("tf32", "host"))],
)
def test_a_run_on_cuda_equals_the_plain_loop_on_cuda_in_other_precisions(
    run_file: RunFile, precision: str, place: str, model: str, clip: float | None
) -> None:
    """P1, I8: both sides have the same precision, the same settings of the device, and AdamW in the same place."""
    changes = {"device": "cuda", "train__precision": precision, "train__update_on": place}
    verified(run_file, settings(model, clip, 4 if model in TIED else 2, **changes))


def weight_copies(prepared: Prepared) -> dict[str, int]:
    """Bytes of each copy of weights to the device in a step, by what it is for."""
    blocks = prepared.plan.workload.blocks
    return {
        action.name.replace(WEIGHT_BF16, "weight"): action.operands[0].nbytes
        for action in prepared.plan.schedules["step"].actions
        if action.verb is Verb.H2D and blocks[action.operands[0].block].kind.startswith("weight")
    }


def test_weights_go_to_a_device_as_half_the_bytes(run_file: RunFile, pretend: list[OutOfOrderLanes]) -> None:
    """P5: the same copies as in FP32, each of half the bytes, to whole pages; activations too are half as large."""
    plans = {
        precision: prepare(load_run(run_file({**BF16, "model.config": DEEP, "train.precision": precision})))
        for precision in ("fp32", "bf16")
    }
    whole, half = (weight_copies(plans[precision]) for precision in ("fp32", "bf16"))
    assert half and half == {name: -(-nbytes // 8192) * 4096 for name, nbytes in whole.items()}, (whole, half)
    inputs = [{name: cost.input_bytes for name, cost in prepared.costs.items()} for prepared in plans.values()]
    assert inputs[0] == {name: 2 * nbytes for name, nbytes in inputs[1].items()}, inputs
    assert any(inputs[0].values())


KNOBS = Knobs(lookahead=0, lag=0, tile_bytes=MiB // 4, ring=4, copies_ahead=0)


def toy(*, bf16: bool) -> Workload:
    return training_workload(toy_units(6, MiB, MiB, norm=0), deferred=False, bf16=bf16)


def test_a_step_in_bf16_moves_what_the_closed_form_says() -> None:
    """P5; 30 bytes a parameter with nothing resident, 24 with the copies at home; turn-arounds save a little more."""
    workload = toy(bf16=True)
    p = elements(workload)
    copies = {block.name: block.nbytes for block in workload.blocks.values() if block.kind == WEIGHT_BF16}
    for homes, wanted in (({}, 30), (copies, 24)):
        actions = lower(workload, workload.programs["step"], place(homes), KNOBS).actions
        moved = moved_bytes(actions, Verb.READ) + moved_bytes(actions, Verb.WRITE)
        bound = step_io_bytes(p, sum(homes.values()), bf16=True)
        assert bound == wanted * p, f"{bound / p} bytes a parameter, by hand {wanted}"
        turn_arounds = (
            0 if homes else 3 * MiB // 2
        )  # the head's second use, and a unit that is still there at either turn
        assert bound - turn_arounds <= moved <= bound, f"{moved} bytes, the formula says {bound}"


def test_the_planner_pins_the_copies_first() -> None:
    """P5: a byte of a copy saves two reads and a write, one of a master a read and a write."""
    workload = toy(bf16=True)
    plan = make_plan(workload, assumed_hardware(), 12 * MiB)
    placed = {kind: plan.bytes_at(kind) for kind in (WEIGHT_BF16, "weight", "exp_avg")}
    shares = {kind: host / (host + nvme) for kind, (host, nvme) in placed.items()}
    # What is used once, or is still there at a turn, gains no more than a master.
    assert shares[WEIGHT_BF16] >= 0.7 > 0.4 > shares["weight"], placed


def test_the_link_moves_half_the_bytes_of_weights() -> None:
    """P5: in the toy's step too, copy by copy."""
    moved = {}
    for bf16 in (False, True):
        there = on_device(toy(bf16=bf16))
        actions = lower(there, there.programs["step"], place({}), KNOBS).actions
        moved[bf16] = sum(action.operands[0].nbytes for action in actions if action.verb is Verb.H2D)
    assert moved[True] * 2 == moved[False] > 0, moved


def test_the_plan_of_a_bf16_run_says_so(run_file: RunFile) -> None:
    """P5: the kind has a line of its own, no update counts as late, and the device's line names the precision."""
    prepared = prepare(load_run(run_file(BF16)))
    report = PlanReport(prepared=prepared).as_json()
    assert report["placement"]["HOST"][WEIGHT_BF16] + report["placement"]["NVME"][WEIGHT_BF16] > 0, report["placement"]
    assert report["late_updates"] == 0.0, report["late_updates"]
    assert CAST in prepared.plan.schedules
    assert device_line(prepared).endswith(", computing in BF16 with FP32 masters"), device_line(prepared)
    assert PlanReport(prepared=prepare(load_run(run_file(TIGHT)))).as_json()["placement"]["HOST"].keys() == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "activation",
    }


def test_units_are_timed_in_the_precision_that_they_compute_in(run_file: RunFile) -> None:
    """P5: the weights that the trial lends are BF16, and so is what the units hand on."""
    prepared = prepare(load_run(run_file(BF16)))
    seen = set()
    handles = [
        unit.module.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        for unit in prepared.units
        if unit.module is not None
    ]
    times = time_units(prepared.units, 2, 16, dtype=torch.bfloat16)
    for handle in handles:
        handle.remove()
    assert seen == {torch.bfloat16}, seen
    assert all(time.forward_s > 0 for time in times.values()), times


def test_tf32_without_a_gpu_is_refused_in_one_line(run_file: RunFile, tmp_path: Path) -> None:
    """CF-04: nothing computes TF32 there; exit code 2, and nothing has been written."""
    for device in ("cpu", "auto") if not torch.cuda.is_available() else ("cpu",):
        done = CliRunner().invoke(app, ["train", str(run_file({"train.precision": "tf32", "device": device}))])
        assert done.exit_code == 2, done.output
        assert re.fullmatch(r"[^\n]*train\.precision: tf32[^\n]*Fix: [^\n]*\n", done.stderr), done.stderr
        assert not (tmp_path / "run").exists()


def test_tf32_is_a_mode_that_both_sides_of_a_comparison_have() -> None:
    """P1: set for the process, before the device computes; FP32 takes it back."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        found = {}
        for tf32 in (True, False):
            compute_exactly(tf32=tf32)
            found[tf32] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        assert found == {True: ("high", True), False: ("highest", False)}, found
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
