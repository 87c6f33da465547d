"""Chat data becomes samples once, as a stream; every row that is left out has its reason and its line.

Scope: `prepare_samples` and the files it writes (`chat.py`, `sample_file.py`, `seen.py` of `megatrain/data`).
Not here: what is learned (`test_data_template.py`), formats (`test_data_formats.py`), batches (`test_data_batches.py`).
"""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import seen as seen_module
from megatrain.data.chat import prepare_samples
from megatrain.data.sample_file import SampleFile
from megatrain.data.seen import SeenRows
from megatrain.errors import UserError
from tests.chat_tokenizer import (
    COUNTED,
    END,
    MARKED,
    VOCAB_SIZE,
    chat_config,
    learned,
    save_tokenizer,
    turns,
    write_rows,
)
from tiering.errors import DiskFullError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": turns(f"question {n}?", f"answer {n}")} for n in range(count)]


def test_samples_are_the_rows_in_order(tmp_path: Path, tokenizer: Path) -> None:
    """Ids, supervision, line and source of every sample; two files in the order of their paths."""
    write_rows(tmp_path / "b.jsonl", rows(3)[2:])
    write_rows(tmp_path / "a.jsonl", rows(2))
    found = prepare_samples(chat_config(tokenizer, tmp_path), VOCAB_SIZE, tmp_path / "cache")
    assert (found.samples, found.rejected, found.changes) == (3, {}, {"whole": 3})
    samples = [found.sample(n) for n in range(3)]
    assert [(sample.source, sample.line) for sample in samples] == [(0, 1), (0, 2), (1, 1)]
    assert [Path(source).name for source in found.sources] == ["a.jsonl", "b.jsonl"]
    answers = [learned(tokenizer, sample.ids.tolist(), sample.supervised.tolist()) for sample in samples]
    assert answers == [f"answer {n}{END}" for n in range(3)]
    assert found.targets == sum(sample.supervised.sum() for sample in samples)
    assert found.lengths().tolist() == [len(sample.ids) for sample in samples]


def test_every_row_that_is_left_out_is_listed(tmp_path: Path, tokenizer: Path) -> None:
    """Empty, duplicate and invalid rows: counted by reason, listed with line and detail, never silent."""
    good = rows(1)[0]
    shared = {"conversations": [{"from": "human", "value": "question 0?"}, {"from": "gpt", "value": "answer 0"}]}
    path = write_rows(tmp_path / "rows.jsonl", [good, "", "{", good, shared, {"messages": turns("q" * 500, "a")}])
    found = prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / "cache")
    listed = [(rejected.line, rejected.reason, rejected.detail) for rejected in found.rejections()]
    assert [(line, reason) for line, reason, _ in listed] == [
        (2, "an empty line"),
        (3, "not JSON"),
        (4, "the same as an earlier row"),
        (5, "the same as an earlier row"),
        (6, "longer than data.seq_len before the first answer"),
    ]
    assert listed[2][2] == "line 1" and listed[4][2].endswith("room for 128"), listed
    assert found.rejected["the same as an earlier row"] == 2 and found.samples == 1
    other = write_rows(tmp_path / "z.jsonl", [good])
    again = prepare_samples(chat_config(tokenizer, path, other), VOCAB_SIZE, tmp_path / "cache")
    assert list(again.rejections())[-1].detail == f"line 1 of {path}"


def test_no_usable_row_is_an_error_with_the_first_reason(tmp_path: Path, tokenizer: Path) -> None:
    """Nothing to train on is said before training, with an example."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(
        UserError, match=r"no row can be used, 1 were read; the first one, line 1 of .*no known columns"
    ):
        prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / "cache")


def test_id_beyond_the_table_names_row_id_and_table(tmp_path: Path, tokenizer: Path) -> None:
    """MA-11: row number, id and table size, before training; nothing is left behind."""
    path = write_rows(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(UserError) as caught:
        prepare_samples(chat_config(tokenizer, path), 256, tmp_path / "cache")
    assert f"{path}: row 1: token 0 has the id 256, but the model's table has 256 rows" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_template_without_markers_is_refused_before_any_row(tmp_path: Path) -> None:
    """DP-03: the whole run is refused, not every row of it; asked to learn everything it is fine."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", COUNTED)
    path = write_rows(tmp_path / "rows.jsonl", rows(2))
    with pytest.raises(
        UserError, match=r"data.train_on: assistant does not work with the chat template of .*tokenizer"
    ):
        prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    found = prepare_samples(chat_config(tokenizer, path, train_on="all"), VOCAB_SIZE, tmp_path / "cache")
    assert found.targets == found.tokens - found.samples, "all but the first token of each sample"


def test_cache_is_used_again_for_the_same_only(tmp_path: Path, tokenizer: Path) -> None:
    """Keyed by data, tokenizer, template and settings; damage is noticed, and each part of it alone."""
    path, cache = write_rows(tmp_path / "rows.jsonl", rows(4)), tmp_path / "cache"

    def inode(**changes: Any) -> int:
        prepare_samples(chat_config(tokenizer, path, **changes), VOCAB_SIZE, cache)
        return (cache / "samples.json").stat().st_ino

    last = inode()
    assert inode() == last, "the same is not made again"
    template = tmp_path / "chat.jinja"
    template.write_text(MARKED)
    for changes in ({"seq_len": 100}, {"packing": True}, {"train_on": "all"}, {"chat_template": str(template)}):
        last = inode(**changes)
        assert inode(**changes) == last, changes
        made = json.loads((cache / "samples.json").read_text())["origin"]
        inode()
        assert json.loads((cache / "samples.json").read_text())["origin"] != made, changes
    for name in ("ids.bin", "supervised.bin", "index.bin", "samples.json"):
        os.truncate(cache / name, 3)
        assert SampleFile.load(cache) is None, name
        assert prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, cache).samples == 4
    (cache / "rejected.jsonl").unlink()
    assert SampleFile.load(cache) is None
    inode()
    write_rows(path, rows(5))
    assert prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, cache).samples == 5


def test_half_written_cache_is_never_used(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: a failure at any replacement leaves no header; no temporary file stays."""
    path, cache, real = write_rows(tmp_path / "rows.jsonl", rows(2)), tmp_path / "cache", os.replace
    prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, cache)
    write_rows(path, rows(3))

    def fail_at(wanted: str) -> Any:
        def replace(source: Any, target: Any) -> None:
            if Path(target).name == wanted:
                raise OSError(28, "No space left on device")
            real(source, target)

        return replace

    for wanted in ("ids.bin", "supervised.bin", "index.bin", "rejected.jsonl", "samples.json"):
        monkeypatch.setattr(os, "replace", fail_at(wanted))
        with pytest.raises(DiskFullError, match=r"\d+ bytes free"):
            prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, cache)
        assert SampleFile.load(cache) is None, wanted
        assert not list(cache.glob("*.tmp")), wanted
    monkeypatch.setattr(os, "replace", real)
    assert prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, cache).samples == 3
    with pytest.raises(UserError, match="cannot be written"):
        prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, path / "under-a-file")


def test_tokenising_takes_no_more_memory_for_more_data(tmp_path: Path, tokenizer: Path) -> None:
    """P2: four times the rows, the same peak of Python memory but for the table of seen rows."""
    peaks = []
    for count in (1000, 4000):
        path = write_rows(tmp_path / f"{count}.jsonl", rows(count))
        prepare_samples(
            chat_config(tokenizer, write_rows(tmp_path / "warm.jsonl", rows(9))), VOCAB_SIZE, tmp_path / "w"
        )
        tracemalloc.start()
        prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / f"cache{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 3000 * 64 + (64 << 10), peaks


def test_progress_ends_at_the_whole(tmp_path: Path, tokenizer: Path) -> None:
    """Progress never runs backwards or past the end."""
    paths = [write_rows(tmp_path / f"{name}.jsonl", rows(150)) for name in "ab"]
    seen: list[tuple[int, int]] = []
    prepare_samples(
        chat_config(tokenizer, *paths), VOCAB_SIZE, tmp_path / "cache", lambda done, total: seen.append((done, total))
    )
    total = sum(path.stat().st_size for path in paths)
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) >= 6, seen


@given(digests=st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=200))
def test_seen_rows_behave_as_a_dict(digests: list[int]) -> None:
    """The table of digests, from a few slots through several growths, against a dict."""
    before, seen_module.FIRST_SLOTS = seen_module.FIRST_SLOTS, 4
    try:
        found, model = SeenRows(), {}
    finally:
        seen_module.FIRST_SLOTS = before
    for number, digest in enumerate(digests, start=1):
        assert found.first(digest, number) == model.get(digest), (digest, number)
        model.setdefault(digest, number)


def test_files_are_what_their_description_says(tmp_path: Path, tokenizer: Path) -> None:
    """A person can read the cache with numpy alone."""
    path = write_rows(tmp_path / "rows.jsonl", rows(3))
    found = prepare_samples(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / "cache")
    ids = np.fromfile(tmp_path / "cache" / "ids.bin", dtype="<u2")
    assert len(ids) == found.tokens == int(found.index["end"][-1])
    assert SampleFile.load(tmp_path / "cache") == found
