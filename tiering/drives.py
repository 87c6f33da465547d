"""The folders of a store: the root, and one on every further drive, known by a marker file in it.

Scope: which folder is the root, which drive each other folder is, claiming folders for a new store, taking over those
of a store that is opened for a run, refusals.
Not here: what lies in the folders (`tiering/chunk_files.py`), which drive a chunk is on (`tiering/spread.py`).

    folder/drive.json   {"store": the name that the root's manifest says, "index": the number of the drive,
                         "root": where the root was, to be told to a person,
                         "root_file": which file the root's lock was, "file": which file this marker is}

A drive may come back under another path or in another order: the marker says which it is. A wrong one is refused by
name, before any chunk is looked at.

A root that was copied without its drives would share them with the first one, and two runs would write the same chunks.
So a root is refused while the lock that the marker knows is still where it was, and this root has another one. A store
that was moved, as a whole or in part, has left nothing where it was; the copy of a marker is another file, and so is no
longer that of the first root. Files are told apart by the number of their file system and their inode. The path in a
marker is asked for that alone: nothing is opened there.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiering.errors import IOFailedError, PlaceError, WrongStateError
from tiering.manifest import FILE_NAME, Manifest, fsync_directory

LOCK_NAME = ".lock"
MARKER_NAME = "drive.json"
NEW_MARKER_NAME = ".drive.new"
SLOTS_NAME = ".slots"


class Marker(BaseModel):
    """What a folder on a further drive says of itself. An earlier version did not say which files it meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    store: str
    index: Annotated[int, Field(ge=1)]
    root: str
    root_file: str = ""
    file: str = ""


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

    Raises `WrongStateError` for a drive that is missing, for a folder that is none of its drives, and for a root that
    is a copy. More folders than the store has are refused too: nothing would be written there, while the plan counts on
    their speed.
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
            _refuse_copy(root, folder, marker)
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
    """Makes an empty or missing folder drive `index` of a new store. Raises `PlaceError` if it is not empty.

    The lock of the root must be there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MARKER_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        refuse_content(folder, but=(LOCK_NAME,))
        raise
    try:
        _fill_marker(
            fd, path, Marker(store=store, index=index, root=told(root), root_file=which_file(root / LOCK_NAME))
        )
        refuse_content(folder, but=(MARKER_NAME, LOCK_NAME))  # another process may have been first
        fsync_directory(folder.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def take_over(folders: Sequence[Path], step: int | None) -> None:
    """What opening a store for a run makes durable, before anything is written. All its folders are locked.

    The name of the last manifest: a run that died before it was durable leaves one that a power cut may take back, and
    the next write goes to the slots of the one before. In the markers, where the root is now. Raises `IOFailedError`.
    """
    try:
        fsync_directory(folders[0])
        for folder in folders[1:]:
            _renew_marker(folder, folders[0])
    except OSError as error:
        raise IOFailedError(
            f"{folders[0]}: taking over the state for a run failed: {error}. The committed state is step {step}. "
            f"Fix: check the disk, then resume."
        ) from error


def which_file(path: Path) -> str:
    """Two paths give the same as long as they name one file, wherever it was moved on its file system.

    Empty for one that cannot be looked at.
    """
    try:
        return f"{os.statvfs(path).f_fsid:x}:{os.stat(path).st_ino}" if path.is_absolute() else ""
    except (OSError, ValueError):  # ValueError: no path at all
        return ""


def _refuse_copy(root: Path, folder: Path, marker: Marker) -> None:
    """Raises `WrongStateError` if `root` is a copy, and the drive in `folder` is not."""
    first = Path(marker.root)
    if marker.file != which_file(folder / MARKER_NAME) or marker.root_file != which_file(first / LOCK_NAME):
        return  # the drive is a copy too, or the root has left that place
    if marker.root_file and not os.path.samefile(first, root):
        raise WrongStateError(
            f"{root} and {first} are roots of one store, and {folder}, its drive {marker.index}, belongs to {first}: "
            f"two runs would overwrite each other's state there. Fix: go on with {first}; or copy all folders of the "
            f"store; or remove {first}, if {root} is to take its place."
        )


def _renew_marker(folder: Path, root: Path) -> None:
    """Makes the marker of a drive say where its root is now; leaves one that does so as it is."""
    path = folder / MARKER_NAME
    marker = _read_marker(folder)
    assert isinstance(marker, Marker), f"{folder}: {marker}"
    root_file = which_file(root / LOCK_NAME)
    if (marker.root, marker.root_file, marker.file) == (told(root), root_file, which_file(path)):
        return
    temporary = folder / NEW_MARKER_NAME
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    _fill_marker(fd, temporary, marker.model_copy(update={"root": told(root), "root_file": root_file}))
    os.rename(temporary, path)
    fsync_directory(folder)


def _fill_marker(fd: int, path: Path, marker: Marker) -> None:
    """Writes a marker to its new file, durably, and closes it."""
    text = marker.model_copy(update={"file": which_file(path)}).model_dump_json().encode() + b"\n"
    with os.fdopen(fd, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)


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
