"""Lowering: every schedule it makes is proven right, comes to the same bytes as its program, and reads as expected.

Scope: `tiering/lower.py` over the whole space of toy workloads, homes and knobs; literal schedules of two tiny cases.
Not here: what the proof itself can see (`test_check.py`), which homes and knobs are chosen (`test_plan.py`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import MODES, Machine, first_state, free_workloads, interpret, legal_turns, toy_units, toy_workload, wrong

from megatrain.programs import training_workload
from tiering.check import check
from tiering.device import on_device
from tiering.homes import Placement, choose_homes, place
from tiering.lower import lower
from tiering.schedule import Schedule, Verb
from tiering.turns import Knobs
from tiering.workload import PAGE, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the space; its `repr` is what a failing test shows."""

    mode: str
    layers: int
    layer_pages: int
    embedding_pages: int
    norm: bool
    tied: bool
    knobs: Knobs
    homes: tuple[float, ...]
    resident: float | None
    activation_pages: int
    device: bool
    keep: float
    update_there: bool = False
    bf16: bool = False

    def workload(self) -> Workload:
        plain = self.plain()
        if not self.device:
            return plain
        used = sorted({t.block for p in plain.programs.values() for op in p.ops if op.computes for t in op.touches})
        return on_device(plain, frozenset(used[: round(self.keep * len(used))]), update=self.update_there)

    def plain(self) -> Workload:
        units = toy_units(
            self.layers,
            self.layer_pages * PAGE,
            self.embedding_pages * PAGE,
            tied=self.tied,
            norm=PAGE if self.norm else 0,
            activation=self.activation_pages * PAGE,
        )
        return toy_workload(units, self.mode, bf16=self.bf16)

    def placement(self, workload: Workload) -> Placement:
        """Homes as the planner chooses them for `resident`, or any legal ones at all where that is None."""
        if self.resident is not None:
            durable = sum(block.nbytes for block in workload.of_life("durable"))
            carried = sum(block.nbytes for block in workload.of_life("carried", "passing"))
            gain = {name: float(len(block.kind)) for name, block in workload.blocks.items()}
            share = round(self.resident * durable)
            return place(choose_homes(workload, gain, self.knobs.tile_bytes, share, round(self.resident * carried)))
        return any_homes(workload, self.knobs, self.homes)


def any_homes(workload: Workload, knobs: Knobs, shares: Sequence[float]) -> Placement:
    """Homes in HOST for the given shares of the blocks, as far as a split is legal."""
    tiles = workload.tile_only()
    homes = {}
    for number, block in enumerate(workload.of_life("durable", "carried", "passing")):
        share = shares[number % len(shares)]
        nbytes = round(share * block.nbytes) // knobs.tile_bytes * knobs.tile_bytes
        if share == 1.0 or (nbytes and block.name in tiles):
            homes[block.name] = block.nbytes if share == 1.0 else nbytes
    return place(homes)


def knobs(max_tile: int = 5) -> st.SearchStrategy[Knobs]:
    return st.builds(
        Knobs,
        lookahead=st.integers(0, 5),
        lag=st.integers(0, 2),
        tile_bytes=st.integers(1, max_tile).map(lambda pages: pages * PAGE),
        ring=st.integers(1, 8),
        copies_ahead=st.integers(0, 3),
    )


def cases() -> st.SearchStrategy[Case]:
    share = st.sampled_from([0.0, 0.0, 0.3, 0.5, 0.8, 1.0])
    return st.builds(
        Case,
        mode=st.sampled_from(MODES),
        layers=st.integers(1, 6),
        layer_pages=st.integers(1, 7),
        embedding_pages=st.integers(1, 23),
        norm=st.booleans(),
        tied=st.booleans(),
        knobs=knobs(),
        homes=st.lists(share, min_size=1, max_size=7).map(tuple),
        resident=st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])),
        activation_pages=st.integers(0, 3),
        device=st.booleans(),
        keep=st.sampled_from([0.0, 0.3, 1.0]),
        update_there=st.booleans(),
        bf16=st.booleans(),
    ).map(_halved)


def _halved(case: Case) -> Case:
    """With tiles of an even number of pages where some blocks have half the bytes."""
    return replace(case, knobs=even(case.knobs)) if case.bf16 else case


def even(knobs: Knobs) -> Knobs:
    return replace(knobs, tile_bytes=2 * knobs.tile_bytes)


def schedules(case: Case) -> list[tuple[Workload, Placement, Schedule]]:
    workload = case.workload()
    placement = case.placement(workload)
    return [
        (workload, placement, lower(workload, program, placement, case.knobs)) for program in workload.programs.values()
    ]


FEW = settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=600)


def holds(case: Case) -> None:
    """`check` agrees, and so does the interpreter on real bytes, in several orders."""
    for workload, placement, schedule in schedules(case):
        check(workload, placement, schedule)
        fault = wrong(workload, placement, schedule, orders=2)
        assert not fault, f"{case}\n{fault}\n{schedule.text()}"


@given(cases())
@FEW
def test_every_schedule_is_proven_and_comes_to_the_same_bytes_as_its_program(case: Case) -> None:
    """I1-I4: whatever the homes and knobs, in list order and in orders that `after` allows; P1 rests on this."""
    holds(case)


@pytest.mark.slow
@given(cases())
@MANY
def test_every_schedule_of_a_wider_space_is_proven_and_right(case: Case) -> None:
    """I1-I4, as above, over many more cases."""
    holds(case)


@given(free_workloads(kept=True), knobs(), st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0]), min_size=1, max_size=5))
@FEW
def test_programs_that_are_no_training_step_are_lowered_right_too(
    workload: Workload, knobs: Knobs, shares: list[float]
) -> None:
    """I1-I4: lowering knows nothing of training; any program that keeps its rules comes to the right bytes."""
    ops = [op for op in workload.programs["free"].ops if op.tiled]
    if any(len({workload.blocks[touch.block].nbytes for touch in op.touches}) > 1 for op in ops):
        knobs = even(knobs)
    placement = any_homes(workload, knobs, shares)
    schedule = lower(workload, workload.programs["free"], placement, knobs)
    check(workload, placement, schedule)
    fault = wrong(workload, placement, schedule, orders=2)
    assert not fault, f"{workload}\n{knobs}\n{fault}\n{schedule.text()}"


@given(cases(), st.sampled_from([0.0, 0.4, 1.0]))
@settings(FEW, max_examples=30)
def test_computing_on_a_device_comes_to_the_same_bytes(case: Case, keep: float) -> None:
    """P1: with copies to and from the device, whatever stays there in between, every op sees the same bytes."""
    plain = case.plain()
    used = sorted({t.block for p in plain.programs.values() for op in p.ops if op.computes for t in op.touches})
    moved = on_device(plain, frozenset(used[: round(keep * len(used))]), update=case.update_there)
    for name in plain.programs:
        expected, expected_seen = interpret(plain, first_state(plain), plain.programs[name], 2)
        found, seen = interpret(moved, first_state(moved), moved.programs[name], 2)
        assert seen == expected_seen and found == expected, (
            f"{case}\n{name}: {[op.name for op in moved.programs[name].ops]}"
        )


@given(cases(), st.integers(1, 3), st.integers(0, 2**32))
@settings(FEW, max_examples=20)
def test_programs_of_a_workload_continue_each_other_from_the_homes(case: Case, passes: int, seed: int) -> None:
    """P1: deferred updates run as first, step (again and again, the last one serving no next), flush: homes carry over.

    The arena is the same memory throughout; what one schedule leaves in it must not matter to the next.
    """
    made = {schedule.name: (workload, placement, schedule) for workload, placement, schedule in schedules(case)}
    names = ["first", "step", "flush"] if "flush" in made else [*made, *made]
    workload, placement, _ = made[names[0]]
    expected = first_state(workload)
    room = max(schedule.host_bytes for _, _, schedule in made.values())
    device_room = max(schedule.device_bytes for _, _, schedule in made.values())
    machine = Machine.holding(workload, placement, expected, room, device_room)
    rng = random.Random(seed)
    for name in names:
        schedule = made[name][2]
        repeats = passes if schedule.cyclic else 1
        expected, _ = interpret(workload, expected, workload.programs[name], repeats)
        machine.run(schedule, repeats, legal_turns(schedule, repeats, rng, "any"))
        found = machine.homes()
        bad = [block for block in expected if found[block] != expected[block]]
        assert not bad, f"{case}\nafter {name}: {bad} differ\n{schedule.text()}"


@given(cases())
@settings(FEW, max_examples=30)
def test_the_arena_of_a_schedule_holds_all_its_operands_and_no_more(case: Case) -> None:
    """P2: `host_bytes` is the highest byte that an action touches, so what is planned is what is needed."""
    for _, placement, schedule in schedules(case):
        touched = [x for action in (*schedule.lead_in, *schedule.actions) for x in action.operands]
        assert min(x.address for x in touched) >= 0, schedule.text()
        top = max((x.address + x.nbytes for x in touched if x.tier == "HOST"), default=0)
        # Slots of the ring are as wide as a tile, whatever fills them; homes count even if this program needs none.
        slack = schedule.ring_bytes if case.knobs.tile_bytes > PAGE else 0
        least = max(placement.fixed_bytes, schedule.host_bytes - slack)
        assert least <= max(top, placement.fixed_bytes) <= schedule.host_bytes, f"{case}\n{top}\n{schedule.text()}"
        device_top = max((x.address + x.nbytes for x in touched if x.tier == "DEVICE"), default=0)
        assert device_top == schedule.device_bytes, f"{case}\n{device_top}\n{schedule.text()}"


@given(cases())
@settings(FEW, max_examples=15)
def test_lowering_is_pure(case: Case) -> None:
    """The same arguments give the same schedule: a resumed run moves the same bytes at the same places."""
    once, again = ([made[2] for made in schedules(case)] for _ in range(2))
    assert once == again


@given(cases())
@settings(FEW, max_examples=40)
def test_only_the_tail_of_a_cyclic_schedule_works_for_the_next_pass(case: Case) -> None:
    """A last pass may leave out `next_pass` actions: they are READs, and what the lead-in reads they read too."""
    for _, _, schedule in schedules(case):
        ahead = [action for action in schedule.actions if action.next_pass]
        assert schedule.cyclic or not (ahead or schedule.lead_in), schedule.text()
        assert {action.verb for action in ahead} <= {Verb.READ}, schedule.text()
        led_in = {action.operands for action in schedule.lead_in}
        missing = [str(action) for action in ahead if action.operands not in led_in]
        assert not missing, f"read ahead, but not in the lead-in: {missing}\n{schedule.text()}"


FUSED = """\
schedule step: 33 actions, 40960 bytes of HOST
  lead-in READ  embed/weight[0:4096]@36864
     0 READ  L0/weight[0:8192]@16384
     1 RUN   fwd.embed  embed/weight[0:4096]@36864:r
     2 DROP  embed/weight[0:4096]@36864
     3 READ  embed/weight[0:4096]@24576
     4 RUN   fwd.L0  L0/weight[0:8192]@16384:r
     5 DROP  L0/weight[0:8192]@16384
     6 READ  L0/weight[0:8192]@16384
     7 RUN   loss  embed/weight[0:4096]@24576:r embed/grad[0:4096]@32768:w
     8 DROP  embed/weight[0:4096]@24576
     9 READ  L0/exp_avg_sq[0:4096]@8192
    10 READ  embed/weight[0:4096]@36864
    11 RUN   bwd.L0  L0/weight[0:8192]@16384:r L0/grad[0:8192]@24576:w
    12 RUN   upd.L0#0  L0/weight[0:4096]@16384:rw L0/exp_avg[0:4096]@0:rw L0/exp_avg_sq[0:4096]@8192:rw L0/grad[0:4096]@24576:r
    13 WRITE L0/weight[0:4096]@16384
    14 WRITE L0/exp_avg_sq[0:4096]@8192
    15 DROP  L0/exp_avg_sq[0:4096]@8192
    16 READ  L0/exp_avg_sq[4096:8192]@8192
    17 RUN   upd.L0#1  L0/weight[4096:8192]@20480:rw L0/exp_avg[4096:8192]@4096:rw L0/exp_avg_sq[4096:8192]@8192:rw L0/grad[4096:8192]@28672:r
    18 WRITE L0/weight[4096:8192]@20480
    19 WRITE L0/exp_avg_sq[4096:8192]@8192
    20 DROP  L0/weight[0:8192]@16384
    21 DROP  L0/grad[0:8192]@24576
    22 DROP  L0/exp_avg_sq[4096:8192]@8192
    23 READ  embed/exp_avg[0:4096]@8192
    24 READ  embed/exp_avg_sq[0:4096]@12288
    25 RUN   bwd.embed  embed/weight[0:4096]@36864:r embed/grad[0:4096]@32768:rw
    26 RUN   upd.embed#0  embed/weight[0:4096]@36864:rw embed/exp_avg[0:4096]@8192:rw embed/exp_avg_sq[0:4096]@12288:rw embed/grad[0:4096]@32768:r
    27 WRITE embed/weight[0:4096]@36864
    28 WRITE embed/exp_avg[0:4096]@8192
    29 WRITE embed/exp_avg_sq[0:4096]@12288
    30 DROP  embed/grad[0:4096]@32768
    31 DROP  embed/exp_avg[0:4096]@8192
    32 DROP  embed/exp_avg_sq[0:4096]@12288"""  # noqa: E501

DEFERRED = """\
schedule step: 38 actions, 73728 bytes of HOST
  lead-in READ  embed/exp_avg[0:4096]@0
  lead-in READ  embed/exp_avg_sq[0:4096]@8192
  lead-in READ  embed/weight[0:4096]@65536
  lead-in READ  embed/grad[0:4096]@69632
     0 READ  L0/weight[0:8192]@49152
     1 READ  L0/exp_avg[0:8192]@24576
     2 READ  L0/exp_avg_sq[0:8192]@32768
     3 READ  L0/grad[0:8192]@40960
     4 RUN   upd.embed#0  embed/weight[0:4096]@65536:rw embed/exp_avg[0:4096]@0:rw embed/exp_avg_sq[0:4096]@8192:rw embed/grad[0:4096]@69632:r
     5 WRITE embed/exp_avg[0:4096]@0
     6 WRITE embed/exp_avg_sq[0:4096]@8192
     7 WRITE embed/weight[0:4096]@65536
     8 DROP  embed/exp_avg[0:4096]@0
     9 DROP  embed/exp_avg_sq[0:4096]@8192
    10 DROP  embed/grad[0:4096]@69632
    11 RUN   fwd.embed  embed/weight[0:4096]@65536:r
    12 DROP  embed/weight[0:4096]@65536
    13 READ  embed/weight[0:4096]@57344
    14 RUN   upd.L0#0  L0/weight[0:8192]@49152:rw L0/exp_avg[0:8192]@24576:rw L0/exp_avg_sq[0:8192]@32768:rw L0/grad[0:8192]@40960:r
    15 WRITE L0/weight[0:8192]@49152
    16 WRITE L0/exp_avg[0:8192]@24576
    17 WRITE L0/exp_avg_sq[0:8192]@32768
    18 DROP  L0/exp_avg[0:8192]@24576
    19 DROP  L0/exp_avg_sq[0:8192]@32768
    20 DROP  L0/grad[0:8192]@40960
    21 RUN   fwd.L0  L0/weight[0:8192]@49152:r
    22 DROP  L0/weight[0:8192]@49152
    23 READ  L0/weight[0:8192]@49152
    24 RUN   loss  embed/weight[0:4096]@57344:r embed/grad[0:4096]@61440:w
    25 WRITE embed/grad[0:4096]@61440
    26 DROP  embed/weight[0:4096]@57344
    27 DROP  embed/grad[0:4096]@61440
    28 READ  embed/weight[0:4096]@65536
    29 READ  embed/grad[0:4096]@69632
    30 RUN   bwd.L0  L0/weight[0:8192]@49152:r L0/grad[0:8192]@57344:w
    31 WRITE L0/grad[0:8192]@57344
    32 DROP  L0/weight[0:8192]@49152
    33 DROP  L0/grad[0:8192]@57344
    34 READ  embed/exp_avg[0:4096]@0  (next pass)
    35 READ  embed/exp_avg_sq[0:4096]@8192  (next pass)
    36 RUN   bwd.embed  embed/weight[0:4096]@65536:r embed/grad[0:4096]@69632:rw
    37 WRITE embed/grad[0:4096]@69632"""  # noqa: E501


def tied_toy(*, deferred: bool) -> Workload:
    """An embedding of one page, tied to the head, and one layer of two."""
    return training_workload(toy_units(1, 2 * PAGE, PAGE, norm=0, tied=True), deferred=deferred)


def test_a_fused_step_reads_like_this() -> None:
    """The whole schedule of a tiny step, one tile staged at a time, with one moment at home in HOST."""
    workload = tied_toy(deferred=False)
    placement = place({"L0/exp_avg": 2 * PAGE})
    knobs = Knobs(lookahead=1, lag=0, tile_bytes=PAGE, ring=1)
    schedule = lower(workload, workload.programs["step"], placement, knobs)
    check(workload, placement, schedule)
    assert schedule.text() == FUSED


def test_a_deferred_step_reads_like_this() -> None:
    """The same with updates before forward: gradients go to NVME in one pass and come back in the next."""
    workload = tied_toy(deferred=True)
    knobs = Knobs(lookahead=1, lag=0, tile_bytes=2 * PAGE, ring=2)
    schedule = lower(workload, workload.programs["step"], place({}), knobs)
    check(workload, place({}), schedule)
    assert schedule.text() == DEFERRED


def test_a_tile_waits_for_its_bytes_and_for_whoever_had_its_place() -> None:
    """I3: `after` of the fused toy's second tile, spelled out: (line, passes back)."""
    workload = tied_toy(deferred=False)
    knobs = Knobs(lookahead=1, lag=0, tile_bytes=PAGE, ring=1)
    actions = lower(workload, workload.programs["step"], place({"L0/exp_avg": 2 * PAGE}), knobs).actions
    reread, tile, drop = 16, 17, 22
    assert str(actions[reread]) == "READ  L0/exp_avg_sq[4096:8192]@8192"
    assert actions[reread].after == ((15, 0), (19, 1)), "the DROP before it there; its own bytes written a pass ago"
    assert actions[tile].name == "upd.L0#1"
    assert set(actions[tile].after) >= {(reread, 0), (11, 0)}, "its tile, and backward, which made the gradient"
    assert actions[drop].after[0] == (19, 0), "the WRITE, before the place is given up"


def test_lookahead_moves_reads_earlier_and_nothing_else() -> None:
    """The RUNs keep their order; each READ is issued no later with more lookahead, and one bigger arena pays for it."""
    workload = training_workload(toy_units(5, 3 * PAGE, 7 * PAGE), deferred=False)
    made = [
        lower(workload, workload.programs["step"], place({}), Knobs(lookahead=ahead, lag=1, tile_bytes=PAGE, ring=4))
        for ahead in (0, 1, 2)
    ]
    runs = [[action.name for action in schedule.actions if action.verb is Verb.RUN] for schedule in made]
    assert runs[0] == runs[1] == runs[2]
    reach = [[_runs_before(schedule, f"READ L{n}/weight[0:12288]") for n in range(1, 4)] for schedule in made]
    assert reach[0] >= reach[1] >= reach[2] and reach[0] > reach[2], reach
    assert made[0].host_bytes <= made[1].host_bytes <= made[2].host_bytes, [s.host_bytes for s in made]


def _runs_before(schedule: Schedule, name: str) -> int:
    at = next(index for index, action in enumerate(schedule.actions) if action.name == name)
    return sum(action.verb is Verb.RUN for action in schedule.actions[:at])
