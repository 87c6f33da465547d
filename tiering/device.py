"""A workload whose ops compute on a device with memory of its own: the copies to it and from it become ops.

Scope: `on_device`: which copies a program needs, and between which of its ops a copy stays on the device;
`worth_keeping`: which copies spare memory is best used for; `updates_there`; `copied_from`.
Not here: when a copy is made and at which address (`lower.py`), how fast (`simulate.py`), making it (`lanes.py`).

What an op computes on are blocks of the DEVICE tier. They are local: H2D defines them from a HOST block, or the op
itself does, and D2H brings back what changed.

Updates stay on HOST, where the moments are, or run on the device too. There they are one op on whole blocks, and what
they touch is copied tile by tile: HOST never holds a whole moment that lives on NVME.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tiering.homes import spread_share
from tiering.workload import PAGE, Block, Op, Program, Touch, Workload, make_workload

NEAR = 2
"""Computing ops: a block that is used again so soon stays on the device in between."""


def on_device(workload: Workload, keep: Set[str] = frozenset(), *, update: bool = False) -> Workload:
    """`workload` with its computing ops on the device. update: those of lane "update" too.

    keep: blocks whose copy stays on the device until their HOST bytes change or the pass ends, however long. A passing
    block that is kept never comes to HOST.
    """
    blocks: dict[str, Block] = dict(workload.blocks)
    programs = []
    for program in workload.programs.values():
        copies = _Copies(workload, program, keep, update)
        ops = tuple(copies.ops())
        programs.append(replace(program, ops=ops))
        blocks |= copies.blocks
    return make_workload(blocks.values(), programs)


def updates_there(workload: Workload) -> bool:
    """True if the updates of `workload` run on the device."""
    ops = (op for program in workload.programs.values() for op in program.ops if op.lane == "update")
    return any(workload.blocks[touch.block].tier == "DEVICE" for op in ops for touch in op.touches)


def copied_from(name: str) -> str:
    """The block that a block on the device is a copy of."""
    return name.rpartition("@")[0]


def worth_keeping(workload: Workload, main: Program, room: int) -> frozenset[str]:
    """Blocks whose copies may stay on the device between their uses in `main`, within `room` bytes: what would be
    copied twice first, then once.
    """
    used = {touch.block for op in main.ops if op.computes for touch in op.touches}
    keep: dict[str, int] = {}
    for kinds in (("passing",), ("durable", "carried")):
        pool = [block for block in workload.of_life(*kinds) if block.name in used and _reused(main, block.name)]
        room -= spread_share(pool, room, PAGE, frozenset(), keep)
    return frozenset(keep)


def _reused(program: Program, block: str) -> bool:
    """True if two computing ops use `block` with no update of it in between."""
    uses = [(op.computes, t.writes) for op in program.ops for t in op.touches if t.block == block]
    return any(first and second and not defined for (first, _), (second, defined) in pairwise(uses))


@dataclass(slots=True)
class _Copies:
    """update: the ops of that lane are on the device too."""

    workload: Workload
    program: Program
    keep: Set[str]
    update: bool
    blocks: dict[str, Block] = field(default_factory=dict)
    there: dict[str, str] = field(default_factory=dict)  # block -> name of its copy on the device
    made: dict[str, int] = field(default_factory=dict)

    def ops(self) -> Iterator[Op]:
        for at, op in enumerate(self.program.ops):
            if not self._runs_there(op):
                for touch in op.touches:
                    if touch.writes:
                        self.there.pop(touch.block, None)
                yield op
                continue
            fetched = [touch.block for touch in op.touches if touch.reads and touch.block not in self.there]
            for block in fetched:
                yield self._copy(op, block, self._new(block), "h2d")
            for touch in op.touches:
                if touch.defines:
                    self._new(touch.block)
            touches = tuple(replace(t, block=self.there[t.block]) for t in op.touches)
            yield replace(op, touches=touches, tiled=False)
            for touch in op.touches:
                if touch.writes and self._wanted_back(at, touch):
                    yield self._copy(op, touch.block, self.there[touch.block], "d2h")
                if not self._stays(at, touch):
                    self.there.pop(touch.block)

    def _runs_there(self, op: Op) -> bool:
        return op.computes or (self.update and op.lane == "update")

    def _new(self, block: str) -> str:
        """A fresh copy's name; each has a lifetime of its own."""
        number = self.made[block] = self.made.get(block, 0) + 1
        name = f"{block}@{self.program.name}.{number}"
        self.blocks[name] = replace(self.workload.blocks[block], name=name, life="local", tier="DEVICE")
        self.there[block] = name
        return name

    def _copy(self, op: Op, host: str, device: str, lane: str) -> Op:
        # By tiles what an update alone needs of HOST: what computing leaves of carried blocks are gradients for it.
        tiled = op.tiled or (self.update and lane == "d2h" and self.workload.blocks[host].life == "carried")
        if lane == "h2d":
            touches = (
                Touch(block=host, reads=True, writes=False),
                Touch(block=device, reads=False, writes=True),
            )
            return Op(name=f"h2d.{op.name}.{host}", lane="h2d", touches=touches, tiled=tiled, moves="earlier")
        touches = (
            Touch(block=device, reads=True, writes=False),
            Touch(block=host, reads=False, writes=True),
        )
        # Later in the list, so that the next op is given another place than the one that is still being copied from.
        return Op(name=f"d2h.{op.name}.{host}", lane="d2h", touches=touches, tiled=tiled, moves="later")

    def _next_use(self, at: int, block: str) -> tuple[int, Touch] | None:
        """The next op that touches `block`, if it runs on the device: it would find the copy as it is left now."""
        for later, op in enumerate(self.program.ops[at + 1 :], at + 1):
            for touch in op.touches:
                if touch.block == block:
                    return (later, touch) if self._runs_there(op) else None
        return None

    def _wanted_back(self, at: int, touch: Touch) -> bool:
        """True if what the op at `at` has written has to come to HOST before anything on the device writes it again."""
        if self.workload.blocks[touch.block].life in ("durable", "carried"):
            again = self._next_use(at, touch.block)
            return again is None or not again[1].writes
        uses = sum(t.block == touch.block for op in self.program.ops[at + 1 :] for t in op.touches)
        while uses:
            again = self._next_use(at, touch.block)
            if again is None or not self._stays(at, touch):
                return True
            at, touch = again
            if touch.writes:
                return False
            uses -= 1
        return False

    def _stays(self, at: int, touch: Touch) -> bool:
        """True if the copy is there for the next use: it is kept, that is near, or adds to what this op has written."""
        again = self._next_use(at, touch.block)
        if again is None:
            return False
        if touch.block in self.keep or (touch.writes and again[1].writes):
            return True
        return sum(op.computes for op in self.program.ops[at + 1 : again[0] + 1]) <= NEAR
