"""P1 on conversations: a tiered run on padded or packed samples equals the plain loop that is given the same batches.

Scope: whole runs through `verify`, and through `train` with a resume in the middle of an epoch.
Not here: what the batches are (`test_data_batches.py`, `test_data_packing.py`), text (`test_same_numbers.py`).
"""

from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import VOCAB_SIZE, save_tokenizer, turns, write_rows
from conftest import RunFile
from models import MODELS
from rich.console import Console

from megatrain.config import load_run
from megatrain.trainer import train
from megatrain.verify import verify

QUIET = Console(quiet=True)
S = 48

pytestmark = pytest.mark.usefixtures("known_machine")


def chat(tmp_path: Path, **data: Any) -> dict[str, Any]:
    """Changes to a run file: 24 conversations of different lengths, answers of 1 to 20 tokens."""
    rows = [{"messages": turns(f"q{n}", f"a{n} " * (1 + n % 5))} for n in range(24)]
    paths = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    fields = {"kind": "chat", "paths": str(paths), "tokenizer": str(tokenizer), "seq_len": S, **data}
    model = {**MODELS["llama"], "vocab_size": VOCAB_SIZE}
    return {"model.config": model, "optimizer.lr": 0.01, **{f"data.{key}": value for key, value in fields.items()}}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("changes", [{}, {"train.max_grad_norm": 0.5}, {"train.loss_chunk": 20}], ids=str)
def test_a_run_on_conversations_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, tmp_path: Path, packing: bool, changes: dict[str, Any]
) -> None:
    """P1, OM-09: micro-batches with unequal numbers of learned tokens, over the end of an epoch. MA-02: padded rows
    come with a 2D mask, of which transformers makes each layer's own.
    """
    settings = {"tiers.host_memory": "8MiB", "tiers.resident": 0, "train.batch": 4, "train.micro_batch": 2}
    run = load_run(run_file({**chat(tmp_path, packing=packing), **settings, **changes}))
    result = verify(run, 8 if not packing else 4, QUIET)
    shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
    assert result["identical"], shown
    assert result["losses"][0] > result["losses"][-1], shown


def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_same_bits(run_file: RunFile, tmp_path: Path) -> None:
    """P3, DP-10, CK-01: 24 samples in batches of 4 are six steps an epoch; the stop is after the fourth."""
    settings = {**chat(tmp_path), "train.batch": 4, "train.micro_batch": 2}
    logs = {}
    for name, stops in (("straight", (9,)), ("stopped", (4, 9))):
        places = {"tiers.nvme": str(tmp_path / name / "nvme"), "output.dir": str(tmp_path / name)}
        for number, steps in enumerate(stops):
            run = load_run(run_file({**settings, **places, "train.steps": steps}))
            assert train(run, resume=number > 0, console=QUIET) == 0
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs[name] = [row.split('"loss": ')[1].split(",")[0] for row in rows]
    assert logs["straight"] == logs["stopped"]
