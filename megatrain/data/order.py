"""In which order the rows of the data come, and which are held out: pure functions of a seed.

Scope: the shuffle of an epoch, the split into rows for training and rows for validation.
Not here: what a row is and how rows make up a step (`batch.py`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import UserError

Indexes = NDArray[np.int64]


class Shuffle:
    """`count` rows in an order that is drawn anew for each epoch, from (seed, epoch) alone."""

    def __init__(self, count: int, seed: int) -> None:
        assert count >= 1 and seed >= 0, (count, seed)
        self.count = count
        self._seed = seed
        self._epoch = -1
        self._order: NDArray[np.integer] = np.empty(0, dtype=np.int64)

    def at(self, position: int) -> int:
        """The row at `position` of the endless stream of epochs."""
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self.count)
            self._epoch, self._order = epoch, order.astype(np.int32 if self.count < 2**31 else np.int64)
        return int(self._order[place])

    def mark(self) -> bytes:
        """Bytes that differ when numpy shuffles otherwise: a resumed run would see other rows without a word."""
        return np.random.default_rng([self._seed, 0]).permutation(1000).astype("<u4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ascending indexes that together are all; `settings` is what they were drawn from."""

    train: Indexes
    validation: Indexes
    settings: str


def split(count: int, part: float, most: int | None, seed: int) -> Split:
    """Hold out a share (`part` a float up to 1) or a number (`part` an int) of `count` rows, `most` at the most.

    One row at least is held out and one at least is kept. Raises UserError where that cannot be.
    """
    if count < 2:
        raise UserError(
            f"data.validation: {count} row(s) of data cannot be split into training and validation. "
            "Fix: more data, or no data.validation"
        )
    if isinstance(part, int) and part >= count:
        raise UserError(
            f"data.validation: {part} rows of {count} would leave none to train on. Fix: {count - 1} or less"
        )
    wanted = part if isinstance(part, int) else max(1, round(count * part))
    held_out = min(wanted, count - 1, count if most is None else most)
    # Three words of seed: no epoch's shuffle has the same.
    drawn = np.random.default_rng([seed, 0, 1]).permutation(count).astype(np.int64)
    return Split(
        train=np.sort(drawn[held_out:]), validation=np.sort(drawn[:held_out]), settings=f"{part!r} {most} {seed}"
    )
