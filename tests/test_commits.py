"""When a run commits: cheap, never long apart, told beforehand, measured, and no matter of the numbers.

Scope: `megatrain/commits.py`, `train.commit_every` in whole runs.
Not here: what a commit does (`test_commit.py`), going on after failures (`test_faults.py`).
"""

import doctest
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import RunFile
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS
from rich.console import Console

import megatrain.commits
import megatrain.goodbye
import megatrain.trainer
from megatrain.commits import MOST_S, SHARE, CommitPace, predicted_commit_s
from megatrain.config import load_run
from megatrain.prepare import prepare
from megatrain.trainer import train
from tiering.hardware import assumed_hardware

TIGHT = {"tiers.resident": 0.5, "tiers.host_memory": "8MiB", "model.config": MODELS["llama"]}

seconds = st.floats(1e-4, 1e4)


def test_the_sum_in_the_documentation_comes_out() -> None:
    """Rule 10."""
    assert doctest.testmod(megatrain.commits).failed == 0


@given(seconds, seconds)
def test_commits_are_cheap_or_half_an_hour_apart(step_s: float, commit_s: float) -> None:
    """P3: under 1 % of a run, but never more than 30 minutes of steps between two; one step more is not needed."""
    pace = CommitPace(None, done=0, step_s=step_s, commit_s=commit_s)
    apart_s = pace.every * step_s
    assert pace.every == 1 or apart_s <= MOST_S, f"{apart_s} s of steps can be lost"
    assert pace.share <= SHARE * (1 + 1e-9) or apart_s + step_s > MOST_S, f"{pace.share} of a run, {apart_s} s apart"
    fewer = pace.every - 1
    assert fewer == 0 or commit_s / (fewer * step_s + commit_s) > SHARE, f"{fewer} steps apart would do"


@given(st.integers(1, 9), st.integers(0, 30))
def test_a_number_of_steps_is_that_number(every: int, done: int) -> None:
    """P3: steps that the number divides, whatever they take, also after a resume."""
    pace = CommitPace(every, done=done, step_s=1000.0, commit_s=1000.0)
    for number in range(done + 1, done + 30):
        assert pace.due(number) == (number % every == 0)


def test_the_pace_follows_what_is_measured() -> None:
    """P3: the plan decides until the first commit, the clock bounds what a slow drive can cost."""
    clock = [0.0]
    pace = CommitPace(None, done=100, step_s=1.0, commit_s=0.1, now=lambda: clock[0])
    assert pace.every == 10
    assert next(n for n in range(101, 120) if pace.due(n)) == 110
    for _ in range(10):
        pace.stepped(2.0)
    pace.committed(110, 1.0)
    assert pace.every == 50, "2 s a step and 1 s a commit"
    assert next(n for n in range(111, 200) if pace.due(n)) == 160
    clock[0] += MOST_S - 1
    assert pace.due(112), "half an hour would be over before the step after this one"
    for _ in range(10):
        pace.stepped(4.0)
    assert pace.every == 33, "3 s a step on average"


def test_the_words_name_steps_seconds_and_share() -> None:
    """P5: told beforehand; where the bound of 30 minutes costs more than 1 %, it is said."""
    cheap = CommitPace(None, done=0, step_s=2.0, commit_s=0.5)
    assert re.search(r"every 25 steps \(about 50\.\d* s, costs 0\.99 %\).*commit_every: auto", cheap.plan_line(1000))
    assert "after the last step, and on Ctrl-C" in cheap.plan_line(25)
    dear = CommitPace(None, done=0, step_s=20.0, commit_s=300.0).plan_line(1000)
    assert "every 90 steps" in dear and "costs 14 %, which is the 30 minutes" in dear, dear
    fixed = CommitPace(7, done=0, step_s=1.0, commit_s=1.0).plan_line(1000)
    assert "every 7 steps" in fixed and "costs 12 %)" in fixed and "commit_every: 7" in fixed, fixed


@pytest.fixture
def _quiet(known_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def state(root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c")]
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


@pytest.mark.usefixtures("_quiet")
def test_a_commit_costs_what_has_to_move(run_file: RunFile) -> None:
    """P5: more in RAM, and updates that are late, cost more; both are in the prediction."""

    def predicted(**changes: Any) -> float:
        run = load_run(run_file({**TIGHT, "tiers.host_memory": "64MiB", **changes}))
        return predicted_commit_s(prepare(run).plan, assumed_hardware())

    spilled, resident = predicted(**{"tiers.resident": 0}), predicted(**{"tiers.resident": 1})
    clipped = predicted(**{"tiers.resident": 0, "train.max_grad_norm": 1.0})
    assert 0 < spilled < resident, f"{spilled} s with nothing in RAM, {resident} s with all"
    assert spilled < clipped, f"{spilled} s without late updates, {clipped} s with"


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    "clip", [pytest.param(None, id="fused", marks=pytest.mark.slow), pytest.param(0.5, id="clipped")]
)
def test_how_often_a_run_commits_changes_no_bit(run_file: RunFile, tmp_path: Path, clip: float | None) -> None:
    """P1, P3: `auto` (which no two machines decide alike), every step, never: and going on from any of them."""
    states, losses = {}, {}
    for name, every, stop in (("auto", "auto", 3), ("each", 1, 3), ("end", 1000, 8), ("third", 3, 5)):
        folder = tmp_path / name
        where = {"tiers.nvme": str(folder / "nvme"), "output.dir": str(folder), "train.max_grad_norm": clip}
        for steps, resume in ((stop, False), (8, True)):
            changes = {**TIGHT, **where, "train.commit_every": every, "train.steps": steps}
            assert train(load_run(run_file(changes)), resume=resume, console=Console(quiet=True)) == 0
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        losses[name], states[name] = [row["loss"] for row in rows], state(folder / "nvme")
        committed = [row["step"] for row in rows if row["commit_s"] is not None]
        assert committed[-1] == 8 and stop in committed, committed
        assert all(row["commit_s"] is None or 0 < row["commit_s"] < 60 for row in rows)
        if name == "each":
            assert committed == list(range(1, 9))
        if name == "third":
            assert committed == [3, 5, 6, 8]
    for name in states:
        assert losses[name] == losses["each"], f"losses differ between {name} and each"
        assert states[name] == states["each"], f"states differ between {name} and each"


@pytest.mark.usefixtures("_quiet")
def test_a_run_says_when_it_commits_and_what_that_took(run_file: RunFile) -> None:
    """P5: one line at the start, one at the end."""
    said = io.StringIO()
    console = Console(file=said, width=300)
    run = load_run(run_file({**TIGHT, "train.commit_every": 2, "train.steps": 5}))
    assert train(run, resume=False, console=console) == 0
    text = said.getvalue()
    assert re.search(r"Commits: every 2 steps \(about .*, costs [\d.e+]+ %\)", text), text
    assert re.search(r"Done.*over 5 steps; 3 commits took .* \([\d.]+ % of the time\)", text), text
