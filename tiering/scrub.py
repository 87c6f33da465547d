"""Reads a whole commit and compares every checksum: all that is wrong with a store, not only the first of it.

Scope: `scrub`: sizes, bytes and checksums of the committed slot, the spare slot's sizes, metadata and links for zarr.
Not here: comparing while a run reads (`tiering/store.py`), words and exit codes (`megatrain/check.py`).

Nothing is written and no lock is taken. A run that goes on and commits meanwhile is noticed.
"""

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tiering.checksums import Checksums, check_files, checksums_path, tensors_in
from tiering.chunk_files import ChunkFiles
from tiering.drives import find_drives
from tiering.engine import IOEngine
from tiering.errors import DamagedStateError, IOFailedError, WrongStateError
from tiering.manifest import FILE_NAME, OTHER, Slot, StoredBlock, read_manifest
from tiering.posix import PosixEngine
from tiering.zarr_layout import zarr_metadata

PIECE_BYTES = 8 << 20
THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes of a file that are not as committed. block: empty for a file that belongs to no block. wanted, found: the
    checksums of a grain, empty where something else is wrong, which `what` says.
    """

    block: str
    path: Path
    offset: int
    nbytes: int
    what: str
    tensors: tuple[str, ...] = ()
    wanted: str = ""
    found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """What was found. links: those that do not point at the commit; opening the store for a run re-points them."""

    root: Path
    step: int | None
    blocks: int
    read_bytes: int
    checksums: bool
    damage: tuple[Damage, ...]
    links: tuple[Path, ...]


Piece = tuple[StoredBlock, int, int]


class _Scrub:
    """One reading of a commit."""

    def __init__(self, root: Path, others: Sequence[Path], advance: Callable[[int], None], *, spare: bool) -> None:
        self.root = root
        self._spare = spare
        read_manifest(root)  # a folder that is no store is refused as that
        self._written = self._stamp()
        self.manifest = manifest = read_manifest(root)
        self.blocks = [entry.block() for entry in manifest.blocks]
        self.slots: dict[str, Slot] = {
            block.name: entry.slot for block, entry in zip(self.blocks, manifest.blocks, strict=True)
        }
        spreads = {block.name: entry.chunks() for block, entry in zip(self.blocks, manifest.blocks, strict=True)}
        self.files = ChunkFiles(find_drives(root, manifest, others), spreads)
        self.damage: list[Damage] = []
        self.read_bytes = 0
        self.sums = self._checksums()
        self._advance = advance
        self._lock = threading.Lock()
        self._bad: set[Path] = set()
        self._stopped = False

    def run(self, engine: IOEngine) -> Scrubbed:
        for block in self.blocks:
            self._sizes(block)
        self._metadata()
        grain = self.sums.grain_bytes if self.sums else PIECE_BYTES
        pieces = self._pieces(max(1, PIECE_BYTES // grain) * grain)
        try:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="scrub") as pool:
                try:
                    for done in [pool.submit(self._read_pieces, pieces, engine) for _ in range(THREADS)]:
                        done.result()  # one thread's share of all pieces
                finally:
                    self._stopped = True
        finally:
            self.refuse_newer()
        links = [link for block in self.blocks for link in self._links(block)]
        order = {block.name: number for number, block in enumerate(self.blocks)}
        found = sorted(self.damage, key=lambda damage: (order.get(damage.block, -1), str(damage.path), damage.offset))
        return Scrubbed(
            root=self.root,
            step=self.manifest.step,
            blocks=len(self.blocks),
            read_bytes=self.read_bytes,
            checksums=self.manifest.checksums is not None,
            damage=tuple(found),
            links=tuple(links),
        )

    def refuse_newer(self) -> None:
        """Raises `WrongStateError` if there was a commit since: what was read may be of no commit at all."""
        if self._stamp() == self._written:
            return
        last = read_manifest(self.root)
        if last != self.manifest:
            raise WrongStateError(
                f"{self.root}: its run committed step {last.step} while step {self.manifest.step} was being read, "
                f"whose bytes may be overwritten by now. Fix: end the run first (Ctrl-C commits), then check again."
            )

    def _stamp(self) -> tuple[int, int]:
        found = os.stat(self.root / FILE_NAME)
        return found.st_ino, found.st_mtime_ns

    def _checksums(self) -> Checksums | None:
        said = self.manifest.checksums
        if said is None:
            return None
        sums: Checksums | None = None
        try:
            sums = Checksums.read(self.root, said, self.blocks, self.manifest.step)
            if self._spare:
                check_files(self.root, self.blocks, said.grain_bytes, self.manifest.step)
        except DamagedStateError as error:
            path = checksums_path(self.root, said.slot if sums is None else OTHER[said.slot])
            self.damage.append(Damage(block="", path=path, offset=0, nbytes=0, what=str(error)))
        return sums

    def _sizes(self, block: StoredBlock) -> None:
        committed = self.slots[block.name]
        wanted = self.files.spread_of(block).chunk_bytes
        for slot in (committed, OTHER[committed]) if self._spare else (committed,):
            for chunk, path in enumerate(self.files.paths(block, slot)):
                found = os.stat(path).st_size if path.is_file() else None
                if found == wanted:
                    continue
                what = "is missing" if found is None else f"has {found} bytes, wanted {wanted}"
                at = min(found or 0, wanted)
                names: list[str] = []
                if slot == committed:
                    self._bad.add(path)
                    names = tensors_in(block, chunk * wanted + at, min((chunk + 1) * wanted, block.nbytes))
                else:
                    what += "; it holds nothing that is committed, but the run cannot go on without it"
                self.damage.append(
                    Damage(block=block.name, path=path, offset=at, nbytes=wanted - at, what=what, tensors=tuple(names))
                )

    def _pieces(self, piece_bytes: int) -> Iterator[Piece]:
        for block in self.blocks:
            for lo in range(0, block.nbytes, piece_bytes):
                yield block, lo, min(lo + piece_bytes, block.nbytes)

    def _read_pieces(self, pieces: Iterator[Piece], engine: IOEngine) -> None:
        buffer = memoryview(mmap.mmap(-1, max(PIECE_BYTES, self.sums.grain_bytes if self.sums else 0)))
        while not self._stopped:
            with self._lock:
                piece = next(pieces, None)
                self.refuse_newer()
            if piece is None:
                return
            self._read_piece(piece, engine, buffer)

    def _read_piece(self, piece: Piece, engine: IOEngine, buffer: memoryview) -> None:
        block, lo, hi = piece
        parts = self.files.extents(block, self.slots[block.name], lo, hi)
        found: list[Damage] = []
        whole = True
        for extent, begin, end in parts:
            if extent.path in self._bad:
                whole = False
                continue
            try:
                engine.submit_read(extent, buffer[begin - lo : end - lo]).result()  # one part of this piece
            except IOFailedError as error:
                whole = False
                found.append(
                    Damage(
                        block=block.name,
                        path=extent.path,
                        offset=extent.offset,
                        nbytes=extent.nbytes,
                        what=str(error),
                        tensors=tuple(tensors_in(block, begin, end)),
                    )
                )
        if whole and self.sums:
            found += self._compared(block, lo, buffer[: hi - lo])
        with self._lock:
            self.damage += found
            self.read_bytes += hi - lo if whole else 0
            self._advance(hi - lo)

    def _compared(self, block: StoredBlock, lo: int, data: memoryview) -> Iterator[Damage]:
        assert self.sums is not None
        for wrong in self.sums.compare(block, lo, data, lambda begin, end: b""):
            for extent, begin, end in self.files.extents(block, self.slots[block.name], wrong.lo, wrong.hi):
                yield Damage(
                    block=block.name,
                    path=extent.path,
                    offset=extent.offset,
                    nbytes=extent.nbytes,
                    what="holds other bytes than were written",
                    tensors=tuple(tensors_in(block, begin, end)),
                    wanted=f"{wrong.wanted:016x}",
                    found=f"{wrong.found:016x}",
                )

    def _metadata(self) -> None:
        """The documents that zarr reads: nothing of ours depends on them."""
        chunk_bytes = {block.name: self.files.spread_of(block).chunk_bytes for block in self.blocks}
        for name, document in zarr_metadata(self.blocks, chunk_bytes, self.manifest.format).items():
            path = self.root / name
            try:
                same = json.loads(path.read_bytes()) == json.loads(document)
                what = "says something else of the array than the manifest; a run does not read it, zarr does"
            except (OSError, ValueError, RecursionError) as error:
                same, what = False, f"cannot be read ({error}); a run does not read it, zarr does"
            if not same:
                self.damage.append(Damage(block="", path=path, offset=0, nbytes=len(document), what=what))

    def _links(self, block: StoredBlock) -> Iterable[Path]:
        for link in self.files.links_elsewhere(block, self.slots[block.name]):
            if (link.exists() and not link.is_symlink()) or not link.parent.is_dir():
                what = "is no link into .slots, so the run cannot go on (a copy that followed links?)"
                self.damage.append(Damage(block=block.name, path=link, offset=0, nbytes=0, what=what))
            else:
                yield link


def scrub(
    root: Path,
    others: Sequence[Path] = (),
    *,
    advance: Callable[[int], None] = lambda nbytes: None,
    spare: bool = True,
) -> Scrubbed:
    """Everything that is wrong with the last commit of the store at `root`; takes `THREADS` times 8 MiB of memory.

    advance: told of bytes as they are read. spare: False for a kept commit, which has one slot. Raises what
    `read_manifest` and `find_drives` raise, and `WrongStateError` if the store's run commits meanwhile.
    """
    root = Path(os.path.abspath(root))
    scrub_ = _Scrub(root, [Path(os.path.abspath(folder)) for folder in others], advance, spare=spare)
    with PosixEngine(THREADS) as engine:
        return scrub_.run(engine)


def committed_bytes(root: Path) -> int:
    """What `scrub` will read."""
    return sum(entry.nbytes for entry in read_manifest(root).blocks)
