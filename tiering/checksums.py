"""Checksums of the durable blocks, one for each grain of bytes: made when bytes are written, compared when first read.

Scope: `Checksums`: those of a commit, those of what was written since, what is still to be compared; their file.
Not here: which slot bytes are in and when a commit happens (`tiering/store.py`), reading a whole commit
(`tiering/scrub.py`).

Grains count from the start of a block; the last one may be shorter. Every request of a plan starts and ends on a grain
or at the end of its block, so its bytes in memory are all that is looked at. What is off the grid is completed from the
files: slow, and right.

    root/.checksums.<slot>    32 bytes: b"xxh3_64\\n", grain, number of checksums, 0; then 8 bytes a grain, in the order
                              of the blocks in the manifest; zeros up to a whole page. All little-endian.

Both files are reserved when a store is made. A commit writes the one that the last commit does not name.
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiering.engine import Extent
from tiering.errors import DamagedStateError
from tiering.manifest import ITEM_NBYTES, OTHER, ChecksumsEntry, Slot, StoredBlock
from tiering.workload import pages

GRAIN_BYTES = 256 << 10
"""The smallest tile of a plan. A grain costs 8 bytes in each of the two files, and 18 in memory."""
MAGIC = b"xxh3_64\n"
HEAD = struct.Struct("<8sQQQ")

Bytes = bytes | bytearray | memoryview
Stored = Callable[[int, int], Bytes]
"""The bytes [lo, hi) of a block, read from its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Checksums of whole grains that will be written to a block from byte `lo` on, made before they are."""

    lo: int
    grain_bytes: int
    values: NDArray[np.uint64]

    def of(self, lo: int, nbytes: int) -> NDArray[np.uint64]:
        """Those of a part."""
        first = (lo - self.lo) // self.grain_bytes
        return self.values[first : first + -(-nbytes // self.grain_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The bytes [lo, hi) of a block are not those that were written."""

    lo: int
    hi: int
    wanted: int
    found: int


def checksum(data: Bytes) -> int:
    """64 bits of XXH3; the GIL is released meanwhile."""
    return int(xxhash.xxh3_64_intdigest(data))


def checksums_path(root: Path, slot: Slot) -> Path:
    return root / f".checksums.{slot}"


def grains(nbytes: int, grain_bytes: int, lo: int = 0, hi: int | None = None) -> list[tuple[int, int]]:
    """The grains of a block that the bytes [lo, hi) touch.

    >>> grains(10, 4), grains(10, 4, 5, 9)
    ([(0, 4), (4, 8), (8, 10)], [(4, 8), (8, 10)])
    """
    first = lo // grain_bytes * grain_bytes
    return [(at, min(at + grain_bytes, nbytes)) for at in range(first, nbytes if hi is None else hi, grain_bytes)]


def tensors_in(block: StoredBlock, lo: int, hi: int) -> list[str]:
    """Names of the tensors that have elements in the bytes [lo, hi) of a block."""
    found = []
    for spec in block.tensors:
        begin = spec.offset * ITEM_NBYTES
        end = begin + int(np.prod(spec.shape, dtype=object)) * ITEM_NBYTES
        if begin < hi and lo < end:
            found.append(spec.name)
    return found


class Checksums:
    """The checksums of a store. Any thread may call; two at once for one grain only where both read."""

    def __init__(
        self, blocks: Iterable[StoredBlock], grain_bytes: int, slot: Slot, sums: NDArray[np.uint64], *, compared: bool
    ) -> None:
        """sums: those of the commit whose file is in `slot`. compared: its bytes are known to have these sums."""
        self.grain_bytes = grain_bytes
        self._slot = slot
        self._first = _firsts(blocks, grain_bytes)
        self._committed = sums
        self._current = sums.copy()
        self._unknown = np.zeros(len(sums), dtype=bool)  # written since the commit, sum not known
        self._to_compare = np.full(len(sums), not compared)

    @classmethod
    def of_zeros(cls, blocks: Sequence[StoredBlock]) -> "Checksums":
        """Those of a new store."""
        sizes = [hi - lo for block in blocks for lo, hi in grains(block.nbytes, GRAIN_BYTES)]
        of_size = {size: checksum(bytes(size)) for size in set(sizes)}
        sums = np.array([of_size[size] for size in sizes], dtype=np.uint64)
        return cls(blocks, GRAIN_BYTES, "b", sums, compared=True)

    @classmethod
    def read(cls, root: Path, entry: ChecksumsEntry, blocks: Sequence[StoredBlock], step: int | None) -> "Checksums":
        """Those of the last commit. Raises `DamagedStateError`."""
        path = checksums_path(root, entry.slot)
        count = _count(blocks, entry.grain_bytes)
        wanted = file_bytes(count)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _damage(path, step, f"cannot be read: {error.strerror}: wanted {wanted} bytes") from error
        if len(data) != wanted:
            raise _damage(path, step, f"is damaged: wanted {wanted} bytes, found {len(data)}")
        found = f"{checksum(data):016x}"
        if found != entry.checksum:
            raise _damage(path, step, f"is damaged: its checksum is {found}, the manifest says {entry.checksum}")
        if HEAD.unpack_from(data) != (MAGIC, entry.grain_bytes, count, 0):
            raise _damage(path, step, f"does not fit the manifest: {HEAD.unpack_from(data)}")
        sums = np.frombuffer(data, dtype="<u8", count=count, offset=HEAD.size).astype(np.uint64)
        return cls(blocks, entry.grain_bytes, entry.slot, sums, compared=False)

    def compare(self, block: StoredBlock, lo: int, data: Bytes, stored: Stored) -> list[Mismatch]:
        """Bytes from `lo` on were read: those of them that nobody has compared yet are. stored: reads the commit."""
        wrong = []
        for begin, end in self.pending(block, lo, lo + len(data)):
            index = self._index(block, begin)
            inside = lo <= begin and end <= lo + len(data)
            found = checksum(data[begin - lo : end - lo] if inside else stored(begin, end))
            wanted = int(self._committed[index])
            if found == wanted:
                self._to_compare[index] = False
            else:
                wrong.append(Mismatch(lo=begin, hi=end, wanted=wanted, found=found))
        return wrong

    def pending(self, block: StoredBlock, lo: int, hi: int) -> list[tuple[int, int]]:
        """The grains of [lo, hi) that are still to be compared."""
        first, last = self._index(block, lo), self._index(block, hi - 1) + 1
        if not self._to_compare[first:last].any():
            return []
        touched = grains(block.nbytes, self.grain_bytes, lo, hi)
        return [grain for grain in touched if self._to_compare[self._index(block, grain[0])]]

    def make(self, block: StoredBlock, lo: int, data: Bytes) -> Sums | None:
        """Checksums of bytes that will be written from `lo` on; None where they do not fill their grains."""
        step, hi = self.grain_bytes, lo + len(data)
        if lo % step or (hi % step and hi != block.nbytes):
            return None
        whole = memoryview(data)
        sums = [checksum(whole[at : at + step]) for at in range(0, len(whole), step)]
        return Sums(lo=lo, grain_bytes=step, values=np.array(sums, dtype=np.uint64))

    def wrote(
        self, block: StoredBlock, lo: int, hi: int, data: Bytes | None, stored: Stored, sums: Sums | None = None
    ) -> list[Mismatch]:
        """The bytes [lo, hi) were written, and are `data` (None: not at hand). What the commit holds beside them in the
        same grains is compared first: nobody could do so later. sums: of these bytes, if they were made before.
        """
        if sums is None and data is not None:
            sums = self.make(block, lo, data)
        if sums is not None:
            values, first = sums.of(lo, hi - lo), self._index(block, lo)
            those = slice(first, first + len(values))
            self._current[those] = values
            self._to_compare[those] = False
            self._unknown[those] = False
            return []
        made: list[tuple[int, int | None]] = []
        wrong: list[Mismatch] = []
        for begin, end in grains(block.nbytes, self.grain_bytes, lo, hi):
            inside = lo <= begin and end <= hi
            if not inside and self.pending(block, begin, end):
                wrong += self.compare(block, begin, stored(begin, end), stored)
            known = None if data is None or not inside else checksum(data[begin - lo : end - lo])
            made.append((self._index(block, begin), known))
        for index, value in made:
            self._to_compare[index] = False
            self._unknown[index] = value is None
            if value is not None:
                self._current[index] = value
        return wrong

    def save(
        self,
        root: Path,
        changed: Iterable[StoredBlock] = (),
        stored: Callable[[StoredBlock], Stored] | None = None,
    ) -> ChecksumsEntry:
        """Writes the checksums of the next commit, durably, where the last one has not its own. stored: reads what was
        written to a changed block; only for grains that were written in parts, or by somebody without their bytes.
        """
        for block in changed if stored is not None and self._unknown.any() else ():
            assert stored is not None
            for lo, hi in grains(block.nbytes, self.grain_bytes):
                if self._unknown[self._index(block, lo)]:
                    self._current[self._index(block, lo)] = checksum(stored(block)(lo, hi))
        slot = OTHER[self._slot]
        return write_checksums(checksums_path(root, slot), slot, self.grain_bytes, self._current)

    def committed(self, slot: Slot) -> None:
        """What `save` wrote is the last commit now."""
        self._slot = slot
        self._committed = self._current.copy()
        self._unknown[:] = False

    def value(self, block: StoredBlock, lo: int) -> int:
        """What the commit says of the grain that starts at `lo`."""
        return int(self._committed[self._index(block, lo)])

    def _index(self, block: StoredBlock, at: int) -> int:
        return self._first[block.name] + at // self.grain_bytes


def mismatch(block: StoredBlock, wrong: Mismatch, extents: Iterable[Extent], step: int | None) -> DamagedStateError:
    """What a person reads when bytes are not those that were written; extents: where they are."""
    where = " and ".join(f"{extent.path} at offset {extent.offset}" for extent in extents)
    whose = ", ".join(tensors_in(block, wrong.lo, wrong.hi)) or "no tensor"
    return DamagedStateError(
        f"block {block.name}: {where}: {wrong.hi - wrong.lo} bytes of step {step} are damaged: their checksum is "
        f"{wrong.found:016x}, {wrong.wanted:016x} was written. They hold {whose}. Fix: check the disk (dmesg); resume "
        f"from an earlier commit (a copy of this folder), or the run must be restarted."
    )


def write_checksums(path: Path, slot: Slot, grain_bytes: int, sums: NDArray[np.uint64]) -> ChecksumsEntry:
    """Fills a reserved file and makes it durable; returns what the manifest says of it."""
    data = HEAD.pack(MAGIC, grain_bytes, len(sums), 0) + sums.astype("<u8").tobytes()
    data = data.ljust(file_bytes(len(sums)), b"\0")
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], done)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return ChecksumsEntry(slot=slot, algorithm="xxh3_64", grain_bytes=grain_bytes, checksum=f"{checksum(data):016x}")


def check_files(root: Path, blocks: Sequence[StoredBlock], grain_bytes: int, step: int | None) -> None:
    """Raises `DamagedStateError` if one of the two files is missing or has another size."""
    wanted = file_bytes(_count(blocks, grain_bytes))
    for slot in OTHER:
        path = checksums_path(root, slot)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            raise _damage(path, step, f"is missing: wanted {wanted} bytes, found 0") from None
        if found != wanted:
            raise _damage(path, step, f"is damaged: wanted {wanted} bytes, found {found}")


def reserved_bytes(blocks: Sequence[StoredBlock]) -> int:
    """What each of the two files of a new store takes."""
    return file_bytes(_count(blocks, GRAIN_BYTES))


def file_bytes(count: int) -> int:
    """A file of `count` checksums, in whole pages."""
    return pages(HEAD.size + 8 * count)


def _count(blocks: Iterable[StoredBlock], grain_bytes: int) -> int:
    return sum(-(-block.nbytes // grain_bytes) for block in blocks)


def _firsts(blocks: Iterable[StoredBlock], grain_bytes: int) -> dict[str, int]:
    firsts, count = {}, 0
    for block in blocks:
        firsts[block.name] = count
        count += -(-block.nbytes // grain_bytes)
    return firsts


def _damage(path: Path, step: int | None, what: str) -> DamagedStateError:
    return DamagedStateError(
        f"checksum file {path} of step {step} {what}. "
        f"Fix: check the disk (dmesg); resume from an earlier commit (a copy of this folder)."
    )
