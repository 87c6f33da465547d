"""Whole training runs: what they leave behind, how they go on, how they end.

Scope: `train` from a run file: commits, resume, interrupts, skipped steps, refusals, the store as zarr shows it.
Not here: equality with the plain loop (`test_same_numbers.py`), single parts.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from conftest import RunFile
from models import MODELS
from rich.console import Console
from transformers import AutoModelForCausalLM

import megatrain.goodbye
import megatrain.trainer
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.generate import generate
from megatrain.model import build, find_units, first_weights, model_config
from megatrain.optim import NonFiniteError
from megatrain.trainer import train
from tiering.errors import BudgetError, DiskFullError, TieringError, WrongStateError

TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB", "model.config": MODELS["llama"]}


pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)  # no sample at the end: it has a test of its own


def run(run_file: RunFile, changes: dict[str, Any], *, resume: bool = False) -> int:
    return train(load_run(run_file({**TIGHT, **changes})), resume=resume, console=Console(quiet=True))


def state(root: Path) -> dict[str, np.ndarray]:
    """Every committed array, by name, as bytes."""
    group = zarr.open_group(root, mode="r")
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c")]
    return {name: np.asarray(group[name][:]).view(np.uint8) for name in sorted(names)}  # type: ignore[index,arg-type]


def same_state(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not np.array_equal(a[name], b[name])]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("resident", [0, 0.5])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    run_file: RunFile, tmp_path: Path, clip: float | None, resident: float
) -> None:
    """P3, CK-01, CK-12: 10 steps against 4 and then 6, with dropout, so that random numbers count too. The second
    part runs under another placement: where a byte lives is not state.
    """
    model = {**MODELS["gpt2"], "resid_pdrop": 0.1}
    base = {"model.config": model, "train.max_grad_norm": clip, "train.commit_every": 3}

    def at(name: str, steps: int, **more: Any) -> dict[str, Any]:
        where = {"tiers.nvme": str(tmp_path / name / "nvme"), "output.dir": str(tmp_path / name)}
        return {**base, **where, "train.steps": steps, "tiers.resident": resident, **more}

    assert run(run_file, at("straight", 10)) == 0
    assert run(run_file, at("parts", 4)) == 0
    moved = {"tiers.resident": 1 - resident, "tiers.serial": True}
    assert run(run_file, at("parts", 10, **moved), resume=True) == 0
    assert same_state(state(tmp_path / "straight/nvme"), state(tmp_path / "parts/nvme")) == []
    losses = {name: [row["loss"] for row in rows(tmp_path / name)] for name in ("straight", "parts")}
    assert losses["straight"] == losses["parts"]


def test_zarr_shows_the_committed_weights_under_their_names(run_file: RunFile, tmp_path: Path) -> None:
    """P3: the store is the checkpoint: no export is needed to read it."""
    assert run(run_file, {}) == 0
    group = zarr.open_group(tmp_path / "run/nvme", mode="r")
    config = model_config(MODELS["llama"])
    shapes = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    seen = {}
    for unit in ("model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head", "model.norm", "model.layers.1"):
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            array = group[f"{unit}/{kind}"]
            assert array.dtype == np.float32
            for tensor in array.attrs["tensors"]:
                seen[tensor["name"]] = tuple(tensor["shape"])
                start = tensor["offset"]
                values = array[start : start + int(np.prod(tensor["shape"]))]
                assert np.isfinite(values).all()
                assert values.any(), f"{tensor['name']} {kind} is all zero"
    assert seen == shapes


def test_a_run_leaves_its_resolved_settings_its_plan_and_a_row_a_step(run_file: RunFile, tmp_path: Path) -> None:
    """P5: predicted beside measured in every row; the bytes moved are those of the plan."""
    path = run_file({**TIGHT, "train.steps": 5, "train.commit_every": 100})
    assert train(load_run(path), resume=False, console=Console(quiet=True)) == 0
    folder = tmp_path / "run"
    assert load_run(folder / "run.yaml") == load_run(path)
    plan = json.loads((folder / "plan.json").read_text())
    log = rows(folder)
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5]
    for row in log:
        assert row["predicted_s"] == plan["step_s"]
        assert row["wall_s"] > 0
    moved = sum(row["read_bytes"] + row["written_bytes"] for row in log)
    planned = 5 * (plan["read_bytes"] + plan["written_bytes"])
    assert 0.9 * planned <= moved <= 1.1 * planned, (moved, planned)


def test_what_would_change_the_numbers_is_refused_by_name_when_resuming(run_file: RunFile) -> None:
    """CK-21: betas, batch, model and data; the message names the item with both values."""
    assert run(run_file, {"train.steps": 2}) == 0
    for changes, name in (
        ({"optimizer.betas": [0.8, 0.9]}, "betas"),
        ({"train.batch": 8}, "batch"),
        ({"train.max_grad_norm": 1.0}, "max_grad_norm"),
        ({"data.seq_len": 8}, "seq_len"),
        ({"model.config": {**MODELS["llama"], "rms_norm_eps": 1e-3}}, "rms_norm_eps"),
    ):
        with pytest.raises(WrongStateError, match=name):
            run(run_file, {"train.steps": 4, **changes}, resume=True)


def test_an_existing_state_is_never_overwritten_and_a_missing_one_not_invented(
    run_file: RunFile, tmp_path: Path
) -> None:
    """I9, IO-14: both mistakes are one clear line before anything is written."""
    with pytest.raises(UserError, match="no state to resume"):
        run(run_file, {}, resume=True)
    assert not (tmp_path / "run").exists()
    assert run(run_file, {"train.steps": 2}) == 0
    before = state(tmp_path / "run/nvme")
    with pytest.raises(UserError, match="--resume"):
        run(run_file, {"train.steps": 2})
    assert same_state(before, state(tmp_path / "run/nvme")) == []


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(run_file: RunFile, tmp_path: Path) -> None:
    """P2: the sum line by line, and the smallest budget, which works."""
    with pytest.raises(BudgetError) as caught:
        run(run_file, {"tiers.host_memory": "64KiB"})
    text = str(caught.value)
    assert "the budget is 0.1 MiB" in text
    assert "tile ring" in text
    assert not (tmp_path / "run").exists()
    smallest = text.split("tiers.host_memory >= ")[1].split(",")[0].rstrip(".")
    assert run(run_file, {"tiers.host_memory": smallest, "train.steps": 1}) == 0


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-06: by arithmetic, with the bytes wanted and free."""
    monkeypatch.setattr("tiering.place.free_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError, match="1000 bytes are free"):
        run(run_file, {})
    assert not (tmp_path / "run").exists()


def test_a_non_finite_step_is_skipped_on_every_tier(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OM-07: weights, moments and the step count stay as they were; the skip is counted, the tensor named; the run
    goes on as if the step had not been.
    """
    ready = megatrain.trainer.StepEngine._gradient_ready
    count = {"steps": 0}

    def broken(self: Any, unit: str, gradients: Any) -> None:
        if unit == "lm_head":
            count["steps"] += 1
        if count["steps"] == 3 and unit == "model.layers.1":
            next(iter(gradients.values()))[0, 0] = float("nan")
        ready(self, unit, gradients)

    monkeypatch.setattr(megatrain.trainer.StepEngine, "_gradient_ready", broken)
    assert run(run_file, {"train.max_grad_norm": 1.0, "train.steps": 4, "train.commit_every": 2}) == 0
    log = rows(tmp_path / "run")
    assert [row["skipped"] for row in log] == [None, None, "model.layers.1.self_attn.q_proj.weight", None]
    assert all(np.isfinite(block.view(np.float32)).all() for block in state(tmp_path / "run/nvme").values())
    manifest = json.loads((tmp_path / "run/nvme/manifest.json").read_text())
    assert manifest["run"]["skipped"] == 1
    assert manifest["run"]["updates"] == 3
    assert manifest["step"] == 4


def test_a_run_that_only_skips_gives_up_and_keeps_its_last_commit(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OM-07: abort after N in a row, with the last good commit named."""

    def all_bad(self: Any, unit: str, gradients: Any) -> None:
        for gradient in gradients.values():
            gradient.fill_(float("inf"))
        self._norm.add(gradients)

    monkeypatch.setattr(megatrain.trainer.StepEngine, "_gradient_ready", all_bad)
    with pytest.raises(NonFiniteError, match="committed state is step 0"):
        run(run_file, {"train.max_grad_norm": 1.0, "train.steps": 40})
    assert len(rows(tmp_path / "run")) == 9


def test_without_clipping_a_non_finite_gradient_ends_the_run_at_the_last_commit(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OM-07, OM-14: updates of the step have begun, so it cannot be skipped; it is never half committed."""
    assert run(run_file, {"train.steps": 2}) == 0
    before = state(tmp_path / "run/nvme")
    ready = megatrain.trainer.StepEngine._gradient_ready

    def broken(self: Any, unit: str, gradients: Any) -> None:
        if unit == "model.embed_tokens":
            next(iter(gradients.values())).fill_(float("nan"))
        ready(self, unit, gradients)

    monkeypatch.setattr(megatrain.trainer.StepEngine, "_gradient_ready", broken)
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight is not finite.*committed state is step 2"):
        run(run_file, {"train.steps": 4}, resume=True)
    assert same_state(before, state(tmp_path / "run/nvme")) == []
    monkeypatch.undo()
    assert run(run_file, {"train.steps": 4}, resume=True) == 0


def test_generated_text_is_what_transformers_generates(run_file: RunFile, tmp_path: Path) -> None:
    """P1: greedy text through the tiers equals greedy text of the same weights in a plain model."""
    assert run(run_file, {"train.steps": 6, "optimizer.lr": 0.01}) == 0
    text = generate(
        tmp_path / "run", "line 3: the", max_new_tokens=12, temperature=0, seed=0, console=Console(quiet=True)
    )
    model = AutoModelForCausalLM.from_config(model_config(MODELS["llama"])).eval()
    named = dict(model.named_parameters())
    group = zarr.open_group(tmp_path / "run/nvme", mode="r")
    for path in (tmp_path / "run/nvme").glob("*/weight"):
        array = group[f"{path.parent.name}/weight"]
        for tensor in array.attrs["tensors"]:
            size = int(np.prod(tensor["shape"]))
            values = torch.from_numpy(np.asarray(array[tensor["offset"] : tensor["offset"] + size]))
            named[tensor["name"]].data.copy_(values.view(tensor["shape"]))
    ids = torch.tensor([list(b"line 3: the")])
    for _ in range(12):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    assert text == bytes(ids[0].tolist()).decode(errors="replace")


def test_a_model_folder_is_trained_from_its_own_weights(run_file: RunFile, tmp_path: Path) -> None:
    """CK-11, CK-15: FP32 and BF16 checkpoints load exactly; a missing tensor or another shape is refused by name."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(model_config(MODELS["llama"]))
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / f"model-{dtype}"
        model.to(dtype).save_pretrained(folder)
        run_dir = tmp_path / f"run-{dtype}"
        changes = {
            "model.config": ..., "model.path": str(folder), "data.tokenizer": "bytes", "train.steps": 1,
            "optimizer.lr": 0.0, "output.dir": str(run_dir), "tiers.nvme": str(run_dir / "nvme"),
        }  # fmt: skip
        assert train(load_run(run_file({**TIGHT, **changes})), resume=False, console=Console(quiet=True)) == 0
        array = zarr.open_group(run_dir / "nvme", mode="r")["lm_head/weight"]
        expected = model.lm_head.weight.detach().float().flatten().numpy()
        assert np.array_equal(np.asarray(array[: expected.size]), expected)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    again = {**changes, "output.dir": str(tmp_path / "x"), "tiers.nvme": str(tmp_path / "x/nvme")}
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        train(load_run(run_file({**TIGHT, **again})), resume=False, console=Console(quiet=True))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        train(load_run(run_file({**TIGHT, **again})), resume=False, console=Console(quiet=True))


def test_first_weights_are_committed_as_step_zero(run_file: RunFile, tmp_path: Path) -> None:
    """P3: a crash in the first step loses nothing; the weights are those of the seed."""

    def dies(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TieringError("the power goes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatrain.trainer.StepEngine, "step", dies)
        with pytest.raises(TieringError, match="the power goes"):
            run(run_file, {"train.seed": 11})
    units = find_units(build(model_config(MODELS["llama"])))
    found = state(tmp_path / "run/nvme")
    for unit in units:
        block = torch.empty(unit.nbytes, dtype=torch.uint8)
        first_weights(units, unit, 11, block)
        assert np.array_equal(found[f"{unit.name}/weight"], block.numpy()), unit.name
        assert not found[f"{unit.name}/exp_avg"].any()
    assert run(run_file, {"train.seed": 11}, resume=True) == 0


def test_ctrl_c_ends_a_run_at_a_step_border_with_a_commit(run_file: RunFile, tmp_path: Path) -> None:
    """P3: exit code 130, the step committed, the way to go on printed; going on gives the bits of an unbroken run."""
    changes = {**TIGHT, "train.steps": 300, "train.commit_every": 1000}
    path = run_file(changes)
    command = [sys.executable, "-u", "-m", "megatrain", "train", str(path)]
    seen = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            seen.append(line)
            if line.startswith("step 3/"):
                os.kill(process.pid, signal.SIGINT)
    text = "".join(seen)
    assert process.returncode == 130, text
    assert "--resume" in text, text
    step = json.loads((tmp_path / "run/nvme/manifest.json").read_text())["step"]
    assert 3 <= step < 300, text
    assert f"step {step}" in text
    assert len(rows(tmp_path / "run")) == step
    assert run(run_file, {**changes, "train.steps": step + 2}, resume=True) == 0
    where = {"tiers.nvme": str(tmp_path / "other/nvme"), "output.dir": str(tmp_path / "other")}
    assert run(run_file, {**changes, **where, "train.steps": step + 2}) == 0
    assert same_state(state(tmp_path / "run/nvme"), state(tmp_path / "other/nvme")) == []
