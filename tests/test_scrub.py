"""`megatrain check` finds all that is wrong with a state, wherever it is, and nothing where nothing is wrong.

Scope: `tiering/scrub.py` and `megatrain/check.py`; truncated and flipped bytes in every file of a store.
Not here: what a run notices while it reads (`test_checksums.py`).
"""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from committed_runs import run_in, trained
from conftest import RunFile
from rich.console import Console
from store_bytes import IDENTITY, PAGE, block, content, get_all, listing, put_all, sync, unlike
from typer.testing import CliRunner

from megatrain.check import check_state
from megatrain.cli import app
from megatrain.errors import UserError
from tiering import checksums, chunk_files, scrub
from tiering.drives import MARKER_NAME
from tiering.errors import TieringError, WrongStateError
from tiering.store import BlockStore

GRAIN, CHUNK = 2 * PAGE, 4 * PAGE
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "GRAIN_BYTES", GRAIN)
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(scrub, "PIECE_BYTES", CHUNK)


def made(tmp_path: Path, drives: int, steps: int = 2) -> tuple[list[Path], dict[str, bytes]]:
    """The folders of a store with two units, and what its last commit holds."""
    folders = [tmp_path / f"drive{number}" for number in range(drives)]
    blocks = [block(unit, kind, pages) for unit, pages in (("L0", 9), ("norm", 1)) for kind in ("weight", "exp_avg")]
    with BlockStore.create(folders[0], blocks, identity=IDENTITY, others=folders[1:]) as store:
        for step in range(1, steps + 1):
            wanted = content(store, step)
            put_all(store, wanted)
            store.commit(step, {"step": step}, sync)
    return folders, wanted


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def committed_file(folders: list[Path], name: str, chunk: int = 0) -> Path:
    """The file behind the link that zarr reads."""
    return Path(os.path.realpath(folders[0] / name / "c" / str(chunk)))


@pytest.mark.parametrize("drives", [1, 2])
def test_a_sound_state_is_clean_and_left_as_it_is(tmp_path: Path, drives: int) -> None:
    """I9: everything is read, nothing is written, no lock is needed."""
    folders, wanted = made(tmp_path, drives)
    before = listing(tmp_path)
    with BlockStore.open(folders[0], others=folders[1:]):
        report = check_state(folders[0], folders[1:], QUIET)
    assert report.clean and report.found is not None
    assert (report.found.step, report.found.blocks, report.found.checksums) == (2, 4, True)
    assert report.found.read_bytes == sum(map(len, wanted.values()))
    assert report.found.links == () and listing(tmp_path) == before


def test_all_damage_is_found_grain_by_grain(tmp_path: Path) -> None:
    """P3: block, file, offset, bytes, tensors and step of each; the rest of the block is not blamed."""
    folders, _ = made(tmp_path, 1)
    paths = {name: committed_file(folders, name) for name in ("L0/weight", "L0/exp_avg", "norm/weight")}
    for name, at in (("L0/weight", 0), ("L0/weight", 1), ("L0/weight", 3 * GRAIN), ("norm/weight", 7)):
        flip(paths[name], at)
    os.truncate(paths["L0/exp_avg"], 5 * PAGE)
    report = check_state(folders[0], [], QUIET)
    assert report.found is not None
    found = [(d.block, d.path, d.offset, d.nbytes, d.tensors, bool(d.wanted)) for d in report.found.damage]
    assert found == [
        ("L0/weight", paths["L0/weight"], 0, GRAIN, ("L0.w", "L0.b"), True),
        ("L0/weight", paths["L0/weight"], 3 * GRAIN, GRAIN, (), True),
        ("L0/exp_avg", paths["L0/exp_avg"], 5 * PAGE, 4 * PAGE, (), False),
        ("norm/weight", paths["norm/weight"], 0, PAGE, ("norm.w", "norm.b"), True),
    ]
    text = _text(report)
    for part in ("block L0/weight of step 2", str(paths["norm/weight"]), "L0.w, L0.b", "damaged: 4 places in 3 blocks"):
        assert part in text, text


def _text(report: Any) -> str:
    console = Console(width=400, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        report.render(console)
        return console.export_text()


@pytest.mark.parametrize("drives", [1, 2])
def test_every_file_of_a_store_can_be_flipped_or_cut(tmp_path: Path, drives: int) -> None:
    """P3, IO-12: each is a typed error for a run, or harmless for its bytes; `check` finds all that is not harmless."""
    folders, wanted = made(tmp_path / "base", drives)
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
    ]
    seen = {"error": 0, "harmless": 0}
    for path in files:
        size = path.stat().st_size
        places = sorted({0, size // 2, size - 1} if size else {0})
        for change in [*places, "cut", "empty", "gone"]:
            shutil.rmtree(tmp_path / "now", ignore_errors=True)
            shutil.copytree(tmp_path / "base", tmp_path / "now", symlinks=True)
            now = [tmp_path / "now" / folder.name for folder in folders]
            target = tmp_path / "now" / path.relative_to(tmp_path / "base")
            if not _changed(target, change):
                continue
            seen[_judge(now, target, wanted, f"{path.name}, {change}")] += 1
    assert min(seen.values()) > 20, seen


def _changed(path: Path, change: object) -> bool:
    """Is there such a change?"""
    size = path.stat().st_size
    if change == "gone":
        path.unlink()
    elif size == 0:
        return False
    elif change in ("cut", "empty"):
        os.truncate(path, size - 1 if change == "cut" else 0)
    else:
        assert isinstance(change, int)
        flip(path, change)
    return True


def _judge(folders: list[Path], target: Path, wanted: dict[str, bytes], what: str) -> str:
    """What a run and `check` make of a changed file; neither may be wrong about the other."""
    try:
        report = check_state(folders[0], folders[1:], QUIET)
        found = [damage.path for damage in report.found.damage] if report.found else [target]
    except (UserError, TieringError):
        found = [target]
    try:
        with BlockStore.open(folders[0], others=folders[1:]) as store:
            assert unlike(wanted, get_all(store)) == [], f"{what}: wrong bytes were read, and nobody noticed"
            assert (store.step, dict(store.run)) == (2, {"step": 2}), what
    except TieringError as error:
        assert target.name in str(error) or target.parent.name in str(error) or "manifest" in what, f"{what}: {error}"
        assert found or target.name == ".lock", f"{what}: a run says {error}, check says nothing"
        return "error"
    if found:
        assert found == [target] and target.name == "zarr.json", f"{what}: a run is content, check blames {found}"
    return "harmless"


def test_unlike_markers_and_missing_drives_are_told(tmp_path: Path) -> None:
    """Several drives: a marker that is not its own, and a folder that was not given."""
    folders, _ = made(tmp_path, 2)
    with pytest.raises(WrongStateError, match="drive 1 of the store .* is missing"):
        check_state(folders[0], [], QUIET)
    flip(folders[1] / MARKER_NAME, 12)
    with pytest.raises(WrongStateError, match=r"drive 1 .* is missing"):
        check_state(folders[0], folders[1:], QUIET)


def test_links_and_metadata_for_zarr_are_looked_at(tmp_path: Path) -> None:
    """IO-23: a link that a crash left behind is told, not called damage; metadata that lies is damage."""
    folders, _ = made(tmp_path, 1)
    link = folders[0] / "L0/weight/c/0"
    link.unlink()
    os.symlink("../../../.slots/b/L0/weight", link)
    report = check_state(folders[0], [], QUIET)
    assert report.clean and report.found is not None and report.found.links == (link,)
    assert "1 links do not point at the commit" in _text(report)
    document = folders[0] / "L0/weight/zarr.json"
    document.write_text(document.read_text().replace("9216", "9215"))
    report = check_state(folders[0], [], QUIET)
    assert report.found is not None and [damage.path for damage in report.found.damage] == [document]


def test_a_store_without_checksums_says_so(tmp_path: Path) -> None:
    """A flipped bit cannot be seen there, a short file can."""
    root = tmp_path / "old"
    BlockStore.create(root, [block("L0", "weight", 9)], identity={}, checksums=False).close()
    flip(root / ".slots/a/L0/weight", 5)
    report = check_state(root, [], QUIET)
    assert report.clean and "no checksums" in _text(report)
    os.truncate(root / ".slots/a/L0/weight", PAGE)
    assert not check_state(root, [], QUIET).clean


def test_a_commit_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: bytes that a later step overwrites are not called damage."""
    folders, _ = made(tmp_path, 1)
    real, once = scrub._Scrub._read_piece, threading.Event()

    with BlockStore.open(folders[0]) as store:

        def slow(self: Any, *args: Any) -> None:
            if not once.is_set():
                once.set()
                for step in (3, 4):
                    put_all(store, content(store, step))
                    store.commit(step, {}, sync)
            real(self, *args)

        monkeypatch.setattr(scrub._Scrub, "_read_piece", slow)
        with pytest.raises(WrongStateError, match=r"committed step [34] while step 2 was being read"):
            check_state(folders[0], [], QUIET)


def test_the_command_ends_with_0_1_or_2(run_file: RunFile, known_machine: None, tmp_path: Path) -> None:
    """CF-05: clean, damaged, no store; the JSON has every place, for a run folder and for the folder of its state."""
    run_dir = trained(run_file, {})
    root = run_in(run_dir).tiers.nvme[0]
    runner = CliRunner()
    for path in (run_dir, root):
        done = runner.invoke(app, ["check", str(path), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["clean"] and json.loads(done.stdout)["step"] == 4
    path = committed_file([root], "model.layers.0/exp_avg")
    flip(path, 4000)
    done = runner.invoke(app, ["check", str(run_dir), "--json"])
    assert done.exit_code == 1, done.output
    (damage,) = json.loads(done.stdout)["damage"]
    assert (damage["block"], damage["path"], damage["offset"]) == ("model.layers.0/exp_avg", str(path), 0)
    assert any("layers.0" in name for name in damage["tensors"]), damage
    done = runner.invoke(app, ["check", str(run_dir)])
    assert done.exit_code == 1 and "damaged: 1 places in 1 blocks" in done.stdout, done.output
    (root / "manifest.json").write_text("{")
    assert runner.invoke(app, ["check", str(run_dir)]).exit_code == 1
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        done = runner.invoke(app, ["check", str(path)])
        assert done.exit_code == 2, done.output
