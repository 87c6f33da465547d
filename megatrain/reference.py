"""The plain loop that a tiered run has to equal bit for bit: transformers, torch, everything in RAM.

Scope: N steps of AdamW with gradient accumulation and clipping, as anyone would write them.
Not here: anything of this project's tiers; this file imports none of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses and gradient norms by step; the trained model, and both moments by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    model: torch.nn.Module
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]


def train_plain(
    model: Any,
    batches: Sequence[torch.Tensor],
    *,
    micro_batch: int,
    max_grad_norm: float | None,
    optimizer: dict[str, Any],
    progress: Callable[[int], None],
) -> Reference:
    """Train `model` (a transformers causal language model in FP32) on `batches`, each [B, S] token ids.

    optimizer: arguments of `torch.optim.AdamW`. A parameter that no token reached has gradient zero, not none.
    """
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(list(named.values()), fused=True, **optimizer)
    losses: list[float] = []
    grad_norms: list[float] = []
    model.train()
    for number, input_ids in enumerate(batches):
        supervised = input_ids.shape[0] * (input_ids.shape[1] - 1)
        parts = []
        for part in input_ids.split(micro_batch):
            out = model(input_ids=part, labels=part, use_cache=False, num_items_in_batch=supervised)
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
        adamw.step()
        adamw.zero_grad()
        progress(number)
    moments = {name: adamw.state[parameter] for name, parameter in named.items()}
    return Reference(
        losses=losses,
        grad_norms=grad_norms,
        model=model,
        exp_avg={name: state["exp_avg"] for name, state in moments.items()},
        exp_avg_sq={name: state["exp_avg_sq"] for name, state in moments.items()},
    )
