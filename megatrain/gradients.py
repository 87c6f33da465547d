"""Collects the gradients of one unit's backward: those of its weights and those of its inputs.

Scope: leaves for lent weights whose gradients go into lent blocks; the gradient of an input from its micro-batches.
Not here: running the backward (`stream.py`), norms (`optim.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from megatrain.model import Slice, Unit
from megatrain.precision import weight_kind
from megatrain.programs import block_name


class GradientSink:
    """Leaves for a unit's parameters whose gradients go straight into the unit's lent gradient blocks.

    The first contribution of a step defines the bytes, later ones are added in order: the arithmetic of `.grad`. Blocks
    of gradients are FP32: those of BF16 weights become FP32 before they are added.
    """

    def __init__(
        self,
        unit: Unit,
        views: Mapping[str, torch.Tensor],
        begun: set[str],
        pause: Callable[[], None],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: of the lent weights."""
        self._pause = pause
        self.leaves: dict[Slice, torch.Tensor] = {}
        self._targets: dict[Slice, torch.Tensor] = {}
        self._defined: set[Slice] = set()
        self._hooks: list[RemovableHandle] = []
        for binding in unit.bindings:
            place = binding.slice
            if place in self.leaves:
                continue
            leaf = place.of(views[block_name(binding.unit, weight_kind(dtype))], dtype).detach()
            self.leaves[place] = leaf
            if binding.frozen:
                continue
            leaf.requires_grad_()
            self._targets[place] = place.of(views[block_name(binding.unit, "grad")])
            if binding.unit in begun:
                self._defined.add(place)
            self._hooks.append(leaf.register_post_accumulate_grad_hook(partial(self._take, place)))
        begun.update(binding.unit for binding in unit.bindings if not binding.frozen)

    def _take(self, place: Slice, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if place in self._defined:
            self._targets[place].add_(gradient)
        else:
            self._targets[place].copy_(gradient)
            self._defined.add(place)
        self._pause()

    def close(self) -> None:
        """Let go of the lent bytes: a leaf and its hook would hold each other, and the arena, until the next gc."""
        for hook in self._hooks:
            hook.remove()
        self.leaves.clear()
        self._targets.clear()

    def end_micro_batch(self) -> None:
        """A parameter that nothing used so far has gradient zero (it still decays, and has moments)."""
        for place in self._targets.keys() - self._defined:
            self._targets[place].zero_()
            self._defined.add(place)


class InputGradient:
    """The gradient of an input from those of its micro-batches: rows beside each other, or a sum where all share it."""

    def __init__(self) -> None:
        self._whole: torch.Tensor | None = None
        self._shared: list[torch.Tensor] = []

    def add(self, gradient: torch.Tensor, rows: slice | None, shape: torch.Size) -> None:
        """rows: those that `gradient` is for; None: all of them use the whole input."""
        if rows is None:
            self._shared.append(gradient)
            return
        if self._whole is None:
            self._whole = gradient.new_empty(shape)
        self._whole[rows] = gradient

    def total(self) -> torch.Tensor | None:
        """None if nothing wanted it."""
        if len(self._shared) > 1:
            return torch.stack(self._shared).sum(0)
        return self._shared[0] if self._shared else self._whole
