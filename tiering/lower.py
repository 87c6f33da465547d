"""Lowering: from a program, homes and knobs to a schedule with every HOST address assigned.

Scope: cutting tiled ops into tiles; deciding when bytes enter and leave HOST and DEVICE (their *stays*); placing READ,
WRITE and DROP around the ops; static addresses (`pack.py`) and the order that the bytes impose (`schedule.order`).
Not here: choosing homes and knobs (`plan.py`); proving the result (`check.py`, which shares no code with this file).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tiering.homes import Placement
from tiering.pack import Arc, live_bytes, pack
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.workload import Block, Op, Program, Tier, Touch, Workload, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """lookahead: computing ops ahead that a READ is issued. lag: computing ops that a tiled op may trail its cause.
    tile_bytes: grain of tiled ops. ring: tiles staged at a time. copies_ahead: computing ops ahead of an H2D.
    """

    lookahead: int
    lag: int
    tile_bytes: int
    ring: int
    copies_ahead: int = 1


@dataclass(frozen=True, slots=True)
class _Turn:
    """One op to do. `order` counts the computing ops before it; lo:hi is its tile (the whole block if not tiled)."""

    op: Op
    name: str
    lo: int
    hi: int | None
    order: int


@dataclass(slots=True)
class _Stay:
    """Bytes lo:hi of a block in its tier from `fill` (before that turn) to `last` (after that turn).

    Slots are counted on through the next pass: `last` may lie beyond the end, `fill` before the start.
    `fill` is None where the first op defines the bytes. `writes`: (turn, lo, hi) after which they go to NVME.
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
    turn: int
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
    turn: int
    lo: int
    hi: int
    next_pass: bool = False


def lower(workload: Workload, program: Program, placement: Placement, knobs: Knobs) -> Schedule:
    """The schedule of `program`; pure, and the same for the same arguments."""
    return Draft(workload, spread(program, knobs.lag, knobs.copies_ahead), placement, knobs).schedule()


class Draft:
    """A schedule whose memory is known and whose actions are not written out yet: enough to see whether it fits.

    program: already spread. read_bytes, written_bytes: what a pass moves. host_bytes, ring_bytes, lost_bytes,
    device_bytes: as in `Schedule`.
    """

    def __init__(self, workload: Workload, program: Program, placement: Placement, knobs: Knobs) -> None:
        self.workload = workload
        self.program = program
        self.placement = placement
        self.knobs = knobs
        self.turns = list(self._cut())
        self.orders = [turn.order for turn in self.turns]
        self.copies = any(op.lane in ("h2d", "d2h") for op in self.program.ops)
        self.computing_ops = sum(op.computes for op in self.program.ops)
        self.stays: list[_Stay] = []
        self.stay_of: dict[tuple[str, int], _Stay] = {}
        self.ring_tiles: dict[int, list[_Stay]] = {}
        for name, accesses in self._accesses().items():
            self._stay(workload.blocks[name], accesses)
        self.ring_bytes = self._place_ring()
        self.lines = self._lines()
        self.host_bytes, self.lost_bytes = self._place("HOST", placement.fixed_bytes + self.ring_bytes)
        self.device_bytes, _ = self._place("DEVICE", 0)
        self.read_bytes = sum(stay.hi - stay.lo for stay in self.stays if stay.fill is not None)
        self.written_bytes = sum(hi - lo for stay in self.stays for _, lo, hi in stay.writes)

    def schedule(self) -> Schedule:
        """The whole schedule."""
        actions = [self._action(line) for line in self.lines]
        waits = order(actions, self.program.cyclic)
        return Schedule(
            name=self.program.name,
            actions=tuple(replace(action, after=after) for action, after in zip(actions, waits, strict=True)),
            cyclic=self.program.cyclic,
            lead_in=tuple(self._lead_in()),
            host_bytes=self.host_bytes,
            ring_bytes=self.ring_bytes,
            lost_bytes=self.lost_bytes,
            device_bytes=self.device_bytes,
        )

    def moved_bytes(self) -> dict[str, int]:
        """NVME bytes that a pass moves, by block."""
        moved = dict.fromkeys(self.workload.blocks, 0)
        for stay in self.stays:
            read = stay.hi - stay.lo if stay.fill is not None else 0
            moved[stay.block] += read + sum(hi - lo for _, lo, hi in stay.writes)
        return moved

    def _cut(self) -> Iterator[_Turn]:
        before = 0
        for op in self.program.ops:
            if not op.tiled:
                yield _Turn(op, op.name, 0, None, before)
                before += op.computes
                continue
            nbytes = self.workload.blocks[op.touches[0].block].nbytes
            for number, lo in enumerate(range(0, nbytes, self.knobs.tile_bytes)):
                yield _Turn(op, f"{op.name}#{number}", lo, min(lo + self.knobs.tile_bytes, nbytes), before)

    def _accesses(self) -> dict[str, list[_Access]]:
        """Per block, in order, the accesses to bytes that have no home in HOST."""
        result: dict[str, list[_Access]] = {}
        for index, turn in enumerate(self.turns):
            for touch in turn.op.touches:
                hi = self.workload.blocks[touch.block].nbytes if turn.hi is None else turn.hi
                if hi > self.placement.host_bytes.get(touch.block, 0):
                    access = _Access(index, turn.lo, hi, touch, turn.order, turn.op.tiled)
                    result.setdefault(touch.block, []).append(access)
        return result

    def _stay(self, block: Block, accesses: Sequence[_Access]) -> None:
        groups = self._groups(block, accesses)
        previous_last = groups[-1][-1].turn - len(self.turns) if self.program.cyclic else -1
        for number, group in enumerate(groups):
            if all(access.tiled for access in group) and block.life != "local":
                for access in group:
                    stay = self._new_stay(block, [access], access.lo, access.hi)
                    self.ring_tiles.setdefault(access.turn, []).append(stay)
            else:
                stay = self._new_stay(block, group, 0, block.nbytes)
                if block.life == "passing" and (number == len(groups) - 1 or groups[number + 1][0].touch.defines):
                    stay.writes.clear()  # nobody reads these bytes again
                if stay.fill is not None:
                    stay.fill = min(stay.first, max(self._lead(group[0].order), previous_last + 1))
            previous_last = group[-1].turn

    def _groups(self, block: Block, accesses: Sequence[_Access]) -> list[list[_Access]]:
        """Accesses near enough to each other that the bytes stay in HOST between them."""
        near = max(self.knobs.lookahead, self.knobs.lag + 1 + (self.knobs.copies_ahead if self.copies else 0))
        groups: list[list[_Access]] = []
        for access in accesses:
            far = block.life != "local" and groups and access.order - groups[-1][-1].order > near
            if not groups or far or access.touch.defines:
                groups.append([])
            groups[-1].append(access)
        wraps = self.program.cyclic and block.life != "local" and len(groups) > 1 and not accesses[0].touch.defines
        if wraps and accesses[0].order + self.computing_ops - accesses[-1].order <= near:
            count = len(self.turns)
            head = [replace(access, turn=access.turn + count) for access in groups.pop(0)]
            groups[-1].extend(head)
        return groups

    def _new_stay(self, block: Block, group: Sequence[_Access], lo: int, hi: int) -> _Stay:
        stay = _Stay(len(self.stays), block.name, lo, hi, group[0].turn, group[-1].turn)
        if not group[0].touch.defines:
            stay.fill = stay.first
        count = len(self.turns)
        last_writer = next((self.turns[x.turn % count].op for x in reversed(group) if x.touch.writes), None)
        for index, access in enumerate(group):
            # Tiles of one op never overlap, so what the last op to write has written stays as it is.
            again = self.turns[access.turn % count].op is not last_writer and any(
                x.touch.writes and x.lo < access.hi and access.lo < x.hi for x in group[index + 1 :]
            )
            if access.touch.writes and not again and block.life != "local":
                stay.writes.append((access.turn, access.lo, access.hi))
            self.stay_of[block.name, access.turn % count] = stay
        self.stays.append(stay)
        return stay

    def _lead(self, order_: int) -> int:
        """The turn before which bytes needed by the op number `order_` are asked for; negative: in the pass before."""
        target = order_ - min(self.knobs.lookahead, self.computing_ops)
        if target >= 0:
            return bisect_left(self.orders, target)
        if not self.program.cyclic:
            return 0
        return bisect_left(self.orders, target + self.computing_ops) - len(self.turns)

    def _place_ring(self) -> int:
        """Tile stays share a ring of equal places, used one after the other; returns its size in bytes."""
        if not self.ring_tiles:
            return 0
        at = sorted(self.ring_tiles)
        tile_bytes = max(stay.hi - stay.lo for stays in self.ring_tiles.values() for stay in stays)
        width = max(len(stays) for stays in self.ring_tiles.values()) * tile_bytes
        ring = min(self.knobs.ring, len(at))
        for number, turn in enumerate(at):
            base = self.placement.fixed_bytes + number % ring * width
            if number >= ring:
                fill = at[number - ring] + 1
            else:
                before = at[(len(at) - 1 - number) // ring * ring + number] if self.program.cyclic else -1
                fill = max(self._lead(self.turns[turn].order), before + 1 - len(self.turns))
            for place, stay in enumerate(self.ring_tiles[turn]):
                stay.address = base + place * tile_bytes
                if stay.fill is not None:
                    stay.fill = min(stay.first, fill)
        return ring * width

    def _lines(self) -> list[_Line]:
        count = len(self.turns)
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
        for index, turn in enumerate(self.turns):
            lines += [*before[index], _Line(Verb.RUN, None, index, turn.lo, turn.hi or 0), *after[index]]
        return lines

    def _place(self, tier: Tier, base: int) -> tuple[int, int]:
        """Addresses for a tier's whole-block stays from their lifetimes; returns the arena's end and its loss."""
        start: dict[int, int] = {}
        end: dict[int, int] = {}
        run_at = {line.turn: index for index, line in enumerate(self.lines) if line.verb is Verb.RUN}
        for index, line in enumerate(self.lines):
            if line.stay is not None and line.verb is Verb.READ:
                start[line.stay.number] = index
            elif line.stay is not None and line.verb is Verb.DROP:
                end[line.stay.number] = index
        tiers = {name: block.tier for name, block in self.workload.blocks.items()}
        open_ = [stay for stay in self.stays if stay.address < 0 and tiers[stay.block] == tier]
        arcs = [
            Arc(
                nbytes=stay.hi - stay.lo,
                start=start.get(stay.number, run_at[stay.first % len(self.turns)]),
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
            tier = self.workload.blocks[line.stay.block].tier
            return _transfer(line.verb, line.stay, line.lo, line.hi, line.next_pass, tier)
        turn = self.turns[line.turn]
        operands = tuple(self._operand(touch, turn, line.turn) for touch in turn.op.touches)
        verb = {"h2d": Verb.H2D, "d2h": Verb.D2H}.get(turn.op.lane, Verb.RUN)
        return Action(verb=verb, name=turn.name, lane=turn.op.lane, operands=operands)

    def _operand(self, touch: Touch, turn: _Turn, index: int) -> Operand:
        block = self.workload.blocks[touch.block]
        hi = block.nbytes if turn.hi is None else turn.hi
        stay = self.stay_of.get((touch.block, index))
        address = self.placement.address[touch.block] + turn.lo if stay is None else stay.address + turn.lo - stay.lo
        return Operand(
            block=touch.block,
            lo=turn.lo,
            hi=hi,
            address=address,
            reads=touch.reads,
            writes=touch.writes,
            tier=block.tier,
        )

    def _lead_in(self) -> Iterator[Action]:
        """READs for all that a pass finds in HOST when it starts."""
        if not self.program.cyclic:
            return
        for stay in sorted(self.stays, key=lambda stay: stay.first % len(self.turns)):
            if stay.last >= len(self.turns) or (stay.fill is not None and stay.fill < 0):
                yield _transfer(Verb.READ, stay, stay.lo, stay.hi, False, "HOST")


def _transfer(verb: Verb, stay: _Stay, lo: int, hi: int, next_pass: bool, tier: Tier) -> Action:
    address = stay.address + lo - stay.lo
    operand = Operand(block=stay.block, lo=lo, hi=hi, address=address, reads=False, writes=False, tier=tier)
    name = f"{verb} {stay.block}[{lo}:{hi}]"
    return Action(verb=verb, name=name, lane="io", operands=(operand,), next_pass=next_pass)
