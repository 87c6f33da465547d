"""The proof itself is put to the test: faults planted in right schedules are found, and what it accepts is right.

Scope: `tiering/check.py` against the interpreter on real bytes (`toy.wrong`), over planted faults and free programs.
Not here: that lowering makes right schedules (`test_lower.py`).

A planted fault may be harmless: two READs swapped still come to the same bytes. So each mutant must either be refused,
or come to the right bytes in list order and in several other orders that `after` allows.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import free_workloads, toy_units, toy_workload, wrong

from tiering.check import check
from tiering.errors import ScheduleError
from tiering.homes import Placement, place
from tiering.lower import lower
from tiering.schedule import Action, Operand, Schedule, Verb, order
from tiering.turns import Knobs
from tiering.workload import PAGE, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A right schedule to plant faults in."""

    workload: Workload
    placement: Placement
    schedule: Schedule


def subject(
    mode: str,
    program: str,
    knobs: Knobs,
    homes: dict[str, int] | None = None,
    *,
    tied: bool = True,
    layers: int = 1,
    bf16: bool = False,
) -> Subject:
    units = toy_units(layers, (5 if bf16 else 2) * PAGE, PAGE if tied else 2 * PAGE, norm=0, tied=tied)
    workload = toy_workload(units, mode, bf16=bf16)
    placement = place(homes or {})
    schedule = lower(workload, workload.programs[program], placement, knobs)
    check(workload, placement, schedule)
    return Subject(workload=workload, placement=placement, schedule=schedule)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "fused": lambda: subject("fused", "step", Knobs(lookahead=1, lag=0, tile_bytes=2 * PAGE, ring=2)),
    "fused, tiny ring": lambda: subject("fused", "step", Knobs(lookahead=2, lag=1, tile_bytes=PAGE, ring=1)),
    "fused, untied, far ahead": lambda: subject(
        "fused", "step", Knobs(lookahead=3, lag=1, tile_bytes=PAGE, ring=3), tied=False, layers=2
    ),
    "fused, half resident": lambda: subject(
        "fused",
        "step",
        Knobs(lookahead=1, lag=1, tile_bytes=PAGE, ring=2),
        {"embed/weight": PAGE, "L0/exp_avg": PAGE, "L0/exp_avg_sq": 2 * PAGE},
    ),
    "mixed": lambda: subject("mixed", "step", Knobs(lookahead=1, lag=1, tile_bytes=PAGE, ring=2), tied=False, layers=3),
    "deferred": lambda: subject("deferred", "step", Knobs(lookahead=1, lag=0, tile_bytes=2 * PAGE, ring=2)),
    "deferred, half resident": lambda: subject(
        "deferred",
        "step",
        Knobs(lookahead=1, lag=1, tile_bytes=PAGE, ring=2),
        {"L0/weight": 2 * PAGE, "L0/exp_avg": PAGE, "embed/grad": PAGE},
    ),
    "first": lambda: subject("deferred", "first", Knobs(lookahead=2, lag=0, tile_bytes=PAGE, ring=1), layers=2),
    "flush": lambda: subject("deferred", "flush", Knobs(lookahead=0, lag=0, tile_bytes=PAGE, ring=2)),
    "fused, bf16": lambda: subject("fused", "step", Knobs(lookahead=1, lag=1, tile_bytes=2 * PAGE, ring=2), bf16=True),
    "deferred, bf16": lambda: subject(
        "deferred",
        "step",
        Knobs(lookahead=1, lag=0, tile_bytes=2 * PAGE, ring=2),
        {"L0/weight": 2 * PAGE, "L0/weight_bf16": 3 * PAGE},
        bf16=True,
    ),
    "cast": lambda: subject("fused", "cast", Knobs(lookahead=1, lag=0, tile_bytes=4 * PAGE, ring=2), bf16=True),
    "forward": lambda: subject("forward", "forward", Knobs(lookahead=2, lag=0, tile_bytes=PAGE, ring=1), layers=4),
}

Mutant = tuple[str, Callable[[], Schedule]]
"""What was done, and the schedule then: made only for those that are tried."""


def relisted(schedule: Schedule, actions: Sequence[Action]) -> Schedule:
    """`schedule` with other lines, each waiting for whom its bytes say."""
    waits = order(actions, schedule.cyclic)
    return replace(schedule, actions=tuple(replace(a, after=after) for a, after in zip(actions, waits, strict=True)))


def drops(schedule: Schedule) -> Iterator[Mutant]:
    lines = schedule.actions
    for at, action in enumerate(lines):
        yield f"without {at} {action}", partial(relisted, schedule, [*lines[:at], *lines[at + 1 :]])
    for at, action in enumerate(schedule.lead_in):
        short = (*schedule.lead_in[:at], *schedule.lead_in[at + 1 :])
        yield f"without lead-in {action}", partial(replace, schedule, lead_in=short)


def repeats(schedule: Schedule) -> Iterator[Mutant]:
    lines = schedule.actions
    for at, action in enumerate(lines):
        yield f"twice {at} {action}", partial(relisted, schedule, [*lines[: at + 1], *lines[at:]])


def swaps(schedule: Schedule) -> Iterator[Mutant]:
    lines = schedule.actions
    for at in range(len(lines) - 1):
        swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        yield f"swapped {at} {lines[at]} and {lines[at + 1]}", partial(relisted, schedule, swapped)


def moves(schedule: Schedule) -> Iterator[Mutant]:
    lines = schedule.actions
    for at, action in enumerate(lines):
        others = [*lines[:at], *lines[at + 1 :]]
        for to in range(len(lines)):
            if to not in (at - 1, at, at + 1):
                yield f"moved {at} to {to} {action}", partial(relisted, schedule, [*others[:to], action, *others[to:]])


def shifts(schedule: Schedule) -> Iterator[Mutant]:
    """One operand a page off, both with the old waits and with new ones."""

    def shifted(action: Action, number: int, by: int) -> Action:
        x = replace(action.operands[number], address=action.operands[number].address + by)
        return replace(action, operands=(*action.operands[:number], x, *action.operands[number + 1 :]))

    for by in (-PAGE, PAGE):
        for at, action in enumerate(schedule.actions):
            for number in range(len(action.operands)):
                lines = [*schedule.actions[:at], shifted(action, number, by), *schedule.actions[at + 1 :]]
                yield f"{by:+} at {at} {action}, old waits", partial(replace, schedule, actions=tuple(lines))
                yield f"{by:+} at {at} {action}", partial(relisted, schedule, lines)
        for at, action in enumerate(schedule.lead_in):
            lead_in = (*schedule.lead_in[:at], shifted(action, 0, by), *schedule.lead_in[at + 1 :])
            yield f"{by:+} at lead-in {action}", partial(replace, schedule, lead_in=lead_in)


def hurries(schedule: Schedule) -> Iterator[Mutant]:
    """One wait forgotten."""
    for at, action in enumerate(schedule.actions):
        for wait in action.after:
            hasty = replace(action, after=tuple(w for w in action.after if w != wait))
            lines = (*schedule.actions[:at], hasty, *schedule.actions[at + 1 :])
            yield f"{at} {action} does not wait for {wait}", partial(replace, schedule, actions=lines)


def skips(schedule: Schedule) -> Iterator[Mutant]:
    """A last pass that leaves out a line too many, or does a line that serves nobody."""
    for at, action in enumerate(schedule.actions) if schedule.cyclic else ():
        other = replace(action, next_pass=not action.next_pass)
        lines = (*schedule.actions[:at], other, *schedule.actions[at + 1 :])
        yield f"next_pass {other.next_pass} at {at} {action}", partial(replace, schedule, actions=lines)


FAULTS: dict[str, Callable[[Schedule], Iterator[Mutant]]] = {
    "drop": drops,
    "repeat": repeats,
    "swap": swaps,
    "shift": shifts,
    "hurry": hurries,
    "skip": skips,
    "move": moves,
}

MOST = dict.fromkeys(FAULTS, 10**6) | {"move": 60, "hurry": 50, "swap": 40, "shift": 120}
"""Faults of a kind that are planted, so that the tests stay short; the slow test plants them all."""


def caught(of: Subject, mutant: Schedule) -> bool:
    """True if the proof refuses the mutant; any other exception is a fault of the proof."""
    try:
        check(of.workload, of.placement, mutant)
    except ScheduleError:
        return True
    return False


def survey(of: Subject, mutants: Sequence[Mutant]) -> tuple[Counter[str], list[str]]:
    """How many mutants were caught and how many were harmless; those that are neither, with what they do."""
    counts: Counter[str] = Counter()
    missed = []
    for name, make in mutants:
        mutant = make()
        if caught(of, mutant):
            counts["caught"] += 1
            continue
        fault = wrong(of.workload, of.placement, mutant, orders=3)
        counts["missed" if fault else "harmless"] += 1
        if fault:
            missed.append(f"{name}\n    {fault}\n{mutant.text()}")
    return counts, missed


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_planted_fault_is_refused_or_harmless(
    name: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """I1-I4: a schedule with one fault never passes the proof and then comes to wrong bytes."""
    of = SUBJECTS[name]()
    mutants = list(FAULTS[kind](of.schedule))
    if len(mutants) > MOST[kind]:
        mutants = random.Random(0).sample(mutants, MOST[kind])
    counts, missed = survey(of, mutants)
    record_property("counts", dict(counts))
    print(f"{name}, {kind}: {dict(counts)}")
    assert not missed, f"{len(missed)} of {len(mutants)} accepted but wrong, the first:\n{missed[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if MOST[kind] < 10**6])
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_planted_fault_of_the_many_is_refused_or_harmless(name: str, kind: str) -> None:
    """I1-I4: as above, for every line and every other place, every pair and every wait."""
    of = SUBJECTS[name]()
    counts, missed = survey(of, list(FAULTS[kind](of.schedule)))
    print(f"{name}, every {kind}: {dict(counts)}")
    assert not missed, f"{len(missed)} accepted but wrong, the first:\n{missed[0]}"


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_run_and_no_write_can_be_left_out(name: str) -> None:
    """I2, I4: the proof misses no RUN; no READ and no WRITE that moves bytes which somebody needs."""
    of = SUBJECTS[name]()
    found: dict[Verb, Counter[bool]] = {verb: Counter() for verb in Verb}
    for at, action in enumerate(of.schedule.actions):
        lines = [*of.schedule.actions[:at], *of.schedule.actions[at + 1 :]]
        found[action.verb][caught(of, relisted(of.schedule, lines))] += 1
    let_through = {verb: found[verb][False] for verb in (Verb.RUN, Verb.READ, Verb.WRITE)}
    assert let_through == {Verb.RUN: 0, Verb.READ: 0, Verb.WRITE: 0}, found


@given(free_workloads(kept=False), st.integers(0, 4), st.integers(0, 2), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_what_the_proof_accepts_is_right_even_where_lowering_is_not(
    workload: Workload, lookahead: int, lag: int, ring: int, tile: int
) -> None:
    """I1-I4: programs that break lowering's rules give wrong schedules; none of these passes the proof."""
    program = workload.programs["free"]
    knobs = Knobs(lookahead=lookahead, lag=lag, tile_bytes=tile * PAGE, ring=ring)
    try:
        schedule = lower(workload, program, place({}), knobs)
    except (IndexError, AssertionError):
        return  # refused even before there was a schedule
    try:
        check(workload, place({}), schedule)
    except ScheduleError:
        return
    fault = wrong(workload, place({}), schedule)
    assert not fault, f"{workload}\n{fault}\n{schedule.text()}"


@pytest.mark.parametrize("name", ["fused, bf16", "deferred, bf16", "cast"])
def test_a_tile_that_is_another_part_of_one_block_than_of_the_others_is_refused(name: str) -> None:
    """I2: two tiles that follow each other, cut a page sooner or later in one block: no gap, and still not the op."""
    of = SUBJECTS[name]()
    lines = of.schedule.actions
    tried = 0
    for at, action in enumerate(lines):
        tiles = [later for later in range(at + 1, len(lines)) if "#" in action.name and lines[later].op == action.op]
        for number, x in enumerate(action.operands if tiles else ()):
            after = lines[tiles[0]]
            for by in (-PAGE, PAGE):
                y = after.operands[number]
                one = replace(x, hi=x.hi + by)
                other = replace(y, lo=y.lo + by, address=y.address + by)
                if not (one.nbytes > 0 and other.nbytes > 0):
                    continue
                changed = [_with(a, number, {at: one, tiles[0]: other}.get(i)) for i, a in enumerate(lines)]
                with pytest.raises(ScheduleError, match="is another part than"):
                    check(of.workload, of.placement, relisted(of.schedule, changed))
                    pytest.fail(f"{one} and {other} in {action.op} were accepted")
                tried += 1
    assert tried, of.schedule.text()


def _with(action: Action, number: int, x: Operand | None) -> Action:
    """`action` with another operand at that place; as it is for None."""
    return (
        action
        if x is None
        else replace(action, operands=(*action.operands[:number], x, *action.operands[number + 1 :]))
    )


def test_a_schedule_that_reaches_outside_its_arena_is_refused() -> None:
    """I1: the arena has `host_bytes` bytes; an address behind them is somebody else's memory."""
    of = SUBJECTS["fused"]()
    small = replace(of.schedule, host_bytes=of.schedule.host_bytes - PAGE)
    with pytest.raises(ScheduleError, match="I1"):
        check(of.workload, of.placement, small)


def test_homes_that_overlap_are_refused() -> None:
    """I1: two homes in HOST at the same place."""
    of = SUBJECTS["fused, half resident"]()
    address = {**of.placement.address, "L0/exp_avg": of.placement.address["embed/weight"]}
    with pytest.raises(ScheduleError, match="I1: home of"):
        check(of.workload, replace(of.placement, address=address), of.schedule)


def test_an_op_left_out_swapped_or_cut_short_is_refused() -> None:
    """The schedule is the program: dropping, reordering or shortening an op is named."""
    of = SUBJECTS["fused, tiny ring"]()
    lines = list(of.schedule.actions)
    names = [action.name for action in lines]
    last = names.index("upd.L0#1")
    cases = {
        "without its last tile": [*lines[:last], *lines[last + 1 :]],
        "without a forward": [action for action in lines if action.name != "fwd.L0"],
        "in another order": _exchanged(lines, names.index("upd.L0#0"), last),
    }
    for case, changed in cases.items():
        with pytest.raises(ScheduleError, match=r"covers|used by|gap"):
            check(of.workload, of.placement, relisted(of.schedule, changed))
            pytest.fail(f"{case} was accepted")


def _exchanged(lines: Sequence[Action], one: int, other: int) -> list[Action]:
    result = list(lines)
    result[one], result[other] = lines[other], lines[one]
    return result


def test_the_error_shows_the_lines_around_the_fault() -> None:
    """Rule 5: who, what, and the schedule with an arrow at the line."""
    of = SUBJECTS["fused"]()
    at = next(i for i, action in enumerate(of.schedule.actions) if action.verb is Verb.READ)
    run = next(i for i, a in enumerate(of.schedule.actions) if a.verb is Verb.RUN and i > at)
    block = of.schedule.actions[at].operands[0].block
    with pytest.raises(ScheduleError) as caught_:
        check(
            of.workload,
            of.placement,
            relisted(of.schedule, [*of.schedule.actions[:at], *of.schedule.actions[at + 1 :]]),
        )
    message = str(caught_.value)
    assert block in message and "I2" in message and "-->" in message, f"line {run} misses {block}:\n{message}"
