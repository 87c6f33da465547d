"""How the bytes of blocks are spread over several drives: equal chunks, each whole on one drive.

Scope: the size of a block's chunks, the drive of each of them; pure values.
Not here: files and links (`chunk_files.py`), the folders on the drives (`drives.py`), how fast a drive is
(`measure.py`).

Smooth weighted round-robin: each drive earns its share of every chunk, and the drive that has earned most takes it. So
a drive with a third of all rates gets every third chunk, and neighbours lie on different drives where they can. Tiles
of a unit's weights and moments move together: therefore the first drive is rotated from block to block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiering.hardware import READ_SHARE, Drive
from tiering.workload import PAGE

CHUNK_BYTES = 8 << 20
"""As large as the requests that drives are measured with: smaller ones would not reach a drive's rate."""
MOST_CHUNKS = 64
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A drive is one letter of a block's map, so 36 drives are the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where a block's chunks are: chunk n holds the bytes from n * chunk_bytes, on drive drives[n]."""

    chunk_bytes: int
    drives: tuple[int, ...]

    def cut(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """The chunks of the bytes [lo, hi), in order: (chunk, lo, hi), each range within its chunk.

        >>> list(Spread(chunk_bytes=4096, drives=(0, 1, 0)).cut(2048, 9000))
        [(0, 2048, 4096), (1, 4096, 8192), (2, 8192, 9000)]
        """
        while lo < hi:
            chunk = lo // self.chunk_bytes
            end = min(hi, (chunk + 1) * self.chunk_bytes)
            yield chunk, lo, end
            lo = end

    def nbytes_on(self, drive: int) -> int:
        """Bytes of the chunk files of one copy of the block on a drive; the last chunk is a whole one."""
        return self.chunk_bytes * self.drives.count(drive)

    @property
    def text(self) -> str:
        """The drives, a letter a chunk."""
        return "".join(DIGITS[drive] for drive in self.drives)


def whole(nbytes: int) -> Spread:
    """A block in one chunk on the first drive."""
    return Spread(chunk_bytes=nbytes, drives=(0,))


def chunk_size(nbytes: int, grain: int = CHUNK_BYTES) -> int:
    """Bytes of a chunk of a block of `nbytes`: the grain, or the multiple of it that leaves at most `MOST_CHUNKS`.

    A block of less than two chunks stays whole.

    >>> MiB = 1 << 20
    >>> [chunk_size(size * MiB) // MiB for size in (1, 15, 16, 100, 512, 513, 4000)]
    [1, 15, 8, 8, 8, 16, 64]
    """
    assert nbytes > 0 and nbytes % PAGE == grain % PAGE == 0, f"{nbytes} bytes in chunks of {grain}"
    return nbytes if nbytes < 2 * grain else grain * -(-nbytes // (MOST_CHUNKS * grain))


def spread(sizes: Sequence[int], rates: Sequence[float], grain: int = CHUNK_BYTES) -> list[Spread]:
    """The spread of blocks of these sizes over drives of these rates (bytes/s, or anything in proportion to them).

    >>> MiB = 1 << 20
    >>> [found.text for found in spread([40 * MiB, 40 * MiB, 32 * MiB, 4 * MiB, 4 * MiB], [1e9, 1e9])]
    ['01010', '10101', '0101', '0', '1']
    >>> [found.text for found in spread([48 * MiB] * 3, [2e9, 1e9])]
    ['010010', '100010', '010010']
    >>> [found.text for found in spread([48 * MiB], [2e9])]
    ['0']
    """
    assert rates and min(rates) > 0, f"rates of drives: {rates}"
    if len(rates) == 1:
        return [whole(nbytes) for nbytes in sizes]
    shares = [rate / sum(rates) for rate in rates]
    small = _Turns(shares)
    striped: dict[int, _Turns] = {}  # by chunk size: equal chunks can be counted instead of weighed
    found = []
    for nbytes in sizes:
        chunk_bytes = chunk_size(nbytes, grain)
        if chunk_bytes == nbytes:
            found.append(Spread(chunk_bytes=nbytes, drives=(small.next(nbytes),)))
            continue
        turns = striped.setdefault(chunk_bytes, _Turns(shares))
        drives = [turns.first()]
        while len(drives) * chunk_bytes < nbytes:
            drives.append(turns.next(after=drives[-1]))
        found.append(Spread(chunk_bytes=chunk_bytes, drives=tuple(drives)))
    return found


class _Turns:
    """Whose turn it is. `_earned`, in units of what is taken, sums to 0."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._earned = [0.0] * len(shares)
        self._firsts = [0] * len(shares)

    def next(self, weight: float = 1.0, *, after: int | None = None) -> int:
        """The drive that takes the next `weight`; not the drive `after`, unless that has more than half of all."""
        again = after is None or self._shares[after] > 0.5
        drives = [drive for drive in range(len(self._shares)) if again or drive != after]
        return self._take(max(drives, key=lambda drive: self._claim(drive, weight)), weight)

    def first(self) -> int:
        """The drive of the first chunk of a block: of those that have earned any, the one with the fewest before."""
        earned = [drive for drive in range(len(self._shares)) if self._claim(drive, 1.0) > 0]
        drive = min(earned, key=lambda drive: (self._firsts[drive] / self._shares[drive], drive))
        self._firsts[drive] += 1
        return self._take(drive, 1.0)

    def _claim(self, drive: int, weight: float) -> float:
        """What a drive has earned, with its share of the next `weight`; rounded, so that equal drives stay equal."""
        return round(self._earned[drive] / weight + self._shares[drive], 9)

    def _take(self, drive: int, weight: float) -> int:
        for other, share in enumerate(self._shares):
            self._earned[other] += weight * share
        self._earned[drive] -= weight
        return drive


def rate_of(drive: Drive) -> float:
    """Bytes/s by which a drive gets its share: of the mix that a step moves.

    >>> from tiering.hardware import Rate
    >>> rate_of(Drive(name="", read=Rate(per_s=4e9, source="assumed"), write=Rate(per_s=3e9, source="assumed"))) / 1e9
    3.5
    """
    if drive.mixed is not None:
        return drive.mixed.per_s
    return 1 / (READ_SHARE / drive.read.per_s + (1 - READ_SHARE) / drive.write.per_s)
