"""What a plan says about a training: memory, bytes on each link, seconds, tokens, the life of the drives.

Scope: `Forecast`, the one record behind `megatrain plan` and `tierplan`, its derived figures and its JSON object.
Not here: making it (`question.py`, `megatrain/prepare.py`), its tables (`tables.py`), what would change it
(`advice.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.programs import ACTIVATION, KINDS, WEIGHT_BF16
from megatrain.training_plan import UpdateOn
from tiering.device import NEAR, updates_there
from tiering.hardware import RATE_UNITS, Drive, Hardware
from tiering.plan import Line, Plan
from tiering.schedule import Schedule, Verb

DAY_S = 86_400
FP32_BYTES = 4
BF16_BYTES = 2
RECOMPUTED_FLOPS = 8
"""FLOP a parameter and token: 2 in forward, 2 in the forward that backward runs again, 4 in backward."""
MODEL_FLOPS = 6
"""FLOP a parameter and token without the forward that runs again: what other reports count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A figure that nobody measured or derived, as a person reads it, and where it comes from."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The sum of one tier. arena: lines of the planned mapping, which may take `arena_budget_bytes`. compute: what
    torch takes beside it. baseline: what the libraries take before anything starts. given: bytes of the tier in all, if
    that was said.
    """

    arena: tuple[Line, ...]
    arena_budget_bytes: int
    compute: tuple[Line, ...] = ()
    baseline: Line | None = None
    given_bytes: int | None = None

    @property
    def beside(self) -> tuple[Line, ...]:
        """Lines of all that is not in the arena."""
        return (*self.compute, *(() if self.baseline is None else (self.baseline,)))

    @property
    def arena_bytes(self) -> int:
        return sum(line.nbytes for line in self.arena)

    @property
    def used_bytes(self) -> int:
        """Arena and everything beside it."""
        return self.arena_bytes + sum(line.nbytes for line in self.beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A step whose updates run in the other place, host or device. asked: which place was asked for. step_s: None where
    that does not fit, or where nobody knows how fast the device updates.
    """

    asked: UpdateOn
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A training that fits, and what a step of it will be. `tokens`: of a step. flops: of a step, as computed (with the
    forward that backward runs again). device: None where the CPU computes. loss_chunk: tokens of a micro-batch whose
    logits exist at a time (None: all). precision: what forward and backward compute in, as in a run file.
    elsewhere: None where the CPU computes, and where that was not weighed.
    """

    model: str
    parameters: int
    active_parameters: int
    tokens: int
    micro_batch: int
    seq_len: int
    deferred: bool
    plan: Plan
    hardware: Hardware
    host: Memory
    device: Memory | None = None
    drives: tuple[Drive, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    total_tokens: int | None = None
    loss_chunk: int | None = None
    precision: str = "fp32"
    elsewhere: Elsewhere | None = None

    @property
    def step_s(self) -> float:
        return self.plan.timeline.pass_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def flops(self) -> float:
        """Of a step, as computed: with the forward that backward runs again."""
        return sum(op.flops for op in self.plan.workload.programs[self.main().name].ops)

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.step_s

    @property
    def model_flops_per_s(self) -> float:
        return MODEL_FLOPS * self.active_parameters * self.tokens / self.step_s

    @property
    def nvme_bytes(self) -> int:
        """Bytes that a step moves from and to NVMe."""
        return self.plan.timeline.read_bytes + self.plan.timeline.written_bytes

    @property
    def bytes_per_param(self) -> float:
        return self.nvme_bytes / self.parameters

    @property
    def bottleneck(self) -> str:
        """The busiest resource, in words."""
        return RESOURCES[self.plan.timeline.bottleneck]

    @property
    def written_per_day(self) -> float:
        """Bytes a day that steps write, one after the other without a pause."""
        return self.plan.timeline.written_bytes * DAY_S / self.step_s

    @property
    def commit_bytes(self) -> int:
        """Bytes that a commit writes on top of the step: what lives in RAM."""
        return sum(action.nbytes for action in self.plan.save.actions)

    @property
    def total_s(self) -> float | None:
        """Seconds until `total_tokens` are done."""
        return None if self.total_tokens is None else self.total_tokens / self.tokens_per_s

    @property
    def updates_there(self) -> bool:
        """True where updates run on the device."""
        return updates_there(self.plan.workload)

    def main(self) -> Schedule:
        """The schedule that the steps repeat."""
        schedules = self.plan.schedules.values()
        return next((schedule for schedule in schedules if schedule.cyclic), next(iter(schedules)))

    def placement(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and kind. HOST and NVME are homes; an activation may live on DEVICE alone, a weight there is a
        copy that stays from forward to backward. Gradients of the fused update have no home.
        """
        device = self._on_device()
        tiers = ("HOST", "NVME") if self.device is None else ("DEVICE", "HOST", "NVME")
        result: dict[str, dict[str, int]] = {tier: {} for tier in tiers}
        for kind in (*KINDS, WEIGHT_BF16, "grad", ACTIVATION):
            host, nvme = self.plan.bytes_at(kind)
            if not host + nvme:
                continue
            if self.device is not None:
                result["DEVICE"][kind] = device.get(kind, 0)
            if kind == ACTIVATION:
                nvme = max(0, nvme - device.get(kind, 0))
            result["HOST"][kind], result["NVME"][kind] = host, nvme
        return result

    def _on_device(self) -> dict[str, int]:
        """Bytes by kind that stay on the device over more than `NEAR` ops."""
        program = next((p for p in self.plan.workload.programs.values() if p.cyclic), None)
        if self.device is None or program is None:
            return {}
        uses: dict[str, list[int]] = {}
        for number, op in enumerate(op for op in program.ops if op.computes):
            for touch in op.touches:
                uses.setdefault(touch.block, []).append(number)
        found: dict[str, int] = {}
        for name, numbers in uses.items():
            block = self.plan.workload.blocks[name]
            if block.tier == "DEVICE" and numbers[-1] - numbers[0] > NEAR and block.kind != "grad":
                found[block.kind] = found.get(block.kind, 0) + block.nbytes
        return found

    def nvme_share(self) -> float:
        """Share of the persistent state (weights and both moments) whose home is NVME."""
        placed = [self.plan.bytes_at(kind) for kind in KINDS]
        return sum(nvme for _, nvme in placed) / sum(host + nvme for host, nvme in placed)

    def late_share(self) -> float:
        """Share of the weights whose update waits for the next step's forward."""
        workload = self.plan.workload
        late = sum(block.nbytes for block in workload.of_life("carried") if block.kind == "grad")
        return late / sum(block.nbytes for block in workload.of_life("durable") if block.kind == "weight")

    def disk_bytes(self) -> int:
        """Room that the store takes: two slots of what is durable, one of what is spilled."""
        spilled = {
            action.operands[0].block
            for schedule in self.plan.schedules.values()
            for action in schedule.actions
            if action.verb is Verb.WRITE
        }
        durable = sum(block.nbytes for block in self.plan.workload.of_life("durable"))
        passing = self.plan.workload.of_life("carried", "passing")
        return 2 * durable + sum(block.nbytes for block in passing if block.name in spilled)

    def tokens_to_hide_io(self) -> float | None:
        """Tokens a step from which computing takes as long as the busiest link; None: never.

        Solved from this plan, with its homes: of each link's seconds the part that activations take grows with the
        tokens. So does what computing takes, but for the update where it shares the processors.
        """
        timeline, hardware = self.plan.timeline, self.hardware
        shared = self.updates_there or not hardware.update_beside_compute
        fixed_s = timeline.update_s if shared else 0.0
        per_token_s = (timeline.compute_s - fixed_s) / self.tokens
        most = 0.0
        for lane_s, moving_s in self._activation_seconds().values():
            gain_s = per_token_s - moving_s / self.tokens
            waits_s = lane_s - moving_s - fixed_s
            if waits_s > 0 and gain_s <= 0:
                return None
            most = max(most, waits_s / gain_s if waits_s > 0 else 0.0)
        return most

    def _activation_seconds(self) -> dict[str, tuple[float, float]]:
        """By link: its busy seconds, and those of them that activations take."""
        timeline, hardware = self.plan.timeline, self.hardware
        moved = dict.fromkeys((Verb.READ, Verb.N2D, Verb.WRITE, Verb.H2D, Verb.D2H), 0)
        for action in self.main().actions:
            if action.verb in moved and self.plan.workload.blocks[action.operands[0].block].kind == ACTIVATION:
                moved[action.verb] += action.operands[0].hi - action.operands[0].lo
        both = timeline.read_bytes > 0 and timeline.written_bytes > 0
        stretch = hardware.mixed_stretch() if both else 1.0
        direct = hardware.direct_read or hardware.read
        read_s = moved[Verb.READ] / hardware.read.per_s + moved[Verb.N2D] / direct.per_s
        io_s = stretch * (read_s + moved[Verb.WRITE] / hardware.write.per_s)
        links = {"NVMe": (timeline.io_s, io_s)}
        if hardware.h2d is not None and hardware.d2h is not None:
            links["H2D"] = (timeline.h2d_s, moved[Verb.H2D] / hardware.h2d.per_s)
            links["D2H"] = (timeline.d2h_s, moved[Verb.D2H] / hardware.d2h.per_s)
        return links

    def drive_lives(self) -> list[tuple[Drive, float, float | None]]:
        """Each drive with the bytes that steps write to it a day, and the days until its endurance is used up (None:
        unknown). Drives share the writes by their write rates.
        """
        together = sum(drive.write.per_s for drive in self.drives)
        lives = []
        for drive in self.drives:
            per_day = self.written_per_day * drive.write.per_s / together
            days = drive.endurance_bytes / per_day if drive.endurance_bytes and per_day else None
            lives.append((drive, per_day, days))
        return lives

    def as_json(self) -> dict[str, Any]:
        """All figures in bytes, seconds and tokens, unrounded. null: not known, or never.

        host, device: `Memory` by line (null: no device). host_lines: the arena's; compute_lines: beside it, where ops
        compute. placement: bytes by tier and kind. step_s: simulated; limit_s: the busiest resource alone; serial_s:
        one thing after the other; busy_s: by resource; io_s, compute_s: two of them. read, written, h2d, d2h: a step's
        bytes on each link; direct_read: of those read, what goes straight to the device. flops_per_s: with the forward
        that backward runs again; model_flops_per_s: 6 a parameter and token. update_elsewhere_s: a step with updates in
        the place that `update_on` is not. disk_bytes: both slots and what is spilled. commit_bytes: on top of a step
        that commits. drives: each with its life in days of steps without a pause.
        """
        memory = self.device or self.host
        return {
            "model": self.model,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "tokens": self.tokens,
            "micro_batch": self.micro_batch,
            "seq_len": self.seq_len,
            "loss_chunk": self.loss_chunk,
            "precision": self.precision,
            "host_budget_bytes": self.host.arena_budget_bytes,
            "arena_bytes": self.plan.host_bytes,
            "host_lines": _named(self.host.arena),
            "compute_lines": _named(memory.compute),
            "baseline_bytes": self.host.baseline.nbytes if self.host.baseline is not None else 0,
            "host": _memory_json(self.host),
            "device": None if self.device is None else _memory_json(self.device),
            "placement": self.placement(),
            "nvme_share": self.nvme_share(),
            "disk_bytes": self.disk_bytes(),
            "export_fp32_bytes": FP32_BYTES * self.parameters,
            "export_bf16_bytes": BF16_BYTES * self.parameters,
            **self._step_json(),
            "update": "deferred" if self.deferred else "fused",
            "update_on": "device" if self.updates_there else "host",
            "update_elsewhere_s": None if self.elsewhere is None else self.elsewhere.step_s,
            "late_updates": self.late_share(),
            "lookahead": self.plan.knobs.lookahead,
            "lag": self.plan.knobs.lag,
            "tile_bytes": self.plan.knobs.tile_bytes,
            "ring": self.plan.knobs.ring,
            "hardware": {
                name: {"per_s": rate.per_s, "unit": RATE_UNITS[name], "source": rate.source, "how": rate.how}
                for name, rate in self.hardware.rates().items()
            },
            "assumed": [assumption.what for assumption in self.assumptions],
            "notes": list(self.notes),
        }

    def _step_json(self) -> dict[str, Any]:
        timeline = self.plan.timeline
        return {
            "step_s": timeline.pass_s,
            "io_s": timeline.io_s,
            "compute_s": timeline.compute_s,
            "limit_s": timeline.limit_s,
            "serial_s": timeline.serial_s,
            "bottleneck": timeline.bottleneck,
            "busy_s": timeline.busy(),
            "read_bytes": timeline.read_bytes,
            "written_bytes": timeline.written_bytes,
            "direct_read_bytes": timeline.direct_bytes,
            "h2d_bytes": timeline.h2d_bytes,
            "d2h_bytes": timeline.d2h_bytes,
            "bytes_per_param": self.bytes_per_param,
            "tokens_per_s": self.tokens_per_s,
            "flops": self.flops,
            "flops_per_s": self.flops_per_s,
            "model_flops_per_s": self.model_flops_per_s,
            "tokens_to_hide_io": self.tokens_to_hide_io(),
            "total_tokens": self.total_tokens,
            "total_s": self.total_s,
            "written_bytes_per_day": self.written_per_day,
            "commit_bytes": self.commit_bytes,
            "drives": [_drive_json(*life) for life in self.drive_lives()],
        }


RESOURCES: Mapping[str, str] = {
    "NVMe": "NVMe",
    "H2D": "PCIe to device",
    "D2H": "PCIe to host",
    "compute": "compute",
    "update": "update",
}
"""Names of a timeline's resources as people read them."""


def _named(lines: tuple[Line, ...]) -> dict[str, int]:
    return {line.what: line.nbytes for line in lines}


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "given_bytes": memory.given_bytes,
        "used_bytes": memory.used_bytes,
        "arena_budget_bytes": memory.arena_budget_bytes,
        "arena": _named(memory.arena),
        "beside": _named(memory.beside),
    }


def _drive_json(drive: Drive, per_day: float, days: float | None) -> dict[str, Any]:
    return {
        "name": drive.name,
        "read_bytes_per_s": drive.read.per_s,
        "write_bytes_per_s": drive.write.per_s,
        "capacity_bytes": drive.capacity_bytes,
        "endurance_bytes": drive.endurance_bytes,
        "written_bytes_per_day": per_day,
        "life_days": days,
    }
