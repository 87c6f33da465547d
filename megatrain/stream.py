"""Runs a model's own forward and backward on weights that are lent unit by unit.

Scope: the custom autograd function behind every unit, vertical order over micro-batches, the head with its loss.
Not here: where the weights are (`tiering`), the layout of a unit (`model.py`), what collects its gradients
(`gradients.py`), the update (`optim.py`), the call of the head alone (`loss.py`).

A unit's forward runs without grad and keeps only its inputs, the activation in a lent block; its backward recomputes
it with grad. The step's whole batch enters the model once; a unit splits it into micro-batches along the batch axis
and runs them in order while it holds its weights. Shapes: B rows a step, m rows a micro-batch, S tokens a row, H hidden
size.

Nothing here waits for the device between the first unit and the end of backward: losses stay where they are computed,
and become numbers when everything has been issued. What one unit hands to the next (outputs, gradients, logits) is in
torch's own memory on the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.utils import ModelOutput

from megatrain.chunks import chunk_length
from megatrain.gradients import GradientSink, InputGradient
from megatrain.inputs import Inputs, on_device, supervised
from megatrain.loss import Chunk, answering, chunks, head_loss
from megatrain.masks import are_packed, told_of_packing
from megatrain.model import Slice, Unit, Units, bound
from megatrain.precision import weight_kind
from megatrain.programs import ACTIVATION, HEAD, block_name
from megatrain.random_state import States, replayed, rng_states

Lend = Callable[[str], AbstractContextManager[Mapping[str, torch.Tensor]]]
"""Enter op `name`: wait for its blocks and lend them (block name to flat uint8 bytes) until the exit."""

GradientReady = Callable[[str, Mapping[Slice, torch.Tensor]], None]
"""Told once a step for each unit whose gradient is whole, while its bytes are lent."""

_CPU = torch.device("cpu")


class StreamedModel:
    """The model with every unit's forward replaced. One step at a time, from one thread."""

    def __init__(
        self,
        units: Units,
        lend: Lend,
        gradient_ready: GradientReady,
        pause: Callable[[], None] = lambda: None,
        *,
        device: torch.device = _CPU,
        computed: Callable[[], None] = lambda: None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """pause: called between the operators of a unit, where the thread that computes may do something else. A hook
        inside a unit would cut its graph in two: a compiled one calls only where a weight's gradient is handed on.
        device: where lent blocks and the model's buffers are. computed: called once everything of a step has been
        issued there; returns when it has been computed, so that its losses can be read at once. dtype: of the lent
        weights, and so of activations (`weight_kind` says in which blocks they are).
        """
        self.units = units
        self.device = device
        self.dtype = dtype
        self.model = units.model
        self.by_name = {unit.name: unit for unit in units}
        self._lend = lend
        self._gradient_ready = gradient_ready
        self._pause = pause
        self._computed = computed
        self._begun: set[str] = set()
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._counted = 0
        self._packed = False
        self._rows = 0
        self._micro = 1
        self._output: type[ModelOutput] = ModelOutput
        for unit in units:
            if unit.module is not None:
                unit.module.forward = self._replacement(unit, unit.compiled or unit.module.forward)
        open_units = [unit.module for unit in units if unit.module is not None and unit.compiled is None]
        owners = [m for module in open_units for m in module.modules() if m._parameters]
        self._hooks = [module.register_forward_pre_hook(lambda *call: pause()) for module in owners]

    def close(self) -> None:
        """Give the units their own forwards back."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            if unit.module is not None and "forward" in vars(unit.module):
                del unit.module.forward

    def step(self, inputs: Inputs, micro_batch: int, loss_chunk: int | None = None) -> list[float]:
        """Forward, loss and backward of a whole step; every gradient has been handed on when it returns.

        loss_chunk: tokens of a micro-batch whose logits exist at a time (`chunk_length`; None: all). Returns the loss
        of each micro-batch, already divided by the supervised tokens of the whole step, so that their sum is the step's
        loss.
        """
        self._begun.clear()
        there = self._enter_batch(inputs, micro_batch)
        # In the thread that holds the schedule: by default a device's part of backward runs in a thread of its own.
        with torch.autograd.set_multithreading_enabled(False):
            hidden = self._base(there)
            losses, gradient = self._head(hidden.detach(), there, loss_chunk)
            hidden.backward(gradient)
        self._computed()
        return _numbers(losses)

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, [B, vocabulary]: one forward through all units."""
        there = self._enter_batch({"input_ids": input_ids}, len(input_ids))
        hidden = self._base(there)
        with self._lend(HEAD) as views, bound(self.units.head, self._values(self.units.head, views)):
            # Contiguous: a linear on a strided input may take another path, with other bits.
            with answering(self.model, self._output(last_hidden_state=hidden[:, -1:].contiguous())):
                return self.model(input_ids=there["input_ids"][:, -1:], use_cache=False).logits[:, -1].clone()

    @torch.no_grad()
    def losses(self, inputs: Inputs, micro_batch: int, loss_chunk: int | None = None) -> list[float]:
        """The loss of each micro-batch as `step` returns it, by a forward alone; nothing is kept for a backward."""
        there = self._enter_batch(inputs, micro_batch)
        hidden = self._base(there)
        losses = []
        with self._lend(HEAD) as views, bound(self.units.head, self._values(self.units.head, views)):
            for rows in self._micro_batches():
                parts = []
                for part in self._chunks(there, rows, loss_chunk):
                    output = self._output(last_hidden_state=hidden[part.at].contiguous())
                    parts.append(head_loss(self.model, output, part))
                losses.append(parts)
        return _numbers(losses)

    def _base(self, inputs: Inputs) -> torch.Tensor:
        """The base model's own forward, unit by unit: [B, S] to [B, S, H]."""
        tokens = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        with told_of_packing(self._packed):
            output = self.model.base_model(**tokens, use_cache=False)
        self._output = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _enter_batch(self, inputs: Inputs, micro_batch: int) -> Inputs:
        """The step's inputs on the device, brought there once; what has to be known of them is read on the host."""
        self._rows = len(inputs["input_ids"])
        self._micro = micro_batch
        self._counted = supervised(inputs["labels"]) if "labels" in inputs else 0
        self._packed = are_packed(inputs)
        return on_device(inputs, self.device)

    def _values(self, unit: Unit, views: Mapping[str, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        kind = weight_kind(self.dtype)
        return {b.slice: b.slice.of(views[block_name(b.unit, kind)], self.dtype) for b in unit.bindings}

    def _head(
        self, hidden: torch.Tensor, inputs: Inputs, loss_chunk: int | None
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """Losses of the chunks of each micro-batch, and the gradient of the loss by `hidden`, [B, S, H].

        The logits of one chunk of a micro-batch at a time exist, [m, c, vocabulary]; the head's backward runs while
        they do. A micro-batch's loss is the sum of its chunks' losses, and gradients are added, in the order of the
        sequence. Without `loss_chunk` a micro-batch is one chunk, and the model shifts the labels, as in a plain loop.
        """
        gradient = torch.empty_like(hidden)
        losses = []
        unit = self.units.head
        with self._lend(HEAD) as views:
            sink = GradientSink(unit, views, self._begun, self._pause, self.dtype)
            with bound(unit, sink.leaves):
                for rows in self._micro_batches():
                    parts = []
                    for part in self._chunks(inputs, rows, loss_chunk):
                        loss, gradient[part.at] = self._chunk_backward(hidden[part.at], part)
                        parts.append(loss)
                    sink.end_micro_batch()
                    losses.append(parts)
            sink.close()
            self._hand_on(unit, views)
        return losses, gradient

    def _chunks(self, inputs: Inputs, rows: slice, loss_chunk: int | None) -> Iterator[Chunk]:
        length = chunk_length(self._micro, inputs["labels"].shape[1], loss_chunk)
        return chunks(inputs, rows, length, counted=self._counted, whole=loss_chunk is None)

    def _chunk_backward(self, hidden: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of one chunk and its gradient by `hidden`, [m, c, H]; weights' gradients go to the sink."""
        part = hidden.contiguous().detach().requires_grad_()
        output = self._output(last_hidden_state=part)
        with torch.enable_grad():
            loss = head_loss(self.model, output, chunk)
        loss.backward()
        assert part.grad is not None
        return loss.detach(), part.grad

    def _micro_batches(self) -> Iterator[slice]:
        for begin in range(0, self._rows, self._micro):
            yield slice(begin, begin + self._micro)

    def _hand_on(self, unit: Unit, views: Mapping[str, torch.Tensor]) -> None:
        for name in unit.completes:
            block = views[block_name(name, "grad")]
            self._gradient_ready(name, {s: s.of(block) for s in self.by_name[name].slices})

    def _replacement(self, unit: Unit, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            call = _Call(self, unit, original, leaves, spec)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            outputs = iter(_Streamed.apply(call, self._anchor, *tensors))
            return tree_unflatten([next(outputs) if there else None for there in call.out_tensors], call.out_spec)

        return forward


class _Call:
    """One call of one unit: what its backward has to know besides tensors."""

    def __init__(
        self, owner: StreamedModel, unit: Unit, original: Callable[..., Any], leaves: Sequence[Any], spec: Any
    ) -> None:
        self.owner = owner
        self.unit = unit
        self.original = original
        self.plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensor_at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.spec = spec
        self.out_spec: Any = None
        self.out_tensors: list[bool] = []
        self.rows = owner._rows
        self.micro_batches = list(owner._micro_batches())
        self.rng: States | None = None

    def split(self, tensor: torch.Tensor) -> bool:
        """True for tensors with a batch axis: only they are cut into micro-batches."""
        return len(self.micro_batches) > 1 and tensor.dim() > 1 and tensor.shape[0] == self.rows

    def activation(
        self, views: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The lent place for the unit's first input, which backward needs; None where the schedule has none for it."""
        block = views.get(block_name(self.unit.name, ACTIVATION))
        if block is None:
            return None
        nbytes = dtype.itemsize * shape.numel()
        assert nbytes <= len(block), f"{self.unit.name} was called with {dtype} {shape}, {len(block)} bytes planned"
        return block[:nbytes].view(dtype).view(shape)

    def run(self, tensors: Sequence[torch.Tensor], rows: slice) -> list[torch.Tensor]:
        """The unit's own forward on one micro-batch. An output without a batch axis is repeated for each row."""
        leaves = list(self.plain)
        for index, tensor in zip(self.tensor_at, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        returned, self.out_spec = tree_flatten(self.original(*args, **kwargs))
        self.out_tensors = [leaf is not None for leaf in returned]
        outputs = [leaf for leaf in returned if leaf is not None]
        if len(self.micro_batches) == 1:
            return outputs
        height = rows.stop - rows.start
        return [out.expand(height, *out.shape[1:]) if out.shape[0] == 1 else out for out in outputs]


class _Rows:
    """What the micro-batches hand on, put together as it comes: the whole of it exists once."""

    def __init__(self, call: _Call) -> None:
        self._only = len(call.micro_batches) == 1
        self._height = call.rows
        self.whole: list[torch.Tensor] = []

    def put(self, rows: slice, parts: list[torch.Tensor]) -> None:
        if self._only:
            self.whole = parts
            return
        if not self.whole:
            self.whole = [part.new_empty((self._height, *part.shape[1:])) for part in parts]
        for whole, part in zip(self.whole, parts, strict=True):
            whole[rows] = part


class _Streamed(torch.autograd.Function):
    """A unit: forward on leased weights without grad, backward by recomputing."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The anchor needs grad: without it the backward of a unit that only sees token ids would never be called.
        del anchor
        ctx.set_materialize_grads(False)  # zeros for an output that nothing used would take part in sums
        ctx.call = call
        owner, unit = call.owner, call.unit
        call.rng = rng_states(owner.device) if _draws(unit) else None
        results = _Rows(call)
        with owner._lend(f"fwd.{unit.name}") as views, bound(unit, owner._values(unit, views)):
            lent = call.activation(views, tensors[0].shape, tensors[0].dtype)
            if lent is not None:
                lent.copy_(tensors[0])
            ctx.save_for_backward(*(tensors if lent is None else tensors[1:]))
            ctx.input_shape, ctx.input_dtype = tensors[0].shape, tensors[0].dtype
            for rows in call.micro_batches:
                parts = [tensor[rows] if call.split(tensor) else tensor for tensor in tensors]
                results.put(rows, call.run(parts, rows))
        return tuple(results.whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        owner, unit = call.owner, call.unit
        wanted: list[bool] = list(ctx.needs_input_grad[2:])
        collected = [InputGradient() for _ in wanted]
        with owner._lend(f"bwd.{unit.name}") as views, replayed(call.rng, owner.device):
            tensors: tuple[torch.Tensor, ...] = ctx.saved_tensors
            lent = call.activation(views, ctx.input_shape, ctx.input_dtype)
            if lent is not None:
                tensors = (lent, *tensors)
            sink = GradientSink(unit, views, owner._begun, owner._pause, owner.dtype)
            with bound(unit, sink.leaves):
                for rows in call.micro_batches:
                    parts = [(tensor[rows] if call.split(tensor) else tensor).detach() for tensor in tensors]
                    for part, want in zip(parts, wanted, strict=True):
                        part.requires_grad_(want)
                    with torch.enable_grad():
                        outputs = call.run(parts, rows)
                    whole = len(call.micro_batches) == 1
                    pairs = zip(outputs, gradients, strict=True)
                    used = [(out, g) for out, g in pairs if g is not None and out.requires_grad]
                    torch.autograd.backward([out for out, _ in used], [g if whole else g[rows] for _, g in used])
                    sink.end_micro_batch()
                    for into, tensor, part in zip(collected, tensors, parts, strict=True):
                        if part.grad is not None:
                            into.add(part.grad, rows if call.split(tensor) else None, tensor.shape)
                    del outputs, used, parts, part
            sink.close()
            owner._hand_on(unit, views)
        return None, None, *(into.total() for into in collected)


def _numbers(losses: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """The loss of each micro-batch: the sum of those of its chunks, in Python's precision. Waits for the device."""
    numbers = iter(torch.stack([loss for parts in losses for loss in parts]).tolist())
    return [sum(next(numbers) for _ in parts) for parts in losses]


def _draws(unit: Unit) -> bool:
    """True if the unit draws random numbers when it runs."""
    modules = unit.module.modules() if unit.module is not None else ()
    return any(
        isinstance(value, float) and 0 < value < 1 and "drop" in name
        for module in modules
        for name, value in (("dropout", module.p) if isinstance(module, nn.Dropout) else ("", 0), *vars(module).items())
    )
