"""Opens and closes the tiers of a plan; the trainer's only door to them.

Scope: arena, lanes, engine, store and pipeline as one resource; homes in HOST loaded and saved; commits.
Not here: decisions (`plan.py`), the loop that runs actions (`pipeline.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tiering.arena import Arena
from tiering.check import check
from tiering.choose import EngineName, choose_engine
from tiering.engine import IOEngine
from tiering.errors import EngineError
from tiering.gds_settings import GdsSettings
from tiering.lanes import InlineLanes, Lanes
from tiering.lending import Views
from tiering.pipeline import Pipeline, Updater
from tiering.plan import Plan
from tiering.schedule import Verb
from tiering.store import JSON, BlockStore, StoredBlock, TensorSpec
from tiering.trace import Trace
from tiering.transfers import REQUEST_BYTES

Tensors = Mapping[str, tuple[TensorSpec, ...]]
"""Block name to the tensors in it: what a reader of the store sees as the block's attributes."""
TRIAL_BYTES = 128 << 20
"""Of HOST, before the arena is there, for the buffers of an engine's trial."""


def stored_blocks(plan: Plan, tensors: Tensors) -> list[StoredBlock]:
    """The durable blocks of a plan as the store keeps them; they do not depend on the placement."""
    return [
        StoredBlock(name=b.name, unit=b.unit, kind=b.kind, nbytes=b.nbytes, tensors=tensors.get(b.name, ()))
        for b in plan.workload.of_life("durable")
    ]


def scratch_blocks(plan: Plan) -> list[StoredBlock]:
    """Blocks that this plan spills but no commit names."""
    written = {
        action.operands[0].block
        for schedule in plan.schedules.values()
        for action in schedule.actions
        if action.verb is Verb.WRITE
    }
    return [
        StoredBlock(name=b.name, unit=b.unit, kind=b.kind, nbytes=b.nbytes, scratch=True)
        for b in plan.workload.of_life("carried", "passing")
        if b.name in written
    ]


class Manager:
    """An open plan. A context manager: leaving it stops all transfers; what was not committed is forgotten."""

    def __init__(
        self,
        plan: Plan,
        store: BlockStore,
        engine: IOEngine,
        update: Updater,
        *,
        serial: bool = False,
        lanes: Lanes | None = None,
    ) -> None:
        """Takes over `store`, `engine` and `lanes` (None: ops compute on HOST). Every schedule is proven first (raises
        `ScheduleError`).
        """
        for schedule in plan.schedules.values():
            check(plan.workload, plan.placement, schedule)
        lanes = lanes or InlineLanes()
        copies = any(block.tier == "DEVICE" for block in plan.workload.blocks.values())
        assert lanes.own_memory == copies, f"a plan {'with' if copies else 'without'} copies, for {lanes.device}"
        self.plan = plan
        self.store = store
        self.engine = engine
        self.trace = Trace()
        self.arena = Arena(plan.host_bytes)
        self.lanes = lanes
        self._registered: torch.Tensor | None = None
        self.engine_line = ""
        try:
            lanes.open(self.arena, plan.device_bytes)
            if plan.knobs.direct:
                self._registered = lanes.tensor(0, plan.device_bytes)
                self.engine_line = engine.register(self._registered)
        except BaseException:
            lanes.close()
            self.arena.close()
            raise
        self.pipeline = Pipeline(
            self.arena,
            store,
            engine,
            lanes,
            update,
            serial=serial,
            trace=self.trace,
            queue_depth=plan.queue_depth,
        )
        self._saved_updates = 0

    @classmethod
    def create(
        cls,
        plan: Plan,
        root: Path,
        tensors: Tensors,
        identity: Mapping[str, JSON],
        update: Updater,
        *,
        others: Sequence[Path] = (),
        rates: Sequence[float] = (),
        engine: EngineName = "auto",
        gds_settings: GdsSettings | None = None,
        serial: bool = False,
        lanes: Lanes | None = None,
    ) -> Self:
        """A new store at `root`, opened. gds_settings: of kvikio where it is used, as measured before. Raises what
        `BlockStore.create` and `choose_engine` raise.
        """
        blocks = stored_blocks(plan, tensors)
        store = BlockStore.create(root, blocks, identity=identity, others=others, rates=rates)
        return cls._opened(plan, store, update, engine, gds_settings, serial, lanes)

    @classmethod
    def resume(
        cls,
        plan: Plan,
        root: Path,
        identity: Mapping[str, JSON],
        update: Updater,
        *,
        others: Sequence[Path] = (),
        engine: EngineName = "auto",
        gds_settings: GdsSettings | None = None,
        serial: bool = False,
        lanes: Lanes | None = None,
    ) -> Self:
        """The store at `root` as its last commit left it. Raises what `BlockStore.open` and `choose_engine` raise."""
        store = BlockStore.open(root, others=others, expect=identity)
        return cls._opened(plan, store, update, engine, gds_settings, serial, lanes)

    @classmethod
    def _opened(
        cls,
        plan: Plan,
        store: BlockStore,
        update: Updater,
        name: EngineName,
        gds_settings: GdsSettings | None,
        serial: bool,
        lanes: Lanes | None,
    ) -> Self:
        engine: IOEngine | None = None
        try:
            store.add_scratch(scratch_blocks(plan))
            engine, why = choose_engine(
                name,
                store.root,
                device=lanes.device if lanes is not None and lanes.own_memory else None,
                settings=gds_settings,
                trial_bytes=min(TRIAL_BYTES, plan.host_bytes),
            )
            if plan.knobs.direct and engine.device_refusal:
                raise EngineError(
                    f"the plan reads from {store.root} straight into memory of the device, and the engine "
                    f"{engine.name} cannot: {engine.device_refusal}. Fix: tiers.direct_reads: off, and --resume"
                )
            manager = cls(plan, store, engine, update, serial=serial, lanes=lanes)
            manager.engine_line = "; ".join(filter(None, (why, manager.engine_line)))
            return manager
        except BaseException:
            if engine is not None:
                engine.close()
            store.close()
            raise

    def put(self, block: str, fill: Callable[[torch.Tensor], object]) -> None:
        """Set a durable block on NVME from `fill`, which is given its bytes (flat uint8). Before `load` only."""
        nbytes = self.plan.workload.blocks[block].nbytes
        fill(self.arena.tensor(0, nbytes))
        pieces = []
        for lo in range(0, nbytes, REQUEST_BYTES):
            for extent, begin, end in self.store.write_extents(block, lo, min(lo + REQUEST_BYTES, nbytes)):
                view = self.arena.view(begin, end)
                pieces.append((self.engine.submit_write(extent, view), begin, view))
        for future, begin, view in pieces:
            future.result()  # the write of one piece of this block
            self.store.wrote(block, begin, begin + view.nbytes, view)

    def load(self) -> None:
        """Read the homes in HOST from the store."""
        self.pipeline.run(self.plan.load)

    def begin(self, program: str, *, last: bool = False, context: Any = None) -> None:
        """Open a pass of a program; `last`: no other pass of it follows at once. See `Pipeline.begin`."""
        self.pipeline.begin(self.plan.schedules[program], last=last, context=context)

    def run(self, program: str, *, context: Any = None) -> None:
        """A program that is all updates, from start to end."""
        self.pipeline.run(self.plan.schedules[program], context=context)

    def op(self, name: str) -> AbstractContextManager[Views]:
        """Enter a compute op of the open pass: waits for its blocks, lends them, takes them back."""
        return self.pipeline.op(name)

    def catch_up(self) -> None:
        """Run the updates that are ready; see `Pipeline.catch_up`."""
        self.pipeline.catch_up()

    def computed(self) -> None:
        """Return when the device has done every op so far; see `Pipeline.computed`."""
        self.pipeline.computed()

    def commit(self, step: int, run: Mapping[str, JSON]) -> None:
        """Make the state after all passes so far durable: waits for them, saves changed homes, commits the store."""
        self.pipeline.drain()
        if self.pipeline.updates != self._saved_updates:
            with self.pipeline.aside():
                self.pipeline.run(self.plan.save)
            self._saved_updates = self.pipeline.updates
        self.store.commit(step, run, self._sync)

    def _sync(self, paths: Iterable[Path]) -> None:
        self.engine.sync(paths)

    def close(self) -> None:
        """Stop, wait for transfers in flight, close everything. Never commits."""
        self.pipeline.close()
        if self._registered is not None:
            self.engine.deregister(self._registered)
            self._registered = None
        self.lanes.close()
        self.engine.close()
        self.store.close()
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
