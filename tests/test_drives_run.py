"""A training over several folders has the bits of one over a single folder, and knows its drives again.

Scope: `train`, `generate` and `verify` with several folders in `tiers.nvme`; the rates that they are planned with.
Not here: the store alone (`test_several_drives.py`), measuring (`test_measure.py`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import RunFile
from models import MODELS
from rich.console import Console
from test_hardware_file import machine

import megatrain.goodbye
import megatrain.prepare
import megatrain.trainer
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.fit import drives_of, refuse_early
from megatrain.generate import generate
from megatrain.prepare import prepare
from megatrain.trainer import train
from megatrain.verify import verify
from tiering import chunk_files, place
from tiering.errors import DiskFullError, WrongStateError
from tiering.hardware_file import HardwareFile, dump
from tiering.spread import rate_of

pytestmark = pytest.mark.usefixtures("known_machine")

TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB", "model.config": MODELS["llama"]}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample at the end of a run, and chunks of two pages, so that the blocks of a small model have several."""
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 8192)


def state(root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = sorted(f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c"))
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_several_folders_give_the_bits_of_one_also_in_parts(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P1, P3: where a byte lives is not state; the second part finds its drives in another order and place. Then
    text is generated, from the committed weights on all of them.
    """
    nvme = [tmp_path / name / "state" for name in "abc"]

    def run(name: str, steps: int, folders: list[Path], *, resume: bool = False, **more: Any) -> str:
        changes = {**TIGHT, "train.commit_every": 3, "train.steps": steps, "tiers.nvme": [str(f) for f in folders],
                   "output.dir": str(tmp_path / name), **more}  # fmt: skip
        assert train(load_run(run_file(changes)), resume=resume, console=Console(width=200)) == 0
        return capsys.readouterr().out

    alone = tmp_path / "one" / "state"
    run("straight", 5, [alone])
    said = run("parts", 2, nvme)
    assert "one drive gain nothing" in " ".join(said.split()), said
    wanted = {name for name in "abc" if list((tmp_path / name / "state/.slots").rglob("*.*"))}
    assert wanted == set("abc"), f"chunks lie on {wanted} alone"
    shutil.move(nvme[2], tmp_path / "moved")

    def too_late(run: object) -> None:
        raise AssertionError("a missing drive was found only after the run was prepared")

    with monkeypatch.context() as patch, pytest.raises(WrongStateError, match=rf"drive 2 .* was {nvme[2]}"):
        patch.setattr(megatrain.trainer, "prepare", too_late)
        run("parts", 5, nvme, resume=True)
    turned = [tmp_path / "moved", nvme[1], nvme[0]]
    run("parts", 5, turned, resume=True, **{"tiers.resident": 1})
    assert state(alone) == state(nvme[0]), "several drives changed the bits"
    assert losses(tmp_path / "straight") == losses(tmp_path / "parts")
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0, "seed": 0, "console": Console(quiet=True)}
    texts = {name: generate(tmp_path / name, "line", **options) for name in ("straight", "parts")}
    assert texts["straight"] == texts["parts"]


def test_a_run_is_refused_where_one_drive_has_no_room(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-06: before the data is prepared, with the folder and both sums."""
    nvme = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(place, "by_device", lambda folders: [[folder] for folder in folders])
    monkeypatch.setattr(place, "free_bytes", lambda path: 1000 if path == nvme[1] else 1 << 40)
    changes = {**TIGHT, "tiers.nvme": [str(folder) for folder in nvme], "output.dir": str(tmp_path / "out")}
    with pytest.raises(DiskFullError, match=rf"^{nvme[1]}: the store needs \d+ bytes, 1000 bytes are free"):
        train(load_run(run_file(changes)), resume=False, console=Console(quiet=True))
    assert not any(path.exists() for path in (*nvme, tmp_path / "out"))


def test_verify_works_on_the_same_drives_and_leaves_nothing(run_file: RunFile, tmp_path: Path) -> None:
    """P1: equal to the plain loop, over two folders."""
    nvme = [tmp_path / name / "state" for name in "ab"]
    changes = {**TIGHT, "tiers.nvme": [str(folder) for folder in nvme]}
    found = verify(load_run(run_file(changes)), 1, Console(quiet=True))
    assert found["identical"], found["differing"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "text.txt"]


def test_a_hardware_file_gives_each_folder_its_drive(run_file: RunFile, tmp_path: Path) -> None:
    """P5: by path where it holds one, else by order; drives that are not used do not count."""
    file = machine(drives=3)
    entries = [
        entry.model_copy(update={"path": path})
        for entry, path in zip(file.drives, ("/mnt/x", "/mnt/x/deep", "/mnt/z"), strict=True)
    ]
    file = file.model_copy(update={"drives": tuple(entries)})
    path = tmp_path / "hardware.json"
    dump(HardwareFile.model_validate_json(file.model_dump_json()), path)

    def run(*folders: str) -> Any:
        return load_run(run_file({"tiers.nvme": list(folders), "tiers.hardware": str(path)}))

    for folders, wanted in (
        (["/mnt/z/run", "/mnt/x/run"], [2, 0]),
        (["/mnt/x/deep/run", "/elsewhere"], [1, 1]),
        (["/elsewhere", "/somewhere", "/anywhere"], [0, 1, 2]),
        (["/mnt/z"], [2]),
    ):
        found = [entries.index(drive) for drive in drives_of(run(*folders), file)]
        assert found == wanted, f"{folders}: drives {found}, wanted {wanted}"
    with pytest.raises(UserError, match=r"knows 3 drives, and none for folder 4 .*/d/run"):
        refuse_early(run("/a/run", "/b/run", "/c/run", "/d/run"))

    prepared = prepare(run("/mnt/x/deep/a", "/mnt/x/deep/b", "/mnt/z/c"))
    rates = [entry.drive() for entry in entries]
    assert prepared.hardware.read.per_s == rates[1].read.per_s + rates[2].read.per_s
    assert [rate_of(drive) for drive in prepared.drives] == [
        rate_of(rates[1]) / 2,
        rate_of(rates[1]) / 2,
        rate_of(rates[2]),
    ]
