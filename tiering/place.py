"""What a path stands on: its file system, its free room, and whether it can hold the NVMe tier.

Scope: `check_place` and `check_rooms` (before anything is written), `filesystem_of`, `nearest_directory`, `free_bytes`,
which folders share a file system or lie in one another.
Not here: what a store writes at that place (`tiering/store.py`), transfers (`tiering/engine.py`).
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering.errors import DiskFullError, PlaceError

RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The mount that holds a path."""

    mount_point: Path
    fs_type: str


def filesystem_of(path: Path) -> FileSystem:
    """The mount that holds `path` (which need not exist yet), from the longest matching mount point.

    Of several mounts on one point the last one counts: it hides the others. Without a readable mountinfo the type
    is "unknown", which no check refuses.
    """
    real = Path(os.path.realpath(path))
    found = FileSystem(mount_point=Path("/"), fs_type="unknown")
    try:
        lines = MOUNTINFO.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        mount_point = Path(_unescape(before.split()[4]))
        if real.is_relative_to(mount_point) and len(mount_point.parts) >= len(found.mount_point.parts):
            found = FileSystem(mount_point=mount_point, fs_type=after.split()[0])
    return found


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash of a mount point as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def nearest_directory(path: Path) -> Path:
    """`path` or its nearest ancestor that exists; raises `PlaceError` where that is not a directory."""
    path = Path(os.path.abspath(path))
    for candidate in (path, *path.parents):
        try:
            mode = os.stat(candidate).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(candidate):
                raise PlaceError(
                    f"{candidate} is a link to nothing ({os.readlink(candidate)}). "
                    f"Fix: name an existing folder, or remove the link."
                ) from None
            continue
        except OSError as error:
            raise PlaceError(
                f"{candidate} cannot be looked at: {error.strerror}. Fix: name a folder that you own."
            ) from error
        if not stat.S_ISDIR(mode):
            under = "" if candidate == path else f", so {path} cannot be a folder"
            raise PlaceError(f"{candidate} is a file, not a folder{under}. Fix: name a folder on a disk.")
        return candidate
    raise PlaceError(f"{path} has no existing ancestor. Fix: name a folder on a disk.")


def folder_beside(path: Path) -> Path:
    """An existing folder on the drive of `path` for files that come and go: beside it rather than in it, where the
    drive is the same. Raises `PlaceError` as `nearest_directory` does.
    """
    inside, outside = nearest_directory(path), nearest_directory(Path(os.path.abspath(path)).parent)
    same = os.stat(inside).st_dev == os.stat(outside).st_dev and os.access(outside, os.W_OK | os.X_OK)
    return outside if same else inside


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process may still write on the file system of `path`."""
    room = os.statvfs(nearest_directory(path.parent) if not path.exists() else path)
    return room.f_bavail * room.f_frsize


def check_place(root: Path) -> None:
    """Refuses a folder that cannot be the NVMe tier; writes nothing and reads no file of it.

    Missing folders are fine if the nearest existing ancestor is a writable directory. Raises `PlaceError` for a
    file, a path under a file, a RAM file system, a read-only file system, and a folder of somebody else.
    """
    ground = nearest_directory(root)
    fs = filesystem_of(ground)
    if fs.fs_type in RAM_FILE_SYSTEMS:
        raise PlaceError(
            f"{root} is on {fs.fs_type} ({fs.mount_point}): {fs.fs_type} is RAM, not a tier. "
            f"Fix: name a folder on a disk."
        )
    if os.statvfs(ground).f_flag & os.ST_RDONLY:
        raise PlaceError(
            f"{root} is on a read-only file system ({fs.fs_type} at {fs.mount_point}). "
            f"Fix: name a folder on a writable disk."
        )
    if not os.access(ground, os.W_OK | os.X_OK):
        raise PlaceError(f"{ground} is not writable for user {os.geteuid()}. Fix: name a folder that you own.")


def check_room(root: Path, wanted: int) -> None:
    """Raises `DiskFullError` if the disk of `root` has fewer than `wanted` bytes free."""
    check_rooms({root: wanted})


def check_rooms(wanted: Mapping[Path, int]) -> None:
    """The same for several folders. Those on one file system take their room from the same bytes."""
    for folders in by_device(wanted):
        needed, free = sum(wanted[folder] for folder in folders), free_bytes(folders[0])
        if needed > free:
            one = len(folders) == 1
            raise DiskFullError(
                f"{' and '.join(map(str, folders))}: the store needs {needed} bytes"
                f"{'' if one else ' on this one drive'}, {free} bytes are free. "
                f"Fix: make room for {needed - free} more bytes, or name a folder on a larger disk."
            )


def by_device(folders: Iterable[Path]) -> list[list[Path]]:
    """The folders (which need not exist yet) by the file system that holds them, in the order given."""
    groups: dict[int, list[Path]] = {}
    for folder in folders:
        groups.setdefault(os.stat(nearest_directory(folder)).st_dev, []).append(folder)
    return list(groups.values())


def refuse_overlap(folders: Sequence[Path]) -> None:
    """Raises `PlaceError` for a folder that is named twice, or lies in another one, links followed."""
    real = [Path(os.path.realpath(folder)) for folder in folders]
    for number, folder in enumerate(folders):
        for other in range(number):
            if real[number] == real[other]:
                raise PlaceError(f"{folder} and {folders[other]} are one folder. Fix: one folder a drive.")
            if real[number].is_relative_to(real[other]) or real[other].is_relative_to(real[number]):
                raise PlaceError(
                    f"{folder} and {folders[other]}: one lies in the other. Fix: one folder of its own a drive."
                )
