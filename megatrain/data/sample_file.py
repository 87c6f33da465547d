"""Tokenised samples in a folder, memory-mapped: ids, which of them are learned, where each sample ends.

Scope: the files, writing them as a stream, the header that makes them valid.
Not here: where samples come from (`chat.py`), how rows are made of them (`batch.py`).

A folder holds `ids.bin` (the smallest unsigned dtype that holds every id), `supervised.bin` (a byte a token),
`index.bin` (`INDEX`), `rejected.jsonl` (a line for each row that was left out) and the header `samples.json`, which is
removed first and written last: files without their header are no cache.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.tokens import token_dtype

HEADER_NAME = "samples.json"
IDS_NAME = "ids.bin"
SUPERVISED_NAME = "supervised.bin"
INDEX_NAME = "index.bin"
REJECTED_NAME = "rejected.jsonl"
FORMAT = 1
INDEX = np.dtype([("end", "<u8"), ("line", "<u8"), ("source", "<u4"), ("targets", "<u4")])
"""A sample: where it ends in tokens, where it came from, how many of its tokens the loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids [n] and which of them are learned [n]; source: number of the source, line: in it."""

    ids: NDArray[np.unsignedinteger]
    supervised: NDArray[np.bool_]
    source: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A row that was left out. source: the path or name of where it was."""

    source: str
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """The samples in `folder`. origin: what they were made from, as JSON. targets: tokens that the loss counts.

    sha256: of ids, supervision and ends. changes: samples by what was done to make them fit.
    """

    folder: Path
    origin: Mapping[str, Any]
    sources: tuple[str, ...]
    vocab_size: int
    padding_id: int
    samples: int
    tokens: int
    targets: int
    sha256: str
    rejected: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @cached_property
    def _ids(self) -> NDArray[np.unsignedinteger]:
        return np.memmap(self.folder / IDS_NAME, dtype=token_dtype(self.vocab_size), mode="r", shape=(self.tokens,))

    @cached_property
    def _supervised(self) -> NDArray[np.bool_]:
        return np.memmap(self.folder / SUPERVISED_NAME, dtype=np.bool_, mode="r", shape=(self.tokens,))

    @cached_property
    def index(self) -> NDArray[np.void]:
        """The samples as `INDEX`."""
        return np.memmap(self.folder / INDEX_NAME, dtype=INDEX, mode="r", shape=(self.samples,))

    def sample(self, number: int) -> Sample:
        """Sample `number`, counted from 0."""
        entry = self.index[number]
        place = slice(int(self.index[number - 1]["end"]) if number else 0, int(entry["end"]))
        return Sample(
            ids=self._ids[place],
            supervised=self._supervised[place],
            source=int(entry["source"]),
            line=int(entry["line"]),
        )

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        ends: NDArray[np.int64] = self.index["end"].astype(np.int64)
        ends[1:] -= ends[:-1].copy()
        return ends

    def rejections(self) -> Iterator[Rejected]:
        """Every row that was left out, in the order of the data."""
        with (self.folder / REJECTED_NAME).open(encoding="utf-8") as file:
            for line in file:
                yield Rejected(**json.loads(line))

    def header(self) -> str:
        """The text of the header file."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "folder"}
        return json.dumps({"format": FORMAT, **fields}, indent=1)

    @staticmethod
    def load(folder: Path) -> "SampleFile | None":
        """The samples in `folder`; None when there are none or they are not whole."""
        try:
            header = json.loads((folder / HEADER_NAME).read_text(encoding="utf-8"))
            if header.pop("format") != FORMAT:
                return None
            header["sources"], header["notices"] = tuple(header["sources"]), tuple(header["notices"])
            found = SampleFile(folder=folder, **header)
            itemsize = token_dtype(found.vocab_size).itemsize
            sizes = {
                IDS_NAME: found.tokens * itemsize,
                SUPERVISED_NAME: found.tokens,
                INDEX_NAME: found.samples * INDEX.itemsize,
            }
            whole = all((folder / name).stat().st_size == nbytes for name, nbytes in sizes.items())
            return found if whole and (folder / REJECTED_NAME).is_file() else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


class SampleWriter:
    """Fills temporary files beside the old ones; `finish` puts them in place. Use it in a `with`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._checksum = hashlib.sha256()
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self.samples = 0
        self.tokens = 0
        self.targets = 0
        self.rejected: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()

    def __enter__(self) -> "SampleWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (IDS_NAME, SUPERVISED_NAME, INDEX_NAME, REJECTED_NAME):
            self._open[name] = self._files.enter_context(open(self._temporary(name), "wb"))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._files.close()
        finally:
            for name in (*self._open, HEADER_NAME):
                self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f"{name}.{os.getpid()}.tmp"

    def add(self, ids: NDArray[np.int64], supervised: NDArray[np.bool_], targets: int, source: int, line: int) -> None:
        """One more sample."""
        self.tokens += len(ids)
        self.targets += targets
        self.samples += 1
        parts = {
            IDS_NAME: ids.astype(self._dtype).tobytes(),
            SUPERVISED_NAME: supervised.astype(np.bool_).tobytes(),
            INDEX_NAME: np.array([(self.tokens, line, source, targets)], dtype=INDEX).tobytes(),
        }
        for name, part in parts.items():
            self._open[name].write(part)
        self._checksum.update(len(ids).to_bytes(8, "little") + parts[IDS_NAME] + parts[SUPERVISED_NAME])

    def reject(self, rejected: Rejected) -> None:
        """One more row that is left out."""
        self.rejected[rejected.reason] += 1
        self._open[REJECTED_NAME].write(json.dumps(asdict(rejected)).encode() + b"\n")

    def finish(self, *, origin: Mapping[str, Any], sources: tuple[str, ...], vocab_size: int, padding_id: int,
               notices: tuple[str, ...]) -> SampleFile:  # fmt: skip
        """The samples, durable and in place; header last, so that a header always belongs to whole files."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        found = SampleFile(
            folder=self._folder,
            origin=origin,
            sources=sources,
            vocab_size=vocab_size,
            padding_id=padding_id,
            samples=self.samples,
            tokens=self.tokens,
            targets=self.targets,
            sha256=self._checksum.hexdigest(),
            rejected=dict(self.rejected),
            changes=dict(self.changes),
            notices=notices,
        )
        header = self._temporary(HEADER_NAME)
        header.write_text(found.header(), encoding="utf-8")
        (self._folder / HEADER_NAME).unlink(missing_ok=True)
        for name in self._open:
            os.replace(self._temporary(name), self._folder / name)
        os.replace(header, self._folder / HEADER_NAME)
        return found
