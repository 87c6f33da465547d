"""The files of a store: where the chunks of a block are on its drives, and the links through which zarr finds them.

Scope: `ChunkFiles`: names, extents, room, reserving, checking, links, removing.
Not here: which slot is current and what a commit does (`tiering/store.py`), which drive a chunk is on
(`tiering/spread.py`), which folder is which drive (`tiering/drives.py`).

    one drive:  root/.slots/<slot>/<unit>/<kind>             <- root/<unit>/<kind>/c/0, a relative link
    several:    root/.slots/<slot>/<unit>/<kind>.<chunk>     <- root/<unit>/<kind>/c/<chunk>, a relative link
                folder/.slots/<slot>/<unit>/<kind>.<chunk>   <- root/<unit>/<kind>/c/<chunk>, an absolute link
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiering.drives import LOCK_NAME, SLOTS_NAME
from tiering.engine import Extent
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError
from tiering.manifest import Slot, StoredBlock, fsync_directory
from tiering.place import free_bytes
from tiering.spread import CHUNK_BYTES, Spread, spread
from tiering.zarr_layout import chunk_key, zarr_metadata

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SYNCS_AT_ONCE = 8


class ChunkFiles:
    """The chunk files of blocks in the folders of a store, the root's first."""

    def __init__(self, folders: Sequence[Path], spreads: Mapping[str, Spread]) -> None:
        self.folders = tuple(folders)
        self.root = self.folders[0]
        self._spreads = dict(spreads)

    @classmethod
    def over(cls, folders: Sequence[Path], rates: Sequence[float], blocks: Iterable[StoredBlock]) -> "ChunkFiles":
        """Those of new blocks, spread over drives of these rates."""
        files = cls(folders, {})
        files.add(blocks, rates)
        return files

    def add(self, blocks: Iterable[StoredBlock], rates: Sequence[float]) -> None:
        """More blocks, spread over drives of these rates."""
        blocks = list(blocks)
        found = spread([block.nbytes for block in blocks], rates, CHUNK_BYTES)
        self._spreads.update({block.name: one for block, one in zip(blocks, found, strict=True)})

    @property
    def several(self) -> bool:
        return len(self.folders) > 1

    def spread_of(self, block: StoredBlock) -> Spread:
        return self._spreads[block.name]

    def room(self, blocks: Iterable[StoredBlock]) -> dict[Path, int]:
        """Bytes that blocks take in each folder: two slots of each, one of scratch. Last chunks are whole files."""
        wanted = Counter(dict.fromkeys(self.folders, 0))
        for block in blocks:
            for drive, folder in enumerate(self.folders):
                wanted[folder] += self.spread_of(block).nbytes_on(drive) * (1 if block.scratch else 2)
        return dict(wanted)

    def paths(self, block: StoredBlock, slot: str) -> list[Path]:
        """The files of one slot of a block, in the order of its bytes."""
        return [self._path(block, slot, chunk) for chunk in range(len(self.spread_of(block).drives))]

    def extents(self, block: StoredBlock, slot: str, lo: int, hi: int) -> list[tuple[Extent, int, int]]:
        """The bytes [lo, hi) of one slot of a block, cut where the chunk changes: (extent, lo, hi)."""
        found = self.spread_of(block)
        return [
            (
                Extent(
                    path=self._path(block, slot, chunk),
                    offset=start - chunk * found.chunk_bytes,
                    nbytes=end - start,
                    block=block.name,
                ),
                start,
                end,
            )
            for chunk, start, end in found.cut(lo, hi)
        ]

    def read(self, block: StoredBlock, slot: str, lo: int, hi: int) -> bytes:
        """The bytes [lo, hi) of one slot of a block, through the page cache."""
        parts = []
        for extent, _, _ in self.extents(block, slot, lo, hi):
            with open(extent.path, "rb", buffering=0) as file:
                parts.append(os.pread(file.fileno(), extent.nbytes, extent.offset))
        return b"".join(parts)

    def write_layout(self, blocks: Sequence[StoredBlock], version: int, beside: Mapping[Path, int]) -> None:
        """Metadata, reserved files and links of a new store, all of it durable. beside: bytes of further files."""
        (self.root / SLOTS_NAME).mkdir()  # first: it tells an interrupted creation from a folder of somebody else
        documents = self.write_documents(blocks, version)
        self.reserve(blocks)
        for beside_path, nbytes in beside.items():
            reserve_file(beside_path, "checksums", nbytes)
        sync_files([*(("metadata", path) for path in documents), *(("checksums", path) for path in beside)])
        self.make_links(blocks, "a")
        self.sync_folders()

    def write_documents(self, blocks: Sequence[StoredBlock], version: int) -> list[Path]:
        """What zarr reads beside the chunks; the files, not yet durable."""
        chunk_bytes = {block.name: self.spread_of(block).chunk_bytes for block in blocks}
        documents = {self.root / name: text for name, text in zarr_metadata(blocks, chunk_bytes, version).items()}
        for path, text in documents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        return list(documents)

    def make_links(self, blocks: Iterable[StoredBlock], slot: Slot) -> None:
        """New links to the chunks of a slot."""
        for block in blocks:
            if not block.scratch:
                for chunk in range(len(self.spread_of(block).drives)):
                    link = self._link(block, chunk)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    os.symlink(self._target(block, slot, chunk), link)

    def sync_folders(self) -> None:
        """Makes all names durable, those of the folders themselves too."""
        for top in self.folders:
            for folder, _, _ in os.walk(top):
                fsync_directory(Path(folder))
            fsync_directory(top.parent)

    def reserve(self, blocks: Iterable[StoredBlock]) -> None:
        """New files for all slots, zeros, with their room taken now: a later write cannot meet a full disk (IO-09)."""
        made = []
        for block in blocks:
            for slot in ("scratch",) if block.scratch else ("a", "b"):
                for path in self.paths(block, slot):
                    reserve_file(path, f"block {block.name}", self.spread_of(block).chunk_bytes)
                    made.append((f"block {block.name}", path))
        sync_files(made)

    def check(self, block: StoredBlock, slot: Slot, step: int | None) -> None:
        """Raises `DamagedStateError` for a file of a slot that is missing or has another size."""
        wanted = self.spread_of(block).chunk_bytes
        for path in self.paths(block, slot):
            try:
                found = os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                raise _damage(block, path, step, f"is missing: wanted {wanted} bytes, found 0") from None
            if found != wanted:
                raise _damage(block, path, step, f"is damaged: wanted {wanted} bytes, found {found}")

    def point_links(self, block: StoredBlock, slot: Slot, step: int | None) -> None:
        """Points the chunks of a block at a slot; touches only links that point elsewhere."""
        for chunk in range(len(self.spread_of(block).drives)):
            link, target = self._link(block, chunk), self._target(block, slot, chunk)
            if os.path.islink(link) and os.readlink(link) == target:
                continue
            if os.path.lexists(link) and not os.path.islink(link):
                raise _damage(block, link, step, "is a file, not a link into .slots (a copy that followed links?)")
            if not link.parent.is_dir():
                raise _damage(block, link, step, "has no folder")
            temporary = self.root / ".link.new"
            temporary.unlink(missing_ok=True)  # a crash may have left it
            os.symlink(target, temporary)
            os.replace(temporary, link)

    def links_elsewhere(self, block: StoredBlock, slot: Slot) -> list[Path]:
        """Links of a block that do not point at a slot."""
        links = [(self._link(block, chunk), chunk) for chunk in range(len(self.spread_of(block).drives))]
        return [
            link
            for link, chunk in links
            if not link.is_symlink() or os.readlink(link) != self._target(block, slot, chunk)
        ]

    def remove_scratch(self) -> None:
        """Removes all scratch files, whoever made them."""
        for folder in self.folders:
            shutil.rmtree(folder / SLOTS_NAME / "scratch", ignore_errors=True)

    def _path(self, block: StoredBlock, slot: str, chunk: int) -> Path:
        folder = self.folders[self.spread_of(block).drives[chunk]]
        return folder / SLOTS_NAME / slot / block.unit / self._name(block, chunk)

    def _name(self, block: StoredBlock, chunk: int) -> str:
        return f"{block.kind}.{chunk}" if self.several else block.kind

    def _link(self, block: StoredBlock, chunk: int) -> Path:
        return self.root / block.unit / block.kind / chunk_key(chunk)

    def _target(self, block: StoredBlock, slot: Slot, chunk: int) -> str:
        if self.spread_of(block).drives[chunk]:
            return str(self._path(block, slot, chunk))
        return f"../../../{SLOTS_NAME}/{slot}/{block.unit}/{self._name(block, chunk)}"


def empty_folder(folder: Path) -> None:
    """Removes what a failed creation made; the folder itself and its lock stay for its error to be raised."""
    for name in os.listdir(folder):
        if name == LOCK_NAME:
            continue
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _damage(block: StoredBlock, path: Path, step: int | None, what: str) -> DamagedStateError:
    return DamagedStateError(
        f"block {block.name}: state file {path} of step {step} {what}. "
        f"Fix: resume from an earlier commit (a copy of this folder), or the run must be restarted."
    )


def reserve_file(path: Path, whose: str, nbytes: int) -> None:
    """A new file of zeros that has its room already. whose: what it belongs to, for errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise _refused(path, whose, f"reserving {nbytes} bytes", error) from error
    finally:
        os.close(fd)


def sync_files(files: Iterable[tuple[str, Path]]) -> None:
    """Makes files durable: (whose, path) of each."""
    with ThreadPoolExecutor(SYNCS_AT_ONCE) as pool:  # a file system makes several files durable in one go
        for done in [pool.submit(_sync_one, whose, path) for whose, path in files]:
            done.result()  # the fsync of one file


def _sync_one(whose: str, path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise _refused(path, whose, "flushing the new bytes", error) from error
    finally:
        os.close(fd)


def _refused(path: Path, whose: str, what: str, error: OSError) -> IOFailedError:
    return (DiskFullError if error.errno in NO_ROOM else IOFailedError)(
        f"{whose}: {what} for {path} failed: {error.strerror}; "
        f"{free_bytes(path)} bytes are free. Fix: make room, or name another disk."
    )
