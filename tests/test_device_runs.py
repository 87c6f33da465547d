"""Runs whose ops compute on a device with memory of its own: planned, refused and trained as on the CPU, bit for bit.

Scope: a pretend device (the CPU, behind copies that come late and out of order), the promise that the host does not
wait inside a step, what is said where there is no CUDA. Marked `gpu`: the same on a real one.
Not here: the order of copies (`test_device_lanes.py`), schedules with copies (`test_lower.py`), rates
(`test_measure.py`).
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, parameters, same_bits
from conftest import RunFile, slow
from models import MODELS, TIED
from streams import OutOfOrderLanes
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import megatrain.trainer
from megatrain.accelerator import Accelerator, find_accelerator
from megatrain.cli import app
from megatrain.config import load_run
from megatrain.environment import Cuda
from megatrain.errors import UserError
from megatrain.exactness import compute_exactly
from megatrain.inputs import tensors
from megatrain.optim import NonFiniteError
from megatrain.prepare import Prepared, prepare
from megatrain.random_state import replayed, rng_now, rng_states, set_rng
from megatrain.report import PlanReport, device_line
from megatrain.timing import time_units
from megatrain.trainer import StepEngine, open_run_batches, open_state, train
from megatrain.verify import verify
from tiering.errors import BudgetError
from tiering.hardware import Rate
from tiering.measure_device import DeviceRates
from tiering.schedule import Verb

MiB = 1 << 20
CPU = torch.device("cpu")
TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB", "optimizer.lr": 0.01, "train.update_on": "host"}
THERE = {**TIGHT, "train.update_on": "device"}
PLACES = {"host": TIGHT, "device": THERE}

pytestmark = pytest.mark.usefixtures("known_machine")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

Pretend = Callable[..., list[OutOfOrderLanes]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Makes the runs of this test compute on a pretend device; returns the lanes that they open."""

    def make(memory: int = 4096 * MiB, seed: int = 0) -> list[OutOfOrderLanes]:
        opened: list[OutOfOrderLanes] = []

        def lanes() -> OutOfOrderLanes:
            opened.append(OutOfOrderLanes(seed + len(opened)))
            return opened[-1]

        rate = Rate(per_s=1e9, source="assumed", how="assumed: a pretend device")
        rates = DeviceRates(compute=replace(rate, per_s=1e11), h2d=rate, d2h=rate, update=replace(rate, per_s=1e12))
        device = Accelerator(
            device=CPU,
            name="a pretend device",
            memory_bytes=memory,
            free_bytes=memory,
            lanes=lanes,
            rates=lambda *shape: rates,
        )
        monkeypatch.setattr(megatrain.prepare, "find_accelerator", lambda run: device)
        return opened

    return make


def beside(prepared: Prepared) -> int:
    assert prepared.room is not None
    return sum(line.nbytes for line in prepared.room.beside)


def test_a_plan_for_a_device_has_its_copies_and_both_sums(run_file: RunFile, pretend: Pretend) -> None:
    """P2, P5: what computing takes is a line of the device; of the host only the arena and the process remain."""
    pretend()
    prepared = prepare(load_run(run_file(TIGHT)))
    verbs = {action.verb for action in prepared.plan.schedules["step"].actions}
    assert {Verb.H2D, Verb.D2H} <= verbs, verbs
    report = PlanReport(prepared=prepared).as_json()
    assert list(report["device"]["arena"].values()) == [prepared.plan.device_bytes] != [0]
    assert "outputs and gradients in flight" in report["device"]["beside"]
    assert list(report["host"]["beside"]) == ["threads and bookkeeping", "this process before it starts"]
    assert report["device"]["used_bytes"] <= report["device"]["given_bytes"] == 4096 * MiB * 15 // 16
    assert report["h2d_bytes"] > 0 and report["d2h_bytes"] > 0
    assert "a pretend device" in device_line(prepared)


def test_what_the_device_has_no_room_for_is_refused_with_the_sum_and_a_size_that_works(
    run_file: RunFile, pretend: Pretend
) -> None:
    """P2: line by line, before anything is written; the size that is named works, a page less does not."""
    pretend()
    needed = beside(prepare(load_run(run_file(TIGHT))))
    with pytest.raises(BudgetError) as caught:
        prepare(load_run(run_file({**TIGHT, "tiers.device_memory": needed + 4096})))
    text = str(caught.value)
    for what in ("DEVICE needs", "blocks that ops compute on", "logits and loss", "CUDA context", "or device: cpu"):
        assert what in text, text
    named = re.search(r"Fix: tiers\.device_memory >= (\d+MiB)", text)
    assert named is not None, text
    planned = prepare(load_run(run_file({**TIGHT, "tiers.device_memory": named[1]})))
    assert planned.room is not None and planned.plan.device_bytes <= planned.room.budget_bytes
    with pytest.raises(BudgetError, match="DEVICE needs"):
        prepare(load_run(run_file({**TIGHT, "tiers.device_memory": needed + planned.plan.device_bytes // 2})))


def test_more_than_the_device_has_free_is_refused(run_file: RunFile, pretend: Pretend) -> None:
    """P2: in its own words, with what is free."""
    pretend(memory=1024 * MiB)
    with pytest.raises(UserError, match=rf"tiers\.device_memory: .* Fix: at most {1024 * MiB},"):
        prepare(load_run(run_file({**TIGHT, "tiers.device_memory": "2GiB"})))


_SLOW = {"qwen3", "gemma3", "llama-tied"}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.slow if m in _SLOW else ()) for m in MODELS])
def test_a_run_on_a_device_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, pretend: Pretend, model: str, clip: float | None
) -> None:
    """P1, I8: through copies that come late and out of order; the device's arena is as large as planned (I5)."""
    for micro_batch, resident in ((4, 0), (1, 0.5)):
        if model in TIED and micro_batch < 4:
            continue
        changes = {**TIGHT, "train.max_grad_norm": clip, "train.micro_batch": micro_batch, "tiers.resident": resident}
        lanes = pretend(seed=micro_batch)
        result = verify(load_run(run_file({**changes, "model.config": MODELS[model]})), 3, QUIET)
        assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "differing")}
        (used,) = lanes
        assert used.copies > 0


def test_a_tight_device_moves_more_and_changes_no_number(run_file: RunFile, pretend: Pretend) -> None:
    """P1, I5: less stays between its uses; the arena is no byte larger than the plan says, and is used to its end."""
    lanes = pretend()
    deep = {**TIGHT, "model.config": {**MODELS["llama"], "num_hidden_layers": 8}}
    roomy = prepare(load_run(run_file(deep)))
    tight = {**deep, "tiers.device_memory": beside(roomy) + roomy.plan.device_bytes // 2}
    planned = prepare(load_run(run_file(tight))).plan
    assert planned.device_bytes <= roomy.plan.device_bytes // 2
    assert planned.timeline.h2d_bytes >= roomy.plan.timeline.h2d_bytes
    result = verify(load_run(run_file(tight)), 2, QUIET)
    assert result["identical"], result
    assert lanes[0].top == planned.device_bytes


@contextmanager
def steps(prepared: Prepared, folder: Path) -> Iterator[tuple[StepEngine, list[dict[str, torch.Tensor]]]]:
    """An engine over a new state, and the inputs of four steps."""
    batches = open_run_batches(prepared, folder, QUIET)
    with open_state(prepared, batches, prepared.run.tiers.nvme[0], resume=False, console=QUIET) as manager:
        engine = StepEngine(prepared.run, prepared.units, manager, 0)
        try:
            yield engine, [tensors(batches.batch_at(number)) for number in range(4)]
        finally:
            engine.close()


class NoWait(TorchDispatchMode):
    """Raises where a value of a tensor is asked for: on a device the host would wait there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} inside a step")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("llama", "host"),
        slow("gpt2", "host"),
        slow("gemma3", "host"),
        ("llama", "device"),
    ],
)
def test_the_host_asks_for_no_value_between_the_first_op_and_the_end_of_backward(
    run_file: RunFile, pretend: Pretend, tmp_path: Path, model: str, clip: float | None, place: str
) -> None:
    """P4: with chunks of the loss and several micro-batches, updates beside it. What waits, waits for an event."""
    pretend()
    changes = {"model.config": MODELS[model], "train.max_grad_norm": clip, "train.loss_chunk": 8}
    prepared = prepare(load_run(run_file({**PLACES[place], **changes})))
    with steps(prepared, tmp_path) as (engine, inputs):
        streamed, watched = engine.model, ExitStack()
        first, lend, computed = f"fwd.{next(iter(prepared.units)).name}", streamed._lend, streamed._computed
        begun = []

        def lent(name: str) -> Any:
            if name == first:
                begun.append(watched.enter_context(NoWait()))
            return lend(name)

        def ended() -> None:
            watched.close()
            computed()

        streamed._lend, streamed._computed = lent, ended
        with watched:
            losses = [engine.step(batch, last=number == 3).loss for number, batch in enumerate(inputs)]
    assert len(begun) == 4 and all(loss > 0 for loss in losses), (begun, losses)


@pytest.mark.parametrize("place", PLACES)
def test_a_bad_gradient_on_a_device_ends_the_run_or_is_skipped(
    run_file: RunFile, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """OM-07: without clipping the run ends at the last commit, before the update; with it the step is skipped."""
    settings = PLACES[place]
    pretend()
    ready = StepEngine._gradient_ready
    seen = {"steps": 0}

    def broken(self: Any, unit: str, gradients: Any) -> None:
        seen["steps"] += unit == "lm_head"
        if seen["steps"] == 2 and unit == "model.layers.1":
            next(iter(gradients.values()))[0, 0] = float("nan")
        ready(self, unit, gradients)

    monkeypatch.setattr(StepEngine, "_gradient_ready", broken)
    with pytest.raises(NonFiniteError, match=r"layers\.1\.self_attn\.q_proj\.weight is not finite in step 2.*step 0"):
        train(load_run(run_file(settings)), resume=False, console=QUIET)
    seen["steps"] = 0
    other = {"tiers.nvme": str(tmp_path / "other/nvme"), "output.dir": str(tmp_path / "other")}
    run = load_run(run_file({**settings, **other, "train.max_grad_norm": 1.0}))
    assert train(run, resume=False, console=QUIET) == 0
    log = [json.loads(line) for line in (tmp_path / "other/log.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in log] == [None, "model.layers.1.self_attn.q_proj.weight", None, None]


def test_a_device_that_runs_out_of_memory_in_a_step_is_told_with_the_sum(
    run_file: RunFile, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: somebody else took it, or the plan was wrong; either way what was planned is told."""
    pretend()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(StepEngine, "_gradient_ready", full)
    with pytest.raises(BudgetError, match=r"DEVICE had no room in step 1: .*2\.00 GiB") as caught:
        train(load_run(run_file(TIGHT)), resume=False, console=QUIET)
    assert "CUDA context" in str(caught.value) and "Fix: a lower tiers.device_memory" in str(caught.value)


@pytest.mark.parametrize(
    ("clip", "place", "precision"),
    [
        (None, "host", "fp32"),
        slow(None, "device", "fp32"),
        slow(0.5, "device", "fp32"),
        (0.5, "device", "bf16"),
    ],
)
def test_a_run_on_a_device_is_resumed_and_validated_with_the_bits_of_the_cpu(
    run_file: RunFile, pretend: Pretend, tmp_path: Path, clip: float | None, place: str, precision: str
) -> None:
    """P1, P3: four steps at once on the CPU; two and two on a device, with the validations between them."""
    changes = {**TIGHT, "data.validation": 0.2, "train.eval_every": 2, "train.commit_every": 2}
    changes |= {"train.max_grad_norm": clip, "train.precision": precision}

    def folder(name: str) -> dict[str, Any]:
        return {"tiers.nvme": str(tmp_path / name / "nvme"), "output.dir": str(tmp_path / name)}

    train(load_run(run_file({**changes, **folder("cpu")})), resume=False, console=QUIET)
    pretend()
    for steps, resume in ((2, False), (4, True)):
        settings = {**changes, **folder("device"), "train.steps": steps, "train.update_on": place}
        run = load_run(run_file(settings))
        assert train(run, resume=resume, console=QUIET) == 0
    one, other = (parameters(tmp_path / name / "nvme") for name in ("cpu", "device"))
    assert [name for name in one if not same_bits(one[name], other[name])] == []
    said = [
        [json.loads(line)["validation_loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("cpu", "device")
    ]
    assert said[0] == said[1] and said[0][-1] is not None, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_cuda_is_refused_in_one_line_and_auto_takes_the_cpu(run_file: RunFile, tmp_path: Path) -> None:
    """CF-04: why, and how to fix it; exit code 2, and nothing has been written."""
    done = CliRunner().invoke(app, ["train", str(run_file({"device": "cuda"}))])
    assert done.exit_code == 2, done.output
    assert re.fullmatch(r"[^\n]*device: cuda: torch[^\n]*Fix: device: cpu[^\n]*\n", done.stderr), done.stderr
    assert not (tmp_path / "run").exists()
    assert find_accelerator(load_run(run_file({"device": "auto"}))) is None
    prepared = prepare(load_run(run_file({"device": "auto"})))
    assert re.fullmatch(r"Device: cpu, \d+ threads \(auto\)", device_line(prepared)), device_line(prepared)


def test_a_card_that_torch_cannot_use_is_told_of(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken in silence: `auto` says why the CPU computes, `cuda` names what is missing."""
    facts = Cuda(why="the driver is too old", card=True)
    monkeypatch.setattr("megatrain.accelerator.cuda_facts", lambda: facts)
    prepared = prepare(load_run(run_file({"device": "auto"})))
    assert "there is a card, but the driver is too old" in device_line(prepared)
    with pytest.raises(UserError, match=r"the driver is too old\. Fix: a build of torch for CUDA and a driver"):
        prepare(load_run(run_file({"device": "cuda"})))


@pytest.fixture
def exact() -> Iterator[None]:
    """Computes as for a device; afterwards as before."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fills = torch.utils.deterministic.fill_uninitialized_memory
    compute_exactly()
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_models_train_under_the_settings_of_a_device(
    run_file: RunFile, pretend: Pretend, exact: None, model: str
) -> None:
    """P1: no TF32, one order of every sum; of what they call nothing is refused (here: by the CPU)."""
    pretend()
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.matmul.allow_tf32
    result = verify(load_run(run_file({**TIGHT, "model.config": MODELS[model]})), 2, QUIET)
    assert result["identical"], result


def test_a_model_that_cannot_give_the_same_bits_twice_is_refused_by_its_operator(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: before anything is written; any other failure stays what it is."""
    text = "some_backward_cuda does not have a deterministic implementation, but you set more. And so on."
    for error, wanted in ((RuntimeError(text), UserError), (RuntimeError("out of luck"), RuntimeError)):

        def fails(*args: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("megatrain.prepare.time_units", fails)
        with pytest.raises(wanted) as caught:
            prepare(load_run(run_file(TIGHT)))
        assert type(caught.value) is wanted and str(error).partition(". ")[0] in str(caught.value)


class Generator:
    """A module of a device whose generator is a number."""

    state = 7

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.state], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.state = int(state[0])


def test_the_random_numbers_of_a_device_are_replayed_and_kept_by_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: beside those of the CPU. A commit that was made on the CPU holds none: they begin anew."""
    device, generator = torch.device("meta"), Generator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: generator)
    monkeypatch.setattr("megatrain.random_state.first_rng", lambda seed, device: {"rng": "", "device_rng": "09"})
    states, drawn = rng_states(device), torch.rand(3)
    generator.state = 8
    with replayed(states, device):
        assert generator.state == 7 and torch.equal(torch.rand(3), drawn)
        generator.state = 99
    assert generator.state == 8
    held = rng_now(device)
    assert held.keys() == {"rng", "device_rng"}
    generator.state = 1
    set_rng(held, 0, device)
    assert generator.state == 8
    set_rng({"rng": held["rng"]}, 0, device)
    assert generator.state == 9, "those of the seed"
    set_rng(held, 0, CPU)
    assert rng_now(CPU) == {"rng": held["rng"]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", [pytest.param(name, marks=on_gpu) for name in MODELS])
def test_a_run_on_cuda_equals_the_plain_loop_on_cuda(
    run_file: RunFile, model: str, clip: float | None, place: str
) -> None:
    """P1, I8: serial and overlapped, one micro-batch and four; AdamW of the CPU and of the device."""
    for micro_batch, serial in ((4, False), (1, False), (4, True)):
        if model in TIED and micro_batch < 4:
            continue
        changes = {"device": "cuda", "model.config": MODELS[model], "train.max_grad_norm": clip}
        settings = {**PLACES[place], **changes, "train.micro_batch": micro_batch, "tiers.serial": serial}
        result = verify(load_run(run_file(settings)), 3, QUIET)
        shown = ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")
        assert result["identical"], {key: result[key] for key in shown}


WIDE = {
    **MODELS["llama"],
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [pytest.param(None, marks=on_gpu), pytest.param(0.5, marks=on_gpu)])
def test_the_memory_of_a_cuda_device_is_what_the_plan_says(
    run_file: RunFile, tmp_path: Path, clip: float | None, place: str
) -> None:
    """P2, P5, I5: never more than arena, workspace and context together, and the arena at least."""
    changes = {"device": "cuda", "model.config": WIDE, "train.max_grad_norm": clip, "tiers.host_memory": "2GiB"}
    prepared = prepare(load_run(run_file({**PLACES[place], **changes})))
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    with steps(prepared, tmp_path) as (engine, inputs):
        for number, batch in enumerate(inputs):
            engine.step(batch, last=number == 3)
        peak = torch.accelerator.max_memory_allocated()
    most = prepared.plan.device_bytes + beside(prepared)
    assert prepared.plan.device_bytes <= peak <= most, (prepared.plan.device_bytes, peak, most)


@pytest.mark.parametrize("model", [pytest.param(WIDE, marks=on_gpu)])
def test_a_model_larger_than_the_memory_of_the_device_trains_with_the_same_bits(
    run_file: RunFile, model: dict[str, Any]
) -> None:
    """P1, P2: the weights alone are several times what the run may take of the device."""
    changes = {**TIGHT, "device": "cuda", "model.config": model, "tiers.host_memory": "2GiB"}
    roomy = prepare(load_run(run_file(changes)))
    largest = max(unit.nbytes for unit in roomy.units.stored)
    small = {**changes, "tiers.device_memory": beside(roomy) + 4 * largest}
    planned = prepare(load_run(run_file(small)))
    weights = sum(unit.nbytes for unit in planned.units.stored)
    assert planned.plan.device_bytes <= 4 * largest < weights / 3, (planned.plan.device_bytes, weights)
    result = verify(load_run(run_file(small)), 2, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [pytest.param(None, marks=on_gpu), pytest.param(0.5, marks=on_gpu)])
def test_no_operator_of_a_step_waits_for_a_cuda_device(
    run_file: RunFile, tmp_path: Path, clip: float | None, place: str
) -> None:
    """P4: as torch sees it, from the first op to the end of backward. What waits for an event is not meant."""
    changes = {"device": "cuda", "train.max_grad_norm": clip, "train.loss_chunk": 8}
    prepared = prepare(load_run(run_file({**PLACES[place], **changes})))
    with steps(prepared, tmp_path) as (engine, inputs), ExitStack() as strict:
        streamed, first = engine.model, f"fwd.{next(iter(prepared.units)).name}"
        lend, computed = streamed._lend, streamed._computed

        def lent(name: str) -> Any:
            if name == first:
                strict.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                torch.cuda.set_sync_debug_mode("error")
            return lend(name)

        def ended() -> None:
            strict.close()
            computed()

        streamed._lend, streamed._computed = lent, ended
        for number, batch in enumerate(inputs):
            engine.step(batch, last=number == 3)


@pytest.mark.parametrize("model", [pytest.param("llama", marks=on_gpu)])
def test_units_are_timed_and_costed_on_the_device(run_file: RunFile, model: str) -> None:
    """P5: seconds and workspace are those of the device's own kernels."""
    prepared = prepare(load_run(run_file({**TIGHT, "device": "cuda", "model.config": MODELS[model]})))
    assert not [name for name, cost in prepared.costs.items() if cost.assumed]
    times = time_units(prepared.units, 2, 16, 0, None, prepared.device)
    assert all(time.forward_s > 0 for time in times.values()), times
