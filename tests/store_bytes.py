"""Bytes in and out of a store, without an I/O engine and around the store.

Scope: what `test_store.py` and `test_commit.py` share: a few blocks, raw writes and reads, what zarr sees.
Not here: transfers (`test_engine.py`).
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import zarr

from tiering.store import JSON, BlockStore, StoredBlock, TensorSpec

PAGE = 4096
KINDS = ("weight", "exp_avg", "exp_avg_sq")
IDENTITY: Mapping[str, JSON] = {"model": {"hidden": 8, "layers": 2}, "optimizer": {"lr": 1e-3}, "seed": 0}


def block(unit: str, kind: str, pages: int, *, scratch: bool = False) -> StoredBlock:
    tensors = (
        ()
        if scratch
        else (
            TensorSpec(name=f"{unit}.w", shape=(16, 16), offset=0),
            TensorSpec(name=f"{unit}.b", shape=(3,), offset=256),
        )
    )
    return StoredBlock(
        name=f"{unit}/{kind}", unit=unit, kind=kind, nbytes=pages * PAGE, tensors=tensors, scratch=scratch
    )


def blocks(pages: int = 3) -> list[StoredBlock]:
    return [block(f"model.layers.{i}", kind, pages + i) for i in range(2) for kind in KINDS]


def sync(paths: Iterable[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def put(store: BlockStore, name: str, data: bytes, lo: int = 0, *, at_hand: bool = True) -> None:
    """Writes `data` at byte `lo` of a block, as an engine would, and says so; at_hand: with the bytes themselves."""
    hi = lo + len(data)
    for extent, start, end in store.write_extents(name, lo, hi):
        with open(extent.path, "r+b") as file:
            file.seek(extent.offset)
            file.write(data[start - lo : end - lo])
        store.wrote(name, start, end, data[start - lo : end - lo] if at_hand else None)


def get(store: BlockStore, name: str) -> bytes:
    """The current bytes of a block, compared with their checksums."""
    found = b""
    for extent, start, end in store.read_extents(name, 0, store.blocks[name].nbytes):
        assert (start, end - start) == (len(found), extent.nbytes), f"extents of {name} leave a gap at {len(found)}"
        with open(extent.path, "rb") as file:
            file.seek(extent.offset)
            found += file.read(extent.nbytes)
        store.compare(name, start, found[start:])
    return found


def content(store: BlockStore, value: int) -> dict[str, bytes]:
    """Bytes that tell blocks, positions and `value` apart."""
    return {
        name: np.random.default_rng([value, number]).standard_normal(b.nbytes // 4, dtype=np.float32).tobytes()
        for number, (name, b) in enumerate(store.blocks.items())
        if not b.scratch
    }


def put_all(store: BlockStore, wanted: Mapping[str, bytes]) -> None:
    for name, data in wanted.items():
        put(store, name, data)


def get_all(store: BlockStore) -> dict[str, bytes]:
    return {name: get(store, name) for name, b in store.blocks.items() if not b.scratch}


def seen_by_zarr(root: Path, names: Iterable[str]) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


def unlike(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> list[str]:
    """Both sides of every difference, short; empty if there is none."""
    return [
        f"{name}: wanted {wanted.get(name, b'')[:8].hex()}, found {found.get(name, b'')[:8].hex()}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """{path: (size, mtime_ns)} of everything below `root` but the lock, which says who holds it."""
    paths = [Path(folder) / name for folder, folders, files in os.walk(root) for name in [*folders, *files]]
    return {str(p.relative_to(root)): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths if p.name != ".lock"}
