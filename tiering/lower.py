"""Lowering: from a program, homes and knobs to a schedule with every HOST address assigned.

Scope: cutting tiled ops into tiles; deciding when bytes enter and leave HOST (their *stays*); placing READ, WRITE and
DROP around the RUNs; static addresses (`pack.py`) and the order that the bytes impose (`schedule.order`).
Not here: choosing homes and knobs (`plan.py`); proving the result (`check.py`, which shares no code with this file).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiering.pack import Arc, live_bytes, pack
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.workload import Block, Op, Program, Touch, Workload, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Homes: the first `host_bytes[name]` bytes of a block live in HOST at `address[name]`, the rest on NVME.

    Only blocks that are never touched as a whole may be split; the split is at a multiple of the tile size.
    `fixed_bytes` is the room that all homes in HOST take, from address 0.
    """

    host_bytes: Mapping[str, int]
    address: Mapping[str, int]
    fixed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """lookahead: whole ops ahead that a READ is issued. lag: whole ops that a tiled op may trail its cause.
    tile_bytes: grain of tiled ops. ring: tiles staged at a time.
    """

    lookahead: int
    lag: int
    tile_bytes: int
    ring: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """One RUN to be. `order` counts the whole ops before it; lo:hi is its tile (the whole block if not tiled)."""

    op: Op
    name: str
    lo: int
    hi: int | None
    order: int


@dataclass(slots=True)
class _Stay:
    """Bytes lo:hi of a block in HOST from `fill` (before that slot) to `last` (after that slot).

    Slots are counted on through the next pass: `last` may lie beyond the end, `fill` before the start.
    `fill` is None where the first op defines the bytes. `writes`: (slot, lo, hi) after which they go to NVME.
    """

    number: int
    block: str
    lo: int
    hi: int
    first: int
    last: int
    fill: int | None = None
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    address: int = -1


@dataclass(frozen=True, slots=True)
class _Access:
    slot: int
    lo: int
    hi: int
    touch: Touch
    order: int
    tiled: bool


@dataclass(slots=True)
class _Line:
    """A line of the schedule before addresses are known."""

    verb: Verb
    stay: _Stay | None
    slot: int
    lo: int
    hi: int
    next_pass: bool = False


def lower(workload: Workload, program: Program, placement: Placement, knobs: Knobs) -> Schedule:
    """The schedule of `program`; pure, and the same for the same arguments."""
    return _Lowering(workload, program, placement, knobs).schedule()


class _Lowering:
    def __init__(self, workload: Workload, program: Program, placement: Placement, knobs: Knobs) -> None:
        self.workload = workload
        self.program = spread(program, knobs.lag)
        self.placement = placement
        self.knobs = knobs
        self.slots = list(self._cut())
        self.orders = [slot.order for slot in self.slots]
        self.whole_ops = sum(not op.tiled for op in self.program.ops)
        self.stays: list[_Stay] = []
        self.stay_of: dict[tuple[str, int], _Stay] = {}
        self.ring_tiles: dict[int, list[_Stay]] = {}

    def schedule(self) -> Schedule:
        for name, accesses in self._accesses().items():
            self._stay(self.workload.blocks[name], accesses)
        ring_bytes = self._place_ring()
        lines = self._lines()
        host_bytes, lost_bytes = self._place(lines, self.placement.fixed_bytes + ring_bytes)
        actions = [self._action(line) for line in lines]
        waits = order(actions, self.program.cyclic)
        return Schedule(
            name=self.program.name,
            actions=tuple(replace(action, after=after) for action, after in zip(actions, waits, strict=True)),
            cyclic=self.program.cyclic,
            lead_in=tuple(self._lead_in()),
            host_bytes=host_bytes,
            ring_bytes=ring_bytes,
            lost_bytes=lost_bytes,
        )

    def _cut(self) -> Iterator[_Slot]:
        before = 0
        for op in self.program.ops:
            if not op.tiled:
                yield _Slot(op, op.name, 0, None, before)
                before += 1
                continue
            nbytes = self.workload.blocks[op.touches[0].block].nbytes
            for number, lo in enumerate(range(0, nbytes, self.knobs.tile_bytes)):
                yield _Slot(op, f"{op.name}#{number}", lo, min(lo + self.knobs.tile_bytes, nbytes), before)

    def _accesses(self) -> dict[str, list[_Access]]:
        """Per block, in order, the accesses to bytes whose home is not HOST."""
        result: dict[str, list[_Access]] = {}
        for index, slot in enumerate(self.slots):
            for touch in slot.op.touches:
                hi = self.workload.blocks[touch.block].nbytes if slot.hi is None else slot.hi
                if hi > self.placement.host_bytes.get(touch.block, 0):
                    access = _Access(index, slot.lo, hi, touch, slot.order, slot.op.tiled)
                    result.setdefault(touch.block, []).append(access)
        return result

    def _stay(self, block: Block, accesses: Sequence[_Access]) -> None:
        groups = self._groups(block, accesses)
        previous_last = groups[-1][-1].slot - len(self.slots) if self.program.cyclic else -1
        for group in groups:
            if all(access.tiled for access in group) and block.life != "local":
                for access in group:
                    stay = self._new_stay(block, [access], access.lo, access.hi)
                    self.ring_tiles.setdefault(access.slot, []).append(stay)
            else:
                stay = self._new_stay(block, group, 0, block.nbytes)
                if stay.fill is not None:
                    stay.fill = min(stay.first, max(self._lead(group[0].order), previous_last + 1))
            previous_last = group[-1].slot

    def _groups(self, block: Block, accesses: Sequence[_Access]) -> list[list[_Access]]:
        """Accesses near enough to each other that the bytes stay in HOST between them."""
        near = max(self.knobs.lookahead, self.knobs.lag + 1)
        groups: list[list[_Access]] = []
        for access in accesses:
            far = block.life != "local" and groups and access.order - groups[-1][-1].order > near
            if not groups or far or access.touch.defines:
                groups.append([])
            groups[-1].append(access)
        wraps = self.program.cyclic and block.life != "local" and len(groups) > 1 and not accesses[0].touch.defines
        if wraps and accesses[0].order + self.whole_ops - accesses[-1].order <= near:
            count = len(self.slots)
            head = [replace(access, slot=access.slot + count) for access in groups.pop(0)]
            groups[-1].extend(head)
        return groups

    def _new_stay(self, block: Block, group: Sequence[_Access], lo: int, hi: int) -> _Stay:
        stay = _Stay(len(self.stays), block.name, lo, hi, group[0].slot, group[-1].slot)
        if not group[0].touch.defines:
            stay.fill = stay.first
        count = len(self.slots)
        last_writer = next((self.slots[x.slot % count].op for x in reversed(group) if x.touch.writes), None)
        for index, access in enumerate(group):
            # Tiles of one op never overlap, so what the last op to write has written stays as it is.
            again = self.slots[access.slot % count].op is not last_writer and any(
                x.touch.writes and x.lo < access.hi and access.lo < x.hi for x in group[index + 1 :]
            )
            if access.touch.writes and not again and block.life != "local":
                stay.writes.append((access.slot, access.lo, access.hi))
            self.stay_of[block.name, access.slot % count] = stay
        self.stays.append(stay)
        return stay

    def _lead(self, order_: int) -> int:
        """The slot before which bytes needed by the op number `order_` are asked for; negative: in the pass before."""
        target = order_ - min(self.knobs.lookahead, self.whole_ops)
        if target >= 0:
            return bisect_left(self.orders, target)
        if not self.program.cyclic:
            return 0
        return bisect_left(self.orders, target + self.whole_ops) - len(self.slots)

    def _place_ring(self) -> int:
        """Tile stays share a ring of equal slots, used in turn; returns its size in bytes."""
        if not self.ring_tiles:
            return 0
        at = sorted(self.ring_tiles)
        tile_bytes = max(stay.hi - stay.lo for stays in self.ring_tiles.values() for stay in stays)
        width = max(len(stays) for stays in self.ring_tiles.values()) * tile_bytes
        ring = min(self.knobs.ring, len(at))
        for number, slot in enumerate(at):
            base = self.placement.fixed_bytes + number % ring * width
            if number >= ring:
                fill = at[number - ring] + 1
            else:
                before = at[(len(at) - 1 - number) // ring * ring + number] if self.program.cyclic else -1
                fill = max(self._lead(self.slots[slot].order), before + 1 - len(self.slots))
            for place, stay in enumerate(self.ring_tiles[slot]):
                stay.address = base + place * tile_bytes
                if stay.fill is not None:
                    stay.fill = min(stay.first, fill)
        return ring * width

    def _lines(self) -> list[_Line]:
        count = len(self.slots)
        before: list[list[_Line]] = [[] for _ in range(count)]
        after: list[list[_Line]] = [[] for _ in range(count)]
        for stay in sorted(self.stays, key=lambda stay: stay.first):
            if stay.fill is not None:
                line = _Line(Verb.READ, stay, stay.fill % count, stay.lo, stay.hi, stay.fill < 0)
                before[stay.fill % count].append(line)
            for written, lo, hi in stay.writes:
                after[written % count].append(_Line(Verb.WRITE, stay, written % count, lo, hi))
        for stay in self.stays:
            after[stay.last % count].append(_Line(Verb.DROP, stay, stay.last % count, stay.lo, stay.hi))
        lines = []
        for index, slot in enumerate(self.slots):
            lines += [*before[index], _Line(Verb.RUN, None, index, slot.lo, slot.hi or 0), *after[index]]
        return lines

    def _place(self, lines: Sequence[_Line], base: int) -> tuple[int, int]:
        """Addresses for whole-block stays from their lifetimes in the list; returns the arena's end and its loss."""
        start: dict[int, int] = {}
        end: dict[int, int] = {}
        run_at = {line.slot: index for index, line in enumerate(lines) if line.verb is Verb.RUN}
        for index, line in enumerate(lines):
            if line.stay is not None and line.verb is Verb.READ:
                start[line.stay.number] = index
            elif line.stay is not None and line.verb is Verb.DROP:
                end[line.stay.number] = index
        open_ = [stay for stay in self.stays if stay.address < 0]
        arcs = [
            Arc(
                nbytes=stay.hi - stay.lo,
                start=start.get(stay.number, run_at[stay.first % len(self.slots)]),
                end=end[stay.number],
            )
            for stay in open_
        ]
        addresses, total = pack(arcs)
        for stay, address in zip(open_, addresses, strict=True):
            stay.address = base + address
        return base + total, total - live_bytes(arcs)

    def _action(self, line: _Line) -> Action:
        if line.stay is not None:
            return _transfer(line.verb, line.stay, line.lo, line.hi, line.next_pass)
        slot = self.slots[line.slot]
        operands = tuple(self._operand(touch, slot, line.slot) for touch in slot.op.touches)
        return Action(verb=Verb.RUN, name=slot.name, lane=slot.op.lane, operands=operands)

    def _operand(self, touch: Touch, slot: _Slot, index: int) -> Operand:
        hi = self.workload.blocks[touch.block].nbytes if slot.hi is None else slot.hi
        stay = self.stay_of.get((touch.block, index))
        address = self.placement.address[touch.block] + slot.lo if stay is None else stay.address + slot.lo - stay.lo
        return Operand(block=touch.block, lo=slot.lo, hi=hi, address=address, reads=touch.reads, writes=touch.writes)

    def _lead_in(self) -> Iterator[Action]:
        """READs for all that a pass finds in HOST when it starts."""
        if not self.program.cyclic:
            return
        for stay in sorted(self.stays, key=lambda stay: stay.first % len(self.slots)):
            if stay.last >= len(self.slots) or (stay.fill is not None and stay.fill < 0):
                yield _transfer(Verb.READ, stay, stay.lo, stay.hi, False)


def _transfer(verb: Verb, stay: _Stay, lo: int, hi: int, next_pass: bool) -> Action:
    operand = Operand(block=stay.block, lo=lo, hi=hi, address=stay.address + lo - stay.lo, reads=False, writes=False)
    name = f"{verb} {stay.block}[{lo}:{hi}]"
    return Action(verb=verb, name=name, lane="io", operands=(operand,), next_pass=next_pass)
