"""Where every block lives and how far ahead it moves: from a workload, a machine and a budget to a plan.

Scope: knobs (by simulating candidates), the sum of the HOST budget line by line, and the refusal of what cannot fit.
Not here: how much of a budget can be pinned (`filling.py`), schedules themselves (`lower.py`), rates (`hardware.py`),
printing for a person (the caller).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tiering.device import on_device, worth_keeping
from tiering.errors import BudgetError
from tiering.filling import Budget, Lowered, Search, gain_of, main_program
from tiering.hardware import Hardware
from tiering.homes import Placement
from tiering.lower import Draft
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import Timeline, alone_s, simulate
from tiering.turns import Knobs
from tiering.urgency import by_urgency
from tiering.workload import Tier, Workload

MiB = 1 << 20

_CANDIDATES = (
    Knobs(lookahead=2, lag=1, tile_bytes=16 * MiB, ring=6),
    Knobs(lookahead=4, lag=1, tile_bytes=8 * MiB, ring=8, copies_ahead=2),
    Knobs(lookahead=2, lag=2, tile_bytes=16 * MiB, ring=8),
    *(Knobs(lookahead=2, lag=2, tile_bytes=4 * MiB, ring=ring, copies_ahead=2) for ring in (6, 4)),
    Knobs(lookahead=4, lag=0, tile_bytes=4 * MiB, ring=4),
    Knobs(lookahead=2, lag=1, tile_bytes=4 * MiB, ring=4),
    Knobs(lookahead=2, lag=0, tile_bytes=4 * MiB, ring=6),
    Knobs(lookahead=1, lag=0, tile_bytes=8 * MiB, ring=8),
    Knobs(lookahead=1, lag=0, tile_bytes=MiB, ring=4),
    *(Knobs(lookahead=1, lag=0, tile_bytes=MiB // 4, ring=ring) for ring in (4, 1)),
    Knobs(lookahead=0, lag=0, tile_bytes=MiB, ring=4),
    *(Knobs(lookahead=0, lag=0, tile_bytes=MiB // 4, ring=ring, copies_ahead=0) for ring in (4, 1)),
)
"""From generous to frugal; the small tiles make tight budgets work. Picked one by one from a grid, each for what it
added to those before over made-up steps, machines and budgets.
"""
_MOST_TILES = 16
"""Tiles of the largest block: tiles grow with it, so that a schedule stays some thousand lines long."""
_DIRECT_AHEAD = (2, 4)
"""Computing ops ahead of an N2D: it has a drive to wait for, and no stay in HOST to be ahead in."""
_LEAN, _NEAR_LIMIT = (3 / 4, 1 / 2, 1 / 4), 1.01
"""Lanes that take the first ready action can lose some time by a byte more in HOST (an anomaly of list scheduling). So
that nobody pays for it, a plan that is not near its bound is held against some that leave a part of the budget unused.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a memory sum: bytes of what."""

    what: str
    nbytes: int


class ShortError(BudgetError):
    """No plan fits. tier: the one that is short; it needs `needed_bytes`, the sum of `lines`, and has `given_bytes`.
    cause: what is to blame, for a person.
    """

    def __init__(self, tier: Tier, lines: tuple[Line, ...], given_bytes: int, cause: str, fix: str) -> None:
        needed = sum(line.nbytes for line in lines)
        rows = "\n".join(f"  {line.what:<34} {line.nbytes / MiB:>12.1f} MiB" for line in lines)
        super().__init__(
            f"{tier} needs {needed / MiB:.1f} MiB, the budget is {given_bytes / MiB:.1f} MiB. The least that works:\n"
            f"{rows}\n  {'sum':<34} {needed / MiB:>12.1f} MiB\n"
            + (f"{cause}\n" if cause else "")
            + f"Fix: {fix.format(f'{-(-needed // MiB)}MiB')}."
        )
        self.tier, self.lines, self.needed_bytes, self.given_bytes, self.cause = tier, lines, needed, given_bytes, cause


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
    device_bytes: int
    lines: tuple[Line, ...]
    timeline: Timeline
    queue_depth: int

    def bytes_at(self, kind: str) -> tuple[int, int]:
        """(HOST, NVME) bytes that are home to blocks of a kind."""
        blocks = [b for b in self.workload.of_life("durable", "carried", "passing") if b.kind == kind]
        host = sum(self.placement.host_bytes.get(block.name, 0) for block in blocks)
        return host, sum(block.nbytes for block in blocks) - host


def make_plan(
    workload: Workload,
    hardware: Hardware,
    host_budget: int,
    resident: float | None = None,
    device_budget: int | None = None,
    *,
    update_there: bool = False,
    candidates: Sequence[Knobs] | None = None,
) -> Plan:
    """The fastest plan by simulation that keeps the arena within `host_budget` bytes.

    resident: the share of durable bytes to pin in HOST, 0 to 1; None: as much as fits. device_budget: bytes of a device
    with memory of its own; None: ops compute on HOST. update_there: updates run on it too. candidates: knobs to try,
    quickly; None: the usual ones. With `hardware.direct_read` a plan that reads straight into the device is tried once
    one is found that fits. Raises `ShortError` with the sum line by line and the smallest budget that works.
    """
    knobs, thorough = (_scaled(workload), True) if candidates is None else (candidates, False)
    if device_budget is None:
        return _best(workload, hardware, Budget(host_bytes=host_budget), resident, knobs, thorough)
    budget = Budget(host_bytes=host_budget, device_bytes=device_budget)
    plan = _best(on_device(workload, update=update_there), hardware, budget, resident, knobs, False)
    keep = worth_keeping(workload, main_program(workload), device_budget - plan.device_bytes)
    if keep or thorough:
        kept = on_device(workload, keep, update=update_there)
        plan = _rather(plan, partial(_best, kept, hardware, budget, resident, [plan.knobs], thorough))
    if hardware.direct_read is not None:
        ahead = sorted({plan.knobs.copies_ahead, *_DIRECT_AHEAD})
        direct = [replace(plan.knobs, direct=True, copies_ahead=ops) for ops in ahead]
        plan = _rather(plan, partial(_best, plan.workload, hardware, budget, resident, direct, False))
    return plan


def _rather(plan: Plan, planned: Callable[[], Plan]) -> Plan:
    """The other plan, if there is one and it is better."""
    try:
        other = planned()
    except BudgetError:
        return plan
    return other if _better(other.timeline, plan.timeline) else plan


def _best(
    workload: Workload,
    hardware: Hardware,
    budget: Budget,
    resident: float | None,
    candidates: Sequence[Knobs],
    thorough: bool,
) -> Plan:
    main, search = main_program(workload).name, Search(workload=workload, gain=gain_of(workload), resident=resident)
    best: tuple[Lowered, Schedule, Timeline] | None = None

    def look(knobs: Knobs, within: Budget, *, whole: bool = False, fine: bool = False) -> None:
        nonlocal best
        lowered = search.fill(knobs, within, whole=whole, fine=fine)
        if not lowered.fits(budget):
            return
        if best is not None and (lowered.knobs, lowered.placement) == (best[0].knobs, best[0].placement):
            return  # the same schedule
        if best is not None and not _promising(workload, hardware, lowered.drafts[main], best[2]):
            return
        schedule = lowered.drafts[main].schedule()
        schedule = by_urgency(schedule, alone_s(schedule, workload, hardware))
        timeline = simulate(schedule, workload, hardware)
        if best is not None and not _better(timeline, best[2]):
            return
        lowered = search.completed(lowered)
        if lowered.fits(budget):
            best = (lowered, schedule, timeline)
        elif not whole:
            look(knobs, within, whole=True, fine=fine)

    for knobs in candidates:
        look(knobs, budget)
    if best is not None:
        if thorough:
            look(best[0].knobs, budget, fine=True)
        far = best[2].pass_s > best[2].limit_s * _NEAR_LIMIT
        for lean in _LEAN if thorough and far else ():
            look(best[0].knobs, replace(budget, host_bytes=int(lean * budget.host_bytes)))
        lowered, schedule, timeline = best
        return _plan(workload, hardware, lowered, *_in_better_order(schedule, timeline, workload, hardware))
    filled = [search.fill(knobs, budget, whole=True) for knobs in candidates]
    raise _refusal(workload, min(filled, key=lambda lowered: lowered.over(budget)), budget, resident)


def _in_better_order(
    schedule: Schedule, timeline: Timeline, workload: Workload, hardware: Hardware
) -> tuple[Schedule, Timeline]:
    """By urgency, or in list order where that is faster after all: it hardly ever is."""
    listed = replace(schedule, ranks=())
    other = simulate(listed, workload, hardware)
    return (listed, other) if _better(other, timeline) else (schedule, timeline)


def _promising(workload: Workload, hardware: Hardware, draft: Draft, best: Timeline) -> bool:
    """False if the bound of a pass alone says that it cannot be better: then it need not be simulated."""
    direct_bytes = sum(draft.direct_bytes.values())
    read_s = (draft.read_bytes - direct_bytes) / hardware.read.per_s
    if direct_bytes and hardware.direct_read is not None:
        read_s += direct_bytes / hardware.direct_read.per_s
    io_s = (read_s + draft.written_bytes / hardware.write.per_s) * (
        hardware.mixed_stretch() if draft.read_bytes and draft.written_bytes else 1.0
    )
    least_s = max(io_s, best.limit_s if best.bottleneck != "NVMe" else 0.0)
    if draft.read_bytes + draft.written_bytes < best.read_bytes + best.written_bytes:
        return least_s <= best.pass_s * 1.001
    return least_s < best.pass_s * 0.999


def _better(one: Timeline, other: Timeline) -> bool:
    """Faster, or as fast (to 0.1 %) with fewer bytes moved: those that buy no time only wear the drive."""
    if one.pass_s < other.pass_s * 0.999:
        return True
    fewer = one.read_bytes + one.written_bytes < other.read_bytes + other.written_bytes
    return fewer and one.pass_s <= other.pass_s * 1.001


def refuse(workload: Workload, host_budget: int, resident: float | None = None) -> None:
    """Raises `BudgetError`, as `make_plan` would, without knowing the machine: the quick answer to "does it fit"."""
    budget = Budget(host_bytes=host_budget)
    search = Search(workload=workload, gain=gain_of(workload), resident=resident)
    lowered = search.fill(frugal(workload), budget, whole=True)
    if not lowered.fits(budget):
        raise _refusal(workload, lowered, budget, resident)


def frugal(workload: Workload) -> Knobs:
    """The knobs that take the least memory: what does not fit with them does not fit."""
    return _scaled(workload)[-1]


def _scaled(workload: Workload) -> list[Knobs]:
    """Candidates with tiles that fit the workload's blocks: none larger than the largest, and not too many of it."""
    largest = max(block.nbytes for block in workload.blocks.values())
    least = 1 << max(0, (largest // _MOST_TILES - 1).bit_length())
    knobs = [replace(k, tile_bytes=min(max(k.tile_bytes, least), max(largest, MiB))) for k in _CANDIDATES]
    return list(dict.fromkeys(knobs))


def _plan(workload: Workload, hardware: Hardware, lowered: Lowered, main: Schedule, timeline: Timeline) -> Plan:
    others = {name: draft.schedule() for name, draft in lowered.drafts.items() if name != main.name}
    return Plan(
        workload=workload,
        placement=lowered.placement,
        knobs=lowered.knobs,
        schedules={main.name: main} | others,
        load=_homes_schedule("load", Verb.READ, workload, lowered.placement),
        save=_homes_schedule("save", Verb.WRITE, workload, lowered.placement),
        host_bytes=lowered.host_bytes,
        device_bytes=lowered.device_bytes,
        lines=tuple(_lines(workload, lowered)),
        timeline=timeline,
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


def _lines(workload: Workload, lowered: Lowered) -> Iterable[Line]:
    placement = lowered.placement
    for kind in dict.fromkeys(block.kind for block in workload.blocks.values()):
        named = [block.name for block in workload.blocks.values() if block.kind == kind]
        nbytes = sum(placement.host_bytes.get(name, 0) for name in named)
        if nbytes:
            yield Line(what=f"resident {kind}", nbytes=nbytes)
    widest = max(lowered.drafts.values(), key=lambda draft: draft.host_bytes)
    blocks = widest.host_bytes - placement.fixed_bytes - widest.ring_bytes - widest.lost_bytes
    yield Line(what=f"blocks passing through ({widest.program.name})", nbytes=blocks)
    yield Line(what="tile ring", nbytes=widest.ring_bytes)
    yield Line(what="lost to fit", nbytes=widest.lost_bytes)
    if lowered.host_bytes > widest.host_bytes:
        yield Line(what="a whole block, to fill it", nbytes=lowered.host_bytes - widest.host_bytes)


def _refusal(workload: Workload, least: Lowered, budget: Budget, resident: float | None) -> ShortError:
    if budget.device_bytes is not None and least.device_bytes > budget.device_bytes:
        line = Line(what="blocks that ops compute on", nbytes=least.device_bytes)
        return ShortError("DEVICE", (line,), budget.device_bytes, "", "device_budget >= {}")
    tiles = workload.tile_only()
    whole = [block for block in workload.blocks.values() if block.tier == "HOST" and block.name not in tiles]
    widest = max(whole, key=lambda block: block.nbytes, default=None)
    cause = f"The widest block in one piece is {widest.name}: {widest.nbytes / MiB:.1f} MiB." if widest else ""
    less = "" if not resident else f", or resident < {resident:g}"
    return ShortError("HOST", tuple(_lines(workload, least)), budget.host_bytes, cause, f"host_budget >= {{}}{less}")
