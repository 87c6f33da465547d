"""P5: what a report says is what the plan holds, in both forms, for a run file as for a question.

Scope: the forecast of a run, its JSON, its rendering. Not here: sums by hand and refusals (`test_tierplan.py`), the
planner (`test_plan.py`).
"""

import doctest
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import RunFile
from rich.console import Console

from megatrain import sizes, workspace
from megatrain.config import load_run
from megatrain.report import PlanReport, plan_report
from megatrain.sizes import format_count, format_seconds, format_size, parse_count
from megatrain.tierplan.advice import Help
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.tables import render
from tiering.manager import scratch_blocks, stored_blocks
from tiering.store import BlockStore

KEPT = {
    "parameters", "host_budget_bytes", "arena_bytes", "host_lines", "compute_lines", "baseline_bytes", "placement",
    "nvme_share", "disk_bytes", "step_s", "io_s", "compute_s", "limit_s", "read_bytes", "written_bytes",
    "bytes_per_param", "update", "lookahead", "lag", "tile_bytes", "ring", "hardware", "unit_times", "assumed",
}  # fmt: skip
"""Keys that scripts read; `plan.json` of older runs has them too."""


@pytest.fixture(params=[{}, {"train.max_grad_norm": 1.0}], ids=["fused", "deferred"])
def report(run_file: RunFile, known_machine: None, request: pytest.FixtureRequest) -> PlanReport:
    """A run whose state does not fit in its budget."""
    changes: dict[str, Any] = {
        "tiers.host_memory": "1536KiB",
        "model.config": {
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
        **request.param,
    }  # fmt: skip
    return plan_report(load_run(run_file(changes)))


def text_of(forecast: Forecast, helps: list[Help] | None = None) -> str:
    out = io.StringIO()
    render(forecast, Console(file=out, width=200), helps)
    return out.getvalue()


def test_the_keys_that_scripts_read_stay(report: PlanReport) -> None:
    """One object that JSON can hold, with every key that `plan --json` has had, and those of `tierplan`."""
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert set(found) >= KEPT, KEPT - set(found)
    more = {"tokens_per_s", "flops_per_s", "serial_s", "bottleneck", "tokens_to_hide_io", "drives", "host", "device"}
    assert set(found) >= more, more - set(found)


def test_every_sum_is_the_sum_of_its_lines(report: PlanReport) -> None:
    """P2: arena, memory beside it, homes of every kind."""
    found, plan = report.as_json(), report.prepared.plan
    assert sum(found["host_lines"].values()) == found["arena_bytes"] == plan.host_bytes <= found["host_budget_bytes"]
    beside = sum(found["compute_lines"].values()) + found["baseline_bytes"]
    assert found["host"]["used_bytes"] == found["arena_bytes"] + beside, found["host"]
    for kind, homes in found["placement"]["HOST"].items():
        total = sum(
            block.nbytes for block in plan.workload.of_life("durable", "carried", "passing") if block.kind == kind
        )
        assert homes + found["placement"]["NVME"][kind] == total, kind
    assert ("grad" in found["placement"]["HOST"]) == (found["update"] == "deferred"), found["placement"]


def test_the_disk_is_as_large_as_the_store_makes_it(report: PlanReport) -> None:
    """P5: two slots of what is durable, one of what is spilled; the store's own sum."""
    plan = report.prepared.plan
    store = BlockStore.nbytes_on_disk([*stored_blocks(plan, {}), *scratch_blocks(plan)])
    assert report.disk_bytes() == store, f"the report says {report.disk_bytes()}, the store takes {store}"


def test_people_read_the_figures_of_the_json(report: PlanReport) -> None:
    """P5: the tables show the JSON's figures, with units and the bounds."""
    found, shown = report.as_json(), text_of(report.forecast())
    wanted = [format_size(nbytes) for nbytes in (*found["host_lines"].values(), *found["compute_lines"].values())]
    wanted += [format_size(found[key]) for key in ("read_bytes", "written_bytes", "disk_bytes", "arena_bytes")]
    wanted += [format_seconds(found[key]) for key in ("step_s", "limit_s", "serial_s")]
    wanted += [f"{found['nvme_share']:.0%}", format_count(found["tokens_per_s"]), "8 x active parameters x tokens"]
    missing = [text for text in wanted if text not in shown]
    assert not missing, f"{missing} not in\n{shown}"


def test_every_assumed_figure_is_listed_once_with_its_source(report: PlanReport) -> None:
    """Rule 9: an assumed number is marked where it is used, and listed with where it comes from."""
    forecast = report.forecast()
    shown = text_of(forecast)
    listed = shown[shown.index("Assumed, not measured") :]
    assert {assumption.what for assumption in forecast.assumptions} >= {"read", "write", "compute", "update"}
    assert listed.count("one PCIe 3 drive and two desktop cores") == 4, listed
    assert "GB/s *" in shown and "FLOP/s *" in shown, shown


def test_help_that_was_looked_for_in_vain_is_said_so(report: PlanReport) -> None:
    """Nothing tried, nothing found, and found are three different texts."""
    forecast = report.forecast()
    assert "would help" not in text_of(forecast)
    assert "would not help" in text_of(forecast, [])
    change = Help(what="one more drive", step_s=0.5, tokens_per_s=42.0, gain=1.25)
    line = next(line for line in text_of(forecast, [change]).splitlines() if "one more drive" in line)
    assert "500.0 ms" in line and "+25%" in line, line


def test_the_readers_of_a_report_need_no_torch() -> None:
    """The record and its tables serve `tierplan`, which must start quickly."""
    code = "import sys; from megatrain.tierplan import command, sweep, tables; print(*sorted(sys.modules))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert done.returncode == 0 and not loaded & {"torch", "numpy", "transformers", "zarr", "matplotlib"}, done.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("65536", 65_536), ("1e9", 10**9), ("15T", 15 * 10**12), ("0.3 B", 300 * 10**6), ("8k", 8000)]
)
def test_counts_are_read_as_people_write_them(text: str, count: int) -> None:
    """Powers of 1000, as tokens are counted."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-5", "many", "1e9 tokens", "nan"])
def test_what_is_no_count_is_refused(text: str) -> None:
    """CF-06: with an example."""
    with pytest.raises(ValueError, match="15T"):
        parse_count(text)


@pytest.mark.parametrize("module", [sizes, workspace])
def test_sums_in_the_documentation_come_out_as_written(module: ModuleType) -> None:
    """Rule 10: the sum in a docstring is a doctest."""
    result = doctest.testmod(module)
    assert result.attempted and not result.failed, result
