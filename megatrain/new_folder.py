"""A folder that appears under its name when it is whole, or not at all.

Scope: refusing a place that cannot be written, the room that is needed, the temporary folder beside it, the rename.
Not here: what is written into it (`export.py`, `snapshot.py`).
"""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.config import RunConfig
from megatrain.errors import UserError
from tiering.errors import DiskFullError
from tiering.manifest import fsync_directory
from tiering.place import free_bytes, nearest_directory

MARKERS = ("config.json", "snapshot.json")
"""A folder with one of these is a model or a snapshot, which `force` may replace."""
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def refuse_place(target: Path, keep: Iterable[tuple[str, Path]], *, force: bool | None) -> Path:
    """The real path of `target`, if a new folder may appear there. Raises UserError otherwise; writes nothing.

    keep: folders that must survive, each with its name for people. force: a model or snapshot there may be replaced;
    None where a person cannot ask for that.
    """
    real = Path(os.path.realpath(target))
    for name, folder in keep:
        if Path(os.path.realpath(folder)).is_relative_to(real):
            raise UserError(f"{target} holds {name} ({folder}), which would be lost. Fix: another folder")
    if real.exists() and not real.is_dir():
        raise UserError(f"{target} is a file, not a folder. Fix: another name")
    content = sorted(os.listdir(real)) if real.is_dir() else []
    if content and not force:
        offer = "" if force is None else ", or --force to replace a model or snapshot that is there"
        raise UserError(
            f"{target} is not empty ({len(content)} entries, {content[0]!r} first). Fix: a new folder{offer}"
        )
    if content and not set(MARKERS) & set(content):
        raise UserError(
            f"{target} is neither a model folder nor a snapshot ({len(content)} entries, {content[0]!r} first), so "
            "--force does not replace it. Fix: another folder, or remove that one yourself"
        )
    ground = nearest_directory(real.parent)
    if not os.access(ground, os.W_OK | os.X_OK):
        raise UserError(f"{target}: no right to write in {ground}. Fix: another folder")
    if real.is_dir() and os.stat(real).st_dev != os.stat(ground).st_dev:
        raise UserError(f"{target} is a mount point, which cannot be put in place as a whole. Fix: a folder below it")
    return real


def folders_of(run: RunConfig) -> list[tuple[str, Path]]:
    """What must survive whatever a person asks for: the run's own folders, and the model that it started from."""
    own = [("the state of the run", root) for root in run.tiers.nvme] + [("the run folder", run.output.dir)]
    return own + ([("the model that the run started from", run.model.path)] if run.model.path is not None else [])


@contextmanager
def appearing(target: Path, *, nbytes: int = 0) -> Iterator[Path]:
    """A path beside `target` (one that `refuse_place` gave) for the folder; made by the caller, in place at the end.

    Missing parents are made. If anything fails, what was there stays and nothing new remains. Raises DiskFullError
    if there is no room for `nbytes`.
    """
    free = free_bytes(target)
    if nbytes > free:
        raise DiskFullError(
            f"{target}: {nbytes} bytes are to be written, {free} bytes are free. "
            f"Fix: make room for {nbytes - free} more bytes, or name a folder on a larger disk"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    try:
        new = around / "new"
        yield new
        fsync_directory(new)
        if target.exists() and os.listdir(target):
            _exchange(new, target)  # the old content goes with the folder around it
        else:
            os.rename(new, target)
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Swaps two folders at once; where the file system cannot, one after the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
        return
    aside = new.with_name("old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
