"""Where every block lives and how far ahead it moves: from a workload, a machine and a budget to a plan.

Scope: homes (what gains most per byte is pinned first, spread evenly over the units), knobs (by simulating
candidates), the sum of the HOST budget line by line, and the refusal of what cannot fit.
Not here: schedules themselves (`lower.py`), rates (`hardware.py`), printing for a person (the caller).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiering.errors import BudgetError
from tiering.hardware import Hardware, assumed_hardware
from tiering.lower import Knobs, Placement, lower
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import Timeline, simulate
from tiering.workload import PAGE, Block, Program, Workload

MiB = 1 << 20

# From generous to frugal. Tiles of 1 to 8 MiB reach a drive's full rate; the small ones only make tight budgets work.
_CANDIDATES = (
    *(Knobs(lookahead=ahead, lag=1, tile_bytes=8 * MiB, ring=ring) for ahead in (4, 2) for ring in (8, 4)),
    *(Knobs(lookahead=ahead, lag=lag, tile_bytes=4 * MiB, ring=4) for ahead, lag in ((2, 1), (1, 1), (1, 0))),
    *(Knobs(lookahead=ahead, lag=0, tile_bytes=MiB, ring=4) for ahead in (1, 0)),
    Knobs(lookahead=0, lag=0, tile_bytes=256 * 1024, ring=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a memory sum: bytes of what."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`schedules` by program name; `load` and `save` move the homes in HOST. `host_bytes` is the arena's size."""

    workload: Workload
    placement: Placement
    knobs: Knobs
    schedules: Mapping[str, Schedule]
    load: Schedule
    save: Schedule
    host_bytes: int
    lines: tuple[Line, ...]
    timeline: Timeline

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
    frugal: tuple[int, tuple[Line, ...]] | None = None
    for knobs in _fitting(workload, _CANDIDATES):
        plan = _fill(workload, hardware, knobs, host_budget, resident)
        if plan.host_bytes > host_budget:
            if frugal is None or plan.host_bytes < frugal[0]:
                frugal = plan.host_bytes, plan.lines
        elif best is None or plan.timeline.pass_s < best.timeline.pass_s * 0.999:
            best = plan
    if best is not None:
        return best
    assert frugal is not None
    raise BudgetError(_refusal(frugal[0], frugal[1], host_budget, resident))


def refuse(workload: Workload, host_budget: int, resident: float | None = None) -> None:
    """Raises `BudgetError`, as `make_plan` would, without knowing the machine: the quick answer to "does it fit"."""
    knobs = _CANDIDATES[-1]
    plan = _fill(workload, assumed_hardware(), knobs, host_budget, resident)
    if plan.host_bytes > host_budget:
        raise BudgetError(_refusal(plan.host_bytes, plan.lines, host_budget, resident))


def _fitting(workload: Workload, candidates: Iterable[Knobs]) -> list[Knobs]:
    """Candidates whose tile is not larger than the largest block; the last one always stays."""
    largest = max(block.nbytes for block in workload.blocks.values())
    listed = list(candidates)
    return [knobs for knobs in listed if knobs.tile_bytes <= max(largest, MiB)] or listed[-1:]


def _fill(workload: Workload, hardware: Hardware, knobs: Knobs, budget: int, resident: float | None) -> Plan:
    """The plan with these knobs that pins as much as `budget` (or exactly the share `resident`) allows."""
    durable = sum(block.nbytes for block in workload.of_life("durable"))
    gain = _gain(workload)
    pinned = 0 if resident is None else round(resident * durable)
    plan = _build(workload, hardware, knobs, choose_homes(workload, gain, knobs, pinned, 0))
    carried = sum(block.nbytes for block in workload.of_life("carried"))
    if resident is not None and carried and plan.host_bytes < budget:
        fuller = _build(
            workload, hardware, knobs, choose_homes(workload, gain, knobs, pinned, budget - plan.host_bytes)
        )
        return fuller if fuller.host_bytes <= budget else plan
    for _ in range(4 if resident is None else 0):
        spare = budget - plan.host_bytes
        if spare < knobs.tile_bytes or pinned >= durable + carried:
            break
        homes = choose_homes(workload, gain, knobs, pinned + spare, None)
        fuller = _build(workload, hardware, knobs, homes)
        if fuller.host_bytes > budget:
            break
        pinned, plan = pinned + spare, fuller
    return plan


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


def _build(workload: Workload, hardware: Hardware, knobs: Knobs, homes: Mapping[str, int]) -> Plan:
    placement = place(homes)
    schedules = {name: lower(workload, program, placement, knobs) for name, program in workload.programs.items()}
    host_bytes = max(schedule.host_bytes for schedule in schedules.values())
    main = schedules[_main(workload).name]
    return Plan(
        workload=workload,
        placement=placement,
        knobs=knobs,
        schedules=schedules,
        load=_homes_schedule("load", Verb.READ, workload, placement),
        save=_homes_schedule("save", Verb.WRITE, workload, placement),
        host_bytes=host_bytes,
        lines=tuple(_lines(workload, placement, schedules)),
        timeline=simulate(main, workload, hardware),
    )


def place(homes: Mapping[str, int]) -> Placement:
    """Addresses for homes in HOST: one after the other from 0, none over another."""
    address: dict[str, int] = {}
    top = 0
    for name, nbytes in homes.items():
        assert nbytes % PAGE == 0, f"{name}: {nbytes} bytes are no whole pages"
        address[name] = top
        top += nbytes
    return Placement(host_bytes=dict(homes), address=address, fixed_bytes=top)


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


def _lines(workload: Workload, placement: Placement, schedules: Mapping[str, Schedule]) -> Iterable[Line]:
    for kind in dict.fromkeys(block.kind for block in workload.blocks.values()):
        named = [block.name for block in workload.blocks.values() if block.kind == kind]
        nbytes = sum(placement.host_bytes.get(name, 0) for name in named)
        if nbytes:
            yield Line(what=f"resident {kind}", nbytes=nbytes)
    widest = max(schedules.values(), key=lambda schedule: schedule.host_bytes)
    blocks = widest.host_bytes - placement.fixed_bytes - widest.ring_bytes - widest.lost_bytes
    yield Line(what=f"blocks passing through ({widest.name})", nbytes=blocks)
    yield Line(what="tile ring", nbytes=widest.ring_bytes)
    yield Line(what="lost to fit", nbytes=widest.lost_bytes)


def _refusal(needed: int, lines: Sequence[Line], budget: int, resident: float | None) -> str:
    rows = "\n".join(f"  {line.what:<34} {line.nbytes / MiB:>12.1f} MiB" for line in lines)
    less = "" if not resident else f", or tiers.resident below {resident:g}"
    return (
        f"HOST needs {needed / MiB:.1f} MiB, the budget is {budget / MiB:.1f} MiB. The least that works:\n{rows}\n"
        f"  {'sum':<34} {needed / MiB:>12.1f} MiB\n"
        f"Fix: tiers.host_memory >= {-(-needed // MiB)}MiB{less}."
    )
