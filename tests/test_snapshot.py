"""A snapshot carries a run to another machine, drive or budget, to the same bits, or is refused.

Scope: `megatrain export --format zarr` and `megatrain import`: layout, round trip, what is refused and by which name.
Not here: model folders (`test_export.py`), resuming in place (`test_run.py`).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from committed_runs import QUIET, TIGHT, parameters, run_in, same_bits, trained, untrained
from conftest import RunFile
from models import MODELS

import megatrain.goodbye
import megatrain.trainer
from megatrain import cli
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.programs import KINDS
from megatrain.snapshot import chunk_shape, export_snapshot, import_snapshot, regions
from tiering.errors import DamagedStateError, TieringError
from tiering.store import BlockStore

pytestmark = pytest.mark.usefixtures("known_machine")

GPT2 = {**MODELS["gpt2"], "resid_pdrop": 0.1}
PART = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def at(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model.config": GPT2, "output.dir": str(folder), "tiers.nvme": str(folder / "nvme"), **changes}


def imported(run_file: RunFile, snapshot: Path, changes: dict[str, Any]) -> int:
    return import_snapshot(snapshot, load_run(run_file({**TIGHT, **changes})), QUIET)


def differing(a: Path, b: Path) -> list[str]:
    """Kinds and names whose committed bits differ between two run folders."""
    found = []
    for kind in KINDS:
        ours, theirs = (parameters(run_in(folder).tiers.nvme[0], kind) for folder in (a, b))
        assert ours.keys() == theirs.keys()
        found += [f"{kind}/{name}" for name in ours if not same_bits(ours[name], theirs[name])]
    return found


@pytest.fixture
def snapshot(run_file: RunFile, tmp_path: Path) -> Path:
    """A snapshot of step 2; the run it is of lies in `first`."""
    run_dir = trained(run_file, at(tmp_path / "first", **{"train.steps": 2}))
    return export_snapshot(run_dir, tmp_path / "snapshot", force=False, console=QUIET)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_a_run_that_moved_goes_on_to_the_bits_of_one_that_never_did(
    run_file: RunFile, tmp_path: Path, clip: float | None
) -> None:
    """P3, CK-01: 3 steps, snapshot, import under another budget and resident share, 3 more; against 6, with dropout."""
    base = {"train.max_grad_norm": clip}
    straight = trained(run_file, at(tmp_path / "straight", **base, **{"train.steps": 6}))
    first = trained(run_file, at(tmp_path / "first", **base, **{"train.steps": 3}))
    snapshot = export_snapshot(first, tmp_path / "deep/snapshot", force=False, console=QUIET)
    shutil.rmtree(first)
    there = {"tiers.resident": 0.5, "tiers.host_memory": "16MiB", "train.steps": 6}
    moved = at(tmp_path / "moved", **base, **there)
    assert imported(run_file, snapshot, moved) == 3
    moved_dir = trained(run_file, moved, resume=True)
    assert differing(straight, moved_dir) == []
    losses = [
        [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()][-3:]
        for folder in (straight, moved_dir)
    ]
    assert losses[0] == losses[1]


def test_an_import_onto_two_drives_has_the_same_bits(run_file: RunFile, tmp_path: Path, snapshot: Path) -> None:
    """P1: another layout of drives; the store is whole at its final place."""
    folders = [str(tmp_path / "moved/a"), str(tmp_path / "moved/b")]
    there = at(tmp_path / "out", **{"tiers.nvme": folders})
    assert imported(run_file, snapshot, there) == 2
    for kind in KINDS:
        ours, theirs = parameters(tmp_path / "first/nvme", kind), parameters(Path(folders[0]), kind)
        assert ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours), kind
    trained(run_file, {**there, "train.steps": 3}, resume=True)


def test_a_snapshot_is_zarr_under_the_parameters_names(tmp_path: Path, snapshot: Path) -> None:
    """IO-09: read by zarr, every value equal; every chunk is there, zeros too; NaN is what a lost one would read."""
    group = zarr.open_group(snapshot, mode="r")
    for kind in KINDS:
        for name, values in parameters(tmp_path / "first/nvme", kind).items():
            array: Any = group[f"{kind}/{name}"]
            assert array.shape == tuple(values.shape) and array.dtype == np.float32
            assert np.isnan(array.metadata.fill_value)
            assert array.nchunks == array.nchunks_initialized, f"{kind}/{name}"
            assert same_bits(torch.from_numpy(np.asarray(array[...])), values), f"{kind}/{name}"
    told = json.loads((snapshot / "snapshot.json").read_text())
    assert (told["step"], told["run"]["updates"], told["config"]["model_type"]) == (2, 2, "gpt2")
    assert told["parameters"][PART] == [32, 128] and told["identity"]["numerics"]["train"]["seed"] == 0


def test_fresh_moments_are_written_not_left_out(run_file: RunFile, tmp_path: Path) -> None:
    """IO-09: a state of step 0 is all zeros in its moments, and takes its room all the same."""
    run_dir = untrained(run_file, at(tmp_path / "fresh"))
    snapshot = export_snapshot(run_dir, tmp_path / "snapshot", force=False, console=QUIET)
    held = sum(path.stat().st_size for path in (snapshot / "exp_avg").rglob("c/**/*") if path.is_file())
    assert held >= sum(values.nbytes for values in parameters(run_dir / "nvme", "exp_avg").values())
    assert imported(run_file, snapshot, at(tmp_path / "moved")) == 0
    assert differing(run_dir, tmp_path / "moved") == []


def chunk_of(snapshot: Path, kind: str = "exp_avg") -> Path:
    return next(path for path in sorted((snapshot / kind / PART / "c").rglob("*")) if path.is_file())


def flip(snapshot: Path) -> None:
    data = bytearray(chunk_of(snapshot).read_bytes())
    data[5] ^= 1
    chunk_of(snapshot).write_bytes(data)


def overwrite(snapshot: Path, value: float) -> None:
    array: Any = zarr.open_group(snapshot, mode="r+")[f"weight/{PART}"]
    array[3, 7] = value


def edit(snapshot: Path, **changes: Any) -> None:
    told = json.loads((snapshot / "snapshot.json").read_text())
    (snapshot / "snapshot.json").write_text(json.dumps({**told, **changes}))


DAMAGES: dict[str, tuple[Any, str]] = {
    "a lost chunk": (lambda s: chunk_of(s).unlink(), rf"exp_avg of {PART}.*missing"),
    "a cut chunk": (lambda s: chunk_of(s).write_bytes(chunk_of(s).read_bytes()[:100]), rf"exp_avg of {PART}"),
    "a flipped bit": (flip, rf"exp_avg of {PART}.*[Dd]igest"),
    "a lost array": (lambda s: shutil.rmtree(s / "exp_avg_sq" / PART), rf"exp_avg_sq of {PART} is missing"),
    "no number": (lambda s: overwrite(s, np.nan), rf"weight of {PART}: element {3 * 128 + 7} is nan"),
    "infinity": (lambda s: overwrite(s, -np.inf), rf"weight of {PART}: element {3 * 128 + 7} is -inf"),
    "a description cut short": (
        lambda s: (s / "snapshot.json").write_text((s / "snapshot.json").read_text()[:200]),
        r"snapshot\.json is damaged",
    ),
    "another format": (lambda s: edit(s, format=9), r"snapshot\.json is damaged: format"),
}


SLOW = ("a cut chunk", "infinity", "another format", "a larger model", "another config", "another batch")
"""Cases that differ little from a quick one."""


def cases(names: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("damage", cases(DAMAGES))
def test_a_damaged_snapshot_is_refused_by_name_and_leaves_no_store(
    run_file: RunFile, tmp_path: Path, snapshot: Path, damage: str
) -> None:
    """IO-10, IO-12: no value is made up for one that is lost; what was begun is removed."""
    harm, words = DAMAGES[damage]
    harm(snapshot)
    with pytest.raises(DamagedStateError, match=words) as refused:
        imported(run_file, snapshot, at(tmp_path / "moved"))
    assert "Fix: " in str(refused.value) and "\n" not in str(refused.value), refused.value
    assert not (tmp_path / "moved/nvme").exists()
    assert not list((tmp_path / "moved").glob(".*"))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a smaller model": (
        {"model.config": {**GPT2, "n_layer": 2}},
        r"transformer\.h\.2.*does not know|does not know.*h\.2",
    ),
    "a larger model": (
        {"model.config": {**GPT2, "n_layer": 4}},
        r"transformer\.h\.3\.\S+ has shape .*does not have it",
    ),
    "another shape": ({"model.config": {**GPT2, "n_inner": 64}}, r"mlp\.c_fc\.\w+ has shape .*has it with shape"),
    "another config": ({"model.config": {**GPT2, "resid_pdrop": 0.2}}, r"config\.resid_pdrop.*says 0\.2.*0\.1"),
    "another rate": ({"optimizer.lr": 0.5}, r"numerics\.optimizer\.lr: the run file says 0\.5, the snapshot 0\.0003"),
    "another batch": ({"train.batch": 8}, r"numerics\.train\.batch|tokens"),
    "other data": ({"data.seq_len": 32}, r"numerics\.data\.seq_len"),
}


@pytest.mark.parametrize("other", cases(OTHERS))
def test_a_snapshot_of_another_run_is_refused_by_the_name_of_what_differs(
    run_file: RunFile, tmp_path: Path, snapshot: Path, other: str
) -> None:
    """P3: what decides the numbers must be equal; no store is made."""
    changes, words = OTHERS[other]
    with pytest.raises(UserError, match=words):
        imported(run_file, snapshot, at(tmp_path / "moved", **changes))
    assert not (tmp_path / "moved/nvme").exists()


def test_a_store_that_is_there_is_never_overwritten(run_file: RunFile, tmp_path: Path, snapshot: Path) -> None:
    """CK-18: neither by an import nor by an export."""
    before = parameters(tmp_path / "first/nvme")
    with pytest.raises((UserError, TieringError), match="first/nvme"):
        imported(run_file, snapshot, at(tmp_path / "first"))
    with pytest.raises(UserError, match="is not empty"):
        export_snapshot(tmp_path / "first", snapshot, force=False, console=QUIET)
    export_snapshot(tmp_path / "first", snapshot, force=True, console=QUIET)
    with pytest.raises(UserError, match="holds the state of the run|neither a model folder"):
        export_snapshot(tmp_path / "first", tmp_path / "first/nvme", force=True, console=QUIET)
    assert all(same_bits(values, before[name]) for name, values in parameters(tmp_path / "first/nvme").items())


def test_an_import_that_dies_leaves_no_store_that_could_be_resumed(
    run_file: RunFile, tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: until the very end nothing has the store's name, so that no resume starts from fresh weights."""
    seen = []

    def dies(self: Any, *args: Any) -> None:
        seen.append((tmp_path / "moved/nvme").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockStore, "commit", dies)
    with pytest.raises(KeyboardInterrupt):
        imported(run_file, snapshot, at(tmp_path / "moved"))
    assert seen == [False] and not (tmp_path / "moved/nvme").exists()


@pytest.mark.parametrize("shape", [(), (7,), (100, 10), (3, 100, 10), (5, 3, 2, 400), (1, 1)])
@pytest.mark.parametrize("most", [4, 36, 400, 1200, 1 << 20])
def test_chunks_are_stretches_of_the_flat_array(
    shape: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is [lo, hi) of the flat array, together they are all of it, none is larger than allowed."""
    monkeypatch.setattr("megatrain.snapshot.chunk_shape", lambda shape: chunk_shape(shape, most))
    flat = np.arange(int(np.prod(shape)), dtype=np.float32)
    whole, done = flat.reshape(shape), 0
    for index, lo, hi in regions(shape):
        assert lo == done and 4 * (hi - lo) <= most, (shape, index)
        assert np.array_equal(whole[index].reshape(-1), flat[lo:hi]), (shape, index)
        done = hi
    assert done == flat.size


def test_tensors_larger_than_a_part_come_back_whole(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: many chunks a tensor, the last ones smaller; the same bits."""
    run_dir = trained(run_file, at(tmp_path / "first", **{"train.steps": 1}))
    monkeypatch.setattr("megatrain.snapshot.chunk_shape", lambda shape: chunk_shape(shape, 4000))
    snapshot = export_snapshot(run_dir, tmp_path / "snapshot", force=False, console=QUIET)
    assert len(list((snapshot / "weight" / PART / "c").rglob("*/*"))) > 3
    monkeypatch.undo()
    monkeypatch.setattr("megatrain.snapshot.chunk_shape", lambda shape: chunk_shape(shape, 5300))
    monkeypatch.setattr("megatrain.prepare.time_units", lambda *args: {})
    assert imported(run_file, snapshot, at(tmp_path / "moved")) == 1
    assert differing(run_dir, tmp_path / "moved") == []


def test_the_commands_write_and_read_a_snapshot(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`megatrain export --format zarr`, `megatrain import`, as typed; the way to go on is printed."""
    run_dir = untrained(run_file, at(tmp_path / "first"))
    path = run_file({**TIGHT, **at(tmp_path / "moved")}, "moved.yaml")
    for args, words in (
        (["export", run_dir, "-o", tmp_path / "snapshot", "--format", "zarr"], "snapshot: step 0"),
        (["import", tmp_path / "snapshot", path], "--resume"),
    ):
        monkeypatch.setattr(sys, "argv", ["megatrain", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        assert not stopped.value.code and words in out, err + out
    assert differing(run_dir, tmp_path / "moved") == []
