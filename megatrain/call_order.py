"""The modules of a model in the order in which its forward calls them, seen while no layer computes.

Scope: finding the decoder layers, one forward on two tokens, modules without memory, layers that pass on what they get.
Not here: what units the modules become (`model.py`), what their calls cost (`profile.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.errors import UserError

_CPU = torch.device("cpu")
_IN_TUPLE = "_answers_in_tuple"
"""Attribute of a layer: whether what it returns is a tuple."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The largest list of modules in the base model."""
    lists = [
        m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())
    ]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of layers; such a model is not supported")
    return max(lists, key=lambda found: (sum(p.numel() for p in found.parameters()), len(found)))


def call_order(model: PreTrainedModel) -> list[nn.Module]:
    """The base model's units in the order of its forward: seen on two tokens, with the layers passing them on.

    Layers of some models answer with a tensor, of others with a tuple that begins with one. What is wrong for a model
    fails, or ends with another shape.
    """
    layers = list(decoder_layers(model))
    refusal: Exception | None = None
    for in_tuple in (False, True):
        for layer in layers:
            setattr(layer, _IN_TUPLE, in_tuple)
        try:
            called, hidden = _seen_calls(model, layers)
        except Exception as error:
            refusal = refusal or error
            continue
        if hidden.shape[:-1] == (1, 2):
            return list(dict.fromkeys(called))
    reason = " ".join(str(refusal or "its layers hand on neither a tensor nor a tuple").split())[:300]
    raise UserError(f"{type(model).__name__} cannot be cut into units: {reason}") from refusal


def _seen_calls(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], torch.Tensor]:
    """Modules outside of the layers that own parameters, and the layers, as they are called; the last hidden state."""
    inner = {module for layer in layers for module in layer.modules()}
    units = [module for module in model.base_model.modules() if module not in inner and own_parameters(module)]
    called: list[nn.Module] = []
    hooks = [unit.register_forward_pre_hook(lambda module, _: called.append(module)) for unit in units]
    try:
        with torch.no_grad(), weightless(units), passing_on(layers, lambda layer, args, kwargs: called.append(layer)):
            output = model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return called, output.last_hidden_state


@contextmanager
def weightless(
    modules: Sequence[nn.Module], device: torch.device = _CPU, dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """Inside, the modules' own parameters are zeros that take no memory (every element is the same one) of `device`."""
    kept = [(m, name, parameter) for m in modules for name, parameter in m._parameters.items() if parameter is not None]
    for module, name, parameter in kept:
        module._parameters[name] = torch.zeros((), device=device, dtype=dtype).expand(parameter.shape)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


@contextmanager
def passing_on(modules: Sequence[nn.Module], seen: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Inside, each module tells `seen` what it was called with and returns its first argument, in its usual form."""

    def replacement(module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen(module, args, kwargs)
            first = args[0] if args else kwargs["hidden_states"]
            if isinstance(module, nn.Linear):  # a projection outside of the layers: what follows has another width
                return first.new_zeros(()).expand(*first.shape[:-1], module.out_features)
            return (first, None) if getattr(module, _IN_TUPLE, False) else first

        return forward

    for module in modules:
        module.forward = replacement(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def own_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that the module itself registered."""
    return [name for name, _ in module.named_parameters(recurse=False)]
