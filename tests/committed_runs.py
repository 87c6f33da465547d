"""Runs with a committed state, as quickly as they can be had.

Scope: a trained run, a run with nothing but its first weights, the parameters of a store as zarr shows them.
Not here: the run file around them (`conftest.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from conftest import RunFile
from rich.console import Console

from megatrain.config import RUN_FILE, RunConfig, dump_run, load_run
from megatrain.prepare import prepare
from megatrain.trainer import open_run_batches, open_state, train

QUIET = Console(quiet=True)
TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB"}


def trained(run_file: RunFile, changes: dict[str, Any], *, resume: bool = False) -> Path:
    """Trains, and returns the run folder."""
    run = load_run(run_file({**TIGHT, **changes}))
    assert train(run, resume=resume, console=QUIET) == 0
    return run.output.dir


def untrained(run_file: RunFile, changes: dict[str, Any]) -> Path:
    """A run folder whose state is the first commit, step 0."""
    run = load_run(run_file({**TIGHT, **changes}))
    prepared = prepare(run)
    run.output.dir.mkdir(parents=True)
    batches = open_run_batches(prepared, run.output.dir, QUIET)
    (run.output.dir / RUN_FILE).write_text(dump_run(run))
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=QUIET):
        pass
    return run.output.dir


def run_in(run_dir: Path) -> RunConfig:
    return load_run(run_dir / RUN_FILE)


def parameters(root: Path, kind: str = "weight") -> dict[str, torch.Tensor]:
    """Every parameter of a store's last commit, or one of its moments, read through zarr."""
    group = zarr.open_group(root, mode="r")
    found = {}
    for path in sorted(root.glob(f"*/{kind}")):
        array: Any = group[f"{path.parent.name}/{kind}"]
        for tensor in array.attrs["tensors"]:
            end = tensor["offset"] + int(np.prod(tensor["shape"]))
            values = np.asarray(array[tensor["offset"] : end])
            found[tensor["name"]] = torch.from_numpy(values).view(tensor["shape"])
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
