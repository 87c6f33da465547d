"""A symbolic run of a schedule that proves the invariants I1 to I4 before a byte moves.

Scope: two proofs. `_Memory` follows block versions through HOST and NVME in list order: nothing is overwritten while
it is needed (I1, I4), nothing is read before it is there or after it is stale (I2, I3). `_prove_order` shows that any
two actions that touch the same bytes are ordered by `after`, so that every run the order allows equals the list order.
Not here: making schedules; this file shares no code with `lower.py`, and trusts neither its addresses nor its order.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from tiering.errors import ScheduleError
from tiering.homes import Placement
from tiering.schedule import Action, Operand, Schedule, Verb, touched
from tiering.workload import Program, Workload

T = TypeVar("T")


class _Spans(Generic[T]):
    """Disjoint ranges of a line, each with a value."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.spans: list[tuple[int, int, T]] = []

    def over(self, lo: int, hi: int) -> Iterator[tuple[int, int, T]]:
        """The parts of spans that lie in lo:hi."""
        index = max(0, bisect_right(self.starts, lo) - 1)
        while index < len(self.spans) and self.spans[index][0] < hi:
            start, end, value = self.spans[index]
            if end > lo:
                yield max(start, lo), min(end, hi), value
            index += 1

    def put(self, lo: int, hi: int, value: T | None) -> None:
        """Set lo:hi to `value`; None leaves a hole."""
        first = max(0, bisect_right(self.starts, lo) - 1)
        while first < len(self.spans) and self.spans[first][1] <= lo:
            first += 1
        last = first
        fresh: list[tuple[int, int, T]] = [] if value is None else [(lo, hi, value)]
        while last < len(self.spans) and self.spans[last][0] < hi:
            start, end, old = self.spans[last]
            if start < lo:
                fresh.insert(0, (start, lo, old))
            if end > hi:
                fresh.append((hi, end, old))
            last += 1
        self.spans[first:last] = fresh
        self.starts[first:last] = [span[0] for span in fresh]


_Content = tuple[str, int, int]
"""Block, (block offset - address), version: what a HOST byte holds."""


class _Memory:
    """What HOST and NVME hold, and the newest version of every byte of every block."""

    def __init__(self, workload: Workload, placement: Placement) -> None:
        self.workload = workload
        self.placement = placement
        self.clock = 1
        self.arenas: dict[str, _Spans[_Content]] = {"HOST": _Spans(), "DEVICE": _Spans()}
        self.host = self.arenas["HOST"]
        self.nvme: dict[str, _Spans[int]] = {name: _Spans() for name in workload.blocks}
        self.newest: dict[str, _Spans[int]] = {name: _Spans() for name in workload.blocks}
        homes: _Spans[str] = _Spans()
        for name, held in placement.host_bytes.items():
            at = placement.address[name]
            if next(homes.over(at, at + held), None) is not None:
                raise ScheduleError(f"I1: home of {name} at HOST@{at} overlaps another home")
            homes.put(at, at + held, name)
        for block in workload.of_life("durable", "carried"):
            self.newest[block.name].put(0, block.nbytes, 0)
            held = placement.host_bytes.get(block.name, 0)
            if held:
                self.host.put(
                    placement.address[block.name],
                    placement.address[block.name] + held,
                    (block.name, -placement.address[block.name], 0),
                )
            if held < block.nbytes:
                self.nvme[block.name].put(held, block.nbytes, 0)

    def step(self, action: Action) -> str | None:
        """Apply `action`; returns what is wrong with it, if anything."""
        verb = _STEPS.get(action.verb, _Memory._run)
        # All operands are looked at before any is written: an op reads its inputs before it changes them.
        faults = [verb(self, operand) for operand in action.operands]
        if action.verb.is_op:
            self.clock += 1
            for operand in action.operands:
                if operand.writes:
                    self._renew(operand)
        return next((fault for fault in faults if fault), None)

    def _read(self, x: Operand) -> str | None:
        occupied = next(self.host.over(x.address, x.address + x.nbytes), None)
        if occupied is not None:
            return f"I1: READ into bytes that hold {occupied[2][0]}"
        if self._stale(self.nvme[x.block], x):
            return f"I2: READ of {x.block}[{x.lo}:{x.hi}] before its newest bytes are on NVME"
        for lo, hi, version in list(self.nvme[x.block].over(x.lo, x.hi)):
            at = x.address - x.lo
            self.host.put(lo + at, hi + at, (x.block, -at, version))
        return None

    def _write(self, x: Operand) -> str | None:
        fault = self._held(x)
        if fault is None:
            for lo, hi, version in list(self.newest[x.block].over(x.lo, x.hi)):
                self.nvme[x.block].put(lo, hi, version)
        return fault

    def _run(self, x: Operand) -> str | None:
        if x.tier == "NVME":
            stale = self._stale(self.nvme[x.block], x)
            return f"I2: {x.block}[{x.lo}:{x.hi}] on NVME is not its newest version" if stale else None
        if x.reads:
            return self._held(x)
        for _, _, (block, _, _) in self.arenas[x.tier].over(x.address, x.address + x.nbytes):
            if block != x.block:
                return f"I1: RUN defines {x.block} over bytes that hold {block}"
        return None

    def _renew(self, x: Operand) -> None:
        self.newest[x.block].put(x.lo, x.hi, self.clock)
        self.arenas[x.tier].put(x.address, x.address + x.nbytes, (x.block, x.lo - x.address, self.clock))

    def _drop(self, x: Operand) -> str | None:
        fault = self._held(x, newest=False)
        if fault is not None:
            return fault
        lives_on = self.workload.blocks[x.block].life in ("durable", "carried")  # of others a later READ would tell
        if lives_on and self._stale(self.nvme[x.block], x) and self._held(x) is None:
            return f"I4: DROP of the last copy of {x.block}[{x.lo}:{x.hi}] before it is on NVME"
        self.arenas[x.tier].put(x.address, x.address + x.nbytes, None)
        return None

    def _stale(self, spans: _Spans[int], x: Operand) -> bool:
        newest = list(self.newest[x.block].over(x.lo, x.hi))
        if sum(hi - lo for lo, hi, _ in newest) != x.nbytes:
            return True
        return any(
            sum(h - lw for lw, h, v in spans.over(lo, hi) if v == version) != hi - lo for lo, hi, version in newest
        )

    def _held(self, x: Operand, *, newest: bool = True) -> str | None:
        """None if the tier of x holds it where it says, in its newest version."""
        covered = 0
        place = f"{x.tier}@{x.address}"
        for lo, hi, (block, shift, version) in self.arenas[x.tier].over(x.address, x.address + x.nbytes):
            if block != x.block or shift != x.lo - x.address:
                return f"I3: {x.block}[{x.lo}:{x.hi}] is expected at {place}, which holds {block}"
            stale = any(v != version for _, _, v in self.newest[block].over(lo + shift, hi + shift))
            if newest and stale:
                return f"I2: {x.block}[{x.lo}:{x.hi}] at {place} is not its newest version"
            covered += hi - lo
        if covered != x.nbytes:
            return f"I2: {x.block}[{x.lo}:{x.hi}] at {place}: {x.nbytes - covered} bytes are not there yet"
        return None

    def homes(self) -> str | None:
        """None if the newest version of every block that lives on is at its home."""
        for block in self.workload.of_life("durable", "carried"):
            held = self.placement.host_bytes.get(block.name, 0)
            at = self.placement.address.get(block.name, 0)
            parts = [Operand(block=block.name, lo=0, hi=held, address=at, reads=True, writes=False)] if held else []
            fault = next(filter(None, map(self._held, parts)), None)
            if fault is not None:
                return f"I4: at the end of the pass {fault}"
            tail = Operand(block=block.name, lo=held, hi=block.nbytes, address=0, reads=True, writes=False)
            if held < block.nbytes and self._stale(self.nvme[block.name], tail):
                return f"I4: at the end of the pass the newest {block.name} is not on NVME"
        return None


_WAYS = {
    Verb.H2D: (("HOST", True, False), ("DEVICE", False, True)),
    Verb.D2H: (("DEVICE", True, False), ("HOST", False, True)),
    Verb.N2D: (("NVME", True, False), ("DEVICE", False, True)),
}
"""Tier, reads and writes of the operands of a copy. NVME is named in no other action: READ and WRITE imply it."""
_STEPS = {Verb.READ: _Memory._read, Verb.WRITE: _Memory._write, Verb.DROP: _Memory._drop}
"""What does no op's work; everything else is `_Memory._run`."""


def check(workload: Workload, placement: Placement, schedule: Schedule, *, whole: bool = True) -> None:
    """Raises `ScheduleError` with the lines around the fault unless `schedule` keeps I1 to I4.

    A cyclic schedule is followed through its lead-in, two passes and a last one. `whole=False` skips the comparison
    with the program's ops (for schedules that are no program: loading and saving what lives in HOST).
    """
    if whole:
        _prove_complete(workload, workload.programs[schedule.name], schedule)
        _prove_tiles(workload, workload.programs[schedule.name], schedule)
    _prove_bounds(workload, schedule)
    memory = _Memory(workload, placement)
    for action in schedule.lead_in:
        _raise(schedule, memory.step(action), None, action)
    passes = 3 if schedule.cyclic else 1
    for number in range(passes):
        for index, action in enumerate(schedule.actions):
            if not (action.next_pass and number == passes - 1):
                _raise(schedule, memory.step(action), index, action)
        _raise(schedule, memory.homes(), None, None)
    _prove_order(schedule)


def _raise(schedule: Schedule, fault: str | None, index: int | None, action: Action | None) -> None:
    if fault is None:
        return
    where = schedule.around(index) if index is not None else f"    {action or 'end of the pass'}"
    raise ScheduleError(f"schedule {schedule.name}: {fault}\n{where}")


def _prove_bounds(workload: Workload, schedule: Schedule) -> None:
    """Every operand lies in the arena of its block's tier, a copy leads from where to where its verb says; what a last
    pass leaves out neither computes nor stores.
    """
    arenas = {"HOST": schedule.host_bytes, "DEVICE": schedule.device_bytes}
    for action in (*schedule.lead_in, *schedule.actions):
        ways = tuple((x.tier, x.reads, x.writes) for x in action.operands)
        way = _WAYS.get(action.verb)
        if ways != way if way is not None else any(tier == "NVME" for tier, _, _ in ways):
            raise ScheduleError(f"schedule {schedule.name}: {action.verb} does not lead from {ways}")
        for x in action.operands:
            if x.tier == "NVME":
                continue  # what is not there is stale there
            if not 0 <= x.address <= x.address + x.nbytes <= arenas[x.tier]:
                raise ScheduleError(
                    f"schedule {schedule.name}: I1: {x} is outside of {arenas[x.tier]} bytes of {x.tier}"
                )
            if x.tier != workload.blocks[x.block].tier:
                raise ScheduleError(f"schedule {schedule.name}: {x} belongs to {workload.blocks[x.block].tier}")
        if action.next_pass and action.verb is not Verb.READ:
            raise ScheduleError(f"schedule {schedule.name}: a last pass would leave out {action}")


def _prove_complete(workload: Workload, program: Program, schedule: Schedule) -> None:
    """Every op of the program runs over all its bytes, and ops that share changing bytes keep their order."""
    ran: dict[str, list[tuple[str, int, int]]] = {}
    covered: dict[tuple[str, str], int] = {}
    for action in schedule.actions:
        for x in action.operands if action.verb.is_op else ():
            uses = ran.setdefault(x.block, [])
            if not uses or uses[-1][0] != action.op:
                uses.append((action.op, x.reads, x.writes))
            if x.lo != covered.get((action.op, x.block), 0):
                raise ScheduleError(f"schedule {schedule.name}: {action.name} leaves a gap in {x.block} before {x.lo}")
            covered[action.op, x.block] = x.hi
    for name, block in workload.blocks.items():
        wanted = [(op.name, t.reads, t.writes) for op in program.ops for t in op.touches if t.block == name]
        found = ran.get(name, [])
        if _settled(found) != _settled(wanted):
            raise ScheduleError(f"schedule {schedule.name}: {name} is used by {found}, the program says {wanted}")
        short = [op for op, _, _ in wanted if covered[op, name] != block.nbytes]
        if short:
            raise ScheduleError(
                f"schedule {schedule.name}: {short[0]} covers {covered[short[0], name]} bytes of {name}"
            )


def _prove_tiles(workload: Workload, program: Program, schedule: Schedule) -> None:
    """All operands of a tile are the same part of their blocks: of a block of half the bytes, half of the bytes."""
    tiled = {op.name for op in program.ops if op.tiled}
    for action in schedule.actions:
        if not action.verb.is_op or action.op not in tiled:
            continue
        sizes = [workload.blocks[x.block].nbytes for x in action.operands]
        largest = max(sizes)
        tile = action.operands[sizes.index(largest)]
        for x, nbytes in zip(action.operands, sizes, strict=True):
            ratio = 1 if nbytes == largest else 2
            both_end = x.hi == nbytes and tile.hi == largest  # half of an odd page is a page
            if ratio * x.lo != tile.lo or not (ratio * x.hi == tile.hi or both_end):
                raise ScheduleError(f"schedule {schedule.name}: {x} is another part than {tile} in {action.name}")


def _settled(uses: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Readers between two writers in any order: only their order against writers matters."""
    result: list[tuple[str, int, int]] = []
    readers: list[tuple[str, int, int]] = []
    for use in uses:
        if use[2]:
            result += [*sorted(readers), use]
            readers = []
        else:
            readers.append(use)
    return result + sorted(readers)


def _prove_order(schedule: Schedule) -> None:
    """Every two actions that touch the same bytes, one of them writing, are ordered by a chain of `after`."""
    count = len(schedule.actions)
    spaces: dict[str, _Spans[tuple[int, frozenset[int]]]] = {}
    for index in range(count * (2 if schedule.cyclic else 1)):
        action = schedule.actions[index % count]
        if any(waited - back * count >= index % count for waited, back in action.after):
            raise ScheduleError(f"schedule {schedule.name}: line {index % count} waits for a later line")
        needed: set[int] = set()
        for space, lo, hi, writes in touched(action):
            needed |= _toucher(spaces.setdefault(space, _Spans()), lo, hi, index, writes)
        for earlier in needed - {index}:
            if not _waits_for(schedule, index, earlier):
                raise ScheduleError(
                    f"schedule {schedule.name}: I2/I3: nothing orders {schedule.actions[earlier % count].name} before "
                    f"{action.name}, which touches the same bytes\n{schedule.around(index % count)}"
                )


def _waits_for(schedule: Schedule, index: int, earlier: int) -> bool:
    """True if a chain of `after` leads from `index` back to `earlier` (both counted on over the passes)."""
    count = len(schedule.actions)
    todo, seen = [index], {index}
    while todo:
        at = todo.pop()
        for waited, back in schedule.actions[at % count].after:
            other = waited + (at // count - back) * count
            if other == earlier:
                return True
            if other > earlier and other not in seen:
                seen.add(other)
                todo.append(other)
    return False


def _toucher(spans: _Spans[tuple[int, frozenset[int]]], lo: int, hi: int, index: int, writes: bool) -> set[int]:
    """Record that `index` touches lo:hi; returns those before it that must be ordered before it."""
    needed: set[int] = set()
    parts = list(spans.over(lo, hi))
    for _, _, (writer, readers) in parts:
        needed.add(writer)
        if writes:
            needed |= readers
    needed.discard(-1)
    if writes:
        spans.put(lo, hi, (index, frozenset()))
        return needed
    at = lo
    for start, end, (writer, readers) in parts:
        if start > at:
            spans.put(at, start, (-1, frozenset({index})))
        spans.put(start, end, (writer, readers | {index}))
        at = end
    if at < hi:
        spans.put(at, hi, (-1, frozenset({index})))
    return needed
