"""The NVMe tier: live training state as a plain Zarr v3 hierarchy with crash-consistent commits.

Scope: `BlockStore`: where a block's bytes are and may be written, commits, recovery.
Not here: creation (`tiering/new_store.py`), transfers (`tiering/engine.py`), the manifest file
(`tiering/manifest.py`), names, files and links (`tiering/chunk_files.py`), checksums (`tiering/checksums.py`), further
drives (`tiering/drives.py`), zarr's metadata (`tiering/zarr_layout.py`), what a path stands on (`tiering/place.py`),
one owner at a time (`tiering/lock.py`), earlier commits that are kept (`tiering/history.py`).

    root/zarr.json  root/<unit>/zarr.json  root/<unit>/<kind>/zarr.json     metadata, written once
    root/<unit>/<kind>/c/0 -> ../../../.slots/<committed slot>/<unit>/<kind>
    root/.slots/a/...  root/.slots/b/...  root/.slots/scratch/...           preallocated files, written by the engine
    root/manifest.json                                                     the last commit
    root/.checksums.a  root/.checksums.b                                   of every grain of the last commit
    root/.lock                                                             its owner

On several drives a block has several chunks, `c/0`, `c/1`, and so on. Each of them is a file on one of the drives.

A block between two commits:      [committed slot] --wrote(some)--> [both slots: split] --wrote(all)--> [other slot]
and `commit` turns the other slot into the committed one, for every wholly written block at once:
sync data and checksums (I7) -> write, sync, rename the manifest -> flip slots in memory -> sync the root -> re-point
the links.
Since the last commit a block is written only to the slot that the commit does not name. A commit that fails leaves
the store failed: it can be read, nothing is written or committed until it is opened again (I10).
Opening neither creates nor deletes (I9), with one exception: links that a crash left behind the manifest are
re-pointed, as are markers of drives whose root has moved (`tiering/drives.py`). Reading through zarr sees the committed
bytes; what it has open stays unchanged until the commit after next.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from tiering.checksums import Bytes, Checksums, Mismatch, Sums, check_files, mismatch
from tiering.chunk_files import NO_ROOM, ChunkFiles
from tiering.drives import LOCK_NAME, find_drives, has_state, state_root, take_over
from tiering.engine import Extent
from tiering.errors import (
    DamagedStateError,
    DiskFullError,
    IOFailedError,
    ScheduleError,
    TieringError,
    WrongStateError,
)
from tiering.lock import OwnerLock
from tiering.manifest import (
    JSON,
    OTHER,
    Manifest,
    Slot,
    StoredBlock,
    TensorSpec,
    check_block,
    difference,
    fsync_directory,
    plain,
    put_manifest,
    read_manifest,
)
from tiering.new_store import create_files, entries, now
from tiering.place import check_place, check_rooms, free_bytes
from tiering.ranges import RangeSet
from tiering.workload import PAGE

__all__ = ["JSON", "BlockStore", "StoredBlock", "TensorSpec", "check_place", "has_state", "state_root"]


class BlockStore:
    """An open store. Made by `create` or `open`; a context manager. Its methods may be called from any thread."""

    def __init__(
        self,
        files: ChunkFiles,
        manifest: Manifest,
        lock: OwnerLock | None,
        scratch: Sequence[StoredBlock],
        checksums: Checksums | None,
    ) -> None:
        self.root = files.root
        self._files = files
        self._lock = lock
        self._manifest = manifest
        self._checksums = checksums
        self._mutex = threading.RLock()
        self._failure: BaseException | None = None
        stored = [entry.block() for entry in manifest.blocks]
        self._slots: dict[str, Slot] = {
            block.name: entry.slot for block, entry in zip(stored, manifest.blocks, strict=True)
        }
        self._written = {block.name: RangeSet() for block in stored}
        self._blocks = {block.name: block for block in [*stored, *scratch]}
        self.blocks: Mapping[str, StoredBlock] = MappingProxyType(self._blocks)

    @property
    def folders(self) -> tuple[Path, ...]:
        """One on each drive, the root first."""
        return self._files.folders

    @property
    def step(self) -> int | None:
        """The step of the last commit; None before the first."""
        return self._manifest.step

    @property
    def run(self) -> Mapping[str, JSON]:
        """What the last commit was given; empty before the first."""
        return self._manifest.run

    @property
    def manifest(self) -> Manifest:
        """The last commit as it is written."""
        return self._manifest

    @property
    def identity(self) -> Mapping[str, JSON]:
        """What `create` was given."""
        return self._manifest.identity

    @staticmethod
    def nbytes_on_disk(blocks: Iterable[StoredBlock]) -> int:
        """The room that a store of these blocks takes on one drive: two slots of each, one of scratch."""
        return sum(block.nbytes * (1 if block.scratch else 2) for block in blocks)

    @staticmethod
    def room(folders: Sequence[Path], rates: Sequence[float], blocks: Iterable[StoredBlock]) -> dict[Path, int]:
        """The room that a store of these blocks takes in each folder, over drives of these rates."""
        blocks = list(blocks)
        return ChunkFiles.over(folders, rates, blocks).room(blocks)

    @staticmethod
    def create(
        root: Path,
        blocks: Iterable[StoredBlock],
        *,
        identity: Mapping[str, JSON],
        others: Sequence[Path] = (),
        rates: Sequence[float] = (),
        checksums: bool = True,
    ) -> "BlockStore":
        """A new store in a folder that is missing or empty, all its room reserved, all its bytes zero.

        others: such folders on further drives. rates: bytes/s of each drive, the root's first, by which blocks are
        spread once and for all (none: equal). checksums: False makes a store as earlier versions did. Raises
        `PlaceError` (also for a folder with content), `DiskFullError` before anything is written, and `ValueError` for
        blocks that are no blocks. If it fails half way, it removes what it made, on all drives.
        """
        return BlockStore(*create_files(root, list(blocks), identity, others, rates, checksums=checksums))

    @staticmethod
    def open(
        root: Path,
        *,
        others: Sequence[Path] = (),
        expect: Mapping[str, JSON] | None = None,
        read_only: bool = False,
    ) -> "BlockStore":
        """The store at `root` as its last commit left it; neither creates nor deletes (I9). No scratch blocks yet.

        others: its folders on further drives, in any order; they may have moved. `expect`: items of the identity that
        must be equal, else `WrongStateError` names the first that is not. A drive that is missing: `WrongStateError`
        too. A file that is missing or short, or a torn manifest: `DamagedStateError`. In use: `StoreLockedError`,
        except read-only, which takes no lock and may be overtaken by its owner's commits.
        """
        root, others = Path(os.path.abspath(root)), [Path(os.path.abspath(folder)) for folder in others]
        read_manifest(root)  # a folder that is no store is refused as that, not for want of a lock
        if read_only:
            return BlockStore._opened_by_reader(root, others, expect)
        lock = OwnerLock(root / LOCK_NAME, create=False)
        try:
            manifest = read_manifest(root)
            for folder in find_drives(root, manifest, others)[1:]:
                lock.extend(folder / LOCK_NAME, create=True)
            store = BlockStore._opened(root, manifest, others, expect, lock)  # looks at the drives again, now locked
            take_over(store.folders, store.step)
            store._point_links(store._slots)
        except BaseException:
            lock.close()
            raise
        return store

    @staticmethod
    def _opened_by_reader(root: Path, others: Sequence[Path], expect: Mapping[str, JSON] | None) -> "BlockStore":
        while True:
            manifest = read_manifest(root)
            try:
                return BlockStore._opened(root, manifest, others, expect, None)
            except DamagedStateError:
                if read_manifest(root) == manifest:  # else its owner has committed meanwhile
                    raise

    @staticmethod
    def _opened(
        root: Path,
        manifest: Manifest,
        others: Sequence[Path],
        expect: Mapping[str, JSON] | None,
        lock: OwnerLock | None,
    ) -> "BlockStore":
        unlike = difference(plain(expect or {}), dict(manifest.identity))
        if unlike:
            raise WrongStateError(
                f"{root} holds the state of another run: {unlike[0]}: wanted {unlike[1]!r}, "
                f"found {unlike[2]!r}. Fix: use the settings that made it, or another folder."
            )
        blocks = [entry.block() for entry in manifest.blocks]
        spreads = {entry.block().name: entry.chunks() for entry in manifest.blocks}
        files, said, sums = ChunkFiles(find_drives(root, manifest, others), spreads), manifest.checksums, None
        if said:
            sums = Checksums.read(root, said, blocks, manifest.step)
            if lock:
                check_files(root, blocks, said.grain_bytes, manifest.step)
        store = BlockStore(files, manifest, lock, (), sums)
        store._check_files(both_slots=lock is not None)
        return store

    def add_scratch(self, blocks: Iterable[StoredBlock]) -> None:
        """Makes the files of scratch blocks, for a store that was opened; those of an earlier run are removed.

        Raises `DiskFullError` before anything is written.
        """
        blocks = list(blocks)
        self._writable()
        for block in blocks:
            check_block(block)
            assert block.scratch and block.name not in self._blocks, f"{block.name} is not a new scratch block"
        if not any(block.scratch for block in self._blocks.values()):
            self._files.remove_scratch()
        self._files.add(blocks, [drive.bytes_per_s for drive in self._manifest.drives] or [1.0])
        check_rooms(self._files.room(blocks))
        self._files.reserve(blocks)
        self._blocks.update({block.name: block for block in blocks})

    def read_extents(self, block: str, lo: int, hi: int) -> list[tuple[Extent, int, int]]:
        """Where the current bytes [lo, hi) of a block are: (extent, lo, hi), cut where slot or chunk changes."""
        found = self._checked(block, lo, hi)
        with self._mutex:
            if found.scratch:
                return self._files.extents(found, "scratch", lo, hi)
            slot = self._slots[block]
            return [
                extent
                for start, end, written in self._written[block].split(lo, hi)
                for extent in self._files.extents(found, OTHER[slot] if written else slot, start, end)
            ]

    def write_extents(self, block: str, lo: int, hi: int) -> list[tuple[Extent, int, int]]:
        """Where new bytes [lo, hi) of a block go: in the slot that the last commit does not name."""
        found = self._checked(block, lo, hi)
        self._writable()
        with self._mutex:
            slot = "scratch" if found.scratch else OTHER[self._slots[block]]
            return self._files.extents(found, slot, lo, hi)

    def sums(self, block: str, lo: int, data: Bytes) -> Sums | None:
        """Checksums of bytes that will be written from `lo` on, for `wrote`; None where there are none to be kept."""
        found = self._checked(block, lo, lo + len(data))
        return self._checksums.make(found, lo, data) if self._checksums and not found.scratch else None

    def wrote(self, block: str, lo: int, hi: int, data: Bytes | None = None, sums: Sums | None = None) -> None:
        """A write to `write_extents(block, lo, hi)` has completed: these bytes are the current ones from now on.

        data: those bytes, for their checksums, which are made here; without it the commit reads them back. sums: of
        more bytes around them, made before.
        """
        found = self._checked(block, lo, hi)
        if not found.scratch and lo < hi:
            if self._checksums:
                self._refuse(found, self._checksums.wrote(found, lo, hi, data, self._committed_bytes(found), sums))
            with self._mutex:
                self._written[block].add(lo, hi)

    def compare(self, block: str, lo: int, data: Bytes) -> None:
        """The current bytes of a block from `lo` on were read: compares checksums, the first time since it was opened.

        Raises `DamagedStateError`; for a reader that its owner's commits have overtaken, `WrongStateError`.
        """
        found = self._checked(block, lo, lo + len(data))
        if self._checksums and not found.scratch and data:
            self._refuse(found, self._checksums.compare(found, lo, data, self._committed_bytes(found)))

    def to_compare(self, block: str, lo: int, hi: int) -> bool:
        """True if `compare` would look at any of the bytes [lo, hi) of a block that were read."""
        found = self._checked(block, lo, hi)
        return bool(self._checksums and not found.scratch and self._checksums.pending(found, lo, hi))

    def commit(self, step: int, run: Mapping[str, JSON], sync: Callable[[Iterable[Path]], None]) -> None:
        """Makes all that was written since the last commit the committed state, at once and durably (I7).

        The caller has waited for every write and called `wrote` for it. `sync` makes completed writes to the given
        files durable (`IOEngine.sync`). Raises `ScheduleError` if a block is written only in part. If `sync` or the
        manifest fails, the last commit stays and the store is failed (I10).
        """
        self._writable()
        with self._mutex:
            changed = [self._blocks[name] for name, ranges in self._written.items() if ranges]
            for block in changed:
                if not self._written[block.name].covers(0, block.nbytes):
                    raise ScheduleError(
                        f"commit of step {step}: block {block.name} of {block.nbytes} bytes is written "
                        f"only in part: {list(self._written[block.name])}"
                    )
            slots = self._slots | {block.name: OTHER[self._slots[block.name]] for block in changed}
            old, manifest = self._manifest, self._next_manifest(step, run, slots)
            try:
                sync([path for block in changed for path in self._files.paths(block, slots[block.name])])
                if self._checksums:
                    entry = self._checksums.save(
                        self.root, changed, lambda block: self._bytes(block, slots[block.name])
                    )
                    manifest = manifest.model_copy(update={"checksums": entry})
                put_manifest(self.root, manifest)
                self._manifest, self._slots = manifest, slots
                if self._checksums:
                    self._checksums.committed(entry.slot)
                for block in changed:
                    self._written[block.name].clear()
                fsync_directory(self.root)
                self._point_links({block.name: slots[block.name] for block in changed})
            except BaseException as error:
                self._failure = error
                if isinstance(error, TieringError) or not isinstance(error, Exception):
                    raise
                full = getattr(error, "errno", None) in NO_ROOM
                unsure = "" if self._manifest is old else f" (a power cut may bring back step {old.step})"
                raise (DiskFullError if full else IOFailedError)(
                    f"commit of step {step} in {self.root} failed: {error}; {free_bytes(self.root)} bytes are free. "
                    f"The committed state is step {self.step}{unsure}. Fix: check the disk, then resume."
                ) from error

    def close(self) -> None:
        """Gives the store to the next owner; what was written since the last commit is forgotten."""
        if self._lock:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_manifest(self, step: int, run: Mapping[str, JSON], slots: Mapping[str, Slot]) -> Manifest:
        old = self._manifest
        return Manifest(
            format=old.format,
            step=step,
            created=old.created,
            updated=now(),
            identity=old.identity,
            run=plain(run),
            blocks=entries(self._files, [(self._blocks[name], slot) for name, slot in slots.items()]),
            store=old.store,
            drives=old.drives,
        )

    def _checked(self, name: str, lo: int, hi: int) -> StoredBlock:
        block = self._blocks[name]
        assert 0 <= lo <= hi <= block.nbytes and lo % PAGE == hi % PAGE == 0, f"{name}[{lo}:{hi}] of {block.nbytes}"
        return block

    def _writable(self) -> None:
        if self._lock is None:
            raise ScheduleError(f"{self.root} was opened read-only: nothing can be written or committed")
        if self._failure is not None:
            raise IOFailedError(
                f"{self.root}: an earlier commit failed ({self._failure}), so nothing is written any "
                f"more. The committed state is step {self.step}. Fix: check the disk, then resume."
            )

    def _bytes(self, block: StoredBlock, slot: Slot) -> Callable[[int, int], bytes]:
        return lambda lo, hi: self._files.read(block, slot, lo, hi)

    def _committed_bytes(self, block: StoredBlock) -> Callable[[int, int], bytes]:
        return self._bytes(block, self._slots[block.name])

    def _refuse(self, block: StoredBlock, wrong: Sequence[Mismatch]) -> None:
        if not wrong:
            return
        if self._lock is None and (last := read_manifest(self.root)) != self._manifest:
            raise WrongStateError(
                f"{self.root}: its run committed step {last.step} while step {self.step} was being read, whose bytes "
                f"may be overwritten by now. Fix: read again, or end the run first."
            )
        where = self._files.extents(block, self._slots[block.name], wrong[0].lo, wrong[0].hi)
        raise mismatch(block, wrong[0], [extent for extent, _, _ in where], self.step)

    def _check_files(self, *, both_slots: bool) -> None:
        for name, slot in self._slots.items():
            for letter in (slot, OTHER[slot]) if both_slots else (slot,):
                self._files.check(self._blocks[name], letter, self.step)

    def _point_links(self, slots: Mapping[str, Slot]) -> None:
        for name, slot in slots.items():
            self._files.point_links(self._blocks[name], slot, self.step)
