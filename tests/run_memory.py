"""One run in a process of its own, planned and then trained, and what it did to that process's memory.

Scope: `measure_run` for tests; `python run_memory.py RUN.yaml STEPS` prints one JSON object of bytes.
Not here: what is asserted (`test_planner_cases.py`), seconds.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.child import peak_rss_bytes, reset_peak, rss_bytes, run_child  # noqa: E402


def measure_run(run_file: Path, steps: int) -> dict[str, int]:
    """Figures of `main` from a child process."""
    command = [sys.executable, __file__, str(run_file), str(steps)]
    ended = run_child(command, timeout_s=120, folder=ROOT)
    assert ended.code == 0, ended
    return dict(ended.result)


def main(run_file: Path, steps: int) -> dict[str, int]:
    """parameters; what the plan says (baseline, arena, compute); peak: of resident memory from the first allocation to
    the last step; steady: resident memory after it.
    """
    from rich.console import Console

    from megatrain.config import load_run
    from megatrain.engine import StepEngine
    from megatrain.inputs import tensors
    from megatrain.prepare import prepare
    from megatrain.trainer import open_run_batches, open_state

    console = Console(stderr=True)
    prepared = prepare(load_run(run_file, ()))
    run = prepared.run
    run.output.dir.mkdir(parents=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    reset_peak()  # forget the one of planning
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=console) as manager:
        engine = StepEngine(run, prepared.units, manager, 0)
        for number in range(steps):
            engine.step(tensors(batches.batch_at(number)), last=False)
        peak, steady = peak_rss_bytes(), rss_bytes()
        engine.close()
    return {
        "parameters": prepared.units.parameters,
        "baseline": prepared.baseline_bytes,
        "arena": prepared.plan.host_bytes,
        "compute": prepared.compute_bytes,
        "peak": peak,
        "steady": steady,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
