"""`megatrain data` shows what the model will see, and every row that was left out.

Scope: the command and `megatrain/data/report.py`.
Not here: how the data is prepared (`test_data_chat.py`).
"""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.config import load_run
from megatrain.data.report import LEARNED, data_report, histogram
from tests.chat_tokenizer import END, START, VOCAB_SIZE, save_tokenizer, turns, write_rows

LEFT_OUT = 25


@pytest.fixture
def chat_run(tmp_path: Path, run_file: Any) -> Path:
    """A run file on 10 conversations and 25 rows that cannot be used."""
    good = [{"messages": turns(f"q{n}", "a" * (n + 1))} for n in range(10)]
    path = write_rows(tmp_path / "rows.jsonl", [*good, *["{"] * LEFT_OUT])
    data = {"kind": "chat", "paths": str(path), "tokenizer": str(save_tokenizer(tmp_path / "tok")), "seq_len": 64}
    return run_file({"data": data, "model.config.vocab_size": VOCAB_SIZE})


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)


def test_json_holds_counts_samples_and_every_rejected_row(chat_run: Path) -> None:
    """--json: one object with all of them."""
    done = command(str(chat_run), "--json", "--show", "2")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["samples"], found["rows"], len(found["rejected"]), len(found["shown"])) == (10, 10, LEFT_OUT, 2)
    assert [row["line"] for row in found["rejected"]] == list(range(11, 11 + LEFT_OUT))
    assert found["supervised_tokens"] == sum(n + 2 for n in range(10))
    assert found["supervised_share"] == found["supervised_tokens"] / found["tokens"]
    assert sum(part["samples"] for part in found["lengths"]) == 10
    assert found["shown"][1]["pieces"] == [
        {"text": f"{START}user\nq1{END}\n{START}assistant\n", "supervised": False},
        {"text": f"aa{END}", "supervised": True},
        {"text": "\n", "supervised": False},
    ]


def test_a_person_sees_the_first_rejected_rows_and_their_count(chat_run: Path) -> None:
    """Twenty rows with line and reason, then how many more; the counts and the rule that was applied."""
    text = command(str(chat_run)).stdout
    assert "10 samples" in text and f"{LEFT_OUT} rows left out" in text and "and 5 more" in text
    assert text.count(": not JSON: ") == 20 and "rows.jsonl, line 11: not JSON" in text


def test_what_is_learned_is_in_colour(chat_run: Path, tmp_path: Path) -> None:
    """The supervised spans of the first samples, and no other text, are in the colour."""
    out = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")
    data_report(load_run(chat_run), 1, Console(file=io.StringIO())).render(out)
    assert isinstance(out.file, io.StringIO)
    text, code = out.file.getvalue(), "\x1b[1;32m"
    assert LEARNED == "bold green" and f"{code}a{END}\x1b[0m" in text.replace("\n", ""), text
    assert f"{code}{START}" not in text


def test_text_is_shown_as_windows(run_file: Any) -> None:
    """Every kind of data has a report; in text all is learned."""
    done = command(str(run_file()), "--json", "--show", "1")
    found = json.loads(done.stdout)
    assert found["shown"] == [
        {"origin": "window 1", "tokens": 16, "pieces": [{"text": "line 0: the quic", "supervised": True}]}
    ]
    assert found["rows"] > 0 and "samples" not in found


def test_training_uses_the_tokens_that_were_shown(chat_run: Path) -> None:
    """The command prepares the data in the run's own folder; nothing is tokenised twice."""
    command(str(chat_run))
    run = load_run(chat_run)
    header = run.output.dir / "tokens" / "samples.json"
    before = header.stat().st_ino
    data_report(run, 0, Console(file=io.StringIO()))
    assert header.stat().st_ino == before


def test_bins_of_lengths_cover_every_sample(chat_run: Path) -> None:
    """Ranges follow one another without a gap, and no sample is in two."""
    samples = data_report(load_run(chat_run), 0, Console(file=io.StringIO())).data.samples
    assert samples is not None
    bins = histogram(samples)
    lengths = samples.lengths()
    assert (bins[0][0], bins[-1][1]) == (lengths.min(), lengths.max())
    assert all(high + 1 == low for (_, high, _), (low, _, _) in pairwise(bins)), bins
    assert [count for *_, count in bins] == [int(((lengths >= a) & (lengths <= b)).sum()) for a, b, _ in bins]


def test_unusable_data_is_one_clear_error(chat_run: Path) -> None:
    """Exit code 2 and a message, no traceback."""
    done = command(str(chat_run), "--set", "data.paths=/nowhere.jsonl")
    assert done.exit_code == 2 and "data.paths: /nowhere.jsonl does not exist" in done.output, done.output
