"""AdamW on tiles, and the global gradient norm, bit for bit as torch computes them.

Scope: `TiledAdamW` (the fused kernel on the parts of parameters that lie in a tile, and the BF16 copy of that tile),
`GradientNorm` (as `clip_grad_norm_`), the error for a gradient that is not finite.
Not here: when a tile is updated (`programs.py`, `tiering`), the learning rate of a step (`schedules.py`).

Source of the equality: the fused CPU kernel works in units of 16 elements, so cutting a tensor at multiples of 16
elements from its start leaves every element on the same code path; norms are taken of whole parameters.

Updates run on the CPU, wherever gradients are computed, or on the device, on whole units: the same kernel of that
device. Norms are taken where the gradients are; the host sees them without waiting for the device, in a copy that
arrives before the gradient itself does. An update on the device is issued before anybody there or here knows its
gradient: it finds a flag beside it, and changes nothing where that is set.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch.utils._foreach_utils import _has_foreach_support

from megatrain.config import OptimizerConfig
from megatrain.errors import UserError
from megatrain.model import Slice, Unit, Units
from megatrain.programs import CAST, WEIGHT_BF16, block_name
from megatrain.schedules import lr_at
from tiering.errors import TieringError
from tiering.schedule import Action

_CPU = torch.device("cpu")


class NonFiniteError(TieringError):
    """A gradient is not finite and the step cannot be undone; names the first bad tensor and the last commit."""

    exit_code = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step needs besides gradients. step: counted from 1. scale: None, or the clip factor, where the
    update runs. refuse: called with a unit's name before any of its tiles changes on HOST; raises where its gradient is
    no good. flag: on the device instead, 1 (a number there) for a unit that must not change.
    """

    step: int
    scale: torch.Tensor | None
    refuse: Callable[[str], None] | None = None
    flag: Callable[[str], torch.Tensor] | None = None


class TiledAdamW:
    """`torch.optim.AdamW(fused=True)` on tiles of units, on a device on whole ones. Stateless: moments live in blocks,
    the step in `Update`.
    """

    def __init__(self, units: Units, config: OptimizerConfig) -> None:
        self.config = config
        self._units: dict[str, Unit] = {unit.name: unit for unit in units}
        self._kept = undecayed(units, config.no_decay)

    def __call__(self, action: Action, views: Mapping[str, torch.Tensor], updates: Mapping[str, Update]) -> None:
        """Update the tile that `action` names; `views` hold its bytes of weight, grad and both moments (flat uint8),
        and those of the weight's BF16 copy where there is one. A tile of `CAST` only makes that copy. On a device it
        waits for nothing, and takes memory for a few numbers.

        updates: by unit name, the step whose gradient its grad block holds.
        """
        x = action.operands[0]
        unit = x.block.rpartition("/")[0]
        if action.op == f"{CAST}.{unit}":
            _round(unit, views)
            return
        update = updates[unit]
        flag = None
        if not action.updates_there:
            if update.refuse is not None:
                update.refuse(unit)
        elif update.flag is not None:
            flag = update.flag(unit)
        slices = self._units[unit].slices
        for decays in (True, False):
            group = [place for place in slices if (place.name not in self._kept) == decays]
            parts = list(_parts(group, x.lo // 4, x.hi // 4))
            if parts:
                self._update(unit, parts, views, update, self.config.weight_decay if decays else 0.0, flag)
        _round(unit, views)

    def _update(
        self,
        unit: str,
        parts: Sequence[tuple[int, int]],
        views: Mapping[str, torch.Tensor],
        update: Update,
        weight_decay: float,
        flag: torch.Tensor | None,
    ) -> None:
        weight, gradient, mean, square = (
            [views[block_name(unit, kind)].view(torch.float32)[lo:hi] for lo, hi in parts]
            for kind in ("weight", "grad", "exp_avg", "exp_avg_sq")
        )
        if update.scale is not None:
            torch._foreach_mul_(gradient, update.scale)
        step = torch.full(
            (), float(update.step), device=weight[0].device
        )  # a copy of a number would wait for the device
        torch._fused_adamw_(
            weight,
            gradient,
            mean,
            square,
            [],
            [step] * len(parts),
            lr=lr_at(self.config, update.step),
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            found_inf=flag,
        )


def _round(unit: str, views: Mapping[str, torch.Tensor]) -> None:
    """The BF16 copy of a tile of weights, to nearest even; nothing where a run has no such copies."""
    copy = views.get(block_name(unit, WEIGHT_BF16))
    if copy is not None:
        weight = views[block_name(unit, "weight")].view(torch.float32)
        copy.view(torch.bfloat16)[: len(weight)].copy_(weight)  # half of an odd page leaves half a page unused


def _parts(slices: Sequence[Slice], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Ranges of parameters inside elements lo:hi of a block, counted from lo; the gaps between them are left alone."""
    for place in slices:
        begin, end = max(place.offset, lo), min(place.offset + place.numel, hi)
        if begin < end:
            yield begin - lo, end - lo


def undecayed(units: Units, patterns: Sequence[str]) -> frozenset[str]:
    """Names of trained parameters without weight decay. Raises UserError for a pattern that matches none."""
    names = [place.name for unit, place in units.slices() if not unit.frozen]
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"optimizer.no_decay: {pattern!r} matches no parameter that is trained. Fix: a pattern of names such "
                f"as {names[0]} or {names[-1]}"
            )
        found.update(matched)
    return frozenset(found)


class GradientNorm:
    """The norm of all gradients of a step, from the norms of parameters as they become whole.

    `add` waits for nothing. What it tells the host arrives there when the device has computed so far: before any copy
    of these gradients to the host does, which has to wait for the same.
    """

    def __init__(self, units: Units, device: torch.device = _CPU, *, flags: bool = False) -> None:
        """device: where the gradients are. flags: `flag` is asked for."""
        self._order = [place for unit, place in units.slices() if not unit.frozen]
        self._unit = {place: unit.name for unit, place in units.slices()}
        self._norms: dict[Slice, torch.Tensor] = {}
        self._told = torch.empty(len(self._order), pin_memory=device.type != "cpu")
        self._last: dict[str, int] = {}  # of a unit: how many had been added with it
        self._sound = 0  # so many of the first ones are known to be finite
        # Places that last: memory that is given back could be taken for other numbers while an update still reads it.
        places = torch.zeros(len(set(self._unit.values())), device=device) if flags else ()
        self._flags = dict(zip(dict.fromkeys(self._unit.values()), places, strict=False))
        self._flagged: torch.Tensor | None = None  # the last one of this step

    def begin(self) -> None:
        """Forget the step before."""
        self._norms.clear()
        self._last.clear()
        self._sound = 0
        self._flagged = None

    def add(self, gradients: Mapping[Slice, torch.Tensor]) -> None:
        """Note the norms of some parameters, each once a step."""
        before = len(self._norms)
        self._norms.update(zip(gradients, _norms(list(gradients.values())), strict=True))
        stacked = torch.stack([self._norms[place] for place in gradients])
        self._told[before : len(self._norms)].copy_(stacked, non_blocking=True)
        self._last.update((self._unit[place], len(self._norms)) for place in gradients)
        for unit in {self._unit[place]: None for place in gradients} if self._flags else ():
            bad = stacked.isfinite().all().logical_not().to(torch.float32)
            before_it = bad if self._flagged is None else torch.maximum(self._flagged, bad)
            self._flagged = self._flags[unit].copy_(before_it)

    def flag(self, unit: str) -> torch.Tensor:
        """Where the gradients are: 1 if a norm up to those of `unit` is not finite, else 0, once they are computed."""
        return self._flags[unit]

    def bad_until(self, unit: str) -> str | None:
        """The first parameter, in the order of `add`, whose norm is not finite: up to those of `unit`, whose gradients
        have to have reached the host. None too for a unit that this step has not come to: what is still to be updated
        of the step before was looked at when that ended.
        """
        return self._bad_until(self._last.get(unit, 0))

    def first_added_bad(self) -> str | None:
        """The same for all that were added; the device has to have computed them."""
        return self._bad_until(len(self._norms))

    def _bad_until(self, count: int) -> str | None:
        bad = np.flatnonzero(~np.isfinite(self._told.numpy()[self._sound : count]))
        if len(bad):
            return list(self._norms)[self._sound + bad[0]].name
        self._sound = max(self._sound, count)
        return None

    def first_bad(self) -> str | None:
        """In the model's order, the first parameter whose norm is not finite; the device has to have computed them."""
        told = dict(zip(self._norms, self._told.tolist(), strict=False))
        return next((place.name for place in self._order if not math.isfinite(told.get(place, 0.0))), None)

    def total(self) -> torch.Tensor:
        """The global norm, as `torch.nn.utils.get_total_norm` gives it, where the gradients are."""
        return torch.linalg.vector_norm(torch.stack([self._norms[place] for place in self._order]))


def _norms(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """One norm each, by the kernel that `torch.nn.utils.get_total_norm` takes on their device."""
    if _has_foreach_support(gradients, gradients[0].device):
        return torch._foreach_norm(gradients)
    return [torch.linalg.vector_norm(gradient) for gradient in gradients]


def clip_scale(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that `torch.nn.utils.clip_grad_norm_` multiplies every gradient with."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
