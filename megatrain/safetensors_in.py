"""The safetensors files of a model folder, read tensor by tensor.

Scope: which file holds which tensor, with the index and the files checked against each other, both ways; files that are
cut short; reading one tensor.
Not here: which parameter a tensor belongs to (`file_names.py`, `checkpoint.py`), writing files (`safetensors_out.py`).
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatrain.errors import UserError

INDEX = "model.safetensors.index.json"
LONGEST_NAME = 255
"""Bytes of a file name on Linux."""
SINGLE = "model.safetensors"
EXACT = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What becomes FP32 without a change of its value."""
_OTHER = (".gguf", ".bin", ".pth", ".pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor as its file describes it. code: the dtype in the words of safetensors."""

    file: Path
    shape: tuple[int, ...]
    code: str


class TensorFiles:
    """The tensors of the folder `path`. Raises UserError for files that are missing, damaged or not the index's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: Mapping[str, Stored] = _stored(path)
        self._open: dict[Path, safe_open] = {}
        self._readers = 0

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the dtype of its file, in memory of its own."""
        file = self.tensors[name].file
        with self.reading():
            if file not in self._open:
                self._open[file] = _opened(file)
            try:
                tensor: torch.Tensor = self._open[file].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(file, error) from error
            return tensor

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Files that are opened inside stay open until the outermost exit; each is mapped, its header read once."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._open.clear()


def _stored(path: Path) -> dict[str, Stored]:
    index = path / INDEX
    if index.is_file():
        return _indexed(path, _weight_map(index))
    if (path / SINGLE).is_file():
        return _described(path / SINGLE)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise UserError(
            f"model.path: {path}: {INDEX} is missing, {len(shards)} shards found ({shards[0]} and so on). Fix: bring "
            'the index back; or write it again from the shards: python -c "from megatrain.safetensors_in import '
            f"write_index; write_index('{path}')\""
        )
    other = sorted(
        (file.name for file in path.iterdir() if file.suffix in _OTHER), key=lambda name: ".gguf" not in name
    )
    found = f", but {other[0]}" if other else ""
    way = f"megatrain unpack {path / other[0]} -o DIR" if found.endswith(".gguf") else "save_pretrained"
    raise UserError(f"model.path: {path}: no safetensors file found{found}. Fix: give a folder written by {way}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): Path(str(file)).name for name, file in named.items()}
        long = next((file for file in found.values() if len(os.fsencode(file)) > LONGEST_NAME), None)
        if long is not None:
            raise ValueError(f"no file can be called {long[:40]}...")
        return found
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise UserError(f"model.path: {index} is not a safetensors index: {error}. Fix: download it again") from error


def _indexed(path: Path, named: Mapping[str, str]) -> dict[str, Stored]:
    """The shards' tensors, if they are just those of the index."""
    shards = sorted(set(named.values()))
    absent = [name for name in shards if not (path / name).is_file()]
    if absent:
        raise UserError(
            f"model.path: {path} lacks {absent[0]}, which its index names ({len(absent)} of {len(shards)} missing). "
            "Fix: download it again"
        )
    found: dict[str, Stored] = {}
    for shard in shards:
        inside = _described(path / shard)
        lacking = next((name for name, file in named.items() if file == shard and name not in inside), None)
        if lacking is not None:
            raise UserError(
                f"model.path: {path / shard} has no tensor {lacking}, which {INDEX} says is there. Fix: download both "
                "again, from the same release of the model"
            )
        stray = next((name for name in inside if named.get(name) != shard), None)
        if stray is not None:
            said = f"in {named[stray]}" if stray in named else "nowhere"
            raise UserError(
                f"model.path: {path / shard} has the tensor {stray}, which {INDEX} says is {said}. Fix: download both "
                "again, from the same release of the model"
            )
        found |= inside
    return found


def _described(file: Path) -> dict[str, Stored]:
    opened = _opened(file)
    parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return {
        name: Stored(file=file, shape=tuple(part.get_shape()), code=str(part.get_dtype()))
        for name, part in parts.items()
    }


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> UserError:
    size = file.stat().st_size if file.exists() else 0
    wanted = _whole_size(file)
    if wanted is not None and wanted != size:
        what = f"is cut short: it has {size} bytes, its header says {wanted}"
    else:
        what = f"({size} bytes) cannot be read: {error}"
    return UserError(f"model.path: {file} {what}. Fix: download it again")


def _whole_size(file: Path) -> int | None:
    """Bytes that a file should have by its own header; None where that cannot be told."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + int(max(ends, default=0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError):
        return None


def write_index(path: Path | str) -> Path:
    """Write the index that a folder of shards lacks, from the headers of all its safetensors files."""
    folder = Path(path)
    weight_map: dict[str, str] = {}
    nbytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name in _described(file):
            if name in weight_map:
                raise UserError(f"{folder}: {name} is in {weight_map[name]} and in {file.name}. Fix: keep one of them")
            weight_map[name] = file.name
        nbytes += file.stat().st_size
    index = folder / INDEX
    content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return index
