"""Earlier commits of a store that are kept: taken, listed, opened, removed, and brought back.

Scope: `History` for the owner of a store; the folders of kept commits and `open_kept` for readers.
Not here: which commits are kept (`megatrain/keeping.py`), sharing bytes of files (`tiering/reflink.py`), the last
commit and its slots (`tiering/store.py`).

    folder/.history/step-00000100/...    on each drive: what the folder of a store has, but for a second slot and a lock

A kept commit is a store that can only be read. All of its blocks are in slot a. Its checksums are those of the commit.

    [nothing] --files made, filled, synced--> [leftover] --manifest, last--> [kept] --manifest unlinked--> [leftover]
                                                  |<------ files removed, now or when a run opens the store ------>|

What is kept never changes, and what the last commit needs is never touched: it is read, nothing else. A state with a
value that is not finite is not kept, and nothing is removed for it.
"""

import mmap
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.checksums import checksum, checksums_path, tensors_in
from tiering.chunk_files import NO_ROOM, ChunkFiles, reserve_file, sync_files
from tiering.drives import claim, told
from tiering.engine import IOEngine
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError, PlaceError, WrongStateError
from tiering.manifest import (
    FILE_NAME,
    ITEM_NBYTES,
    ChecksumsEntry,
    Manifest,
    Slot,
    StoredBlock,
    difference,
    fsync_directory,
    read_manifest,
    replace_manifest,
)
from tiering.place import free_bytes
from tiering.posix import PosixEngine
from tiering.reflink import clone
from tiering.store import BlockStore

HISTORY_NAME = ".history"
STEP_FOLDER = re.compile(r"step-(\d{8,})")
KEPT: Slot = "a"
PIECE_BYTES = 8 << 20
THREADS = 4
"""Each of them holds one piece in memory."""

Work = Callable[[StoredBlock, int, int, memoryview], bool]
"""Does something with the bytes [lo, hi) of a block, in a buffer of that size. True: no other piece is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What became of a commit that was to be kept. nbytes: on all drives, of which shared_bytes were not copied; both
    are 0 where it was kept before. removed: steps that made room for it. not_finite: why it was not kept, or empty.
    """

    step: int
    nbytes: int = 0
    shared_bytes: int = 0
    removed: tuple[int, ...] = ()
    not_finite: str = ""


def kept_folders(folders: Sequence[Path], step: int) -> list[Path]:
    """Where a kept commit is: a folder in each folder of its store."""
    return [folder / HISTORY_NAME / f"step-{step:08d}" for folder in folders]


def kept_steps(root: Path) -> list[int]:
    """The steps that are kept beside the store at `root`, the oldest first."""
    return sorted(step for step, path in _step_folders(root) if (path / FILE_NAME).is_file())


def is_kept(root: Path) -> bool:
    """Is this the root of a kept commit, where it was made?"""
    return root.parent.name == HISTORY_NAME and STEP_FOLDER.fullmatch(root.name) is not None


def open_kept(folders: Sequence[Path], step: int) -> BlockStore:
    """A kept commit of the store in these folders, the root's first, for reading only. Raises `WrongStateError` for a
    step that is not kept, and what `BlockStore.open` raises.
    """
    there = kept_steps(folders[0])
    if step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise WrongStateError(
            f"{folders[0]}: step {step} is not kept; those that are: {listed}. Fix: name one of them."
        )
    root, *others = kept_folders(folders, step)
    kept = BlockStore.open(root, others=others, read_only=True)
    if kept.step != step:
        kept.close()
        raise WrongStateError(f"{root} holds step {kept.step}, its name says {step}. Fix: give it its own name again.")
    return kept


class History:
    """The kept commits of a store, for the owner who has it open."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        for folder in store.folders:
            path = folder / HISTORY_NAME
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise PlaceError(f"{path} is no folder, so no commit can be kept there. Fix: remove it")

    def steps(self) -> list[int]:
        """Those that are kept, the oldest first."""
        return kept_steps(self._store.root)

    def tidy(self) -> list[Path]:
        """Removes what an interrupted `keep` or `remove` left; returns the folders."""
        kept, removed = set(self.steps()), []
        with self._failures("removing what is left of a kept commit"):
            for folder in self._store.folders:
                for path in [path for step, path in _step_folders(folder) if step not in kept]:
                    _remove_tree(path)
                    removed.append(path)
        return removed

    def keep(self, most: int) -> Kept:
        """Keeps the last commit, and `most` in all: the oldest others are removed first. All of it is read before that.

        Raises `DiskFullError`, `IOFailedError` or `DamagedStateError`; then the last commit is what it was, and nothing
        of the new one is left unless its removal fails too.
        """
        step = self._store.step
        assert step is not None and most > 0, f"keep {most} commits, the last one is {step}"
        with self._failures(f"keeping step {step}"), PosixEngine(THREADS) as engine:
            if self._holds(step):
                return Kept(step=step)
            not_finite = self._first_not_finite(engine)
            if not_finite:
                return Kept(step=step, not_finite=not_finite)
            others = [other for other in self.steps() if other != step]
            removed = others[: max(0, len(others) + 1 - most)]
            for other in [*removed, step]:  # of this step: a leftover, or other bits from before a restore
                self.remove(other)
            try:
                nbytes, shared_bytes = self._write(step, engine)
            except BaseException:
                with suppress(OSError):
                    self.remove(step)
                raise
        return Kept(step=step, nbytes=nbytes, shared_bytes=shared_bytes, removed=tuple(removed))

    def remove(self, step: int) -> None:
        """Removes a kept commit, if it is there: first, and durably, what makes it one."""
        root, *others = kept_folders(self._store.folders, step)
        with self._failures(f"removing the kept step {step}"):
            if root.is_symlink():
                return
            if (root / FILE_NAME).is_file():
                os.unlink(root / FILE_NAME)
                fsync_directory(root)
            for folder in (*others, root):
                if folder.is_dir() and not folder.is_symlink():
                    _remove_tree(folder)

    def restore(self, step: int) -> None:
        """Makes a kept commit the last commit, as any commit is made: at once, or not at all. It stays kept.

        Raises `WrongStateError` for a step that is not kept, `DamagedStateError` if its bytes are not those that were
        written.
        """
        store = self._store
        with self._failures(f"restoring step {step}"), PosixEngine(THREADS) as engine:
            with open_kept(store.folders, step) as kept:
                self._refuse_other(kept)

                def bring(block: StoredBlock, lo: int, hi: int, view: memoryview) -> bool:
                    for extent, begin, end in kept.read_extents(block.name, lo, hi):
                        engine.submit_read(extent, view[begin - lo : end - lo]).result()  # a part of this piece
                    kept.compare(block.name, lo, view)
                    for extent, begin, end in store.write_extents(block.name, lo, hi):
                        engine.submit_write(extent, view[begin - lo : end - lo]).result()  # a part of this piece
                    store.wrote(block.name, lo, hi, view)
                    return False

                self._in_pieces(bring)
                store.commit(step, kept.run, engine.sync)

    def _refuse_other(self, kept: BlockStore) -> None:
        unlike = difference(dict(self._store.identity), dict(kept.identity))
        mine = {name: block for name, block in self._store.blocks.items() if not block.scratch}
        if unlike or mine != dict(kept.blocks):
            what = f"{unlike[0]}: {unlike[1]!r} here, {unlike[2]!r} there" if unlike else "it has other blocks"
            raise WrongStateError(f"{kept.root} is of another run than {self._store.root}: {what}. Fix: another step.")

    def _holds(self, step: int) -> bool:
        """Is the last commit kept already, with the same bytes?"""
        root, mine = kept_folders(self._store.folders, step)[0], self._store.manifest
        if step not in self.steps() or mine.checksums is None:
            return False
        try:
            kept = read_manifest(root)
        except DamagedStateError:
            return False
        same_bytes = kept.checksums is not None and kept.checksums.checksum == mine.checksums.checksum
        return same_bytes and (kept.run, kept.identity) == (mine.run, mine.identity)

    def _first_not_finite(self, engine: IOEngine) -> str:
        """What of the last commit is no finite number; empty if all is. Compares checksums as any first read does."""
        files, slots = self._committed()
        found: list[str] = []

        def look(block: StoredBlock, lo: int, hi: int, view: memoryview) -> bool:
            for extent, begin, end in files.extents(block, slots[block.name], lo, hi):
                engine.submit_read(extent, view[begin - lo : end - lo]).result()  # a part of this piece
            self._store.compare(block.name, lo, view)
            finite = np.isfinite(np.frombuffer(view, dtype="<f4"))
            if finite.all():
                return False
            at = lo + ITEM_NBYTES * int(finite.argmin())
            tensors = ", ".join(tensors_in(block, at, at + ITEM_NBYTES)) or "no tensor"
            found.append(f"{tensors} in block {block.name} at byte {at}")
            return True

        self._in_pieces(look)
        return found[0] if found else ""

    def _write(self, step: int, engine: IOEngine) -> tuple[int, int]:
        """The files of the last commit again, then the manifest; returns bytes in all, and those that are shared."""
        manifest = self._store.manifest
        folders = kept_folders(self._store.folders, step)
        for folder in self._store.folders:
            if not (folder / HISTORY_NAME).is_dir():
                (folder / HISTORY_NAME).mkdir()
                fsync_directory(folder)
        folders[0].mkdir()
        name = uuid.uuid4().hex if len(folders) > 1 else ""
        for index, folder in enumerate(folders[1:], 1):
            claim(folder, name, index, folders[0])
        blocks = [entry.block() for entry in manifest.blocks]
        files = ChunkFiles(folders, {entry.block().name: entry.chunks() for entry in manifest.blocks})
        nbytes, shared_bytes = self._fill(blocks, files, engine)
        beside = [("metadata", path) for path in files.write_documents(blocks, manifest.format)]
        if manifest.checksums is not None:
            beside.append(("checksums", self._copy_checksums(folders[0], manifest.checksums)))
        files.make_links(blocks, KEPT)
        sync_files([*((f"block {b.name}", path) for b in blocks for path in files.paths(b, KEPT)), *beside])
        files.sync_folders()
        replace_manifest(folders[0], _manifest_of(manifest, folders, name))
        return nbytes, shared_bytes

    def _fill(self, blocks: Sequence[StoredBlock], files: ChunkFiles, engine: IOEngine) -> tuple[int, int]:
        """Chunk files with the bytes of the last commit: shared where a drive can, else reserved first, then copied."""
        source, slots = self._committed()
        nbytes, shared, shared_bytes, cannot = 0, set(), 0, set()
        for block in blocks:
            spread = files.spread_of(block)
            for drive, old, new in zip(
                spread.drives, source.paths(block, slots[block.name]), files.paths(block, KEPT), strict=True
            ):
                new.parent.mkdir(parents=True, exist_ok=True)
                nbytes += spread.chunk_bytes
                if drive not in cannot and clone(old, new):
                    shared.add(new)
                    shared_bytes += spread.chunk_bytes
                else:
                    cannot.add(drive)
                    reserve_file(new, f"block {block.name}", spread.chunk_bytes)

        def copy(block: StoredBlock, lo: int, hi: int, view: memoryview) -> bool:
            old_parts = source.extents(block, slots[block.name], lo, hi)
            for (old, begin, end), (new, _, _) in zip(old_parts, files.extents(block, KEPT, lo, hi), strict=True):
                if new.path not in shared:
                    part = view[begin - lo : end - lo]
                    engine.submit_read(old, part).result()  # a part of this piece
                    engine.submit_write(new, part).result()  # the same part
            return False

        if shared_bytes < nbytes:
            self._in_pieces(copy)
        return nbytes, shared_bytes

    def _copy_checksums(self, root: Path, entry: ChecksumsEntry) -> Path:
        source, target = checksums_path(self._store.root, entry.slot), checksums_path(root, KEPT)
        data = source.read_bytes()
        if f"{checksum(data):016x}" != entry.checksum:
            raise DamagedStateError(
                f"checksum file {source} of step {self._store.step} is damaged: its checksum is {checksum(data):016x}, "
                f"the manifest says {entry.checksum}. Fix: check the disk (dmesg)."
            )
        reserve_file(target, "checksums", len(data))
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:], done)
        finally:
            os.close(fd)
        return target

    def _committed(self) -> tuple[ChunkFiles, dict[str, Slot]]:
        """The files of the store, and the slot of every block in the last commit."""
        found = self._store.manifest.blocks
        files = ChunkFiles(self._store.folders, {entry.block().name: entry.chunks() for entry in found})
        return files, {entry.block().name: entry.slot for entry in found}

    def _in_pieces(self, work: Work) -> None:
        """Calls `work` for every durable block, in whole grains, on `THREADS` threads."""
        manifest = self._store.manifest
        grain_bytes = manifest.checksums.grain_bytes if manifest.checksums else PIECE_BYTES
        piece_bytes = max(1, PIECE_BYTES // grain_bytes) * grain_bytes
        pieces = _pieces([entry.block() for entry in manifest.blocks], piece_bytes)
        lock, ended = threading.Lock(), threading.Event()

        def share() -> None:
            buffer = memoryview(mmap.mmap(-1, piece_bytes))
            while not ended.is_set():
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                block, lo, hi = piece
                try:
                    if work(block, lo, hi, buffer[: hi - lo]):
                        ended.set()
                except BaseException:
                    ended.set()
                    raise

        with ThreadPoolExecutor(THREADS, thread_name_prefix="history") as pool:
            try:
                for done in [pool.submit(share) for _ in range(THREADS)]:
                    done.result()  # one thread's share of all pieces
            finally:
                ended.set()

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Turns what the system says into a typed error."""
        try:
            yield
        except OSError as error:
            where = Path(os.fsdecode(error.filename)) if error.filename else self._store.root
            raise (DiskFullError if error.errno in NO_ROOM else IOFailedError)(
                f"{what}: {where}: {error.strerror}; {free_bytes(where)} bytes are free. The committed "
                f"state is step {self._store.step}. Fix: make room or check the disk (dmesg), then resume."
            ) from error


def _manifest_of(manifest: Manifest, folders: Sequence[Path], name: str) -> Manifest:
    """What a kept commit says of itself. name: tells its drives from those of other kept commits."""
    places = [drive.model_copy(update={"path": told(f)}) for drive, f in zip(manifest.drives, folders, strict=False)]
    return manifest.model_copy(
        update={
            "blocks": tuple(entry.model_copy(update={"slot": KEPT}) for entry in manifest.blocks),
            "store": name,
            "drives": tuple(places),
            "checksums": manifest.checksums and manifest.checksums.model_copy(update={"slot": KEPT}),
        }
    )


def _pieces(blocks: Sequence[StoredBlock], piece_bytes: int) -> Iterator[tuple[StoredBlock, int, int]]:
    for block in blocks:
        for lo in range(0, block.nbytes, piece_bytes):
            yield block, lo, min(lo + piece_bytes, block.nbytes)


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of kept commits, and of what is left of them, in one folder of a store. Links are not followed."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder / HISTORY_NAME):
            path, match = folder / HISTORY_NAME / name, STEP_FOLDER.fullmatch(name)
            if match and path == kept_folders([folder], int(match[1]))[0] and path.is_dir() and not path.is_symlink():
                found.append((int(match[1]), path))
    return found


def _remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it; a link goes, what it points at stays."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(folder)
