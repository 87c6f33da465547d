"""The loss on held-out rows: of a training between two steps, and of any weights that are lent.

Scope: which steps are followed by a validation, the passes of one through the tiers of a training, the mean over
batches.
Not here: what is held out (`data/run_data.py`), `megatrain eval` (`evaluate.py`), the forward (`stream.py`).

A validation is made of forwards alone, on the weights as they are after every update so far, without dropout. It
changes nothing that a later step sees: no block, no random number.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from torch import nn

from megatrain.commits import failures_named
from megatrain.config import RunConfig
from megatrain.data import Batch, batches_in_order
from megatrain.data.batch import Rows
from megatrain.engine import StepEngine
from megatrain.inputs import tensors
from megatrain.programs import FORWARD
from megatrain.random_state import unmoved
from megatrain.sizes import format_seconds
from megatrain.stream import StreamedModel


class Validation:
    """The held-out rows of a run, and the steps after which they are looked at. rows: None where there are none."""

    def __init__(self, run: RunConfig, rows: Rows | None) -> None:
        self._train = run.train
        self._rows = rows

    def due(self, number: int) -> bool:
        """Does a validation follow step `number`? 0 stands for the time before the first one."""
        every, steps = self._train.eval_every, self._train.steps
        return self._rows is not None and (number == steps or (every > 0 and number % every == 0))

    def measure(self, engine: StepEngine, number: int, console: Console) -> float:
        """The mean loss after step `number`, in nats, which is also told; it is in no figure of a step.

        What is pending is applied first, as before a commit.
        """
        assert self._rows is not None
        when = f"after step {number}" if number else "before the first step"
        manager = engine.manager
        with failures_named(manager.store, f"validation {when}"), unchanged(engine.model.model, engine.model.device):
            engine.settle()
            manager.pipeline.drain()
            begun_s = time.perf_counter()
            loss, supervised = mean_loss(
                engine.model,
                batches_in_order(self._rows, min(self._train.batch, len(self._rows))),
                micro_batch=self._train.micro_batch,
                loss_chunk=self._train.loss_chunk,
                begin=lambda: manager.begin(FORWARD),
            )
            manager.pipeline.drain()
        manager.trace.leave_out(FORWARD, begun_s)
        took = format_seconds(time.perf_counter() - begun_s)
        told = f"validation loss {loss:.4f} {when} ({supervised:,} supervised tokens, {took})"
        console.print(told, highlight=False, soft_wrap=True)
        return loss


def mean_loss(
    model: StreamedModel,
    batches: Iterable[Batch],
    *,
    micro_batch: int,
    loss_chunk: int | None,
    begin: Callable[[], None],
    done: Callable[[int], None] = lambda rows: None,
) -> tuple[float, int]:
    """(mean loss over the supervised tokens of all batches, their number). begin: called before a pass; done: after
    it, with its rows. Every token counts the same, whichever batch it is in.
    """
    weighted, counted = [], 0
    for batch in batches:
        begin()
        size = whole_micro_batch(len(batch.input_ids), micro_batch)
        losses = model.losses(tensors(batch), size, loss_chunk)
        weighted.append(sum(losses) * batch.supervised)
        counted += batch.supervised
        done(len(batch.input_ids))
    return math.fsum(weighted) / counted, counted


def whole_micro_batch(rows: int, most: int) -> int:
    """The largest micro-batch up to `most` that divides `rows`: a pass has whole ones only.

    >>> whole_micro_batch(8, 3), whole_micro_batch(5, 4), whole_micro_batch(4, 8)
    (2, 1, 4)
    """
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model evaluates on `device`; afterwards its modes and torch's random numbers are as before."""
    modes = {module: module.training for module in model.modules()}
    with unmoved(device):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
