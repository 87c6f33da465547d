"""The benchmarks of a step, of its growth and of its rivals come out whole on tiny models.

Scope: `benchmarks/step.py`, `scaling.py`, `rivals/`, `child.py`, `presets.py`; no figure is compared with a time.
Not here: the other benchmarks (`test_benchmarks.py`), the tiered step itself (`test_run.py`).
"""

import doctest
import io
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import typer
from conftest import RunFile
from rich.console import Console

import benchmarks.presets
import benchmarks.result_page
import benchmarks.rivals.__main__ as rivals
import benchmarks.scaling
import benchmarks.step
from benchmarks.child import Ended, memory_group, os_bytes, peak_rss_bytes, reset_peak, run_child
from benchmarks.machine import Rates
from benchmarks.presets import llama, parameters
from benchmarks.yardsticks import RingSteps
from megatrain.config import load_run
from megatrain.console import run_app
from megatrain.inputs import every_token
from megatrain.model import build, find_units, model_config
from megatrain.prepare import prepare
from tiering import gds
from tiering.place import filesystem_of

MiB = 1 << 20
TINY = llama(hidden=64, layers=3, intermediate=192, vocabulary=256, head=16)
ROW = rivals.Row(model=TINY, batch=2, seq_len=32, limit_bytes=None)
KEYS = {
    "step_s", "compute_s", "io_s", "limit_s", "fraction", "read_bytes", "written_bytes", "bytes_per_param",
    "predicted_step_s", "peak_rss_bytes", "stalls", "plain_step_s", "predicted_read_bytes", "predicted_written_bytes",
    "rounds",
}  # fmt: skip
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs a command line in this process and returns exit code, stdout and stderr."""

    def run(app: typer.Typer, *args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            run_app(app, "program")
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


@pytest.fixture(autouse=True)
def quick_machine(known_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rate is measured where the test itself runs."""
    monkeypatch.setattr(gds, "probe", lambda path: "no GPU driver")
    for module in (rivals, benchmarks.step, benchmarks.scaling):
        monkeypatch.setattr(module, "drive_rates", lambda path: Rates(read_per_s=3, write_per_s=2, mixed_per_s=1))


def check_step(found: dict[str, Any], rounds: int) -> None:
    """P4: the figures of a step fit each other."""
    assert found.keys() >= KEYS, KEYS - found.keys()
    assert len(found["rounds"]) == rounds
    assert found["limit_s"] == max(found["compute_s"], found["io_s"]), found
    of_rounds = [max(row["compute_s"], row["io_s"]) / row["step_s"] for row in found["rounds"]]
    assert found["fraction"] == median(of_rounds), found
    assert min(found["step_s"], found["compute_s"], found["io_s"]) > 0, found
    moved = found["predicted_read_bytes"] + found["predicted_written_bytes"]
    assert found["io_bytes"] == moved, "the I/O alone is of exactly the step's bytes"


@pytest.mark.parametrize("clips", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_step_is_measured_beside_its_computing_and_its_io(
    tmp_path: Path, run_file: RunFile, invoke: Invoke, clips: bool, share: float
) -> None:
    """P5: bytes counted by the system are the plan's, within 1 %, whatever is resident; nothing is left behind."""
    changes = {"model.config": TINY, "data.seq_len": 32, "tiers.resident": share, "tiers.host_memory": "32MiB"}
    path = run_file(changes | ({"train.max_grad_norm": 1.0} if clips else {}))
    before = sorted(tmp_path.iterdir())
    code, out, err = invoke(benchmarks.step.app, path, "--steps", 2, "--in-a-row", 1, "--json")
    assert code == 0, err
    found = json.loads(out)
    check_step(found, 2)
    assert found["plain_step_s"] > 0 and found["resident_step_s"] > 0, found
    assert sorted(tmp_path.iterdir()) == before
    if filesystem_of(tmp_path).fs_type not in ("ext4", "xfs", "btrfs"):
        pytest.skip(f"bytes are not compared: {filesystem_of(tmp_path).fs_type} may have no direct I/O")
    for what in ("read_bytes", "written_bytes"):
        wanted = found[f"predicted_{what}"]
        assert abs(found[what] - wanted) <= 0.01 * wanted, f"{what}: {found[what]}, planned {wanted}"
    assert clips or share or found["bytes_per_param"] <= 28.0, found["bytes_per_param"]


def test_a_step_is_shown_as_tables_and_kept_as_a_page(tmp_path: Path, run_file: RunFile, invoke: Invoke) -> None:
    """Rule 10: a kept figure has the command, the machine, its drive before and after, and the commit beside it."""
    page = tmp_path / "page.md"
    options = ("--steps", 1, "--in-a-row", 1, "--markdown", page)
    code, out, err = invoke(benchmarks.step.app, run_file({"model.config": TINY}), *options)
    assert code == 0, err
    for said in ("round by round", "fraction", "bytes_per_param", "plan"):
        assert said in out, f"{said} is not in\n{out}"
        assert said in page.read_text(), f"{said} is not in\n{page.read_text()}"
    for said in ("python -m benchmarks.step", "commit: ", "processor: ", "drive before: read 3", "drive after: "):
        assert said in page.read_text(), f"{said} is not in\n{page.read_text()}"
    code, out, err = invoke(benchmarks.step.app, run_file({}), "--steps", 1, "--markdown", tmp_path / "none" / "p.md")
    assert code == 2 and "--markdown" in err, err


def test_what_does_not_fit_into_memory_is_left_out_and_said(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing is then timed on a ring of units, the plain loop is not run."""
    monkeypatch.setattr(benchmarks.step, "_free_memory", lambda: 0)
    found = benchmarks.step.measured(load_run(run_file({"model.config": TINY, "train.max_grad_norm": 1.0})), 1, 1)
    check_step(found, 1)
    assert found["plain_step_s"] is None and "are available" in found["plain_left_out"], found
    assert found["resident_step_s"] is None and "ring" in found["compute_how"], found


def test_a_ring_updates_every_unit_of_a_step(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed in place of a step that does not fit is all of the step."""
    prepared = prepare(load_run(run_file({"model.config": TINY})))
    with closing(RingSteps(prepared)) as ring:
        updated: list[str] = []
        inner = ring._update
        monkeypatch.setattr(
            ring, "_update", lambda action, *rest: (updated.append(action.operands[0].block), inner(action, *rest))
        )
        assert ring.compute_s([every_token(torch.zeros(4, 16, dtype=torch.int64))] * 2) > 0
    wanted = {f"{unit.name}/weight" for unit in prepared.units if unit.nbytes}
    assert set(updated) == wanted, f"{set(updated)}, not {wanted}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give RUN.yaml, or --case with --path"),
        (("--case", "io"), "give RUN.yaml, or --case with --path"),
        (("none.yaml",), "none.yaml"),
        (("--case", "fast", "--path", "."), "fast"),
    ],
)
def test_a_step_without_a_run_is_refused(invoke: Invoke, options: tuple[str, ...], said: str) -> None:
    code, out, err = invoke(benchmarks.step.app, *options)
    assert (code, out) == (2, "") and said in err, err


@pytest.mark.parametrize("changes", [{"train.precision": "bf16"}, {"train.compile": True}], ids=str)
def test_a_step_that_the_yardsticks_do_not_compute_is_refused(
    run_file: RunFile, invoke: Invoke, changes: dict[str, Any]
) -> None:
    """P4: a fraction of another step's limit is no figure."""
    code, out, err = invoke(benchmarks.step.app, run_file(changes))
    assert (code, out) == (2, "") and "--set train.precision=fp32" in err, err


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_preset_has_the_tokens_and_the_share_that_it_is_asked_for(tmp_path: Path, share: float) -> None:
    """The presets are run files as a person writes them; at least 250M parameters."""
    run = benchmarks.step.preset("compute", tmp_path, share, 1024)
    assert (run.train.batch * run.data.seq_len, run.tiers.resident) == (1024, share)
    assert list(tmp_path.iterdir()) == []
    assert parameters(llama()) >= 250_000_000


def test_the_sums_of_the_presets_come_out_as_written() -> None:
    """Rule 10."""
    for module in (benchmarks.presets, benchmarks.scaling, benchmarks.result_page):
        assert doctest.testmod(module).failed == 0, module


@pytest.mark.parametrize("model", [TINY, rivals.ROWS["250m"].model])
def test_parameters_are_counted_as_the_model_has_them(model: dict[str, Any]) -> None:
    """The formula of the presets against the model itself."""
    found = sum(parameter.numel() for parameter in build(model_config(model)).parameters())
    assert found == parameters(model), f"{found}, by the formula {parameters(model)}"


@pytest.mark.slow
def test_growth_is_shown_on_one_page(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured beside predicted, in JSON, as a table and as a plot; each run in a folder of its own, gone after it."""
    monkeypatch.setattr(benchmarks.scaling, "SIZES", {"1M": TINY, "2M": TINY | {"num_hidden_layers": 6}})
    monkeypatch.setattr(benchmarks.scaling, "OF_TOKENS", "1M")

    def in_this_process(size: str, tokens: int, path: Path, steps: int) -> dict[str, Any]:
        folder = tmp_path / f"{size}-{tokens}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return benchmarks.scaling.measured(
            benchmarks.scaling._run(benchmarks.scaling.SIZES[size], tokens, folder), steps
        )

    monkeypatch.setattr(benchmarks.scaling, "_in_process", in_this_process)
    plot = tmp_path / "growth.png"
    page = tmp_path / "growth.md"
    options = ("--path", tmp_path, "--steps", 1, "--tokens", 32, "--tokens", 64, "--markdown", page)
    code, out, err = invoke(benchmarks.scaling.app, *options, "--plot", plot, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [row["tokens"] for row in report["tokens"]] == [32, 64]
    assert [row["parameters"] for row in report["parameters"]] == [
        parameters(TINY),
        parameters(TINY | {"num_hidden_layers": 6}),
    ]
    assert all(row["step_s"] > 0 and row["predicted_step_s"] > 0 for rows in report.values() for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "(growth.png)" in page.read_text() and "A straight line" in page.read_text(), page.read_text()
    console = Console(width=120, record=True, file=io.StringIO())
    benchmarks.scaling.render(report, console)
    assert "A straight line" in console.export_text()


def test_growth_of_a_size_that_is_none_is_refused(tmp_path: Path, invoke: Invoke) -> None:
    code, out, err = invoke(benchmarks.scaling.app, "--path", tmp_path, "--size", "7T")
    assert (code, out) == (2, "") and "Fix: one of 50M" in err, err


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The ways that need nothing but this environment, on one job."""
    ways = [way for way in rivals.WAYS if way != rivals.ZERO3]
    return rivals.compare(ROW, tmp_path_factory.mktemp("rivals"), ways, 4, arena=32 * MiB, timeout_s=200)


@pytest.mark.slow
def test_every_way_has_the_losses_of_the_plain_loop_to_the_last_bit(compared: list[dict[str, Any]]) -> None:
    """P1, and the memory-mapped rival is a fair one: same weights, tokens and numbers."""
    for row in compared:
        assert row["ended"] == "done", row
        assert row["equal_to_plain"] is True and row["furthest_ulp"] == 0, row
        assert len(row["losses"]) == len(row["steps_s"]) == 4, row
        assert row["step_s"] > 0 and row["peak_rss_bytes"] > 0 and row["bytes_per_param"] is not None, row
    assert [row["way"] for row in compared] == [way for way in rivals.WAYS if way != rivals.ZERO3]


@pytest.mark.slow
def test_a_comparison_is_written_with_the_machine_and_the_command(
    compared: list[dict[str, Any]], tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result says what it was seen on: command, processor, memory, drive before and after, day and commit."""
    monkeypatch.setattr(rivals, "compare", lambda *args, **kwargs: compared)
    file = tmp_path / "result.md"
    code, out, err = invoke(rivals.app, "--path", tmp_path, "--markdown", file, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["parameters"] == 247_497_728 and len(report["rows"]) == len(compared)
    text = file.read_text()
    for said in ("python -m benchmarks.rivals", "processor:", "memory:", "drive before:", "date:", "commit:", "equal"):
        assert said in text, f"{said} is not in\n{text}"
    assert all(f"| {row['way']} |" in text for row in compared), text
    monkeypatch.setenv("COLUMNS", "160")
    assert "plain torch in RAM" in invoke(rivals.app, "--path", tmp_path)[1]


def test_a_way_that_is_not_installed_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """DeepSpeed is no dependency: without its Python, or with one that has none, the row says so."""
    (row,) = rivals.compare(ROW, tmp_path, [rivals.ZERO3], 3, arena=32 * MiB)
    assert row["ended"] == "skipped: no --deepspeed-python was given", row
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    fake.chmod(0o755)
    (row,) = rivals.compare(ROW, tmp_path, [rivals.ZERO3], 3, arena=32 * MiB, deepspeed_python=fake)
    assert row["ended"].endswith("has no DeepSpeed that works: no such module"), row
    assert row["equal_to_plain"] is None and row["step_s"] is None, row


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed at 1.00 GiB"),
        ("raise SystemExit('out of luck')", "failed with exit code 1: out of luck"),
        ("print(1)", "failed with exit code 0: it said nothing"),
        ("print('note'); print('{\"a\": 1}')", "done"),
    ],
)
def test_a_child_is_reported_as_it_ended(code: str, wanted: str) -> None:
    """A killed child is a row of the table, not an error."""
    found = rivals.outcome(run_child([sys.executable, "-c", code]), 1 << 30)
    assert found == wanted, f"{found}, not {wanted}"


def test_a_child_that_takes_too_long_is_ended_and_that_is_said() -> None:
    ended = run_child([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert not ended.killed and "ended after 0.5 s" in ended.errors, ended


@pytest.mark.cgroup
def test_a_child_that_takes_more_than_its_limit_is_killed() -> None:
    """P2 seen from outside: the limit is the kernel's."""
    with memory_group(256 * MiB) as group:
        if group.folder is None:
            pytest.skip(group.limit)
    ended = run_child([sys.executable, "-c", "print(len(b'x' * (1 << 30)))"], limit_bytes=128 * MiB)
    assert ended.killed and rivals.outcome(ended, 128 * MiB) == "killed at 128.00 MiB", ended
    fits = run_child([sys.executable, "-c", "b'x' * (32 << 20); print('{\"fits\": 1}')"], limit_bytes=128 * MiB)
    assert fits.code == 0 and fits.result == {"fits": 1}, fits
    assert fits.group_peak_bytes is not None and 0 < fits.group_peak_bytes <= 128 * MiB, fits


def test_our_arena_is_what_the_limit_leaves() -> None:
    """P2: with the libraries and what computing takes; a limit that leaves nothing names one that does."""
    row = rivals.ROWS["250m"]
    units = find_units(build(model_config(row.model)))
    assert row.limit_bytes is not None
    assert 32 * MiB <= rivals.arena_bytes(row, units) < row.limit_bytes
    with pytest.raises(rivals.UserError) as refused:
        rivals.arena_bytes(replace(row, limit_bytes=64 * MiB), units)
    least = int(str(refused.value).split("--limit ")[-1].split(",")[0])
    assert rivals.arena_bytes(replace(row, limit_bytes=least), units) == 32 * MiB


def test_losses_that_differ_are_told_in_units_in_the_last_place() -> None:
    ended = Ended(code=0, result={}, errors="", killed=False, limit="", group_peak_bytes=None)
    assert rivals.outcome(ended, None) == "failed with exit code 0: it said nothing"
    one, next_one = torch.tensor(5.5), torch.nextafter(torch.tensor(5.5), torch.tensor(6.0))
    found = rivals._against([one.item().hex()], [next_one.item().hex()])
    assert found == {"equal_to_plain": False, "furthest_ulp": 1.0}, found


def test_counters_of_a_process_are_those_of_the_kernel(tmp_path: Path) -> None:
    """Bytes grow with what is written, the peak is forgotten when asked."""
    before = os_bytes()
    (tmp_path / "file").write_bytes(bytes(4 * MiB))
    moved = os_bytes().since(before)
    assert moved.nbytes == moved.read_bytes + moved.written_bytes
    if filesystem_of(tmp_path).fs_type == "ext4":
        assert moved.written_bytes >= 4 * MiB, moved
    reset_peak()
    assert peak_rss_bytes() > 0
