"""The loop of a run: from a run file to trained, committed state.

Scope: opening the state (new or resumed), steps, commits, the progress line and log, a clean end on Ctrl-C.
Not here: one step (`engine.py`), what is decided beforehand (`prepare.py`).
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from megatrain.config import RUN_FILE, RunConfig, dump_run
from megatrain.data import Batches, prepare_tokens
from megatrain.engine import StepEngine, StepResult
from megatrain.errors import UserError
from megatrain.generate import decode, generate
from megatrain.model import Units, first_weights
from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared, prepare
from megatrain.programs import KINDS, block_name
from megatrain.report import PlanReport
from megatrain.sizes import format_seconds, format_size
from tiering.manager import Manager
from tiering.place import check_room
from tiering.store import JSON, TensorSpec, has_state
from tiering.trace import Figures

INTERRUPTED = 130
LOG_FILE = "log.jsonl"
PROMPT_LENGTH = 24
SAMPLE_TOKENS = 96
SAMPLE_MOST_S = 15.0
"""A sample that would take longer than this is left to the user."""


def train(run: RunConfig, *, resume: bool, console: Console) -> int:
    """Train as `run` says; returns the exit code. Raises UserError or a TieringError."""
    _refuse_state(run, resume)
    prepared = prepare(run)
    report = PlanReport(prepared=prepared)
    report.render(console)
    if not resume:
        check_room(run.tiers.nvme[0], report.disk_bytes())
    console.print(_device_line(run))
    run.output.dir.mkdir(parents=True, exist_ok=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    (run.output.dir / RUN_FILE).write_text(dump_run(run))
    (run.output.dir / "plan.json").write_text(json.dumps(report.as_json(), indent=1))
    with open_state(prepared, batches, run.tiers.nvme[0], resume=resume, console=console) as manager:
        console.print(manager.engine_line, markup=False, highlight=False)
        done = int(_number(manager.store.run, "step"))
        updates = int(_number(manager.store.run, "updates"))
        engine = StepEngine(run, prepared.units, manager, updates)
        try:
            code = _Loop(prepared, batches, manager, engine, console).run(done)
        finally:
            engine.close()
    if code == 0:
        _goodbye(prepared, batches, console)
    return code


def _goodbye(prepared: Prepared, batches: Batches, console: Console) -> None:
    """A sample of what the model has learned, where everything is, and what to do next."""
    run = prepared.run
    folder = run.output.dir
    prompt = _prompt(run, batches)
    weights, hardware = sum(unit.nbytes for unit in prepared.units), prepared.hardware
    # Each token reads every weight and computes with it for all tokens before (2 flops a weight of 4 bytes).
    token_s = weights / hardware.read.per_s + weights / 2 * (PROMPT_LENGTH + SAMPLE_TOKENS / 2) / hardware.compute.per_s
    if SAMPLE_TOKENS * token_s < SAMPLE_MOST_S:
        options: dict[str, Any] = {"max_new_tokens": SAMPLE_TOKENS, "temperature": 0.8, "seed": run.train.seed}
        text = generate(folder, prompt, **options, console=console)
        console.print("A sample (the prompt is from the data):", style="bold")
        console.print(text, markup=False, highlight=False)
    console.print(
        f"Run folder: {folder} (log, plan, run file); state: {run.tiers.nvme[0]} (a Zarr v3 hierarchy)\n"
        f"Next: {_command()} train {folder / RUN_FILE} --resume --set train.steps={run.train.steps * 2}\n"
        f"      {_command()} generate {folder} --prompt {shlex.quote(prompt)}\n"
        f"      {_command()} verify {folder / RUN_FILE} --steps 2",
        highlight=False,
        soft_wrap=True,
    )


def _prompt(run: RunConfig, batches: Batches) -> str:
    """The start of a line of the data. A window may begin anywhere: its first line is cut, unless there is no other."""
    texts = [decode(run, row.tolist()) for row in batches.batch_at(0)]
    whole = (line for text in texts for line in text.splitlines()[1:] if len(line.split()) > 1)
    return next(whole, texts[0])[:PROMPT_LENGTH]


def _command() -> str:
    """What a person types to call this program from where it was called."""
    if shutil.which("megatrain"):
        return "megatrain"
    beside = Path(sys.executable).parent / "megatrain"
    return os.path.relpath(beside) if beside.is_file() else f"{sys.executable} -m megatrain"


def _device_line(run: RunConfig) -> str:
    found = run.device == "auto" and torch.cuda.is_available()
    note = "; there is a CUDA device, which is not supported yet" if found else ""
    return f"Device: cpu, {torch.get_num_threads()} threads ({run.device}{note})"


def _refuse_state(run: RunConfig, resume: bool) -> None:
    root = run.tiers.nvme[0]
    if has_state(root) and not resume:
        raise UserError(f"tiers.nvme: {root} holds the state of a run already. Fix: --resume to go on with it, another "
                        "folder, or remove that one")  # fmt: skip
    if resume and not has_state(root):
        raise UserError(f"tiers.nvme: {root} holds no state to resume. Fix: run without --resume, or give the folder "
                        "that the run used")  # fmt: skip


def _number(run: Mapping[str, JSON], key: str) -> float:
    value = run.get(key, 0)
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return value


def open_run_batches(prepared: Prepared, folder: Path, console: Console) -> Batches:
    """The run's batches; tokens are cached in `folder`."""
    run = prepared.run
    vocabulary = prepared.units.model.config.get_text_config().vocab_size
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        tokens = prepare_tokens(
            run.data,
            vocabulary,
            folder / "tokens",
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    for notice in tokens.notices:
        console.print(notice, highlight=False)
    console.print(f"Data: {tokens.count:,} tokens in windows of {run.data.seq_len}")
    return Batches(tokens, run.data.seq_len, run.train.batch, run.train.seed)


def identity(prepared: Prepared, batches: Batches) -> dict[str, JSON]:
    """What has to be equal for a run to go on with a state: all that decides its numbers."""
    layout = [[u.name, s.name, list(s.shape), s.offset] for u in prepared.units for s in u.slices]
    return {
        "numerics": prepared.run.numerics(),
        "tokens": batches.fingerprint(),
        "parameter_layout": hashlib.sha256(json.dumps(layout).encode()).hexdigest(),
    }


def tensor_specs(units: Units) -> dict[str, tuple[TensorSpec, ...]]:
    """The attributes of every durable block: which parameters lie where in it."""
    return {block_name(unit.name, kind): unit.slices for unit in units for kind in KINDS}


@contextmanager
def open_state(
    prepared: Prepared, batches: Batches, root: Path, *, resume: bool, console: Console
) -> Iterator[Manager]:
    """The tiers of a run, loaded and ready for the next step; a new state is filled and committed as step 0."""
    run, units = prepared.run, prepared.units
    update = TiledAdamW(units, run.optimizer)
    options: dict[str, Any] = {"engine": run.tiers.engine, "serial": run.tiers.serial}
    named = identity(prepared, batches)
    if resume:
        manager = Manager.resume(prepared.plan, root, named, update, **options)
    else:
        manager = Manager.create(prepared.plan, root, tensor_specs(units), named, update, **options)
    with manager:
        if manager.store.step is None:
            _fill(manager, prepared, console)
            manager.commit(0, {"step": 0, "updates": 0, "skipped": 0, "rng": _rng_state(run.train.seed)})
        _set_rng(manager.store.run)
        manager.load()
        yield manager


def _fill(manager: Manager, prepared: Prepared, console: Console) -> None:
    """First weights, unit by unit; moments start as the zeros that the store is made of."""
    run, units, checkpoint = prepared.run, prepared.units, prepared.checkpoint
    owners = [unit for unit in units if unit.nbytes]
    with Progress(console=console, transient=True) as progress:
        for unit in progress.track(owners, description="first weights"):

            def fill(block: torch.Tensor, unit: Any = unit) -> None:
                if checkpoint is not None:
                    checkpoint.fill(unit, block)
                else:
                    first_weights(units, unit, run.train.seed, block)

            manager.put(block_name(unit.name, "weight"), fill)
            for kind in KINDS[1:]:
                manager.put(block_name(unit.name, kind), torch.Tensor.zero_)


def _rng_state(seed: int | None = None) -> str:
    """The state of torch's generator as text; `seed`: of a generator seeded with it."""
    generator = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
    return bytes(generator.get_state().tolist()).hex()


def _set_rng(run: Mapping[str, JSON]) -> None:
    text = run.get("rng")
    assert isinstance(text, str), "a commit holds the state of the random generator"
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying; a second SIGINT is the usual KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if number in seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    kept = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class _Loop:
    """Steps until the end or an interrupt."""

    def __init__(
        self, prepared: Prepared, batches: Batches, manager: Manager, engine: StepEngine, console: Console
    ) -> None:
        self.prepared = prepared
        self.run_config = prepared.run
        self.batches = batches
        self.manager = manager
        self.engine = engine
        self.console = console
        self.skipped = int(_number(manager.store.run, "skipped"))
        self.losses: list[float] = []

    def run(self, done: int) -> int:
        steps = self.run_config.train.steps
        if done >= steps:
            self.console.print(f"Nothing to do: the state is at step {done} of {steps}.")
            return 0
        if done:
            self.console.print(f"Going on from step {done} of {steps}.")
        with _interrupts() as interrupts, (self.run_config.output.dir / LOG_FILE).open("a") as log:
            self.manager.trace.take()
            for number in range(done + 1, steps + 1):
                ends = number == steps
                commits = ends or number % self.run_config.train.commit_every == 0
                ids = torch.from_numpy(self.batches.batch_at(number - 1))
                result = self.engine.step(ids, last=ends or (commits and self.engine.deferred))
                self.losses.append(result.loss)
                self.skipped += result.skipped is not None
                stop = bool(interrupts)
                self._report(number, result, log)
                if commits or stop:
                    self._commit(number)
                if stop:
                    self.console.print(
                        f"Interrupted: step {number} of {steps} is committed. "
                        f"Go on with: {_command()} train {self.run_config.output.dir / RUN_FILE} --resume",
                        soft_wrap=True,
                    )
                    return INTERRUPTED
        self.console.print(
            f"[bold]Done[/bold]: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} over {len(self.losses)} steps"
            + (f", {self.skipped} skipped" if self.skipped else "")
        )
        return 0

    def _commit(self, number: int) -> None:
        self.engine.settle()
        run: dict[str, JSON] = {"step": number, "updates": self.engine.updates, "skipped": self.skipped}
        self.manager.commit(number, {**run, "rng": _rng_state()})

    def _report(self, number: int, result: StepResult, log: Any) -> None:
        _, figures = self.manager.trace.take()
        tokens = self.run_config.train.batch * self.run_config.data.seq_len
        row = {"step": number, **asdict(result), "tokens_per_s": tokens / figures.wall_s, **asdict(figures)}
        row["predicted_s"] = self.prepared.plan.timeline.pass_s
        log.write(json.dumps(row) + "\n")
        log.flush()
        self.console.print(self._line(number, result, figures, tokens), highlight=False, soft_wrap=True)

    def _line(self, number: int, result: StepResult, figures: Figures, tokens: int) -> str:
        wall_s = figures.wall_s
        plan = self.prepared.plan
        note = f"  [yellow]skipped: {result.skipped} is not finite[/yellow]" if result.skipped else ""
        return (
            f"step {number}/{self.run_config.train.steps}  loss {result.loss:.4f}  {tokens / wall_s:,.0f} tok/s  "
            f"{format_seconds(wall_s)} (plan {format_seconds(plan.timeline.pass_s)})  "
            f"NVMe r {figures.read_bytes / wall_s / 1e9:.2f} w {figures.written_bytes / wall_s / 1e9:.2f} GB/s  "
            f"host {format_size(plan.host_bytes)} of {format_size(self.prepared.host_budget)}  "
            f"grad norm {result.grad_norm:.2f}{' before clipping' if result.clipped else ''}{note}"
        )
