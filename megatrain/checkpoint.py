"""First weights from a model folder, unit by unit.

Scope: finding every tensor of the model in the folder's files, checking names, shapes and dtypes before any data is
read, filling a unit in FP32; rows of tokens that the files do not have.
Not here: the files themselves (`safetensors_in.py`), how tensors are renamed, stacked and cut (`file_names.py`), GGUF
(`unpack.py`), writing model folders (`export.py`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from megatrain.errors import UserError
from megatrain.file_names import Recipe, recipes
from megatrain.model import Slice, Unit, Units
from megatrain.safetensors_in import EXACT, TensorFiles


class Checkpoint:
    """The tensors of `units` in the folder `path`. Raises UserError for what is missing, extra, misshapen or quantised.

    Buffers that belong to the files are loaded into the model at once: they are small, and stay in RAM. Memory: the
    tensors of one recipe (mostly one parameter; stacked experts up to three times) beside the unit.

    stored_rows: rows that the files' tables of tokens have, where the model has another number. The last ones are left
    out, or new ones are the mean of all in the files: `resize_token_embeddings` of transformers without its noise.
    """

    def __init__(self, path: Path, units: Units, stored_rows: int | None = None) -> None:
        self.path = path
        self._stored_rows = stored_rows
        self._tables = _tables_of(units.model) if stored_rows is not None else frozenset()
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
                    if name in wanted:
                        place = wanted[name]
                        self._put(place, name, value, recipe, place.of(block), again=place.name in filled)
                        filled.add(place.name)

    def _put(
        self, place: Slice, name: str, value: torch.Tensor, recipe: Recipe, tensor: torch.Tensor, *, again: bool
    ) -> None:
        """Fill the unit's `tensor`. name: of `value`. again: it has been filled already, from a tensor tied to this."""
        stored = tensor
        if place.name in self._tables:
            stored, value = tensor[: len(value)], value[: len(tensor)]
        if again:
            self._refuse_other_tie(place, name, value, stored)
        stored.copy_(value)
        self._refuse_non_finite(place.name, recipe, stored)
        if stored is not tensor:
            tensor[len(stored) :] = stored.mean(dim=0)

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
        wanted = {name: self._stored_shape(place) for _, place in units.slices() for name in self._names[place.name]}
        wanted |= {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}
        for name, shape in wanted.items():
            if shapes.get(name, shape) != shape:
                source = self._recipe_of[name].sources[0][0]
                raise UserError(
                    f"model.path: {self._files.tensors[source].file}: {name} has shape {shapes[name]}, config.json "
                    f"says {shape}"
                )

    def _stored_shape(self, place: Slice) -> tuple[int, ...]:
        if place.name not in self._tables or self._stored_rows is None:
            return tuple(place.shape)
        return (self._stored_rows, *place.shape[1:])

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


def _tables_of(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters with a row, or a number, for each token: those that transformers itself resizes."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters(recurse=False)}
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in tables)


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
