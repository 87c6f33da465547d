"""A new store: its folders claimed, all its room reserved, its first manifest written; or nothing left behind.

Scope: `create_files`, the first manifest, the entries of a manifest.
Not here: what an open store does (`tiering/store.py`), the files themselves (`tiering/chunk_files.py`).
"""

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tiering.checksums import Checksums, checksums_path, reserved_bytes
from tiering.chunk_files import ChunkFiles, empty_folder
from tiering.drives import LOCK_NAME, claim, refuse_content, told
from tiering.lock import OwnerLock
from tiering.manifest import (
    JSON,
    ONE_DRIVE,
    OTHER,
    SEVERAL_DRIVES,
    BlockEntry,
    DrivePlace,
    Manifest,
    Slot,
    StoredBlock,
    check_block,
    fsync_directory,
    plain,
    replace_manifest,
)
from tiering.place import check_place, check_rooms, refuse_overlap
from tiering.spread import DIGITS

Made = tuple[ChunkFiles, Manifest, OwnerLock, list[StoredBlock], Checksums | None]


def create_files(
    root: Path,
    blocks: Sequence[StoredBlock],
    identity: Mapping[str, JSON],
    others: Sequence[Path],
    rates: Sequence[float],
    *,
    checksums: bool,
) -> Made:
    """What `BlockStore.create` says, but for the open store: its files, manifest, lock, scratch blocks, checksums."""
    folders = [Path(os.path.abspath(folder)) for folder in (root, *others)]
    root, rates = folders[0], rates or [1.0] * len(folders)
    for block in blocks:
        check_block(block)
    assert len({block.name for block in blocks}) == len(blocks), "two blocks have one name"
    assert len(rates) == len(folders) <= len(DIGITS), f"{len(rates)} rates for {len(folders)} folders"
    for folder in folders:
        check_place(folder)
        refuse_content(folder, but=(LOCK_NAME,))
    refuse_overlap(folders)
    files = ChunkFiles.over(folders, rates, blocks)
    check_rooms(files.room(blocks))
    durable = [block for block in blocks if not block.scratch]
    sums = Checksums.of_zeros(durable) if checksums else None
    manifest = _first_manifest(files, rates, durable, identity)
    missing = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    lock = OwnerLock(root / LOCK_NAME, create=True)
    try:
        refuse_content(root, but=(LOCK_NAME,))  # another process may have been first
        claimed = [root]
        try:
            for index, folder in enumerate(folders[1:], 1):
                claim(folder, manifest.store, index, root)
                claimed.append(folder)
                lock.extend(folder / LOCK_NAME, create=True)
            beside = {checksums_path(root, slot): reserved_bytes(durable) for slot in OTHER} if sums else {}
            files.write_layout(blocks, manifest.format, beside)
            for path in missing:
                fsync_directory(path.parent)
            manifest = _commit_nothing(root, manifest, sums)
        except BaseException:
            for folder in claimed:
                empty_folder(folder)
            raise
    except BaseException:
        lock.close()
        raise
    return files, manifest, lock, [block for block in blocks if block.scratch], sums


def _commit_nothing(root: Path, manifest: Manifest, sums: Checksums | None) -> Manifest:
    """The first manifest made durable, with the checksums of zeros."""
    if sums is None:
        replace_manifest(root, manifest)
        return manifest
    entry = sums.save(root)
    manifest = manifest.model_copy(update={"checksums": entry})
    replace_manifest(root, manifest)
    sums.committed(entry.slot)
    return manifest


def _first_manifest(
    files: ChunkFiles, rates: Sequence[float], blocks: Iterable[StoredBlock], identity: Mapping[str, JSON]
) -> Manifest:
    made = now()
    places = [
        DrivePlace(path=told(folder), bytes_per_s=rate) for folder, rate in zip(files.folders, rates, strict=True)
    ]
    return Manifest(
        format=SEVERAL_DRIVES if files.several else ONE_DRIVE,
        step=None,
        created=made,
        updated=made,
        identity=plain(identity),
        run={},
        blocks=entries(files, [(block, "a") for block in blocks]),
        store=uuid.uuid4().hex if files.several else "",
        drives=tuple(places) if files.several else (),
    )


def entries(files: ChunkFiles, slots: Iterable[tuple[StoredBlock, Slot]]) -> tuple[BlockEntry, ...]:
    return tuple(BlockEntry.of(block, slot, files.spread_of(block) if files.several else None) for block, slot in slots)


def now() -> str:
    """The time of a commit, to be told to a person: nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
