"""A Hugging Face causal language model as a list of units whose weights live elsewhere.

Scope: building the model without its weights, finding its units and their flat layout, first weights from a seed.
Not here: running a unit on leased weights (`stream.py`), weights from a model folder (`checkpoint.py`), what a unit
costs (`profile.py`).

Nothing here knows an architecture: the decoder layers are the largest `ModuleList` of the base model, every other
module that owns parameters is a unit of its own, and all that stands outside the base model is the head.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megatrain.errors import UserError
from megatrain.programs import UnitSize
from tiering.manifest import TensorSpec
from tiering.workload import pages

ALIGN = 16
"""Elements: tensors start at multiples of 64 bytes, as torch's own allocations do; kernels then give the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(TensorSpec):
    """One parameter's place in its unit's flat block, as the store records it, and the views it stands for."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of its unit's block (flat uint8)."""
        return block.view(torch.float32)[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """`owner.attr` takes its value from a slice of a unit's block; the unit is another one where weights are tied."""

    owner: nn.Module
    attr: str
    unit: str
    slice: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A submodule that is moved and computed as a whole.

    slices: the parameters it owns, in the model's own order. bindings: all parameters it computes with.
    completes: units whose gradient is whole after this one's backward. The head has no `module`: the model's own code
    runs it.
    """

    name: str
    module: nn.Module | None
    slices: tuple[Slice, ...]
    bindings: tuple[Binding, ...]
    completes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        last = self.slices[-1] if self.slices else None
        return pages(4 * (last.offset + last.numel)) if last else 0

    @property
    def borrows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b.unit for b in self.bindings if b.unit != self.name))

    def size(self) -> UnitSize:
        return UnitSize(name=self.name, nbytes=self.nbytes, borrows=self.borrows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """All units in the order in which a forward calls them, the head last."""

    model: PreTrainedModel
    units: tuple[Unit, ...]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    @property
    def head(self) -> Unit:
        return self.units[-1]

    @property
    def parameters(self) -> int:
        return sum(s.numel for unit in self.units for s in unit.slices)

    def slices(self) -> Iterator[tuple[Unit, Slice]]:
        """Every parameter once, in the order of `model.named_parameters()`."""
        place = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        owned = [(unit, s) for unit in self.units for s in unit.slices]
        return iter(sorted(owned, key=lambda pair: place[pair[1].name]))


def model_config(content: Mapping[str, Any]) -> PretrainedConfig:
    """The config object for the JSON of a config.json, in FP32. Raises UserError for an unknown model or bad value."""
    values = {key: value for key, value in content.items() if key not in ("model_type", "dtype", "torch_dtype")}
    try:
        config = AutoConfig.for_model(content["model_type"], **values)
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model.config: {reason}") from error
    except Exception as error:  # strict configs raise classes of their own for a bad field
        raise UserError(f"model.config: {' '.join(str(error).split())}") from error
    config.dtype = torch.float32
    config.use_cache = False
    return config


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The model with its parameters on the meta device and its buffers computed by its own constructors."""
    try:
        with no_init_weights(), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise UserError(f"model.config: {str(error).strip().splitlines()[0]}") from error
    model.tie_weights()
    return model.train()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter moves to the meta device as its module registers it: no module is ever whole in RAM."""
    register = nn.Module.register_parameter

    def moved(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = moved  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_units(model: PreTrainedModel) -> Units:
    """Raises UserError, by name, for a model that cannot be cut into units."""
    names = {module: name for name, module in model.named_modules()}
    calls = list(_call_order(model))
    inside = {inner for module in calls for inner in module.modules()}
    outside = [module for module in model.modules() if module not in inside]
    stray = [n for m in outside for n in _own(m) if _within(m, model.base_model)]
    if stray:
        raise UserError(f"{type(model).__name__} keeps the parameter {stray[0]} outside of its submodules' forwards; "
                        "such a model is not supported")  # fmt: skip
    head = [module for module in outside if _own(module)]
    groups: list[tuple[str, nn.Module | None, list[nn.Module]]] = [(names[m], m, list(m.modules())) for m in calls]
    groups.append((names[head[0]] if len(head) == 1 else "head", None, head))
    owner: dict[int, tuple[str, Slice]] = {}
    units = [_unit(name, module, modules, names, owner) for name, module, modules in groups]
    return Units(model=model, units=tuple(_with_completes(units)))


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _within(module: nn.Module, base: nn.Module) -> bool:
    return any(module is inner for inner in base.modules())


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The largest list of modules in the base model."""
    lists = [
        m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())
    ]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of layers; such a model is not supported")
    return max(lists, key=lambda found: (sum(p.numel() for p in found.parameters()), len(found)))


def _call_order(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The base model's units in the order of its forward: seen on two tokens, with the layers passing them on."""
    layers = list(decoder_layers(model))
    inner = {module for layer in layers for module in layer.modules()}
    units = [module for module in model.base_model.modules() if module not in inner and _own(module)]
    called: list[nn.Module] = []
    hooks = [unit.register_forward_pre_hook(lambda module, _: called.append(module)) for unit in units]
    try:
        with torch.no_grad(), weightless(units), passing_on(layers, lambda layer, args, kwargs: called.append(layer)):
            model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{type(model).__name__} cannot be cut into units: {reason}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return iter(dict.fromkeys(called))


@contextmanager
def weightless(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the modules' own parameters are zeros that take no memory (every element is the same one)."""
    kept = [(m, name, parameter) for m in modules for name, parameter in m._parameters.items() if parameter is not None]
    for module, name, parameter in kept:
        module._parameters[name] = torch.zeros(()).expand(parameter.shape)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


@contextmanager
def passing_on(modules: Sequence[nn.Module], seen: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Inside, each module tells `seen` what it was called with and returns its first argument."""

    def replacement(module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen(module, args, kwargs)
            return args[0] if args else kwargs["hidden_states"]

        return forward

    for module in modules:
        module.forward = replacement(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _unit(
    name: str,
    module: nn.Module | None,
    modules: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    owner: dict[int, tuple[str, Slice]],
) -> Unit:
    """Lay out the parameters that no unit before owns; bind all. Tied parameters are one object."""
    slices: list[Slice] = []
    bindings: list[Binding] = []
    top = 0
    for part in modules:
        for attr, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in owner:
                full = f"{names[part]}.{attr}".removeprefix(".")
                slices.append(Slice(name=full, shape=tuple(parameter.shape), offset=top))
                top += -(-parameter.numel() // ALIGN) * ALIGN
                owner[id(parameter)] = name, slices[-1]
            unit, place = owner[id(parameter)]
            bindings.append(Binding(owner=part, attr=attr, unit=unit, slice=place))
    return Unit(name=name, module=module, slices=tuple(slices), bindings=tuple(bindings))


def _with_completes(units: Sequence[Unit]) -> Iterator[Unit]:
    first_use: dict[str, str] = {}
    for unit in units:
        for name in dict.fromkeys(binding.unit for binding in unit.bindings):
            first_use.setdefault(name, unit.name)
    for unit in units:
        done = tuple(name for name, user in first_use.items() if user == unit.name)
        yield Unit(name=unit.name, module=unit.module, slices=unit.slices, bindings=unit.bindings, completes=done)


@contextmanager
def bound(unit: Unit, values: Mapping[Slice, torch.Tensor]) -> Iterator[None]:
    """The unit's parameters are `values` inside, and have no memory again outside."""
    kept = [binding.owner._parameters[binding.attr] for binding in unit.bindings]
    for binding in unit.bindings:
        binding.owner._parameters[binding.attr] = values[binding.slice]  # type: ignore[assignment]
    try:
        yield
    finally:
        for binding, parameter in zip(unit.bindings, kept, strict=True):
            binding.owner._parameters[binding.attr] = parameter


def first_weights(units: Units, unit: Unit, seed: int, block: torch.Tensor) -> None:
    """Fill `block` (flat uint8, `unit.nbytes`) with the unit's initial weights, as the model's own code draws them.

    A pure function of (config, seed, unit name): the random numbers of one unit do not depend on the others.
    Raises UserError if the model leaves a parameter undefined.
    """
    model = units.model
    block.zero_()  # the gaps between parameters are never used; let them be the same in every run
    if not unit.slices:
        return
    values = {s: nn.Parameter(s.of(block), requires_grad=False) for s in unit.slices}
    own = Unit(
        name=unit.name,
        module=unit.module,
        slices=unit.slices,
        bindings=tuple(binding for binding in unit.bindings if binding.unit == unit.name),
    )
    digest = hashlib.sha256(f"{seed}/{unit.name}".encode()).digest()
    state = torch.get_rng_state()
    try:
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        with torch.no_grad(), bound(own, values):
            for value in values.values():
                value.fill_(torch.nan)
            for module in dict.fromkeys(m for top in _tops(unit) for m in _depth_first(top)):
                model._init_weights(module)
    finally:
        torch.set_rng_state(state)
    for s, value in values.items():
        if not torch.isfinite(value).all():
            raise UserError(f"{type(model).__name__} does not say how to initialise {s.name}. Fix: give model.path")


def _tops(unit: Unit) -> Sequence[nn.Module]:
    if unit.module is not None:
        return (unit.module,)
    return tuple(dict.fromkeys(binding.owner for binding in unit.bindings))


def _depth_first(module: nn.Module) -> Iterator[nn.Module]:
    """Children before parents, the order in which transformers initialises."""
    for child in module.children():
        yield from _depth_first(child)
    yield module
