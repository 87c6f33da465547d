"""From a run file to everything that is decided before anything is written: units, workload, budget, plan.

Scope: the order of refusals (cheapest first), the rates and times that a plan is made with.
Not here: the device (`accelerator.py`) and what a plan may take of it (`device_memory.py`), the plan itself
(`tiering/plan.py`), showing it (`report.py`), carrying it out (`trainer.py`).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

import psutil
import torch

from megatrain.accelerator import Accelerator, find_accelerator, move_buffers
from megatrain.catalog.unit_cost import UnitCost
from megatrain.checkpoint import Checkpoint
from megatrain.chunks import chunk_length
from megatrain.config import RunConfig
from megatrain.device_memory import DeviceRoom, device_shortage, room_beside
from megatrain.errors import UserError
from megatrain.exactness import is_inexact
from megatrain.fit import drives_of, host_budget, in_settings, refuse_budget, refuse_early, resident_share
from megatrain.heap import Heap
from megatrain.loss import refuse_uncuttable
from megatrain.model import Units
from megatrain.precision import compute_dtype, set_dtype
from megatrain.profile import profile
from megatrain.programs import UnitSize, forward_workload
from megatrain.run_model import build_units, open_checkpoint
from megatrain.sizes import format_seconds
from megatrain.timing import ALIKE, REPEATS, UnitTime, time_units
from megatrain.training_plan import Choice, Limits, plan_training
from megatrain.update_place import kept_place, place_of_updates, refuse_place
from megatrain.workspace import LOGITS, WORKING_ROOM, compute_lines, seen
from tiering import gds
from tiering.device import updates_there
from tiering.errors import TieringError
from tiering.hardware import Drive, Hardware, Rate, all_direct, assumed_hardware
from tiering.hardware_file import load
from tiering.lanes import Lanes
from tiering.manager import TRIAL_BYTES
from tiering.measure import busy_drive, by_drive, io_steals, measure, measure_drives, shared, stolen
from tiering.measure_disk import direct_read_rate
from tiering.measure_memory import compute_rate, product_shape
from tiering.plan import Line, Plan, make_plan
from tiering.posix import PosixEngine
from tiering.store import JSON
from tiering.workload import Workload

if TYPE_CHECKING:
    from megatrain.compiled import Compiler

_CPU = torch.device("cpu")
MEASURE_MOST_S = 2.0
"""Units that would take longer than this to run once are reckoned from their flops instead."""
_TRIALS = ALIKE * (1 + REPEATS + 1 + 2 * REPEATS)
"""Of a unit of each kind: alone, then beside a busy drive."""
_SHORT_S = 3.0
"""Nobody has to be told of a wait that is shorter."""
RESERVED = 2
"""Times what computing is expected to take: addresses for the heap to grow into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that fits. drives: that of each folder of `tiers.nvme`; hardware has all of them together. cpu: FLOP/s of
    the host, whatever computes the run. compute_lines: memory of the host beside the arena, bytes; baseline: this
    process before it starts. accelerator, room: the device that computes and its memory; None: the CPU, in HOST.
    compiler: with `train.compile`. other_place_s: as `Choice.other_s`.
    """

    run: RunConfig
    units: Units
    plan: Plan
    hardware: Hardware
    cpu: Rate
    drives: tuple[Drive, ...]
    costs: Mapping[str, UnitCost]
    times: Mapping[str, UnitTime]
    checkpoint: Checkpoint | None
    host_budget: int
    heap: Heap | None
    compute_lines: tuple[Line, ...]
    baseline_bytes: int
    accelerator: Accelerator | None = None
    room: DeviceRoom | None = None
    compiler: "Compiler | None" = None
    other_place_s: float | None = None

    @property
    def compute_bytes(self) -> int:
        return sum(line.nbytes for line in self.compute_lines)

    def lanes(self) -> Lanes | None:
        """Those of the device, for one opening of the state; None where the CPU computes."""
        return None if self.accelerator is None else self.accelerator.lanes()

    @property
    def updates_there(self) -> bool:
        """True where the device updates too."""
        return updates_there(self.plan.workload)

    def place(self) -> dict[str, JSON]:
        """What a commit says of where updates are made."""
        return kept_place(on_device=self.room is not None, there=self.updates_there)

    @property
    def device(self) -> torch.device:
        return _CPU if self.accelerator is None else self.accelerator.device


def prepare(
    run: RunConfig, tell: Callable[[str], None] = lambda line: None, *, before: Mapping[str, JSON] | None = None
) -> Prepared:
    """Decide a training run. Raises UserError or BudgetError before any weight exists or any file is written.

    tell: shown what takes long, now and in the run. before: what the commit says that the run goes on from.
    """
    refuse_early(run)
    accelerator = find_accelerator(run)
    refuse_place(run, has_device=accelerator is not None)
    device = _CPU if accelerator is None else accelerator.device
    units = build_units(run.model)
    budget = host_budget(run)
    checkpoint = open_checkpoint(run.model, units)
    if run.train.loss_chunk is not None:
        refuse_uncuttable(units, "train.loss_chunk")
    buffer_bytes = move_buffers(units.model, device)
    dtype = compute_dtype(run.train.precision)
    set_dtype(units.model, dtype)
    costs = profile(units, run.train.micro_batch, run.data.seq_len, run.train.loss_chunk, device, dtype)
    micro_batches = run.train.batch // run.train.micro_batch
    refuse_budget(run, _costed(units, costs, {}, micro_batches), has_device=accelerator is not None)
    own: tuple[Line, ...] = (Line(what="threads and bookkeeping", nbytes=WORKING_ROOM),)
    on_host = accelerator is None
    lines = compute_lines(costs, units.head.name, micro_batches, chunked=_chunked(run), on_host=on_host)
    room = None if accelerator is None else room_beside(run, accelerator, lines, buffer_bytes)
    if room is None:
        _refuse_compute(run, (*lines, *own))
    compiler = _compiler(run, device, tell)
    if compiler is not None:
        units = compiler.units(units)
    hardware, drives, cpu = _measured(run, units, budget, accelerator, room)
    there = budget if room is None else room.budget_bytes
    trial_s = _TRIALS * _kinds_s(costs, hardware)
    if _SHORT_S < trial_s <= _TRIALS * MEASURE_MOST_S:
        tell(f"Timing units of each kind: about {format_seconds(trial_s)}")
    if compiler is not None:  # by itself: neither its seconds nor its memory are those of a step
        _timed(run, units, costs, hardware, there, device)
    heap = Heap(RESERVED * sum(line.nbytes for line in lines)) if on_host else None
    times = _timed(run, units, costs, hardware, there, device)
    if run.tiers.hardware is None:
        hardware = replace(hardware, io_steals=_stolen(run, units, hardware, budget, times if on_host else {}))
    if times and heap is not None:
        lines = seen(lines, heap.release())
    limits = Limits(
        host_bytes=budget,
        resident=resident_share(run),
        device_bytes=None if room is None else room.budget_bytes,
        update_on=place_of_updates(run, hardware, before or {}),
    )
    choice = _planned(run, _costed(units, costs, times, micro_batches), hardware, limits, room)
    importlib.import_module("zarr")  # the store will: what it takes belongs to the baseline
    return Prepared(
        run=run,
        units=units,
        plan=choice.plan,
        other_place_s=choice.other_s,
        hardware=hardware,
        cpu=cpu,
        drives=drives,
        costs=costs,
        times=times,
        checkpoint=checkpoint,
        host_budget=budget,
        heap=heap,
        compute_lines=(*lines, *own) if on_host else own,
        baseline_bytes=psutil.Process().memory_info().rss,
        accelerator=accelerator,
        room=room,
        compiler=compiler,
    )


def _compiler(run: RunConfig, device: torch.device, tell: Callable[[str], None]) -> "Compiler | None":
    """Raises UserError where `train.compile` is asked for and nothing can be compiled."""
    if not run.train.compile:
        return None
    # Only here: inductor takes seconds and memory that a run without it has no use for.
    from megatrain.compiled import Compiler
    from megatrain.compiler_trial import refuse_uncompilable

    refuse_uncompilable(device)
    return Compiler(tell)


def _planned(
    run: RunConfig, sizes: list[UnitSize], hardware: Hardware, limits: Limits, room: DeviceRoom | None
) -> Choice:
    """Raises BudgetError in the words of the run file."""
    with in_settings(), device_shortage(room):
        return plan_training(
            sizes,
            hardware,
            limits,
            deferred=run.train.max_grad_norm is not None,
            late=None if run.tiers.late_updates == "auto" else run.tiers.late_updates,
            validates=run.data.validation is not None,
            bf16=run.train.precision == "bf16",
        )


def forward_plan(run: RunConfig, units: Units) -> Plan:
    """A plan for forwards alone, with the run's budget."""
    workload: Workload = forward_workload([unit.size() for unit in units.stored])
    with in_settings():
        return make_plan(workload, assumed_hardware(), host_budget(run))


def _measured(
    run: RunConfig, units: Units, budget: int, accelerator: Accelerator | None, room: DeviceRoom | None
) -> tuple[Hardware, tuple[Drive, ...], Rate]:
    """Rates of this machine, of each drive, and of its CPU: from the file that the run names, else measured now."""
    if run.tiers.hardware is not None:
        file = load(run.tiers.hardware)
        entries = drives_of(run, file)
        used = tuple(drive for drive in file.drives if drive in entries)
        drives = tuple(shared(entry.drive(), entries.count(entry)) for entry in entries)
        hardware = file.model_copy(update={"drives": used}).hardware(on_device=accelerator is not None)
        if accelerator is not None and room is not None:
            hardware = _with_direct_reads(hardware, run, accelerator, room)
        return hardware, drives, file.host.compute.rate()
    text = units.model.config.get_text_config()
    tokens = run.train.micro_batch * run.data.seq_len
    width, tokens = min(text.hidden_size, 4096), min(tokens, 4096)
    clips = run.train.max_grad_norm is not None
    first = measure(run.tiers.nvme[0], width=width, tokens=tokens, memory=budget, clips=clips)
    hardware, drives = measure_drives(first, run.tiers.nvme, memory=budget)
    dtype = compute_dtype(run.train.precision)
    if accelerator is not None and room is not None:
        hardware = accelerator.rates(width, tokens, room.budget_bytes, clips).beside(hardware)
        hardware = _with_direct_reads(hardware, run, accelerator, room)
    elif dtype != torch.float32:
        hardware = replace(hardware, compute=compute_rate(*product_shape(width, tokens, budget), dtype=dtype))
    return hardware, drives, first.compute


def _with_direct_reads(hardware: Hardware, run: RunConfig, accelerator: Accelerator, room: DeviceRoom) -> Hardware:
    """With `Hardware.direct_read` as the file has it, or measured, where a real transfer from each drive works; without
    one otherwise, and where everything is to pass through RAM.
    """
    unknown = replace(hardware, direct_read=None)
    known = hardware.direct_read if run.tiers.hardware is not None else None
    if run.tiers.direct_reads == "off" or run.tiers.engine == "posix" or (run.tiers.hardware and known is None):
        return unknown
    groups = by_drive(run.tiers.nvme)
    paths = [path for path, *_ in groups]
    for path in paths:
        probe = gds.DeviceProbe(refusal="no kvikio") if gds.probe(path) else gds.probe_device(path, accelerator.device)
        if probe.refusal or probe.path == gds.COMPAT:  # kvikio would itself go through RAM
            return unknown
    if known is not None:
        return hardware
    depth, memory = max(1, hardware.queue_depth // len(groups)), min(room.budget_bytes, TRIAL_BYTES)
    try:
        with gds.KvikioEngine() as engine:
            rates = [direct_read_rate(path, engine, accelerator.device, memory=memory, depth=depth) for path in paths]
    except (TieringError, torch.OutOfMemoryError):  # a run does not depend on it
        return unknown
    return replace(hardware, direct_read=all_direct(rates, hardware.h2d))


def _timed(
    run: RunConfig,
    units: Units,
    costs: Mapping[str, UnitCost],
    hardware: Hardware,
    budget: int,
    device: torch.device,
) -> dict[str, UnitTime]:
    """Measured seconds of each unit on the device that computes; nothing where measuring would itself take long, or
    does not fit there. budget: bytes of that device's memory.
    """
    largest = max(unit.nbytes for unit in units.stored)
    if device.type != "cpu" and 2 * largest > budget:
        return {}
    if _kinds_s(costs, hardware) > MEASURE_MOST_S:
        return {}
    try:
        dtype = compute_dtype(run.train.precision)
        return time_units(units, run.train.micro_batch, run.data.seq_len, budget, run.train.loss_chunk, device, dtype)
    except RuntimeError as error:
        if not is_inexact(error):
            raise
        raise UserError(
            f"device: {device.type}: {type(units.model).__name__} computes with an operator that gives other bits each "
            f"time there: {str(error).partition('. ')[0]}. Fix: device: cpu"
        ) from error


def _kinds_s(costs: Mapping[str, UnitCost], hardware: Hardware) -> float:
    """Seconds that one unit of each kind computes for a micro-batch."""
    return sum(cost.forward_flops + cost.backward_flops for cost in set(costs.values())) / hardware.compute.per_s


def _stolen(run: RunConfig, units: Units, hardware: Hardware, budget: int, times: Mapping[str, UnitTime]) -> float:
    """`Hardware.io_steals`: of the units themselves where they were timed, since a busy drive takes bandwidth of the
    memory, which few tokens need more of than many; of a matrix product otherwise.
    """
    path, depth = run.tiers.nvme[0], hardware.queue_depth
    with PosixEngine() as engine:
        if not times:
            width = min(units.model.config.get_text_config().hidden_size, 4096)
            tokens = min(run.train.micro_batch * run.data.seq_len, 4096)
            return io_steals(path, engine, width=width, tokens=tokens, memory=budget, depth=depth)
        with busy_drive(path, engine, memory=budget // 2, depth=depth):
            beside = time_units(
                units,
                run.train.micro_batch,
                run.data.seq_len,
                budget // 2,
                run.train.loss_chunk,
                dtype=compute_dtype(run.train.precision),
                typical=mean,  # now and then an op waits for a thread of the drive's: that is part of it
                repeats=2 * REPEATS,
            )
    alone_s, beside_s = (sum(time.forward_s + time.backward_s for time in one.values()) for one in (times, beside))
    return stolen(alone_s, beside_s)


def _costed(
    units: Units, costs: Mapping[str, UnitCost], times: Mapping[str, UnitTime], micro_batches: int
) -> list[UnitSize]:
    """Units with what they cost a step."""
    unknown = UnitTime(forward_s=0.0, backward_s=0.0)
    frozen = [unit.size() for unit in units.frozen]
    return frozen + [
        replace(
            unit.size(),
            activation_bytes=micro_batches * costs[unit.name].input_bytes,
            forward_flops=micro_batches * costs[unit.name].forward_flops,
            backward_flops=micro_batches * costs[unit.name].backward_flops,
            forward_s=micro_batches * times.get(unit.name, unknown).forward_s,
            backward_s=micro_batches * times.get(unit.name, unknown).backward_s,
        )
        for unit in units
    ]


def _chunked(run: RunConfig) -> bool:
    """True if a micro-batch has several chunks."""
    return _chunk_tokens(run) < run.train.micro_batch * run.data.seq_len


def _chunk_tokens(run: RunConfig) -> int:
    """Tokens whose logits exist at a time."""
    train = run.train
    return train.micro_batch * chunk_length(train.micro_batch, run.data.seq_len, train.loss_chunk)


def _refuse_compute(run: RunConfig, lines: tuple[Line, ...]) -> None:
    """Without a GPU the device tier is host memory; `tiers.device_memory` then bounds what computing takes of it."""
    needed = sum(line.nbytes for line in lines)
    if run.tiers.device_memory is not None and needed > run.tiers.device_memory:
        rows = "".join(f"\n  {line.what:<34} {line.nbytes:>14} bytes" for line in lines)
        logits = any(line.what.startswith(LOGITS) for line in lines)
        shorter = logits and _chunk_tokens(run) > run.train.micro_batch
        chunk = f"train.loss_chunk < {_chunk_tokens(run)}, " if shorter else ""
        raise UserError(
            f"DEVICE needs {needed} bytes to compute, tiers.device_memory is {run.tiers.device_memory}:{rows}\n"
            f"Fix: tiers.device_memory >= {needed}, {chunk}a smaller train.micro_batch, or fewer sequences a step"
        )
