"""What `megatrain plan` says about a run: the forecast of what was prepared.

Scope: `PlanReport`, from a prepared run to the record that `tierplan` makes too, its JSON object, its rendering; the
line that names the device.
Not here: making the plan (`prepare.py`), the figures (`tierplan/forecast.py`), their tables (`tierplan/tables.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from megatrain.accelerator import why_none
from megatrain.catalog.shapes import active_parameters
from megatrain.config import RunConfig
from megatrain.keeping import keep_lines
from megatrain.model import Units
from megatrain.optim import undecayed
from megatrain.precision import precision_note
from megatrain.prepare import Prepared, prepare
from megatrain.random_state import drew_on_device
from megatrain.schedules import schedule_lines
from megatrain.sizes import format_size
from megatrain.tierplan.forecast import Assumption, Elsewhere, Forecast, Memory
from megatrain.tierplan.question import assumed_rates
from megatrain.tierplan.tables import render
from megatrain.update_place import has_moved
from tiering.plan import Line
from tiering.store import BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What `megatrain plan` says about a run."""

    prepared: Prepared

    def forecast(self) -> Forecast:
        """The run as `tierplan` sees it too. Of the host only the arena's budget is given: the run file bounds nothing
        else of it.
        """
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
            precision=run.train.precision,
            deferred=run.train.max_grad_norm is not None,
            plan=prepared.plan,
            hardware=hardware,
            host=Memory(
                arena=prepared.plan.lines,
                arena_budget_bytes=prepared.host_budget,
                compute=prepared.compute_lines,
                baseline=Line(what="this process before it starts", nbytes=prepared.baseline_bytes),
            ),
            device=self._device(),
            elsewhere=self._elsewhere(),
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

    def _device(self) -> Memory | None:
        """The sum of the device's memory, where it has its own."""
        room = self.prepared.room
        if room is None:
            return None
        return Memory(
            arena=(Line(what="blocks that ops compute on", nbytes=self.prepared.plan.device_bytes),),
            arena_budget_bytes=room.budget_bytes,
            compute=room.compute,
            baseline=room.context,
            given_bytes=room.given_bytes,
        )

    def _elsewhere(self) -> Elsewhere | None:
        """What the planner said of updates in the other place; None where that was not tried or does not fit."""
        step_s = self.prepared.other_place_s
        return None if step_s is None else Elsewhere(asked=self.prepared.run.train.update_on, step_s=step_s)

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


def device_line(prepared: Prepared) -> str:
    """Which device computes and which one updates, in a line."""
    run, accelerator, room = prepared.run, prepared.accelerator, prepared.room
    threads, precise = f"{torch.get_num_threads()} threads", precision_note(run.train.precision)
    if accelerator is None or room is None:
        note = why_none(run)
        return f"Device: cpu, {threads} ({run.device}{f'; {note}' if note else ''}){precise}"
    which = f", the first of {accelerator.count}" if accelerator.count > 1 else ""
    updates = f"{accelerator.device.type}, AdamW of the device" if prepared.updates_there else f"cpu, {threads}"
    return (
        f"Device: {accelerator.device.type}, {accelerator.name}{which}, {format_size(room.given_bytes)} of "
        f"{format_size(accelerator.memory_bytes)} ({run.device}); updates: {updates} ({run.train.update_on}){precise}"
    )


def moved_line(prepared: Prepared, store: BlockStore) -> str:
    """For a state that goes on elsewhere: its bits are then those of two devices. Empty for any other."""
    before, now = drew_on_device(store.run), prepared.device.type != "cpu"
    if not store.step:
        return ""
    if before == now:
        if not has_moved(store.run, there=prepared.updates_there):
            return ""
        place = "device updates" if prepared.updates_there else "host updates"
        return f"up to step {store.step} updates were made elsewhere; from here on the {place}, and rounds otherwise"
    where = "on a device" if before else "on the CPU"
    return f"step {store.step} was computed {where}; from here on {prepared.device.type} computes, and rounds otherwise"


def plan_report(run: RunConfig, tell: Callable[[str], None] = lambda line: None) -> PlanReport:
    """Raises UserError or BudgetError for a run that cannot work; trains and writes nothing. tell: what takes long."""
    return PlanReport(prepared=prepare(run, tell))
