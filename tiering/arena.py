"""One host allocation that every block in RAM lives in.

Scope: `Arena`: an anonymous, page-aligned mapping, lent out as views and tensors without a copy; locking it for copies
to a device, asking for it from certain NUMA nodes.
Not here: who may use which bytes and when (`tiering/schedule.py` assigns them, `tiering/check.py` proves it), which
nodes (`tiering/numa.py`).
"""

import mmap
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from tiering.errors import BudgetError
from tiering.mempolicy import bind_pages, page_nodes
from tiering.numa import Placement
from tiering.workload import PAGE

SAMPLED_PAGES = 512


class Arena:
    """`nbytes` of host memory in one piece, bounded by construction: nothing here can make it grow.

    Creating it touches no page: memory is taken as bytes are first written.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes` is rounded up to whole pages. Raises `BudgetError` where the kernel refuses the mapping."""
        assert nbytes >= 0, f"an arena of {nbytes} bytes"
        self.nbytes = max(1, -(-nbytes // PAGE)) * PAGE
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"HOST needs one mapping of {self.nbytes} bytes and the kernel refuses it "
                f"({error.strerror}). Fix: a smaller host budget, or a higher memory limit."
            ) from error
        self._map: mmap.mmap | None = mapping
        self._bytes = memoryview(mapping)
        self._pinned = False
        with suppress(AttributeError, OSError):  # a kernel without huge pages: slower page faults, the same bytes
            mapping.madvise(mmap.MADV_HUGEPAGE)

    def view(self, lo: int, hi: int) -> memoryview:
        """Bytes [lo, hi) as a writable view; no copy."""
        self._check(lo, hi)
        return self._bytes[lo:hi]

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        """Bytes [lo, hi) as a flat uint8 tensor; no copy."""
        mapping = self._check(lo, hi)
        if lo == hi:
            return torch.empty(0, dtype=torch.uint8)  # frombuffer refuses an empty range
        return torch.frombuffer(mapping, dtype=torch.uint8, offset=lo, count=hi - lo)

    def place(self, placement: Placement) -> str | None:
        """Ask for its memory from certain NUMA nodes, before it is touched; returns what the kernel said against it."""
        if placement.policy == "leave":
            return None
        return bind_pages(self._address(), self.nbytes, placement.policy, placement.nodes)

    def share_on(self, nodes: Collection[int]) -> float | None:
        """Which share of the pages that are there lies on `nodes`, by a sample; None where nobody can tell."""
        found = page_nodes(self._address(), self.nbytes, SAMPLED_PAGES)
        return sum(node in nodes for node in found) / len(found) if found else None

    def pin(self) -> str | None:
        """Lock all of it, in place, for copies by the CUDA driver; returns what the driver said if it refuses.

        This takes the memory at once, not as bytes are first written. torch's own allocator would lock up to twice as
        much (`pinning.pinned`), and cannot lock bytes that exist.
        """
        assert not self._pinned, "the arena is locked already"
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(self._address(), self.nbytes, 0)
        if int(code):
            return f"{cudart.cudaGetErrorString(code)} (CUDA error {int(code)})"
        self._pinned = True
        return None

    def unpin(self) -> None:
        """Unlock it; nothing may be copying. Harmless where it is not locked."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
            self._pinned = False

    def _address(self) -> int:
        return self.tensor(0, self.nbytes).data_ptr()

    def _check(self, lo: int, hi: int) -> mmap.mmap:
        assert self._map is not None, "the arena is closed"
        assert 0 <= lo <= hi <= self.nbytes, f"[{lo}, {hi}) is not inside an arena of {self.nbytes} bytes"
        return self._map

    def close(self) -> None:
        """Lends nothing more and drops the arena's own references.

        The memory goes back at once if no view or tensor is left, and with the last of them otherwise. It is not
        unmapped here: `mmap.close` would refuse under a live view, but not under a live tensor (torch keeps the object,
        not the buffer), and the next read of that tensor would kill the process (tried).
        """
        self.unpin()  # before the mapping can go: the driver would keep its pages
        self._bytes.release()
        self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
