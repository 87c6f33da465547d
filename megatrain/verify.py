"""The same run twice, tiered and as a plain loop, compared bit by bit.

Scope: `megatrain verify`: equal first weights for both, N steps each, every loss, norm, weight and moment compared.
Not here: the plain loop (`reference.py`), the tiered one (`engine.py`).
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zarr
from rich.console import Console
from transformers import AutoModelForCausalLM

from megatrain.config import OptimizerConfig, RunConfig
from megatrain.data import StepBatches
from megatrain.engine import StepEngine, StepResult
from megatrain.inputs import tensors
from megatrain.model import Units, first_weights, model_config
from megatrain.prepare import Prepared, prepare
from megatrain.programs import KINDS, block_name
from megatrain.reference import Reference, train_plain
from megatrain.report import PlanReport
from megatrain.trainer import open_run_batches, open_state
from tiering.device import updates_there
from tiering.place import folder_beside


def verify(run: RunConfig, steps: int, console: Console) -> dict[str, Any]:
    """Train `steps` steps both ways; the result says `identical`, and how far apart if not.

    Works in temporary folders beside those of `tiers.nvme`, on the same drives; the run's own state is not touched.
    """
    prepared = prepare(run, partial(console.print, markup=False, highlight=False, soft_wrap=True))
    folders: list[Path] = []
    try:
        for path in run.tiers.nvme:
            folders.append(Path(tempfile.mkdtemp(prefix=".verify-", dir=folder_beside(path))))
        batches = open_run_batches(prepared, folders[0], console)
        plain = _plain(prepared, batches, steps, console)
        state = [folder / "state" for folder in folders]
        results = _tiered(prepared, batches, state, steps, console)
        return _compare(prepared, plain, results, state[0])
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _plain(prepared: Prepared, batches: StepBatches, steps: int, console: Console) -> Reference:
    run = prepared.run
    model = plain_model(prepared.units, run)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in run.model.freeze):
            parameter.requires_grad_(False)
    optimizer = run.optimizer
    torch.manual_seed(run.train.seed)
    return train_plain(
        model,
        [tensors(batches.batch_at(step)) for step in range(steps)],
        micro_batch=run.train.micro_batch,
        max_grad_norm=run.train.max_grad_norm,
        optimizer={
            "lr": optimizer.lr,
            "betas": optimizer.betas,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        loss_chunk=run.train.loss_chunk,
        no_decay=optimizer.no_decay,
        schedule=_scheduler(optimizer),
        device=prepared.device,
        **_compiled_as(prepared.units, run),
        update_there=updates_there(prepared.plan.workload),
        bf16=run.train.precision == "bf16",
        progress=lambda step: console.print(f"plain  step {step + 1}/{steps}"),
    )


def _compiled_as(units: Units, run: RunConfig) -> dict[str, Any]:
    """The plain loop's layers are compiled where the tiered run's are, with the same settings."""
    if not run.train.compile:
        return {}
    from megatrain.compiled import layer_names, settings

    names = layer_names(units)
    return {"compiled": names, "compile_settings": settings(len(names))}


def _scheduler(optimizer: OptimizerConfig) -> dict[str, Any]:
    """The arguments of `transformers.get_scheduler`, which has two names for what is constant."""
    floor = {"min_lr": optimizer.min_lr} if optimizer.schedule == "cosine_with_min_lr" else {}
    warms_up = optimizer.schedule == "constant" and optimizer.warmup_steps
    return {
        "name": "constant_with_warmup" if warms_up else optimizer.schedule,
        "num_warmup_steps": optimizer.warmup_steps,
        "num_training_steps": optimizer.schedule_steps,
        "scheduler_specific_kwargs": floor,
    }


def plain_model(units: Units, run: RunConfig) -> Any:
    """The whole model in RAM: from its folder, or with the first weights that the tiered run draws."""
    if run.model.path is not None:
        model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float32)
        return model if run.model.rows is None else _resized(model, run.model.rows)
    model = AutoModelForCausalLM.from_config(model_config(run.model.json_config()), dtype=torch.float32)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for unit in units.stored:
            block = torch.empty(unit.nbytes, dtype=torch.uint8)
            first_weights(units, unit, run.train.seed, block)
            for place in unit.slices:
                named[place.name].copy_(place.of(block))
    return model


def _resized(model: Any, rows: int) -> Any:
    """As transformers does it, but that new rows are the mean itself."""
    stored = len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(rows, mean_resizing=False)
    layers = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    with torch.no_grad():
        for table in {table for layer in layers for table in layer.parameters(recurse=False)}:
            table[stored:] = table[:stored].mean(dim=0)
    return model


def _tiered(
    prepared: Prepared, batches: StepBatches, state: Sequence[Path], steps: int, console: Console
) -> list[StepResult]:
    results = []
    root, *others = state
    with open_state(prepared, batches, root, others=others, resume=False, console=console) as manager:
        engine = StepEngine(prepared.run, prepared.units, manager, 0)
        try:
            for step in range(steps):
                results.append(engine.step(tensors(batches.batch_at(step)), last=step + 1 == steps))
                console.print(f"tiered step {step + 1}/{steps}")
            engine.settle()
            manager.commit(steps, {"step": steps})
        finally:
            engine.close()
    return results


def _compare(prepared: Prepared, plain: Reference, results: Sequence[StepResult], root: Path) -> dict[str, Any]:
    """Reads the committed state as any user would: through zarr."""
    named = dict(plain.model.named_parameters())
    wanted: Mapping[str, Mapping[str, torch.Tensor]] = {
        "weight": {name: parameter.detach() for name, parameter in named.items()},
        "exp_avg": plain.exp_avg,
        "exp_avg_sq": plain.exp_avg_sq,
    }
    group = zarr.open_group(root, mode="r")
    differing: list[str] = []
    furthest = dict.fromkeys(KINDS, 0.0)
    for unit in prepared.units.stored:
        for kind in unit.kinds:
            array = group[block_name(unit.name, kind)]
            assert isinstance(array, zarr.Array)
            block = torch.from_numpy(array[:]).view(torch.uint8)
            for place in unit.slices:
                found, expected = place.of(block), wanted[kind][place.name].contiguous()
                if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
                    differing.append(f"{place.name} {kind}")
                    furthest[kind] = max(furthest[kind], (found - expected).abs().max().item())
    losses, grad_norms = [result.loss for result in results], [result.grad_norm for result in results]
    lrs = [result.lr for result in results]
    same_numbers = losses == plain.losses and grad_norms == plain.grad_norms and lrs == plain.lrs
    report = PlanReport(prepared=prepared)
    return {
        "identical": same_numbers and not differing,
        "steps": len(losses),
        "losses": losses,
        "plain_losses": plain.losses,
        "grad_norms": grad_norms,
        "plain_grad_norms": plain.grad_norms,
        "lrs": lrs,
        "plain_lrs": plain.lrs,
        "max_abs_diff": furthest,
        "differing": differing,
        "placement": report.placement(),
        "nvme_share": report.nvme_share(),
        "parameters": prepared.units.parameters,
    }
