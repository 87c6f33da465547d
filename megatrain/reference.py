"""The plain loop that a tiered run has to equal bit for bit: transformers, torch, everything in memory.

Scope: N steps of AdamW with gradient accumulation and clipping, as anyone would write them; the loss over chunks.
Not here: anything of this project's tiers; this file imports none of it.

On a device the model is there, and so are its gradients, their norm and the clipping. AdamW is that of the device too,
or that of the CPU, on masters that are moved there and back: as the tiered run has it, since the fused kernels of the
two round in different ways. Both loops need the settings under which a device gives the same bits twice
(`exactness.py`).

In BF16 the model's parameters are the FP32 masters outside of forward and backward. Inside, each use of a parameter is
a BF16 copy with a gradient of its own, which becomes FP32 and is added to the master's as soon as backward has it. So
tied weights are two copies: their gradients are added in FP32, the head's first, since backward comes to it first.
(One BF16 copy for both uses would add the two in BF16, where most of the smaller one is lost.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses, gradient norms and learning rates by step; the trained model, and both moments by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    model: torch.nn.Module
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]


def train_plain(
    model: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    micro_batch: int,
    max_grad_norm: float | None,
    optimizer: dict[str, Any],
    progress: Callable[[int], None],
    loss_chunk: int | None = None,
    no_decay: Sequence[str] = (),
    schedule: Mapping[str, Any] | None = None,
    device: torch.device = _CPU,
    compiled: Sequence[str] = (),
    compile_settings: Mapping[str, Any] | None = None,
    update_there: bool = False,
    bf16: bool = False,
) -> Reference:
    """Train `model` (a transformers causal language model in FP32) on `batches`: its own arguments, each [B, S].
    Everything comes back on the CPU, wherever it was computed.

    optimizer: arguments of `torch.optim.AdamW`. A parameter that no token reached has gradient zero, not none.
    loss_chunk: tokens of a micro-batch whose loss is computed at a time; None: all, by the model itself. no_decay:
    patterns of the names of parameters without weight decay. schedule: arguments of `transformers.get_scheduler`; None:
    the learning rate stays as it is. device: where the model is trained. compiled: names of layers, each a
    graph of `torch.compile` with `compile_settings`, that backward computes again (`torch.utils.checkpoint`).
    update_there: by AdamW of the device. bf16: forward and backward compute in BF16.
    """
    model.to(device)
    graph = torch.compile(_layer, **(compile_settings or {})) if compiled else _layer
    for name in compiled:
        layer = model.get_submodule(name)
        layer.forward = _Checkpointed(graph, layer)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = dict(named) if update_there else _masters(named)
    kept = [name for name in named if any(fnmatchcase(name, pattern) for pattern in no_decay)]
    groups: list[dict[str, Any]] = [
        {"params": [master for name, master in masters.items() if name not in kept]},
        {"params": [masters[name] for name in kept], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **optimizer)
    scheduler = get_scheduler(optimizer=adamw, **(schedule or {"name": "constant"}))
    losses: list[float] = []
    grad_norms: list[float] = []
    lrs: list[float] = []
    model.train()
    for number, batch in enumerate(batches):
        supervised = int((batch["labels"][:, 1:] != -100).sum())
        parts = []
        with in_bf16(model) if bf16 else nullcontext():
            for begin in range(0, len(batch["labels"]), micro_batch):
                part = {name: tensor[begin : begin + micro_batch].to(device) for name, tensor in batch.items()}
                if loss_chunk is not None:
                    parts.append(chunked_backward(model, part, loss_chunk, supervised))
                    continue
                out = model(**part, use_cache=False, num_items_in_batch=supervised)
                out.loss.backward()
                parts.append(out.loss.item())
        losses.append(sum(parts))
        for parameter in named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if max_grad_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(named.values(), max_grad_norm)
        grad_norms.append(norm.item())
        lrs.append(adamw.param_groups[0]["lr"])
        _hand_over(named, masters)
        adamw.step()
        scheduler.step()
        adamw.zero_grad()
        _take_back(named, masters)
        progress(number)
    model.to(_CPU)
    moments = {name: adamw.state[master] for name, master in masters.items()}
    return Reference(
        losses=losses,
        grad_norms=grad_norms,
        lrs=lrs,
        model=model,
        exp_avg={name: state["exp_avg"].cpu() for name, state in moments.items()},
        exp_avg_sq={name: state["exp_avg_sq"].cpu() for name, state in moments.items()},
    )


def _layer(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


class _Checkpointed:
    """A layer's forward as one compiled graph: without gradients first, and again with them in backward.

    What torch cannot make one graph of runs as it is, as in a tiered run.
    """

    def __init__(self, graph: Callable[..., Any], layer: torch.nn.Module) -> None:
        self._layer = layer
        self._runs = dict.fromkeys((False, True), graph)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(hidden, *args, **kwargs)
        if not hidden.requires_grad:  # below it everything is frozen; the checkpoint would not be reached in backward
            hidden = hidden.detach().requires_grad_()
        return checkpoint(partial(self._run, **kwargs), hidden, *args, use_reentrant=True)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with_grad = torch.is_grad_enabled()
        try:
            return self._runs[with_grad](self._layer, *args, **kwargs)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError):
            self._runs[with_grad] = _layer
            return _layer(self._layer, *args, **kwargs)


@contextmanager
def in_bf16(model: torch.nn.Module) -> Iterator[None]:
    """Inside, each use of a parameter of `model` is a BF16 copy of it; gradients arrive in the parameter itself."""
    kept = [(m, attr, p) for m in model.modules() for attr, p in m._parameters.items() if p is not None]
    for module, attr, parameter in kept:
        copy = torch.nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(_hand_up, parameter))
        module._parameters[attr] = copy
    try:
        yield
    finally:
        for module, attr, parameter in kept:
            module._parameters[attr] = parameter


def _hand_up(parameter: torch.nn.Parameter, copy: torch.Tensor) -> None:
    """The gradient of a BF16 copy becomes FP32 and is added to that of the parameter."""
    assert copy.grad is not None
    gradient, copy.grad = copy.grad.float(), None
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _masters(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """What AdamW updates: the parameters themselves on the CPU, copies of them on the CPU for those of a device."""
    return {
        name: parameter if parameter.device == _CPU else torch.nn.Parameter(parameter.detach().cpu())
        for name, parameter in named.items()
    }


def _hand_over(named: Mapping[str, torch.nn.Parameter], masters: Mapping[str, torch.nn.Parameter]) -> None:
    """The masters get the gradients of the step."""
    for name, master in masters.items():
        if master is not named[name]:
            gradient = named[name].grad
            assert gradient is not None
            master.grad, named[name].grad = gradient.cpu(), None


def _take_back(named: Mapping[str, torch.nn.Parameter], masters: Mapping[str, torch.nn.Parameter]) -> None:
    """The model goes on with the weights that the masters have now."""
    with torch.no_grad():
        for name, master in masters.items():
            if master is not named[name]:
                named[name].copy_(master)


def chunked_backward(model: Any, batch: Mapping[str, torch.Tensor], loss_chunk: int, supervised: int) -> float:
    """Loss and gradients of one micro-batch, [m, S]: the base model once, then its head on one chunk after the other.

    A chunk is the same positions of all m rows, as many as make at most `loss_chunk` tokens, but at least one. Returns
    the sum of the chunks' losses, each divided by `supervised`.
    """
    tokens = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output = model.base_model(**tokens, use_cache=False)
    hidden, input_ids = output.last_hidden_state, batch["input_ids"]
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    length = max(1, loss_chunk // len(input_ids))
    losses, gradients = [], []
    pieces = zip(*(whole.split(length, dim=1) for whole in (hidden, input_ids, labels)), strict=True)
    for piece, ids, following in pieces:
        chunk = piece.detach().contiguous().requires_grad_()
        with _returning((model.base_model, model.get_decoder()), type(output)(last_hidden_state=chunk)):
            out = model(
                input_ids=ids,
                labels=ids,
                shift_labels=following.contiguous(),
                use_cache=False,
                num_items_in_batch=supervised,
            )
        out.loss.backward()
        losses.append(out.loss.item())
        gradients.append(chunk.grad)
    hidden.backward(torch.cat(gradients, dim=1))
    return sum(losses)


@contextmanager
def _returning(bodies: Sequence[torch.nn.Module], output: Any) -> Iterator[None]:
    """Inside, the base model and its decoder (mostly the same) return `output`: the model is its head alone."""
    for body in bodies:
        body.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for body in set(bodies):
            del body.forward
