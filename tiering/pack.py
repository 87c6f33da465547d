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

    def meets(self, other: "Arc") -> bool:
        """True if both are alive at some line."""
        return other.start in self or self.start in other

    def __contains__(self, line: int) -> bool:
        if self.start <= self.end:
            return self.start <= line <= self.end
        return line >= self.start or line <= self.end


def pack(arcs: Sequence[Arc]) -> tuple[list[int], int]:
    """Addresses in bytes for `arcs`, such that no two that meet overlap (I1), and the end of the highest one."""
    addresses = [0] * len(arcs)
    placed: list[int] = []
    top = 0
    for index in sorted(range(len(arcs)), key=lambda i: (-arcs[i].nbytes, arcs[i].start)):
        taken = sorted((addresses[i], addresses[i] + arcs[i].nbytes) for i in placed if arcs[i].meets(arcs[index]))
        address = 0
        for lo, hi in taken:
            if lo - address >= arcs[index].nbytes:
                break
            address = max(address, hi)
        addresses[index] = address
        placed.append(index)
        top = max(top, address + arcs[index].nbytes)
    return addresses, top


def live_bytes(arcs: Sequence[Arc]) -> int:
    """The most bytes alive at one line: no packing can need less."""
    edges = sorted({arc.start for arc in arcs})
    return max((sum(arc.nbytes for arc in arcs if line in arc) for line in edges), default=0)
