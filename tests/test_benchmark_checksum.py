"""The benchmark of checksums prints what it measured, and leaves nothing behind.

Scope: `benchmarks/checksum.py` on a tiny model; no figure is compared with a time.
Not here: that checksums are right (`test_checksums.py`).
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megatrain.goodbye
import megatrain.trainer
from benchmarks import checksum
from tiering.store import BlockStore


@pytest.mark.slow
def test_the_benchmark_measures_steps_with_and_without_checksums(
    tmp_path: Path, known_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of store were really made; what it changed in the program is as before."""
    monkeypatch.setattr(checksum, "MIN_S", 0.01)
    create, most_s = BlockStore.create, megatrain.goodbye.SAMPLE_MOST_S
    made: list[bool] = []
    real = checksum._run

    def run(folder: Path, hidden: int, steps: int, with_checksums: bool) -> float:
        seconds = real(folder, hidden, steps, with_checksums)
        found = "checksums" in json.loads((folder / "run" / "nvme" / "manifest.json").read_text())
        assert found is with_checksums
        made.append(found)
        return seconds

    monkeypatch.setattr(checksum, "_run", run)
    options = ["--path", str(tmp_path), "--steps", "2", "--rounds", "1", "--hidden", "64", "--json"]
    done = CliRunner().invoke(checksum.app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert made == [True, False] and len(found["with_s"]) == len(found["without_s"]) == 1
    assert min(found["bytes_per_s"].values()) > 0 and list(tmp_path.iterdir()) == []
    assert BlockStore.create is create and most_s == megatrain.goodbye.SAMPLE_MOST_S
