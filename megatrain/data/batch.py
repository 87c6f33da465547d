"""Rows of equal length, and the batches that steps take from them.

Scope: `Batch`; rows that are windows of tokens, padded samples, or packed samples; which rows make up which step.
Not here: the files behind the rows (`tokens.py`, `token_arrays.py`, `sample_file.py`), the forward
(`megatrain/stream.py`).

Shapes: B rows a step, S tokens a row.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.data.order import Indexes, Shuffle
from megatrain.data.packing import pack
from megatrain.data.sample_file import SampleFile

IGNORED = -100
"""The label of a token that is not learned, as transformers has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step sees. `labels` are `input_ids` or IGNORED, not shifted: the model's loss shifts them itself.

    lengths: [B], tokens that are not padding; padding is on the right, so a causal model needs no mask for it.
    position_ids: [B, S] where rows are packed, else None. They restart at each sample, and at the padding.
    supervised: labels that the loss counts, those of the first column left out; the divisor of the step's loss.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: NDArray[np.int64]
    position_ids: NDArray[np.int64] | None
    supervised: int


class Rows(Protocol):
    """Rows of `seq_len` tokens. packed: with position ids. padding_id: what stands after the last token of a row."""

    seq_len: int
    packed: bool
    padding_id: int

    def __len__(self) -> int: ...

    def fill(self, row: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64], positions: Any) -> int:
        """Write row number `row` into arrays [S] that hold padding; returns its length. positions: [S], or None."""

    def fingerprint(self) -> str:
        """Equal for two of the same kind exactly when their rows are."""


class WindowRows:
    """Windows of tokens that do not overlap. The tokens after the last whole window of a file are not used."""

    packed = False
    padding_id = 0

    def __init__(self, files: Sequence[NDArray[np.integer]], sha256: str, seq_len: int, chosen: Indexes | None = None):
        self.seq_len = seq_len
        self._files = files
        self._sha256 = sha256
        self._ends = np.cumsum([len(file) // seq_len for file in files], dtype=np.int64)
        self._chosen = chosen

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chosen is None else len(self._chosen)

    def fill(self, row: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64], positions: Any) -> int:
        window = row if self._chosen is None else int(self._chosen[row])
        file = int(np.searchsorted(self._ends, window, side="right"))
        begin = (window - (int(self._ends[file - 1]) if file else 0)) * self.seq_len
        input_ids[:] = self._files[file][begin : begin + self.seq_len]
        labels[:] = input_ids
        return self.seq_len

    def fingerprint(self) -> str:
        return f"windows {self._sha256} {[len(file) for file in self._files]} {self.seq_len}"


class SampleRows:
    """Samples, each in a row of its own or several packed into one, with padding after them.

    A packed row ends with one token of padding at least. So every row has more than one sequence, and transformers
    masks every micro-batch in the same way, whichever rows are in it.
    """

    def __init__(
        self, file: SampleFile, seq_len: int, padding_id: int, *, packed: bool, chosen: Indexes | None = None
    ) -> None:
        self.seq_len = seq_len
        self.packed = packed
        self.padding_id = padding_id
        self._file = file
        samples = np.arange(file.samples, dtype=np.int64) if chosen is None else chosen
        self._members = (
            [samples[row] for row in pack(file.lengths()[samples], sample_room(seq_len, packed=True))]
            if packed
            else samples
        )

    def __len__(self) -> int:
        return len(self._members)

    def fill(self, row: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64], positions: Any) -> int:
        at = 0
        for number in np.atleast_1d(self._members[row]):
            sample = self._file.sample(int(number))
            place = slice(at, at + len(sample.ids))
            input_ids[place] = sample.ids
            labels[place][sample.supervised] = sample.ids[sample.supervised]
            labels[at] = IGNORED  # nothing of its own sample comes before it
            if positions is not None:
                positions[place] = np.arange(len(sample.ids))
            at = place.stop
        if positions is not None:
            positions[at:] = np.arange(self.seq_len - at)
        return at

    def fingerprint(self) -> str:
        return f"samples {self._file.sha256} {self._file.samples} {self.seq_len} {self.padding_id} {self.packed}"


def sample_room(seq_len: int, *, packed: bool) -> int:
    """The longest sample that fits into a row."""
    return seq_len - 1 if packed else seq_len


class StepBatches:
    """The batches of a run. A step takes the next `batch` rows of the shuffled stream of epochs.

    It crosses the end of an epoch if need be: no batch is incomplete, no row is left out. `batch_at` is a pure function
    of the rows, the seed and the step, so that a resumed run goes on in the middle of an epoch.
    """

    def __init__(self, rows: Rows, batch: int, seed: int, split_settings: str = "") -> None:
        self.rows = rows
        self.batch = batch
        self._seed = seed
        self._shuffle = Shuffle(len(rows), seed)
        self._split_settings = split_settings

    def batch_at(self, step: int) -> Batch:
        """The batch of the step, counted from 0."""
        assert step >= 0, step
        return gather(
            self.rows, [self._shuffle.at(step * self.batch + place) for place in range(self.batch)], self.batch
        )

    def fingerprint(self) -> str:
        """Equal for two runs exactly when every `batch_at` is: rows, sizes, seed, split and numpy's shuffling."""
        shape = f"{self.rows.fingerprint()} {self.batch} {self._seed} {self._split_settings} "
        return hashlib.sha256(shape.encode() + self._shuffle.mark()).hexdigest()


def batches_in_order(rows: Rows, batch: int) -> Iterator[Batch]:
    """Every row once, unshuffled, for evaluation. The last batch is filled up with rows in which nothing is learned."""
    for begin in range(0, len(rows), batch):
        yield gather(rows, range(begin, min(begin + batch, len(rows))), batch)


def gather(rows: Rows, chosen: Sequence[int], height: int) -> Batch:
    """The rows of the numbers `chosen` as a batch of `height` rows."""
    input_ids = np.full((height, rows.seq_len), rows.padding_id, dtype=np.int64)
    labels = np.full((height, rows.seq_len), IGNORED, dtype=np.int64)
    lengths = np.zeros(height, dtype=np.int64)
    positions = _empty_positions(height, rows.seq_len) if rows.packed else None
    for place, row in enumerate(chosen):
        lengths[place] = rows.fill(
            row, input_ids[place], labels[place], None if positions is None else positions[place]
        )
    supervised = int((labels[:, 1:] != IGNORED).sum())
    return Batch(input_ids=input_ids, labels=labels, lengths=lengths, position_ids=positions, supervised=supervised)


def _empty_positions(height: int, seq_len: int) -> NDArray[np.int64]:
    """Positions of rows that hold nothing: two sequences each, as in a row that holds something."""
    row = np.concatenate([np.arange(1), np.arange(seq_len - 1)])
    return np.tile(row, (height, 1))
