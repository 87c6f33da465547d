"""A flat file of token ids, and the batches that are cut from it.

Scope: `TokenFile` (ids in a memory-mapped file, a small JSON header beside it) and `Batches` (which windows make up
which step).
Not here: filling a token file from text (`text.py`), moving a batch to the device (`megatrain/engine.py`).
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA_NAME = "tokens.bin"
HEADER_NAME = "tokens.json"
FORMAT = 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned dtype that holds every id below `vocab_size`, little endian."""
    bits = 8 if vocab_size <= 2**8 else 16 if vocab_size <= 2**16 else 32
    return np.dtype(f"<u{bits // 8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """What a token file was made from; equal origins mean equal tokens, so that the file can be used again."""

    kind: str
    tokenizer: str  # "bytes", or the checksum of the tokenizer.json
    vocab_size: int
    sources: tuple[tuple[str, int, int], ...]  # path, bytes, mtime in ns; in the order of the tokens


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """`count` token ids in `folder`; `sha256` is their checksum, `notices` are for a person to read."""

    folder: Path
    origin: TokenOrigin
    count: int
    sha256: str
    notices: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> NDArray[np.unsignedinteger[Any]]:
        """The ids as a read-only memory map [count]."""
        dtype = token_dtype(self.origin.vocab_size)
        return np.memmap(self.folder / DATA_NAME, dtype=dtype, mode="r", shape=(self.count,))

    def header(self) -> str:
        """The text of the header file."""
        fields = {"format": FORMAT, "count": self.count, "sha256": self.sha256, "notices": self.notices}
        return json.dumps({**fields, "origin": asdict(self.origin)}, indent=1)

    @staticmethod
    def load(folder: Path) -> "TokenFile | None":
        """The token file in `folder`; None when there is none or it is not whole."""
        try:
            header = json.loads((folder / HEADER_NAME).read_text(encoding="utf-8"))
            origin = header["origin"]
            tokens = TokenFile(
                folder=folder,
                count=int(header["count"]),
                sha256=str(header["sha256"]),
                notices=tuple(header["notices"]),
                origin=TokenOrigin(
                    kind=origin["kind"],
                    tokenizer=origin["tokenizer"],
                    vocab_size=origin["vocab_size"],
                    sources=tuple((path, size, mtime) for path, size, mtime in origin["sources"]),
                ),
            )
            nbytes = (folder / DATA_NAME).stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if header.get("format") != FORMAT or nbytes != tokens.count * token_dtype(origin["vocab_size"]).itemsize:
            return None
        return tokens


class Batches:
    """The batches of a run: windows of `seq_len` tokens that do not overlap, shuffled anew for each epoch.

    A step takes the next `batch` windows of the shuffled stream, across the end of an epoch if need be, so that
    `batch_at` is a pure function of the seed and the step. The tokens after the last whole window are not used.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, batch: int, seed: int) -> None:
        assert seq_len >= 1 and batch >= 1 and seed >= 0, (seq_len, batch, seed)
        assert tokens.count >= seq_len, (tokens.count, seq_len)
        self._tokens = tokens
        self._seq_len = seq_len
        self._batch = batch
        self._seed = seed
        self._order: tuple[int, NDArray[np.integer[Any]]] | None = None

    @property
    def windows(self) -> int:
        """Windows in one epoch."""
        return self._tokens.count // self._seq_len

    def batch_at(self, step: int) -> NDArray[np.int64]:
        """Token ids [batch, seq_len] of the step, counted from 0."""
        assert step >= 0, step
        rows = np.empty((self._batch, self._seq_len), dtype=np.int64)
        for row in range(self._batch):
            epoch, position = divmod(step * self._batch + row, self.windows)
            start = int(self._epoch_order(epoch)[position]) * self._seq_len
            rows[row] = self._tokens.ids[start : start + self._seq_len]
        return rows

    def fingerprint(self) -> str:
        """Equal for two runs exactly when every `batch_at` is: tokens, sizes, seed and numpy's way of shuffling."""
        # numpy may change its shuffle between releases; a resumed run would then see other samples without a word.
        shuffle = np.random.default_rng([self._seed, 0]).permutation(1000).astype("<u4").tobytes()
        shape = f"{self._tokens.sha256} {self._tokens.count} {self._seq_len} {self._batch} {self._seed} "
        return hashlib.sha256(shape.encode() + shuffle).hexdigest()

    def _epoch_order(self, epoch: int) -> NDArray[np.integer[Any]]:
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self.windows)
            self._order = epoch, order.astype(np.int32 if self.windows < 2**31 else np.int64)
        return self._order[1]
