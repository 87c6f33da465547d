"""What every way to train is given, and what it tells: files for a child process, and the one object that it prints.

Scope: `Job` (model, batches, first weights, optimizer), `Meter` (step ends, losses, bytes, peak memory).
Not here: the ways to train (`plain.py`, `mapped.py`, `zero3.py`, `ours.py`), who writes a job (`__main__.py`). This
file imports nothing but torch, numpy and the standard library: another environment runs it too.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.child import OsBytes, os_bytes, peak_rss_bytes, reset_peak

JOB_FILE, WEIGHTS_FILE, BATCHES_FILE = "job.json", "weights.bin", "batches.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`folder`: where the files of the job are, and where a way to train may write. model: a config.json. offsets: of
    each parameter in the file of first weights, in elements, with its shape. optimizer: arguments of
    `torch.optim.AdamW`. checkpoint: activations of a layer are computed again in backward.
    """

    folder: Path
    model: dict[str, Any]
    micro_batch: int
    optimizer: dict[str, Any]
    offsets: dict[str, tuple[int, list[int]]]
    checkpoint: bool = False

    def batches(self) -> list[torch.Tensor]:
        """One [batch, seq_len] a step."""
        return [torch.from_numpy(batch) for batch in np.load(self.folder / BATCHES_FILE)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """First weights by parameter name, read as they are used."""
        for name, (offset, shape) in self.offsets.items():
            count = int(np.prod(shape))
            found = np.fromfile(self.folder / WEIGHTS_FILE, np.float32, count, offset=4 * offset)
            yield name, torch.from_numpy(found).reshape(shape)

    def write(self, path: Path) -> None:
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "folder"}
        path.write_text(json.dumps(content))


def read_job(path: Path) -> Job:
    content = json.loads(path.read_text())
    offsets = {name: (int(at), list(shape)) for name, (at, shape) in content.pop("offsets").items()}
    return Job(folder=path.parent, offsets=offsets, **content)


class Meter:
    """From its making on: the peak of memory. `begin` and then `step` after each one: its end, loss and bytes."""

    def __init__(self) -> None:
        reset_peak()
        self._ends_s: list[float] = []
        self._bytes: list[OsBytes] = []
        self._losses: list[float] = []

    def begin(self) -> None:
        self._ends_s.append(time.perf_counter())
        self._bytes.append(os_bytes())

    def step(self, loss: float | None = None) -> None:
        """loss None: `report` is given all of them."""
        self.begin()
        if loss is not None:
            self._losses.append(loss)

    def report(self, losses: list[float] | None = None) -> None:
        """Print the object that the parent reads."""
        ends, moved = self._ends_s, self._bytes
        pairs = range(1, len(ends))
        result = {
            "steps_s": [ends[i] - ends[i - 1] for i in pairs],
            "read_bytes": [moved[i].since(moved[i - 1]).read_bytes for i in pairs],
            "written_bytes": [moved[i].since(moved[i - 1]).written_bytes for i in pairs],
            "losses": [loss.hex() for loss in (losses if losses is not None else self._losses)],
            "peak_rss_bytes": peak_rss_bytes(),
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(result), flush=True)


def parameter_owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf


def supervised_loss(model: Any, input_ids: torch.Tensor) -> Any:
    """The model's own loss on [B, S] token ids, as a mean over the supervised ones."""
    supervised = input_ids.shape[0] * (input_ids.shape[1] - 1)
    return model(input_ids=input_ids, labels=input_ids, use_cache=False, num_items_in_batch=supervised).loss
