"""One run in a process of its own, planned and then trained, and what it did to that process's memory.

Scope: `measure_run` for tests; `python run_memory.py RUN.yaml STEPS` prints one JSON object of bytes.
Not here: what is asserted (`test_planner_cases.py`), seconds.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def measure_run(run_file: Path, steps: int) -> dict[str, int]:
    """Figures of `main` from a child process."""
    command = [sys.executable, __file__, str(run_file), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(run_file: Path, steps: int) -> dict[str, int]:
    """parameters; what the plan says (baseline, arena, compute); peak: of resident memory from the first allocation to
    the last step; steady: resident memory after it.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import torch
    from rich.console import Console

    from megatrain.config import load_run
    from megatrain.engine import StepEngine
    from megatrain.prepare import prepare
    from megatrain.trainer import open_run_batches, open_state

    console = Console(stderr=True)
    prepared = prepare(load_run(run_file, ()))
    run = prepared.run
    run.output.dir.mkdir(parents=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of planning
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=console) as manager:
        engine = StepEngine(run, prepared.units, manager, 0)
        for number in range(steps):
            engine.step(torch.from_numpy(batches.batch_at(number)), last=False)
        status = dict(_fields())
        engine.close()
    return {
        "parameters": prepared.units.parameters,
        "baseline": prepared.baseline_bytes,
        "arena": prepared.plan.host_bytes,
        "compute": prepared.compute_bytes,
        "peak": status["VmHWM"],
        "steady": status["VmRSS"],
    }


def _fields() -> Any:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS"):
            yield name, int(value.split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
