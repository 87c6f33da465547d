"""Unit sizes and parameters of well-known architectures by arithmetic on their config, before torch is imported.

Scope: bytes of each unit, parameters in all, parameters that one token uses. The tests hold every figure against the
model itself; a config that is not known in full gives None, and the model is asked.
Not here: which config means which parts (`families.py`), the model's real layout, which a run uses
(`megatrain/model.py`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatrain.catalog.anatomy import Anatomy, Experts, norm_tensors
from megatrain.catalog.families import anatomy
from megatrain.programs import UnitSize
from tiering.workload import pages

ALIGN = 16  # elements; as `model.ALIGN`


def unit_sizes(config: Mapping[str, Any]) -> list[UnitSize] | None:
    """Units in the order of a forward with their bytes, or None if the config says too little or something unknown."""
    found = anatomy(config)
    return None if found is None else sizes_of(found)


def sizes_of(model: Anatomy) -> list[UnitSize]:
    """Units in the order of a forward with their bytes."""
    units = [UnitSize(name=table.name, nbytes=_nbytes([table.rows * model.hidden])) for table in model.embeddings]
    known = {layer: _nbytes(layer.tensors()) for layer in set(model.layers)}
    units += [
        UnitSize(name=f"{model.layers_name}.{number}", nbytes=known[layer]) for number, layer in enumerate(model.layers)
    ]
    units.append(UnitSize(name=model.norm_name, nbytes=_nbytes(norm_tensors(model.norm, model.hidden))))
    if model.tied:
        return [*units, UnitSize(name=model.head_name, nbytes=0, borrows=(units[0].name,))]
    return [*units, UnitSize(name=model.head_name, nbytes=_nbytes([model.vocabulary * model.hidden]))]


def _nbytes(numels: Iterable[int]) -> int:
    """Bytes of a unit: each tensor starts at a multiple of 16 elements, the whole is padded to pages."""
    return pages(4 * sum(-(-numel // ALIGN) * ALIGN for numel in numels))


def parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters of the model, tied ones counted once; None as `unit_sizes`.

    >>> tiny = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    ...         "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": True}
    >>> parameters(tiny)
    6224
    """
    found = anatomy(config)
    return None if found is None else parameters_of(found)


def parameters_of(model: Anatomy) -> int:
    """Parameters, tied ones counted once."""
    known = {layer: sum(layer.tensors()) for layer in set(model.layers)}
    tables = sum(table.rows for table in model.embeddings) + (0 if model.tied else model.vocabulary)
    norm = sum(norm_tensors(model.norm, model.hidden))
    return tables * model.hidden + sum(known[layer] for layer in model.layers) + norm


def active_parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters that one token is computed with: of the experts those that it is routed to; None as `unit_sizes`."""
    found = anatomy(config)
    if found is None:
        return None
    idle = {
        layer: sum(layer.mlp.stacked()) // layer.mlp.experts * (layer.mlp.experts - layer.mlp.routed)
        for layer in set(found.layers)
        if isinstance(layer.mlp, Experts)
    }
    return parameters_of(found) - sum(idle.get(layer, 0) for layer in found.layers)
