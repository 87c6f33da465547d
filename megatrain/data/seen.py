"""Which rows have been seen, in little memory.

Scope: a hash table of 64-bit digests with a number each, in two numpy arrays.
Not here: what is digested (`conversation.py`).
"""

import numpy as np

FIRST_SLOTS = 1 << 10
MOST_FULL = 0.6


class SeenRows:
    """Digests and the number of the row that had each first: 27 to 54 bytes a row, whatever the rows are.

    Two different rows have equal digests with a chance of n^2 / 2^65: one in four thousand for a hundred million rows.
    """

    def __init__(self) -> None:
        self._digests = np.zeros(FIRST_SLOTS, dtype=np.uint64)
        self._numbers = np.zeros(FIRST_SLOTS, dtype=np.uint64)  # 0: free
        self._count = 0

    def first(self, digest: int, number: int) -> int | None:
        """The number under which `digest` was seen before; None when it is new, which it then no longer is."""
        assert number >= 1, number
        slot = self._slot(digest)
        if self._numbers[slot]:
            return int(self._numbers[slot])
        self._digests[slot], self._numbers[slot] = digest, number
        self._count += 1
        if self._count > MOST_FULL * len(self._digests):
            self._grow()
        return None

    def _slot(self, digest: int) -> int:
        last = len(self._digests) - 1
        slot = digest & last
        while self._numbers[slot] and int(self._digests[slot]) != digest:
            slot = (slot + 1) & last
        return slot

    def _grow(self) -> None:
        digests, numbers = self._digests, self._numbers
        self._digests = np.zeros(2 * len(digests), dtype=np.uint64)
        self._numbers = np.zeros(2 * len(digests), dtype=np.uint64)
        for old in np.flatnonzero(numbers):
            slot = self._slot(int(digests[old]))
            self._digests[slot], self._numbers[slot] = digests[old], numbers[old]
