"""A set of byte ranges answers as a set of bytes would.

Scope: `tiering/ranges.py`.
Not here: its use by commits (`test_commit.py`).
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiering.ranges import RangeSet

SPAN = 24
ranges = st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(lambda r: (min(r), max(r)))


@given(st.lists(ranges, max_size=12), ranges)
def test_it_equals_a_set_of_bytes(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    """Members, merging, cuts and cover all agree with a Python set."""
    found, model = RangeSet(), set[int]()
    for lo, hi in added:
        found.add(lo, hi)
        model |= set(range(lo, hi))
    held = list(found)
    assert {byte for lo, hi in held for byte in range(lo, hi)} == model, f"{found} against {sorted(model)}"
    assert all(end < start for (_, end), (start, _) in pairwise(held)), f"{found} is not merged"
    assert all(lo < hi for lo, hi in held) and bool(found) == bool(model)
    lo, hi = asked
    pieces = list(found.split(lo, hi))
    assert [byte for start, end, _ in pieces for byte in range(start, end)] == list(range(lo, hi)), f"{pieces}"
    assert {byte for start, end, inside in pieces if inside for byte in range(start, end)} == model & set(range(lo, hi))
    assert all(a[2] != b[2] for a, b in pairwise(pieces)), f"{pieces} cut where nothing changes"
    assert found.covers(lo, hi) == (set(range(lo, hi)) <= model)
    found.clear()
    assert not found and list(found) == []
