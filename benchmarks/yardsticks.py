"""The same step with only one of its resources in use: computing on resident weights, its I/O alone, a plain loop.

Scope: what `step.py` holds a tiered step against, each as an object that is asked again and again.
Not here: the tiered step itself and the report (`step.py`).
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from megatrain.engine import StepEngine
from megatrain.inputs import Inputs
from megatrain.model import Slice, build, find_units, model_config
from megatrain.optim import GradientNorm, TiledAdamW, Update
from megatrain.prepare import Prepared
from megatrain.programs import KINDS, block_name
from megatrain.reference import train_plain
from megatrain.stream import StreamedModel
from megatrain.verify import plain_model
from tiering.arena import Arena
from tiering.engine import Extent
from tiering.manager import Manager
from tiering.place import check_room
from tiering.plan import Plan, make_plan
from tiering.schedule import Action, Operand, Schedule, Verb
from tiering.transfers import LONGEST_BYTES, REQUEST_BYTES

MAIN = "step"
"""The program that repeats itself."""
BEYOND_CACHE = 512 << 20
"""Bytes: more than the last cache of usual machines holds."""
RANDOM_BYTES = 8 << 20
MOST_PASSES, ALIKE = 6, 0.03
"""So often at most, until two times in a row differ by less than this share of them."""


def resident_plan(prepared: Prepared) -> Plan:
    """The run's workload with everything at home in RAM: no transfer at all between commits."""
    blocks = prepared.plan.workload.blocks.values()
    everything = 2 * sum(block.nbytes for block in blocks)
    plan = make_plan(prepared.plan.workload, prepared.hardware, everything, 1.0, candidates=[prepared.plan.knobs])
    moved = plan.timeline.read_bytes + plan.timeline.written_bytes
    assert moved == 0, f"{moved} bytes move with everything resident"
    return plan


class ResidentSteps:
    """The tiered engine's own step on a plan that moves nothing. Reads its first weights from the store of `beside`,
    whose pipeline is drained, and leaves the store as it is.
    """

    how = "compute and update ops of the same engine, everything resident"

    def __init__(self, prepared: Prepared, beside: Manager, plan: Plan) -> None:
        run = prepared.run
        units = find_units(build(model_config(run.model.json_config())))
        self._manager = Manager(plan, beside.store, beside.engine, TiledAdamW(units, run.optimizer))
        self._manager.load()
        self._engine = StepEngine(run, units, self._manager, 0)
        self.step_s: float | None = None

    def compute_s(self, batches: Sequence[Inputs]) -> float:
        """Seconds of the ops of a step, the mean over all batches but the first."""
        for number, batch in enumerate(batches):
            if number == 1:
                self._manager.trace.take()
            self._engine.step(batch, last=False)
        _, figures = self._manager.trace.take()
        counted = len(batches) - 1
        self.step_s = figures.wall_s / counted
        return (figures.compute_s + figures.update_s) / counted

    def close(self) -> None:
        """The store and the engine belong to somebody else."""
        self._engine.close()
        self._manager.pipeline.close()
        self._manager.arena.close()


class RingSteps:
    """The same ops on weights that are in RAM, where not all of them fit: each op is lent the next place of a ring
    larger than the processor's cache. The bytes are those of other units, the work is the same.
    """

    how = "compute and update ops, on a ring of units in RAM: not all of them fit"
    step_s: float | None = None

    def __init__(self, prepared: Prepared) -> None:
        self._run = prepared.run
        self._tile_bytes = prepared.plan.knobs.tile_bytes
        units = find_units(build(model_config(self._run.model.json_config())))
        self._units = units
        self._sizes = {unit.name: unit.nbytes for unit in units}
        self._largest = max(self._sizes.values())
        self._places = max(2, BEYOND_CACHE // (4 * self._largest))
        one = torch.empty(self._largest // 4).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        self._rings = {
            kind: (one.repeat(self._places) if kind == "weight" else torch.zeros(len(one) * self._places)).view(
                torch.uint8
            )
            for kind in (*KINDS, "grad")
        }
        self._turn, self._step, self._spans_s = 0, 0, 0.0
        self._update = TiledAdamW(units, self._run.optimizer)
        self._model = StreamedModel(units, self._lend, self._gradient_ready)
        self._norm = GradientNorm(units)

    def compute_s(self, batches: Sequence[Inputs]) -> float:
        """As `ResidentSteps.compute_s`."""
        for number, batch in enumerate(batches):
            if number == 1:
                self._spans_s = 0.0
            self._step += 1
            self._norm = GradientNorm(self._units)
            self._model.step(batch, self._run.train.micro_batch, self._run.train.loss_chunk)
        return self._spans_s / (len(batches) - 1)

    def close(self) -> None:
        self._model.close()

    def _views(self, unit: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All blocks of a unit, at the place whose turn it is."""
        start = self._turn % self._places * self._largest
        for kind, ring in self._rings.items():
            yield block_name(unit, kind), ring[start : start + self._sizes[unit]]

    @contextmanager
    def _lend(self, op: str) -> Iterator[Mapping[str, torch.Tensor]]:
        self._turn += 1
        views = dict(view for unit in self._sizes for view in self._views(unit))
        begin_s = time.perf_counter()
        yield views
        self._spans_s += time.perf_counter() - begin_s

    def _gradient_ready(self, unit: str, gradients: Mapping[Slice, torch.Tensor]) -> None:
        """Inside the op that made it whole, whose span so counts the update too."""
        self._norm.add(gradients)
        views = dict(self._views(unit))
        for lo in range(0, self._sizes[unit], self._tile_bytes):
            hi = min(lo + self._tile_bytes, self._sizes[unit])
            operand = Operand(block=block_name(unit, "weight"), lo=lo, hi=hi, address=0, reads=True, writes=True)
            action = Action(verb=Verb.RUN, name=f"upd.{unit}", lane="update", operands=(operand,))
            self._update(action, {name: view[lo:hi] for name, view in views.items()}, {unit: self._due()})

    def _due(self) -> Update:
        clips = self._run.train.max_grad_norm is not None
        return Update(step=self._step, scale=torch.tensor(1.0) if clips else None)


class PlainSteps:
    """The plain loop of `megatrain verify`: the whole model in RAM, nothing computed twice."""

    def __init__(self, prepared: Prepared) -> None:
        self._run = prepared.run
        self._model = plain_model(prepared.units, prepared.run)

    def step_s(self, batches: Sequence[Inputs]) -> float:
        """Seconds of a step, the mean over all batches but the first, which allocates."""
        ends: list[float] = []
        optimizer = self._run.optimizer
        train_plain(
            self._model,
            batches,
            micro_batch=self._run.train.micro_batch,
            max_grad_norm=self._run.train.max_grad_norm,
            optimizer={
                "lr": optimizer.lr,
                "betas": optimizer.betas,
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
            },
            loss_chunk=self._run.train.loss_chunk,
            progress=lambda number: ends.append(time.perf_counter()),
        )
        return (ends[-1] - ends[0]) / (len(ends) - 1)


class RawIO:
    """The requests of one pass, in their order and as many in flight, with nothing to wait for: the drive's own time.

    They go through the same engine to files of their own, as large as those of the store and all written once before:
    `folders` has one for each folder of the tier, on the same drive. `beside` has run a pass and is drained: where a
    block is read from and written to is then as in every pass that follows.
    """

    def __init__(self, schedule: Schedule, beside: Manager, queue_depth: int, folders: Mapping[Path, Path]) -> None:
        self._engine = beside.engine
        self._depth = queue_depth
        self._arena = Arena(schedule.host_bytes)
        self._changed = threading.Condition()
        self._folders = folders
        self._copies: dict[Path, Path] = {}
        self._requests = list(self._cut(schedule, beside))
        self._next = self._in_flight = self._in_flight_bytes = 0
        self._failure: BaseException | None = None
        self._fill()

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for _, extent, _ in self._requests)

    def io_s(self) -> float:
        """Seconds from the first request to the end of the last one."""
        begin_s = time.perf_counter()
        with self._changed:
            self._next = 0
            self._issue()
            self._changed.wait_for(lambda: self._in_flight == 0)  # every request, or those in flight at a failure
        if self._failure is not None:
            raise self._failure
        return time.perf_counter() - begin_s

    def settled_s(self) -> float:
        """The same, once it takes about as long as the time before: a drive that has rested may be faster at first."""
        before_s, now_s = self.io_s(), self.io_s()
        for _ in range(MOST_PASSES - 2):
            if abs(now_s - before_s) <= ALIKE * before_s:
                break
            before_s, now_s = now_s, self.io_s()
        return now_s

    def close(self) -> None:
        self._requests.clear()
        self._arena.close()

    def _cut(self, schedule: Schedule, beside: Manager) -> Iterator[tuple[bool, Extent, memoryview | torch.Tensor]]:
        """As the pipeline cuts transfers into requests."""
        for action in schedule.actions:
            if action.verb not in (Verb.READ, Verb.WRITE, Verb.N2D):
                continue
            x, there = action.operands[0], action.operands[-1]
            reads = action.verb is not Verb.WRITE
            if there.tier == "DEVICE":  # nothing of a pass is left there
                view: memoryview | torch.Tensor = beside.lanes.tensor(there.address, there.address + there.nbytes)
            else:
                view = self._arena.view(there.address, there.address + there.nbytes)
            extents = beside.store.read_extents if reads else beside.store.write_extents
            for lo in range(x.lo, x.hi, LONGEST_BYTES):
                for extent, begin, end in extents(x.block, lo, min(lo + LONGEST_BYTES, x.hi)):
                    copy = Extent(
                        path=self._copy(extent.path), offset=extent.offset, nbytes=extent.nbytes, block=extent.block
                    )
                    yield reads, copy, view[begin - x.lo : end - x.lo]

    def _copy(self, path: Path) -> Path:
        """The file that stands for one of the store's."""
        if path not in self._copies:
            there = path.resolve()  # a link may lead to another drive
            root = next(root for root in self._folders if there.is_relative_to(root.resolve()))
            self._copies[path] = self._folders[root] / str(len(self._copies))
        return self._copies[path]

    def _fill(self) -> None:
        """Every block of every file, and every byte that will be written, with bytes that no drive can make smaller."""
        random = memoryview(bytearray(os.urandom(RANDOM_BYTES)))
        for original, path in self._copies.items():
            nbytes = original.stat().st_size
            check_room(path, nbytes)
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            with Arena(RANDOM_BYTES) as arena:
                view = arena.view(0, RANDOM_BYTES)
                view[:] = random
                for lo in range(0, nbytes, RANDOM_BYTES):
                    part = min(RANDOM_BYTES, nbytes - lo)
                    extent = Extent(path=path, offset=lo, nbytes=part, block=original.name)
                    self._engine.submit_write(extent, view[:part]).result()  # one request at a time
                del view
        self._engine.sync(self._copies.values())
        for reads, extent, there in self._requests:
            if isinstance(there, memoryview) and not reads:
                for lo in range(0, extent.nbytes, RANDOM_BYTES):
                    there[lo : lo + RANDOM_BYTES] = random[: min(RANDOM_BYTES, extent.nbytes - lo)]

    def _issue(self) -> None:
        """The lock is held."""
        most_bytes = self._depth * REQUEST_BYTES
        while self._failure is None and self._next < len(self._requests):
            if self._in_flight == self._depth or self._in_flight_bytes >= most_bytes:
                break
            reads, extent, view = self._requests[self._next]
            self._next += 1
            self._in_flight += 1
            self._in_flight_bytes += extent.nbytes
            submit = self._engine.submit_read if reads else self._engine.submit_write
            submit(extent, view).add_done_callback(partial(self._landed, extent.nbytes))

    def _landed(self, nbytes: int, future: "Future[int]") -> None:
        """On the engine's thread, as in the pipeline."""
        with self._changed:
            self._in_flight -= 1
            self._in_flight_bytes -= nbytes
            self._failure = self._failure or future.exception()
            self._issue()
            if not self._in_flight:
                self._changed.notify_all()
