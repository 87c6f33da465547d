"""Where every block lives and how far ahead it moves: from a workload, a machine and a budget to a plan.

Scope: homes (what gains most per byte is pinned first, spread evenly over the units), knobs (by simulating
candidates), the sum of the HOST budget line by line, and the refusal of what cannot fit.
Not here: schedules themselves (`lower.py`), rates (`hardware.py`), printing for a person (the caller).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiering.device import on_device, worth_keeping
from tiering.errors import BudgetError
from tiering.hardware import Hardware
from tiering.homes import Placement, choose_homes, place
from tiering.lower import Draft
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.simulate import Timeline, simulate
from tiering.turns import Cut, Knobs
from tiering.workload import Program, Tier, Workload

MiB = 1 << 20

# From generous to frugal. Tiles of 4 MiB and more reach a drive's full rate; the small ones make tight budgets work.
_CANDIDATES = (
    *(Knobs(lookahead=4, lag=1, tile_bytes=8 * MiB, ring=ring, copies_ahead=2) for ring in (8, 4)),
    *(Knobs(lookahead=2, lag=1, tile_bytes=8 * MiB, ring=ring) for ring in (8, 4)),
    *(Knobs(lookahead=ahead, lag=lag, tile_bytes=4 * MiB, ring=4) for ahead, lag in ((2, 1), (1, 1), (1, 0))),
    *(Knobs(lookahead=ahead, lag=0, tile_bytes=MiB, ring=4) for ahead in (1, 0)),
    Knobs(lookahead=0, lag=0, tile_bytes=256 * 1024, ring=1, copies_ahead=0),
)
_LOOKS, _FINE_LOOKS = 5, 14
"""Drafts in search of the most that can be pinned: to compare candidates, and for the best of them."""
_MOST_TILES = 16
"""Tiles of the largest block: tiles grow with it, so that a schedule stays some thousand lines long."""
_LEAN, _NEAR_LIMIT = (3 / 4, 1 / 2, 1 / 4), 1.01
"""Lanes that take the first ready action can lose some time by a byte more in HOST (an anomaly of list scheduling). So
that nobody pays for it, a plan that is not near its bound is held against some that leave a part of the budget unused.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that the arenas may take. device_bytes None: ops compute on HOST."""

    host_bytes: int
    device_bytes: int | None = None


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
    quickly; None: the usual ones. Raises `ShortError` with the sum line by line and the smallest budget that works.
    """
    knobs, thorough = (_scaled(workload), True) if candidates is None else (candidates, False)
    if device_budget is None:
        return _best(workload, hardware, Budget(host_bytes=host_budget), resident, knobs, thorough)
    budget = Budget(host_bytes=host_budget, device_bytes=device_budget)
    plan = _best(on_device(workload, update=update_there), hardware, budget, resident, knobs, False)
    keep = worth_keeping(workload, _main(workload), device_budget - plan.device_bytes)
    if not keep and not thorough:
        return plan
    try:
        kept = on_device(workload, keep, update=update_there)
        fuller = _best(kept, hardware, budget, resident, [plan.knobs], thorough)
    except BudgetError:
        return plan
    return fuller if _better(fuller.timeline, plan.timeline) else plan


def _best(
    workload: Workload,
    hardware: Hardware,
    budget: Budget,
    resident: float | None,
    candidates: Sequence[Knobs],
    thorough: bool,
) -> Plan:
    main, search = _main(workload).name, _Search(workload=workload, gain=_gain(workload), resident=resident)
    best: tuple[_Lowered, Schedule, Timeline] | None = None

    def look(knobs: Knobs, within: Budget, *, whole: bool = False, fine: bool = False) -> None:
        nonlocal best
        lowered = _fill(search, knobs, within, whole=whole, fine=fine)
        if not lowered.fits(budget):
            return
        if best is not None and (lowered.knobs, lowered.placement) == (best[0].knobs, best[0].placement):
            return  # the same schedule
        if best is not None and not _promising(workload, hardware, lowered.drafts[main], best[2]):
            return
        schedule = lowered.drafts[main].schedule()
        timeline = simulate(schedule, workload, hardware)
        if best is not None and not _better(timeline, best[2]):
            return
        lowered = _completed(search, lowered)
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
        return _plan(workload, hardware, *best)
    filled = [_fill(search, knobs, budget, whole=True) for knobs in candidates]
    raise _refusal(workload, min(filled, key=lambda lowered: lowered.over(budget)), budget, resident)


def _promising(workload: Workload, hardware: Hardware, draft: Draft, best: Timeline) -> bool:
    """False if the bound of a pass alone says that it cannot be better: then it need not be simulated."""
    io_s = (draft.read_bytes / hardware.read.per_s + draft.written_bytes / hardware.write.per_s) * (
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
    search = _Search(workload=workload, gain=_gain(workload), resident=resident)
    lowered = _fill(search, frugal(workload), budget, whole=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowered:
    """A candidate with the drafts of its schedules; its time is not known yet. widest_bytes: of a durable block, which
    has to be whole in HOST while it is filled, even if all passes only ever need it in tiles.
    """

    knobs: Knobs
    placement: Placement
    drafts: Mapping[str, Draft]
    widest_bytes: int

    @property
    def host_bytes(self) -> int:
        return max(self.widest_bytes, *(draft.host_bytes for draft in self.drafts.values()))

    @property
    def device_bytes(self) -> int:
        return max(draft.device_bytes for draft in self.drafts.values())

    def over(self, budget: Budget) -> tuple[int, int]:
        """Bytes beyond the device's budget and beyond HOST's, 0 where they fit."""
        device = 0 if budget.device_bytes is None else max(0, self.device_bytes - budget.device_bytes)
        return device, max(0, self.host_bytes - budget.host_bytes)

    def fits(self, budget: Budget) -> bool:
        return self.over(budget) == (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What all looks for a plan have in common. cuts: those made so far, by program and what they depend on."""

    workload: Workload
    gain: Mapping[str, float]
    resident: float | None
    cuts: dict[tuple[str, int, int, int], Cut] = field(default_factory=dict)

    def cut(self, program: Program, knobs: Knobs) -> Cut:
        key = (program.name, knobs.lag, knobs.copies_ahead, knobs.tile_bytes)
        if key not in self.cuts:
            self.cuts[key] = Cut(self.workload, program, knobs)
        return self.cuts[key]

    def lowered(self, cuts: Mapping[str, Cut], knobs: Knobs, pinned: int, carried: int | None) -> _Lowered:
        """Drafts over the homes that so many bytes make, as `choose_homes` has them."""
        homes = choose_homes(self.workload, self.gain, knobs.tile_bytes, pinned, carried) if pinned or carried else {}
        placement = place(homes)
        drafts = {name: Draft(cut, placement, knobs) for name, cut in cuts.items()}
        widest = max([block.nbytes for block in self.workload.of_life("durable")], default=0)
        return _Lowered(knobs=knobs, placement=placement, drafts=drafts, widest_bytes=widest)


def _fill(search: _Search, knobs: Knobs, budget: Budget, *, whole: bool = False, fine: bool = False) -> _Lowered:
    """Drafts with these knobs that pin as much as `budget` (or exactly the share `resident`) allows.

    whole: of all programs; otherwise of the one that repeats itself, the widest as a rule: drafting takes time.
    fine: to the last percent of the budget.
    """
    programs = search.workload.programs.values() if whole else [_main(search.workload)]
    cuts = {program.name: search.cut(program, knobs) for program in programs}
    if search.resident is None:
        return _fill_up(search, cuts, knobs, budget, fine)
    return _fill_share(search, cuts, knobs, budget, search.resident)


def _completed(search: _Search, lowered: _Lowered) -> _Lowered:
    """With drafts of the programs that it lacks, over the same homes."""
    others = {
        name: Draft(search.cut(program, lowered.knobs), lowered.placement, lowered.knobs)
        for name, program in search.workload.programs.items()
        if name not in lowered.drafts
    }
    return replace(lowered, drafts={**lowered.drafts, **others})


def _fill_share(search: _Search, cuts: Mapping[str, Cut], knobs: Knobs, budget: Budget, resident: float) -> _Lowered:
    """The share `resident` of what is durable; what else is left of the budget goes to blocks that are not."""
    workload = search.workload
    pinned = round(resident * sum(block.nbytes for block in workload.of_life("durable")))
    found = search.lowered(cuts, knobs, pinned, 0)
    spare = budget.host_bytes - found.host_bytes
    if spare > 0 and any(workload.of_life("carried", "passing")):
        fuller = search.lowered(cuts, knobs, pinned, spare)
        found = fuller if fuller.host_bytes <= budget.host_bytes else found
    return found


def _fill_up(search: _Search, cuts: Mapping[str, Cut], knobs: Knobs, budget: Budget, fine: bool) -> _Lowered:
    """As much as fits. What is pinned is not staged, so a second look finds more room; one too far is halved."""
    everything = sum(block.nbytes for block in search.workload.of_life("durable", "carried", "passing"))
    pinned, too_much = 0, 2 * everything + 1
    found = search.lowered(cuts, knobs, 0, None)
    if not found.fits(budget):
        return found  # thriftier knobs make it smaller, homes hardly ever
    least = budget.host_bytes >> 10 if fine else max(knobs.tile_bytes, budget.host_bytes >> 6)
    for _ in range(_FINE_LOOKS if fine else _LOOKS):
        spare = budget.host_bytes - found.host_bytes
        more = min(spare, everything - pinned, (too_much - pinned) // 2)  # half of the way to what was too much
        if more < min(everything - pinned, least) or not more:
            break
        fuller = search.lowered(cuts, knobs, pinned + more, None)
        if fuller.host_bytes > budget.host_bytes:
            too_much = pinned + more
        else:
            pinned, found = pinned + more, fuller
    return found


def _gain(workload: Workload) -> dict[str, float]:
    """NVME bytes a pass that each byte of a block costs when it is not pinned: counted on the schedule itself."""
    coarse = max(block.nbytes for block in workload.blocks.values())
    knobs = Knobs(lookahead=0, lag=0, tile_bytes=coarse, ring=1, copies_ahead=0)
    moved = Draft(Cut(workload, _main(workload), knobs), place({}), knobs).moved_bytes()
    return {name: nbytes / workload.blocks[name].nbytes for name, nbytes in moved.items()}


def _main(workload: Workload) -> Program:
    """The program that repeats itself; the only one where there is no such."""
    programs = list(workload.programs.values())
    return next((program for program in programs if program.cyclic), programs[0])


def _plan(workload: Workload, hardware: Hardware, lowered: _Lowered, main: Schedule, timeline: Timeline) -> Plan:
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


def _lines(workload: Workload, lowered: _Lowered) -> Iterable[Line]:
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


def _refusal(workload: Workload, least: _Lowered, budget: Budget, resident: float | None) -> ShortError:
    if budget.device_bytes is not None and least.device_bytes > budget.device_bytes:
        line = Line(what="blocks that ops compute on", nbytes=least.device_bytes)
        return ShortError("DEVICE", (line,), budget.device_bytes, "", "device_budget >= {}")
    tiles = workload.tile_only()
    whole = [block for block in workload.blocks.values() if block.tier == "HOST" and block.name not in tiles]
    widest = max(whole, key=lambda block: block.nbytes, default=None)
    cause = f"The widest block in one piece is {widest.name}: {widest.nbytes / MiB:.1f} MiB." if widest else ""
    less = "" if not resident else f", or resident < {resident:g}"
    return ShortError("HOST", tuple(_lines(workload, least)), budget.host_bytes, cause, f"host_budget >= {{}}{less}")
