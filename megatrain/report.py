"""A plan as a person and a program read it.

Scope: `PlanReport`, its JSON object and its tables.
Not here: making the plan (`prepare.py`, `tiering/plan.py`).
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain.config import RunConfig
from megatrain.prepare import Prepared, prepare
from megatrain.programs import KINDS
from megatrain.sizes import format_rate, format_seconds, format_size
from tiering.manager import scratch_blocks, stored_blocks
from tiering.store import BlockStore

RATES = (("read", "B/s"), ("write", "B/s"), ("compute", "FLOP/s"), ("update", "B/s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What `megatrain plan` says about a run."""

    prepared: Prepared

    def as_json(self) -> dict[str, Any]:
        """All figures in bytes and seconds."""
        plan, timeline = self.prepared.plan, self.prepared.plan.timeline
        parameters = self.prepared.units.parameters
        return {
            "parameters": parameters,
            "host_budget_bytes": self.prepared.host_budget,
            "arena_bytes": plan.host_bytes,
            "host_lines": {line.what: line.nbytes for line in plan.lines},
            "compute_lines": {line.what: line.nbytes for line in self.prepared.compute_lines},
            "baseline_bytes": self.prepared.baseline_bytes,
            "placement": self.placement(),
            "nvme_share": self.nvme_share(),
            "disk_bytes": self.disk_bytes(),
            "step_s": timeline.pass_s,
            "io_s": timeline.io_s,
            "compute_s": timeline.compute_s,
            "limit_s": timeline.limit_s,
            "read_bytes": timeline.read_bytes,
            "written_bytes": timeline.written_bytes,
            "bytes_per_param": (timeline.read_bytes + timeline.written_bytes) / parameters,
            "update": "deferred" if self.prepared.run.train.max_grad_norm is not None else "fused",
            "lookahead": plan.knobs.lookahead,
            "lag": plan.knobs.lag,
            "tile_bytes": plan.knobs.tile_bytes,
            "ring": plan.knobs.ring,
            "hardware": {
                name: {
                    "per_s": getattr(self.prepared.hardware, name).per_s,
                    "unit": unit,
                    "source": getattr(self.prepared.hardware, name).source,
                    "how": getattr(self.prepared.hardware, name).how,
                }
                for name, unit in RATES
            },
            "unit_times": {name: asdict(times) for name, times in self.prepared.times.items()},
            "assumed": self.assumed(),
        }

    def placement(self) -> dict[str, dict[str, int]]:
        """Home bytes by tier and kind; gradients of the fused update have no home."""
        result: dict[str, dict[str, int]] = {"HOST": {}, "NVME": {}}
        for kind in (*KINDS, "grad"):
            host, nvme = self.prepared.plan.bytes_at(kind)
            if host + nvme:
                result["HOST"][kind], result["NVME"][kind] = host, nvme
        return result

    def nvme_share(self) -> float:
        """Share of the persistent state (weights and both moments) whose home is NVME."""
        placed = [self.prepared.plan.bytes_at(kind) for kind in KINDS]
        return sum(nvme for _, nvme in placed) / sum(host + nvme for host, nvme in placed)

    def disk_bytes(self) -> int:
        """Room that the store takes: two slots of what is durable, one of what is spilled."""
        plan = self.prepared.plan
        return BlockStore.nbytes_on_disk([*stored_blocks(plan, {}), *scratch_blocks(plan)])

    def assumed(self) -> list[str]:
        """Figures that nobody measured on this machine."""
        units = [f"cost of {name}" for name, cost in self.prepared.costs.items() if cost.assumed]
        return [*self.prepared.hardware.assumed(), *units]

    def render(self, console: Console) -> None:
        figures = self.as_json()
        parameters = figures["parameters"]
        state = 16 * parameters
        smaller = state / self.prepared.host_budget
        console.print(
            f"[bold]Plan[/bold]: {parameters / 1e6:.1f}M parameters, {format_size(state)} of training state in FP32, "
            f"HOST budget {format_size(self.prepared.host_budget)}"
            + (f" ({smaller:.1f} times smaller)" if smaller > 1 else "")
        )
        console.print(self._homes())
        console.print(self._memory())
        console.print(
            f"A step moves {format_size(figures['read_bytes'])} from NVMe and {format_size(figures['written_bytes'])} "
            f"to it ({figures['bytes_per_param']:.1f} bytes a parameter); update {figures['update']}, lookahead "
            f"{figures['lookahead']} ops, {figures['ring']} tiles of {format_size(figures['tile_bytes'])}"
        )
        console.print(
            f"Predicted: [bold]{format_seconds(figures['step_s'])} a step[/bold] "
            f"(I/O {format_seconds(figures['io_s'])}, compute {format_seconds(figures['compute_s'])}), "
            f"from {self._rates()}; "
            + ("units timed one by one" if self.prepared.times else "compute reckoned from flops")
        )
        console.print(f"Disk: {format_size(figures['disk_bytes'])} at {self.prepared.run.tiers.nvme[0]} (two slots)")
        if figures["assumed"]:
            console.print(f"[yellow]warning: assumed, not measured: {', '.join(figures['assumed'])}[/yellow]")

    def _homes(self) -> Table:
        table = Table("kind", "HOST", "NVME", title="Where the state lives between steps", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        placement = self.placement()
        for kind in placement["HOST"]:
            table.add_row(kind, format_size(placement["HOST"][kind]), format_size(placement["NVME"][kind]))
        table.add_row("share of weights and moments", f"{1 - self.nvme_share():.0%}", f"{self.nvme_share():.0%}")
        return table

    def _memory(self) -> Table:
        table = Table("memory", "bytes", title="Host memory", title_justify="left")
        table.columns[1].justify = "right"
        for line in self.prepared.plan.lines:
            table.add_row(line.what, format_size(line.nbytes))
        used = f"arena, of a budget of {format_size(self.prepared.host_budget)}"
        table.add_row(used, format_size(self.prepared.plan.host_bytes), style="bold", end_section=True)
        for line in self.prepared.compute_lines:
            table.add_row(line.what, format_size(line.nbytes))
        table.add_row("beside the arena, to compute", format_size(self.prepared.compute_bytes), style="bold")
        return table

    def _rates(self) -> str:
        hardware = self.prepared.hardware
        return (
            f"NVMe read {format_rate(hardware.read.per_s)}, write {format_rate(hardware.write.per_s)}, "
            f"{hardware.compute.per_s / 1e9:.0f} GFLOP/s ({hardware.read.source})"
        )


def plan_report(run: RunConfig) -> PlanReport:
    """Raises UserError or BudgetError for a run that cannot work; trains and writes nothing."""
    return PlanReport(prepared=prepare(run))
