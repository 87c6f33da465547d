"""Everything in RAM: the plain loop that all the others have to equal.

Scope: `python -m benchmarks.rivals.plain JOB.json` prints one object of figures.
Not here: the loop itself (`megatrain/reference.py`).
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rivals.job import Job, Meter, read_job
from megatrain.inputs import every_token
from megatrain.model import model_config
from megatrain.reference import train_plain


def main(job: Job) -> None:
    meter = Meter()
    model = AutoModelForCausalLM.from_config(model_config(job.model), dtype=torch.float32)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in job.weights():
            named[name].copy_(values)
    meter.begin()
    trained = train_plain(
        model,
        [every_token(ids) for ids in job.batches()],
        micro_batch=job.micro_batch,
        max_grad_norm=None,
        optimizer=job.optimizer,
        progress=lambda number: meter.step(),
    )
    meter.report(trained.losses)


if __name__ == "__main__":
    main(read_job(Path(sys.argv[1])))
