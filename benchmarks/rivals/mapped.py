"""The strongest simple way with little RAM: weights and moments are memory-mapped files, updated in backward.

Scope: `python -m benchmarks.rivals.mapped JOB.json` prints one object of figures.
Not here: anything of this project's tiers; the kernel's page cache decides what is in RAM.

A gradient is used by the fused AdamW as soon as autograd has accumulated it, and forgotten. So there is no clipping, no
accumulation over micro-batches, and a crash leaves a mixture of two steps.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.job import Job, Meter, parameter_owner, read_job, supervised_loss
from megatrain.model import build, model_config


def main(job: Job) -> None:
    meter = Meter()
    model = mapped_model(job, job.folder / "mapped")
    if job.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    meter.begin()
    for batch in job.batches():
        assert len(batch) == job.micro_batch, "an update in backward cannot wait for another micro-batch"
        loss = supervised_loss(model, batch)
        loss.backward()
        meter.step(loss.item())
    meter.report()


def mapped_model(job: Job, folder: Path) -> Any:
    """The model with every parameter a mapped file, and an optimizer for each of them that runs in backward."""
    folder.mkdir()
    model: Any = build(model_config(job.model))
    for number, (name, values) in enumerate(job.weights()):

        def mapped(kind: str, like: torch.Tensor = values, number: int = number) -> torch.Tensor:
            path = str(folder / f"{number}.{kind}")
            return torch.from_file(path, shared=True, size=like.numel(), dtype=torch.float32).view(like.shape)

        parameter = torch.nn.Parameter(mapped("weight").copy_(values))
        owner, leaf = parameter_owner(model, name)
        setattr(owner, leaf, parameter)
        adamw = torch.optim.AdamW([parameter], fused=True, **job.optimizer)
        moments = {kind: mapped(kind) for kind in ("exp_avg", "exp_avg_sq")}  # new files are zeros
        adamw.state[parameter] = {"step": torch.tensor(0.0), **moments}
        parameter.register_post_accumulate_grad_hook(lambda _, adamw=adamw: _update(adamw))
    return model


def _update(adamw: torch.optim.Optimizer) -> None:
    adamw.step()
    adamw.zero_grad()


if __name__ == "__main__":
    main(read_job(Path(sys.argv[1])))
