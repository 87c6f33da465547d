"""A place that cannot be the NVMe tier is refused within a second and before anything is written.

Scope: `tiering/place.py`.
Not here: folders with content (`test_store.py`).
"""

import os
import time
from pathlib import Path

import pytest

from tiering import place
from tiering.errors import PlaceError
from tiering.store import check_place


def test_a_folder_that_does_not_exist_yet_is_fine(tmp_path: Path) -> None:
    """IO-16: missing parents are made later; the check makes nothing."""
    check_place(tmp_path)
    check_place(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []


def test_files_and_paths_under_files_are_refused(tmp_path: Path) -> None:
    """IO-16: as root a 0555 folder is writable, so a file in the way is the case to test."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    start = time.monotonic()
    for name, said in (
        ("file", "is a file, not a folder"),
        ("file/nvme", "cannot be a folder"),
        ("file/nvme/deep", "cannot be a folder"),
        ("dangling", "link to nothing"),
        ("dangling/nvme", "link to nothing"),
    ):
        with pytest.raises(PlaceError, match=rf"{tmp_path}.*{said}.*Fix:"):
            check_place(tmp_path / name)
    assert time.monotonic() - start < 1


def test_ram_is_not_a_tier() -> None:
    """IO-16: tmpfs by the kernel's own table."""
    shm = Path("/dev/shm")
    if place.filesystem_of(shm).fs_type != "tmpfs":
        pytest.skip(f"/dev/shm is {place.filesystem_of(shm).fs_type}")
    with pytest.raises(PlaceError, match="tmpfs is RAM, not a tier"):
        check_place(shm / "nvme" / "deep")


@pytest.mark.parametrize(("flag", "allowed", "said"), [(os.ST_RDONLY, True, "read-only"), (0, False, "not writable")])
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, allowed: bool, said: str
) -> None:
    """IO-16: a read-only file system and a folder of somebody else (the kernel's answers are injected)."""
    real = os.statvfs(tmp_path)
    changed = os.statvfs_result((*real[:8], real.f_flag | flag, *real[9:]))
    monkeypatch.setattr(os, "statvfs", lambda path: changed)
    monkeypatch.setattr(os, "access", lambda path, mode: allowed)
    with pytest.raises(PlaceError, match=said):
        check_place(tmp_path / "nvme")


def test_the_mount_that_holds_a_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest mount point counts, the last of equal ones, and escaped names are read."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /data rw shared:1 - xfs /dev/b rw\n"
        "3 1 0:3 / /data/my\\040disk rw - tmpfs none rw\n"
        "4 1 0:4 / /data rw - btrfs /dev/c rw\n"
    )
    monkeypatch.setattr(place, "MOUNTINFO", table)
    found = {
        path: place.filesystem_of(Path(path)).fs_type for path in ("/home/x", "/data/x", "/database", "/data/my disk/x")
    }
    assert found == {"/home/x": "ext4", "/data/x": "btrfs", "/database": "ext4", "/data/my disk/x": "tmpfs"}
    monkeypatch.setattr(place, "MOUNTINFO", tmp_path / "none")
    assert place.filesystem_of(Path("/home")).fs_type == "unknown"
