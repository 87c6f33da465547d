"""Static memory planning: addresses for byte ranges whose lifetimes are known.

Scope: greedy placement by size over lifetimes on a circle (a cyclic schedule's tail overlaps its own head).
Not here: where lifetimes come from (`lower.py`).
Source: greedy by size for offset calculation, Pisarchyk and Lee, arXiv 2001.03288; lifetimes on a circle are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """`nbytes` alive from line `start` to line `end`, both included; start > end: over the end of the list."""

    nbytes: int
    start: int
    end: int

    def spans(self) -> list[tuple[int, int]]:
        """The lines of a list that it is alive at, both ends included: one stretch, or two where it is over the end."""
        if self.start <= self.end:
            return [(self.start, self.end)]
        return [(0, self.end), (self.start, _BEYOND)]


_BEYOND = 1 << 62
"""A line after all others."""
_STRETCHES = 128
"""Parts of the list by which arcs are filed, so that each is held only against those that live near it."""


def pack(arcs: Sequence[Arc]) -> tuple[list[int], int]:
    """Addresses in bytes for `arcs`, such that no two that meet overlap (I1), and the end of the highest one."""
    addresses = [0] * len(arcs)
    last = max((max(arc.start, arc.end) for arc in arcs), default=0)
    grain = last // _STRETCHES + 1
    placed: list[list[tuple[int, int, int, int]]] = [[] for _ in range(last // grain + 1)]
    top = 0
    for index in sorted(range(len(arcs)), key=lambda i: (-arcs[i].nbytes, arcs[i].start)):
        nbytes = arcs[index].nbytes
        spans = arcs[index].spans()
        taken = {
            (lo, hi)
            for start, end in spans
            for near in placed[start // grain : end // grain + 1]
            for s, e, lo, hi in near
            if s <= end and start <= e
        }
        address = 0
        for lo, hi in sorted(taken):
            if lo - address >= nbytes:
                break
            address = max(address, hi)
        addresses[index] = address
        for start, end in spans:
            for near in placed[start // grain : end // grain + 1]:
                near.append((start, end, address, address + nbytes))
        top = max(top, address + nbytes)
    return addresses, top


def live_bytes(arcs: Sequence[Arc]) -> int:
    """The most bytes alive at one line: no packing can need less."""
    change: dict[int, int] = {}
    for arc in arcs:
        for start, end in arc.spans():
            change[start] = change.get(start, 0) + arc.nbytes
            change[end + 1] = change.get(end + 1, 0) - arc.nbytes
    most = alive = 0
    for line in sorted(change):
        alive += change[line]
        most = max(most, alive)
    return most
