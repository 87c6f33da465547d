"""Benchmarks and `megatrain measure` print what they found as JSON that parses, and leave nothing on the drive.

Scope: `benchmarks/`, `megatrain/measure.py`, on tiny sizes; no figure is compared with a time.
Not here: the measurements themselves (`test_measure.py`), the file that holds them (`test_hardware_file.py`).
"""

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import benchmarks.adamw
import benchmarks.disk
import benchmarks.fio
import benchmarks.matmul
import benchmarks.pcie
import megatrain.measure
from benchmarks import plan_accuracy
from megatrain import cli
from megatrain.config import load_run
from megatrain.console import run_app
from megatrain.runfile import write_mapping
from tiering import gds
from tiering.drive import DriveFacts
from tiering.hardware_file import load

KiB, MiB = 1 << 10, 1 << 20
ROOT = Path(__file__).parent.parent
TINY_DISK = ("--tile", "4KiB", "--tile", "64KiB", "--depth", 1, "--depth", 2, "--max-bytes", "32MiB")
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


@pytest.fixture
def no_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    """And small buffers, for tests that measure no real rate."""
    monkeypatch.setattr("tiering.probe_file.BUFFER_BYTES", 0)
    monkeypatch.setattr(gds, "probe", lambda path: "no GPU driver")


def entry_of(tree: Any) -> list[dict[str, Any]]:
    """Every rate in a JSON tree."""
    if isinstance(tree, dict) and "value" in tree:
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [entry for child in children for entry in entry_of(child)]


def check_rates(tree: Any) -> None:
    """Style rule 9: value, unit, source, how and date."""
    rates = entry_of(tree)
    assert rates
    for rate in rates:
        assert rate["value"] > 0 and rate["unit"] in ("B/s", "FLOP/s") and rate["how"] and rate["date"], rate


@pytest.mark.usefixtures("no_kvikio")
def test_the_disk_benchmark_has_a_row_for_each_engine_tile_and_depth(tmp_path: Path, invoke: Invoke) -> None:
    """A plain loop beside every engine; what did not run says why; bytes written keep to the bound."""
    code, out, _ = invoke(benchmarks.disk.app, "--path", tmp_path / "nvme", *TINY_DISK, "--json")
    report = json.loads(out)
    assert code == 0
    check_rates(report)
    rows = [(row["engine"], row["tile_bytes"], row["queue_depth"]) for row in report["rows"]]
    assert [row for row in rows if row[0] == "plain loop"] == [("plain loop", tile * KiB, 1) for tile in (4, 64)]
    posix = [row for row in rows if row[0] == "posix"]
    assert posix == [("posix", tile * KiB, depth) for tile in (4, 64) for depth in (1, 2)]
    assert [long["engine"] for long in report["lasting"]] == ["posix"], "the plain loop has no long run"
    assert report["not_run"]["kvikio"] == "no GPU driver"
    assert 0 < report["written_bytes"] <= 32 * MiB, report["written_bytes"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_kvikio")
def test_a_disk_benchmark_through_the_page_cache_says_so_each_time(tmp_path: Path, invoke: Invoke) -> None:
    """IO-25: twice, and the labels are the same; people see it under the table."""
    for _ in range(2):
        code, out, _ = invoke(benchmarks.disk.app, "--path", tmp_path, *TINY_DISK, "--buffered", "--json")
        found = entry_of(json.loads(out))
        assert code == 0 and found
        assert all("cached: page cache" in rate["how"] for rate in found), found
    _, out, _ = invoke(benchmarks.disk.app, "--path", tmp_path, *TINY_DISK, "--buffered")
    assert "Beware: cached: page cache" in out, out


@pytest.mark.usefixtures("no_kvikio")
def test_a_figure_above_the_link_is_marked_in_the_table(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-25: the link as the system tells it, made slow here."""
    monkeypatch.setattr(benchmarks.disk, "drive_facts", lambda path: DriveFacts(link_bytes_per_s=1.0))
    _, out, _ = invoke(benchmarks.disk.app, "--path", tmp_path, *TINY_DISK)
    assert "Beware: invalid: above the link" in out, out


@pytest.mark.usefixtures("no_kvikio")
def test_fio_stands_beside_the_engines_where_it_is_installed(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tile and depth, direct, on a file that is there; and when fio fails, its message and no row."""
    fake, tier = tmp_path / "bin" / "fio", tmp_path / "drive" / "nvme"
    fake.parent.mkdir()
    tier.mkdir(parents=True)
    fake.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "if '--enghelp' in sys.argv: print('Available IO engines:\\n  libaio\\n  sync'); sys.exit()\n"
        "if os.environ.get('FIO_FAILS'): print('disk on fire', file=sys.stderr); sys.exit(1)\n"
        "given = dict(arg.removeprefix('--').partition('=')[::2] for arg in sys.argv[1:])\n"
        "assert os.path.getsize(given['filename']) == int(given['size'])\n"
        "assert given['direct'] == '1' and given['ioengine'] == 'libaio'\n"
        "assert given['rw'] != 'rw' or given['rwmixread'] == '57'\n"
        "read = 0 if given['rw'] == 'write' else int(given['bs']); write = 0 if given['rw'] == 'read' else 7\n"
        "print('note: x'); print(json.dumps({'jobs': [{'read': {'bw_bytes': read}, 'write': {'bw_bytes': write}}]}))\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    code, out, err = invoke(benchmarks.disk.app, "--path", tier, *TINY_DISK, "--json")
    assert code == 0, err
    rows = [row for row in json.loads(out)["rows"] if row["engine"] == "fio libaio"]
    assert [(row["tile_bytes"], row["queue_depth"]) for row in rows] == [(t * KiB, d) for t in (4, 64) for d in (1, 2)]
    assert [rows[0][what]["value"] for what in ("read", "write", "mixed")] == [4096, 7, 4103]
    monkeypatch.setenv("FIO_FAILS", "1")
    _, out, _ = invoke(benchmarks.disk.app, "--path", tier, *TINY_DISK, "--json")
    assert "disk on fire" in json.loads(out)["not_run"]["fio"], out
    assert list(tier.parent.iterdir()) == [tier]


@pytest.mark.usefixtures("no_kvikio")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--max-bytes", "1MiB"),
            r"--max-bytes 1048576 is too little for tiles of 8388608 bytes.*Fix: --max-bytes \d+",
        ),
        (("--tile", "1KiB"), "--tile 1KiB is 1024 bytes; at least 4096"),
        (("--tile", "100TiB"), "more than the .* bytes that buffers may take.*Fix: a smaller tile or depth"),
        (("--tile", "much"), "--tile: 'much' is not a size"),
        (("--depth", "0"), "Invalid value for '--depth'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    tmp_path: Path, invoke: Invoke, options: tuple[str, ...], said: str
) -> None:
    code, out, err = invoke(benchmarks.disk.app, "--path", tmp_path, *options)
    assert (code, out) == (2, ""), err
    assert re.search(said, err), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_kvikio")
def test_the_bound_that_a_refusal_names_works(tmp_path: Path, invoke: Invoke) -> None:
    """Rule 5: what to do, and it is enough."""
    few = ("--path", tmp_path, "--tile", "64KiB", "--depth", 2)
    _, _, err = invoke(benchmarks.disk.app, *few, "--max-bytes", "64KiB")
    least = err.split("Fix: --max-bytes ")[1].split(",")[0]
    code, out, err = invoke(benchmarks.disk.app, *few, "--max-bytes", least, "--json")
    assert code == 0, err
    assert json.loads(out)["written_bytes"] <= int(least), f"{out}, at most {least}"


def test_the_pcie_benchmark_says_when_there_is_no_gpu(invoke: Invoke) -> None:
    code, out, _ = invoke(benchmarks.pcie.app, "--bytes", "1MiB", "--json")
    report = json.loads(out)
    assert code == 0 and "host_copy" in report["rates"]
    check_rates(report)
    if not torch.cuda.is_available():
        assert report["device"] is None and "no CUDA device" in report["reason"]
        assert "No CUDA device" in invoke(benchmarks.pcie.app, "--bytes", "1MiB")[1]
    code, _, err = invoke(benchmarks.pcie.app, "--bytes", "1000TiB")
    assert code == 2 and "Fix: a smaller one" in err, err


def test_the_adamw_benchmark_has_a_row_for_each_size_and_number_of_threads(invoke: Invoke) -> None:
    """The process keeps the threads that it had."""
    before = torch.get_num_threads()
    sizes = ("--bytes", "4KiB", "--bytes", "64KiB", "--threads", 1, "--threads", 2)
    code, out, _ = invoke(benchmarks.adamw.app, *sizes, "--json")
    report = json.loads(out)
    assert code == 0 and torch.get_num_threads() == before
    check_rates(report)
    assert [(row["threads"], row["tensor_bytes"]) for row in report["rows"]] == [
        (threads, size * KiB) for threads in (1, 2) for size in (4, 64)
    ]
    assert "64.00 KiB" in invoke(benchmarks.adamw.app, *sizes)[1]


def test_the_matmul_benchmark_multiplies_the_shapes_of_the_model(tmp_path: Path, invoke: Invoke) -> None:
    """Sizes by hand: 4 heads of 8 with 2 groups, tokens = micro-batch x sequence."""
    config = {
        "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--micro-batch", 2, "--seq", 8, "--device", "cpu")
    code, out, _ = invoke(benchmarks.matmul.app, "--model", tmp_path, *options, "--json")
    report = json.loads(out)
    assert code == 0
    check_rates(report)
    found = [(row["name"], row["rows"], row["inner"], row["columns"], row["count"]) for row in report["rows"]]
    assert found == [
        ("query", 16, 24, 32, 1),
        ("key, value", 16, 24, 16, 2),
        ("attention out", 16, 32, 24, 1),
        ("gate, up", 16, 24, 40, 2),
        ("down", 16, 40, 24, 1),
        ("head", 16, 24, 100, 1),
    ]
    assert report["layer"]["source"] == "derived"
    assert "together" in invoke(benchmarks.matmul.app, "--model", tmp_path / "config.json", *options)[1]


def test_the_linear_maps_of_other_families_are_found_by_arithmetic() -> None:
    """GPT-2's own words and two maps in its MLP; of Mixtral's experts each gets its share of the tokens."""
    gpt2 = benchmarks.matmul.linear_shapes({"n_embd": 8, "n_head": 2, "vocab_size": 10, "n_inner": None}, 4, "x")
    assert [(s.name, s.columns, s.count) for s in gpt2[2:5]] == [("attention out", 8, 1), ("up", 32, 1), ("down", 8, 1)]
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = benchmarks.matmul.linear_shapes(benchmarks.matmul.SMALL_LLAMA | experts, 64, "x")
    assert [(s.rows, s.count) for s in mixtral[3:5]] == [(16, 16), (16, 8)]


def test_a_product_that_would_take_minutes_is_timed_with_fewer_rows(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says with how many."""
    monkeypatch.setitem(benchmarks.matmul.MOST_FLOPS, "cpu", 1e6)
    _, out, _ = invoke(benchmarks.matmul.app, "--seq", 16, "--device", "cpu")
    assert "query: timed with 1 rows of 16" in out, out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file.*Fix:"),
        ("{", "not JSON"),
        ("[]", "one JSON object"),
        ("{}", "`hidden_size` is missing"),
        ('{"hidden_size": -1}', "`hidden_size` is -1"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, invoke: Invoke, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    code, out, err = invoke(benchmarks.matmul.app, "--model", tmp_path)
    assert (code, out) == (2, "")
    assert re.search(said, err), err


def test_sums_in_the_benchmarks_come_out_as_written() -> None:
    """Rule 10."""
    for module in (benchmarks.adamw, benchmarks.disk, benchmarks.fio, benchmarks.matmul, benchmarks.pcie):
        assert doctest.testmod(module).failed == 0, module


def test_a_benchmark_runs_as_a_module_from_the_project_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pcie", "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0 and "--bytes" in done.stdout, done.stderr


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`megatrain measure` on few bytes."""
    for name, value in (("QUICK_WRITTEN_BYTES", 16 * MiB), ("MOST_MEMORY", 4 * MiB), ("WIDTH", 64), ("TOKENS", 64)):
        monkeypatch.setattr(megatrain.measure, name, value)
    monkeypatch.setattr("tiering.measure.STEAL_BYTES", MiB)
    monkeypatch.setattr("tiering.measure_memory.BUSY_S", 0.01)


@pytest.mark.usefixtures("no_kvikio", "small_machine")
def test_measure_writes_a_file_that_plans_can_be_made_with(tmp_path: Path, invoke: Invoke) -> None:
    """The printed object is the file's content; nothing else is left."""
    out_file, tier = tmp_path / "hardware.json", tmp_path / "nvme"
    tier.mkdir()
    code, out, err = invoke(cli.app, "measure", "--path", tier, "-o", out_file, "--quick", "--json")
    assert code == 0, err
    file = load(out_file)
    assert json.loads(out) == file.model_dump(mode="json") == json.loads(out_file.read_text())
    assert all(rate["source"] in ("measured", "derived") for rate in entry_of(json.loads(out)))
    assert file.hardware().assumed() == [] and file.hardware().mixed is not None
    assert file.host.memory_bytes > 0 and file.host.limit
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hardware.json", "nvme"]


@pytest.mark.usefixtures("no_kvikio", "small_machine")
def test_measure_shows_units_sources_and_dates(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = invoke(cli.app, "measure", "--path", tmp_path, "-o", tmp_path / "hw.json", "--quick")
    assert code == 0, err
    for said in ("GFLOP/s", "B/s", "measured", "sustained", "burst", "20", "GPU: ", "Written: ", "direct I/O in"):
        assert said in out, f"{said} is not in\n{out}"


def test_measure_refuses_before_it_measures(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two paths on one drive would count it twice; a result that cannot be written is not worth waiting for."""
    monkeypatch.setattr(megatrain.measure, "measure_drive", lambda *args, **kwargs: pytest.fail("it measured"))
    code, _, err = invoke(cli.app, "measure", "--path", tmp_path / "a", "--path", tmp_path / "b", "-o", tmp_path / "x")
    assert code == 2 and "counted twice. Fix: one --path for each drive" in err, err
    code, _, err = invoke(cli.app, "measure", "--path", tmp_path, "-o", tmp_path / "none" / "x")
    assert code == 2 and "does not exist. Fix: make it" in err, err
    code, _, err = invoke(cli.app, "measure")
    assert code == 2 and "--path" in err, err
    code, _, err = invoke(cli.app, "measure", "--path", tmp_path / "a" / "b", "--quick", "-o", tmp_path)
    assert code == 2 and "is a folder" in err, err
    assert list(tmp_path.iterdir()) == []


def test_the_help_of_measure_ends_with_an_example(invoke: Invoke) -> None:
    assert "Example: megatrain measure" in invoke(cli.app, "measure", "--help")[1]


@pytest.mark.parametrize("case", plan_accuracy.CASES)
def test_every_run_of_the_accuracy_benchmark_is_a_run_file(case: str, tmp_path: Path) -> None:
    """P5: what is compared is planned as any run is; half resident and clipped runs differ by just that."""
    (tmp_path / "run.yaml").write_text(write_mapping(plan_accuracy.run_mapping(case, tmp_path)))
    run = load_run(tmp_path / "run.yaml", ())
    assert (run.train.max_grad_norm is not None) == ("clipping" in case), case
    assert run.tiers.resident == (0.5 if "half resident" in case else 0.0), case


def test_a_prediction_that_missed_is_named() -> None:
    """P5: seconds to 10 %, bytes to 1 %, memory to 5 % and 64 MiB."""
    true = {"step_s": 1.09, "bytes": 1005, "peak_bytes": (1 << 30) + (100 << 20)}
    predicted = {"predicted_step_s": 1.0, "predicted_bytes": 1000, "predicted_peak_bytes": 1 << 30}
    assert plan_accuracy.misses(true | predicted) == []
    wrong = {"step_s": 1.2, "bytes": 1020, "peak_bytes": 1 << 31}
    assert [miss.split()[0] for miss in plan_accuracy.misses(wrong | predicted)] == ["step_s", "bytes", "peak_bytes"]
