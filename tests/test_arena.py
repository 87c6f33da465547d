"""The arena is one bounded piece of memory, lent without copies.

Scope: `tiering/arena.py`.
Not here: who may use which bytes (`test_check.py`).
"""

import gc
import os

import pytest
import torch

from tiering.arena import Arena
from tiering.errors import BudgetError

PAGE = 4096
MIB = 1 << 20


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("asked", "held"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_an_arena_holds_what_was_asked_in_whole_pages(asked: int, held: int) -> None:
    """P2: the size is fixed at creation, and every byte of it can be lent."""
    with Arena(asked) as arena:
        assert (arena.nbytes, arena.view(0, held).nbytes, arena.tensor(0, held).numel()) == (held, held, held)
        assert arena.tensor(0, PAGE).data_ptr() % PAGE == 0, "direct I/O needs page addresses"


def test_views_and_tensors_are_the_same_bytes() -> None:
    """P2: no copy in either direction."""
    with Arena(4 * PAGE) as arena:
        tensor = arena.tensor(PAGE, 2 * PAGE).view(torch.float32)
        tensor.fill_(1.5)
        wanted = torch.full((PAGE // 4,), 1.5).numpy().tobytes()
        assert bytes(arena.view(PAGE, 2 * PAGE)) == wanted
        arena.view(PAGE, PAGE + 4)[:] = bytes(4)
        assert tensor[:2].tolist() == [0.0, 1.5]
        assert bytes(arena.view(0, PAGE)) == bytes(PAGE), "a neighbour changed"
        assert arena.tensor(8, 8).numel() == arena.view(8, 8).nbytes == 0


@pytest.mark.parametrize(("lo", "hi"), [(-1, 4), (0, PAGE + 1), (8, 4)])
def test_nothing_outside_is_lent(lo: int, hi: int) -> None:
    """I5: bytes lent are bytes held."""
    with Arena(PAGE) as arena:
        for lend in (arena.view, arena.tensor):
            with pytest.raises(AssertionError, match="not inside an arena of 4096"):
                lend(lo, hi)


def test_memory_is_taken_when_touched_and_given_back_on_close() -> None:
    """P2: creating an arena costs no memory; closing it returns what was touched."""
    gc.collect()
    start = resident_nbytes()
    arena = Arena(512 * MIB)
    created = resident_nbytes() - start
    arena.tensor(0, 64 * MIB).fill_(1)
    touched = resident_nbytes() - start
    arena.close()
    closed = resident_nbytes() - start
    assert created < 8 * MIB, f"creation took {created} bytes"
    assert 60 * MIB < touched < 80 * MIB, f"64 MiB were touched, {touched} bytes are resident"
    assert closed < 16 * MIB, f"{closed} bytes stayed after close"


def test_a_tensor_that_outlives_the_arena_stays_valid() -> None:
    """Closing under a live tensor must not turn a late read into a crash; the last reference frees the memory."""
    gc.collect()
    start = resident_nbytes()
    arena = Arena(64 * MIB)
    tensor = arena.tensor(0, 64 * MIB)
    tensor.fill_(7)
    arena.close()
    arena.close()
    assert int(tensor[-1]) == 7
    with pytest.raises(AssertionError, match="closed"):
        arena.view(0, 1)
    del tensor
    left = resident_nbytes() - start
    assert left < 16 * MIB, f"{left} bytes stayed after the last tensor went"


def test_a_mapping_that_the_kernel_refuses_is_a_budget_error() -> None:
    """P2: refused with the sum and what to do."""
    with pytest.raises(BudgetError, match=rf"HOST needs one mapping of {1 << 60} bytes .* Fix:"):
        Arena(1 << 60)
