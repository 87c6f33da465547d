"""P3: `kill -9` at any instant loses nothing; a short form of `make torture`.

Scope: a few kills of a whole training run, in both update modes.
Not here: the harness itself (`torture.py`), a hundred kills (`make torture`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "torture.py"


@pytest.mark.parametrize(
    "clip", [pytest.param([], marks=pytest.mark.slow), ["--clip", "0.5"]], ids=["fused", "clipped"]
)
def test_a_run_killed_again_and_again_has_the_bits_of_one_that_never_stopped(tmp_path: Path, clip: list[str]) -> None:
    """P3, IO-14, IO-23: every commit holds, every resume goes on from it, and no file is left over."""
    command = [sys.executable, str(HARNESS), "--kills", "5", "--folder", str(tmp_path), *clip]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HARNESS.parent.parent)}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout)
    assert result["kills"] == 5
    assert result["identical"], result
    assert result["steps"] >= 5, "no life came as far as a commit"
