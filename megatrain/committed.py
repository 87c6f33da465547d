"""The last commit of a run, or one that it keeps, read tensor by tensor while nothing else is in memory.

Scope: opening a run folder and its state for reading only, parts of parameters and moments as views, noticing that a
training which goes on has overtaken what was read.
Not here: what is made of the tensors (`export.py`, `snapshot.py`, `evaluate.py`), how a store is read
(`tiering/store.py`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.errors import UserError
from megatrain.model import Slice, Unit, Units
from megatrain.prepare import forward_plan
from megatrain.programs import block_name
from tiering.arena import Arena
from tiering.checksums import GRAIN_BYTES
from tiering.choose import choose_engine
from tiering.drives import find_drives, has_state, root_first
from tiering.errors import DamagedStateError, TieringError, WrongStateError
from tiering.history import is_kept, kept_folders, kept_steps
from tiering.manager import Manager
from tiering.manifest import read_manifest
from tiering.schedule import Action
from tiering.store import BlockStore
from tiering.transfers import REQUEST_BYTES
from tiering.workload import PAGE, pages

PIECE_BYTES = 32 << 20
"""The most that one read returns, and so what a reader of any tensor takes of memory."""


def run_of(run_dir: Path) -> RunConfig:
    """The run whose output folder this is. Raises UserError for another folder, and for a run without a state."""
    if not (run_dir / RUN_FILE).is_file():
        raise UserError(f"{run_dir} is not a run folder: it has no {RUN_FILE}. Fix: give the output.dir of a run")
    run = load_run(run_dir / RUN_FILE)
    if not has_state(root_first(run.tiers.nvme)[0]):
        folders = ", ".join(map(str, run.tiers.nvme))
        raise UserError(f"{folders}: no state of this run. Fix: train it, or bring the folder back")
    return run


def at_step(run: RunConfig, step: int | None) -> RunConfig:
    """The same run with its state as it was after `step`: a commit that is kept, or the last one; None: the last one.

    Raises UserError for another step. What comes back is for reading only.
    """
    if step is None:
        return run
    root, *others = root_first(run.tiers.nvme)
    manifest, kept = read_manifest(root), kept_steps(root)
    if step in kept:
        folders = tuple(kept_folders(find_drives(root, manifest, others), step))
        return run.model_copy(update={"tiers": run.tiers.model_copy(update={"nvme": folders})})
    if step != manifest.step:
        there = ", ".join(map(str, kept)) or "none"
        raise UserError(
            f"--step {step}: {root} does not have it: the last commit is step {manifest.step}, kept are {there}. "
            "Fix: one of these"
        )
    return run


def open_store(run: RunConfig) -> BlockStore:
    """The run's store, for reading only: training may go on elsewhere."""
    root, *others = root_first(run.tiers.nvme)
    return BlockStore.open(root, others=others, read_only=True)


LOOK_S = 5.0
"""Seconds between two looks for a newer commit: a read that was overtaken ends soon after, not after hours."""


class CommitWatch:
    """Remembers which commit a store shows, and says when it shows another one.

    The bytes of a commit stay untouched until the next commit. So what was read is whole if the commit is still the
    last one after the read.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._seen, self.step = self._look()

    def check(self, *, every_s: float = 0.0) -> None:
        """Raises UserError if there was a commit since; looks at most once in `every_s`."""
        if time.monotonic() < self._looked_s + every_s:
            return
        seen, step = self._look()
        if seen != self._seen:
            raise UserError(
                f"{root_first(self._run.tiers.nvme)[0]}: the training committed step {step} while step {self.step} was "
                "being read, whose bytes may be overwritten by now. Fix: try again with more time to the next commit "
                "(a larger train.commit_every), or end the training (Ctrl-C commits)"
            )

    def _look(self) -> tuple[object, int | None]:
        self._looked_s = time.monotonic()
        root = self._run.tiers.nvme[0]
        if is_kept(root) and not has_state(root):
            raise UserError(f"{root}: the training has removed this kept commit. Fix: a step that is kept longer, or a "
                            "larger train.keep")  # fmt: skip
        with open_store(self._run) as store:
            slots = [store.read_extents(name, 0, block.nbytes) for name, block in store.blocks.items()]
            return (dict(store.run), slots), store.step


@contextmanager
def forward_tiers(run: RunConfig, units: Units, watch: CommitWatch) -> Iterator[Manager]:
    """The tiers for forwards alone, over the commit that `watch` saw; training may go on elsewhere.

    Raises UserError at the end if there was a commit meanwhile: what was read may be of two then.
    """
    store = open_store(run)
    engine, _ = choose_engine(run.tiers.engine, store.root)
    with Manager(forward_plan(run, units), store, engine, _no_update, serial=run.tiers.serial) as manager:
        try:
            manager.load()
            yield manager
            manager.pipeline.drain()
        except DamagedStateError:
            watch.check()  # of a kept commit that was removed meanwhile its files are missing
            raise
        watch.check()


def _no_update(action: Action, views: object, context: object) -> None:
    raise TieringError(f"{action.name}: a forward updates nothing")


class Committed:
    """An open commit. A context manager; one reader at a time."""

    def __init__(self, run: RunConfig, units: Units) -> None:
        """Raises UserError where nothing is committed yet, WrongStateError where the state is of another model."""
        self.watch = CommitWatch(run)
        if self.watch.step is None:
            raise UserError(
                f"{root_first(run.tiers.nvme)[0]} holds no commit yet. Fix: wait for the first one, or train"
            )
        self.step = self.watch.step
        self.store = open_store(run)
        self._refuse_other_model(units)
        self._engine, _ = choose_engine(run.tiers.engine, self.store.root)
        self._arena = Arena(PIECE_BYTES + 2 * GRAIN_BYTES)

    def read(self, unit: Unit, place: Slice, kind: str, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a parameter or its moment, flat float32; valid until the next read."""
        assert 0 <= lo <= hi <= place.numel and 4 * (hi - lo) <= PIECE_BYTES, f"{place.name}[{lo}:{hi}]"
        block = block_name(unit.name, kind)
        begin, end = 4 * (place.offset + lo), 4 * (place.offset + hi)
        first, last, size = begin // PAGE * PAGE, pages(end), self.store.blocks[block].nbytes
        if last - first > GRAIN_BYTES:  # in whole grains, so that checksums need no second read
            first, last = first // GRAIN_BYTES * GRAIN_BYTES, min(-(-last // GRAIN_BYTES) * GRAIN_BYTES, size)
        requests = [
            (self._engine.submit_read(extent, view), start, view)
            for at in range(first, last, REQUEST_BYTES)
            for extent, start, stop in self.store.read_extents(block, at, min(at + REQUEST_BYTES, last))
            for view in [self._arena.view(start - first, stop - first)]
        ]
        try:
            for future, start, view in requests:
                future.result()  # one request of this part
                self.store.compare(block, start, view)
        except DamagedStateError:
            self.watch.check()  # of a kept commit that was removed meanwhile its files are missing
            raise
        whole = self._arena.tensor(0, last - first).view(torch.float32)
        return whole[(begin - first) // 4 : (end - first) // 4]

    def pieces(self, unit: Unit, place: Slice, kind: str) -> Iterator[torch.Tensor]:
        """All elements in order, in parts of at most PIECE_BYTES; each is valid until the next one."""
        most = PIECE_BYTES // 4
        for lo in range(0, place.numel, most):
            yield self.read(unit, place, kind, lo, min(lo + most, place.numel))

    def tensor(self, unit: Unit, place: Slice, kind: str) -> torch.Tensor:
        """The whole of it, in memory of its own."""
        whole = torch.empty(place.numel, dtype=torch.float32)
        done = 0
        for piece in self.pieces(unit, place, kind):
            whole[done : done + len(piece)] = piece
            done += len(piece)
        return whole.view(place.shape)

    def _refuse_other_model(self, units: Units) -> None:
        for unit in units.stored:
            name = block_name(unit.name, "weight")
            if not unit.slices:
                continue
            wanted = [(s.name, tuple(s.shape), s.offset) for s in unit.slices]
            block = self.store.blocks.get(name)
            found = [(t.name, tuple(t.shape), t.offset) for t in block.tensors] if block else []
            if wanted != found:
                unlike = next((w for w, f in zip(wanted, found, strict=False) if w != f), wanted[0])
                raise WrongStateError(
                    f"{self.store.root}: block {name} does not hold {unlike[0]} of shape {unlike[1]} as the model of "
                    f"the run does: the state is of another model, or of another release of transformers. "
                    f"Fix: the release that the run was trained with"
                )

    def close(self) -> None:
        self._engine.close()
        self.store.close()
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
