"""How fast the fused AdamW kernel updates on the CPU: GB/s by tensor size and number of threads.

Scope: `python -m benchmarks.adamw`. Bytes are those of weight, gradient and both moments: 16 an element.
Not here: the timing (`tiering/measure_memory.py`), the trainer's own updates (`megatrain/optim.py`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.errors import UserError
from megatrain.sizes import format_rate, format_size
from tiering.hardware import Rate
from tiering.hardware_file import ByteRate
from tiering.limits import memory_limit
from tiering.measure_memory import update_rate

SIZES = ("256KiB", "2MiB", "16MiB", "64MiB")
"""Small ones stay in a processor's cache: what a small tile gains, and what a large one cannot."""
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rate, with tensors of `tensor_bytes` each."""

    tensor_bytes: int
    threads: int
    rate: Rate


@app.command()
def adamw(
    size: Annotated[list[str] | None, typer.Option("--bytes", help="Size of one tensor; several may be given.")] = None,
    threads: Annotated[list[int] | None, typer.Option("--threads", min=1, max=1024, help="Several.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the fused AdamW kernel by tensor size and number of threads."""
    with reported(debug):
        sizes = [size_option("--bytes", text, least=4) // 4 * 4 for text in size or SIZES]
        limit, why = memory_limit()
        if 8 * max(sizes) > limit:
            raise UserError(f"--bytes {max(sizes)}: four such tensors do not fit in {limit} bytes ({why}). Fix: less")
        with stdout_kept(as_json):
            rows = measure(sizes, sorted(set(threads or (1, len(os.sched_getaffinity(0))))))
        if as_json:
            print_json(_as_json(rows))
        else:
            _render(rows, Console())


def measure(sizes: Sequence[int], threads: Sequence[int]) -> list[Row]:
    """A row for each size and number of threads; the process has as many threads afterwards as before."""
    before = torch.get_num_threads()
    rows = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            rows += [Row(tensor_bytes=size, threads=count, rate=update_rate(size // 4)) for size in sizes]
    finally:
        torch.set_num_threads(before)
    return rows


def _as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "torch_version": torch.__version__,
        "rows": [
            {"tensor_bytes": row.tensor_bytes, "threads": row.threads, "update": ByteRate.of(row.rate).model_dump()}
            for row in rows
        ],
    }


def _render(rows: Sequence[Row], console: Console) -> None:
    table = Table("tensor", "threads", "update", title=f"Fused AdamW, torch {torch.__version__}", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(format_size(row.tensor_bytes), str(row.threads), format_rate(row.rate.per_s))
    console.print(table)
    console.print("Bytes are those of weight, gradient and both moments, 16 an element.")


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.adamw")
