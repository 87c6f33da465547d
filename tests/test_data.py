"""Data: which files are read, that tokens are those of the text, and which windows make up which step."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.config import DataConfig
from megatrain.data import StepBatches, TokenFile, prepare_tokens
from megatrain.data import text as text_module
from megatrain.data.batch import WindowRows
from megatrain.data.sources import list_sources
from megatrain.data.tokens import token_dtype
from megatrain.errors import UserError
from tiering.errors import DiskFullError


def data_of(*paths: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"paths": tuple(str(p) for p in paths), "tokenizer": "bytes", "seq_len": 4, **changes})


def names(*paths: Path | str) -> list[str]:
    return [Path(source.path).name for source in list_sources([str(p) for p in paths]).files]


@pytest.fixture
def words_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json of twelve words; every other word is id 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0} | {f"w{n}": n for n in range(1, 12)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def test_folder_gives_its_text_files_in_sorted_order(tmp_path: Path) -> None:
    """The order of tokens is that of the sorted paths, whatever order the file system lists them in."""
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.bin", "e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = list_sources([str(tmp_path)])
    assert [Path(s.path).name for s in sources.files] == ["a.md", "b.txt", "c.py"]
    assert sources.left_out == Counter({"of another suffix": 2})


def test_links_in_a_folder_are_left_out_and_counted(tmp_path: Path) -> None:
    """A link may lead out of the folder or around in a circle; it is followed only where it is named."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "loop").symlink_to(".")
    assert names(tmp_path) == ["a.txt"]
    assert list_sources([str(tmp_path)]).left_out == Counter({"symbolic link": 2})
    assert names(tmp_path / "link.txt") == ["link.txt"]


def test_pattern_takes_what_it_matches_and_no_file_twice(tmp_path: Path) -> None:
    """A pattern is not held to the suffixes of a folder; a file that two entries give is read once."""
    for name in ("a.bin", "b.bin", "c.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "dir.bin").mkdir()
    assert names(tmp_path / "*.bin") == ["a.bin", "b.bin"]
    assert names(tmp_path / "*.txt", tmp_path, tmp_path / "c.txt") == ["[x].txt", "c.txt"]
    assert names(tmp_path / "[x].txt") == ["[x].txt"]


@pytest.mark.parametrize("kind", ["missing", "empty folder", "no match", "fifo", "broken link"])
def test_entry_without_a_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """CF-05: an entry of data.paths that stands for nothing."""
    path = tmp_path / "entry"
    if kind == "empty folder":
        path.mkdir()
        (path / "x.bin").write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "no match":
        path = tmp_path / "*.txt"
    with pytest.raises(UserError, match=r"^data\.paths: ") as caught:
        list_sources([str(path)])
    assert str(path) in str(caught.value)


def test_byte_tokens_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    """Tokens of `bytes` are the files end to end, whatever the bytes are."""
    (tmp_path / "b.txt").write_bytes(bytes(range(256)))
    (tmp_path / "a.txt").write_bytes(b"first \r\n \xff")
    tokens = prepare_tokens(data_of(tmp_path), 256, tmp_path / "cache")
    assert tokens.ids.tobytes() == b"first \r\n \xff" + bytes(range(256))
    assert (tokens.count, tokens.ids.dtype) == (266, np.uint8)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_tokens_take_the_smallest_dtype(vocab_size: int, dtype: str) -> None:
    """The largest id, vocab_size - 1, fits and the next smaller dtype would not hold it."""
    assert token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_tokens_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, words_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Streaming cuts at line ends: the ids are those of the whole text. Both forms of data.tokenizer work."""
    from tokenizers import Tokenizer

    text = "".join(f"w{n % 11 + 1} wé\u20ac{n}\n" for n in range(50)) + "w3 w4"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    monkeypatch.setattr(text_module, "BLOCK_BYTES", max(block_bytes, 4))
    wanted = Tokenizer.from_file(str(words_tokenizer)).encode(text).ids
    for tokenizer in (words_tokenizer, words_tokenizer.parent):
        tokens = prepare_tokens(data_of(tmp_path / "a.txt", tokenizer=str(tokenizer)), 300, tmp_path / "cache")
        assert tokens.ids.tolist() == wanted


def test_a_line_longer_than_the_block_is_cut_between_characters(
    tmp_path: Path, words_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays bounded for a file without line ends, and no character is torn."""
    text = "\u20ac é 𝄞 w1 " * 40
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 5)
    source = list_sources([str(tmp_path / "a.txt")]).files[0]
    blocks = list(text_module._text_blocks(source))
    assert "".join(block for _, block in blocks) == text
    assert max(len(block.encode()) for _, block in blocks) <= 5 * 5
    assert blocks[-1][0] == source.nbytes


def test_id_beyond_the_table_names_file_position_id_and_table(tmp_path: Path, words_tokenizer: Path) -> None:
    """MA-11: refused in data preparation, not by an index error inside the model."""
    path = tmp_path / "a.txt"
    path.write_text("w1 w2 w9 w3\n")
    with pytest.raises(UserError) as caught:
        prepare_tokens(data_of(path, tokenizer=str(words_tokenizer)), 9, tmp_path / "cache")
    assert f"{path}: token 2 has the id 9, but the model's table has 9 rows" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_bytes_need_a_table_of_256_rows(tmp_path: Path) -> None:
    """MA-11: known before a file is read, and nothing is written."""
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"vocab_size >= 256, this one has 64"):
        prepare_tokens(data_of(tmp_path / "a.txt"), 64, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("extra", [-1, 0])
def test_fewer_tokens_than_a_window_are_refused_with_both_counts(tmp_path: Path, extra: int) -> None:
    """CF-06: exactly one window is enough, one token less is not."""
    (tmp_path / "a.txt").write_bytes(b"x" * (100 + extra))
    data = data_of(tmp_path / "a.txt", seq_len=100)
    if extra == 0:
        assert prepare_tokens(data, 256, tmp_path / "cache").count == 100
        return
    with pytest.raises(UserError, match=r"give 99 tokens, one window of data\.seq_len needs 100"):
        prepare_tokens(data, 256, tmp_path / "cache")


def test_file_that_is_not_text_is_left_out_whole_unless_named(
    tmp_path: Path, words_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bad file gave before its fault is taken back, and the notice counts it; a named file is an error."""
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 8)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("w1 w2\n")
    (folder / "b.txt").write_bytes(b"w3 w4\nw5 w6\n\xff\xfe\n")
    (folder / "c.txt").write_text("w7 w8\n")
    tokens = prepare_tokens(data_of(folder, tokenizer=str(words_tokenizer)), 12, tmp_path / "cache")
    assert tokens.ids.tolist() == [1, 2, 7, 8]
    assert "1 not UTF-8 left out" in tokens.notices[0]
    (folder / "b.txt").unlink()
    alone = prepare_tokens(data_of(folder, tokenizer=str(words_tokenizer)), 12, tmp_path / "alone")
    assert alone.sha256 == tokens.sha256
    (tmp_path / "bad.txt").write_bytes(b"w1 w2\n\xff")
    with pytest.raises(UserError, match=r"bad\.txt is not UTF-8: byte 6"):
        prepare_tokens(data_of(folder, tmp_path / "bad.txt", tokenizer=str(words_tokenizer)), 12, tmp_path / "bad")


def test_unusable_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """CF-05: a tokenizer.json that is missing or none."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        prepare_tokens(data_of(tmp_path / "a.txt", tokenizer=str(tmp_path)), 256, tmp_path / "cache")
    with pytest.raises(UserError, match=r"gone\.json cannot be read"):
        prepare_tokens(data_of(tmp_path / "a.txt", tokenizer=str(tmp_path / "gone.json")), 256, tmp_path / "cache")


def test_cache_is_used_again_for_the_same_files_only(tmp_path: Path) -> None:
    """Tokenised once; a file that changed, another vocabulary or a damaged cache is noticed."""
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("some text")
    first = prepare_tokens(data_of(path), 256, cache)
    written = (cache / "tokens.bin").stat().st_mtime_ns, (cache / "tokens.bin").stat().st_ino

    def inode_after(vocab_size: int = 256) -> tuple[int, int]:
        prepare_tokens(data_of(path), vocab_size, cache)
        return (cache / "tokens.bin").stat().st_mtime_ns, (cache / "tokens.bin").stat().st_ino

    assert inode_after() == written
    path.write_text("same size")
    os.utime(path, ns=(1, 1))
    changed = inode_after()
    assert changed != written
    assert prepare_tokens(data_of(path), 256, cache).sha256 != first.sha256
    assert (widened := inode_after(300)) != changed
    for damage in (lambda: os.truncate(cache / "tokens.bin", 3), lambda: (cache / "tokens.json").write_text("{")):
        damage()
        assert TokenFile.load(cache) is None
        assert inode_after(300) != widened
        assert prepare_tokens(data_of(path), 300, cache).ids.tolist() == list(b"same size")


def test_failure_while_writing_leaves_the_old_cache_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: a cache is whole or absent; a temporary file does not stay behind."""
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("old text")
    prepare_tokens(data_of(path), 256, cache)
    path.write_text("the new text")
    real = os.replace

    def fail_at(wanted: str) -> Any:
        def replace(source: Any, target: Any) -> None:
            if str(target).endswith(wanted):
                raise OSError(28, "No space left on device")
            real(source, target)

        return replace

    for wanted in ("tokens.bin", "tokens.json"):
        monkeypatch.setattr(os, "replace", fail_at(wanted))
        with pytest.raises(DiskFullError, match=r"12 bytes wanted, \d+ free"):
            prepare_tokens(data_of(path), 256, cache)
        assert TokenFile.load(cache) is None
        assert not list(cache.glob("*.tmp"))
    monkeypatch.setattr(os, "replace", real)
    assert prepare_tokens(data_of(path), 256, cache).ids.tobytes() == b"the new text"
    with pytest.raises(UserError, match="cannot be written"):
        prepare_tokens(data_of(path), 256, path / "under-a-file")


def test_progress_ends_at_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress never runs backwards or past the end."""
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 10)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 33)
    seen: list[tuple[int, int]] = []
    prepare_tokens(data_of(tmp_path), 256, tmp_path / "cache", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (66, 66) and len(seen) >= 8, seen


def test_header_is_plain_json(tmp_path: Path) -> None:
    """What a cache was made from can be read by a person, and nothing in it is executed."""
    (tmp_path / "a.txt").write_text("text")
    tokens = prepare_tokens(data_of(tmp_path / "a.txt"), 256, tmp_path / "cache")
    header = json.loads((tmp_path / "cache" / "tokens.json").read_text())
    assert (header["count"], header["origin"]["kind"], header["origin"]["tokenizer"]) == (4, "text", "bytes")
    assert TokenFile.load(tmp_path / "cache") == tokens


def counted(folder: Path, count: int) -> TokenFile:
    """A token file of `count` tokens in which token n is n modulo 2^16."""
    folder.mkdir(exist_ok=True)
    text = folder / "source.txt"
    text.write_text("x")
    tokens = prepare_tokens(data_of(text).model_copy(update={"seq_len": 1}), 65536, folder / "cache")
    np.arange(count, dtype="<u2").tofile(folder / "cache" / "tokens.bin")
    return TokenFile(folder=tokens.folder, origin=tokens.origin, count=count, sha256=f"of {count}")


def batches_of(tokens: TokenFile, seq_len: int, batch: int, seed: int) -> StepBatches:
    return StepBatches(WindowRows((tokens.ids,), tokens.sha256, seq_len), batch, seed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(5, 200), seq_len=st.integers(1, 5), batch=st.integers(1, 70), seed=st.integers(0, 9))
def test_an_epoch_holds_every_window_once(tmp_path: Path, count: int, seq_len: int, batch: int, seed: int) -> None:
    """Windows do not overlap, none is missing or double in an epoch, and steps cross epochs without a gap."""
    batches = batches_of(counted(tmp_path, count), seq_len, batch, seed)
    epochs = 3
    windows = len(batches.rows)
    steps = -(-windows * epochs // batch)
    rows = np.concatenate([batches.batch_at(step).input_ids for step in range(steps)])[: windows * epochs]
    wanted = np.arange(count // seq_len * seq_len).reshape(-1, seq_len)
    for epoch in np.split(rows, epochs):
        assert np.array_equal(epoch[np.argsort(epoch[:, 0])], wanted), (epoch, wanted)


def test_batch_is_a_pure_function_of_seed_and_step(tmp_path: Path) -> None:
    """DP-10, P3: a resumed run sees the samples that an uninterrupted one would have seen, in any order of asking."""
    tokens = counted(tmp_path, 1000)
    forward = batches_of(tokens, 8, 6, 1)
    wanted = [forward.batch_at(step).input_ids for step in range(60)]
    backward = batches_of(tokens, 8, 6, 1)
    for step in reversed(range(60)):
        assert np.array_equal(backward.batch_at(step).input_ids, wanted[step]), step
    assert wanted[0].shape == (6, 8) and wanted[0].dtype == np.int64
    other_seed = batches_of(tokens, 8, 6, 2)
    assert not np.array_equal(other_seed.batch_at(0).input_ids, wanted[0])
    epochs = [batches_of(tokens, 8, 125, 1).batch_at(epoch).input_ids[:, 0].tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != sorted(epochs[0])


def test_fingerprint_tells_apart_what_gives_other_batches(tmp_path: Path) -> None:
    """P3: resume compares it, so that other text, sizes or seed never go on silently."""
    tokens, fewer = counted(tmp_path / "a", 100), counted(tmp_path / "b", 99)
    kinds = [(tokens, 8, 6, 1), (fewer, 8, 6, 1), (tokens, 4, 6, 1), (tokens, 8, 3, 1), (tokens, 8, 6, 2)]
    prints = [batches_of(*kind).fingerprint() for kind in kinds]
    assert len(set(prints)) == len(kinds), prints
    assert batches_of(*kinds[0]).fingerprint() == prints[0]
