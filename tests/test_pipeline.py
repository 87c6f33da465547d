"""The pipeline with engines that misbehave: late, out of order, failing.

Scope: whole steps of a small model over a real store, with a stand-in for one part.
Not here: devices with memory of their own (`test_device_lanes.py`), schedules as such (`test_lower.py`,
`test_check.py`), the engine's own contract (`test_engine.py`).
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import RunFile
from small_runs import Wrapped, batch, opened, small_llama, state, train

from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared
from tiering import checksums
from tiering.engine import Extent, IOEngine
from tiering.errors import IOFailedError, ScheduleError
from tiering.posix import PosixEngine
from tiering.store import BlockStore


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


@pytest.fixture
def small(run_file: RunFile, known_machine: None) -> Iterator[Callable[..., Prepared]]:
    yield partial(small_llama, run_file)


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


@pytest.mark.parametrize(
    "serial", [pytest.param(False, id="overlapped"), pytest.param(True, id="serial", marks=pytest.mark.slow)]
)
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
        manager.pipeline._transfers.queue_depth = 1
        steps.set()
        engine.step(batch(0), last=True)
        engine.settle()
        manager.pipeline.drain()
        steps.clear()
    assert moving_meanwhile and max(moving_meanwhile) == 1, f"requests in flight beside checksums: {moving_meanwhile}"
