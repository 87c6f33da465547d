"""A program cut into turns: tiled ops into tiles, shifted so that they run beside others.

Scope: `Knobs`, `Turn`, `Access`, `Cut`: what every choice of homes has in common.
Not here: when bytes come and go (`lower.py`), choosing knobs (`plan.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tiering.workload import COPIES, PAGE, Op, Program, Workload, pages, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """lookahead: computing ops ahead that a READ is issued. lag: computing ops that a tiled op may trail its cause.
    tile_bytes: grain of tiled ops. ring: tiles staged at a time. copies_ahead: computing ops ahead of an H2D. direct:
    what a device reads once from NVME comes to it without a stay in HOST.
    """

    lookahead: int
    lag: int
    tile_bytes: int
    ring: int
    copies_ahead: int = 1
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One op to do. `order` counts the computing ops before it; lo:hi is its tile of a block of `largest` bytes (the
    whole of each block if not tiled).
    """

    op: Op
    name: str
    lo: int
    hi: int | None
    order: int
    largest: int = 0

    def part(self, nbytes: int) -> tuple[int, int]:
        """What it touches of a block of `nbytes`."""
        if self.hi is None:
            return 0, nbytes
        return (self.lo, self.hi) if nbytes == self.largest else (self.lo // 2, pages(self.hi // 2))


@dataclass(frozen=True, slots=True)
class Access:
    """number: counts all accesses of a program."""

    number: int
    turn: int
    lo: int
    hi: int
    op: Op
    defines: bool
    writes: bool
    order: int


class Cut:
    """A program, spread and cut into turns: what all homes and all rings have in common.

    `accesses`: per block, in order, those to any of its bytes. `fresh`: for tiles that are copied to a device, the turn
    from which on NVME has their newest bytes, by the number of the access.
    """

    def __init__(self, workload: Workload, program: Program, knobs: Knobs) -> None:
        self.workload = workload
        self.program = spread(program, knobs.lag, knobs.copies_ahead)
        self.turns = list(self._turns(knobs.tile_bytes))
        self.orders = [turn.order for turn in self.turns]
        self.copies = any(op.lane in COPIES for op in program.ops)
        self.computing_ops = sum(op.computes for op in program.ops)
        self.accesses: dict[str, list[Access]] = {}
        number = 0
        for index, turn in enumerate(self.turns):
            for touch in turn.op.touches:
                lo, hi = turn.part(workload.blocks[touch.block].nbytes)
                access = Access(number, index, lo, hi, turn.op, touch.defines, touch.writes, turn.order)
                self.accesses.setdefault(touch.block, []).append(access)
                number += 1
        self.fresh = dict(self._fresh()) if any(op.tiled and op.lane == "h2d" for op in program.ops) else {}

    def _fresh(self) -> Iterator[tuple[int, int]]:
        """Not for tiles of an update on HOST: nobody else writes those, except in a stay that they are part of."""
        for accesses in self.accesses.values():
            for at, access in enumerate(accesses):
                if access.op.tiled and access.op.lane == "h2d" and not access.defines:
                    here = [x for x in accesses[:at] if x.writes and x.lo < access.hi and access.lo < x.hi]
                    before = [x for x in accesses[at:] if x.writes and x.lo < access.hi and access.lo < x.hi]
                    if here:
                        yield access.number, here[-1].turn + 1
                    elif before and self.program.cyclic:
                        yield access.number, before[-1].turn + 1 - len(self.turns)

    def _turns(self, tile_bytes: int) -> Iterator[Turn]:
        before = 0
        for op in self.program.ops:
            if not op.tiled:
                yield Turn(op, op.name, 0, None, before)
                before += op.computes
                continue
            sizes = {self.workload.blocks[touch.block].nbytes for touch in op.touches}
            largest = max(sizes)
            halves = len(sizes) > 1 and largest > tile_bytes
            assert not halves or tile_bytes % (2 * PAGE) == 0, f"half a tile of {tile_bytes} bytes is no whole pages"
            for number, lo in enumerate(range(0, largest, tile_bytes)):
                yield Turn(op, f"{op.name}#{number}", lo, min(lo + tile_bytes, largest), before, largest)
