"""A set of byte ranges, merged where they touch.

Scope: `RangeSet`: which bytes of a block were written since the last commit.
Not here: which slot those bytes are in (`tiering/store.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Disjoint half-open ranges in rising order. Not thread-safe: its owner holds a lock."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, lo: int, hi: int) -> None:
        """Adds [lo, hi) and merges it with every range that it overlaps or touches."""
        if lo >= hi:
            return
        first = bisect_left(self._ends, lo)
        last = bisect_right(self._starts, hi)
        if first < last:
            lo = min(lo, self._starts[first])
            hi = max(hi, self._ends[last - 1])
        self._starts[first:last] = [lo]
        self._ends[first:last] = [hi]

    def split(self, lo: int, hi: int) -> Iterator[tuple[int, int, bool]]:
        """[lo, hi) cut where membership changes: (lo, hi, is it in the set)."""
        index = bisect_right(self._ends, lo)
        while lo < hi:
            start = self._starts[index] if index < len(self._starts) else hi
            if start > lo:
                yield lo, min(start, hi), False
                lo = min(start, hi)
                continue
            end = min(self._ends[index], hi)
            yield lo, end, True
            lo = end
            index += 1

    def covers(self, lo: int, hi: int) -> bool:
        """Is every byte of [lo, hi) in the set?"""
        return all(inside for _, _, inside in self.split(lo, hi))

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"
