"""The learning rate of every update: the schedules of `transformers.get_scheduler`, to the last bit.

Scope: the rate as a pure function of the settings and the number of the update, and in words.
Not here: the keys and their defaults (`megatrain/config.py`), what a rate is used for (`megatrain/optim.py`).

Source of the formulas: `transformers/optimization.py` (`constant_with_warmup`, `linear`, `cosine` with half a cycle,
`cosine_with_min_lr`), and `torch.optim.lr_scheduler.LambdaLR`: the settings' rate times a factor of the updates before.
"""

import math

from megatrain.config import OptimizerConfig, RunConfig


def lr_at(optimizer: OptimizerConfig, update: int) -> float:
    """The learning rate of an update, counted from 1; a step that is skipped is no update.

    >>> linear = OptimizerConfig(lr=0.5, schedule="linear", warmup_steps=2, schedule_steps=6)
    >>> [lr_at(linear, update) for update in range(1, 9)]
    [0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    """
    return optimizer.lr * _factor(optimizer, update - 1)


def _factor(optimizer: OptimizerConfig, before: int) -> float:
    """before: updates before this one, which is what a scheduler of torch counts."""
    warmup, length = optimizer.warmup_steps, optimizer.schedule_steps
    assert isinstance(warmup, int), f"a warm-up of {warmup} is not resolved"
    if before < warmup:
        return before / warmup
    if optimizer.schedule == "constant":
        return 1.0
    assert length is not None, f"{optimizer.schedule}: its length is not resolved"
    if optimizer.schedule == "linear":
        return max(0.0, (length - before) / max(1, length - warmup))
    progress = (before - warmup) / max(1, length - warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    if optimizer.schedule == "cosine_with_min_lr":
        least = optimizer.min_lr / optimizer.lr
        factor = factor * (1 - least) + least
    return max(0.0, factor)


def schedule_words(optimizer: OptimizerConfig) -> str:
    """`linear, 0.0003 after 3 steps of warm-up, 0 after step 100`; empty where the rate never changes."""
    if optimizer.schedule == "constant" and not optimizer.warmup_steps:
        return ""
    warmup = f"{optimizer.lr:g} after {optimizer.warmup_steps} steps of warm-up"
    words = f"{optimizer.schedule}, {warmup if optimizer.warmup_steps else f'from {optimizer.lr:g}'}"
    if optimizer.schedule_steps is None:
        return words
    return f"{words}, {optimizer.min_lr:g} after step {optimizer.schedule_steps}"


def schedule_lines(run: RunConfig) -> list[str]:
    """What a plan says about the learning rate; nothing where it never changes."""
    optimizer = run.optimizer
    words, length = schedule_words(optimizer), optimizer.schedule_steps
    lines = [f"learning rate: {words}"] if words else []
    if length is not None and run.train.steps > length:
        what = f"is 0 from step {length + 1} on"
        if optimizer.schedule != "linear":
            what = f"rises again after step {length + 1}, as the cosine of transformers does"
        lines.append(
            f"train.steps {run.train.steps} is beyond optimizer.schedule_steps {length}: the learning rate {what}"
        )
    return lines
