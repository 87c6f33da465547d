"""What checksums cost: GB/s of the checksum alone, and the share of a step that they take.

Scope: `python -m benchmarks.checksum --path DIR`. A small model is trained with and without checksums by turns, all of
it on the drive of DIR, little to compute: the case where checksums cost most.
Not here: how checksums are kept (`tiering/checksums.py`).
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
import yaml
from rich.console import Console

import megatrain.goodbye
import megatrain.trainer
from benchmarks.presets import llama, parameters
from megatrain.config import load_run
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.sizes import format_rate, format_seconds
from tiering.checksums import GRAIN_BYTES, checksum
from tiering.place import check_place
from tiering.store import BlockStore

BUFFER_BYTES = 64 << 20
MIN_S = 0.3
app = new_app()


@app.command()
def checksums(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive to use.")],
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of each run; the first is not counted.")] = 6,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs with, and as many without.")] = 3,
    hidden: Annotated[int, typer.Option("--hidden", min=64, help="Width of the model, a multiple of 64.")] = 512,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure checksums: alone by threads, and as a share of steps that are bound by I/O."""
    with reported(debug):
        check_place(path)
        with stdout_kept(as_json):
            alone = {threads: rate(threads) for threads in sorted({1, len(os.sched_getaffinity(0))})}
            found = step_seconds(path, hidden, steps, rounds)
        result = {
            "grain_bytes": GRAIN_BYTES,
            "bytes_per_s": {str(threads): per_s for threads, per_s in alone.items()},
            "parameters": parameters(llama(hidden=hidden, layers=8, intermediate=2 * hidden)),
            "with_s": found[True],
            "without_s": found[False],
            "share": statistics.median(found[True]) / statistics.median(found[False]) - 1,
        }
        if as_json:
            print_json(result)
        else:
            render(result, Console())


def rate(threads: int) -> float:
    """Bytes/s of checksums of grains in RAM, all threads together."""
    buffers = [memoryview(bytearray(os.urandom(GRAIN_BYTES) * (BUFFER_BYTES // GRAIN_BYTES))) for _ in range(threads)]

    def work(buffer: memoryview) -> float:
        begin_s, nbytes = time.perf_counter(), 0
        while time.perf_counter() < begin_s + MIN_S:
            for lo in range(0, len(buffer), GRAIN_BYTES):
                checksum(buffer[lo : lo + GRAIN_BYTES])
            nbytes += len(buffer)
        return nbytes / (time.perf_counter() - begin_s)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, buffers))


def step_seconds(path: Path, hidden: int, steps: int, rounds: int) -> dict[bool, list[float]]:
    """The median step of each run, with and without checksums; the order of the two turns every round."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for with_checksums in (True, False) if number % 2 == 0 else (False, True):
            with tempfile.TemporaryDirectory(prefix="checksums-", dir=path) as folder:
                found[with_checksums].append(_run(Path(folder), hidden, steps, with_checksums))
    return found


def _run(folder: Path, hidden: int, steps: int, with_checksums: bool) -> float:
    (folder / "text.txt").write_text("".join(f"line {number}: the quick brown fox\n" for number in range(2000)))
    tree: dict[str, Any] = {
        "model": {"config": llama(hidden=hidden, layers=8, intermediate=2 * hidden, vocabulary=256)},
        "data": {"paths": str(folder / "text.txt"), "tokenizer": "bytes", "seq_len": 32},
        "train": {"steps": steps, "batch": 1, "commit_every": steps},
        "tiers": {"nvme": str(folder / "run" / "nvme"), "host_memory": "1GiB", "resident": 0},
        "output": {"dir": str(folder / "run")},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    create = staticmethod(partial(BlockStore.create, checksums=with_checksums))
    with patch.object(BlockStore, "create", create), patch.object(megatrain.goodbye, "SAMPLE_MOST_S", 0.0):
        megatrain.trainer.train(load_run(folder / "run.yaml"), resume=False, console=Console(quiet=True))
    rows = [json.loads(line) for line in (folder / "run" / megatrain.trainer.LOG_FILE).read_text().splitlines()]
    return statistics.median(row["wall_s"] for row in rows[1:])


def render(result: dict[str, Any], console: Console) -> None:
    for threads, per_s in result["bytes_per_s"].items():
        console.print(f"xxh3_64, grains of {GRAIN_BYTES >> 10} KiB, {threads} threads: {format_rate(per_s)}")
    for name, seconds in (("with", result["with_s"]), ("without", result["without_s"])):
        console.print(f"a step {name} checksums: {_spread(seconds)}")
    console.print(f"checksums take {result['share']:+.1%} of a step of {result['parameters']:,} parameters")


def _spread(seconds: Sequence[float]) -> str:
    middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{format_seconds(middle)} ({format_seconds(least)} to {format_seconds(most)}, {len(seconds)} runs)"


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.checksum")
