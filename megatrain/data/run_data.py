"""The data of a run, whatever its kind: rows to train on, rows to validate on.

Scope: `open_data`.
Not here: each kind (`text.py`, `chat.py`, `token_arrays.py`), batches (`batch.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.batch import Rows, SampleRows, StepBatches, WindowRows
from megatrain.data.chat import prepare_samples
from megatrain.data.order import Indexes, split
from megatrain.data.sample_file import SampleFile
from megatrain.data.text import prepare_tokens
from megatrain.data.token_arrays import open_token_arrays

if TYPE_CHECKING:
    from megatrain.config import DataConfig

Progress = Callable[[int, int], None]
VALIDATION_FOLDER = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run trains and validates on. split_settings: for the fingerprint. samples: of chat data.

    notices: what a person should know. summary: one line for the log of the run. tokens_left_out: those after the last
    whole window of a file.
    """

    train: Rows
    validation: Rows | None
    split_settings: str
    samples: SampleFile | None
    notices: tuple[str, ...]
    summary: str
    tokens_left_out: int

    def batches(self, batch: int, seed: int) -> StepBatches:
        """The batches to train on."""
        return StepBatches(self.train, batch, seed, self.split_settings)


def open_data(
    data: "DataConfig", vocab_size: int, folder: Path, seed: int, progress: Progress | None = None
) -> RunData:
    """The data, tokenised into `folder` where that has not been done. seed: of the split.

    Raises UserError for data that cannot be used, DiskFullError when the cache does not fit.
    """
    opened = _Opened.of(data, vocab_size, folder, progress)
    validation: Rows | None = None
    chosen: Indexes | None = None
    settings = ""
    if isinstance(data.validation, Path):
        held_out = data.model_copy(update={"paths": (str(data.validation),), "datasets": ()})
        validation = _Opened.of(held_out, vocab_size, folder / VALIDATION_FOLDER, progress).rows(data, None)
    elif data.validation is not None:
        parts = split(opened.count, data.validation, data.validation_max, seed)
        chosen, settings = parts.train, parts.settings
        validation = opened.rows(data, parts.validation)
    train = opened.rows(data, chosen)
    held = f", {len(validation)} rows held out" if validation is not None else ""
    return RunData(
        train=train,
        validation=validation,
        split_settings=settings,
        samples=opened.samples,
        notices=opened.notices,
        summary=f"Data: {opened.summary}, {len(train):,} rows of {data.seq_len}{held}",
        tokens_left_out=sum(len(file) % data.seq_len for file in opened.arrays),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The prepared files of one kind of data, before rows are made of them. count: samples, or windows."""

    count: int
    summary: str
    notices: tuple[str, ...]
    samples: SampleFile | None = None
    arrays: Sequence[np.ndarray] = ()
    sha256: str = ""

    @staticmethod
    def of(data: "DataConfig", vocab_size: int, folder: Path, progress: Progress | None) -> "_Opened":
        if data.kind == "chat":
            samples = prepare_samples(data, vocab_size, folder, progress)
            share = samples.targets / samples.tokens
            summary = f"{samples.samples:,} samples, {samples.tokens:,} tokens, {share:.0%} of them supervised"
            return _Opened(count=samples.samples, summary=summary, notices=sample_notices(samples), samples=samples)
        if data.kind == "tokens":
            arrays = open_token_arrays(data, vocab_size, folder, progress)
            return _windows(arrays.files, arrays.sha256, (), data.seq_len)
        tokens = prepare_tokens(data, vocab_size, folder, progress)
        return _windows((tokens.ids,), tokens.sha256, tokens.notices, data.seq_len)

    def rows(self, data: "DataConfig", chosen: Indexes | None) -> Rows:
        if self.samples is None:
            return WindowRows(self.arrays, self.sha256, data.seq_len, chosen)
        return SampleRows(self.samples, data.seq_len, self.samples.padding_id, packed=data.packing, chosen=chosen)


def _windows(files: Sequence[np.ndarray], sha256: str, notices: tuple[str, ...], seq_len: int) -> _Opened:
    count = sum(len(file) // seq_len for file in files)
    summary = f"{sum(len(file) for file in files):,} tokens"
    return _Opened(count=count, summary=summary, notices=notices, arrays=files, sha256=sha256)


def sample_notices(samples: SampleFile) -> tuple[str, ...]:
    """What happened to rows that could not be used as they are, one line each; nothing happens without a line."""
    rejected = sum(samples.rejected.values())
    lines = list(samples.notices)
    if rejected:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(samples.rejected.items()))
        lines.append(f"data.paths: {rejected} rows left out ({reasons})")
    for change, done in (("shortened", "lost the end of their system turn"), ("cut", "lost their own end")):
        if samples.changes.get(change):
            lines.append(f"data.seq_len: {samples.changes[change]} samples {done} to fit")
    return tuple(lines)
