"""A flat file of token ids.

Scope: `TokenFile`: ids in a memory-mapped file, a small JSON header beside it.
Not here: filling a token file from text (`text.py`), the windows that are cut from it (`batch.py`).
"""

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
            whole = nbytes == tokens.count * token_dtype(tokens.origin.vocab_size).itemsize
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return tokens if whole and header.get("format") == FORMAT else None
