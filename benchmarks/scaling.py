"""Does a step's time grow with the parameters, and with the tokens, as the plan says? One page that shows it.

Scope: `python -m benchmarks.scaling --path DIR`: tiered steps of Llamas from 50M to 1B parameters, and of one of them
from few tokens to many; measured beside predicted, with a straight line through what was measured.
Not here: what bounds a step (`step.py`), other ways to train (`rivals.py`).

A step bound by I/O is linear in the parameters; a step bound by computing is linear in the tokens, and level below the
number of tokens at which computing takes as long as the I/O.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.child import run_child
from benchmarks.machine import drive_rates
from benchmarks.presets import llama, parameters, run_mapping, sequences, staging_bytes
from benchmarks.result_page import Markdown, ResultPage, check_page, markdown_table
from benchmarks.step import TieredSteps
from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.heap import start_again
from megatrain.inputs import tensors
from megatrain.prepare import prepare
from megatrain.runfile import write_mapping
from megatrain.sizes import format_seconds
from megatrain.trainer import open_run_batches, open_state
from tiering.place import check_place, check_room, folder_beside

ROOT = Path(__file__).parent.parent
DISK_BYTES_PER_PARAMETER = 24
FEW_TOKENS = 64
SIZES: dict[str, dict[str, Any]] = {
    "50M": llama(512, 16, 1408),
    "100M": llama(768, 12, 2048),
    "250M": llama(),
    "500M": llama(1536, 16, 4096),
    "1B": llama(2048, 20, 5248, head=128),
}
TOKENS = (64, 256, 512, 1024, 2048, 4096)
OF_TOKENS = "100M"
"""The model whose tokens vary."""
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Least squares: y = level + slope x. worst: the largest share by which a point is off it."""

    level: float
    slope: float
    worst: float


@app.command(epilog="Example: python -m benchmarks.scaling --path /mnt/nvme --plot scaling.png")
def main(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Counted steps of each run.")] = 3,
    sizes: Annotated[list[str] | None, typer.Option("--size", help=f"Of {', '.join(SIZES)}; several.")] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=2, help="Tokens a step; several.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg, .pdf.")] = None,
    markdown: Markdown = None,
    this: Annotated[str, typer.Option("--this", hidden=True, help="One run, in this process: SIZE:TOKENS.")] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train models of several sizes, and one with several numbers of tokens, and print seconds a step."""
    with reported(debug):
        if this:
            size, _, count = this.partition(":")
            with stdout_kept(True):
                found = measured(_run(SIZES[size], int(count), path), steps)
            print_json(found)
            return
        chosen = list(sizes or SIZES)
        unknown = [size for size in chosen if size not in SIZES]
        if unknown:
            raise UserError(f"--size {unknown[0]}: no such size. Fix: one of {', '.join(SIZES)}")
        check_page(markdown)
        check_place(path / "state")
        check_room(path, DISK_BYTES_PER_PARAMETER * max(parameters(SIZES[size]) for size in chosen))
        with stdout_kept(as_json):
            before = drive_rates(path)
            report = {
                "parameters": [_in_process(size, FEW_TOKENS, path, steps) for size in chosen],
                "tokens": [_in_process(OF_TOKENS, count, path, steps) for count in tokens or TOKENS],
            }
            if plot is not None:
                draw(report, plot)
        if markdown is not None:
            title = "Seconds a step against parameters and tokens"
            page = ResultPage(
                title=title, module="benchmarks.scaling", path=path, before=before, after=drive_rates(path)
            )
            markdown.write_text(page.text(*_sections(report, plot)))
        if as_json:
            print_json(report)
        else:
            render(report, Console())


def _run(model: dict[str, Any], tokens: int, folder: Path) -> RunConfig:
    seq_len, batch = sequences(tokens)
    mapping = run_mapping(model, folder, seq_len=seq_len, batch=batch, host_memory=staging_bytes(model), resident=0.0)
    file = folder / RUN_FILE
    file.write_text(write_mapping(mapping))
    return load_run(file, ())


def _in_process(size: str, tokens: int, path: Path, steps: int) -> dict[str, Any]:
    """A run in a fresh process, so that no run is slowed by what another left in memory."""
    folder = Path(tempfile.mkdtemp(prefix=".scaling-", dir=folder_beside(path / "state")))
    try:
        command = [sys.executable, "-m", "benchmarks.scaling", "--path", str(folder), "--this", f"{size}:{tokens}"]
        with Console(stderr=True).status(f"{size}, {tokens} tokens"):
            ended = run_child([*command, "--steps", str(steps)], folder=ROOT)
        if ended.code or not ended.result:
            raise UserError(f"the run of {size}, {tokens} tokens failed with exit code {ended.code}:\n{ended.errors}")
        return dict(ended.result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(run: RunConfig, steps: int) -> dict[str, Any]:
    """Seconds and bytes of a step of `run`, which nobody has begun yet, beside the predicted ones."""
    console = Console(stderr=True)
    prepared = prepare(run)
    run.output.dir.mkdir(parents=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    numbers = iter(range(1 << 62))
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=console) as manager:
        with closing(StepEngine(run, prepared.units, manager, 0)) as engine:
            tiered = TieredSteps(manager, engine, lambda: tensors(batches.batch_at(next(numbers))))
            tiered.visit(1)  # writes every block of the store for the first time
            visit = tiered.visit(steps)
    timeline = prepared.plan.timeline
    return {
        "parameters": prepared.units.parameters,
        "tokens": run.train.batch * run.data.seq_len,
        "step_s": visit.step_s,
        "predicted_step_s": timeline.pass_s,
        "bytes": visit.read_bytes + visit.written_bytes,
        "predicted_bytes": timeline.read_bytes + timeline.written_bytes,
        "bottleneck": timeline.bottleneck,
    }


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """The straight line through points (x, y), each weighted by 1/y: a share of a point counts as much anywhere.

    >>> fitted([(1, 3.0), (2, 5.0), (4, 9.0)])
    Line(level=1.0, slope=2.0, worst=0.0)
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    square = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    both = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = both / square if square else 0.0
    level = mean_y - slope * mean_x
    worst = max(abs(level + slope * x - y) / y for x, y in points)
    return Line(level=round(level, 9), slope=round(slope, 12), worst=round(worst, 6))


def bound_by_computing(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of the plan's compute-bound part: only there time has to grow with tokens."""
    return [row for row in rows if row["bottleneck"] != "NVMe"]


def _lines(report: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Line]:
    """Where two points or more are: a line through them."""
    points = {
        "parameters": [(row["parameters"], row["step_s"]) for row in report["parameters"]],
        "tokens": [(row["tokens"], row["step_s"]) for row in bound_by_computing(report["tokens"])],
    }
    return {name: fitted(found) for name, found in points.items() if len(found) > 1}


def render(report: Mapping[str, Sequence[Mapping[str, Any]]], console: Console) -> None:
    """A table of the runs, and how far from straight they are."""
    for name, rows in report.items():
        table = Table(*_COLUMNS, title=f"By {name}", title_justify="left")
        for row in rows:
            table.add_row(*_cells(row))
        console.print(table)
        for text in _straight(report, name):
            console.print(text)


_COLUMNS = ("parameters", "tokens", "step", "predicted", "", "bound by")


def _cells(row: Mapping[str, Any]) -> list[str]:
    off = f"{row['step_s'] / row['predicted_step_s'] - 1:+.1%}"
    seconds = (format_seconds(row["step_s"]), format_seconds(row["predicted_step_s"]))
    return [f"{row['parameters'] / 1e6:.0f}M", f"{row['tokens']:,}", *seconds, off, row["bottleneck"]]


def _straight(report: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[str]:
    """The line through the rows of `name`, in words; none through a single point."""
    line = _lines(report).get(name)
    if line is None:
        return []
    count, word = (1_000_000, "million") if name == "parameters" else (1000, "thousand")
    slope = f"{line.level:.3f} s + {format_seconds(count * line.slope)} for each {word} {name}"
    return [f"A straight line: {slope}; the furthest point is {line.worst:.1%} off it"]


def _sections(report: Mapping[str, Sequence[Mapping[str, Any]]], plot: Path | None) -> list[str]:
    """Of a page: both tables, and the picture that lies beside it."""
    parts = [f"![seconds a step]({plot.name})"] if plot is not None else []
    for name, rows in report.items():
        parts += [f"## By {name}", markdown_table(_COLUMNS, map(_cells, rows)), *_straight(report, name)]
    return parts


def draw(report: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Both on one page. Raises UserError where matplotlib is not installed or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib, which is not installed. Fix: pip install matplotlib") from None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    lines = _lines(report)
    for axes, (name, rows) in zip(figure.subplots(1, 2), report.items(), strict=True):
        x = [row[name] for row in rows]
        axes.plot(x, [row["step_s"] for row in rows], "o", label="measured")
        axes.plot(x, [row["predicted_step_s"] for row in rows], "x", label="predicted")
        if name in lines and rows:
            ends = (0, max(x))
            axes.plot(ends, [lines[name].level + lines[name].slope * end for end in ends], "-", label="straight line")
        other = "tokens" if name == "parameters" else "parameters"
        axes.set(title=f"{rows[0][other]:,} {other}" if rows else "", xlabel=name, ylabel="seconds a step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {file}: {error}. Fix: a file that can be written, .png, .svg or .pdf") from None


if __name__ == "__main__":
    start_again()
    run_app(app, "python -m benchmarks.scaling")
