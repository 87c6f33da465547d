"""Steps of a small Llama over a real store, with a stand-in for the engine or the device.

Scope: `small_llama`, `opened`, `train` and the state that it leaves; `Wrapped`, an engine that stand-ins build on.
Not here: the stand-ins (the tests; `streams.py`), whole runs (`committed_runs.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from conftest import RunFile
from models import MODELS
from store_bytes import seen_by_zarr

from megatrain.config import RunConfig, load_run
from megatrain.engine import StepEngine
from megatrain.inputs import every_token
from megatrain.model import first_weights
from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared, prepare
from megatrain.programs import block_name
from megatrain.trainer import tensor_specs
from tiering.engine import Extent, IOEngine, View
from tiering.lanes import Lanes
from tiering.manager import Manager, scratch_blocks, stored_blocks
from tiering.posix import PosixEngine
from tiering.store import BlockStore

STEPS = 3


class Wrapped:
    """An engine that passes everything on; subclasses get in the way."""

    name = "wrapped"

    def __init__(self, inner: IOEngine) -> None:
        self.inner = inner

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self.inner.submit_read(extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self.inner.submit_write(extent, view)

    def register(self, view: View) -> str:
        return self.inner.register(view)

    def deregister(self, view: View) -> None:
        self.inner.deregister(view)

    def sync(self, paths: Iterable[Path]) -> None:
        self.inner.sync(paths)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> "Wrapped":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def small_llama(run_file: RunFile, clip: float | None = None, **changes: Any) -> Prepared:
    """Two layers in a budget so tight that everything moves."""
    model = {**MODELS["llama"], "num_hidden_layers": 2}
    tight = {"tiers.resident": 0, "tiers.host_memory": "300KiB", "train.max_grad_norm": clip}
    return prepare(load_run(run_file({"model.config": model, **tight, **changes})))


@contextmanager
def opened(
    prepared: Prepared, root: Path, wrap: Callable[[IOEngine], Any], lanes: Lanes | None = None
) -> Iterator[tuple[Manager, StepEngine]]:
    """A new store with first weights, then everything through `wrap(engine)` and `lanes`."""
    run: RunConfig = prepared.run
    blocks = [*stored_blocks(prepared.plan, tensor_specs(prepared.units)), *scratch_blocks(prepared.plan)]
    store = BlockStore.create(root, blocks, identity={})
    update = TiledAdamW(prepared.units, run.optimizer)
    with Manager(prepared.plan, store, wrap(PosixEngine()), update, serial=run.tiers.serial, lanes=lanes) as manager:
        with PosixEngine() as plain:
            wrapped, manager.engine = manager.engine, plain
            for unit in prepared.units:
                if unit.nbytes:
                    manager.put(
                        block_name(unit.name, "weight"),
                        lambda block, unit=unit: first_weights(prepared.units, unit, 0, block),  # type: ignore[misc]
                    )
                    for kind in ("exp_avg", "exp_avg_sq"):
                        manager.put(block_name(unit.name, kind), torch.Tensor.zero_)
            manager.commit(0, {})
            manager.engine = wrapped
        manager.load()
        engine = StepEngine(run, prepared.units, manager, 0)
        try:
            yield manager, engine
        finally:
            engine.close()


def batch(step: int) -> dict[str, torch.Tensor]:
    return every_token(torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(step)))


def train(
    prepared: Prepared, root: Path, wrap: Callable[[IOEngine], Any] = Wrapped, lanes: Lanes | None = None
) -> list[float]:
    with opened(prepared, root, wrap, lanes) as (manager, engine):
        losses = [engine.step(batch(step), last=step + 1 == STEPS).loss for step in range(STEPS)]
        engine.settle()
        manager.commit(STEPS, {})
    return losses


def state(prepared: Prepared, root: Path) -> dict[str, bytes]:
    return seen_by_zarr(root, [block.name for block in prepared.plan.workload.of_life("durable")])
