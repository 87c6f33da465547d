"""What a resume takes up, what it leaves alone, and what a long run does not pile up.

Scope: whole runs: a half-made commit, the state of another run, a folder that was moved, memory over many steps.
Not here: equality after a resume (`test_run.py`), failures (`test_faults.py`), model folders (`test_checkpoint.py`).
"""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import RunFile
from models import MODELS
from rich.console import Console

import megatrain.goodbye
import megatrain.trainer
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.trainer import train
from tiering.errors import WrongStateError

pytestmark = pytest.mark.usefixtures("known_machine")

TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB", "model.config": MODELS["llama"]}


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def run(run_file: RunFile, folder: Path, steps: int, *, resume: bool = False, **changes: Any) -> str:
    """Trains; returns what was printed."""
    where = {"tiers.nvme": str(folder / "nvme"), "output.dir": str(folder), "train.steps": steps}
    said = io.StringIO()
    path = run_file({**TIGHT, **where, **changes})
    assert train(load_run(path), resume=resume, console=Console(file=said, width=300)) == 0
    return said.getvalue()


def state(root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c")]
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_commit_that_was_not_finished_is_not_taken_up(run_file: RunFile, tmp_path: Path) -> None:
    """CK-04: slots of step 4 are written, its manifest has no name yet: step 2 is taken up and said."""
    for name in ("straight", "cut"):
        run(run_file, tmp_path / name, 2)
    run(run_file, tmp_path / "straight", 6, resume=True)
    root = tmp_path / "cut" / "nvme"
    for path in root.glob("*/*/c/0"):
        slot = path.resolve()
        other = root / ".slots" / {"a": "b", "b": "a"}[slot.parent.parent.name] / slot.parent.name / slot.name
        other.write_bytes(os.urandom(other.stat().st_size))  # what a step has written since the commit
    half = json.loads((root / "manifest.json").read_text())
    (root / ".manifest.new").write_text(json.dumps({**half, "step": 4})[:-40])
    said = run(run_file, tmp_path / "cut", 6, resume=True)
    assert "Going on from step 2 of 6" in said, said
    assert state(root) == state(tmp_path / "straight" / "nvme"), "a resume took up bytes of no commit"


def test_the_state_of_another_run_is_neither_taken_up_nor_touched(run_file: RunFile, tmp_path: Path) -> None:
    """CK-06, CK-18: the folder of an old run that came further: a new run is refused, and so is a resume by another
    one; beside it the new run has its own.
    """
    run(run_file, tmp_path / "old", 6)
    before = bytes_below(tmp_path / "old")
    with pytest.raises(UserError, match="holds the state of a run already"):
        run(run_file, tmp_path / "old", 2)
    with pytest.raises(WrongStateError, match="another run: .*seed"):
        run(run_file, tmp_path / "old", 8, resume=True, **{"train.seed": 3, "output.dir": str(tmp_path / "new")})
    assert "Going on" not in run(run_file, tmp_path / "new", 2, **{"train.seed": 3})
    said = run(run_file, tmp_path / "new", 4, resume=True, **{"train.seed": 3})
    assert "Going on from step 2" in said, f"a resume picked another run's step: {said}"
    after = bytes_below(tmp_path / "old")
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    assert [name for name in changed if not name.endswith(".lock")] == [], f"the old run was changed: {changed}"


def test_a_run_that_was_moved_goes_on_to_its_end(run_file: RunFile, tmp_path: Path) -> None:
    """CK-17: no absolute path in state, log or caches is needed again; the bits are those of a run that stayed."""
    run(run_file, tmp_path / "stays", 2)
    run(run_file, tmp_path / "here", 2)
    (tmp_path / "far").mkdir()
    shutil.move(tmp_path / "here", tmp_path / "far" / "away")
    assert "Done" in run(run_file, tmp_path / "far" / "away", 5, resume=True)
    assert not (tmp_path / "here").exists(), "the old place was made again"
    run(run_file, tmp_path / "stays", 5, resume=True)
    assert state(tmp_path / "far" / "away" / "nvme") == state(tmp_path / "stays" / "nvme")


def test_a_state_is_float32_whatever_the_model_file_says(run_file: RunFile, tmp_path: Path) -> None:
    """IO-11: one dtype for planner, store and zarr; a BF16 model makes no BF16 array, which zarr refuses."""
    model = {**MODELS["llama"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    run(run_file, tmp_path / "run", 1, **{"model.config": model})
    documents = list((tmp_path / "run/nvme").glob("*/*/zarr.json"))
    found = {json.loads(path.read_text())["data_type"] for path in documents}
    assert len(documents) == 18 and found == {"float32"}, f"{len(documents)} arrays of {found}"


def slope_bytes(folder: Path, first: int) -> float:
    """Bytes that a process grows by in a step, from step `first` on: a line through the rows of the log."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    late = [row for row in rows if row["step"] > first]
    return float(np.polyfit([row["step"] for row in late], [row["rss_bytes"] for row in late], 1)[0])


def test_memory_does_not_grow_from_step_to_step(run_file: RunFile, tmp_path: Path) -> None:
    """IO-27, P2: a small model, with commits; less than 0.1 MiB a step."""
    run(run_file, tmp_path / "run", 80, **{"train.commit_every": 10})
    grows = slope_bytes(tmp_path / "run", 20)
    assert grows < 0.1 * (1 << 20), f"{grows:.0f} bytes a step"


@pytest.mark.slow
def test_memory_does_not_grow_over_two_hundred_steps(run_file: RunFile, tmp_path: Path) -> None:
    """IO-27, P2: 5 million parameters, all of their state on NVMe."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
    changes = {"model.config": {**MODELS["llama"], **sizes}, "tiers.host_memory": "32MiB"}
    run(run_file, tmp_path / "run", 200, **changes)
    grows = slope_bytes(tmp_path / "run", 20)
    assert grows < 0.1 * (1 << 20), f"{grows:.0f} bytes a step"
