"""Which commits a run keeps beside the last one, what room they take, and going back to one of them.

Scope: `train.keep` and `train.keep_every` in a training; `megatrain restore`; the room of a run's state on its drives.
Not here: how a commit is kept, removed and brought back (`tiering/history.py`), when a run commits otherwise
(`commits.py`), reading a kept commit (`committed.py`).
"""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatrain.commits import failures_named
from megatrain.committed import run_of
from megatrain.config import RunConfig
from megatrain.prepare import Prepared
from megatrain.sizes import format_seconds, format_size
from tiering.drives import root_first
from tiering.history import History, Kept
from tiering.manager import Manager, scratch_blocks, stored_blocks
from tiering.place import check_rooms
from tiering.spread import rate_of
from tiering.store import BlockStore


def room(prepared: Prepared) -> dict[Path, int]:
    """Bytes that the state takes in each folder: two slots, one for each commit that is kept, what this plan spills."""
    run = prepared.run
    folders, rates = run.tiers.nvme, [rate_of(drive) for drive in prepared.drives]
    durable = BlockStore.room(folders, rates, stored_blocks(prepared.plan, {}))
    spilled = BlockStore.room(folders, rates, scratch_blocks(prepared.plan))
    return {folder: durable[folder] + run.train.keep * durable[folder] // 2 + spilled[folder] for folder in folders}


def keep_lines(prepared: Prepared) -> list[str]:
    """For the plan: what kept commits take; nothing where there are none."""
    train = prepared.run.train
    if not train.keep:
        return []
    nbytes = train.keep * sum(block.nbytes for block in stored_blocks(prepared.plan, {}))
    return [f"keeps {train.keep} commits, one every {train.keep_every} steps: {format_size(nbytes)} of disk more"]


class Keeping:
    """Keeps the commits that a run asks for. Opening it removes what an interrupted run left of them.

    Raises `DiskFullError` if the disk has no room for those that are still to come.
    """

    def __init__(self, run: RunConfig, manager: Manager, console: Console) -> None:
        self._most, self._every = run.train.keep, run.train.keep_every
        self._manager = manager
        self._console = console
        store = manager.store
        with failures_named(store, "opening the kept commits"):
            self._history = History(store)
            for folder in self._history.tidy():
                self._say(f"{folder}: removed what an interrupted run left of a kept commit")
        to_come = max(0, self._most - len(self._history.steps()))
        chunks = [entry.chunks() for entry in store.manifest.blocks]
        check_rooms(
            {
                folder: to_come * sum(found.nbytes_on(drive) for found in chunks)
                for drive, folder in enumerate(store.folders)
            }
        )

    def due(self, number: int) -> bool:
        """Is the state after step `number` to be kept?"""
        return bool(self._most and self._every and number and number % self._every == 0)

    def keep(self, number: int) -> None:
        """Keeps the commit of step `number`, if it is to be kept and is not yet. Its time belongs to no step."""
        if not self.due(number):
            return
        begin_s = time.perf_counter()
        with failures_named(self._manager.store, f"keeping step {number}"):
            kept = self._history.keep(self._most)
        took_s = time.perf_counter() - begin_s
        self._manager.trace.leave_out("", begin_s)
        if kept.not_finite:
            self._say(
                f"step {number} is not kept: {kept.not_finite} is not a finite number. Kept are "
                f"{_listed(self._history.steps())}",
                style="yellow",
            )
        elif kept.nbytes:
            self._say(_told(kept, took_s, self._history.steps()))

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def restore(run_dir: Path, step: int, console: Console) -> None:
    """Makes a kept commit the state of a run; the next `train --resume` goes on from there. It stays kept.

    Raises UserError or a TieringError; then the last commit is what it was.
    """
    run = run_of(run_dir)
    root, *others = root_first(run.tiers.nvme)
    with BlockStore.open(root, others=others) as store:
        last, history = store.step, History(store)
        if step == last:
            console.print(f"Nothing to do: the last commit of {root} is step {step}.", highlight=False, soft_wrap=True)
            return
        begin_s = time.perf_counter()
        with failures_named(store, f"restoring step {step}"):
            history.tidy()
            history.restore(step)
        took = format_seconds(time.perf_counter() - begin_s)
        console.print(
            f"{root}: the state is that of step {step} again ({took}); step {last}, the last commit until now, "
            f"{'is kept' if last in history.steps() else 'is gone'}. Kept are {_listed(history.steps())}",
            highlight=False,
            soft_wrap=True,
        )


def _told(kept: Kept, took_s: float, steps: Sequence[int]) -> str:
    copied = kept.nbytes - kept.shared_bytes
    how = f"{format_size(copied)} copied" if copied else "shared with the state"
    if copied and kept.shared_bytes:
        how += f", {format_size(kept.shared_bytes)} shared"
    removed = f"; removed {_listed(kept.removed)}" if kept.removed else ""
    return f"step {kept.step} is kept ({how}, {format_seconds(took_s)}){removed}. Kept are {_listed(steps)}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
