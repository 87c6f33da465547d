"""Blocks are spread over drives as fast as these are, and neighbouring chunks lie on different drives.

Scope: `tiering/spread.py`.
Not here: files (`test_several_drives.py`); the sums in its docstrings (`test_layers.py`).
"""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiering.spread import MOST_CHUNKS, Spread, chunk_size, spread

PAGE = 4096
GRAIN = 4 * PAGE

sizes_ = st.lists(st.integers(1, 600).map(lambda pages: pages * PAGE), min_size=1, max_size=30)
rates_ = st.lists(st.sampled_from([1e9, 1.5e9, 2e9, 3.1e9, 7e9]), min_size=2, max_size=6)
equal_rates = st.integers(2, 6).map(lambda count: [2e9] * count)


@given(st.integers(1, 100_000).map(lambda pages: pages * PAGE))
def test_chunks_are_whole_pages_few_and_at_least_two_or_the_block_itself(nbytes: int) -> None:
    """I6: chunks are on the grid; a block of less than two of them stays whole."""
    size = chunk_size(nbytes, GRAIN)
    count = -(-nbytes // size)
    assert size % PAGE == 0 and count <= MOST_CHUNKS, f"{nbytes} bytes: {count} chunks of {size}"
    assert (count == 1) == (size == nbytes) == (nbytes < 2 * GRAIN), f"{nbytes} bytes: {count} chunks of {size}"
    assert count == 1 or size % GRAIN == 0


@given(sizes_, st.one_of(rates_, equal_rates))
def test_every_drive_gets_its_share_of_a_whole_store(sizes: list[int], rates: list[float]) -> None:
    """Of the chunks of one size no drive has three more or less than its share: neighbours lie on different drives,
    which holds the fastest one back in blocks of few chunks. Of whole blocks, as many as drives.
    """
    found = spread(sizes, rates, GRAIN)
    striped: dict[int, list[int]] = {}
    for one in found:
        if len(one.drives) > 1:
            striped.setdefault(one.chunk_bytes, []).extend(one.drives)
    for drive, rate in enumerate(rates):
        share = rate / sum(rates)
        for chunk_bytes, drives in striped.items():
            assert abs(drives.count(drive) - share * len(drives)) < 3, f"{chunk_bytes}: {drives} by {rates}"
        alone = [one for one in found if len(one.drives) == 1]
        held = sum(one.chunk_bytes for one in alone if one.drives == (drive,))
        least = max((one.chunk_bytes for one in alone), default=0) * len(rates)
        assert abs(held - share * sum(one.chunk_bytes for one in alone)) <= least, f"{held} bytes on drive {drive}"


@given(sizes_, equal_rates, st.integers(2, 64))
def test_neighbours_lie_on_different_drives_and_blocks_start_evenly(
    sizes: list[int], rates: list[float], count: int
) -> None:
    """Consecutive tiles, and the same tile of weights and moments, keep all drives busy."""
    found = spread(sizes, rates, GRAIN)
    for one in found:
        assert all(a != b for a, b in pairwise(one.drives)), one.text
    same = spread([count * GRAIN] * 3 * len(rates), rates, GRAIN)
    starts = Counter(one.drives[0] for one in same)
    assert starts == dict.fromkeys(range(len(rates)), 3), [one.text for one in same]


@given(sizes_, rates_)
def test_only_a_drive_of_more_than_half_the_rates_has_neighbours(sizes: list[int], rates: list[float]) -> None:
    """Uneven drives alternate as far as they can."""
    for one in spread(sizes, rates, GRAIN):
        for a, b in pairwise(one.drives):
            assert a != b or rates[a] > sum(rates) / 2, f"{one.text} by {rates}"


@given(sizes_, rates_)
def test_one_drive_has_one_chunk_a_block(sizes: list[int], rates: list[float]) -> None:
    """Whatever its rate: the layout of one drive does not depend on it."""
    assert spread(sizes, rates[:1], GRAIN) == [Spread(chunk_bytes=nbytes, drives=(0,)) for nbytes in sizes]


@given(st.data())
def test_a_cut_covers_the_range_once_and_stays_inside_chunks(data: st.DataObject) -> None:
    """I6: no byte is left out, none is met twice."""
    one = Spread(chunk_bytes=data.draw(st.integers(1, 5)) * PAGE, drives=(0,) * 40)
    lo = data.draw(st.integers(0, 30)) * PAGE
    hi = lo + data.draw(st.integers(0, 9)) * PAGE
    pieces = list(one.cut(lo, hi))
    assert [piece[1] for piece in pieces] + [hi] == [lo, *(piece[2] for piece in pieces)], pieces
    for chunk, start, end in pieces:
        assert chunk * one.chunk_bytes <= start < end <= (chunk + 1) * one.chunk_bytes, pieces
