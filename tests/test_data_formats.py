"""Rows of chat data in every format and file type are the same conversations; bad rows are named.

Scope: reading rows and their meaning (`rows.py`, `conversation.py`, `chat_sources.py` of `megatrain/data`).
Not here: tokens (`test_data_template.py`), what becomes of rejected rows (`test_data_chat.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import rows as rows_module
from megatrain.data.chat_sources import ChatSource, list_chat_sources
from megatrain.data.conversation import AUTO, Conversation, RowFaultError, conversation_of
from megatrain.data.rows import RawRow, read_rows
from megatrain.errors import UserError
from tests.chat_tokenizer import turns, write_rows

OPENAI_ROW = {"messages": turns("q1", "a1", "q2\nmore", "a2", system="s")}
SHAREGPT_ROW = {
    "system": "s",
    "conversations": [
        {"from": "human", "value": "q1"},
        {"from": "gpt", "value": "a1"},
        {"from": "human", "value": "q2\nmore"},
        {"from": "gpt", "value": "a2"},
    ],
}
ALPACA_ROW = {"system": "s", "history": [["q1", "a1"]], "instruction": "q2", "input": "more", "output": "a2"}


def texts(found: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in found.messages]


def read(path: Path) -> list[RawRow]:
    return list(read_rows(ChatSource(path=str(path), nbytes=path.stat().st_size)))


@pytest.mark.parametrize("row", [SHAREGPT_ROW, ALPACA_ROW])
def test_formats_give_the_same_conversation(row: dict[str, Any]) -> None:
    """One conversation, three formats: equal turns, and equal digests, so that duplicates are found across them."""
    wanted, found = conversation_of(OPENAI_ROW, AUTO), conversation_of(row, AUTO)
    assert texts(found) == texts(wanted)
    assert found.digest() == wanted.digest()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not an object"),
        ({"text": "x"}, "no known columns"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": ["x"]}, "a turn is not an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": turns("q", "  ")}, "an empty answer"),
        ({"messages": [*turns("q", "a"), {"role": "system", "content": "x"}]}, "a system turn that is not the first"),
        ({"messages": [{"role": "user", "content": None}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
        (
            {"messages": [*turns("q"), {"role": "assistant", "content": "a", "weight": 0}]},
            "every answer has the weight 0",
        ),
        ({"messages": [*turns("q"), {"role": "assistant", "content": "a", "weight": 2}]}, "neither 0 nor 1"),
        ({"instruction": "q", "output": None}, "content that is not text"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, "not a list of pairs"),
        ({"messages": turns("q", "a"), "tools": "{"}, "`tools` is not JSON"),
    ],
)
def test_row_without_a_usable_conversation_says_why(row: object, reason: str) -> None:
    """Invalid rows have a reason; none is guessed into shape."""
    with pytest.raises(RowFaultError) as caught:
        conversation_of(row, AUTO)
    assert reason in str(caught.value)


def test_parts_of_text_and_calls_of_tools_reach_the_template() -> None:
    """OpenAI's content parts are put together; a ShareGPT function call becomes a tool call of the assistant."""
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                        {"role": "assistant", "content": "c"}]}  # fmt: skip
    assert texts(conversation_of(row, AUTO)) == [("user", "ab"), ("assistant", "c")]
    call = {"name": "f", "arguments": {"x": 1}}
    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)},
                                {"from": "observation", "value": "7"}, {"from": "gpt", "value": "7"}],
              "tools": json.dumps([{"name": "f"}])}  # fmt: skip
    found = conversation_of(shared, AUTO)
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].for_template()["tool_calls"] == [{"type": "function", "function": call}]
    assert found.tools == ({"name": "f"},)


@pytest.mark.parametrize("kind", ["jsonl", "json array", "json lines", "json pretty", "parquet", "saved", "hub"])
def test_file_types_give_the_same_rows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL, JSON, Parquet and `datasets`, found by what the entry of data.paths is."""
    rows = [{"messages": turns(f"q{n}", f"a{n} é")} for n in range(5)]
    entry = str(_written(tmp_path, kind, rows, monkeypatch))
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 7)
    sources = list_chat_sources([entry]).found
    assert len(sources) == 1, sources
    found = [row.value for row in read_rows(sources[0])]
    assert [texts(conversation_of(row, AUTO)) for row in found] == [texts(conversation_of(row, AUTO)) for row in rows]


def _written(folder: Path, kind: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path | str:
    if kind == "jsonl":
        return write_rows(folder / "rows.jsonl", rows)
    if kind == "json lines":
        return write_rows(folder / "rows.json", rows)
    if kind.startswith("json"):
        path = folder / "rows.json"
        path.write_text(json.dumps(rows, indent=2 if kind == "json pretty" else None, ensure_ascii=False))
        return path
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        table.to_parquet(str(folder / "rows.parquet"))
        return folder / "rows.parquet"
    if kind == "saved":
        datasets.DatasetDict({"train": table}).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: {"owner/name": table}[name])
    return "datasets:owner/name"


def test_rows_carry_their_line(tmp_path: Path) -> None:
    """Lines are counted from 1, in arrays too; a bad line of JSONL is one bad row and no more."""
    path = write_rows(tmp_path / "rows.jsonl", ['{"a": 1}', "", "{", '{"a": 2}'])
    found = [(row.line, row.value, row.fault.reason if row.fault else None) for row in read(path)]
    assert found == [(1, {"a": 1}, None), (2, None, "an empty line"), (3, None, "not JSON"), (4, {"a": 2}, None)]
    (tmp_path / "rows.json").write_text('[\n {"a":\n 1},\n\n {"a": 2}]')
    assert [(row.line, row.value) for row in read(tmp_path / "rows.json")] == [(2, {"a": 1}), (5, {"a": 2})]
    (tmp_path / "bad.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n')
    assert [row.fault.reason if row.fault else None for row in read(tmp_path / "bad.jsonl")] == [None, "not UTF-8"]


@pytest.mark.parametrize("text", ['[{"a": 1}, {', '[{"a": 1}', '[{"a": 1},\n {"a": nope}]', '{"a": 1}\n{"b"'])
def test_broken_json_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    """An array cannot be read on after a fault: the file is refused, and the message says which form could."""
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=r"rows\.json: the row at line \d is not JSON: .*\.jsonl"):
        read(tmp_path / "rows.json")


JSON_VALUES = st.one_of(st.text(), st.integers(), st.none())


@given(values=st.lists(st.dictionaries(st.text(max_size=3), JSON_VALUES), max_size=9),
       indent=st.sampled_from([None, 1]), block=st.integers(1, 40))  # fmt: skip
def test_a_json_array_reads_as_json_does(
    tmp_path_factory: Any, values: list[Any], indent: int | None, block: int
) -> None:
    """Reading in blocks of any size gives what reading the whole gives."""
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8", errors="replace")
    wanted = json.loads(path.read_text(encoding="utf-8"))
    before = rows_module.BLOCK_BYTES
    rows_module.BLOCK_BYTES = block
    try:
        assert [row.value for row in read(path)] == wanted
    finally:
        rows_module.BLOCK_BYTES = before


def info_file(folder: Path, **entries: Any) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return folder


def test_dataset_info_of_llama_factory_is_understood(tmp_path: Path) -> None:
    """Columns and tags under other names, formatting, a number of samples; names are chosen with data.datasets."""
    write_rows(tmp_path / "own.jsonl", [{"ask": "q", "say": "a"}] * 3)
    write_rows(tmp_path / "talk.jsonl", [{"chat": [{"who": "me", "what": "q"}, {"who": "bot", "what": "a"}]}])
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "bot"}
    info_file(
        tmp_path,
        own={"file_name": "own.jsonl", "columns": {"prompt": "ask", "response": "say"}, "num_samples": 2},
        talk={"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"messages": "chat"}, "tags": tags},
    )
    for name, count in (("own", 2), ("talk", 1)):
        for entry in (tmp_path, tmp_path / "dataset_info.json"):
            source = list_chat_sources([str(entry)], [name]).found[0]
            found = [texts(conversation_of(row.value, source.fmt)) for row in read_rows(source)]
            assert found == [[("user", "q"), ("assistant", "a")]] * count, name
    assert len(list_chat_sources([str(tmp_path)], ["own", "talk"]).found) == 2


@pytest.mark.parametrize(
    ("entries", "names", "words"),
    [
        (
            {"a": {"file_name": "x"}, "b": {"file_name": "x"}},
            (),
            "has 2 data sets. Fix: data.datasets: one or more of a, b",
        ),
        ({"a": {"file_name": "x"}}, ("c",), "has no data set `c`"),
        ({"a": {"file_name": "gone.json"}}, (), "gone.json does not exist"),
        ({"a": {"file_name": "x", "ranking": True}}, (), "`ranking`"),
        ({"a": {"file_name": "x", "columns": {"images": "i"}}}, (), "`images`"),
        ({"a": {"file_name": "x", "formatting": "odd"}}, (), "formatting 'odd'"),
        ({"a": {"script_url": "x"}}, (), "neither `file_name` nor `hf_hub_url`"),
    ],
)
def test_dataset_info_that_cannot_be_used_is_refused(tmp_path: Path, entries: Any, names: Any, words: str) -> None:
    """CF-05: named with what is known instead."""
    with pytest.raises(UserError) as caught:
        list_chat_sources([str(info_file(tmp_path, **entries))], names)
    assert words in str(caught.value)


def test_data_set_that_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    """A split that is not there names those that are."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"a": 1}])
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "saved"))
    source = list_chat_sources([str(tmp_path / "saved")]).found[0]
    with pytest.raises(UserError, match=r"has no split `train`. Fix: one of test"):
        list(read_rows(source))
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read(tmp_path / "x.parquet")
