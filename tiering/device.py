"""A workload whose ops compute on a device with memory of its own: the copies to it and from it become ops.

Scope: `on_device`: which copies a program needs, and between which of its ops a copy stays on the device;
`worth_keeping`: which copies spare memory is best used for; `copied_from`.
Not here: when a copy is made and at which address (`lower.py`), how fast (`simulate.py`), making it (`lanes.py`).

What an op computes on are blocks of the DEVICE tier. They are local: H2D defines them from a HOST block, or the op
itself does, and D2H brings back what changed. Updates stay on HOST, where the moments are.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tiering.homes import spread_share
from tiering.workload import PAGE, Block, Op, Program, Touch, Workload, make_workload

NEAR = 2
"""Computing ops: a block that is used again so soon stays on the device in between."""


def on_device(workload: Workload, keep: Set[str] = frozenset()) -> Workload:
    """`workload` with its computing ops on the device.

    keep: blocks whose copy stays on the device until their HOST bytes change or the pass ends, however long. A passing
    block that is kept never comes to HOST.
    """
    blocks: dict[str, Block] = dict(workload.blocks)
    programs = []
    for program in workload.programs.values():
        copies = _Copies(workload, program, keep)
        ops = tuple(copies.ops())
        programs.append(replace(program, ops=ops))
        blocks |= copies.blocks
    return make_workload(blocks.values(), programs)


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
    workload: Workload
    program: Program
    keep: Set[str]
    blocks: dict[str, Block] = field(default_factory=dict)
    there: dict[str, str] = field(default_factory=dict)  # block -> name of its copy on the device
    made: dict[str, int] = field(default_factory=dict)

    def ops(self) -> Iterator[Op]:
        for at, op in enumerate(self.program.ops):
            if not op.computes:
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
            yield replace(op, touches=tuple(replace(t, block=self.there[t.block]) for t in op.touches))
            for touch in op.touches:
                again = self._next_use(at, touch.block)
                if touch.writes and not (again and self._stays_there(touch.block, again)):
                    yield self._copy(op, touch.block, self.there[touch.block], "d2h")
                if again is None or (touch.block not in self.keep and not self._stays(at, touch)):
                    self.there.pop(touch.block)

    def _new(self, block: str) -> str:
        """A fresh copy's name; each has a lifetime of its own."""
        number = self.made[block] = self.made.get(block, 0) + 1
        name = f"{block}@{self.program.name}.{number}"
        self.blocks[name] = replace(self.workload.blocks[block], name=name, life="local", tier="DEVICE")
        self.there[block] = name
        return name

    def _copy(self, op: Op, host: str, device: str, lane: str) -> Op:
        if lane == "h2d":
            touches = (
                Touch(block=host, reads=True, writes=False),
                Touch(block=device, reads=False, writes=True),
            )
            return Op(name=f"h2d.{op.name}.{host}", lane="h2d", touches=touches, moves="earlier")
        touches = (
            Touch(block=device, reads=True, writes=False),
            Touch(block=host, reads=False, writes=True),
        )
        # Later in the list, so that the next op is given another place than the one that is still being copied from.
        return Op(name=f"d2h.{op.name}.{host}", lane="d2h", touches=touches, moves="later")

    def _next_use(self, at: int, block: str) -> Op | None:
        """The next op that touches `block`, if it computes: it would find the copy as it is left now."""
        for op in self.program.ops[at + 1 :]:
            if any(touch.block == block for touch in op.touches):
                return op if op.computes else None
        return None

    def _stays_there(self, block: str, again: Op) -> bool:
        """True if what an op wrote is not wanted on HOST before the op `again`, which finds it on the device."""
        if self.workload.blocks[block].life == "passing":
            return block in self.keep
        return any(t.block == block and t.writes for t in again.touches)

    def _stays(self, at: int, touch: Touch) -> bool:
        """True if the next use is near, or adds to what this op has written."""
        again = self._next_use(at, touch.block)
        if again is None:
            return False
        if touch.writes and any(t.block == touch.block and t.writes for t in again.touches):
            return True
        passed = 0
        for op in self.program.ops[at + 1 :]:
            passed += op.computes
            if op is again:
                break
        return passed <= NEAR
