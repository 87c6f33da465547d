"""From a run file to everything that is decided before anything is written: units, workload, budget, plan.

Scope: the order of refusals (cheapest first), the memory that computing takes beside the arena.
Not here: the plan itself (`tiering/plan.py`), showing it (`report.py`), carrying it out (`trainer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from megatrain.checkpoint import Checkpoint
from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.fit import host_budget, refuse_budget, refuse_early, resident_share
from megatrain.model import Units, build, find_units, model_config
from megatrain.profile import UnitCost, profile
from megatrain.programs import UnitSize, forward_workload, training_workload
from tiering.hardware import Hardware, assumed_hardware
from tiering.measure import measure
from tiering.plan import Line, Plan, make_plan
from tiering.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that fits. compute_lines: memory beside the arena, bytes; baseline: this process before it starts."""

    run: RunConfig
    units: Units
    plan: Plan
    hardware: Hardware
    costs: Mapping[str, UnitCost]
    checkpoint: Checkpoint | None
    host_budget: int
    compute_lines: tuple[Line, ...]
    baseline_bytes: int

    @property
    def compute_bytes(self) -> int:
        return sum(line.nbytes for line in self.compute_lines)


def prepare(run: RunConfig) -> Prepared:
    """Decide a training run. Raises UserError or BudgetError before any weight exists or any file is written."""
    refuse_early(run)
    units = find_units(build(model_config(run.model.json_config())))
    refuse_budget(run, [unit.size() for unit in units])
    budget = host_budget(run)
    checkpoint = Checkpoint(run.model.path, units) if run.model.path is not None else None
    costs = profile(units, run.train.micro_batch, run.data.seq_len)
    lines = tuple(_compute_lines(units, costs, run.train.batch // run.train.micro_batch))
    _refuse_compute(run, lines)
    hardware = _measured(run, units)
    workload = training_workload(_costed(units, costs, run), deferred=run.train.max_grad_norm is not None)
    return Prepared(
        run=run,
        units=units,
        plan=make_plan(workload, hardware, budget, resident_share(run)),
        hardware=hardware,
        costs=costs,
        checkpoint=checkpoint,
        host_budget=budget,
        compute_lines=lines,
        baseline_bytes=psutil.Process().memory_info().rss,
    )


def forward_plan(run: RunConfig, units: Units) -> Plan:
    """A plan for forwards alone, with the run's budget."""
    workload: Workload = forward_workload([unit.size() for unit in units])
    return make_plan(workload, assumed_hardware(), host_budget(run))


def _measured(run: RunConfig, units: Units) -> Hardware:
    text = units.model.config.get_text_config()
    tokens = run.train.micro_batch * run.data.seq_len
    return measure(run.tiers.nvme[0], width=min(text.hidden_size, 4096), tokens=min(tokens, 4096))


def _costed(units: Units, costs: Mapping[str, UnitCost], run: RunConfig) -> list[UnitSize]:
    times = run.train.batch // run.train.micro_batch
    return [
        unit.size(times * costs[unit.name].forward_flops, times * costs[unit.name].backward_flops) for unit in units
    ]


def _compute_lines(units: Units, costs: Mapping[str, UnitCost], micro_batches: int) -> list[Line]:
    """Memory that torch takes beside the arena, at its peak.

    boundary: the input of every unit, for the whole step. in flight: a unit's output twice while micro-batches are
    joined, and the gradient of one boundary twice. workspace: the widest backward of one micro-batch.
    """
    inner = [costs[unit.name] for unit in units if unit is not units.head]
    widest = max(cost.output_bytes for cost in inner)
    return [
        Line(what="boundary activations", nbytes=micro_batches * sum(cost.output_bytes for cost in inner)),
        Line(what="outputs and gradients in flight", nbytes=4 * micro_batches * widest),
        Line(what="workspace of one micro-batch", nbytes=max(cost.workspace_bytes for cost in costs.values())),
    ]


def _refuse_compute(run: RunConfig, lines: tuple[Line, ...]) -> None:
    """Without a GPU the device tier is host memory; `tiers.device_memory` then bounds what computing takes of it."""
    needed = sum(line.nbytes for line in lines)
    if run.tiers.device_memory is not None and needed > run.tiers.device_memory:
        rows = "".join(f"\n  {line.what:<34} {line.nbytes:>14} bytes" for line in lines)
        raise UserError(
            f"DEVICE needs {needed} bytes to compute, tiers.device_memory is {run.tiers.device_memory}:{rows}\n"
            f"Fix: tiers.device_memory >= {needed}, a smaller train.micro_batch, or fewer sequences a step"
        )
