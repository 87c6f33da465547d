"""The data section of the run file: what goes together, what is refused.

Scope: `DataConfig` and `check_data_files`.
Not here: the other sections (`test_config.py`).
"""

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import dump_run, load_run
from megatrain.errors import UserError
from megatrain.preflight import check_files
from tests.chat_tokenizer import save_tokenizer, turns, write_rows

CHAT = {"kind": "chat", "paths": "/data/x.jsonl", "tokenizer": "/models/m", "seq_len": 8}


@pytest.mark.parametrize(
    "data",
    [
        {**CHAT, "packing": True, "train_on": "all", "chat_template": "/x/$$y.jinja", "datasets": ["a", "b"]},
        {**CHAT, "paths": ["datasets:owner/name", "~/x"], "split": "test", "datasets": "a"},
        {**CHAT, "validation": 1.0, "validation_max": 7},
        {**CHAT, "validation": 1},
        {**CHAT, "validation": "0.25"},
        {**CHAT, "validation": "/data/held $$ out.jsonl"},
        {"kind": "tokens", "paths": "/data", "dtype": "uint16", "seq_len": 8},
    ],
)
def test_dump_loads_to_an_equal_run(run_file: Any, tmp_path: Path, data: dict[str, Any]) -> None:
    """P3: a resume reads what was written; a share of 1.0 does not come back as one row."""
    run = load_run(run_file({"data": data}))
    again = tmp_path / "again.yaml"
    again.write_text(dump_run(run))
    assert load_run(again) == run, again.read_text()
    assert type(load_run(again).data.validation) is type(run.data.validation)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"packing": True}, "`packing` is for `kind: chat`, this is `text`"),
        ({"train_on": "all"}, "`train_on` is for `kind: chat`"),
        ({"dtype": "uint16"}, "`dtype` is for `kind: tokens`, this is `text`"),
        ({**CHAT, "dtype": "uint16"}, "`dtype` is for `kind: tokens`, this is `chat`"),
        ({**CHAT, "tokenizer": "bytes"}, "`bytes`, which has no chat template"),
        ({"validation_max": 3}, "`validation_max` bounds a share"),
        ({"validation": 3, "validation_max": 3}, "`validation_max` bounds a share"),
        ({"validation": 0}, "must be >= 1 rows"),
        ({"validation": 1.5}, "a share must be > 0 and <= 1"),
        ({"validation": True}, "must be a number"),
        ({"train_on": "users"}, "'assistant' or 'all'"),
        ({"dtype": "float32"}, "'uint16', 'uint32' or 'int32'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(run_file: Any, data: dict[str, Any], words: str) -> None:
    """CF-04, CF-06: one line with key, value and what is allowed; no setting that would do nothing."""
    base = {"paths": "/data/x.txt", "seq_len": 8}
    with pytest.raises(UserError) as caught:
        load_run(run_file({"data": {**base, **data}}))
    assert words in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_missing_data_files_are_refused_before_anything_heavy(run_file: Any, tmp_path: Path) -> None:
    """CF-05: data, template and validation data are looked for by name."""
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns("q", "a")}])
    chat = {**CHAT, "paths": str(path), "tokenizer": str(save_tokenizer(tmp_path / "tokenizer"))}
    check_files(load_run(run_file({"data": chat})))
    for changes, words in (
        ({"paths": "/nowhere.jsonl"}, "/nowhere.jsonl does not exist"),
        ({"validation": "/nowhere.jsonl"}, "/nowhere.jsonl does not exist"),
        ({"chat_template": "/nowhere.jinja"}, "data.chat_template: /nowhere.jinja is not a file"),
        ({"tokenizer": "/nowhere"}, "data.tokenizer: /nowhere is not a file"),
    ):
        with pytest.raises(UserError) as caught:
            check_files(load_run(run_file({"data": {**chat, **changes}})))
        assert words in str(caught.value), changes


def test_what_decides_the_numbers_is_part_of_the_identity(run_file: Any) -> None:
    """A resume with another kind of supervision or packing is refused by that name."""
    found = [
        load_run(run_file({"data": {**CHAT, **changes}, "model.config.vocab_size": 300})).numerics()["data"]
        for changes in ({}, {"train_on": "all"}, {"packing": True})
    ]
    assert found[0] == {"kind": "chat", "seq_len": 8, "train_on": "assistant", "packing": False}
    assert found[1]["train_on"] == "all" and found[2]["packing"] is True
