"""Files of token ids that were made elsewhere, memory-mapped where they lie.

Scope: `.npy` and raw files; every id checked once, the checksum kept in the run folder.
Not here: the token file that this project makes of text (`tokens.py`), rows and batches (`batch.py`).
"""

import hashlib
import json
import os
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.sources import ARRAY_SUFFIXES, Source, list_sources
from megatrain.errors import UserError

if TYPE_CHECKING:
    from megatrain.config import DataConfig

HEADER_NAME = "arrays.json"
BLOCK_TOKENS = 1 << 20
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrays:
    """Ids of each file [n], read-only maps in the order of the sorted paths; sha256: of all of them."""

    files: tuple[NDArray[np.integer], ...]
    sha256: str

    @property
    def count(self) -> int:
        return sum(len(file) for file in self.files)


def open_token_arrays(
    data: "DataConfig", vocab_size: int, cache_dir: Path, progress: Callable[[int, int], None] | None = None
) -> TokenArrays:
    """The files of `data.paths`. The first time every id is looked at; `progress` gets (bytes done, bytes in all).

    Raises UserError for a file that holds no ids, and for an id that the model's table of `vocab_size` rows lacks.
    """
    sources = list_sources(data.paths, ARRAY_SUFFIXES).files
    files = tuple(_mapped(source, data.dtype) for source in sources)
    seen = [[s.path, s.nbytes, s.mtime_ns] for s in sources]
    origin = {"format": FORMAT, "sources": seen, "dtype": data.dtype, "vocab_size": vocab_size}
    sha256 = _known(cache_dir, origin)
    if sha256 is None:
        sha256 = _checked(sources, files, vocab_size, progress or (lambda done, total: None))
        _keep(cache_dir, {**origin, "sha256": sha256})
    if not any(len(file) >= data.seq_len for file in files):
        longest = max(len(file) for file in files)
        raise UserError(
            f"data.paths: the longest of {len(files)} file(s) has {longest} tokens, one window of data.seq_len needs "
            f"{data.seq_len}. Fix: more tokens, or data.seq_len <= {longest}"
        )
    return TokenArrays(files=files, sha256=sha256)


def _mapped(source: Source, dtype: str | None) -> NDArray[np.integer]:
    path = source.path
    try:
        if path.lower().endswith(".npy"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if not np.issubdtype(array.dtype, np.integer):
                raise UserError(
                    f"data.paths: {path} holds {array.dtype}, not whole numbers. Fix: an array of token ids"
                )
            return array.reshape(-1)
        if dtype is None:
            raise UserError(
                f"data.dtype: {path} does not say how wide its ids are. Fix: data.dtype: uint16, uint32 or int32, or a "
                ".npy file"
            )
        wide = np.dtype(dtype).newbyteorder("<")
        if source.nbytes == 0 or source.nbytes % wide.itemsize:
            raise UserError(
                f"data.paths: {path} has {source.nbytes} bytes, which are no whole ids of {wide.itemsize} bytes. "
                "Fix: the data.dtype that the file was written with"
            )
        return np.memmap(path, dtype=wide, mode="r")
    except (
        OSError,
        ValueError,
        EOFError,
        SyntaxError,
        tokenize.TokenError,
    ) as error:  # numpy parses a header as Python
        raise UserError(f"data.paths: {path} cannot be read as token ids: {error}") from None


def _checked(
    sources: tuple[Source, ...],
    files: tuple[NDArray[np.integer], ...],
    vocab_size: int,
    progress: Callable[[int, int], None],
) -> str:
    checksum, done_bytes, total_bytes = hashlib.sha256(), 0, sum(file.nbytes for file in files)
    for source, file in zip(sources, files, strict=True):
        checksum.update(len(file).to_bytes(8, "little"))
        for begin in range(0, len(file), BLOCK_TOKENS):
            block = np.asarray(file[begin : begin + BLOCK_TOKENS])
            bad = (block < 0) | (block >= vocab_size)
            if bad.any():
                first = int(np.argmax(bad))
                raise UserError(
                    f"{source.path}: token {begin + first} has the id {int(block[first])}, but the model's table has "
                    f"{vocab_size} rows (ids 0 to {vocab_size - 1}). Fix: the data.dtype that the file was written "
                    "with, tokens of the model's own tokenizer, or a larger vocab_size (model.resize_vocabulary)"
                )
            checksum.update(block.astype("<u4").tobytes())
            done_bytes += block.nbytes
            progress(done_bytes, total_bytes)
    return checksum.hexdigest()


def _known(cache_dir: Path, origin: dict[str, Any]) -> str | None:
    """The checksum when these very files have been checked before."""
    try:
        header = json.loads((cache_dir / HEADER_NAME).read_text(encoding="utf-8"))
        sha256 = header.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    return str(sha256) if header == origin else None


def _keep(cache_dir: Path, header: dict[str, Any]) -> None:
    temporary = cache_dir / f"{HEADER_NAME}.{os.getpid()}.tmp"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(header, indent=1), encoding="utf-8")
        os.replace(temporary, cache_dir / HEADER_NAME)
    except OSError as error:
        raise UserError(f"{cache_dir}: cannot be written: {error.strerror}. Fix: another output.dir") from None
