"""How much memory page-locked buffers really take, and which way of locking them a machine allows.

Scope: the two allocators (torch's own, and exact), the three paths (registered with CUDA, `mlock`, none), how much may
be locked, and the refusal of more. Pure: the facts of a machine come in as a record.
Not here: finding those facts (the caller), locking anything, the plan of what needs buffers (`plan.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tiering.errors import BudgetError
from tiering.workload import pages

MiB = 1 << 20
Allocator = Literal["torch allocator", "exact"]
PinPath = Literal["CUDA-registered", "mlock", "pageable"]
UNPROBED_RING_BYTES = 256 * MiB
"""What may be locked at most where nobody knows how much can be."""
MOST_SHARE = 0.75
"""Of the memory that a process may take: locked pages cannot be taken back, and the rest has to live too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Bytes that were asked for, and bytes that are locked for them."""

    asked_bytes: int
    locked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinFacts:
    """A machine, as far as locking memory goes. memory_bytes: what the process may take. memlock_bytes:
    RLIMIT_MEMLOCK, None where nothing limits it. release: of the kernel. limit_bytes: set by a person, who knows
    better. probed_bytes: locked in a trial that worked, 0 without one.
    """

    has_cuda: bool
    memory_bytes: int
    release: str
    memlock_bytes: int | None = None
    limit_bytes: int | None = None
    probed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinBudget:
    """nbytes: what may be locked, None where only a probe can tell. ring_bytes: the largest ring to lock today."""

    path: PinPath
    nbytes: int | None
    ring_bytes: int
    why: str


def pinned(sizes: Iterable[int], allocator: Allocator) -> Pinned:
    """What buffers of these bytes lock. torch's own allocator takes a power of two for each (source:
    `CachingHostAllocator.h`); memory that is mapped first and locked then takes whole pages.

    >>> pinned([129 * MiB], "torch allocator").locked_bytes // MiB, pinned([129 * MiB], "exact").locked_bytes // MiB
    (256, 129)
    """
    asked = list(sizes)
    assert all(nbytes >= 0 for nbytes in asked), f"buffers of {asked} bytes"
    one = _power_of_two if allocator == "torch allocator" else pages
    return Pinned(asked_bytes=sum(asked), locked_bytes=sum(one(nbytes) for nbytes in asked))


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def is_wsl(release: str) -> bool:
    """Is this the kernel of the Windows Subsystem for Linux?"""
    return "microsoft" in release.lower()


def pin_path(facts: PinFacts) -> PinPath:
    """How buffers are locked here. Without a device to copy to there is nothing to lock them for."""
    return "CUDA-registered" if facts.has_cuda else "pageable"


def pin_budget(facts: PinFacts, path: PinPath | None = None) -> PinBudget:
    """How much may be locked on `path` (None: the one that is used here).

    RLIMIT_MEMLOCK bounds `mlock` alone: the CUDA driver locks pages itself. On WSL, Windows decides and tells nobody,
    so no share of the RAM says anything.
    """
    path = pin_path(facts) if path is None else path
    if path == "pageable":
        return PinBudget(path=path, nbytes=0, ring_bytes=0, why="no accelerator: nothing is locked")
    most, why = _most(facts)
    if path == "mlock" and facts.memlock_bytes is not None and (most is None or facts.memlock_bytes < most):
        most, why = facts.memlock_bytes, "RLIMIT_MEMLOCK"
    if most is None:
        ring = min(UNPROBED_RING_BYTES, int(MOST_SHARE * facts.memory_bytes))
        return PinBudget(path=path, nbytes=None, ring_bytes=ring, why=why)
    return PinBudget(path=path, nbytes=most, ring_bytes=most, why=why)


def _most(facts: PinFacts) -> tuple[int | None, str]:
    if facts.limit_bytes is not None:
        return facts.limit_bytes, "a limit that was set"
    if is_wsl(facts.release):
        if facts.probed_bytes:
            return facts.probed_bytes, "WSL kernel: as much as a probe could lock"
        return None, "unknown, must probe: the kernel is that of WSL, where Windows decides"
    return int(MOST_SHARE * facts.memory_bytes), f"{MOST_SHARE:.0%} of the memory"


def refuse_pinning(facts: PinFacts, wanted: Pinned, path: PinPath | None = None) -> None:
    """Raises `BudgetError` if `wanted` cannot be locked on `path` (None: the one that is used here)."""
    budget = pin_budget(facts, path)
    locked = wanted.locked_bytes
    if budget.path == "pageable":
        _refuse_holding(facts, wanted)
        return
    if locked <= budget.ring_bytes:
        return
    asked = f"{budget.path}: {locked} bytes to lock ({wanted.asked_bytes} asked for)"
    if budget.nbytes is None:
        raise BudgetError(
            f"{asked}, and how much may be locked is {budget.why}. "
            f"Fix: at most {budget.ring_bytes} bytes until a probe has shown more, or set the limit that you know."
        )
    if budget.why == "RLIMIT_MEMLOCK":
        raise BudgetError(
            f"{asked}, RLIMIT_MEMLOCK allows {budget.nbytes} bytes. Fix: ulimit -l {-(-locked // 1024)} "
            f"(KiB, or unlimited) before the start, `memlock` in /etc/security/limits.conf, or LimitMEMLOCK= of "
            f"the service; memory that is registered with CUDA is not bound by it."
        )
    raise BudgetError(f"{asked}, at most {budget.nbytes} may be ({budget.why}). Fix: fewer or smaller buffers.")


def _refuse_holding(facts: PinFacts, wanted: Pinned) -> None:
    """Buffers that are not locked take memory all the same."""
    most = int(MOST_SHARE * facts.memory_bytes)
    if wanted.asked_bytes > most:
        raise BudgetError(
            f"pageable: buffers of {wanted.asked_bytes} bytes, at most {most} may be ({MOST_SHARE:.0%} of the "
            f"memory). Fix: fewer or smaller buffers."
        )
