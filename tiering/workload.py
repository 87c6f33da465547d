"""What has to be computed and which bytes each computation touches: blocks, ops, programs.

Scope: the vocabulary that the planner, the schedule, the checker and the simulator share; pure values.
Not here: where a block lives (`plan.py`), when it moves (`lower.py`), what a unit computes (the caller's business:
this library knows bytes, tiers and time, and nothing of layers or gradients).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

PAGE = 4096
"""Bytes: the grain of every address, extent and tile (what direct I/O asks for on usual drives)."""

Life = Literal["durable", "carried", "passing", "local"]
"""durable: has a home, survives the process. carried: lives from one pass into the next. passing: dies inside a pass,
and may be spilled to NVME before. local: dies inside a pass and never leaves its tier.
"""

Tier = Literal["HOST", "DEVICE"]
"""Where an op finds its bytes. NVME is where the others wait."""

Lane = Literal["io", "h2d", "compute", "d2h", "update"]
Moves = Literal["no", "later", "earlier"]
COPIES: frozenset[Lane] = frozenset(("h2d", "d2h"))
"""Lanes of copies between HOST and DEVICE."""


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, in bytes."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of one unit: the thing that is placed. `nbytes` is a multiple of `PAGE`. What is on DEVICE is local."""

    name: str
    unit: str
    kind: str
    nbytes: int
    life: Life
    tier: Tier = "HOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """An op's use of a whole block. Writing without reading defines the block: its old bytes do not matter."""

    block: str
    reads: bool
    writes: bool

    @property
    def defines(self) -> bool:
        return self.writes and not self.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One computation, or one copy between HOST and DEVICE (lanes h2d and d2h: reads one block, defines the other).

    A `tiled` op may be cut into tiles: all its blocks have the same layout and the size of the largest of them, or half
    of it (to whole pages) where they hold numbers of half as many bytes. A tile is the same part of each. An op in lane
    "update" is one that nobody enters: tiled on HOST, whole on DEVICE.

    `moves` says in which direction the planner may shift the op past others that share no block with it, so that it
    runs beside them. `flops` are floating-point operations of one execution, `seconds` what it was measured to take
    (0: reckon from the flops).
    """

    name: str
    lane: Lane
    touches: tuple[Touch, ...]
    flops: float = 0.0
    seconds: float = 0.0
    tiled: bool = False
    moves: Moves = "no"

    @property
    def computes(self) -> bool:
        """True for the ops by which a pass is counted: those that the caller enters, one after the other."""
        return self.lane == "compute" and not self.tiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The ops of one pass in the order in which their results must look as if they had run.

    A `cyclic` program repeats itself: its tail may already serve the head of its next repetition.
    """

    name: str
    ops: tuple[Op, ...]
    cyclic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All blocks and all programs over them."""

    blocks: Mapping[str, Block]
    programs: Mapping[str, Program]

    def of_life(self, *lives: Life) -> Iterator[Block]:
        return (block for block in self.blocks.values() if block.life in lives)

    def tile_only(self) -> frozenset[str]:
        """Blocks that no program ever touches as a whole: they can be staged, and pinned, tile by tile."""
        whole = {t.block for p in self.programs.values() for op in p.ops if not op.tiled for t in op.touches}
        return frozenset(self.blocks) - whole


def make_workload(blocks: Iterable[Block], programs: Iterable[Program]) -> Workload:
    """Checks that the parts fit together (we are wrong if they do not) and indexes them by name."""
    by_name = {block.name: block for block in blocks}
    by_program = {program.name: program for program in programs}
    for block in by_name.values():
        assert block.nbytes > 0 and block.nbytes % PAGE == 0, block
        assert block.tier == "HOST" or block.life == "local", block
    for program in by_program.values():
        for op in program.ops:
            sizes = {by_name[touch.block].nbytes for touch in op.touches}
            odd = sizes - {largest := max(sizes, default=0), pages(largest // 2)}
            assert not op.tiled or not odd, f"{op.name} is tiled over blocks of different sizes {sizes}"
    return Workload(blocks=by_name, programs=by_program)


def conflict(a: Op, b: Op) -> bool:
    """True if the order of the two ops matters: they share a block that one of them writes."""
    writes_a = {t.block for t in a.touches if t.writes}
    writes_b = {t.block for t in b.touches if t.writes}
    all_a = {t.block for t in a.touches}
    all_b = {t.block for t in b.touches}
    return bool(writes_a & all_b or writes_b & all_a)


def spread(program: Program, lag: int, copies_ahead: int = 1) -> Program:
    """Shift each movable op past whole ops it does not conflict with, so that it can run beside them: an update past
    up to `lag` of those that compute, a copy past up to `copies_ahead`.
    """
    ops = list(program.ops)
    for direction in ("later", "earlier"):
        # Those before this one have moved away from it, so that it still is where it was.
        movable = [(at, op) for at, op in enumerate(ops) if op.moves == direction]
        for at, op in reversed(movable) if direction == "later" else movable:
            _shift(ops, at, copies_ahead if op.lane in COPIES else lag, 1 if direction == "later" else -1)
    return replace(program, ops=tuple(ops))


def _shift(ops: list[Op], at: int, most: int, stride: int) -> None:
    op, beside = ops[at], at
    passed = 0
    while passed < most:
        beside += stride
        if not 0 <= beside < len(ops) or op.lane == ops[beside].lane == "update" or conflict(op, ops[beside]):
            break
        if ops[beside].computes:
            passed += 1
            ops.insert(beside, ops.pop(at))
            at = beside
