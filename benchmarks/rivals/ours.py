"""This project on the job: the run file beside it, trained as `megatrain train` does, without commits between.

Scope: `python -m benchmarks.rivals.ours JOB.json` prints one object of figures.
Not here: the trainer (`megatrain/`). The run draws the first weights and batches that the job holds by itself.
"""

import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console

from benchmarks.rivals.job import Job, Meter, read_job
from megatrain.config import RUN_FILE, load_run
from megatrain.engine import StepEngine
from megatrain.heap import start_again
from megatrain.inputs import tensors
from megatrain.prepare import prepare
from megatrain.trainer import open_run_batches, open_state


def main(job: Job) -> None:
    meter = Meter()
    console = Console(stderr=True)
    prepared = prepare(load_run(job.folder / RUN_FILE, ()))
    run = prepared.run
    run.output.dir.mkdir(parents=True, exist_ok=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    steps = len(job.batches())
    losses = []
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=console) as manager:
        with closing(StepEngine(run, prepared.units, manager, 0)) as engine:
            meter.begin()
            for number in range(steps):
                ids = tensors(batches.batch_at(number))
                losses.append(engine.step(ids, last=number + 1 == steps).loss)
                meter.step()
            engine.settle()
            manager.pipeline.drain()
    meter.report(losses)


if __name__ == "__main__":
    start_again()
    main(read_job(Path(sys.argv[1])))
