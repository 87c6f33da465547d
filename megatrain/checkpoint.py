"""First weights from a model folder, unit by unit.

Scope: finding every tensor of the model in the folder's files, checking names, shapes and dtypes before any data is
read, filling a unit in FP32.
Not here: the files themselves (`safetensors_in.py`), how tensors are renamed, stacked and cut (`file_names.py`), GGUF
(`unpack.py`), writing model folders (`export.py`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatrain.errors import UserError
from megatrain.file_names import Recipe, recipes
from megatrain.model import Slice, Unit, Units
from megatrain.safetensors_in import EXACT, TensorFiles


class Checkpoint:
    """The tensors of `units` in the folder `path`. Raises UserError for what is missing, extra, misshapen or quantised.

    Buffers that belong to the files are loaded into the model at once: they are small, and stay in RAM. Memory: the
    tensors of one recipe (mostly one parameter; stacked experts up to three times) beside the unit.
    """

    def __init__(self, path: Path, units: Units) -> None:
        self.path = path
        self._model = units.model
        self._files = TensorFiles(path)
        self._recipe_of: dict[str, Recipe] = {}
        self._names = _names_of(units)
        self._buffers = persistent_buffers(units)
        self._check(units)
        self._load_buffers()

    def fill(self, unit: Unit, block: torch.Tensor) -> None:
        """Fill `block` (flat uint8) with the unit's own tensors as FP32; FP16 and BF16 convert exactly."""
        block.zero_()
        wanted = {name: place for place in unit.slices for name in self._names[place.name]}
        filled: set[str] = set()
        with self._files.reading():
            for recipe in dict.fromkeys(self._recipe_of[name] for name in wanted if name in self._recipe_of):
                for name, value in recipe.make(self._model, self._files.read).items():
                    place = wanted.get(name)
                    if place is None:
                        continue
                    if place.name in filled:
                        self._refuse_other_tie(place, name, value, place.of(block))
                    place.of(block).copy_(value)
                    filled.add(place.name)
                    self._refuse_non_finite(place.name, recipe, place.of(block))

    def _check(self, units: Units) -> None:
        quantised = getattr(self._model.config, "quantization_config", None)
        if quantised:
            method = quantised.get("quant_method", "quantised") if isinstance(quantised, dict) else "quantised"
            raise UserError(
                f"model.path: {self.path}: config.json has a quantization_config ({method}), which is not read. "
                "Fix: a folder of the model in BF16, FP16 or FP32"
            )
        made, unknown = recipes(self._model, self._files.tensors)
        for recipe in made:
            for name, _ in recipe.sources:
                stored = self._files.tensors[name]
                if stored.code not in EXACT and recipe.first not in self._buffers:
                    raise UserError(
                        f"model.path: {stored.file}: {name} is {stored.code}: only {', '.join(EXACT)} become FP32 "
                        "exactly. Fix: a folder of the model that is not quantised"
                    )
        shapes = self._shapes(made)
        missing = [names[0] for names in self._names.values() if not any(name in shapes for name in names)]
        missing += [name for name in self._buffers if name not in shapes]
        for what, names in (("has no tensor", missing), ("has a tensor that the model does not know:", unknown)):
            if names:
                raise UserError(
                    f"model.path: {self.path} {what} {names[0]} ({len(names)} such). Fix: save the model with "
                    "save_pretrained of a transformers release that names its tensors as this one"
                )
        wanted = {name: tuple(place.shape) for _, place in units.slices() for name in self._names[place.name]}
        wanted |= {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}
        for name, shape in wanted.items():
            if shapes.get(name, shape) != shape:
                source = self._recipe_of[name].sources[0][0]
                raise UserError(
                    f"model.path: {self._files.tensors[source].file}: {name} has shape {shapes[name]}, config.json "
                    f"says {shape}"
                )

    def _load_buffers(self) -> None:
        for name, buffer in self._buffers.items():
            recipe = self._recipe_of[name]
            buffer.copy_(recipe.make(self._model, self._files.read)[name])
            self._refuse_non_finite(name, recipe, buffer)

    def _shapes(self, made: list[Recipe]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what the recipes make, found with tensors that take no memory; notes which recipe makes what."""
        shapes: dict[str, tuple[int, ...]] = {}
        for recipe in made:
            tensors = recipe.make(self._model, lambda name: torch.empty(self._files.tensors[name].shape, device="meta"))
            for name, tensor in tensors.items():
                shapes[name] = tuple(tensor.shape)
                self._recipe_of[name] = recipe
        return shapes

    def _refuse_other_tie(self, place: Slice, name: str, value: torch.Tensor, found: torch.Tensor) -> None:
        if not torch.equal(value.float(), found):
            raise UserError(
                f"model.path: {self.path}: {place.name} and {name} differ, but config.json ties them. Fix: "
                "tie_word_embeddings: false in config.json if both are meant"
            )

    def _refuse_non_finite(self, name: str, recipe: Recipe, values: torch.Tensor) -> None:
        finite = torch.isfinite(values)
        if not finite.all():
            files = sorted({self._files.tensors[source].file.name for source, _ in recipe.sources})
            raise UserError(
                f"model.path: {self.path / files[0]}: {name} holds {int((~finite).sum())} values that are not "
                "finite (nan or inf). Fix: download it again, or another checkpoint of the model"
            )


def persistent_buffers(units: Units) -> dict[str, torch.Tensor]:
    """Buffers that belong to a model's files, as the run computes with them."""
    saved = units.model.state_dict()
    return {name: buffer for name, buffer in units.model.named_buffers() if name in saved}


def _names_of(units: Units) -> dict[str, list[str]]:
    """All names under which files may hold a tensor: several where weights are tied, its own first."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in units.model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    alike = {name: names for names in by_id.values() for name in names}
    return {
        place.name: [place.name, *(name for name in alike.get(place.name, ()) if name != place.name)]
        for _, place in units.slices()
    }
