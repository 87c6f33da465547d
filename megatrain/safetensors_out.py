"""Safetensors files written as a stream: the header from known shapes, then tensor after tensor.

Scope: the file format, the cut into shards, the index.
Not here: where the tensors come from (`export.py`), reading (the safetensors library does it).

The format: the header's length (8 bytes, little endian), the header as JSON, then the tensors without gaps. The
library itself writes only from tensors that are all in memory.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatrain.safetensors_in import INDEX, SINGLE
from tiering.errors import DiskFullError, IOFailedError
from tiering.place import free_bytes

ALIGN = 64
"""Bytes: where the data begins in a file. Readers map files into memory, and kernels give the bits of memory that
torch allocates itself only at such addresses; the format asks for 8.
"""
CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file, known before its data is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Data = Callable[[Entry], Iterator[torch.Tensor]]
"""The data of a tensor in order, in parts of its dtype."""


def write_shards(folder: Path, entries: Sequence[Entry], most_bytes: int, data: Data) -> list[Path]:
    """All entries in files of at most `most_bytes` each (one tensor may be larger); an index if there are several."""
    shards = list(cut(entries, most_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, data)
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(prod(entry.shape) for entry in entries),
                "total_size": sum(entry.nbytes for entry in entries),
            },
            "weight_map": {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def cut(entries: Iterable[Entry], most_bytes: int) -> Iterator[list[Entry]]:
    """Entries in order, in lists of at most `most_bytes`; a tensor that is larger is a list of its own."""
    shard: list[Entry] = []
    for entry in entries:
        if shard and sum(e.nbytes for e in shard) + entry.nbytes > most_bytes:
            yield shard
            shard = []
        shard.append(entry)
    if shard:
        yield shard


def write_file(path: Path, entries: Sequence[Entry], data: Data) -> None:
    """One file, durable when this returns. Raises DiskFullError or IOFailedError, with the file's name."""
    try:
        with open(path, "xb") as file:
            file.write(header(entries))
            for entry in entries:
                begin = file.tell()
                for part in data(entry):
                    assert part.dtype == entry.dtype, f"{entry.name}: {part.dtype}, the header says {entry.dtype}"
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
                written = file.tell() - begin
                assert written == entry.nbytes, f"{entry.name}: {written} bytes, the header says {entry.nbytes}"
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise (DiskFullError if full else IOFailedError)(
            f"{path}: writing failed: {error.strerror}; {free_bytes(path)} bytes are free. Fix: another disk, or room"
        ) from error


def header(entries: Sequence[Entry]) -> bytes:
    """The bytes in front of the data."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        content[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return len(text).to_bytes(8, "little") + text
