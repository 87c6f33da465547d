"""The pipeline with engines and devices that misbehave: late, out of order, failing, with memory of their own.

Scope: whole steps of a small model over a real store, with a stand-in for one part.
Not here: schedules as such (`test_lower.py`, `test_check.py`), the engine's own contract (`test_engine.py`).
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from conftest import RunFile
from models import MODELS

from megatrain.config import RunConfig, load_run
from megatrain.engine import StepEngine
from megatrain.inputs import every_token
from megatrain.model import first_weights
from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared, prepare
from megatrain.programs import block_name
from megatrain.trainer import tensor_specs
from tiering import checksums
from tiering.engine import Extent, IOEngine
from tiering.errors import IOFailedError, ScheduleError
from tiering.lanes import InlineLanes, Lanes
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

    def sync(self, paths: Iterable[Path]) -> None:
        self.inner.sync(paths)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> "Wrapped":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class Late(Wrapped):
    """Each request starts after a random delay, so requests overtake each other as far as the order allows."""

    def __init__(self, inner: IOEngine, seed: int) -> None:
        super().__init__(inner)
        self.random = random.Random(seed)

    def _later(self, submit: Callable[[Extent, memoryview], Future[int]], extent: Extent, view: memoryview) -> Any:
        result: Future[int] = Future()

        def start() -> None:
            time.sleep(self.random.random() * 0.004)
            try:
                result.set_result(submit(extent, view).result())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=start, daemon=True).start()
        return result

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._later(self.inner.submit_read, extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._later(self.inner.submit_write, extent, view)


class Failing(Wrapped):
    """Request number `at` fails; counts what is submitted after that failure has been seen."""

    def __init__(self, inner: IOEngine, at: int) -> None:
        super().__init__(inner)
        self.at = at
        self.count = 0
        self.after_failure = 0
        self.failed = threading.Event()

    def _pass_on(self, submit: Callable[[Extent, memoryview], Future[int]], extent: Extent, view: memoryview) -> Any:
        self.count += 1
        if self.failed.is_set():
            self.after_failure += 1
        if self.count == self.at:
            broken: Future[int] = Future()
            broken.set_exception(IOFailedError(f"block {extent.block}: request {self.at} failed"))
            broken.add_done_callback(lambda _: self.failed.set())
            return broken
        return submit(extent, view)

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pass_on(self.inner.submit_read, extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._pass_on(self.inner.submit_write, extent, view)


class SlowEngine(PosixEngine):
    """moving: requests that were submitted and have not been moved yet."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = 0
        self._count = threading.Lock()

    def _submit(self, *args: Any) -> Future[int]:
        with self._count:
            self.moving += 1
        return super()._submit(*args)

    def _whole(self, *args: Any) -> int:
        time.sleep(0.002)
        try:
            return super()._whole(*args)
        finally:
            with self._count:
                self.moving -= 1


class OwnMemory(InlineLanes):
    """A device with memory of its own: what is not filled is poison, what is not brought back is lost."""

    def h2d(self, host: torch.Tensor, *, fill: bool) -> torch.Tensor:
        return host.clone() if fill else torch.full_like(host, 0xFF)

    def d2h(self, device: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(device)
        device.fill_(0xFF)


@pytest.fixture
def small(run_file: RunFile, known_machine: None) -> Iterator[Callable[..., Prepared]]:
    def make(clip: float | None = None, **changes: Any) -> Prepared:
        model = {**MODELS["llama"], "num_hidden_layers": 2}
        tight = {"tiers.resident": 0, "tiers.host_memory": "300KiB", "train.max_grad_norm": clip}
        return prepare(load_run(run_file({"model.config": model, **tight, **changes})))

    yield make


@contextmanager
def opened(
    prepared: Prepared, root: Path, wrap: Callable[[IOEngine], Any], lanes: Lanes | None = None
) -> Iterator[tuple[Manager, StepEngine]]:
    """A new store with first weights, then everything through `wrap(engine)`."""
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


def train(prepared: Prepared, root: Path, wrap: Callable[[IOEngine], Any], lanes: Lanes | None = None) -> list[float]:
    with opened(prepared, root, wrap, lanes) as (manager, engine):
        losses = [engine.step(batch(step), last=step + 1 == STEPS).loss for step in range(STEPS)]
        engine.settle()
        manager.commit(STEPS, {})
    return losses


def state(prepared: Prepared, root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = [b.name for b in prepared.plan.workload.of_life("durable")]
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index,arg-type]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_late_and_overtaking_transfers_change_no_bit(
    small: Callable[..., Prepared], tmp_path: Path, clip: float | None
) -> None:
    """I2, I3, I8, IO-21: whatever order requests complete in, as far as `after` lets them."""
    prepared = small(clip)
    expected = train(prepared, tmp_path / "plain", Wrapped), state(prepared, tmp_path / "plain")
    for seed in range(2):
        root = tmp_path / f"late-{seed}"
        losses = train(prepared, root, lambda engine, seed=seed: Late(engine, seed))  # type: ignore[misc]
        assert losses == expected[0]
        assert state(prepared, root) == expected[1]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_a_device_with_its_own_memory_gives_the_same_bits(
    small: Callable[..., Prepared], tmp_path: Path, clip: float | None
) -> None:
    """I8: all device work goes through the four calls of `lanes.py`: copies in, copies out, nothing around them."""
    prepared = small(clip)
    plain = train(prepared, tmp_path / "plain", Wrapped)
    assert train(prepared, tmp_path / "own", Wrapped, OwnMemory()) == plain
    assert state(prepared, tmp_path / "own") == state(prepared, tmp_path / "plain")


@pytest.mark.parametrize("serial", [False, True], ids=["overlapped", "serial"])
def test_after_an_io_error_nothing_is_issued_and_nothing_committed(
    small: Callable[..., Prepared], tmp_path: Path, serial: bool
) -> None:
    """I10, IO-06: the Nth request fails, for every N until a whole run passes; the last commit stays as it was."""
    prepared = small(**{"tiers.serial": serial})
    first: dict[str, bytes] = {}
    at = passed = 0
    while not passed:
        at += 7 if at > 60 else 3
        root = tmp_path / f"fail-{at}"
        engines: list[Failing] = []

        def wrap(engine: IOEngine, at: int = at, engines: list[Failing] = engines) -> Failing:
            engines.append(Failing(engine, at))
            return engines[0]

        try:
            train(prepared, root, wrap)
            passed = engines[0].count < at
            assert passed, f"request {at} failed and nobody noticed"
        except IOFailedError as error:
            assert f"request {at} failed" in str(error)
            assert engines[0].after_failure == 0
            with BlockStore.open(root) as store:
                assert store.step == 0
            first = first or state(prepared, root)
            assert state(prepared, root) == first
    assert at > 30, "hardly anything was tried"


def test_a_unit_that_the_schedule_does_not_expect_is_an_error_that_shows_the_schedule(
    small: Callable[..., Prepared], tmp_path: Path
) -> None:
    """The rendezvous: the model's own order has to be the schedule's."""
    with opened(small(), tmp_path / "s", Wrapped) as (manager, _):
        manager.begin("step")
        with pytest.raises(ScheduleError, match=r"(?s)bwd\.lm_head was entered.*-->.*RUN +fwd\.model\.embed_tokens"):
            with manager.op("bwd.lm_head"):
                pass
        with manager.op("fwd.model.embed_tokens"):
            pass


def test_an_error_in_an_update_reaches_the_thread_that_computes(
    small: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: no thread dies in silence, and nothing hangs."""

    def broken(self: TiledAdamW, *args: Any) -> None:
        raise IOFailedError("the update broke")

    monkeypatch.setattr(TiledAdamW, "__call__", broken)
    with opened(small(), tmp_path / "s", Wrapped) as (manager, engine):
        with pytest.raises(IOFailedError, match="the update broke"):
            for step in range(2):
                engine.step(batch(step), last=False)
            manager.commit(2, {})
        with pytest.raises(IOFailedError, match="the update broke"):
            manager.commit(2, {})
        assert manager.store.step == 0


def test_a_drain_with_nothing_to_do_returns_at_once(small: Callable[..., Prepared], tmp_path: Path) -> None:
    """IO-18: zero requests, and everything resident, where a pass moves nothing."""
    prepared = small(**{"tiers.resident": 1, "tiers.host_memory": "64MiB"})
    with opened(prepared, tmp_path / "s", Wrapped) as (manager, engine):
        manager.pipeline.drain()
        manager.trace.take()
        engine.step(batch(0), last=False)
        manager.pipeline.drain()
        _, figures = manager.trace.take()
        assert (figures.read_bytes, figures.written_bytes) == (0, 0)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_the_bytes_of_a_step_are_those_of_the_plan(
    small: Callable[..., Prepared], tmp_path: Path, clip: float | None
) -> None:
    """P5: counted where they move, in the steady state."""
    prepared = small(clip)
    with opened(prepared, tmp_path / "s", Wrapped) as (manager, engine):
        for step in range(2):
            engine.step(batch(step), last=False)
        manager.pipeline.drain()
        manager.trace.take()
        engine.step(batch(3), last=False)
        manager.pipeline.drain()
        _, figures = manager.trace.take()
        timeline = prepared.plan.timeline
        assert (figures.read_bytes, figures.written_bytes) == (timeline.read_bytes, timeline.written_bytes)
        engine.settle()


def test_the_drive_has_its_next_request_while_bytes_are_summed(
    small: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: a checksum takes no place in the queue of the drive; here the queue holds one request."""
    steps = threading.Event()
    moving_meanwhile: list[int] = []
    slow: list[SlowEngine] = []
    real_sum = checksums.checksum

    def noted(data: Any) -> int:
        if steps.is_set():
            moving_meanwhile.append(slow[0].moving)
        return real_sum(data)

    def wrap(engine: IOEngine) -> IOEngine:
        engine.close()
        slow.append(SlowEngine())
        return slow[0]

    monkeypatch.setattr(checksums, "checksum", noted)
    with opened(small(), tmp_path / "s", wrap) as (manager, engine):
        manager.pipeline._queue_depth = 1
        steps.set()
        engine.step(batch(0), last=True)
        engine.settle()
        manager.pipeline.drain()
        steps.clear()
    assert moving_meanwhile and max(moving_meanwhile) == 1, f"requests in flight beside checksums: {moving_meanwhile}"
