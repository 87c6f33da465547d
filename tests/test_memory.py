"""P2: memory is bounded by construction, seen from outside: in a memory cgroup, and by the process's own peak.

Scope: a model whose state is many times its budget, trained inside a hard limit of budget + baseline + planned compute.
Not here: the plan's own sums (`test_plan.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest
from conftest import RunFile

MiB = 1 << 20
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")

BIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 13,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


@pytest.fixture
def limited() -> Iterator[Any]:
    """A function that starts a command in a fresh memory cgroup of so many bytes."""
    v1 = (CGROUP_V1 / "memory.limit_in_bytes").exists()
    root = CGROUP_V1 if v1 else CGROUP_V2
    folder = root / f"megatrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit_file = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit_file.write_text(str(1 << 40))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no right to make a memory cgroup below {root}: {error}")

    def run(command: list[str], nbytes: int) -> subprocess.CompletedProcess[str]:
        limit_file.write_text(str(nbytes))
        shell = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        return subprocess.run(["sh", "-c", shell, "sh", *command], capture_output=True, text=True, timeout=280)

    yield run
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.cgroup
def test_150_million_parameters_train_in_256_mib_and_what_computing_takes(
    run_file: RunFile, tmp_path: Path, limited: Any
) -> None:
    """P2, I5, PL-15: state of 2.4 GB, of which 1.8 GB lives on NVMe; a byte more than planned would be killed."""
    path = run_file(
        {
            "model.config": BIG,
            "tiers.host_memory": "256MiB",
            "data.seq_len": 64,
            "train.batch": 2,
            "train.micro_batch": 1,
            "train.steps": 3,
            "train.max_grad_norm": 1.0,
            "optimizer.lr": 0.0001,
        }
    )
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    megatrain = [sys.executable, "-m", "megatrain"]
    planned = subprocess.run([*megatrain, "plan", str(path), "--json"], capture_output=True, text=True, check=True)
    plan = json.loads(planned.stdout)
    assert plan["parameters"] >= 150e6
    assert plan["arena_bytes"] <= 256 * MiB
    compute = sum(plan["compute_lines"].values())
    limit = 256 * MiB + plan["baseline_bytes"] + compute
    assert limit < 12 * plan["parameters"], "the state would fit in the limit: the test shows nothing"
    done = limited([*megatrain, "train", str(path), "--debug"], limit)
    assert done.returncode == 0, f"limit {limit / MiB:.0f} MiB\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2, 3]
    assert log[-1]["loss"] < log[0]["loss"]


FIVE_MILLION = {**BIG, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7, "vocab_size": 512}


@pytest.mark.slow
def test_resident_memory_is_flat_over_two_hundred_steps(run_file: RunFile, tmp_path: Path) -> None:
    """P2, I5, IO-27: less than 0.1 MiB a step after step 20, with everything on NVMe and commits in between."""
    path = run_file(
        {
            "model.config": FIVE_MILLION,
            "tiers.host_memory": "24MiB",
            "tiers.resident": 0,
            "train.batch": 1,
            "train.micro_batch": 1,
            "train.steps": 200,
            "train.commit_every": 50,
        }
    )
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "train", str(path), "--debug"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    resident = [row["rss_bytes"] for row in rows][20:]
    assert len(resident) == 180, len(rows)
    slope = linear_regression(range(len(resident)), resident).slope
    assert slope < 0.1 * MiB, f"{slope / MiB:.3f} MiB a step: {[nbytes // MiB for nbytes in resident[::20]]}"
