"""`python -m benchmarks.rivals --path DIR --row 250m`: ours and other ways to train, under one memory limit.

Scope: the job of a row, a child process a way in a memory cgroup, the table of what they took, its Markdown file.
Not here: the ways to train (the other modules of this package).

Every way gets the same model, first weights and batches. Its losses are compared with those of the plain loop, which
runs without a limit: equal means all bits of every step.
"""

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.child import Ended, run_child
from benchmarks.machine import Rates, drive_rates, machine_lines
from benchmarks.plan_accuracy import MEMORY_MISS
from benchmarks.presets import STATE_BYTES, llama, parameters, run_mapping
from benchmarks.result_page import Markdown, ResultPage, check_page, markdown_table
from benchmarks.rivals.job import BATCHES_FILE, JOB_FILE, WEIGHTS_FILE, Job
from benchmarks.rivals.zero3 import BUILD, ENVIRONMENT
from megatrain.catalog.estimate import estimate
from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.data import open_data
from megatrain.errors import UserError
from megatrain.model import Units, build, find_units, first_weights, model_config
from megatrain.runfile import write_mapping
from megatrain.sizes import format_seconds, format_size
from megatrain.workspace import WORKING_ROOM, compute_lines
from tiering.place import check_place, check_room, folder_beside

ROOT = Path(__file__).parent.parent.parent
MiB, GiB = 1 << 20, 1 << 30
WARM_STEPS = 2
LEAST_ARENA = 32 * MiB
BASELINE = 416 * MiB
"""Our process before it computes: 0.39 to 0.4 GiB seen, a third of it libraries that other processes share."""
WITHOUT_LIMIT_ARENA = GiB
OURS, PLAIN, MAPPED, MAPPED_CHECKPOINT, ZERO3 = WAYS = (
    "ours",
    "plain torch in RAM",
    "torch, mapped files",
    "torch, mapped files, checkpointing",
    "DeepSpeed ZeRO-3 on NVMe",
)
MODULES = {OURS: "ours", PLAIN: "plain", MAPPED: "mapped", MAPPED_CHECKPOINT: "mapped", ZERO3: "zero3"}
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of work: a model, the tokens of a step, the memory that a way to train may take in all."""

    model: dict[str, Any]
    batch: int
    seq_len: int
    limit_bytes: int | None


ROWS = {
    "250m": Row(model=llama(intermediate=3328), batch=2, seq_len=256, limit_bytes=GiB),
    "1b": Row(model=llama(2048, 20, 5248, head=128), batch=1, seq_len=256, limit_bytes=3 * GiB),
}


@app.command(epilog="Example: python -m benchmarks.rivals --path /mnt/nvme --row 250m --limit 1GiB")
def main(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive.")],
    row: Annotated[Literal["250m", "1b"], typer.Option("--row", help="Which model.")] = "250m",
    limit: Annotated[str, typer.Option("--limit", help="Memory of a child process in all; none: no limit.")] = "",
    only: Annotated[list[str] | None, typer.Option("--only", metavar="TEXT", help="Ways with this in it.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=WARM_STEPS + 1, help="Steps of each way.")] = 7,
    host_memory: Annotated[str, typer.Option("--host-memory", help="Our arena; what the limit leaves.")] = "",
    deepspeed_python: Annotated[Path | None, typer.Option("--deepspeed-python", help="Python that has it.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that a way may take.")] = 3600.0,
    markdown: Markdown = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train one model in several ways, each in a process of its own under one memory limit, and compare them."""
    with reported(debug):
        work = ROWS[row]
        if limit:
            limit_bytes = None if limit == "none" else size_option("--limit", limit, least=64 * MiB)
            work = replace(work, limit_bytes=limit_bytes)
        ways = [way for way in WAYS if not only or any(text in way for text in only)]
        if not ways:
            raise UserError(f"--only {' '.join(only or ())}: no such way. Fix: a part of one of {', '.join(WAYS)}")
        check_page(markdown)
        check_place(path)
        arena = size_option("--host-memory", host_memory) if host_memory else None
        with stdout_kept(as_json):
            before = drive_rates(path)
            rows = compare(work, path, ways, steps, arena=arena, deepspeed_python=deepspeed_python, timeout_s=timeout_s)
            report = Report(row=work, rows=rows, before=before, after=drive_rates(path), path=path)
        if markdown is not None:
            markdown.write_text(report.markdown())
        if as_json:
            print_json(report.as_json())
        else:
            Console().print(report.table())


def compare(
    row: Row,
    path: Path,
    ways: Sequence[str],
    steps: int,
    *,
    arena: int | None = None,
    deepspeed_python: Path | None = None,
    timeout_s: float | None = None,
) -> list[dict[str, Any]]:
    """One result a way, the plain loop first: all losses are compared with its."""
    folder = Path(tempfile.mkdtemp(prefix=".rivals-", dir=folder_beside(path / "state")))
    try:
        check_room(folder, parameters(row.model) * (2 * STATE_BYTES + 4 + 8))
        job = _job(row, folder, steps, arena)
        kept = {item.name for item in folder.iterdir()}
        results: dict[str, dict[str, Any]] = {}
        console = Console(stderr=True)
        for way in sorted(ways, key=lambda way: way != PLAIN):
            with console.status(way):
                results[way] = _run(way, row, job, deepspeed_python, timeout_s)
            for item in folder.iterdir():
                if item.name not in kept:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        plain = results.get(PLAIN, {}).get("losses")
        return [results[way] | _against(plain, results[way]["losses"]) for way in ways]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _job(row: Row, folder: Path, steps: int, arena: int | None) -> Job:
    """Writes the files of a job, and the run file that makes the same weights and batches by itself."""
    units = find_units(build(model_config(row.model)))
    mapping = run_mapping(
        row.model,
        folder,
        seq_len=row.seq_len,
        batch=row.batch,
        micro_batch=row.batch,
        host_memory=arena or arena_bytes(row, units),
        resident=None,
    )
    (folder / RUN_FILE).write_text(write_mapping(mapping))
    run = load_run(folder / RUN_FILE, ())
    data = open_data(run.data, row.model["vocab_size"], folder / "tokens", run.train.seed)
    batches = data.batches(row.batch, run.train.seed)
    np.save(folder / BATCHES_FILE, np.stack([batches.batch_at(step).input_ids for step in range(steps)]))
    return Job(
        folder=folder,
        model=row.model,
        micro_batch=row.batch,
        optimizer=_adamw(run),
        offsets=dict(_write_weights(units, run.train.seed, folder / WEIGHTS_FILE)),
    )


def _adamw(run: RunConfig) -> dict[str, Any]:
    found = run.optimizer
    return {"lr": found.lr, "betas": found.betas, "eps": found.eps, "weight_decay": found.weight_decay}


def _write_weights(units: Units, seed: int, file: Path) -> Iterator[tuple[str, tuple[int, list[int]]]]:
    """The first weights as a tiered run draws them, unit by unit; yields where each parameter is."""
    at = 0
    with file.open("wb") as out:
        for unit in units:
            block = torch.empty(unit.nbytes, dtype=torch.uint8)
            first_weights(units, unit, seed, block)
            for place in unit.slices:
                out.write(place.of(block).contiguous().numpy().tobytes())
                yield place.name, (at, list(place.shape))
                at += place.numel


def arena_bytes(row: Row, units: Units) -> int:
    """What the limit leaves for our arena, after the libraries, what computing takes, and what a plan may be off by."""
    if row.limit_bytes is None:
        return WITHOUT_LIMIT_ARENA
    costs = estimate(row.model, row.batch, row.seq_len)
    assert costs is not None, "a Llama can be estimated"
    computing = sum(line.nbytes for line in compute_lines(costs, units.head.name, 1))
    beside = BASELINE + WORKING_ROOM + computing
    rest = int(row.limit_bytes / (1 + MEMORY_MISS)) - beside
    if rest < LEAST_ARENA:
        least = math.ceil((beside + LEAST_ARENA) * (1 + MEMORY_MISS))
        raise UserError(
            f"--limit {row.limit_bytes} leaves {rest} bytes for our arena, at least {LEAST_ARENA} are needed. "
            f"Fix: --limit {least}, or --host-memory"
        )
    return rest


def _run(way: str, row: Row, job: Job, deepspeed_python: Path | None, timeout_s: float | None) -> dict[str, Any]:
    limit = None if way == PLAIN else row.limit_bytes
    python, environment = sys.executable, {}
    if way == ZERO3:
        if deepspeed_python is None:
            return _result(way, row, "skipped: no --deepspeed-python was given")
        python, environment = str(deepspeed_python.absolute()), dict(ENVIRONMENT)
        command = [python, "-m", "benchmarks.rivals.zero3", BUILD]
        probe = run_child(command, timeout_s=timeout_s, environment=environment, folder=ROOT)  # without a limit
        if probe.code:
            reason = probe.errors.splitlines()[-1] if probe.errors else f"exit code {probe.code}"
            return _result(way, row, f"skipped: {deepspeed_python} has no DeepSpeed that works: {reason}")
    job = replace(job, checkpoint=way == MAPPED_CHECKPOINT)
    job.write(job.folder / JOB_FILE)
    command = [python, "-m", f"benchmarks.rivals.{MODULES[way]}", str(job.folder / JOB_FILE)]
    ended = run_child(command, limit_bytes=limit, timeout_s=timeout_s, environment=environment, folder=ROOT)
    return _result(way, row, outcome(ended, limit), ended)


def outcome(ended: Ended, limit_bytes: int | None) -> str:
    """In words: done, killed at a limit, or failed with the last line of what it said."""
    if ended.killed:
        return f"killed at {format_size(limit_bytes)}" if limit_bytes is not None else "killed"
    if ended.code or not ended.result:
        last = ended.errors.splitlines()[-1] if ended.errors else "it said nothing"
        return f"failed with exit code {ended.code}: {last}"
    return "done"


def _result(way: str, row: Row, how: str, ended: Ended | None = None) -> dict[str, Any]:
    found: Mapping[str, Any] = ended.result if ended is not None and how == "done" else {}

    def typical(name: str) -> float | None:
        return median(found[name][WARM_STEPS:]) if found else None

    read, written = typical("read_bytes"), typical("written_bytes")
    moved = read + written if read is not None and written is not None else None
    return {
        "way": way,
        "ended": how,
        "limit": ended.limit if ended is not None else "",
        "step_s": typical("steps_s"),
        "steps_s": found.get("steps_s", []),
        "read_bytes": read,
        "written_bytes": written,
        "bytes_per_param": moved / parameters(row.model) if moved is not None else None,
        "peak_rss_bytes": found.get("peak_rss_bytes"),
        "group_peak_bytes": ended.group_peak_bytes if ended is not None else None,
        "losses": found.get("losses", []),
    }


def _against(plain: Sequence[str] | None, losses: Sequence[str]) -> dict[str, Any]:
    """Whether all losses are those of the plain loop; if not, by how many units in the last place of FP32."""
    if not plain or not losses:
        return {"equal_to_plain": None, "furthest_ulp": None}
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(plain, losses, strict=True)]
    furthest = max(abs(a - b) / float(np.spacing(np.float32(abs(a)))) for a, b in pairs)
    return {"equal_to_plain": list(plain) == list(losses), "furthest_ulp": furthest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a row, and the machine that they were seen on; the drive before and after."""

    row: Row
    rows: Sequence[Mapping[str, Any]]
    before: Rates
    after: Rates
    path: Path

    def as_json(self) -> dict[str, Any]:
        row = self.row
        return {
            "model": row.model,
            "parameters": parameters(row.model),
            "batch": row.batch,
            "seq_len": row.seq_len,
            "limit_bytes": row.limit_bytes,
            "rows": list(self.rows),
            "machine": machine_lines(self.path),
            "drive_before": self.before.as_json(),
            "drive_after": self.after.as_json(),
        }

    @property
    def title(self) -> str:
        row = self.row
        limit = format_size(row.limit_bytes) if row.limit_bytes is not None else "no limit"
        return f"{parameters(row.model) / 1e6:.1f}M parameters, {row.batch} x {row.seq_len} tokens, {limit}"

    def cells(self) -> list[tuple[str, ...]]:
        """One line a way, under `COLUMNS`."""
        ours = next((row["step_s"] for row in self.rows if row["way"] == OURS), None)
        found: list[tuple[str, ...]] = []
        for row in self.rows:
            if row["ended"] != "done":
                found.append((row["way"], row["ended"], "", "", "", "", ""))
                continue
            group = "" if row["group_peak_bytes"] is None else format_size(row["group_peak_bytes"])
            equal = {True: "equal", False: f"{row['furthest_ulp']:.1f} ulp" if row["furthest_ulp"] else "", None: ""}
            found.append(
                (
                    row["way"],
                    format_seconds(row["step_s"]),
                    f"{row['step_s'] / ours:.2f}" if ours else "",
                    f"{row['bytes_per_param']:.1f}",
                    format_size(row["peak_rss_bytes"]),
                    group,
                    equal[row["equal_to_plain"]],
                )
            )
        return found

    def table(self) -> Table:
        table = Table(*COLUMNS, title=self.title, title_justify="left")
        for cells in self.cells():
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        page = ResultPage(
            title=self.title, module="benchmarks.rivals", path=self.path, before=self.before, after=self.after
        )
        return page.text(markdown_table(COLUMNS, self.cells()))


COLUMNS = (
    "way",
    "step",
    "times ours",
    "bytes a parameter",
    "peak RSS",
    "peak of the group, page cache included",
    "losses",
)


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.rivals")
