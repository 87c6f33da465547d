"""The loop of a run: from a run file to trained, committed state.

Scope: opening the state (new or resumed), steps, commits, the progress line and log, a clean end on Ctrl-C.
Not here: one step (`engine.py`), what is decided beforehand (`prepare.py`), what is said at the end (`goodbye.py`).
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from megatrain.accelerator import node_line, pin_line
from megatrain.commits import CommitPace, failures_named, predicted_commit_s
from megatrain.config import RUN_FILE, RunConfig, dump_run
from megatrain.data import RunData, StepBatches, open_data
from megatrain.device_memory import exhaustion_told
from megatrain.engine import StepEngine, StepResult
from megatrain.errors import UserError
from megatrain.goodbye import command_name, goodbye
from megatrain.inputs import tensors
from megatrain.interrupts import collected_interrupts
from megatrain.keeping import Keeping, room
from megatrain.model import Units, first_weights
from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared, prepare
from megatrain.programs import CAST, block_name
from megatrain.random_state import first_rng, rng_now, set_rng
from megatrain.report import PlanReport, device_line, moved_line
from megatrain.sizes import format_seconds, format_size
from megatrain.steplog import append_row, first_row, largest_stall, step_row
from megatrain.tracing import Recording, TraceRequest, recording
from megatrain.validation import Validation
from tiering.drives import find_drives, has_state, root_first
from tiering.gds import KvikioEngine
from tiering.hardware_file import load
from tiering.manager import Manager
from tiering.manifest import read_manifest
from tiering.measure import by_drive
from tiering.place import check_rooms
from tiering.spread import rate_of
from tiering.store import JSON, TensorSpec
from tiering.timetable import timetable
from tiering.trace import Figures

INTERRUPTED = 130
LOG_FILE = "log.jsonl"


def train(run: RunConfig, *, resume: bool, console: Console, trace: TraceRequest | None = None) -> int:
    """Train as `run` says; returns the exit code. Raises UserError or a TieringError."""
    _refuse_state(run, resume)
    before = read_manifest(root_first(run.tiers.nvme)[0]).run if resume else {}
    prepared = prepare(run, partial(console.print, markup=False, highlight=False, soft_wrap=True), before=before)
    report = PlanReport(prepared=prepared)
    report.render(console)
    if not resume:
        check_rooms(room(prepared))
    console.print(device_line(prepared), highlight=False, soft_wrap=True)
    _say_compiled(prepared, console)
    for folders in by_drive(run.tiers.nvme):
        if len(folders) > 1:
            names = " and ".join(map(str, folders))
            console.print(f"[yellow]{names} are on one drive; two folders on one drive gain nothing[/yellow]")
    run.output.dir.mkdir(parents=True, exist_ok=True)
    data = open_run_data(prepared, run.output.dir, console)
    batches = data.batches(run.train.batch, run.train.seed)
    root, *others = root_first(run.tiers.nvme)
    with open_state(prepared, batches, root, others=others, resume=resume, console=console) as manager:
        # Only here: a resume that is refused leaves the settings that the state was made with.
        (run.output.dir / RUN_FILE).write_text(dump_run(run))
        (run.output.dir / "plan.json").write_text(json.dumps(report.as_json(), indent=1))
        for line in filter(None, (manager.engine_line, pin_line(manager.lanes), node_line(manager.lanes))):
            console.print(line, markup=False, highlight=False)
        done = int(_number(manager.store.run, "step"))
        updates = int(_number(manager.store.run, "updates"))
        engine = StepEngine(run, prepared.units, manager, updates)
        try:
            validation = Validation(run, data.validation)
            code = _Loop(prepared, batches, validation, manager, engine, console, trace).run(done)
        finally:
            engine.close()
        if isinstance(manager.engine, KvikioEngine):
            moved = manager.engine.traffic().line(manager.engine.name)
            console.print(moved, markup=False, highlight=False, soft_wrap=True)
    _say_compiled(prepared, console)
    if code == 0:
        goodbye(prepared, batches, console)
    return code


def _say_compiled(prepared: Prepared, console: Console) -> None:
    if prepared.compiler is not None:
        console.print(prepared.compiler.line(), markup=False, highlight=False, soft_wrap=True)


def _refuse_state(run: RunConfig, resume: bool) -> None:
    root, *others = root_first(run.tiers.nvme)
    if has_state(root) and not resume:
        raise UserError(f"tiers.nvme: {root} holds the state of a run already. Fix: --resume to go on with it, another "
                        "folder, or remove that one")  # fmt: skip
    if resume and not has_state(root):
        raise UserError(f"tiers.nvme: {', '.join(map(str, run.tiers.nvme))} holds no state to resume. Fix: run without "
                        "--resume, or give the folder that the run used")  # fmt: skip
    if resume:
        find_drives(root, read_manifest(root), others)


def _number(run: Mapping[str, JSON], key: str) -> float:
    value = run.get(key, 0)
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return value


def open_run_batches(prepared: Prepared, folder: Path, console: Console) -> StepBatches:
    """The run's batches; tokens are cached in `folder`."""
    train = prepared.run.train
    return open_run_data(prepared, folder, console).batches(train.batch, train.seed)


def open_run_data(prepared: Prepared, folder: Path, console: Console) -> RunData:
    """What the run trains and validates on; tokens are cached in `folder`."""
    run = prepared.run
    vocabulary = prepared.units.model.config.get_text_config().vocab_size
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        data = open_data(
            run.data,
            vocabulary,
            folder / "tokens",
            run.train.seed,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    for notice in data.notices:
        console.print(notice, highlight=False)
    console.print(data.summary, highlight=False)
    return data


def identity(prepared: Prepared, batches: StepBatches) -> dict[str, JSON]:
    """What has to be equal for a run to go on with a state: all that decides its numbers."""
    layout = [[u.name, s.name, list(s.shape), s.offset] for u in prepared.units.stored for s in u.slices]
    return {
        "numerics": prepared.run.numerics(),
        "tokens": batches.fingerprint(),
        "parameter_layout": hashlib.sha256(json.dumps(layout).encode()).hexdigest(),
    }


def tensor_specs(units: Units) -> dict[str, tuple[TensorSpec, ...]]:
    """The attributes of every durable block: which parameters lie where in it."""
    return {block_name(unit.name, kind): unit.slices for unit in units.stored for kind in unit.kinds}


@contextmanager
def open_state(
    prepared: Prepared,
    batches: StepBatches,
    root: Path,
    *,
    others: Sequence[Path] = (),
    resume: bool,
    console: Console,
) -> Iterator[Manager]:
    """The tiers of a run, loaded and ready for the next step; a new state is filled and committed as step 0.

    others: a folder on each further drive; for a new state in the order of `tiers.nvme`.
    """
    run, units = prepared.run, prepared.units
    update = TiledAdamW(units, run.optimizer)
    options: dict[str, Any] = {"engine": run.tiers.engine, "serial": run.tiers.serial, "others": others}
    options["lanes"] = prepared.lanes()
    options["gds_settings"] = load(run.tiers.hardware).gds_settings if run.tiers.hardware is not None else None
    named = identity(prepared, batches)
    if resume:
        manager = Manager.resume(prepared.plan, root, named, update, **options)
    else:
        rates = [rate_of(drive) for drive in prepared.drives] if others else []
        manager = Manager.create(prepared.plan, root, tensor_specs(units), named, update, rates=rates, **options)
    with manager:
        if manager.store.step is None:
            _fill(manager, prepared, console)
            if prepared.heap is not None:
                prepared.heap.release()  # one whole tensor of a checkpoint may be larger than what computing takes
            first = {"step": 0, "updates": 0, "skipped": 0, **prepared.place()}
            manager.commit(0, {**first, **first_rng(run.train.seed, prepared.device)})
        if moved := moved_line(prepared, manager.store):
            console.print(f"[yellow]{moved}[/yellow]", soft_wrap=True)
        set_rng(manager.store.run, run.train.seed, prepared.device)
        with failures_named(manager.store, f"loading step {manager.store.step}"):
            manager.load()
            if CAST in manager.plan.schedules:
                manager.run(CAST)
        yield manager


def _fill(manager: Manager, prepared: Prepared, console: Console) -> None:
    """First weights, unit by unit; moments start as the zeros that the store is made of."""
    run, units, checkpoint = prepared.run, prepared.units, prepared.checkpoint
    owners = [unit for unit in units.stored if unit.nbytes]
    with Progress(console=console, transient=True) as progress:
        for unit in progress.track(owners, description="first weights"):

            def fill(block: torch.Tensor, unit: Any = unit) -> None:
                if checkpoint is not None:
                    checkpoint.fill(unit, block)
                else:
                    first_weights(units, unit, run.train.seed, block)

            manager.put(block_name(unit.name, "weight"), fill)
            for kind in unit.kinds[1:]:
                manager.put(block_name(unit.name, kind), torch.Tensor.zero_)


class _Loop:
    """Steps until the end or an interrupt."""

    def __init__(
        self,
        prepared: Prepared,
        batches: StepBatches,
        validation: Validation,
        manager: Manager,
        engine: StepEngine,
        console: Console,
        trace: TraceRequest | None = None,
    ) -> None:
        self.prepared = prepared
        self.run_config = prepared.run
        self.batches = batches
        self.validation = validation
        self.manager = manager
        self.engine = engine
        self.console = console
        self.keeping = Keeping(prepared.run, manager, console)
        self.skipped = int(_number(manager.store.run, "skipped"))
        self.losses: list[float] = []
        self.reported = 0
        self.trace = trace
        self.recording: Recording | None = None
        plan = prepared.plan
        self.timetable = timetable(plan.schedules["step"], plan.workload, prepared.hardware)
        self.pace = CommitPace(
            prepared.run.train.commit_every,
            done=int(_number(manager.store.run, "step")),
            step_s=plan.timeline.pass_s,
            commit_s=predicted_commit_s(plan, prepared.hardware),
        )

    def run(self, done: int) -> int:
        steps = self.run_config.train.steps
        self.keeping.keep(done)  # a run may have ended between a commit and keeping it
        if done >= steps:
            self.console.print(f"Nothing to do: the state is at step {done} of {steps}.")
            return 0
        if done:
            self.console.print(f"Going on from step {done} of {steps}.")
        self.console.print(self.pace.plan_line(steps - done), highlight=False, soft_wrap=True)
        self._start_trace(done)
        take = self.manager.trace.take
        with (
            collected_interrupts() as interrupts,
            (self.run_config.output.dir / LOG_FILE).open("ab", buffering=0) as log,
            recording(self.recording, take, lambda: self.reported),
        ):
            take()
            if not done and self.validation.due(0):
                append_row(log, first_row(self.validation.measure(self.engine, 0, self.console)))
            for number in range(done + 1, steps + 1):
                ends = number == steps
                validates = self.validation.due(number)
                commits = ends or self.pace.due(number) or self.keeping.due(number)
                inputs = tensors(self.batches.batch_at(number - 1))
                begin_s = time.perf_counter()
                room, when = self.prepared.room, f"step {number}"
                with failures_named(self.manager.store, when), exhaustion_told(room, when):
                    alone = ends or validates or (commits and self.engine.leaves_updates)
                    result = self.engine.step(inputs, last=alone)
                self.pace.stepped(time.perf_counter() - begin_s)
                self.losses.append(result.loss)
                self.skipped += result.skipped is not None
                stop = bool(interrupts)
                row = self._report(number, result)
                try:
                    if commits or stop:
                        row["commit_s"] = self._commit(number)
                        self.keeping.keep(number)
                    if validates and not stop:
                        row["validation_loss"] = self.validation.measure(self.engine, number, self.console)
                finally:
                    with failures_named(self.manager.store, f"step {number}"):
                        append_row(log, row)
                if stop:
                    self.console.print(
                        f"Interrupted: step {number} of {steps} is committed. "
                        f"Go on with: {command_name()} train {self.run_config.output.dir / RUN_FILE} --resume",
                        soft_wrap=True,
                    )
                    return INTERRUPTED
        self.console.print(
            f"[bold]Done[/bold]: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} over {len(self.losses)} steps"
            + (f", {self.skipped} skipped" if self.skipped else "")
            + f"; {self.pace.summary()}"
        )
        return 0

    def _commit(self, number: int) -> float:
        """Makes step `number` durable; returns the seconds that took."""
        begin_s = time.perf_counter()
        with failures_named(self.manager.store, f"commit of step {number}"):
            self.engine.settle()
            run: dict[str, JSON] = {"step": number, "updates": self.engine.updates, "skipped": self.skipped}
            self.manager.commit(number, {**run, **self.prepared.place(), **rng_now(self.engine.model.device)})
        took_s = time.perf_counter() - begin_s
        self.pace.committed(number, took_s)
        return took_s

    def _start_trace(self, done: int) -> None:
        self.reported = done
        if self.trace is not None:
            steps = self.trace.within(done, self.run_config.train.steps)
            prepared = self.prepared
            self.recording = Recording(self.trace, steps, prepared.plan, prepared.hardware, self.console)

    def _report(self, number: int, result: StepResult) -> dict[str, Any]:
        """Tells of a step; returns its row for the log, to which its commit is still to be added."""
        spans, figures = self.manager.trace.take()
        if self.recording is not None:
            self.recording.add(number, spans, figures)
        self.reported = number
        tokens = self.run_config.train.batch * self.run_config.data.seq_len
        row = step_row(number, asdict(result), figures, tokens, self.prepared.plan.timeline.pass_s, self.timetable)
        self.console.print(self._line(number, result, figures, tokens), highlight=False, soft_wrap=True)
        return row

    def _line(self, number: int, result: StepResult, figures: Figures, tokens: int) -> str:
        wall_s = figures.wall_s
        plan = self.prepared.plan
        note = f"  [yellow]skipped: {result.skipped} is not finite[/yellow]" if result.skipped else ""
        stall = largest_stall(figures)
        return (
            f"step {number}/{self.run_config.train.steps}  loss {result.loss:.4f}  {tokens / wall_s:,.0f} tok/s  "
            f"{format_seconds(wall_s)} (plan {format_seconds(plan.timeline.pass_s)})  "
            f"NVMe r {figures.read_bytes / wall_s / 1e9:.2f} w {figures.written_bytes / wall_s / 1e9:.2f} GB/s  "
            f"host {format_size(plan.host_bytes)} of {format_size(self.prepared.host_budget)}  "
            f"grad norm {result.grad_norm:.2f}{' before clipping' if result.clipped else ''}{note}"
            + (f"  {stall}" if stall else "")
        )
