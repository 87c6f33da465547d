"""What `megatrain plan` says about a run: the forecast of what was prepared.

Scope: `PlanReport`, from a prepared run to the record that `tierplan` makes too, its JSON object, its rendering.
Not here: making the plan (`prepare.py`), the figures (`tierplan/forecast.py`), their tables (`tierplan/tables.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from megatrain.catalog.shapes import active_parameters
from megatrain.config import RunConfig
from megatrain.keeping import keep_lines
from megatrain.model import Units
from megatrain.optim import undecayed
from megatrain.prepare import Prepared, prepare
from megatrain.schedules import schedule_lines
from megatrain.tierplan.forecast import Assumption, Forecast, Memory
from megatrain.tierplan.question import assumed_rates
from megatrain.tierplan.tables import render
from tiering.plan import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What `megatrain plan` says about a run."""

    prepared: Prepared

    def forecast(self) -> Forecast:
        """The run as `tierplan` sees it too. Only the arena's budget is given: the run file bounds nothing else."""
        prepared, run, hardware = self.prepared, self.prepared.run, self.prepared.hardware
        config = run.model.json_config()
        unseen = [name for name, cost in prepared.costs.items() if cost.assumed]
        return Forecast(
            model=str(config["model_type"]),
            parameters=prepared.units.parameters,
            active_parameters=active_parameters(config) or prepared.units.parameters,
            tokens=run.train.batch * run.data.seq_len,
            micro_batch=run.train.micro_batch,
            seq_len=run.data.seq_len,
            loss_chunk=run.train.loss_chunk,
            deferred=run.train.max_grad_norm is not None,
            plan=prepared.plan,
            hardware=hardware,
            host=Memory(
                arena=prepared.plan.lines,
                arena_budget_bytes=prepared.host_budget,
                compute=prepared.compute_lines,
                baseline=Line(what="this process before it starts", nbytes=prepared.baseline_bytes),
            ),
            drives=prepared.drives,
            assumptions=(
                *assumed_rates(hardware),
                *(
                    Assumption(what=f"cost of {name}", value="from its size", source="not seen to run")
                    for name in unseen
                ),
            ),
            notes=(
                "units timed one by one" if prepared.times else "compute reckoned from flops",
                *parameter_groups(prepared.units, run.optimizer.no_decay),
                *schedule_lines(run),
                *keep_lines(prepared),
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """All figures in bytes and seconds."""
        times = {name: asdict(times) for name, times in self.prepared.times.items()}
        return self.forecast().as_json() | {"unit_times": times}

    def placement(self) -> dict[str, dict[str, int]]:
        """Home bytes by tier and kind."""
        return self.forecast().placement()

    def nvme_share(self) -> float:
        """Share of the persistent state (weights and both moments) whose home is NVME."""
        return self.forecast().nvme_share()

    def disk_bytes(self) -> int:
        """Room that the store takes: two slots of what is durable, one of what is spilled."""
        return self.forecast().disk_bytes()

    def render(self, console: Console) -> None:
        render(self.forecast(), console)


def parameter_groups(units: Units, no_decay: Sequence[str]) -> list[str]:
    """What is frozen and what has no weight decay, a line each; nothing where all parameters are treated alike."""
    lines = []
    if units.frozen:
        tensors = sum(len(unit.slices) for unit in units.frozen)
        frozen = units.parameters - units.trainable
        lines.append(f"{units.trainable:,} parameters are trained, {frozen:,} in {tensors} tensors are frozen")
    kept = undecayed(units, no_decay)
    if kept:
        elements = sum(place.numel for _, place in units.slices() if place.name in kept)
        lines.append(f"no weight decay for {elements:,} parameters in {len(kept)} tensors")
    return lines


def plan_report(run: RunConfig) -> PlanReport:
    """Raises UserError or BudgetError for a run that cannot work; trains and writes nothing."""
    return PlanReport(prepared=prepare(run))
