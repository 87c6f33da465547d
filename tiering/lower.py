"""Lowering: from a program, homes and knobs to a schedule with every HOST address assigned.

Scope: deciding when bytes enter and leave HOST and DEVICE (their *stays*); placing READ, WRITE and DROP around the ops;
static addresses (`pack.py`) and the order that the bytes impose (`schedule.order`).
Not here: cutting a program into turns (`turns.py`), choosing homes and knobs (`plan.py`), proving the result
(`check.py`, which shares no code with this file).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiering.homes import Placement
from tiering.pack import Arc, live_bytes, pack
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.turns import Access, Cut, Knobs
from tiering.workload import Block, Lane, Program, Tier, Touch, Workload


@dataclass(slots=True)
class _Stay:
    """Bytes lo:hi of a block in its tier from `fill` (before that turn) to `last` (after that turn).

    Slots are counted on through the next pass: `last` may lie beyond the end, `fill` before the start.
    `fill` is None where the first op defines the bytes. `writes`: (turn, lo, hi) after which they go to NVME. `uses`:
    turns that find the bytes here. begins, ends: the lines of the schedule between which they are alive.
    """

    block: str
    lo: int
    hi: int
    first: int
    last: int
    fill: int | None = None
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    uses: tuple[int, ...] = ()
    address: int = -1
    begins: int = -1
    ends: int = -1


@dataclass(slots=True)
class _Step:
    """An action of which it is not known yet what it waits for."""

    verb: Verb
    name: str
    lane: Lane
    operands: tuple[Operand, ...]
    next_pass: bool = False

    def action(self, after: tuple[tuple[int, int], ...]) -> Action:
        return Action(
            verb=self.verb,
            name=self.name,
            lane=self.lane,
            operands=self.operands,
            after=after,
            next_pass=self.next_pass,
        )


def lower(workload: Workload, program: Program, placement: Placement, knobs: Knobs) -> Schedule:
    """The schedule of `program`; pure, and the same for the same arguments."""
    return Draft(Cut(workload, program, knobs), placement, knobs).schedule()


class Draft:
    """A schedule whose memory is known and whose actions are not written out yet: enough to see whether it fits.

    cut: by the same knobs. direct_bytes: what goes from NVME to the device, by block and turn. read_bytes,
    written_bytes: what a pass moves. host_bytes, ring_bytes, device_bytes: as in `Schedule`.
    """

    def __init__(self, cut: Cut, placement: Placement, knobs: Knobs) -> None:
        self.cut = cut
        self.workload, self.program, self.turns = cut.workload, cut.program, cut.turns
        self.placement = placement
        self.knobs = knobs
        self.stays: list[_Stay] = []
        self.direct_bytes: dict[tuple[str, int], int] = {}
        self.ring_tiles: dict[Lane, dict[int, list[_Stay]]] = {}
        for name, accesses in self._moved().items():
            self._stay(self.workload.blocks[name], accesses)
        self.ring_bytes = 0
        for tiles in self.ring_tiles.values():
            self.ring_bytes += self._place_ring(tiles, placement.fixed_bytes + self.ring_bytes)
        self._number()
        self.arcs: dict[Tier, list[Arc]] = {}
        self.host_bytes = self._place("HOST", placement.fixed_bytes + self.ring_bytes)
        self.device_bytes = self._place("DEVICE", 0)
        self.read_bytes = sum(stay.hi - stay.lo for stay in self.stays if stay.fill is not None)
        self.read_bytes += sum(self.direct_bytes.values())
        self.written_bytes = sum(hi - lo for stay in self.stays for _, lo, hi in stay.writes)

    @property
    def lost_bytes(self) -> int:
        """As in `Schedule`."""
        fixed_bytes = self.placement.fixed_bytes + self.ring_bytes
        return self.host_bytes - fixed_bytes - live_bytes(self.arcs["HOST"])

    def schedule(self) -> Schedule:
        """The whole schedule."""
        steps = list(self._steps())
        waits = order(steps, self.program.cyclic)
        return Schedule(
            name=self.program.name,
            actions=tuple([step.action(after) for step, after in zip(steps, waits, strict=True)]),
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
        for (block, _), nbytes in self.direct_bytes.items():
            moved[block] += nbytes
        return moved

    def _moved(self) -> dict[str, list[Access]]:
        """Per block, in the order in which they are met, the accesses to bytes that have no home in HOST."""
        held = self.placement.host_bytes
        moved = {}
        for name, accesses in self.cut.accesses.items():
            found = [access for access in accesses if access.hi > held[name]] if name in held else accesses
            if found:
                moved[name] = found
        return dict(sorted(moved.items(), key=lambda item: item[1][0].number))

    def _stay(self, block: Block, accesses: Sequence[Access]) -> None:
        count = len(self.turns)
        groups = self._groups(block, accesses)
        previous_last = groups[-1][-1].turn - count if self.program.cyclic else -1
        for number, group in enumerate(groups):
            if block.life != "local" and all(access.op.tiled for access in group):
                for access in group:
                    if self._is_direct(block, access):
                        self.direct_bytes[block.name, access.turn] = access.hi - access.lo
                        continue
                    tiles = self.ring_tiles.setdefault(access.op.lane, {})
                    tiles.setdefault(access.turn, []).append(self._tile(block, access))
            elif len(group) == 1 and self._is_direct(block, group[0]):
                self.direct_bytes[block.name, group[0].turn] = block.nbytes
            else:
                stay = self._whole(block, group)
                if block.life == "passing" and (number == len(groups) - 1 or groups[number + 1][0].defines):
                    stay.writes.clear()  # nobody reads these bytes again
                if stay.fill is not None:
                    stay.fill = min(stay.first, max(self._lead(group[0].order), previous_last + 1))
            previous_last = group[-1].turn

    def _groups(self, block: Block, accesses: Sequence[Access]) -> list[list[Access]]:
        """Accesses near enough to each other that the bytes stay in HOST between them."""
        knobs, cut = self.knobs, self.cut
        near = max(knobs.lookahead, knobs.lag + 1 + (knobs.copies_ahead if cut.copies else 0))
        local = block.life == "local"
        groups: list[list[Access]] = []
        group: list[Access] = []
        for access in accesses:
            defines = access.defines and not (group and group[-1].op is access.op)  # tiles define a block together
            if not group or defines or (not local and access.order - group[-1].order > near):
                group = []
                groups.append(group)
            group.append(access)
        wraps = self.program.cyclic and not local and len(groups) > 1 and not accesses[0].defines
        wraps = wraps and not all(access.op.tiled for access in (*groups[0], *groups[-1]))
        if wraps and accesses[0].order + cut.computing_ops - accesses[-1].order <= near:
            count = len(self.turns)
            groups[-1].extend([replace(access, turn=access.turn + count) for access in groups.pop(0)])
        return groups

    def _is_direct(self, block: Block, access: Access) -> bool:
        """True where a copy to the device, which alone uses these bytes, can have them straight from NVME. Not what the
        pass before is to read ahead: the copy begins with its own pass, so that has to wait in HOST.
        """
        if not self.knobs.direct or block.life == "local" or access.op.lane != "h2d":
            return False
        return self._lead(access.order) >= 0

    def _tile(self, block: Block, access: Access) -> _Stay:
        """A stay for one use by one tile."""
        turn, lo, hi = access.turn, access.lo, access.hi
        writes = [(turn, lo, hi)] if access.writes else []
        fill = None if access.defines else max(self.cut.fresh.get(access.number, -len(self.turns)), -len(self.turns))
        stay = _Stay(block.name, lo, hi, turn, turn, fill, writes, (turn % len(self.turns),))
        self.stays.append(stay)
        return stay

    def _whole(self, block: Block, group: Sequence[Access]) -> _Stay:
        """A stay of the whole block for all uses of a group."""
        count = len(self.turns)
        first, last = group[0].turn, group[-1].turn
        uses = tuple([access.turn % count for access in group])
        fill = None if group[0].defines else first
        stay = _Stay(block.name, 0, block.nbytes, first, last, fill, [], uses)
        self.stays.append(stay)
        writers = [] if block.life == "local" else [(at, access) for at, access in enumerate(group) if access.writes]
        for at, access in writers:
            # Tiles of one op never overlap, so what the last op to write has written stays as it is.
            again = access.op is not writers[-1][1].op and any(
                later > at and x.lo < access.hi and access.lo < x.hi for later, x in writers
            )
            if not again:
                stay.writes.append((access.turn, access.lo, access.hi))
        return stay

    def _lead(self, order_: int) -> int:
        """The turn before which bytes needed by the op number `order_` are asked for; negative: in the pass before."""
        target = order_ - min(self.knobs.lookahead, self.cut.computing_ops)
        if target >= 0:
            return bisect_left(self.cut.orders, target)
        if not self.program.cyclic:
            return 0
        return bisect_left(self.cut.orders, target + self.cut.computing_ops) - len(self.turns)

    def _place_ring(self, tiles: Mapping[int, Sequence[_Stay]], top: int) -> int:
        """The tile stays of a lane, by turn, share a ring of equal places from address `top` on, used one after the
        other; returns its size in bytes.
        """
        at = sorted(tiles)
        tile_bytes = max(stay.hi - stay.lo for stays in tiles.values() for stay in stays)
        width = max(len(stays) for stays in tiles.values()) * tile_bytes
        ring = min(self.knobs.ring, len(at))
        for number, turn in enumerate(at):
            base = top + number % ring * width
            if number >= ring:
                fill = at[number - ring] + 1
            else:
                before = at[(len(at) - 1 - number) // ring * ring + number] if self.program.cyclic else -1
                fill = max(self._lead(self.turns[turn].order), before + 1 - len(self.turns))
            for place, stay in enumerate(tiles[turn]):
                stay.address = base + place * tile_bytes
                if stay.fill is not None:  # so far the turn from which on it may be filled
                    stay.fill = min(stay.first, max(fill, stay.fill))
        return ring * width

    def _number(self) -> None:
        """Which transfers stand before and after each turn, and at which line each stay begins and ends."""
        count = len(self.turns)
        self.reads: list[list[_Stay]] = [[] for _ in range(count)]
        self.writes: list[list[tuple[_Stay, int, int]]] = [[] for _ in range(count)]
        self.drops: list[list[_Stay]] = [[] for _ in range(count)]
        for stay in sorted(self.stays, key=lambda stay: stay.first):
            if stay.fill is not None:
                self.reads[stay.fill % count].append(stay)
            for written, lo, hi in stay.writes:
                self.writes[written % count].append((stay, lo, hi))
        for stay in self.stays:
            self.drops[stay.last % count].append(stay)
        run_at, line = [], 0
        for reads, writes, drops in zip(self.reads, self.writes, self.drops, strict=True):
            for stay in reads:
                stay.begins = line
                line += 1
            run_at.append(line)
            line += 1 + len(writes)
            for stay in drops:
                stay.ends = line
                line += 1
        for stay in self.stays:
            if stay.fill is None:
                stay.begins = run_at[stay.first % count]

    def _place(self, tier: Tier, base: int) -> int:
        """Addresses for a tier's whole-block stays from their lifetimes; returns the arena's end."""
        blocks = self.workload.blocks
        open_ = [stay for stay in self.stays if stay.address < 0 and blocks[stay.block].tier == tier]
        arcs = [Arc(nbytes=stay.hi - stay.lo, start=stay.begins, end=stay.ends) for stay in open_]
        self.arcs[tier] = arcs
        addresses, total = pack(arcs)
        for stay, address in zip(open_, addresses, strict=True):
            stay.address = base + address
        return base + total

    def _steps(self) -> Iterator[_Step]:
        blocks = self.workload.blocks
        stays = {(stay.block, turn): stay for stay in self.stays for turn in stay.uses}
        for index, turn in enumerate(self.turns):
            for stay in self.reads[index]:
                assert stay.fill is not None, "a READ fills"
                yield _transfer(Verb.READ, stay, stay.lo, stay.hi, stay.fill < 0, blocks[stay.block].tier)
            operands = tuple([self._operand(touch, index, stays) for touch in turn.op.touches])
            if any(operand.tier == "NVME" for operand in operands):
                yield _Step(Verb.N2D, turn.name, "io", operands)
            else:
                yield _Step(_COPY_VERBS.get(turn.op.lane, Verb.RUN), turn.name, turn.op.lane, operands)
            for stay, lo, hi in self.writes[index]:
                yield _transfer(Verb.WRITE, stay, lo, hi, False, blocks[stay.block].tier)
            for stay in self.drops[index]:
                yield _transfer(Verb.DROP, stay, stay.lo, stay.hi, False, blocks[stay.block].tier)

    def _operand(self, touch: Touch, index: int, stays: Mapping[tuple[str, int], _Stay]) -> Operand:
        """Of the turn `index`. stays: by block and turn; what has none is at home, or comes straight from NVME."""
        block = self.workload.blocks[touch.block]
        lo, hi = self.turns[index].part(block.nbytes)
        if (touch.block, index) in self.direct_bytes:
            return Operand(block=touch.block, lo=lo, hi=hi, address=0, reads=True, writes=False, tier="NVME")
        stay = stays.get((touch.block, index))
        address = self.placement.address[touch.block] + lo if stay is None else stay.address + lo - stay.lo
        return Operand(
            block=touch.block,
            lo=lo,
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
                yield _transfer(Verb.READ, stay, stay.lo, stay.hi, False, "HOST").action(())


_COPY_VERBS = {"h2d": Verb.H2D, "d2h": Verb.D2H}
"""Verbs of ops by lane, where it is not RUN."""


def _transfer(verb: Verb, stay: _Stay, lo: int, hi: int, next_pass: bool, tier: Tier) -> _Step:
    address = stay.address + lo - stay.lo
    operand = Operand(block=stay.block, lo=lo, hi=hi, address=address, reads=False, writes=False, tier=tier)
    return _Step(verb, f"{verb} {stay.block}[{lo}:{hi}]", "io", (operand,), next_pass)
