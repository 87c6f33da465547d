"""What a run's data looks like to the model, for a person or as JSON.

Scope: `megatrain data`: counts, lengths, the supervised share, samples with what is learned in colour, rows left out.
Not here: preparing the data (`run_data.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from megatrain.config import RunConfig
from megatrain.data.batch import IGNORED, gather
from megatrain.data.run_data import RunData, open_data
from megatrain.data.sample_file import Rejected, SampleFile

LEARNED = "bold green"
REJECTED_SHOWN = 20
BINS = 8
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of tokens of one sample that are all learned, or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One sample and where it came from."""

    origin: str
    tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The data of a run. shown: its first samples, decoded."""

    data: RunData
    seq_len: int
    shown: tuple[ShownSample, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, every rejected row included."""
        rows: dict[str, Any] = {
            "seq_len": self.seq_len,
            "rows": len(self.data.train),
            "validation_rows": 0 if self.data.validation is None else len(self.data.validation),
            "notices": list(self.data.notices),
            "shown": [
                {
                    "origin": sample.origin,
                    "tokens": sample.tokens,
                    "pieces": [{"text": piece.text, "supervised": piece.supervised} for piece in sample.pieces],
                }
                for sample in self.shown
            ],
        }
        samples = self.data.samples
        if samples is None:
            return rows
        return {
            **rows,
            "samples": samples.samples,
            "tokens": samples.tokens,
            "supervised_tokens": samples.targets,
            "supervised_share": samples.targets / samples.tokens,
            "lengths": [{"from": low, "to": high, "samples": count} for low, high, count in histogram(samples)],
            "rejected": [
                {"source": r.source, "line": r.line, "reason": r.reason, "detail": r.detail}
                for r in samples.rejections()
            ],
        }

    def render(self, console: Console) -> None:
        """For a person: the first rejected rows, then their count."""
        console.print(self.data.summary, highlight=False, soft_wrap=True)
        for notice in self.data.notices:
            console.print(notice, markup=False, highlight=False, soft_wrap=True)
        samples = self.data.samples
        if samples is not None:
            console.print(_lengths_table(samples))
        for sample in self.shown:
            console.print(Text(f"{sample.origin}, {sample.tokens} tokens", style="bold"), soft_wrap=True)
            text = Text()
            for piece in sample.pieces:
                text.append(piece.text, style=LEARNED if piece.supervised else "")
            console.print(text)
        if self.shown and samples is not None:
            console.print(Text("In this colour: what is learned.", style=LEARNED))
        if samples is not None and samples.rejected:
            _print_rejected(samples, console)


def data_report(run: RunConfig, show: int, console: Console) -> DataReport:
    """Prepare the data of `run` in its output folder, as training would, and look at it."""
    from megatrain.model import model_config

    vocab_size = model_config(run.model.json_config()).get_text_config().vocab_size
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        data = open_data(
            run.data,
            vocab_size,
            run.output.dir / "tokens",
            run.train.seed,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    return DataReport(data=data, seq_len=run.data.seq_len, shown=tuple(islice(_shown(run, data), show)))


def histogram(samples: SampleFile) -> list[tuple[int, int, int]]:
    """(shortest, longest, samples) for each of some ranges of lengths that are equally wide."""
    lengths = samples.lengths()
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.linspace(low, high + 1, min(BINS, high - low + 1) + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, bins=[*edges[:-1], high + 0.5])
    return [(int(a), int(b) - 1, int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def _lengths_table(samples: SampleFile) -> Table:
    table = Table("tokens", "samples", "", title="Lengths")
    bins = histogram(samples)
    most = max(count for _, _, count in bins)
    for low, high, count in bins:
        table.add_row(f"{low} to {high}", f"{count:,}", "#" * round(BAR_WIDTH * count / most))
    return table


def _print_rejected(samples: SampleFile, console: Console) -> None:
    total = sum(samples.rejected.values())
    console.print(Text(f"{total} rows left out", style="bold"))
    for rejected in islice(samples.rejections(), REJECTED_SHOWN):
        console.print(_rejected_line(rejected), markup=False, highlight=False, soft_wrap=True)
    if total > REJECTED_SHOWN:
        console.print(f"and {total - REJECTED_SHOWN} more; --json lists all")


def _rejected_line(rejected: Rejected) -> str:
    detail = f": {rejected.detail}" if rejected.detail else ""
    return f"{rejected.source}, line {rejected.line}: {rejected.reason}{detail}"


def _shown(run: RunConfig, data: RunData) -> Iterator[ShownSample]:
    file = run.data.tokenizer_file
    tokenizer = None if file is None else Tokenizer.from_file(str(file))
    if data.samples is None:
        for row in range(len(data.train)):
            batch = gather(data.train, [row], 1)
            pieces = _pieces(tokenizer, batch.input_ids[0], batch.labels[0] != IGNORED)
            yield ShownSample(origin=f"window {row + 1}", tokens=int(batch.lengths[0]), pieces=pieces)
        return
    for number in range(data.samples.samples):
        sample = data.samples.sample(number)
        origin = f"{data.samples.sources[sample.source]}, line {sample.line}"
        pieces = _pieces(tokenizer, sample.ids, sample.supervised)
        yield ShownSample(origin=origin, tokens=len(sample.ids), pieces=pieces)


def _pieces(tokenizer: Tokenizer | None, ids: Any, supervised: Any) -> tuple[Piece, ...]:
    found = []
    pairs = zip(ids.tolist(), supervised.tolist(), strict=True)
    for learned, run in groupby(pairs, key=lambda pair: pair[1]):
        found.append(Piece(text=_decoded(tokenizer, [token for token, _ in run]), supervised=learned))
    return tuple(found)


def _decoded(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    if tokenizer is None:
        return bytes(token for token in ids if token < 256).decode(errors="replace")
    return str(tokenizer.decode(ids, skip_special_tokens=False))
