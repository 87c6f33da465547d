"""`megatrain check`: reads all of the last commit and of those that are kept, and says what of them is damaged.

Scope: which store is meant, progress, the findings in words and as JSON.
Not here: reading and comparing (`tiering/scrub.py`), what a run notices by itself (`tiering/store.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatrain.config import RUN_FILE, load_run
from megatrain.errors import UserError
from megatrain.sizes import format_seconds, format_size
from tiering.drives import SLOTS_NAME, has_state, root_first
from tiering.errors import DamagedStateError, WrongStateError
from tiering.history import is_kept, kept_folders, kept_steps
from tiering.manifest import FILE_NAME
from tiering.scrub import Damage, Scrubbed, committed_bytes, scrub

MOST_LINES = 8
"""Places of one block that a person is shown; the JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """found: None where the manifest is damaged, which `error` tells; then nothing else can be looked at. kept: of the
    commits that are kept beside it, the oldest first.
    """

    root: Path
    found: Scrubbed | None
    seconds: float
    error: str = ""
    kept: tuple["CheckReport", ...] = ()

    @property
    def clean(self) -> bool:
        return self.found is not None and not self.found.damage and all(report.clean for report in self.kept)

    def as_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "root": str(self.root),
            "clean": self.clean,
            "step": found.step if found else None,
            "blocks": found.blocks if found else 0,
            "read_bytes": found.read_bytes if found else 0,
            "seconds": self.seconds,
            "checksums": bool(found and found.checksums),
            "damage": [_as_json(damage) for damage in found.damage] if found else [],
            "links_elsewhere": [str(link) for link in found.links] if found else [],
            "error": self.error,
            "kept": [report.as_json() for report in self.kept],
        }

    def _whole(self) -> str:
        """The newest kept commit that is clean, in words; empty without one."""
        steps = [report.found.step for report in self.kept if report.found is not None and report.clean]
        return f"the kept step {steps[-1]} (megatrain restore) or " if steps else ""

    def render(self, console: Console) -> None:
        for report in (self, *self.kept):
            report._render_own(console)

    def _render_own(self, console: Console) -> None:
        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        found = self.found
        if found is None:
            say(self.error)
            return
        step = "before its first commit" if found.step is None else f"step {found.step}"
        step = f"kept {step}" if is_kept(self.root) else step
        say(
            f"{self.root}: {step}, {found.blocks} blocks, {format_size(found.read_bytes)} read in "
            f"{format_seconds(self.seconds)}"
        )
        if not found.checksums:
            say("no checksums: an earlier version made this store, so only sizes were compared and all bytes read")
        for name, group in groupby(found.damage, key=lambda damage: damage.block):
            damages = list(group)
            say(f"block {name} of step {found.step}:" if name else "files beside the blocks:")
            for damage in damages[:MOST_LINES]:
                say(f"  {_line(damage)}")
            if len(damages) > MOST_LINES:
                say(f"  and {len(damages) - MOST_LINES} more; --json has all")
        if found.links:
            right = "" if is_kept(self.root) else ": the next `megatrain train --resume` points them right"
            say(
                f"{len(found.links)} links do not point at the commit ({found.links[0]} first), so zarr would read "
                f"other bytes. Nothing is lost{right}"
            )
        if found.damage:
            nbytes = sum(damage.nbytes for damage in found.damage)
            blocks = len({damage.block for damage in found.damage if damage.block})
            say(
                f"damaged: {len(found.damage)} places in {blocks} blocks, {format_size(nbytes)}. Fix: check the disk "
                f"(dmesg), go on from {self._whole()}a copy of this folder; without one the run must be restarted"
            )
        else:
            say("clean: every byte is what was committed" if found.checksums else "nothing wrong was found")


def check_state(path: Path, drives: Sequence[Path], console: Console) -> CheckReport:
    """path: a run folder, or the root of a state, whose folders on further drives are `drives`.

    Raises UserError or WrongStateError for what is no store.
    """
    folders = _folders(path, drives)
    own = _checked(folders, console)
    kept = [_checked_kept(kept_folders(folders, step), console) for step in kept_steps(folders[0])]
    return replace(own, kept=tuple(report for report in kept if report is not None))


def _checked_kept(folders: Sequence[Path], console: Console) -> CheckReport | None:
    """None if the run has removed it meanwhile."""
    try:
        return _checked(folders, console)
    except (OSError, WrongStateError):
        if (folders[0] / FILE_NAME).is_file():
            raise
        return None


def _checked(folders: Sequence[Path], console: Console) -> CheckReport:
    """A store by itself."""
    root, *others = folders
    begin_s = time.perf_counter()
    columns = (TextColumn("check"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("check", total=committed_bytes(root))
            found = scrub(root, others, advance=lambda nbytes: progress.advance(task, nbytes), spare=not is_kept(root))
    except DamagedStateError as error:
        return CheckReport(root=root, found=None, seconds=time.perf_counter() - begin_s, error=f"damaged: {error}")
    return CheckReport(root=root, found=found, seconds=time.perf_counter() - begin_s)


def _folders(path: Path, drives: Sequence[Path]) -> list[Path]:
    """The folders of the store, its root first."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder. Fix: give the output.dir of a run, or the folder of its state")
    if (path / RUN_FILE).is_file():
        if drives:
            raise UserError(f"--drive: the run file in {path} names all drives. Fix: leave it out")
        given: Sequence[Path] = load_run(path / RUN_FILE).tiers.nvme
    else:
        given = [path, *drives]
    folders = root_first(given)
    if not has_state(folders[0]) and not (folders[0] / SLOTS_NAME).is_dir():
        named = ", ".join(map(str, given))
        raise UserError(f"{named}: no state of a run. Fix: give the output.dir of a run, or the folder of its state")
    return folders


def _line(damage: Damage) -> str:
    place = f"{damage.path} at offset {damage.offset}, {damage.nbytes} bytes" if damage.nbytes else str(damage.path)
    sums = f" (checksum {damage.found}, written was {damage.wanted})" if damage.wanted else ""
    holds = f"; they hold {', '.join(damage.tensors)}" if damage.tensors else ""
    return f"{place}: {damage.what}{sums}{holds}"


def _as_json(damage: Damage) -> dict[str, Any]:
    return {
        "block": damage.block,
        "path": str(damage.path),
        "offset": damage.offset,
        "nbytes": damage.nbytes,
        "what": damage.what,
        "tensors": list(damage.tensors),
        "wanted": damage.wanted,
        "found": damage.found,
    }
