"""First weights from a model folder: safetensors, read tensor by tensor.

Scope: finding every parameter in the folder's files, checking names and shapes before anything is read, filling a unit.
Not here: writing model folders; formats other than safetensors; checkpoints whose tensors are named or cut otherwise
than the model's own parameters (refused by name).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatrain.errors import UserError
from megatrain.model import Unit, Units

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The parameters of `units` in the folder `path`. Raises UserError for what is missing, extra or misshapen."""

    def __init__(self, path: Path, units: Units) -> None:
        self.path = path
        self._file_of = _files(path)
        self._check(units)

    def fill(self, unit: Unit, block: torch.Tensor) -> None:
        """Fill `block` (flat uint8) with the unit's own parameters as FP32; FP16 and BF16 convert exactly."""
        block.zero_()
        for place in unit.slices:
            with _opened(self._file_of[place.name]) as file:
                place.of(block).copy_(file.get_tensor(place.name))

    def _check(self, units: Units) -> None:
        wanted = {place.name: place.shape for _, place in units.slices()}
        missing = [name for name in wanted if name not in self._file_of]
        known = {name for name, _ in units.model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in units.model.named_buffers()}
        extra = [name for name in self._file_of if name not in known]
        for what, names in (("has no tensor", missing), ("has a tensor that the model does not know:", extra)):
            if names:
                raise UserError(
                    f"model.path: {self.path} {what} {names[0]} ({len(names)} such). Fix: save the model with "
                    "save_pretrained of a transformers release that names its tensors as this one"
                )
        for file in sorted({self._file_of[name] for name in wanted}):
            with _opened(file) as opened:
                for name in (name for name in wanted if self._file_of[name] == file):
                    found = tuple(opened.get_slice(name).get_shape())
                    if found != wanted[name]:
                        raise UserError(
                            f"model.path: {file}: {name} has shape {found}, config.json says {wanted[name]}"
                        )


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise UserError(f"model.path: {file} ({size} bytes) cannot be read: {error}. Fix: download it again") from error


def _files(path: Path) -> Mapping[str, Path]:
    """Tensor name to file."""
    if (path / INDEX).is_file():
        try:
            named = json.loads((path / INDEX).read_text())["weight_map"]
            files = {str(name): path / Path(str(file)).name for name, file in named.items()}
        except (ValueError, KeyError, AttributeError, OSError) as error:
            raise UserError(f"model.path: {path / INDEX} is not a safetensors index: {error}") from error
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise UserError(f"model.path: {path} lacks {absent[0]}, which its index names ({len(absent)} missing)")
        return files
    if not (path / SINGLE).is_file():
        shards = sorted(file.name for file in path.glob("*.safetensors"))
        found = f"{len(shards)} shards found, but no {INDEX}" if shards else "no safetensors file found"
        raise UserError(f"model.path: {path}: {found}. Fix: give a folder written by save_pretrained")
    with _opened(path / SINGLE) as file:
        return dict.fromkeys(file.keys(), path / SINGLE)  # not a dict
