"""A run keeps the commits that it was told to keep, every command can read them, and it can go back to one.

Scope: `train.keep` and `train.keep_every` in whole runs, `--step`, `megatrain restore`, `megatrain check`.
Not here: calls that fail, power cuts, reflinks (`test_history.py`).
"""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, TIGHT, parameters, run_in, same_bits, trained
from conftest import RunFile
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import megatrain.goodbye
import megatrain.keeping
import megatrain.trainer
from megatrain.check import check_state
from megatrain.cli import app
from megatrain.committed import CommitWatch, at_step
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.keeping import room
from megatrain.prepare import prepare
from megatrain.programs import KINDS
from megatrain.report import PlanReport
from megatrain.trainer import train
from tiering.errors import DiskFullError
from tiering.history import History, kept_folders, kept_steps
from tiering.store import BlockStore

pytestmark = pytest.mark.usefixtures("known_machine")

KEEPS = {"train.keep": 2, "train.keep_every": 2, "train.commit_every": 100, "train.max_grad_norm": 1.0}


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def root_of(folder: Path) -> Path:
    return run_in(folder).tiers.nvme[0]


def in_folder(folder: Path, **more: Any) -> dict[str, Any]:
    return {"tiers.nvme": str(folder / "nvme"), "output.dir": str(folder), **more}


def same_state(one: Path, other: Path) -> list[str]:
    """What differs between two states, read through zarr."""
    wrong = []
    for kind in KINDS:
        a, b = parameters(one, kind), parameters(other, kind)
        assert a.keys() == b.keys() and a
        wrong += [f"{kind} of {name}" for name in a if not same_bits(a[name], b[name])]
    return wrong


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def committed(root: Path) -> int | None:
    with BlockStore.open(root, read_only=True) as store:
        return store.step


def commanded(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_kept_commit_has_the_bits_of_its_step(run_file: RunFile, tmp_path: Path) -> None:
    """P3: weights and both moments, as `export` gives them too; the steps that are kept commit, the oldest goes."""
    straight = trained(run_file, {**KEEPS, **in_folder(tmp_path / "run"), "train.steps": 7})
    root = root_of(straight)
    assert kept_steps(root) == [4, 6] and committed(root) == 7
    assert [row["step"] for row in rows(straight) if row["commit_s"] is not None] == [2, 4, 6, 7]
    stopped = trained(run_file, {**in_folder(tmp_path / "stopped"), "train.max_grad_norm": 1.0, "train.steps": 4})
    assert same_state(kept_folders([root], 4)[0], root_of(stopped)) == []
    assert same_state(root, root_of(stopped)) != [], "step 7 has the bits of step 4"
    for folder, step, out in ((straight, 4, "kept"), (straight, 7, "last"), (stopped, 4, "own")):
        commanded("export", folder, "-o", tmp_path / out, "--step", step)
    kept, last, own = (load_file(tmp_path / out / "model.safetensors") for out in ("kept", "last", "own"))
    assert all(torch.equal(kept[name], own[name]) for name in own)
    assert not all(torch.equal(last[name], own[name]) for name in own)


def test_every_command_reads_a_kept_commit(run_file: RunFile, tmp_path: Path) -> None:
    """P3: `eval`, `generate`, `export --format zarr`; an unknown step is refused with those that are there."""
    folder = trained(run_file, {**KEEPS, "train.steps": 5})
    text = run_in(folder).data.paths[0]
    losses = {step: json.loads(_stdout("eval", folder, "--data", text, "--step", step, "--json")) for step in (2, 4, 5)}
    assert [found["step"] for found in losses.values()] == [2, 4, 5]
    assert len({found["loss"] for found in losses.values()}) == 3, losses
    ways = [_stdout("generate", folder, "--prompt", "the", "--max-new-tokens", 3, "--step", n) for n in (2, 5)]
    assert all(text.startswith("the") for text in ways), ways
    commanded("export", folder, "-o", tmp_path / "zarr", "--format", "zarr", "--step", 2)
    assert json.loads((tmp_path / "zarr" / "snapshot.json").read_text())["step"] == 2
    with pytest.raises(UserError, match=r"--step 3: .*the last commit is step 5, kept are 2, 4\. Fix"):
        at_step(run_in(folder), 3)
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "zarr"), "--data", text, "--step", "2"])
    assert done.exit_code == 2, done.output
    inside = root_of(folder).parent
    done = CliRunner().invoke(app, ["export", str(folder), "-o", str(inside), "--step", "2", "--force"])
    assert done.exit_code == 2 and "would be lost" in done.output, done.output


def _stdout(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def test_check_reads_all_that_is_kept(run_file: RunFile) -> None:
    """P3: each is named; damage in one of them is found there, and told by exit code 1."""
    folder = trained(run_file, {**KEEPS, "train.steps": 4})
    report = check_state(folder, [], QUIET)
    assert report.clean and [kept.found and kept.found.step for kept in report.kept] == [2, 4]
    said = io.StringIO()
    report.render(Console(file=said, width=400))
    assert "kept step 2, " in said.getvalue() and "kept step 4, " in said.getvalue(), said.getvalue()
    root = kept_folders([root_of(folder)], 2)[0]
    flip(next((root / ".slots" / "a").rglob("weight")))
    report = check_state(folder, [], QUIET)
    assert not report.clean and report.found is not None and not report.found.damage
    assert [kept.clean for kept in report.kept] == [False, True]
    assert [kept["clean"] for kept in report.as_json()["kept"]] == [False, True]
    assert CliRunner().invoke(app, ["check", str(root_of(folder))]).exit_code == 1
    flip(Path(os.path.realpath(next(root_of(folder).glob("*/weight/c/0")))))
    said = io.StringIO()
    check_state(folder, [], QUIET).render(Console(file=said, width=400))
    assert "go on from the kept step 4 (megatrain restore) or a copy of this folder" in said.getvalue(), said.getvalue()


@pytest.mark.parametrize("clip", [None, 1.0], ids=["fused", "clipped"])
def test_a_restored_run_has_the_bits_of_one_that_never_went_back(
    run_file: RunFile, tmp_path: Path, clip: float | None
) -> None:
    """P1, P3: weights, moments, losses and what is kept; the log has the steps after it twice."""
    changes = {**KEEPS, **in_folder(tmp_path / "run"), "train.max_grad_norm": clip}
    folder = trained(run_file, {**changes, "train.steps": 7})
    root = root_of(folder)
    shutil.copytree(root, tmp_path / "straight", symlinks=True)
    said = commanded("restore", folder, "--step", 4).replace("\n", " ")
    assert "the state is that of step 4 again" in said and "step 7, the last commit until now, is gone" in said, said
    assert committed(root) == 4 and kept_steps(root) == [4, 6]
    assert same_state(root, kept_folders([root], 4)[0]) == []
    assert "Nothing to do" in commanded("restore", folder, "--step", 4)
    assert trained(run_file, {**changes, "train.steps": 7}, resume=True) == folder
    assert committed(root) == 7 and kept_steps(root) == [4, 6]
    assert same_state(root, tmp_path / "straight") == []
    found = [(row["step"], row["loss"]) for row in rows(folder)]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7]
    assert found[4:7] == found[7:], found
    done = CliRunner().invoke(app, ["restore", str(folder), "--step", "3"])
    assert done.exit_code == 2 and "step 3 is not kept; those that are: 4, 6" in done.output, done.output


def test_a_commit_that_was_not_kept_any_more_is_kept_by_the_resume(run_file: RunFile, tmp_path: Path) -> None:
    """P3: a run that died between a commit and keeping it; what was left half made is removed."""
    changes = {**KEEPS, **in_folder(tmp_path / "run")}
    plain = {key: value for key, value in changes.items() if "keep" not in key}
    folder = trained(run_file, {**plain, "train.steps": 4})
    root = root_of(folder)
    half = kept_folders([root], 2)[0] / ".slots" / "a"
    half.mkdir(parents=True)
    assert trained(run_file, {**changes, "train.steps": 4}, resume=True) == folder
    assert kept_steps(root) == [4] and not half.exists()
    assert same_state(root, kept_folders([root], 4)[0]) == []


def test_a_full_disk_while_a_commit_is_kept_loses_no_commit(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3, IO-09: the run ends with a typed error that names the step; its row is logged; a resume goes on."""
    real = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if "step-00000004" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    changes = {**KEEPS, **in_folder(tmp_path / "run"), "train.steps": 6}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DiskFullError, match=r"keeping step 4: .*reserving \d+ bytes.*The committed state is step 4"
        ):
            train(load_run(run_file({**TIGHT, **changes})), resume=False, console=QUIET)
    root = tmp_path / "run" / "nvme"
    assert committed(root) == 4 and kept_steps(root) == [2] and rows(tmp_path / "run")[-1]["step"] == 4
    trained(run_file, changes, resume=True)
    assert committed(root) == 6 and kept_steps(root) == [4, 6]


def test_a_state_that_is_not_finite_is_not_kept_and_said(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: an update that overflows: the run goes on, and what was kept before stays."""
    keep = History.keep

    def spoilt(self: History, most: int) -> object:
        if self._store.step == 4:
            monkeypatch.setattr(History, "_first_not_finite", lambda *args: "w in block L0/weight at byte 0")
        return keep(self, most)

    monkeypatch.setattr(History, "keep", spoilt)
    said = io.StringIO()
    run = load_run(run_file({**TIGHT, **KEEPS, "train.keep": 1, **in_folder(tmp_path / "run"), "train.steps": 6}))
    assert train(run, resume=False, console=Console(file=said, width=300)) == 0
    assert kept_steps(tmp_path / "run" / "nvme") == [2]
    assert "step 4 is not kept: w in block L0/weight at byte 0 is not a finite number. Kept are 2" in said.getvalue()


def test_the_room_of_kept_commits_is_asked_for_beforehand(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: two slots and one for each that is kept; the plan says so, and a resume asks for those still to come."""
    plain = {key: value for key, value in KEEPS.items() if "keep" not in key}
    without, with_two = (prepare(load_run(run_file({**TIGHT, **changes}))) for changes in (plain, KEEPS))
    (state,), (more,) = room(without).values(), room(with_two).values()
    slot = sum(block.nbytes for block in with_two.plan.workload.of_life("durable"))
    assert more - state == 2 * slot, f"{state} bytes without, {more} with two of {slot}"
    notes = PlanReport(prepared=with_two).forecast().notes
    assert any(note.startswith("keeps 2 commits, one every 2 steps") for note in notes), notes
    assert not any("keeps" in note for note in PlanReport(prepared=without).forecast().notes)
    folder = trained(run_file, {**KEEPS, "train.steps": 3})
    asked: list[dict[Path, int]] = []
    monkeypatch.setattr(megatrain.keeping, "check_rooms", asked.append)
    trained(run_file, {**KEEPS, "train.steps": 4}, resume=True)
    assert asked == [{root_of(folder): slot}], asked


def test_a_kept_commit_that_is_removed_while_it_is_read_is_told_as_that(run_file: RunFile) -> None:
    """P3: by name, not as damage."""
    folder = trained(run_file, {**KEEPS, "train.steps": 4})
    watch = CommitWatch(at_step(run_in(folder), 2))
    watch.check()
    with BlockStore.open(root_of(folder)) as store:
        History(store).remove(2)
    with pytest.raises(UserError, match="step-00000002: the training has removed this kept commit"):
        watch.check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.keep": 3}, "nothing says which. Fix: keep_every"),
        ({"train.keep_every": 3}, "keep is 0. Fix: keep: 1"),
        ({"train.keep": -1, "train.keep_every": 3}, "must be >= 0"),
        ({"train.keep": 1, "train.keep_every": 0}, "must be >= 1"),
    ],
)
def test_settings_that_keep_nothing_are_refused(run_file: RunFile, changes: dict[str, Any], words: str) -> None:
    """CF-04: how many and which belong together."""
    with pytest.raises(UserError, match=words):
        load_run(run_file(changes))
