"""A model folder much larger than memory, in and out again: imported into a run and exported by limited processes.

Scope: `python -m benchmarks.large_model --path DIR`: a folder of shards of random values is made, a run takes it in
(one step, all but the last norm frozen), `megatrain export` writes it again; each command in a memory cgroup. Every
tensor that comes out is compared with the one that went in.
Not here: how a step goes (`step.py`), small folders of every architecture (`tests/test_checkpoint.py`).

Frozen parameters have no moments: the state is their FP32 weights, in two slots. With the folder and the one that is
written from it that makes 12 bytes a parameter on the drive for BF16, 16 for FP32: 48 GB for 8 GB in BF16, 32 GB for
8 GB in FP32.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors import safe_open

from benchmarks.child import Ended, run_child
from benchmarks.presets import llama, parameters
from megatrain.config import RUN_FILE
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.errors import UserError
from megatrain.model import build, model_config
from megatrain.runfile import write_mapping
from megatrain.safetensors_in import TensorFiles
from megatrain.safetensors_out import Entry, write_shards
from megatrain.sizes import format_rate, format_seconds, format_size, parse_size
from tiering.place import check_place, check_room, folder_beside

HIDDEN, INTERMEDIATE = 1536, 4096
HOST_BYTES = 256 << 20
"""Of the run, within the limit."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SLOTS_BYTES = 8
"""Of a parameter in the state: FP32, two slots."""
POOL = 1 << 22
"""Random values; each tensor is made of them from another place on."""
STRIDE = 7919
PIECE = 1 << 20
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One command on the folder. peak_bytes: of its cgroup, the page cache counted; None: there was none."""

    seconds: float
    peak_bytes: int | None
    limit: str


@app.command(epilog="Example: python -m benchmarks.large_model --path /mnt/nvme --size 8GB --limit 2GiB")
def main(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive to use.")],
    size: Annotated[str, typer.Option("--size", help="Of the model folder; the drive needs six times that.")] = "1.5GB",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of its tensors: {', '.join(DTYPES)}.")] = "bfloat16",
    limit: Annotated[str, typer.Option("--limit", help="Memory of each command.")] = "1GiB",
    shard: Annotated[str, typer.Option("--shard", help="Of a file of the folder, at most.")] = "500MB",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Import and export a model folder that is larger than the memory of the commands that do it."""
    with reported(debug):
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype} is not known. Fix: one of {', '.join(DTYPES)}")
        check_place(path)
        with stdout_kept(as_json), tempfile.TemporaryDirectory(prefix="large-model-", dir=path) as folder:
            found = passed_through(Path(folder), parse_size(size), dtype, parse_size(limit), parse_size(shard))
        if as_json:
            print_json(found)
        else:
            render(found, Console())


def passed_through(folder: Path, nbytes: int, dtype: str, limit_bytes: int, shard_bytes: int) -> dict[str, Any]:
    """Makes, imports, exports and compares a model folder of about `nbytes`. Raises UserError where a command fails."""
    width = DTYPES[dtype].itemsize
    config = _config(nbytes // width)
    check_room(folder_beside(folder), (2 * width + SLOTS_BYTES) * parameters(config))
    files = write_model(folder / "model", config, DTYPES[dtype], shard_bytes)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (folder / RUN_FILE).write_text(write_mapping(_run(folder)))
    taken_in = _command(limit_bytes, "train", str(folder / RUN_FILE))
    written = _command(limit_bytes, "export", str(folder / "run"), "-o", str(folder / "out"), "--dtype", dtype)
    return {
        "folder_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "parameters": parameters(config),
        "dtype": dtype,
        "import": asdict(taken_in),
        "export": asdict(written),
        "differing": differing(folder / "model", folder / "out"),
    }


def _config(count: int) -> dict[str, Any]:
    """A Llama of that many parameters, as far as whole layers go."""
    one, two = (parameters(llama(HIDDEN, layers, INTERMEDIATE, vocabulary=256)) for layers in (1, 2))
    layers = 1 + max(0, count - one) // (two - one)
    return llama(HIDDEN, layers, INTERMEDIATE, vocabulary=256)


def write_model(folder: Path, config: dict[str, Any], dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    """The folder, as `save_pretrained` names and cuts it; some MiB are in memory at a time."""
    folder.mkdir()
    model = build(model_config(config))
    model.config.save_pretrained(folder)
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    starts = {name: number * STRIDE % POOL for number, name in enumerate(shapes)}
    entries = [Entry(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]

    def data(entry: Entry) -> Iterator[torch.Tensor]:
        left, at = entry.nbytes // dtype.itemsize, starts[entry.name]
        while left:
            piece = pool[at : at + min(left, PIECE)]
            left, at = left - len(piece), (at + len(piece)) % POOL
            yield piece

    return write_shards(folder, entries, shard_bytes, data)


def _run(folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model"), "freeze": ["model.layers.*", "model.embed_tokens.*", "lm_head.*"]},
        "data": {"paths": str(folder / "text.txt"), "tokenizer": "bytes", "seq_len": 8},
        "train": {"steps": 1, "batch": 1},
        "optimizer": {"lr": 0.0},
        "tiers": {"nvme": str(folder / "nvme"), "host_memory": HOST_BYTES},
        "output": {"dir": str(folder / "run")},
    }


def _command(limit_bytes: int, *arguments: str) -> Passage:
    begin_s = time.perf_counter()
    done: Ended = run_child([sys.executable, "-m", "megatrain", *arguments], limit_bytes=limit_bytes)
    if done.code:
        why = f"was killed within a limit of {done.limit}" if done.killed else f"ended with exit code {done.code}"
        raise UserError(f"megatrain {arguments[0]} {why}: {done.errors[-2000:]}")
    return Passage(seconds=time.perf_counter() - begin_s, peak_bytes=done.group_peak_bytes, limit=done.limit)


def differing(first: Path, second: Path) -> list[str]:
    """Names of tensors that are not bit by bit the same in both folders, or in one of them only."""
    one, two = TensorFiles(first).tensors, TensorFiles(second).tensors
    unlike = sorted(one.keys() ^ two.keys())
    for name in one.keys() & two.keys():
        with safe_open(one[name].file, framework="pt") as left, safe_open(two[name].file, framework="pt") as right:
            mine, other = left.get_tensor(name), right.get_tensor(name)
        same = mine.dtype == other.dtype and torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
        unlike += [] if same else [name]
    return unlike


def render(found: dict[str, Any], console: Console) -> None:
    nbytes = found["folder_bytes"]
    console.print(
        f"{found['parameters']:,} parameters in {found['files']} files, {format_size(nbytes)} in {found['dtype']}"
    )
    for name in ("import", "export"):
        passage = found[name]
        peak = "not known" if passage["peak_bytes"] is None else format_size(passage["peak_bytes"])
        rate = format_rate(nbytes / passage["seconds"])
        console.print(
            f"{name}: {format_seconds(passage['seconds'])} ({rate} of the folder), memory at most {peak} of a limit of "
            f"{passage['limit']}",
            soft_wrap=True,
        )
    unlike = found["differing"]
    console.print(f"{len(unlike)} tensors differ: {unlike[:3]}" if unlike else "every tensor came out as it went in")


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.large_model")
