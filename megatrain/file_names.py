"""Which tensors of a model folder make which tensors of the model: transformers' own conversion, by recipe.

Scope: renaming, stacking, joining and cutting as `from_pretrained` does it, from the library's own mapping.
Not here: reading files (`safetensors_in.py`), what is missing or left over (`checkpoint.py`), the way
back (`export.py`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from megatrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Some tensors of the files and what they make. first: the tensor of the model that names it, with no others of it.

    sources: names in the files with the pattern each of them matched, in the order in which they are stacked.
    """

    first: str
    sources: tuple[tuple[str, str], ...]
    transform: WeightTransform

    def make(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors that it makes, by their names in the model. Raises UserError where they do not go together."""
        transform = deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.first, name, pattern, read(name))
        try:
            made: Mapping[str, Any] = transform.convert(self.first, model=model, config=model.config)
        except Exception as error:  # each operation of the library raises its own
            raise UserError(
                f"model.path: {self.sources[0][0]} and {len(self.sources) - 1} others do not make {self.first}: "
                f"{' '.join(str(error).split())}. Fix: save the model with save_pretrained of the transformers release "
                "that is installed here"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Recipe], list[str]]:
    """How tensors with these names become the model's; and the names that none of its tensors needs."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = _known(model)
    sources: dict[str, list[tuple[str, str]]] = {}
    transforms: dict[str, WeightTransform] = {}
    unknown: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unknown.append(name)
            continue
        if target not in transforms:
            transforms[target] = WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
        sources.setdefault(target, []).append((name, name if pattern is None else pattern))
    made = [Recipe(first=first, sources=tuple(sources[first]), transform=transforms[first]) for first in transforms]
    return made, _needed(model, unknown)


def _known(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that a file may hold: parameters under all their names, and persistent buffers."""
    return dict(model.state_dict())


def _needed(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of `names` that transformers does not pass over by itself, such as tables that are computed."""
    passed = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    passed |= {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    buffers = {name for name, _ in model.named_buffers()}
    return [name for name in names if name not in buffers and not any(re.search(p, name) for p in passed)]
