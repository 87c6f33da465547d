"""The folders of a store: the root, and one on every further drive, known by a marker file in it.

Scope: which folder is the root, which drive each other folder is, claiming folders for a new store, refusals.
Not here: what lies in the folders (`tiering/chunk_files.py`), which drive a chunk is on (`tiering/spread.py`).

    folder/drive.json   {"store": the name that the root's manifest says, "index": the number of the drive,
                         "root": where the root was, to be told to a person}

A drive may come back under another path or in another order: the marker says which it is. A wrong one is refused by
name, before any chunk is looked at.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiering.errors import PlaceError, WrongStateError
from tiering.manifest import FILE_NAME, Manifest, fsync_directory

LOCK_NAME = ".lock"
MARKER_NAME = "drive.json"
SLOTS_NAME = ".slots"


class Marker(BaseModel):
    """What a folder on a further drive says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    store: str
    index: Annotated[int, Field(ge=1)]
    root: str


def has_state(root: Path) -> bool:
    """Does `root` hold a store? It may have no commit yet: `BlockStore.open(root).step` says."""
    return (root / FILE_NAME).is_file()


def state_root(folders: Sequence[Path]) -> Path | None:
    """The first of the folders that holds a store: its root, in whatever order they are given. None if none does."""
    return next((folder for folder in folders if has_state(folder)), None)


def root_first(folders: Sequence[Path]) -> list[Path]:
    """The folders with the root of the store that they hold first; as they are if they hold none.

    Raises `WrongStateError` if there is no root, but a folder is a drive of some store.
    """
    root = state_root(folders)
    if root is not None:
        return [root, *(folder for folder in folders if folder != root)]
    for folder in folders:
        marker = _read_marker(folder)
        if isinstance(marker, Marker):
            raise WrongStateError(
                f"drive 0 of a store is missing: {folder} is its drive {marker.index}, its root was {marker.root}. "
                f"Fix: mount that drive and name its folder too; for a new run, name other folders, or remove "
                f"{folder} if that store is gone."
            )
    return list(folders)


def find_drives(root: Path, manifest: Manifest, others: Sequence[Path]) -> list[Path]:
    """All folders of the store at `root`, in the order of its drives, from `others` in any order.

    Raises `WrongStateError` for a drive that is missing and for a folder that is none of its drives. More folders
    than the store has are refused too: nothing would be written there, while the plan counts on their speed.
    """
    found, strangers = {0: root}, []
    for folder in others:
        marker = _read_marker(folder)
        if not isinstance(marker, Marker) or marker.store != manifest.store or marker.index >= len(manifest.drives):
            strangers.append(
                (folder, f"is of another store ({marker.store})" if isinstance(marker, Marker) else marker)
            )
        elif marker.index in found:
            raise WrongStateError(
                f"{folder} and {found[marker.index]} both hold drive {marker.index} of the store at {root}. "
                f"Fix: name the one that belongs to it, not a copy."
            )
        else:
            found[marker.index] = folder
    told = "".join(f"\n  {folder} {what}" for folder, what in strangers)
    for index, drive in enumerate(manifest.drives):
        if index not in found:
            count = sum(index in entry.chunks().drives for entry in manifest.blocks)
            raise WrongStateError(
                f"drive {index} of the store at {root} is missing: its folder was {drive.path}, and {count} of "
                f"{len(manifest.blocks)} blocks have chunks on it. Fix: mount that drive and name its folder too; it "
                f"may have another path than before.{told}"
            )
    if strangers:
        raise WrongStateError(
            f"the store at {root} was made on {max(1, len(manifest.drives))} drives, and of those given too many are "
            f"none of them:{told}\nFix: leave them out; a store stays on the drives that it was made on."
        )
    return [found[index] for index in sorted(found)]


def claim(folder: Path, store: str, index: int, root: Path) -> None:
    """Makes an empty or missing folder drive `index` of a new store. Raises `PlaceError` if it is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MARKER_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        refuse_content(folder)
        raise
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps({"store": store, "index": index, "root": told(root)}).encode() + b"\n")
            file.flush()
            os.fsync(fd)
        refuse_content(folder, but=(MARKER_NAME,))  # another process may have been first
        fsync_directory(folder.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def told(path: Path) -> str:
    """A path as text that JSON can hold, for a person to read."""
    return os.fsencode(path).decode(errors="backslashreplace")


def refuse_content(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Raises `PlaceError` for a folder with anything in it; the message tells what it is."""
    content = sorted(set(os.listdir(folder)) - set(but)) if folder.exists() else []
    if FILE_NAME in content:
        raise PlaceError(f"{folder} already holds a store. Fix: resume it, or name another folder.")
    if MARKER_NAME in content:
        raise PlaceError(
            f"{folder} already is a drive of a store. Fix: name another folder; remove this one if that store's root "
            f"is gone, or if its creation was interrupted."
        )
    if SLOTS_NAME in content:
        raise PlaceError(f"{folder} holds a store whose creation was interrupted. Fix: remove that folder.")
    if content:
        raise PlaceError(
            f"{folder} is not empty ({len(content)} entries, {content[0]!r} first). Fix: name a new or an empty folder."
        )


def _read_marker(folder: Path) -> Marker | str:
    """The marker, or why there is none."""
    if has_state(folder):
        return "holds a store of its own"
    try:
        return Marker.model_validate_json((folder / MARKER_NAME).read_bytes())
    except FileNotFoundError:
        return f"has no {MARKER_NAME}" if folder.is_dir() else "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValidationError:
        return f"has a {MARKER_NAME} that cannot be read"
