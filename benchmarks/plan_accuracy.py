"""Does the plan come true? Predicted against measured seconds, bytes and memory of whole training runs.

Scope: `python -m benchmarks.plan_accuracy --path DIR`: runs that are bound by I/O, balanced and bound by computing,
with and without clipping, all on disk and half resident; each in a process of its own, planned as any run is.
Not here: the prediction (`tiering/simulate.py`), rates of the machine alone (`benchmarks/disk.py`, `matmul.py`).

What is measured: seconds from the end of a step to the end of the next one, the median of the last ones; bytes that
the operating system counts for the process; the peak of its resident memory. The machine's own rates are measured
again after a run: where they moved, the row says so, and the run is made again.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.child import os_bytes, peak_rss_bytes, reset_peak, rss_bytes, run_child
from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.console import FAILED, AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.heap import start_again
from megatrain.inputs import tensors
from megatrain.prepare import Prepared, prepare
from megatrain.runfile import write_mapping
from megatrain.sizes import format_seconds, format_size
from megatrain.trainer import open_run_batches, open_state
from tiering.place import check_place, check_room, folder_beside

STEP_MISS, BYTES_MISS, MEMORY_MISS, MEMORY_SLACK = 0.10, 0.01, 0.05, 64 << 20
DRIFT = 0.05
"""A machine whose rates differ by more than this share before and after a run is not the one that was planned for."""
WARM_STEPS = 2
DISK_BYTES = 5 << 30

# About 162M parameters: 1.9 GiB of weights and moments, more than any of the budgets below.
MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = {"io": (64, 1), "balanced": (256, 1), "compute": (512, 2)}
"""Tokens in a sequence and sequences in a step that make a run bound by one or the other on two desktop cores."""
CASES = {
    f"{bound}, {'clipping, ' if clips else ''}{homes}": (bound, clips, homes)
    for bound, clips, homes in (
        ("io", False, "all on disk"),
        ("io", True, "all on disk"),
        ("io", False, "half resident"),
        ("balanced", False, "all on disk"),
        ("balanced", True, "half resident"),
        ("compute", False, "all on disk"),
        ("compute", True, "all on disk"),
        ("compute", False, "half resident"),
    )
}
app = new_app()


def run_mapping(case: str, folder: Path) -> dict[str, Any]:
    """The run file of a case, with everything it writes below `folder`."""
    bound, clips, homes = CASES[case]
    seq_len, batch = TOKENS[bound]
    half = homes == "half resident"
    train = {"steps": 1000, "batch": batch, "micro_batch": 1} | ({"max_grad_norm": 1.0} if clips else {})
    budget = (1 << 30 if half else 512 << 20) + (700 << 20 if clips else 0) + (600 << 20 if half else 0)
    return {
        "model": {"config": MODEL},
        "data": {"paths": "$PYTHON_STDLIB/*.py", "seq_len": seq_len},
        "train": train,
        "tiers": {"host_memory": budget, "nvme": str(folder / "nvme"), "resident": 0.5 if half else 0.0},
        "output": {"dir": str(folder / "run")},
    }


@app.command(epilog="Example: python -m benchmarks.plan_accuracy --path /mnt/nvme")
def main(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive.")],
    steps: Annotated[int, typer.Option("--steps", min=3, help="Measured steps of a run.")] = 7,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Again, if the machine's rates moved.")] = 2,
    only: Annotated[str, typer.Option("--only", metavar="TEXT", help="Cases whose name has this in it.")] = "",
    this: Annotated[str, typer.Option("--this", hidden=True, help="One case, in this process and folder.")] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train small models, and print what was predicted beside what was measured; exit code 1 if a plan was wrong."""
    with reported(debug):
        if this:
            with stdout_kept(True):
                (path / RUN_FILE).write_text(write_mapping(run_mapping(this, path)))
                row = measured_run(load_run(path / RUN_FILE, ()), steps)
            print_json(row)
            return
        cases = [case for case in CASES if only in case]
        if not cases:
            raise UserError(f"--only {only}: no such case. Fix: a part of one of {', '.join(CASES)}")
        check_place(path / "state")
        check_room(path, DISK_BYTES)
        with stdout_kept(as_json), Progress(console=Console(stderr=True), transient=True) as progress:
            rows = [_row(case, path, steps, retries) for case in progress.track(cases, description="runs")]
        if as_json:
            print_json({"model": MODEL, "rows": rows})
        else:
            Console().print(table(rows))
    raise typer.Exit(0 if all(row["true"] for row in rows) else FAILED)


def _row(case: str, path: Path, steps: int, retries: int) -> dict[str, Any]:
    for _ in range(1 + retries):
        row = {"case": case, **_in_process(case, path, steps)}
        if row["drift"] <= DRIFT:
            break
    return row | {"true": not misses(row)}


def _in_process(case: str, path: Path, steps: int) -> dict[str, Any]:
    """A case in a fresh process, so that its memory is its own."""
    folder = Path(tempfile.mkdtemp(prefix=".plan-accuracy-", dir=folder_beside(path / "state")))
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--path", str(folder), "--this", case]
    try:
        ended = run_child([*command, "--steps", str(steps)])
        if ended.code or not ended.result:
            raise UserError(f"the run {case!r} failed with exit code {ended.code}:\n{ended.errors}")
        return dict(ended.result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured_run(run: RunConfig, steps: int) -> dict[str, Any]:
    """Plan `run`, train, and say both what was predicted and what was seen: seconds and bytes."""
    prepared = prepare(run)
    timeline = prepared.plan.timeline
    planned = prepared.baseline_bytes + prepared.plan.host_bytes + prepared.compute_bytes
    reset_peak()
    begin_rss = rss_bytes()
    walls, moved, figures = _train(prepared, steps)
    peak = peak_rss_bytes()
    return {
        "parameters": prepared.units.parameters,
        "predicted_step_s": timeline.pass_s,
        "step_s": median(walls),
        "steps_s": walls,
        "limit_s": timeline.limit_s,
        "bottleneck": timeline.bottleneck,
        "predicted_bytes": timeline.read_bytes + timeline.written_bytes,
        "bytes": median(moved),
        "predicted_peak_bytes": planned,
        "peak_bytes": peak,
        "baseline_bytes": begin_rss,
        "io_s": figures[0],
        "compute_s": figures[1],
        "predicted_busy_s": timeline.busy(),
        "knobs": repr(prepared.plan.knobs),
        "rates": {name: rate.per_s for name, rate in prepared.hardware.rates().items()},
        "drift": _drift(prepared),
    }


def _train(prepared: Prepared, steps: int) -> tuple[list[float], list[int], tuple[float, float]]:
    run = prepared.run
    console = Console(stderr=True)
    run.output.dir.mkdir(parents=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    walls, moved, busy = [], [], []
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=console) as manager:
        with closing(StepEngine(run, prepared.units, manager, 0)) as engine:
            manager.trace.take()
            before = os_bytes().nbytes
            for number in range(WARM_STEPS + steps):
                engine.step(tensors(batches.batch_at(number)), last=False)
                _, figures = manager.trace.take()
                now = os_bytes().nbytes
                walls.append(figures.wall_s)
                moved.append(now - before)
                busy.append((figures.io_s, figures.compute_s))
                before = now
    kept = slice(WARM_STEPS, None)
    return walls[kept], moved[kept], (median(b[0] for b in busy[kept]), median(b[1] for b in busy[kept]))


def _drift(prepared: Prepared) -> float:
    """The largest relative change of a rate that the plan rests on, measured again now."""
    again = prepare(prepared.run)
    then, now = prepared.hardware.mixed, again.hardware.mixed
    assert then is not None and now is not None, "a drive that was measured has a mixed rate"
    changes = [abs(now.per_s / then.per_s - 1)]
    then_s, now_s = (sum(t.forward_s + t.backward_s for t in p.times.values()) for p in (prepared, again))
    if then_s and now_s:
        changes.append(abs(now_s / then_s - 1))
    return max(changes)


def misses(row: Mapping[str, Any]) -> list[str]:
    """Which of the three predictions were wrong, and by how much."""
    found = []
    for what, allowed, slack in (
        ("step_s", STEP_MISS, 0.0),
        ("bytes", BYTES_MISS, 0),
        ("peak_bytes", MEMORY_MISS, MEMORY_SLACK),
    ):
        off = abs(row[what] - row[f"predicted_{what}"])
        if off > allowed * row[what] + slack:
            found.append(f"{what} {row[what] / row[f'predicted_{what}'] - 1:+.1%}")
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("run", "bound by", "step", "predicted", "", "moved", "predicted", "", "peak RSS", "predicted", "")
    result = Table(*columns, title="Predicted against measured", title_justify="left")
    for column in result.columns[2:]:
        column.justify = "right"
    for row in rows:
        cells = [row["case"], row["bottleneck"]]
        for what, show in (("step_s", format_seconds), ("bytes", format_size), ("peak_bytes", format_size)):
            predicted = row[f"predicted_{what}"]
            cells += [show(row[what]), show(predicted), f"{row[what] / predicted - 1:+.1%}"]
        result.add_row(*cells, style=None if row["true"] else "red")
        if row["drift"] > DRIFT:
            result.add_row(f"  the machine's own rates moved by {row['drift']:.0%}")
    return result


if __name__ == "__main__":
    start_again()
    run_app(app, "python -m benchmarks.plan_accuracy")
