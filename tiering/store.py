"""The NVMe tier: live training state as a plain Zarr v3 hierarchy with crash-consistent commits.

Scope: `BlockStore`: where a block's bytes are and may be written, creation with all room reserved, commit, recovery.
Not here: transfers (`tiering/engine.py`), the manifest file (`tiering/manifest.py`), zarr's metadata
(`tiering/zarr_layout.py`), what a path stands on (`tiering/place.py`), one owner at a time (`tiering/lock.py`).

    root/zarr.json  root/<unit>/zarr.json  root/<unit>/<kind>/zarr.json     metadata, written once
    root/<unit>/<kind>/c/0 -> ../../../.slots/<committed slot>/<unit>/<kind>
    root/.slots/a/...  root/.slots/b/...  root/.slots/scratch/...           preallocated files, written by the engine
    root/manifest.json                                                     the last commit
    root/.lock                                                             its owner

A block between two commits:      [committed slot] --wrote(some)--> [both slots: split] --wrote(all)--> [other slot]
and `commit` turns the other slot into the committed one, for every wholly written block at once:
sync data (I7) -> write, sync, rename the manifest -> flip slots in memory -> re-point the links.
Since the last commit a block is written only to the slot that the commit does not name. A commit that fails leaves
the store failed: it can be read, nothing is written or committed until it is opened again (I10).
Opening neither creates nor deletes (I9), with one exception: links that a crash left behind the manifest are
re-pointed. Reading through zarr sees the committed bytes; what it has open stays unchanged until the commit after next.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from tiering.engine import Extent
from tiering.errors import (
    DamagedStateError,
    DiskFullError,
    IOFailedError,
    PlaceError,
    ScheduleError,
    TieringError,
    WrongStateError,
)
from tiering.lock import OwnerLock
from tiering.manifest import (
    FILE_NAME,
    JSON,
    BlockEntry,
    Manifest,
    Slot,
    StoredBlock,
    TensorSpec,
    check_block,
    difference,
    fsync_directory,
    plain,
    read_manifest,
    replace_manifest,
)
from tiering.place import check_place, check_room, free_bytes
from tiering.ranges import RangeSet
from tiering.workload import PAGE
from tiering.zarr_layout import CHUNK, zarr_metadata

__all__ = ["JSON", "BlockStore", "StoredBlock", "TensorSpec", "check_place", "has_state"]

LOCK_NAME = ".lock"
SLOTS_NAME = ".slots"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OTHER: Mapping[Slot, Slot] = {"a": "b", "b": "a"}


def has_state(root: Path) -> bool:
    """Does `root` hold a store? It may have no commit yet: `BlockStore.open(root).step` says."""
    return (root / FILE_NAME).is_file()


class BlockStore:
    """An open store. Made by `create` or `open`; a context manager. Its methods may be called from any thread."""

    def __init__(self, root: Path, manifest: Manifest, lock: OwnerLock | None, scratch: Sequence[StoredBlock]) -> None:
        self.root = root
        self._lock = lock
        self._manifest = manifest
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
    def step(self) -> int | None:
        """The step of the last commit; None before the first."""
        return self._manifest.step

    @property
    def run(self) -> Mapping[str, JSON]:
        """What the last commit was given; empty before the first."""
        return self._manifest.run

    @property
    def identity(self) -> Mapping[str, JSON]:
        """What `create` was given."""
        return self._manifest.identity

    @staticmethod
    def nbytes_on_disk(blocks: Iterable[StoredBlock]) -> int:
        """The room that a store of these blocks takes: two slots of each, one of scratch."""
        return sum(block.nbytes * (1 if block.scratch else 2) for block in blocks)

    @staticmethod
    def create(root: Path, blocks: Iterable[StoredBlock], *, identity: Mapping[str, JSON]) -> "BlockStore":
        """A new store in a folder that is missing or empty, all its room reserved, all its bytes zero.

        Raises `PlaceError` (also for a folder with content), `DiskFullError` before anything is written, and
        `ValueError` for blocks that are no blocks. If it fails half way, it removes what it made.
        """
        root = Path(os.path.abspath(root))
        blocks = list(blocks)
        for block in blocks:
            check_block(block)
        assert len({block.name for block in blocks}) == len(blocks), "two blocks have one name"
        check_place(root)
        _refuse_content(root, but=(LOCK_NAME,))
        check_room(root, BlockStore.nbytes_on_disk(blocks))
        now = _now()
        entries = tuple(BlockEntry.of(block, "a") for block in blocks if not block.scratch)
        manifest = Manifest(step=None, created=now, updated=now, identity=plain(identity), run={}, blocks=entries)
        root.mkdir(parents=True, exist_ok=True)
        lock = OwnerLock(root / LOCK_NAME, create=True)
        try:
            _refuse_content(root, but=(LOCK_NAME,))  # another process may have been first
            try:
                _write_layout(root, blocks)
                replace_manifest(root, manifest)
            except BaseException:
                _empty(root)
                raise
        except BaseException:
            lock.close()
            raise
        return BlockStore(root, manifest, lock, [block for block in blocks if block.scratch])

    @staticmethod
    def open(root: Path, *, expect: Mapping[str, JSON] | None = None, read_only: bool = False) -> "BlockStore":
        """The store at `root` as its last commit left it; neither creates nor deletes (I9). No scratch blocks yet.

        `expect`: items of the identity that must be equal, else `WrongStateError` names the first that is not. A file
        that is missing or short, or a torn manifest: `DamagedStateError`. In use: `StoreLockedError`, except
        read-only, which takes no lock and may be overtaken by its owner's commits.
        """
        root = Path(os.path.abspath(root))
        read_manifest(root)  # a folder that is no store is refused as that, not for want of a lock
        lock = None if read_only else OwnerLock(root / LOCK_NAME, create=False)
        try:
            manifest = read_manifest(root)
            unlike = difference(plain(expect or {}), dict(manifest.identity))
            if unlike:
                raise WrongStateError(
                    f"{root} holds the state of another run: {unlike[0]}: wanted {unlike[1]!r}, "
                    f"found {unlike[2]!r}. Fix: use the settings that made it, or another folder."
                )
            store = BlockStore(root, manifest, lock, ())
            store._check_files(both_slots=not read_only)
            if not read_only:
                store._point_links(store._slots)
        except BaseException:
            if lock:
                lock.close()
            raise
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
        old = self.root / SLOTS_NAME / "scratch"
        if not any(block.scratch for block in self._blocks.values()):
            shutil.rmtree(old, ignore_errors=True)
        check_room(self.root, BlockStore.nbytes_on_disk(blocks))
        for block in blocks:
            _reserve(self._file(block, "scratch"), block)
            self._blocks[block.name] = block

    def read_extents(self, block: str, lo: int, hi: int) -> list[tuple[Extent, int, int]]:
        """Where the current bytes [lo, hi) of a block are: (extent, lo, hi), cut where the slot changes."""
        found = self._checked(block, lo, hi)
        with self._mutex:
            if found.scratch:
                return [self._extent(found, "scratch", lo, hi)] if lo < hi else []
            slot = self._slots[block]
            return [
                self._extent(found, OTHER[slot] if written else slot, start, end)
                for start, end, written in self._written[block].split(lo, hi)
            ]

    def write_extents(self, block: str, lo: int, hi: int) -> list[tuple[Extent, int, int]]:
        """Where new bytes [lo, hi) of a block go: in the slot that the last commit does not name."""
        found = self._checked(block, lo, hi)
        self._writable()
        with self._mutex:
            slot = "scratch" if found.scratch else OTHER[self._slots[block]]
            return [self._extent(found, slot, lo, hi)] if lo < hi else []

    def wrote(self, block: str, lo: int, hi: int) -> None:
        """A write to `write_extents(block, lo, hi)` has completed: these bytes are the current ones from now on."""
        if not self._checked(block, lo, hi).scratch:
            with self._mutex:
                self._written[block].add(lo, hi)

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
            entries = tuple(BlockEntry.of(self._blocks[name], slot) for name, slot in slots.items())
            old = self._manifest
            manifest = Manifest(
                step=step, created=old.created, updated=_now(), identity=old.identity, run=plain(run), blocks=entries
            )
            try:
                sync([self._file(block, slots[block.name]) for block in changed])
                replace_manifest(self.root, manifest)
                self._manifest, self._slots = manifest, slots
                for block in changed:
                    self._written[block.name].clear()
                self._point_links({block.name: slots[block.name] for block in changed})
            except BaseException as error:
                self._failure = error
                if isinstance(error, TieringError) or not isinstance(error, Exception):
                    raise
                full = getattr(error, "errno", None) in NO_ROOM
                raise (DiskFullError if full else IOFailedError)(
                    f"commit of step {step} in {self.root} failed: {error}; {free_bytes(self.root)} bytes are free. "
                    f"The committed state is step {self.step}. Fix: check the disk, then resume."
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

    def _file(self, block: StoredBlock, slot: str) -> Path:
        return _slot_file(self.root, block, slot)

    def _extent(self, block: StoredBlock, slot: str, lo: int, hi: int) -> tuple[Extent, int, int]:
        return Extent(path=self._file(block, slot), offset=lo, nbytes=hi - lo, block=block.name), lo, hi

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

    def _check_files(self, *, both_slots: bool) -> None:
        for name, slot in self._slots.items():
            block = self._blocks[name]
            for letter in (slot, OTHER[slot]) if both_slots else (slot,):
                path = self._file(block, letter)
                try:
                    found = os.stat(path).st_size
                except (FileNotFoundError, NotADirectoryError):
                    raise DamagedStateError(
                        self._damage(block, path, f"is missing: wanted {block.nbytes} bytes, found 0")
                    ) from None
                if found != block.nbytes:
                    raise DamagedStateError(
                        self._damage(block, path, f"is damaged: wanted {block.nbytes} bytes, found {found}")
                    )

    def _damage(self, block: StoredBlock, path: Path, what: str) -> str:
        return (
            f"block {block.name}: state file {path} of step {self.step} {what}. "
            f"Fix: resume from an earlier commit (a copy of this folder), or the run must be restarted."
        )

    def _point_links(self, slots: Mapping[str, Slot]) -> None:
        """Points the chunk of each block at its slot; touches only links that point elsewhere."""
        for name, slot in slots.items():
            block = self._blocks[name]
            link = self.root / block.unit / block.kind / CHUNK
            target = _link_target(block, slot)
            if os.path.islink(link) and os.readlink(link) == target:
                continue
            if os.path.lexists(link) and not os.path.islink(link):
                raise DamagedStateError(
                    self._damage(block, link, "is a file, not a link into .slots (a copy that followed links?)")
                )
            if not link.parent.is_dir():
                raise DamagedStateError(self._damage(block, link, "has no folder"))
            temporary = self.root / ".link.new"
            temporary.unlink(missing_ok=True)  # a crash may have left it
            os.symlink(target, temporary)
            os.replace(temporary, link)


def _slot_file(root: Path, block: StoredBlock, slot: str) -> Path:
    return root / SLOTS_NAME / slot / block.unit / block.kind


def _link_target(block: StoredBlock, slot: Slot) -> str:
    return f"../../../{SLOTS_NAME}/{slot}/{block.unit}/{block.kind}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refuse_content(root: Path, *, but: tuple[str, ...]) -> None:
    content = sorted(set(os.listdir(root)) - set(but)) if root.exists() else []
    if FILE_NAME in content:
        raise PlaceError(f"{root} already holds a store. Fix: resume it, or name another folder.")
    if SLOTS_NAME in content:
        raise PlaceError(f"{root} holds a store whose creation was interrupted. Fix: remove that folder.")
    if content:
        raise PlaceError(
            f"{root} is not empty ({len(content)} entries, {content[0]!r} first). Fix: name a new or an empty folder."
        )


def _reserve(path: Path, block: StoredBlock) -> None:
    """A new file with its room taken now, so that a later write cannot meet a full disk (IO-09)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, block.nbytes)
        os.fsync(fd)
    except OSError as error:
        raise (DiskFullError if error.errno in NO_ROOM else IOFailedError)(
            f"block {block.name}: reserving {block.nbytes} bytes for {path} failed: {error.strerror}; "
            f"{free_bytes(path)} bytes are free. Fix: make room, or name another disk."
        ) from error
    finally:
        os.close(fd)


def _write_layout(root: Path, blocks: Sequence[StoredBlock]) -> None:
    (root / SLOTS_NAME).mkdir()  # first: it tells an interrupted creation from a folder of somebody else
    for path, document in zarr_metadata(blocks).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(document)
    for block in blocks:
        for slot in ("scratch",) if block.scratch else ("a", "b"):
            _reserve(_slot_file(root, block, slot), block)
        if not block.scratch:
            link = root / block.unit / block.kind / CHUNK
            link.parent.mkdir(parents=True)
            os.symlink(_link_target(block, "a"), link)
    for folder, _, _ in os.walk(root):
        fsync_directory(Path(folder))
    fsync_directory(root.parent)


def _empty(root: Path) -> None:
    """Removes what a failed `create` made; the folder itself and its lock stay for the caller's error to be raised."""
    for name in os.listdir(root):
        if name == LOCK_NAME:
            continue
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
