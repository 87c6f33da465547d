"""How near is a step to what the hardware allows? A tiered step beside its computing alone and its I/O alone.

Scope: `python -m benchmarks.step RUN.yaml`, or `--case io|balanced|compute --path DIR` instead of a run file.
Not here: the things that a step is compared with (`yardsticks.py`), other ways to train (`rivals.py`), the plan's own
accuracy (`plan_accuracy.py`).

All of it in one process, in rounds, so that a machine that changes its speed changes it for all: the drive alone, a
visit to the tiered run, the drive alone again, a visit to the resident run, one to the plain loop, and so on. The first
step of a visit fills the pipeline and is not counted.

- `step_s`: wall seconds from the end of a step to the end of the next one, in the steady state.
- `compute_s`: the seconds of the same engine's computing and update ops with everything resident: nothing to wait for,
  nothing else running. The streamed step computes each unit's forward again in its backward; so does this one. That is
  more than a plain loop that keeps all activations: `plain_step_s` stands beside it, and is no bound.
- `io_s`: the seconds of the step's own list of requests, same sizes, order and number in flight, with nothing else
  running and none waiting for another; the mean of what it takes right before the tiered visit and right after. Many
  drives are faster after a rest (virtual ones save up a credit, others have a cache), and they rest while computing is
  measured: first of all the list is carried out until two times in a row agree, six times at most, so that no side has
  the credit.
- `limit_s = max(compute_s, io_s)` and `fraction = limit_s / step_s`: 1 is a step that hides all but its busiest part.

Of all rounds the median is told. `fraction` is the median of the rounds' own: a drive that changes its speed from one
round to the next changes it for both sides of each, and a ratio of medians could be that of two different rounds.

Bytes are what the operating system counts for the process over whole visits. The peak of resident memory is that of
the first visit, before the other ways to train are built.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.child import os_bytes, peak_rss_bytes, reset_peak, rss_bytes
from benchmarks.machine import drive_rates
from benchmarks.presets import (
    STAGING_BYTES,
    STATE_BYTES,
    Case,
    case_tokens,
    llama,
    parameters,
    run_mapping,
    sequences,
    staging_bytes,
)
from benchmarks.result_page import Markdown, ResultPage, check_page, markdown_table
from benchmarks.yardsticks import MAIN, PlainSteps, RawIO, ResidentSteps, RingSteps, resident_plan
from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.data import StepBatches
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.heap import start_again
from megatrain.inputs import Inputs, tensors
from megatrain.prepare import Prepared, prepare
from megatrain.report import PlanReport
from megatrain.runfile import write_mapping
from megatrain.sizes import format_seconds, format_size
from megatrain.trainer import open_run_batches, open_state
from tiering.limits import memory_limit
from tiering.manager import Manager
from tiering.measure import measure
from tiering.place import check_place, check_room, folder_beside

MOST_STALLS = 10
ROOM_SHARE = 0.9
"""Of the memory that is available, what a yardstick may take."""
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Some steps in a row, from a drained pipeline to a drained one. Bytes are a step's; stalls: seconds a step."""

    step_s: float
    read_bytes: float
    written_bytes: float
    stalls: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One visit to each. plain_step_s, resident_step_s None: it does not fit into the memory."""

    step_s: float
    compute_s: float
    io_s: float
    fraction: float
    plain_step_s: float | None
    resident_step_s: float | None


class TieredSteps:
    """Steps of an open run, as `megatrain train` does them, without its commits."""

    def __init__(self, manager: Manager, engine: StepEngine, next_batch: Callable[[], Inputs]) -> None:
        self._manager, self._engine, self._next_batch = manager, engine, next_batch

    def visit(self, counted: int) -> Visit:
        """One step that fills the pipeline, then `counted` ones."""
        before = os_bytes()
        self._engine.step(self._next_batch(), last=False)
        self._manager.trace.take()
        begin_s = time.perf_counter()
        for _ in range(counted):
            self._engine.step(self._next_batch(), last=False)
        step_s = (time.perf_counter() - begin_s) / counted
        _, figures = self._manager.trace.take()
        self._manager.pipeline.drain()
        moved = os_bytes().since(before)
        return Visit(
            step_s=step_s,
            read_bytes=moved.read_bytes / (1 + counted),
            written_bytes=moved.written_bytes / (1 + counted),
            stalls={name: seconds / counted for name, seconds in figures.stalls.items()},
        )


@app.command(epilog="Example: python -m benchmarks.step --case io --path /mnt/nvme")
def main(
    run_file: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="The run file.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Overrides a key.")] = None,
    case: Annotated[
        Case | None, typer.Option("--case", help="A preset of 253.8M parameters instead of a file.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--path", metavar="DIR", help="Of a preset: a folder on the drive.")
    ] = None,
    resident: Annotated[float, typer.Option("--resident", min=0, max=1, help="Of a preset: the share in RAM.")] = 0.0,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Of a preset: tokens a step; 0: by the case.")] = 0,
    rounds: Annotated[int, typer.Option("--steps", min=1, help="Rounds: figures of each kind.")] = 5,
    counted: Annotated[int, typer.Option("--in-a-row", min=1, help="Counted steps of a visit.")] = 2,
    markdown: Markdown = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a step beside what bounds it, and say how near they are. The state of the run is not touched."""
    with reported(debug):
        if (run_file is None) == (case is None) or (case is not None) != (path is not None):
            raise UserError("give RUN.yaml, or --case with --path. Fix: one of the two")
        check_page(markdown)
        with stdout_kept(as_json):
            if run_file is not None:
                run, title = load_run(run_file, overrides or ()), str(run_file)
            else:
                assert case is not None and path is not None
                run, title = preset(case, path, resident, tokens), f"{case}, {resident:.0%} resident"
            before = drive_rates(run.tiers.nvme[0])
            found = measured(run, rounds, counted) | ({"case": case} if case else {})
            after = drive_rates(run.tiers.nvme[0])
            found |= {"drive_before": before.as_json(), "drive_after": after.as_json()}
        if markdown is not None:
            title = f"A step of {found['parameters'] / 1e6:.1f}M parameters and {found['tokens']:,} tokens: {title}"
            page = ResultPage(title=title, module="benchmarks.step", path=run.tiers.nvme[0], before=before, after=after)
            markdown.write_text(page.text(*_sections(found)))
        if as_json:
            print_json(found)
        else:
            render(found, Console())


def preset(case: Case, path: Path, resident: float, tokens: int, model: dict[str, Any] | None = None) -> RunConfig:
    """The run of a case; nothing is written where `path` is. Without `tokens` the machine is measured for them."""
    check_place(path)
    model = model or llama()
    if not tokens:
        hardware = measure(path, width=model["hidden_size"], tokens=512, memory=STAGING_BYTES)
        tokens = case_tokens(case, hardware, resident)
    seq_len, batch = sequences(tokens)
    budget = staging_bytes(model) + int(resident * STATE_BYTES * parameters(model))
    mapping = run_mapping(model, path, seq_len=seq_len, batch=batch, host_memory=budget, resident=resident)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RUN_FILE
        file.write_text(write_mapping(mapping))
        return load_run(file, ())


def measured(run: RunConfig, rounds: int, counted: int) -> dict[str, Any]:
    """All figures of `run`, in folders of its own beside those of its tiers. Raises UserError for what the yardsticks
    do not compute alike.
    """
    if run.train.precision != "fp32" or run.train.compile:
        raise UserError("train.precision, train.compile: a step is held against FP32 without torch.compile here. Fix: "
                        "--set train.precision=fp32 --set train.compile=false")  # fmt: skip
    console = Console(stderr=True)
    with _folders(run) as folders, ExitStack() as stack:
        state = tuple(folder / "state" for folder in folders)
        tiers = run.tiers.model_copy(update={"nvme": state})
        output = run.output.model_copy(update={"dir": folders[0] / "run"})
        prepared = prepare(run.model_copy(update={"tiers": tiers, "output": output}))
        if len(folders) == 1:
            check_room(folders[0], PlanReport(prepared=prepared).disk_bytes() + _moving_bytes(prepared))
        prepared.run.output.dir.mkdir()
        batches = open_run_batches(prepared, prepared.run.output.dir, console)
        next_batch = _batches(batches)
        reset_peak()
        manager = stack.enter_context(
            open_state(prepared, batches, state[0], others=state[1:], resume=False, console=console)
        )
        engine = stack.enter_context(closing(StepEngine(prepared.run, prepared.units, manager, 0)))
        tiered = TieredSteps(manager, engine, next_batch)
        with console.status("first steps"):
            tiered.visit(counted)  # writes every block of the store for the first time
        peak = peak_rss_bytes()
        yardsticks = _Yardsticks(prepared, manager, dict(zip(state, folders, strict=True)), stack)
        visits, found = [], []
        for number in range(rounds):
            with console.status(f"round {number + 1} of {rounds}"):
                before_s = yardsticks.io.settled_s()
                visits.append(tiered.visit(counted))
                io_s = (before_s + yardsticks.io.io_s()) / 2
                found.append(yardsticks.round(visits[-1].step_s, io_s, [next_batch() for _ in range(1 + counted)]))
        return _report(prepared, visits, found, peak) | yardsticks.notes


@contextmanager
def _folders(run: RunConfig) -> Iterator[tuple[Path, ...]]:
    """A folder on the drive of each one of the tier, gone afterwards."""
    made: list[Path] = []
    try:
        for root in run.tiers.nvme:
            made.append(Path(tempfile.mkdtemp(prefix=".step-", dir=folder_beside(root))))
        yield tuple(made)
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def _batches(batches: StepBatches) -> Callable[[], Inputs]:
    numbers = iter(range(1 << 62))
    return lambda: tensors(batches.batch_at(next(numbers)))


def _moving_bytes(prepared: Prepared) -> int:
    """Room of the files that the I/O alone goes to: one for each of the blocks that move."""
    moved = {x.block for a in prepared.plan.schedules[MAIN].actions if a.lane == "io" for x in a.operands}
    return sum(prepared.plan.workload.blocks[name].nbytes for name in moved)


def _free_memory() -> int:
    """Bytes that this process may still take."""
    limit = memory_limit()[0] - rss_bytes()
    return int(ROOM_SHARE * min(limit, psutil.virtual_memory().available))


class _Yardsticks:
    """What fits into the memory of the machine beside the tiered run. io: the drive alone. notes: what was left out."""

    def __init__(self, prepared: Prepared, manager: Manager, state: Mapping[Path, Path], stack: ExitStack) -> None:
        plan = prepared.plan
        self.notes: dict[str, Any] = {}
        folders = {root: folder / "io" for root, folder in state.items()}
        for folder in folders.values():
            folder.mkdir()
        self.io = stack.enter_context(closing(RawIO(plan.schedules[MAIN], manager, plan.queue_depth, folders)))
        whole, free = resident_plan(prepared), _free_memory()
        self._compute: ResidentSteps | RingSteps
        if whole.host_bytes + prepared.compute_bytes <= free:
            self._compute = ResidentSteps(prepared, manager, whole)
        else:
            self._compute = RingSteps(prepared)
        stack.callback(self._compute.close)
        self._plain, free = None, _free_memory()
        activations = sum(prepared.costs[unit.name].workspace_bytes for unit in prepared.units)
        needed = 4 * 4 * prepared.units.parameters + activations
        if prepared.run.model.path is not None:
            self.notes["plain_left_out"] = "a model folder: the plain loop is measured for models from scratch"
        elif needed > free:
            self.notes["plain_left_out"] = f"it needs about {needed} bytes, {free} are available"
        else:
            self._plain = PlainSteps(prepared)
        self.notes |= {"compute_how": self._compute.how, "io_bytes": self.io.nbytes}

    def round(self, step_s: float, io_s: float, batches: Sequence[Inputs]) -> Round:
        compute_s = self._compute.compute_s(batches)
        return Round(
            step_s=step_s,
            compute_s=compute_s,
            io_s=io_s,
            fraction=max(compute_s, io_s) / step_s,
            plain_step_s=self._plain.step_s(batches) if self._plain is not None else None,
            resident_step_s=self._compute.step_s,
        )


def _report(prepared: Prepared, visits: Sequence[Visit], rounds: Sequence[Round], peak: int) -> dict[str, Any]:
    timeline, count = prepared.plan.timeline, prepared.units.parameters
    step_s, compute_s, io_s = (median(getattr(r, name) for r in rounds) for name in ("step_s", "compute_s", "io_s"))
    read, written = median(v.read_bytes for v in visits), median(v.written_bytes for v in visits)
    run = prepared.run
    return {
        "parameters": count,
        "tokens": run.train.batch * run.data.seq_len,
        "micro_batches": run.train.batch // run.train.micro_batch,
        "step_s": step_s,
        "compute_s": compute_s,
        "io_s": io_s,
        "limit_s": max(compute_s, io_s),
        "fraction": median(r.fraction for r in rounds),
        "plain_step_s": _median(r.plain_step_s for r in rounds),
        "resident_step_s": _median(r.resident_step_s for r in rounds),
        "read_bytes": read,
        "written_bytes": written,
        "predicted_read_bytes": timeline.read_bytes,
        "predicted_written_bytes": timeline.written_bytes,
        "bytes_per_param": (read + written) / count,
        "predicted_step_s": timeline.pass_s,
        "predicted_limit_s": timeline.limit_s,
        "peak_rss_bytes": peak,
        "predicted_peak_bytes": prepared.baseline_bytes + prepared.plan.host_bytes + prepared.compute_bytes,
        "stalls": _stalls(visits),
        "knobs": repr(prepared.plan.knobs),
        "queue_depth": prepared.plan.queue_depth,
        "rounds": [asdict(r) for r in rounds],
    }


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _stalls(visits: Sequence[Visit]) -> dict[str, float]:
    """Seconds a step that computing waited, by what it waited for: the longest ones, the rest as `other`."""
    total: dict[str, float] = {}
    for visit in visits:
        for name, seconds in visit.stalls.items():
            total[name] = total.get(name, 0.0) + seconds / len(visits)
    longest = sorted(total, key=lambda name: -total[name])
    shown = {name: total[name] for name in longest[:MOST_STALLS]}
    rest = sum(total[name] for name in longest[MOST_STALLS:])
    return shown | ({"other": rest} if rest else {})


_OF_A_ROUND = ("step_s", "compute_s", "io_s", "fraction", "plain_step_s")


def render(found: Mapping[str, Any], console: Console) -> None:
    """A table of the rounds, one of the figures."""
    table = Table("round", *_OF_A_ROUND, title="In seconds, round by round", title_justify="left")
    for cells in _round_rows(found):
        table.add_row(*cells)
    console.print(table)
    result = Table("medians", "", title_justify="left")
    for cells in _median_rows(found):
        result.add_row(*cells)
    console.print(result)
    for line in _stall_lines(found):
        console.print(line, highlight=False, markup=False)


def _sections(found: Mapping[str, Any]) -> list[str]:
    """The same, of a page."""
    return [
        markdown_table(["medians", ""], _median_rows(found)),
        "In seconds, round by round:",
        markdown_table(["round", *_OF_A_ROUND], _round_rows(found)),
        "\n".join(f"- {line}" for line in _stall_lines(found)),
    ]


def _round_rows(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [str(number), *("-" if row[name] is None else f"{row[name]:.3f}" for name in _OF_A_ROUND)]
        for number, row in enumerate(found["rounds"], start=1)
    ]


def _median_rows(found: Mapping[str, Any]) -> list[list[str]]:
    seconds = ("step_s", "predicted_step_s", "limit_s", "compute_s", "io_s", "plain_step_s")
    rows = [[name, "-" if found[name] is None else format_seconds(found[name])] for name in seconds]
    rows.append(["fraction", f"{found['fraction']:.3f}"])
    for name in ("read_bytes", "written_bytes"):
        rows.append([name, f"{format_size(round(found[name]))} (plan {format_size(found[f'predicted_{name}'])})"])
    rows.append(["bytes_per_param", f"{found['bytes_per_param']:.2f}"])
    peaks = format_size(found["peak_rss_bytes"]), format_size(found["predicted_peak_bytes"])
    return [*rows, ["peak_rss_bytes", f"{peaks[0]} (plan {peaks[1]})"]]


def _stall_lines(found: Mapping[str, Any]) -> list[str]:
    return [f"computing waited {format_seconds(s)} a step for {name}" for name, s in found["stalls"].items()]


if __name__ == "__main__":
    start_again()
    run_app(app, "python -m benchmarks.step")
