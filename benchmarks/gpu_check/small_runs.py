"""Runs on the GPU that checks are made of: a run file in a folder of its own, an open state, some steps.

Scope: `run_of`, `opened`, `trained`; the models of the tests.
Not here: what is checked (`runs.py`, `fraction.py`).
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from rich.console import Console

from benchmarks.gpu_check.rig import Rig
from benchmarks.presets import llama
from megatrain.config import RunConfig, load_run
from megatrain.engine import StepEngine
from megatrain.inputs import Inputs, tensors
from megatrain.prepare import Prepared
from megatrain.runfile import write_mapping
from megatrain.trainer import open_run_batches, open_state
from tiering.manager import Manager

QUIET = Console(quiet=True)
ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"line {number}: the quick brown fox jumps over the lazy dog\n" for number in range(4000))
WIDE = llama(hidden=512, layers=16, intermediate=1536, vocabulary=2048)
"""52.5M parameters in units of 14 MiB at most."""


def tested_models() -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """The configurations that the tests hold against the plain loop, and the names of those with tied weights."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    models = importlib.import_module("models")
    return models.MODELS, models.TIED


def run_of(rig: Rig, name: str, model: Mapping[str, Any], changes: Mapping[str, Any]) -> RunConfig:
    """A run on the GPU with everything that it writes below `name`; changes: dotted keys with their values."""
    folder = rig.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(TEXT)
    tree: dict[str, Any] = {
        "model": {"config": dict(model)},
        "data": {"paths": str(text), "tokenizer": "bytes", "seq_len": 16},
        "train": {"steps": 1_000_000, "batch": 4},
        "device": "cuda",
        "tiers": {"nvme": str(folder / "nvme")},
        "output": {"dir": str(folder / "run")},
    }
    for dotted, value in changes.items():
        section, _, leaf = dotted.partition(".")
        tree.setdefault(section, {})[leaf] = value
    file = folder / "run.yaml"
    file.write_text(write_mapping(tree))
    return load_run(file)


@contextmanager
def opened(prepared: Prepared) -> Iterator[tuple[Manager, StepEngine, Iterator[Inputs]]]:
    """A new state at the run's own folder, an engine over it, and the inputs of its steps."""
    root = prepared.run.tiers.nvme[0]
    batches = open_run_batches(prepared, root.parent, QUIET)
    inputs = (tensors(batches.batch_at(number)) for number in range(1 << 62))
    with open_state(prepared, batches, root, resume=False, console=QUIET) as manager:
        engine = StepEngine(prepared.run, prepared.units, manager, 0)
        try:
            yield manager, engine, inputs
        finally:
            engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses by step, and a digest of each durable block after the last one, as zarr shows it."""

    losses: tuple[float, ...]
    blocks: Mapping[str, str]

    def unlike(self, other: "Trained") -> list[str]:
        """What differs; empty if nothing does."""
        losses = [] if self.losses == other.losses else [f"losses {self.losses} and {other.losses}"]
        return losses + [name for name, digest in self.blocks.items() if other.blocks.get(name) != digest]


def trained(prepared: Prepared, steps: int) -> Trained:
    with opened(prepared) as (manager, engine, inputs):
        losses = [engine.step(next(inputs), last=step + 1 == steps).loss for step in range(steps)]
        engine.settle()
        manager.commit(steps, {"step": steps})
    names = [block.name for block in prepared.plan.workload.of_life("durable")]
    return Trained(losses=tuple(losses), blocks=dict(_digests(prepared.run.tiers.nvme[0], names)))


def _digests(root: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    group = zarr.open_group(root, mode="r")
    for name in names:
        array = group[name]
        assert isinstance(array, zarr.Array)
        yield name, sha256(np.asarray(array[:]).tobytes()).hexdigest()


def beside_bytes(prepared: Prepared) -> int:
    """Of the device, what is planned beside the arena."""
    assert prepared.room is not None, "a run on a device"
    return sum(line.nbytes for line in prepared.room.beside)
