"""P1, I8: every row of the list that `megatrain models` prints holds.

Scope: the table of `megatrain/supported.py`, row by row, through `verify`; the command.
Not here: placements, serial runs and many steps (`test_same_numbers.py`), on a few architectures.
"""

import json
from typing import Any

import pytest
from conftest import RunFile
from rich.console import Console
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.config import load_run
from megatrain.supported import CHECKED_ON, CHECKED_WITH, TESTED, Family, as_json
from megatrain.verify import verify

pytestmark = pytest.mark.usefixtures("known_machine")

RUNS = [
    pytest.param(
        row,
        clip,
        id=f"{row.family}-{row.parts}-{'clipped' if clip else 'fused'}".replace(" ", "-"),
        marks=() if row.often and not clip else pytest.mark.slow,
    )
    for row in TESTED
    for clip in (None, 0.5)
]


@pytest.mark.parametrize(("row", "clip"), RUNS)
def test_a_listed_architecture_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, row: Family, clip: float | None
) -> None:
    """P1, I8: all state on NVMe. Clipped runs have two micro-batches, but for tied weights (the stated exception)."""
    tied = "tied" in row.parts
    result = verified(
        run_file,
        {
            "model.config": dict(row.config),
            "train.max_grad_norm": clip,
            "train.micro_batch": 2 if clip and not tied else 4,
        },
    )
    assert result["nvme_share"] == 1.0
    shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
    assert result["identical"], shown
    assert len(set(result["losses"])) == len(result["losses"]), shown


def verified(run_file: RunFile, changes: dict[str, Any]) -> dict[str, Any]:
    placed = {"optimizer.lr": 0.01, "tiers.resident": 0, "tiers.host_memory": "8MiB"}
    return verify(load_run(run_file(placed | changes)), 3, Console(quiet=True))


def test_the_command_prints_the_table_that_is_tested() -> None:
    """The list cannot name a model that no test has: both are one table."""
    shown = CliRunner().invoke(app, ["models"])
    assert shown.exit_code == 0, shown.output
    missing = [word for row in TESTED for word in (row.family, row.model_type) if word not in shown.output]
    assert not missing, missing
    assert CHECKED_ON in shown.output and CHECKED_WITH["transformers"] in shown.output, shown.output
    printed = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert printed == as_json(), printed
