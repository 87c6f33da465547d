"""The chat data set that the project ships, and the run file beside it, are what their pages say.

Scope: form, variety and length of `tools/finetune/chat.jsonl`; that the run file of `make finetune` is accepted.
Not here: the fine-tuning itself, which needs a download (`tools/finetune/finetune.py`).
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_run
from megatrain.data.conversation import RowFormat, conversation_of

FOLDER = Path(__file__).parent.parent / "tools" / "finetune"
LINES = (FOLDER / "chat.jsonl").read_text(encoding="utf-8").splitlines()
ROWS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
MOST_TOKENS = 512
BYTES_A_TOKEN = 3
"""Fewer than English text has, so that this is on the safe side."""


def turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """Without the system turn."""
    messages: list[dict[str, str]] = row["messages"]
    return messages[1:] if messages[0]["role"] == "system" else messages


def plain(text: str) -> str:
    """Letters and digits alone, so that two questions that differ in a comma are the same."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def test_every_line_is_one_conversation_that_the_trainer_reads() -> None:
    """A few hundred samples, nothing but messages in them, none refused by the reader."""
    assert 250 <= len(ROWS) <= 400, len(ROWS)
    for number, row in enumerate(ROWS, start=1):
        assert list(row) == ["messages"], f"line {number}: {list(row)}"
        assert all(list(message) == ["role", "content"] for message in row["messages"]), f"line {number}: {row}"
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"]), number
        assert conversation_of(row, RowFormat()) is not None, f"line {number}"


def test_roles_alternate_and_every_conversation_ends_with_an_answer() -> None:
    for number, row in enumerate(ROWS, start=1):
        roles = [message["role"] for message in turns(row)]
        assert roles == ["user", "assistant"] * (len(roles) // 2), f"line {number}: {roles}"


def test_no_question_and_no_answer_comes_twice() -> None:
    """The first question of each conversation, and all answers."""
    questions = Counter(plain(turns(row)[0]["content"]) for row in ROWS)
    answers = Counter(plain(m["content"]) for row in ROWS for m in turns(row) if m["role"] == "assistant")
    for found in (questions, answers):
        twice = [text for text, count in found.items() if count > 1]
        assert not twice, twice


def test_every_sample_is_short_enough() -> None:
    """512 tokens by bytes / 3."""
    sizes = [sum(len(message["content"].encode()) for message in row["messages"]) for row in ROWS]
    assert max(sizes) <= MOST_TOKENS * BYTES_A_TOKEN, f"line {sizes.index(max(sizes)) + 1}: {max(sizes)} bytes"


def test_some_have_a_system_turn_and_some_have_several_turns() -> None:
    system = sum(row["messages"][0]["role"] == "system" for row in ROWS)
    several = sum(len(turns(row)) > 2 for row in ROWS)
    assert system >= 10 and several >= 10, f"{system} with a system turn, {several} with several turns"


def test_the_page_names_the_licence() -> None:
    page = (FOLDER / "README.md").read_text()
    assert re.search(r"^Licence: Apache-2\.0", page, re.MULTILINE), page


def test_the_run_file_is_what_the_page_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB of host memory, 30 steps, data held out and looked at during training."""
    monkeypatch.chdir(tmp_path)
    run = load_run(FOLDER / "run.yaml")
    assert (run.tiers.host_memory, run.train.steps) == (256 << 20, 30), run
    assert run.data.kind == "chat" and run.data.validation and run.train.eval_every, run.data
