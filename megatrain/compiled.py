"""`torch.compile` of a model's layers: which units, with what settings, how often it compiled, what it could not.

Scope: `Compiler`, the compiled form of a unit's own forward; the settings under which it gives the same bits each time.
Not here: a trial of the compiler (`compiler_trial.py`), settings that hold without it too (`exactness.py`).

A layer is one graph in which weights are inputs, as the activation is. So a weight may lie elsewhere each time, and
layers of one kind share a graph: a forward without gradients is one, the recompute with its backward another. Nothing
pauses inside a graph: what else the computing thread has to do waits until a unit, or the gradient of one of its
weights, is done. Embedding, final norm and head run their own code: an operator or two each.

Shapes are fixed in a graph. torch would make one for any shape from the second shape on, and then a number would depend
on what was computed before it. Rows have one length in a run, so this costs no more than a graph for a shorter batch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain.call_order import decoder_layers
from megatrain.errors import UserError
from megatrain.model import Unit, Units
from megatrain.sizes import format_seconds

INDUCTOR: Final[Mapping[str, bool | str]] = MappingProxyType(
    {
        # Which kernel is taken must not hang on which one was faster just now: another kernel has other bits.
        "deterministic": True,
        "max_autotune": False,
        "max_autotune_gemm": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
        # Dropout draws from torch's generator as without a graph: forward and recompute drop the same elements.
        "fallback_random": True,
        # FP32 as IEEE has it, whatever the environment says.
        "use_fast_math": False,
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        "eager_numerics.division_rounding": True,
        # A CUDA graph records addresses, and weights are at another one each time.
        "triton.cudagraphs": False,
        "freezing": False,
    }
)
GRAPHS_A_LAYER = 4
"""Forward and recompute, in training and in evaluation."""
SPARE_GRAPHS = 16
"""For other shapes: the last batch of a validation."""

Tell = Callable[[str], None]


def settings(layers: int) -> dict[str, Any]:
    """Arguments of `torch.compile` for a model of so many layers, in the worst case no two of a kind."""
    return {
        "fullgraph": True,
        "dynamic": False,
        "options": dict(INDUCTOR),
        "recompile_limit": GRAPHS_A_LAYER * layers + SPARE_GRAPHS,
        "isolate_recompiles": True,
    }


def layer_names(units: Units) -> tuple[str, ...]:
    """Names of the units that are compiled: the layers."""
    layers = set(decoder_layers(units.model))
    return tuple(unit.name for unit in units if unit.module in layers)


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One function for all layers: what torch compiled belongs to a function, and layers of a kind share it."""
    return type(module).forward(module, *args, **kwargs)


@dataclass(slots=True)
class Compiler:
    """Compiles on the first call of each kind. tell: shown lines while it does. graphs, seconds: so far.

    plain: what runs without a graph (layer and pass), and why.
    """

    tell: Tell
    graphs: int = 0
    seconds: float = 0.0
    plain: dict[str, str] = field(default_factory=dict)
    _known: set[Any] = field(default_factory=set)
    _refused: set[Any] = field(default_factory=set)

    def units(self, units: Units) -> Units:
        """The same units, of which layers have a compiled form."""
        names = layer_names(units)
        given = settings(len(names))
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, given["recompile_limit"]
        )
        # The backward with its forward: then all compiling is over when a layer's first recompute is.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        graph = torch.compile(_own_forward, **given)
        compiled = (self._with(graph, unit) if unit.name in names else unit for unit in units)
        return replace(units, units=tuple(compiled))

    def _with(self, graph: Callable[..., Any], unit: Unit) -> Unit:
        assert unit.module is not None, f"{unit.name} is a layer"
        return replace(unit, compiled=partial(self._call, graph, _kind(unit), unit.module))

    def line(self) -> str:
        """What was compiled so far, for people."""
        without = "".join(f"; {what} is not: {why}" for what, why in self.plain.items())
        if not self.graphs and not without:
            return "torch.compile: layers are compiled when they first run"
        plural = "" if self.graphs == 1 else "s"
        return f"torch.compile: compiled {self.graphs} graph{plural} in {format_seconds(self.seconds)}{without}"

    def _call(self, graph: Callable[..., Any], kind: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with_grad = torch.is_grad_enabled()
        if (kind, with_grad) in self._refused:
            return _own_forward(module, *args, **kwargs)
        before, begin_s = _graphs(), time.perf_counter()
        self._announce(kind, module, with_grad, args, kwargs)
        try:
            returned = graph(module, *args, **kwargs)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            # From the layer's code alone, so each run of it ends here. Nothing has been computed, nothing drawn.
            self._refused.add((kind, with_grad))
            self.plain[_told(module, with_grad)] = _reason(error)
            self.tell(f"{_told(module, with_grad)} runs without torch.compile: {_reason(error)}")
            return _own_forward(module, *args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise UserError(
                f"train.compile: {type(module).__name__} was compiled {self.graphs} times and asks for more: no two of "
                "its calls are alike. Fix: train.compile: false"
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise UserError(
                f"train.compile: inductor failed at {_told(module, with_grad)}: {_reason(error)}. "
                "Fix: train.compile: false"
            ) from error
        if made := _graphs() - before:
            self.graphs += made
            self.seconds += time.perf_counter() - begin_s
        return returned

    def _announce(self, kind: Any, module: nn.Module, with_grad: bool, args: Any, kwargs: Any) -> None:
        """A line before the first call of its kind, which takes long."""
        shapes = tuple(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        key = (kind, with_grad, module.training, shapes)
        if key not in self._known:
            self._known.add(key)
            self.tell(f"compiling {_told(module, with_grad)} ...")


def _kind(unit: Unit) -> Any:
    """What units of the same code and the same shapes have in common."""
    return type(unit.module), tuple((binding.slice.shape, binding.frozen) for binding in unit.bindings)


def _graphs() -> int:
    """How many graphs this process has made."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _told(module: nn.Module, with_grad: bool) -> str:
    return f"{type(module).__name__}, {'recompute and backward' if with_grad else 'forward'}"


def _reason(error: BaseException) -> str:
    """The first lines of what torch says, in one."""
    return " ".join(str(error).split())[:200]
