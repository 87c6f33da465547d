"""One training step: a pass through the schedule, the loss, the norm, and when the update happens.

Scope: when which unit is updated with what, skipping of non-finite steps, what is pending between steps.
Not here: the loop over steps, commits and logs (`trainer.py`); the arithmetic (`optim.py`); the passes (`tiering`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatrain.config import RunConfig
from megatrain.inputs import Inputs
from megatrain.model import Slice, Units
from megatrain.optim import GradientNorm, NonFiniteError, Update, clip_scale
from megatrain.precision import compute_dtype
from megatrain.schedules import lr_at
from megatrain.stream import StreamedModel
from tiering.device import updates_there
from tiering.manager import Manager

MAX_SKIPPED = 10
"""Steps in a row with a non-finite gradient after which a run gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: mean over the step's supervised tokens. lr: of its update. grad_norm: before clipping. skipped: the first
    bad tensor.
    """

    loss: float
    lr: float
    grad_norm: float
    clipped: bool
    skipped: str | None = None


class StepEngine:
    """Steps over an open `Manager`. updates: optimizer steps applied or pending, as `state_steps` counts them.

    The plan says which units are updated late, in the next step's forward (all of them with clipping); the others are
    in this step's backward.
    """

    def __init__(self, run: RunConfig, units: Units, manager: Manager, updates: int) -> None:
        self.run = run
        self.manager = manager
        self.updates = updates
        device = manager.lanes.device
        self.model = StreamedModel(
            units,
            manager.op,
            self._gradient_ready,
            manager.catch_up,
            device=device,
            computed=manager.computed,
            dtype=compute_dtype(run.train.precision),
        )
        self._there = updates_there(manager.plan.workload)
        self._norm = GradientNorm(units, device, flags=self._there)
        owners = frozenset(unit.name for unit in units if unit.nbytes)
        carried = manager.plan.workload.of_life("carried")
        self._late = frozenset(block.unit for block in carried if block.kind == "grad")
        self._at_once = owners - self._late
        self._pending: Update | None = None
        self._skipped_in_a_row = 0

    @property
    def clips(self) -> bool:
        return self.run.train.max_grad_norm is not None

    @property
    def leaves_updates(self) -> bool:
        """True where a step ends with updates that only the next one, or `settle`, applies."""
        return bool(self._late)

    def step(self, inputs: Inputs, *, last: bool) -> StepResult:
        """Run one step. last: `settle` follows, not another step."""
        program = "step" if self._pending is not None or not self._late else "first"
        updates = self._pending_updates()
        if not self.clips:
            self.updates += 1
            flag = self._norm.flag if self._there else None
            update = Update(step=self.updates, scale=None, refuse=self._refuse_until, flag=flag)
            updates |= dict.fromkeys(self._at_once, update)
        self._norm.begin()
        self.manager.begin(program, last=last, context=updates)
        losses = self.model.step(inputs, self.run.train.micro_batch, self.run.train.loss_chunk)
        return self._finish(sum(losses))

    def _pending_updates(self) -> dict[str, Update]:
        return dict.fromkeys(self._late, self._pending) if self._pending is not None else {}

    def _gradient_ready(self, unit: str, gradients: Mapping[Slice, torch.Tensor]) -> None:
        self._norm.add(gradients)

    def _refuse_until(self, unit: str) -> None:
        """Raises `NonFiniteError` for a gradient of this step up to those of `unit`, which have reached the host."""
        self._refuse(self._norm.bad_until(unit))

    def _refuse(self, bad: str | None) -> None:
        """Updates of this step may have begun: it cannot be skipped, only left behind."""
        if bad is None:
            return
        error = NonFiniteError(
            f"the gradient of {bad} is not finite in step {self.updates}, and without clipping a step is updated "
            f"as it goes. The committed state is step {self.manager.store.step}. Fix: resume from there with a "
            f"lower optimizer.lr; a run with train.max_grad_norm skips such steps by itself."
        )
        self.manager.pipeline.fail(error)
        raise error

    def _finish(self, loss: float) -> StepResult:
        """Everything has been computed: what is left of the norms comes to the host in one piece."""
        norm, most = self._norm.total(), self.run.train.max_grad_norm
        factor = norm if most is None else clip_scale(norm, most)
        total, scale = torch.stack((norm, factor)).cpu()
        self._pending = None
        if not self.clips:
            self._refuse(self._norm.first_added_bad())
            if self._late:
                self._pending = Update(step=self.updates, scale=None)
            lr = lr_at(self.run.optimizer, self.updates)
            return StepResult(loss=loss, lr=lr, grad_norm=total.item(), clipped=False)
        lr = lr_at(self.run.optimizer, self.updates + 1)  # a skipped step leaves it to the next one
        bad = self._norm.first_bad()
        if bad is not None or not torch.isfinite(total):
            return StepResult(loss=loss, lr=lr, grad_norm=total.item(), clipped=False, skipped=self._skip(bad))
        self._skipped_in_a_row = 0
        self.updates += 1
        self._pending = Update(step=self.updates, scale=factor if self._there else scale)
        return StepResult(loss=loss, lr=lr, grad_norm=total.item(), clipped=bool(scale < 1))

    def _skip(self, bad: str | None) -> str:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteError(
                f"{MAX_SKIPPED} steps in a row had a non-finite gradient (first in {bad}). The committed state is step "
                f"{self.manager.store.step}. Fix: resume from there with a lower optimizer.lr, or look at the data."
            )
        return bad or "the sum of all"

    def settle(self) -> None:
        """Apply what is pending, so that the state is that after the last step."""
        if self._pending is not None:
            self.manager.run("flush", context=self._pending_updates())
            self._pending = None

    def close(self) -> None:
        self.model.close()
