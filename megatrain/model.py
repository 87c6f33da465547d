"""A Hugging Face causal language model as a list of units whose weights live elsewhere.

Scope: building the model without its weights, finding its units and their flat layout, first weights from a seed.
Not here: running a unit on leased weights (`stream.py`), weights from a model folder (`checkpoint.py`), what a unit
costs (`profile.py`), seeing which module a forward calls when (`call_order.py`).

Nothing here knows an architecture: the decoder layers are the largest `ModuleList` of the base model, every other
module that owns parameters is a unit of its own, and all that stands outside the base model is the head.
"""

import fnmatch
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megatrain.call_order import call_order, own_parameters
from megatrain.errors import UserError
from megatrain.exactness import compute_repeatably
from megatrain.programs import KINDS, UnitSize
from tiering.manifest import TensorSpec
from tiering.workload import pages

ALIGN = 16
"""Elements: tensors start at multiples of 64 bytes, as torch's own allocations do; kernels then give the same bits."""


MOST_LAYERS = 10_000
"""Ten times those of the deepest models."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
FROZEN = ".frozen"
"""Ends the name of the unit that owns the frozen parameters of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(TensorSpec):
    """One parameter's place in its unit's flat block, as the store records it, and the views it stands for."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, block: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The parameter as a view of its unit's block (flat uint8), which holds numbers of `dtype`."""
        return block.view(dtype)[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """`owner.attr` takes its value from a slice of a unit's block; the unit is another one where weights are tied, and
    where they are frozen.
    """

    owner: nn.Module
    attr: str
    unit: str
    slice: Slice
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A submodule that is moved and computed as a whole.

    slices: the parameters it owns, in the model's own order. bindings: all parameters it computes with.
    completes: units whose gradient is whole after this one's backward. The head has no `module`: the model's own code
    runs it. frozen: it owns frozen parameters, for the unit whose name its own begins with, and computes nothing.
    compiled: what runs in place of the module's own forward, where it is compiled.
    """

    name: str
    module: nn.Module | None
    slices: tuple[Slice, ...]
    bindings: tuple[Binding, ...]
    completes: tuple[str, ...] = ()
    frozen: bool = False
    compiled: Callable[..., Any] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the blocks that outlive a step."""
        return () if not self.nbytes else KINDS[:1] if self.frozen else KINDS

    @property
    def nbytes(self) -> int:
        last = self.slices[-1] if self.slices else None
        return pages(4 * (last.offset + last.numel)) if last else 0

    @property
    def borrows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b.unit for b in self.bindings if b.unit != self.name))

    def size(self) -> UnitSize:
        return UnitSize(name=self.name, nbytes=self.nbytes, borrows=self.borrows, frozen=self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """All units that compute in the order in which a forward calls them, the head last. frozen: those that only own."""

    model: PreTrainedModel
    units: tuple[Unit, ...]
    frozen: tuple[Unit, ...] = ()

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    @property
    def head(self) -> Unit:
        return self.units[-1]

    @property
    def stored(self) -> tuple[Unit, ...]:
        """Every unit that can own parameters."""
        return (*self.units, *self.frozen)

    @property
    def parameters(self) -> int:
        return sum(s.numel for unit in self.stored for s in unit.slices)

    @property
    def trainable(self) -> int:
        """How many of the parameters are trained."""
        return sum(s.numel for unit in self.units for s in unit.slices)

    def slices(self) -> Iterator[tuple[Unit, Slice]]:
        """Every parameter once, in the order of `model.named_parameters()`."""
        place = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        owned = [(unit, s) for unit in self.stored for s in unit.slices]
        return iter(sorted(owned, key=lambda pair: place[pair[1].name]))


def model_config(content: Mapping[str, Any]) -> PretrainedConfig:
    """The config object for the JSON of a config.json, in FP32. Raises UserError for an unknown model or bad value."""
    if content["model_type"] not in CONFIG_MAPPING and "auto_map" in content:
        raise UserError(
            f"model.config: {content['model_type']} brings code of its own (auto_map), and such code is not run here. "
            "Fix: a release of transformers that knows this architecture, if there is one"
        )
    _refuse_endless(content)
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


def _refuse_endless(content: Mapping[str, Any]) -> None:
    """Raises UserError for more layers than any model has: their modules alone would take hours to make."""
    for values in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in LAYER_KEYS:
            found = values.get(key)
            if isinstance(found, int | float) and found > MOST_LAYERS:
                raise UserError(
                    f"model.config: {key} is {found}, and a model has at most {MOST_LAYERS} layers here. Fix: {key}"
                )


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The model with its parameters on the meta device and its buffers computed by its own constructors. Its process
    computes repeatably from here on.
    """
    compute_repeatably()
    try:
        with no_init_weights(), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # any class: whatever transformers makes of a configuration
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"model.config: {lines[0]}") from error
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


def find_units(model: PreTrainedModel, freeze: Sequence[str] = ()) -> Units:
    """Raises UserError, by name, for a model that cannot be cut into units.

    freeze: patterns of parameter names, as `fnmatch` reads them. What they match belongs to a unit of its own, which a
    unit that computes with it borrows.
    """
    names = {module: name for name, module in model.named_modules()}
    calls = call_order(model)
    inside = {inner for module in calls for inner in module.modules()}
    outside = [module for module in model.modules() if module not in inside]
    stray = [n for m in outside for n in own_parameters(m) if _within(m, model.base_model)]
    if stray:
        raise UserError(f"{type(model).__name__} keeps the parameter {stray[0]} outside of its submodules' forwards; "
                        "such a model is not supported")  # fmt: skip
    head = [module for module in outside if own_parameters(module)]
    groups: list[tuple[str, nn.Module | None, list[nn.Module]]] = [(names[m], m, list(m.modules())) for m in calls]
    groups.append((names[head[0]] if len(head) == 1 else "head", None, head))
    owner: dict[int, tuple[str, Slice]] = {}
    frozen = _frozen(model, freeze)
    holders = [_holder(name, modules, names, owner, frozen) for name, _, modules in groups]
    units = [_unit(name, module, modules, names, owner, frozen) for name, module, modules in groups]
    return Units(
        model=model,
        units=tuple(_with_completes(units)),
        frozen=tuple(holder for holder in holders if holder.slices),
    )


def _frozen(model: PreTrainedModel, patterns: Sequence[str]) -> frozenset[int]:
    """Ids of the parameters that a pattern matches, by any of their names. Raises UserError for a pattern of none."""
    named = list(model.named_parameters(remove_duplicate=False))
    found: set[int] = set()
    for pattern in patterns:
        matched = {id(parameter) for name, parameter in named if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise UserError(
                f"model.freeze: {pattern!r} matches no parameter. Fix: a pattern of names such as {named[0][0]} or "
                f"{named[-1][0]}"
            )
        found |= matched
    if len(found) == len({id(parameter) for _, parameter in named}):
        raise UserError(f"model.freeze: {', '.join(patterns)}: nothing is left to train. Fix: freeze less")
    return frozenset(found)


def _holder(
    name: str,
    modules: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    owner: dict[int, tuple[str, Slice]],
    frozen: Collection[int],
) -> Unit:
    """The unit that owns the frozen parameters of a group which none before owns."""
    slices: list[Slice] = []
    for part in modules:
        for attr, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in frozen and id(parameter) not in owner:
                slices.append(_next_slice(f"{names[part]}.{attr}".removeprefix("."), parameter, slices))
                owner[id(parameter)] = f"{name}{FROZEN}", slices[-1]
    return Unit(name=f"{name}{FROZEN}", module=None, slices=tuple(slices), bindings=(), frozen=True)


def _next_slice(name: str, parameter: torch.Tensor, before: Sequence[Slice]) -> Slice:
    top = before[-1].offset + -(-before[-1].numel // ALIGN) * ALIGN if before else 0
    return Slice(name=name, shape=tuple(parameter.shape), offset=top)


def _within(module: nn.Module, base: nn.Module) -> bool:
    return any(module is inner for inner in base.modules())


def _unit(
    name: str,
    module: nn.Module | None,
    modules: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    owner: dict[int, tuple[str, Slice]],
    frozen: Collection[int],
) -> Unit:
    """Lay out the parameters that no unit before owns; bind all. Tied parameters are one object."""
    slices: list[Slice] = []
    bindings: list[Binding] = []
    for part in modules:
        for attr, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in owner:
                slices.append(_next_slice(f"{names[part]}.{attr}".removeprefix("."), parameter, slices))
                owner[id(parameter)] = name, slices[-1]
            unit, place = owner[id(parameter)]
            fixed = id(parameter) in frozen
            bindings.append(Binding(owner=part, attr=attr, unit=unit, slice=place, frozen=fixed))
    return Unit(name=name, module=module, slices=tuple(slices), bindings=tuple(bindings))


def _with_completes(units: Sequence[Unit]) -> Iterator[Unit]:
    first_use: dict[str, str] = {}
    for unit in units:
        for name in dict.fromkeys(binding.unit for binding in unit.bindings if not binding.frozen):
            first_use.setdefault(name, unit.name)
    for unit in units:
        done = tuple(name for name, user in first_use.items() if user == unit.name)
        yield replace(unit, completes=done)


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

    A pure function of (config, seed, unit name): the random numbers of one unit do not depend on the others, nor on
    what is frozen. Raises UserError if the model leaves a parameter undefined.
    """
    model = units.model
    block.zero_()  # the gaps between parameters are never used; let them be the same in every run
    if not unit.slices:
        return
    name = unit.name.removesuffix(FROZEN)
    drawn = [other for other in units.stored if other.slices and other.name.removesuffix(FROZEN) == name]
    blocks = {o.name: block if o.name == unit.name else torch.zeros(o.nbytes, dtype=torch.uint8) for o in drawn}
    values = {s: nn.Parameter(s.of(blocks[o.name]), requires_grad=False) for o in drawn for s in o.slices}
    whole = next(computes for computes in units if computes.name == name)
    own = replace(whole, bindings=tuple(binding for binding in whole.bindings if binding.unit in blocks))
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    state = torch.get_rng_state()
    try:
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        with torch.no_grad(), bound(own, values):
            for value in values.values():
                value.fill_(torch.nan)
            for module in dict.fromkeys(m for top in _tops(whole) for m in _depth_first(top)):
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
