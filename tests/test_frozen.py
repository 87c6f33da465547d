"""P1: frozen parameters, and parameters without weight decay, as a plain loop has them, bit for bit.

Scope: `model.freeze` and `optimizer.no_decay`: whole runs through `verify`, what is stored and moved for frozen
parameters, what a person is told.
Not here: all of it without either (`test_same_numbers.py`).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from conftest import RunFile, slow
from models import MODELS
from rich.console import Console

from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.export import export
from megatrain.model import build, find_units, first_weights, model_config
from megatrain.prepare import prepare
from megatrain.profile import profile
from megatrain.report import PlanReport
from megatrain.sizes import parse_size
from megatrain.snapshot import export_snapshot, import_snapshot
from megatrain.timing import time_units
from megatrain.trainer import train
from megatrain.verify import verify
from tiering.errors import BudgetError

pytestmark = pytest.mark.usefixtures("known_machine")

PLACED = {"optimizer.lr": 0.01, "tiers.host_memory": "8MiB", "tiers.resident": 0}
PATTERNS = {
    "embedding": ["model.embed_tokens.*"],
    "norms": ["*norm.weight"],
    "first layers": ["model.layers.0.*", "model.layers.1.*"],
    "all but the head": ["model.*"],
    "head": ["lm_head.weight", "model.layers.2.mlp.*"],
}


def run_both(run_file: RunFile, changes: dict[str, Any]) -> dict[str, Any]:
    return verify(load_run(run_file(PLACED | changes)), 3, Console(quiet=True))


@pytest.mark.parametrize("clip", [slow(None, id="fused"), pytest.param(0.5, id="clipped")])
@pytest.mark.parametrize("frozen", PATTERNS)
def test_frozen_parameters_stay_and_the_others_have_the_bits_of_the_plain_loop(
    run_file: RunFile, frozen: str, clip: float | None
) -> None:
    """P1, I8: `requires_grad_(False)` is the reference; the norm is that of what is trained."""
    for resident, micro_batch in ((0, 4), (0.5, 2)):
        changes = {"model.config": MODELS["llama"], "model.freeze": PATTERNS[frozen], "tiers.resident": resident}
        result = run_both(run_file, changes | {"train.max_grad_norm": clip, "train.micro_batch": micro_batch})
        shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
        assert result["identical"], shown
        assert result["losses"][0] != result["losses"][-1], shown


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        ("llama-tied", ["*embed_tokens*"]),
        ("llama-tied", ["model.layers.*.self_attn.*"]),
        ("gpt2", ["transformer.wpe.weight", "transformer.h.0.*"]),
        ("mixtral", ["*.gate.weight", "*.mlp.experts.*"]),
        ("gemma3", ["*.mlp.*"]),
    ],
)
def test_frozen_parts_of_other_architectures_have_the_bits_of_the_plain_loop(
    run_file: RunFile, model: str, patterns: list[str]
) -> None:
    """P1: tied weights, positions, experts, late updates."""
    for changes in ({"tiers.late_updates": 0.5}, {"train.max_grad_norm": 0.5}):
        result = run_both(
            run_file, {"model.config": MODELS[model], "model.freeze": patterns, "train.micro_batch": 4, **changes}
        )
        shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
        assert result["identical"], shown


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_parameters_without_weight_decay_have_the_bits_of_a_second_group(run_file: RunFile, clip: float | None) -> None:
    """P1: `torch.optim.AdamW` with two groups is the reference; norms and the embedding do not decay."""
    changes = {"model.config": MODELS["llama"], "optimizer.weight_decay": 0.5, "train.max_grad_norm": clip}
    without = run_both(run_file, changes | {"optimizer.no_decay": ["*norm.weight", "*embed_tokens*"]})
    assert without["identical"], without
    assert run_both(run_file, changes)["losses"] != without["losses"]


def test_a_frozen_parameter_has_four_bytes_and_is_never_written(run_file: RunFile) -> None:
    """OM-16: the store has no moments of it, no program has a gradient of it, and nothing but step zero writes it."""
    changes = {"model.config": MODELS["llama"], "model.freeze": ["model.embed_tokens.weight", "model.layers.1.*"]}
    prepared = prepare(load_run(run_file(PLACED | changes)))
    workload = prepared.plan.workload
    frozen = {unit.name for unit in prepared.units.frozen}
    kinds = {block.kind for block in workload.blocks.values() if block.unit in frozen}
    assert kinds == {"weight"}, kinds
    touched = [
        touch.block
        for program in workload.programs.values()
        for op in program.ops
        for touch in op.touches
        if touch.writes and touch.block.rpartition("/")[0] in frozen
    ]
    assert not touched, touched
    told = " ".join(PlanReport(prepared=prepared).forecast().notes)
    assert f"{prepared.units.trainable:,} parameters are trained" in told, told


def test_a_budget_that_frozen_parts_make_enough_is_not_refused(run_file: RunFile) -> None:
    """P2: what is frozen has no gradient that would need room, also for the refusal that comes before the model."""
    wide = {**MODELS["llama"], "hidden_size": 256, "intermediate_size": 1024}

    def least(**changes: Any) -> str:
        run = load_run(run_file({"model.config": wide, "tiers.host_memory": "64KiB"} | changes))
        with pytest.raises(BudgetError) as caught:
            prepare(run)
        found = re.search(r"Fix: tiers.host_memory >= (\d+MiB)", str(caught.value))
        assert found, caught.value
        return found[1]

    frozen = {"model.freeze": ["model.layers.*", "model.embed_tokens.*", "lm_head.*"]}
    all_of_it, some = least(), least(**frozen)
    assert parse_size(some) < parse_size(all_of_it), (some, all_of_it)
    prepare(load_run(run_file({"model.config": wide, "tiers.host_memory": some} | frozen)))


def test_what_is_frozen_does_not_change_the_first_weights() -> None:
    """P1: runs with and without frozen parts start from the same model."""
    config = model_config(MODELS["llama"])
    plain, split = find_units(build(config)), find_units(build(config), ["*norm*", "*q_proj*", "lm_head.*"])

    def drawn(units: Any) -> dict[str, torch.Tensor]:
        tensors = {}
        for unit in units.stored:
            block = torch.empty(unit.nbytes, dtype=torch.uint8)
            first_weights(units, unit, 7, block)
            tensors |= {place.name: place.of(block).clone() for place in unit.slices}
        return tensors

    one, other = drawn(plain), drawn(split)
    unlike = [name for name in one if not torch.equal(one[name], other[name])]
    assert one.keys() == other.keys() and not unlike, unlike


def test_units_with_frozen_parts_are_costed_and_timed() -> None:
    """P5: a unit without a parameter of its own computes as long as another; what no cost is known of is reckoned."""
    for model in ("llama", "mixtral"):
        units = find_units(build(model_config(MODELS[model])), ["model.layers.0.*", "model.embed_tokens.weight"])
        names = {unit.name for unit in units}
        assert profile(units, 2, 16).keys() == names
        assert time_units(units, 2, 16).keys() == names


def test_a_run_with_frozen_parts_is_resumed_and_exported_whole(run_file: RunFile, tmp_path: Path) -> None:
    """P3: a store with frozen blocks opens again; the exported model has the frozen tensors as they were drawn."""
    from safetensors.torch import load_file

    changes = PLACED | {
        "model.config": MODELS["llama"],
        "model.freeze": ["model.embed_tokens.weight", "model.layers.0.*"],
        "train.steps": 2,
    }
    assert train(load_run(run_file(changes)), resume=False, console=Console(quiet=True)) == 0
    before = zarr.open_group(tmp_path / "run" / "nvme", mode="r")["model.embed_tokens.frozen/weight"][:]
    longer = load_run(run_file(changes | {"train.steps": 4}))
    assert train(longer, resume=True, console=Console(quiet=True)) == 0
    out = tmp_path / "out"
    export(tmp_path / "run", out, dtype="float32", max_shard_bytes=1 << 30, force=False, console=Console(quiet=True))
    tensors = load_file(out / "model.safetensors")
    units = find_units(build(model_config(MODELS["llama"])))
    assert tensors.keys() == {place.name for _, place in units.slices()}
    found = tensors["model.embed_tokens.weight"].flatten()
    assert torch.equal(found, torch.from_numpy(before[: found.numel()]))


def test_a_snapshot_of_a_run_with_frozen_parts_goes_into_another_store(run_file: RunFile, tmp_path: Path) -> None:
    """P3: there are no moments of what is frozen, and none are asked for."""
    changes = PLACED | {"model.config": MODELS["llama"], "model.freeze": ["model.layers.0.*"], "train.steps": 2}
    quiet = Console(quiet=True)
    assert train(load_run(run_file(changes)), resume=False, console=quiet) == 0
    export_snapshot(tmp_path / "run", tmp_path / "snapshot", force=False, console=quiet)
    moved = load_run(run_file(changes | {"tiers.nvme": str(tmp_path / "b/nvme"), "output.dir": str(tmp_path / "b")}))
    assert import_snapshot(tmp_path / "snapshot", moved, quiet) == 2
    one, other = (zarr.open_group(tmp_path / name / "nvme", mode="r") for name in ("run", "b"))
    assert not (tmp_path / "b/nvme/model.layers.0.frozen/exp_avg").exists()
    for unit in find_units(build(model_config(MODELS["llama"])), ["model.layers.0.*"]).stored:
        for kind in unit.kinds:
            assert (one[f"{unit.name}/{kind}"][:] == other[f"{unit.name}/{kind}"][:]).all(), f"{unit.name}/{kind}"


@pytest.mark.parametrize(
    ("key", "patterns", "words"),
    [
        ("model.freeze", ["model.layer.*"], "matches no parameter"),
        ("model.freeze", ["*"], "nothing is left to train"),
        ("optimizer.no_decay", ["*.bias"], "matches no parameter"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused(run_file: RunFile, key: str, patterns: list[str], words: str) -> None:
    """A typing error in a pattern would train, or decay, what was to be left alone."""
    with pytest.raises(UserError, match=words) as caught:
        PlanReport(prepared=prepare(load_run(run_file({key: patterns})))).forecast()
    assert key in str(caught.value) and "Fix" in str(caught.value), caught.value


def test_a_run_with_other_frozen_parts_does_not_go_on(run_file: RunFile) -> None:
    """P3: what is frozen decides the numbers of a run."""
    assert train(load_run(run_file({"train.steps": 1})), resume=False, console=Console(quiet=True)) == 0
    frozen = load_run(run_file({"train.steps": 2, "model.freeze": ["*norm.weight"]}))
    with pytest.raises(Exception, match=r"freeze|another run|parameter_layout"):
        train(frozen, resume=True, console=Console(quiet=True))
