"""What each unit costs to compute: flops and bytes of memory, from a run on tensors that have shapes and no data.

Scope: forward and backward of every distinct unit under `FakeTensorMode`, counting flops and the peak of live bytes.
Not here: how fast the machine is (`tiering/measure.py`), what the planner makes of it (`report.py`).

A unit whose code looks at values (routing to experts) cannot be run that way; it is then reckoned from its size, and
the figure says "assumed".
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from megatrain.call_order import passing_on, weightless
from megatrain.catalog.unit_cost import UnitCost
from megatrain.chunks import chunk_length
from megatrain.loss import Chunk, Hidden, head_loss, next_tokens
from megatrain.model import Slice, Unit, Units, bound

aten = torch.ops.aten
_CPU = torch.device("cpu")


def profile(
    units: Units,
    micro_batch: int,
    seq_len: int,
    loss_chunk: int | None = None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> dict[str, UnitCost]:
    """Cost of each unit for a micro-batch of [micro_batch, seq_len] tokens, by unit name.

    loss_chunk: tokens of it whose logits exist at a time (None: all). device: that of the model's buffers; its kernels
    are the ones that are counted, and they take other memory than those of the CPU. dtype: of the weights that units
    compute with.
    """
    calls = _calls(units, micro_batch, seq_len, device, dtype)
    known: dict[Any, UnitCost] = {}
    costs: dict[str, UnitCost] = {}
    hidden: torch.Tensor | None = None
    for unit in units:
        if unit.module is None:
            assert hidden is not None
            costs[unit.name] = _head_cost(units, hidden, loss_chunk)  # in the type of the hidden states
            continue
        args, kwargs = calls[unit.name]
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        key = (type(unit.module), tuple(s.shape for s in unit.slices), tuple(tuple(t.shape) for t in tensors))
        if key not in known:
            known[key] = _unit_cost(units, unit, unit.module, args, kwargs, device, dtype)
        costs[unit.name] = replace(known[key], input_bytes=_input_bytes(tensors))
        hidden = tensors[0] if tensors and tensors[0].is_floating_point() else hidden
    return costs


def _input_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The activation among what a unit is called with; position embeddings and masks are made anew in backward."""
    hidden = next(iter(tensors), None)
    return hidden.itemsize * hidden.numel() if hidden is not None and hidden.is_floating_point() else 0


def _calls(
    units: Units, micro_batch: int, seq_len: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Any, Any]]:
    """What the base model calls its units with, seen in one real run in which no unit computes."""
    named = {unit.module: unit.name for unit in units if unit.module is not None}
    calls: dict[str, tuple[Any, Any]] = {}
    layers = [unit.module for unit in units if unit.module is not None]
    base = units.model.base_model
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.long, device=device)

    def seen(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[named[module]] = (args, kwargs)

    passed = [module for module in layers if not _sees_ids(module)]
    hooks = [m.register_forward_pre_hook(seen, with_kwargs=True) for m in layers if m not in passed]
    try:
        computing = [m for m in layers if m not in passed]
        with torch.no_grad(), weightless(computing, device, dtype), passing_on(passed, seen):
            base(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _sees_ids(module: nn.Module) -> bool:
    """Embeddings turn token ids into vectors: they have to run, or their followers would see ids."""
    return isinstance(module, nn.Embedding)


def _unit_cost(
    units: Units, unit: Unit, module: nn.Module, args: Any, kwargs: Any, device: torch.device, dtype: torch.dtype
) -> UnitCost:
    def run(mode: FakeTensorMode) -> torch.Tensor:
        fake_args, fake_kwargs = tree_map(lambda x: _fake(mode, x, device), (args, kwargs))
        outputs, _ = tree_flatten(module(*fake_args, **fake_kwargs))
        result: torch.Tensor = outputs[0]
        return result

    cost = _seen(unit, run, device, dtype)
    if cost is not None:
        return cost
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    rows, seq_len, width = tensors[0].shape
    routed = getattr(units.model.config.get_text_config(), "num_experts_per_tok", None) or 1
    own = [*unit.slices, *(binding.slice for binding in unit.bindings if binding.frozen)]
    parameters = sum(s.numel if len(s.shape) < 3 else s.numel * min(1.0, routed / s.shape[0]) for s in own)
    # Every token through every parameter (of stacked experts: through those that it is routed to); 32 values of the
    # hidden size alive a token (a usual layer keeps 15 to 30) and one gradient of the largest parameter.
    flops = 2.0 * rows * seq_len * parameters
    largest = max(place.numel for place in own)
    workspace = dtype.itemsize * (32 * rows * seq_len * width + 3 * largest)
    return UnitCost(
        forward_flops=flops,
        backward_flops=3 * flops,
        workspace_bytes=workspace,
        output_bytes=dtype.itemsize * rows * seq_len * width,
        assumed=True,
    )


def _head_cost(units: Units, hidden: torch.Tensor, loss_chunk: int | None) -> UnitCost:
    """The head with its loss, on one micro-batch of hidden states: flops of all chunks, memory of the longest."""
    rows, seq_len, width = hidden.shape
    length = chunk_length(rows, seq_len, loss_chunk)

    def run(mode: FakeTensorMode) -> torch.Tensor:
        state = _fake(mode, hidden[:, :length], hidden.device)
        labels = _fake(mode, torch.zeros(rows, length, dtype=torch.long, device=hidden.device), hidden.device)
        following = None if loss_chunk is None else next_tokens(labels)
        at = slice(0, rows), slice(0, length)
        chunk = Chunk(at=at, input_ids=labels, labels=labels, counted=1, following=following)
        return head_loss(units.model, Hidden(last_hidden_state=state.contiguous()), chunk)

    cost = _seen(units.head, run, hidden.device, hidden.dtype)
    chunks = seq_len / length
    if cost is not None:
        return replace(cost, forward_flops=chunks * cost.forward_flops, backward_flops=chunks * cost.backward_flops)
    elements = rows * length * units.model.config.get_text_config().vocab_size
    flops = 2.0 * chunks * elements * width
    return UnitCost(
        forward_flops=flops, backward_flops=3 * flops, workspace_bytes=18 * elements, output_bytes=4, assumed=True
    )


def _fake(mode: FakeTensorMode, value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(
        value.detach() if value.device.type != "meta" else torch.empty(value.shape, device=device, dtype=value.dtype)
    )
    return fake.requires_grad_() if value.is_floating_point() else fake


def _seen(
    unit: Unit, run: Callable[[FakeTensorMode], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> UnitCost | None:
    """Forward and backward on fake tensors; None if the unit's code looks at values."""
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    level = noise.level
    try:
        noise.setLevel(logging.CRITICAL)  # it logs what is raised, with a trace
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            values: dict[Slice, torch.Tensor] = {
                b.slice: torch.empty(b.slice.shape, device=device, dtype=dtype, requires_grad=True)
                for b in unit.bindings
            }
            with bound(unit, values), _quiet_flops() as forward, _Peak() as peak:
                output = run(mode)
            with _quiet_flops() as backward, peak:
                torch.autograd.backward(output, torch.empty_like(output))
            return UnitCost(
                forward_flops=float(forward.get_total_flops()),
                backward_flops=float(forward.get_total_flops() + backward.get_total_flops()),
                workspace_bytes=peak.peak,
                output_bytes=output.untyped_storage().nbytes(),
            )
    except Exception:  # many classes of error mean "this code looks at values"
        return None
    finally:
        noise.setLevel(level)


@contextmanager
def _quiet_flops() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        yield counter


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """[B, heads, S, D] by [B, heads, T, D] and back; the kernel computes the causal half only, we count all."""
    rows, heads, s, d = q
    return int(2 * rows * heads * s * k[-2] * (d + v[-1]))


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Scores again, then four products."""
    return _attention_flops(q, k, v) * 5 // 2


_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


class _Peak(TorchDispatchMode):
    """Live bytes of all tensors that operators make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        inputs = {id(t.untyped_storage()) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), inputs)
        return out

    def _note(self, storage: Any, inputs: set[int]) -> None:
        if id(storage) in inputs or storage in self._known:
            return
        nbytes = storage.nbytes()
        self._known.add(storage)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, nbytes)

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes
