"""Where every block lives and how far ahead it moves: from a workload, a machine and a budget to a plan.

Scope: homes (what gains most per byte is pinned first, spread evenly over the units), knobs (by simulating
candidates), the sum of the HOST budget line by line, and the refusal of what cannot fit.
Not here: schedules themselves (`lower.py`), rates (`hardware.py`), printing for a person (the caller).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiering.errors import BudgetError
from tiering.hardware import Hardware
from tiering.homes import Placement, place
from tiering.lower import Knobs, lower
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import Timeline, simulate
from tiering.workload import Block, Program, Workload

MiB = 1 << 20

# From generous to frugal. Tiles of 4 MiB and more reach a drive's full rate; the small ones make tight budgets work.
_CANDIDATES = (
    *(Knobs(lookahead=ahead, lag=1, tile_bytes=8 * MiB, ring=ring) for ahead in (4, 2) for ring in (8, 4)),
    *(Knobs(lookahead=ahead, lag=lag, tile_bytes=4 * MiB, ring=4) for ahead, lag in ((2, 1), (1, 1), (1, 0))),
    *(Knobs(lookahead=ahead, lag=0, tile_bytes=MiB, ring=4) for ahead in (1, 0)),
    Knobs(lookahead=0, lag=0, tile_bytes=256 * 1024, ring=1),
)
_MOST_TILES = 16
"""Tiles of the largest block: tiles grow with it, so that a schedule stays some thousand lines long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a memory sum: bytes of what."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`schedules` by program name; `load` and `save` move the homes in HOST. `host_bytes` is the arena's size,
    `queue_depth` how many transfers are in flight at a time."""

    workload: Workload
    placement: Placement
    knobs: Knobs
    schedules: Mapping[str, Schedule]
    load: Schedule
    save: Schedule
    host_bytes: int
    lines: tuple[Line, ...]
    timeline: Timeline
    queue_depth: int

    def bytes_at(self, kind: str) -> tuple[int, int]:
        """(HOST, NVME) bytes that are home to blocks of a kind."""
        blocks = [b for b in self.workload.of_life("durable", "carried") if b.kind == kind]
        host = sum(self.placement.host_bytes.get(block.name, 0) for block in blocks)
        return host, sum(block.nbytes for block in blocks) - host


def make_plan(workload: Workload, hardware: Hardware, host_budget: int, resident: float | None = None) -> Plan:
    """The fastest plan by simulation that keeps the arena within `host_budget` bytes.

    resident: the share of durable bytes to pin in HOST, 0 to 1; None: as much as fits. Raises `BudgetError` with the
    sum line by line and the smallest budget that works.
    """
    best: Plan | None = None
    least: _Lowered | None = None
    for knobs in _scaled(workload):
        lowered = _fill(workload, knobs, host_budget, resident)
        if lowered.host_bytes > host_budget:
            least = lowered if least is None or lowered.host_bytes < least.host_bytes else least
            continue
        plan = _plan(workload, hardware, lowered)
        if best is None or _better(plan.timeline, best.timeline):
            best = plan
    if best is not None:
        return best
    assert least is not None
    raise BudgetError(_refusal(workload, least, host_budget, resident))


def _better(one: Timeline, other: Timeline) -> bool:
    """Faster, or as fast (to 0.1 %) with fewer bytes moved: those that buy no time only wear the drive."""
    if one.pass_s < other.pass_s * 0.999:
        return True
    fewer = one.read_bytes + one.written_bytes < other.read_bytes + other.written_bytes
    return fewer and one.pass_s <= other.pass_s * 1.001


def refuse(workload: Workload, host_budget: int, resident: float | None = None) -> None:
    """Raises `BudgetError`, as `make_plan` would, without knowing the machine: the quick answer to "does it fit"."""
    lowered = _fill(workload, _scaled(workload)[-1], host_budget, resident)
    if lowered.host_bytes > host_budget:
        raise BudgetError(_refusal(workload, lowered, host_budget, resident))


def _scaled(workload: Workload) -> list[Knobs]:
    """Candidates with tiles that fit the workload's blocks: none larger than the largest, and not too many of it."""
    largest = max(block.nbytes for block in workload.blocks.values())
    least = 1 << max(0, (largest // _MOST_TILES - 1).bit_length())
    knobs = [replace(k, tile_bytes=min(max(k.tile_bytes, least), max(largest, MiB))) for k in _CANDIDATES]
    return list(dict.fromkeys(knobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowered:
    """A candidate with its schedules; its time is not known yet."""

    knobs: Knobs
    placement: Placement
    schedules: Mapping[str, Schedule]

    @property
    def host_bytes(self) -> int:
        return max(schedule.host_bytes for schedule in self.schedules.values())


def _lowered(workload: Workload, knobs: Knobs, homes: Mapping[str, int]) -> _Lowered:
    placement = place(homes)
    schedules = {name: lower(workload, program, placement, knobs) for name, program in workload.programs.items()}
    return _Lowered(knobs=knobs, placement=placement, schedules=schedules)


def _fill(workload: Workload, knobs: Knobs, budget: int, resident: float | None) -> _Lowered:
    """Schedules with these knobs that pin as much as `budget` (or exactly the share `resident`) allows."""
    durable = sum(block.nbytes for block in workload.of_life("durable"))
    carried = sum(block.nbytes for block in workload.of_life("carried"))
    gain = _gain(workload)
    pinned = 0 if resident is None else round(resident * durable)
    found = _lowered(workload, knobs, choose_homes(workload, gain, knobs, pinned, 0))
    if resident is not None:
        spare = budget - found.host_bytes
        if carried and spare > 0:
            fuller = _lowered(workload, knobs, choose_homes(workload, gain, knobs, pinned, spare))
            found = fuller if fuller.host_bytes <= budget else found
        return found
    for _ in range(4):
        spare = budget - found.host_bytes
        if spare < knobs.tile_bytes or pinned >= durable + carried:
            break
        fuller = _lowered(workload, knobs, choose_homes(workload, gain, knobs, pinned + spare, None))
        if fuller.host_bytes > budget:
            break
        pinned, found = pinned + spare, fuller
    return found


def _gain(workload: Workload) -> dict[str, float]:
    """NVME bytes a pass that each byte of a block costs when it is not pinned: counted on the schedule itself."""
    empty = Placement(host_bytes={}, address={}, fixed_bytes=0)
    coarse = max(block.nbytes for block in workload.blocks.values())
    main = _main(workload)
    schedule = lower(workload, main, empty, Knobs(lookahead=0, lag=0, tile_bytes=coarse, ring=1))
    moved = dict.fromkeys(workload.blocks, 0)
    for action in schedule.actions:
        if action.verb in (Verb.READ, Verb.WRITE):
            moved[action.operands[0].block] += action.nbytes
    return {name: nbytes / workload.blocks[name].nbytes for name, nbytes in moved.items()}


def _main(workload: Workload) -> Program:
    """The program that repeats itself; the only one where there is no such."""
    programs = list(workload.programs.values())
    return next((program for program in programs if program.cyclic), programs[0])


def choose_homes(
    workload: Workload, gain: Mapping[str, float], knobs: Knobs, durable: int, carried: int | None
) -> dict[str, int]:
    """Bytes of each block to pin, at most `durable` of durable blocks and `carried` of carried ones.

    carried None: both share the first figure. What gains most a byte goes first; within a class the share is spread
    evenly over the blocks, so that no stretch of the pass is short of I/O while another has too much.
    """
    tiles = workload.tile_only()
    homes: dict[str, int] = {}
    left = {"durable": durable, "carried": durable if carried is None else carried}
    pool = sorted(workload.of_life("durable", "carried"), key=lambda block: -gain[block.name])
    for level in sorted({round(gain[block.name], 3) for block in pool}, reverse=True):
        for life in ("durable", "carried"):
            same = [block for block in pool if round(gain[block.name], 3) == level and block.life == life]
            spent = _spread_share(same, left[life], knobs.tile_bytes, tiles, homes)
            for key in left if carried is None else (life,):
                left[key] -= spent
    return homes


def _spread_share(
    blocks: Sequence[Block], room: int, tile_bytes: int, tiles: frozenset[str], homes: dict[str, int]
) -> int:
    """Pin an even share of `blocks` within `room` bytes; returns the bytes spent."""
    total = sum(block.nbytes for block in blocks)
    share = min(1.0, max(0, room) / total) if total else 0.0
    seen = spent = 0
    for block in blocks:
        seen += block.nbytes
        due = min(room, round(share * seen)) - spent
        if due >= block.nbytes:
            homes[block.name] = block.nbytes
        elif block.name in tiles and due >= tile_bytes:
            homes[block.name] = due // tile_bytes * tile_bytes
        spent += homes.get(block.name, 0)
    return spent


def _plan(workload: Workload, hardware: Hardware, lowered: _Lowered) -> Plan:
    return Plan(
        workload=workload,
        placement=lowered.placement,
        knobs=lowered.knobs,
        schedules=lowered.schedules,
        load=_homes_schedule("load", Verb.READ, workload, lowered.placement),
        save=_homes_schedule("save", Verb.WRITE, workload, lowered.placement),
        host_bytes=lowered.host_bytes,
        lines=tuple(_lines(workload, lowered)),
        timeline=simulate(lowered.schedules[_main(workload).name], workload, hardware),
        queue_depth=hardware.queue_depth,
    )


def _homes_schedule(name: str, verb: Verb, workload: Workload, placement: Placement) -> Schedule:
    """One transfer for each durable home in HOST."""
    actions = []
    for block in workload.of_life("durable"):
        held = placement.host_bytes.get(block.name, 0)
        if held:
            at = placement.address[block.name]
            operand = Operand(block=block.name, lo=0, hi=held, address=at, reads=False, writes=False)
            actions.append(Action(verb=verb, name=f"{verb} {block.name}", lane="io", operands=(operand,)))
    assert not any(order(actions, cyclic=False)), "homes overlap"
    return Schedule(name=name, actions=tuple(actions), host_bytes=placement.fixed_bytes)


def _lines(workload: Workload, lowered: _Lowered) -> Iterable[Line]:
    placement = lowered.placement
    for kind in dict.fromkeys(block.kind for block in workload.blocks.values()):
        named = [block.name for block in workload.blocks.values() if block.kind == kind]
        nbytes = sum(placement.host_bytes.get(name, 0) for name in named)
        if nbytes:
            yield Line(what=f"resident {kind}", nbytes=nbytes)
    widest = max(lowered.schedules.values(), key=lambda schedule: schedule.host_bytes)
    blocks = widest.host_bytes - placement.fixed_bytes - widest.ring_bytes - widest.lost_bytes
    yield Line(what=f"blocks passing through ({widest.name})", nbytes=blocks)
    yield Line(what="tile ring", nbytes=widest.ring_bytes)
    yield Line(what="lost to fit", nbytes=widest.lost_bytes)


def _refusal(workload: Workload, least: _Lowered, budget: int, resident: float | None) -> str:
    needed = least.host_bytes
    rows = "\n".join(f"  {line.what:<34} {line.nbytes / MiB:>12.1f} MiB" for line in _lines(workload, least))
    less = "" if not resident else f", or resident < {resident:g}"
    return (
        f"HOST needs {needed / MiB:.1f} MiB, the budget is {budget / MiB:.1f} MiB. The least that works:\n{rows}\n"
        f"  {'sum':<34} {needed / MiB:>12.1f} MiB\n"
        f"Fix: host_budget >= {-(-needed // MiB)}MiB{less}."
    )
