"""What locked buffers really take, which way of locking a machine has, and how much of it: sums by hand.

Scope: `tiering/pinning.py`. Not here: how `megatrain doctor` shows it and tries it (`test_doctor.py`).
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import BudgetError
from tiering.pinning import (
    MOST_SHARE,
    UNPROBED_RING_BYTES,
    PinFacts,
    is_wsl,
    pin_budget,
    pin_path,
    pinned,
    refuse_pinning,
)

MiB = 1 << 20
GiB = 1 << 30
PAGE = 4096
WSL = "5.15.167.4-microsoft-standard-WSL2"
MATRIX = 18_944 * 3_584


def facts(**changes: Any) -> PinFacts:
    """A machine of 64 GiB with CUDA."""
    return PinFacts(**({"has_cuda": True, "memory_bytes": 64 * GiB, "release": "6.8.0-generic"} | changes))


BLOCKS = [
    ([2 * MATRIX], 135_790_592, 268_435_456),
    ([4 * MATRIX], 271_581_184, 536_870_912),
    ([112 * MiB], 112 * MiB, 128 * MiB),
    ([128 * MiB], 128 * MiB, 128 * MiB),
    ([129 * MiB], 129 * MiB, 256 * MiB),
    ([5 * GiB], 5 * GiB, 8 * GiB),
    ([4 * GiB], 4 * GiB, 4 * GiB),
    ([round(20.4 * GiB)], round(20.4 * GiB), 32 * GiB),
    ([round(1.2 * GiB)] * 5, 5 * round(1.2 * GiB), 10 * GiB),
]


@pytest.mark.parametrize(("sizes", "asked", "locked"), BLOCKS)
def test_torch_locks_a_power_of_two_for_each_buffer(sizes: list[int], asked: int, locked: int) -> None:
    """PL-01: both figures, asked for and locked."""
    found = pinned(sizes, "torch allocator")
    assert (found.asked_bytes, found.locked_bytes) == (asked, locked), f"{sizes}: {found}"


@pytest.mark.parametrize(("sizes", "asked", "locked"), BLOCKS)
def test_exact_locking_takes_whole_pages_and_no_more(sizes: list[int], asked: int, locked: int) -> None:
    """PL-01: the same buffers, rounded up to 4096 bytes each."""
    found = pinned(sizes, "exact")
    by_hand = sum(-(-size // PAGE) * PAGE for size in sizes)
    assert (found.asked_bytes, found.locked_bytes) == (asked, by_hand), f"{sizes}: {found}"


@given(st.lists(st.integers(0, 1 << 40), max_size=8))
def test_no_allocator_locks_less_than_was_asked_for(sizes: list[int]) -> None:
    """P2, PL-01: exact stays within a page a buffer, torch within twice the size."""
    exact, own = pinned(sizes, "exact"), pinned(sizes, "torch allocator")
    assert sum(sizes) <= exact.locked_bytes <= sum(sizes) + PAGE * len(sizes), f"{sizes}: {exact}"
    assert sum(sizes) <= own.locked_bytes <= 2 * sum(sizes), f"{sizes}: {own}"


def test_mlock_above_its_limit_is_refused_with_the_way_to_raise_it() -> None:
    """PL-09: 64 MiB under RLIMIT_MEMLOCK of 8 MiB; the message has both figures and `ulimit`."""
    machine = facts(memlock_bytes=8 * MiB)
    with pytest.raises(BudgetError) as refused:
        refuse_pinning(machine, pinned([64 * MiB], "exact"), "mlock")
    said = str(refused.value)
    for words in ("mlock", str(64 * MiB), "RLIMIT_MEMLOCK", str(8 * MiB), f"ulimit -l {64 * 1024}", "limits.conf"):
        assert words in said, f"{words!r} is not in {said!r}"
    refuse_pinning(machine, pinned([8 * MiB], "exact"), "mlock")
    refuse_pinning(facts(memlock_bytes=None), pinned([64 * MiB], "exact"), "mlock")


def test_memory_registered_with_cuda_is_not_bound_by_the_limit_of_mlock() -> None:
    """PL-09: the CUDA driver locks pages itself."""
    machine = facts(memlock_bytes=8 * MiB)
    assert pin_path(machine) == "CUDA-registered", pin_path(machine)
    refuse_pinning(machine, pinned([64 * MiB], "exact"))
    budget = pin_budget(machine)
    assert budget.nbytes == int(MOST_SHARE * 64 * GiB), f"{budget}"


def test_without_an_accelerator_nothing_is_locked_but_buffers_still_have_to_fit() -> None:
    """EN-01, PL-06: pageable; 16e9 bytes of buffers on a host of 16 GB are refused, 1e9 are not."""
    machine = facts(has_cuda=False, memory_bytes=16 * 10**9)
    assert pin_path(machine) == "pageable" and pin_budget(machine).nbytes == 0, f"{pin_budget(machine)}"
    refuse_pinning(machine, pinned([200_000_000] * 5, "exact"))
    with pytest.raises(BudgetError, match=r"pageable: buffers of 16000000000 bytes.*Fix:"):
        refuse_pinning(machine, pinned([4 * 10**9] * 4, "exact"))


@pytest.mark.parametrize("release", [WSL, "4.4.0-19041-Microsoft"])
@pytest.mark.parametrize("memory", [8 * GiB, 64 * GiB, 1024 * GiB])
def test_on_wsl_how_much_may_be_locked_is_unknown_whatever_the_ram(release: str, memory: int) -> None:
    """PL-10: no share of the RAM; a small ring until a probe has shown more."""
    budget = pin_budget(facts(release=release, memory_bytes=memory))
    assert is_wsl(release) and budget.nbytes is None, f"{budget}"
    assert "unknown, must probe" in budget.why, budget.why
    assert 0 < budget.ring_bytes <= UNPROBED_RING_BYTES == 256 * MiB, f"{budget}"


def test_on_wsl_more_than_the_small_ring_needs_a_probe_or_a_set_limit() -> None:
    """PL-10: refused before; afterwards what was shown, or said, counts."""
    machine, gib = facts(release=WSL), pinned([GiB], "exact")
    refuse_pinning(machine, pinned([256 * MiB], "exact"))
    with pytest.raises(BudgetError, match=r"unknown, must probe.*Fix: at most 268435456 bytes"):
        refuse_pinning(machine, gib)
    refuse_pinning(facts(release=WSL, probed_bytes=GiB), gib)
    refuse_pinning(facts(release=WSL, limit_bytes=2 * GiB), gib)
    probed, said = pin_budget(facts(release=WSL, probed_bytes=GiB)), pin_budget(facts(release=WSL, limit_bytes=7))
    assert (probed.nbytes, said.nbytes) == (GiB, 7), f"{probed} {said}"


@pytest.mark.parametrize("release", [WSL, "6.8.0-generic"])
def test_a_limit_that_a_person_set_wins(release: str) -> None:
    """PL-10: over a share of the RAM and over a probe, in both directions; RLIMIT_MEMLOCK still bounds mlock."""
    machine = facts(release=release, limit_bytes=100 * MiB, probed_bytes=GiB, memlock_bytes=8 * MiB)
    assert pin_budget(machine).nbytes == 100 * MiB, f"{pin_budget(machine)}"
    assert pin_budget(machine, "mlock").nbytes == 8 * MiB, f"{pin_budget(machine, 'mlock')}"
    with pytest.raises(BudgetError, match="a limit that was set"):
        refuse_pinning(machine, pinned([101 * MiB], "exact"))
