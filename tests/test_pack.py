"""Addresses for lifetimes: never two in one place, and next to nothing lost.

Scope: `tiering/pack.py` on random lifetimes, and what it loses on transformer-like workloads.
Not here: where lifetimes come from (`test_lower.py`).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import toy_units

from megatrain.programs import training_workload
from tiering.homes import place
from tiering.lower import lower
from tiering.pack import Arc, live_bytes, pack
from tiering.turns import Knobs

LINES = 24
QUICK = settings(max_examples=150, derandomize=True, deadline=None)


def arcs(*, sizes: st.SearchStrategy[int], circle: bool = True) -> st.SearchStrategy[list[Arc]]:
    ends = st.tuples(st.integers(0, LINES - 1), st.integers(0, LINES - 1))
    pairs = ends if circle else ends.map(lambda pair: (min(pair), max(pair)))
    arc = st.builds(lambda size, pair: Arc(nbytes=size, start=pair[0], end=pair[1]), sizes, pairs)
    return st.lists(arc, max_size=14)


def lines_of(arc: Arc) -> set[int]:
    """The lines at which `arc` is alive, walked one by one."""
    lines, at = {arc.start}, arc.start
    while at != arc.end:
        at = (at + 1) % LINES
        lines.add(at)
    return lines


@given(arcs(sizes=st.integers(1, 30)))
@QUICK
def test_no_two_that_live_at_the_same_time_share_a_byte(given_arcs: list[Arc]) -> None:
    """I1: on a circle of lines, where the tail of a pass overlaps the head of the next."""
    addresses, top = pack(given_arcs)
    for one, a in enumerate(given_arcs):
        for other, b in enumerate(given_arcs[:one]):
            apart = addresses[one] >= addresses[other] + b.nbytes or addresses[other] >= addresses[one] + a.nbytes
            assert apart or not lines_of(a) & lines_of(b), f"{a}@{addresses[one]} and {b}@{addresses[other]}"
    assert top == max((at + arc.nbytes for at, arc in zip(addresses, given_arcs, strict=True)), default=0)
    assert all(address >= 0 for address in addresses)


@given(arcs(sizes=st.integers(1, 30)))
@QUICK
def test_live_bytes_are_what_a_count_line_by_line_says(given_arcs: list[Arc]) -> None:
    """P2: the bound that losses are measured against is the true one, and no packing is below it."""
    alive = [sum(arc.nbytes for arc in given_arcs if line in lines_of(arc)) for line in range(LINES)]
    assert live_bytes(given_arcs) == max(alive)
    assert max(alive) <= pack(given_arcs)[1] <= sum(arc.nbytes for arc in given_arcs)


@given(arcs(sizes=st.just(7), circle=False))
@QUICK
def test_equal_sizes_on_a_line_lose_nothing(given_arcs: list[Arc]) -> None:
    """P2: identical layers are the common case; they must not cost a byte more than is alive."""
    assert pack(given_arcs)[1] == live_bytes(given_arcs)


def test_a_lifetime_over_the_border_meets_both_ends() -> None:
    """I1: alive from line 20 over the end to line 3: what meets it lies apart, what does not may share."""
    wrapped = Arc(nbytes=1, start=20, end=3)
    assert lines_of(wrapped) == {20, 21, 22, 23, 0, 1, 2, 3}
    for start, end, address in ((3, 9, 1), (10, 20, 1), (4, 19, 0)):
        addresses, _ = pack([wrapped, Arc(nbytes=1, start=start, end=end)])
        assert sorted(addresses) == [0, address], f"alive from {start} to {end}: {addresses}"


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_transformer_loses_less_than_a_tenth_to_fit(tied: bool, deferred: bool, lag: int, lookahead: int) -> None:
    """P2: 32 layers, an embedding of eight: under 10 % of the arena is lost, in every program."""
    layer = 1 << 20
    workload = training_workload(toy_units(32, layer, 8 * layer, tied=tied), deferred=deferred)
    knobs = Knobs(lookahead=lookahead, lag=lag, tile_bytes=layer, ring=4)
    lost = {}
    for name, program in workload.programs.items():
        schedule = lower(workload, program, place({}), knobs)
        lost[name] = schedule.lost_bytes / schedule.host_bytes
    assert all(0 <= share < 0.1 for share in lost.values()), lost
