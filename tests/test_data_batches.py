"""Which rows make up which step: order, split, padding, resume; token files that were made elsewhere.

Scope: `batch.py`, `order.py`, `token_arrays.py`, `run_data.py` of `megatrain/data`.
Not here: packing (`test_data_packing.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain.config import DataConfig
from megatrain.data import IGNORED, StepBatches, batches_in_order, open_data
from megatrain.data.batch import WindowRows
from megatrain.data.order import Shuffle, split
from megatrain.errors import UserError
from tests.chat_tokenizer import END, MARKED, VOCAB_SIZE, chat_config, save_tokenizer, turns, write_rows

S = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat_rows(path: Path, count: int) -> Path:
    return write_rows(path, [{"messages": turns(f"q{n}", f"a{n}" * (1 + n % 3))} for n in range(count)])


def windows(count: int, seq_len: int) -> WindowRows:
    return WindowRows((np.arange(count * seq_len, dtype=np.int32),), "sha", seq_len)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("part", [0.5, 1.0])
def test_split_is_disjoint_covering_ordered_and_the_same_for_a_seed(part: float, seed: int) -> None:
    """DP-07: 1 row is an error, 2 rows are 1 + 1, 40 rows with a cap of 7 are 33 + 7."""
    with pytest.raises(UserError, match=r"1 row\(s\) of data cannot be split"):
        split(1, part, 7, seed)
    for count, sizes in ((2, (1, 1)), (40, (33, 7))):
        found, again = split(count, part, 7, seed), split(count, part, 7, seed)
        assert (len(found.train), len(found.validation)) == sizes
        assert np.array_equal(np.sort(np.concatenate([found.train, found.validation])), np.arange(count))
        assert (np.diff(found.train) > 0).all() and (np.diff(found.validation) > 0).all()
        assert np.array_equal(found.train, again.train) and np.array_equal(found.validation, again.validation)


def test_fingerprint_differs_by_seed_and_share_of_the_split() -> None:
    """DP-07: a resume with another split is noticed, even where the rows happen to be the same."""
    prints = set()
    for seed in (1, 2):
        for part in (0.5, 1.0):
            found = split(40, part, 7, seed)
            rows = WindowRows((np.arange(400),), "sha", 10, found.train)
            prints.add(StepBatches(rows, 2, 0, found.settings).fingerprint())
    assert len(prints) == 4, prints


@given(count=st.integers(2, 300), part=st.floats(0.001, 1.0) | st.integers(1, 299), seed=st.integers(0, 2**63 - 1))
def test_a_split_leaves_something_on_both_sides(count: int, part: float, seed: int) -> None:
    """Any share or number: at least one row each, no row twice, none lost; a number is met exactly."""
    if isinstance(part, int) and part >= count:
        with pytest.raises(UserError, match="would leave none to train on"):
            split(count, part, None, seed)
        return
    found = split(count, part, None, seed)
    assert len(found.train) >= 1 and len(found.validation) >= 1
    assert sorted([*found.train, *found.validation]) == list(range(count))
    if isinstance(part, int):
        assert len(found.validation) == part


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 60), batch=st.integers(1, 70), seed=st.integers(0, 9), start=st.integers(0, 40))
def test_an_epoch_holds_every_row_once_from_wherever_a_run_resumes(
    count: int, batch: int, seed: int, start: int
) -> None:
    """DP-10, P3: batch_at is a pure function; a run that begins at any step sees what one from step 0 would have seen.

    OM-09: no batch is incomplete; one that crosses the end of an epoch goes on with the next.
    """
    epochs = 3
    steps = -(-count * epochs // batch)
    whole = StepBatches(windows(count, 2), batch, seed)
    ids = [whole.batch_at(step).input_ids for step in range(steps)]
    assert all(found.shape == (batch, 2) for found in ids)
    firsts = np.concatenate(ids)[: count * epochs, 0] // 2
    for epoch in np.split(firsts, epochs):
        assert sorted(epoch) == list(range(count))
    resumed = StepBatches(windows(count, 2), batch, seed)
    for step in range(min(start, steps - 1), steps):
        assert np.array_equal(resumed.batch_at(step).input_ids, ids[step]), step


def test_shuffle_differs_by_seed_and_epoch() -> None:
    """A pure function of (seed, epoch), and of both."""
    orders = [tuple(Shuffle(50, seed).at(epoch * 50 + n) for n in range(50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(50)) for order in orders)


def test_every_token_of_a_text_window_is_learned(tmp_path: Path) -> None:
    """Windows of text need no padding, no positions and no mask; the first token of each has nothing before it."""
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 5)
    data = DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer="bytes", seq_len=16)
    batches = open_data(data, 256, tmp_path / "cache", 3).batches(4, 3)
    for step in range(50):
        batch = batches.batch_at(step)
        assert np.array_equal(batch.labels, batch.input_ids)
        assert (batch.supervised, batch.position_ids, batch.lengths.tolist()) == (4 * 15, None, [16] * 4)


def padded(tokenizer: Path, folder: Path, **changes: Any) -> Any:
    path = chat_rows(folder / "rows.jsonl", 10)
    return open_data(chat_config(tokenizer, path, **{"seq_len": S, **changes}), VOCAB_SIZE, folder / "cache", 5)


def test_real_end_is_a_target_and_padding_is_not(tmp_path: Path) -> None:
    """DP-01: the pad token is the end token; what is padding is told by the length alone."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", MARKED.replace("{{ '\n' }}{% else", "{% else"), pad=False)
    batch = padded(tokenizer, tmp_path).batches(10, 0).batch_at(0)
    end = 257
    for ids, labels, length in zip(batch.input_ids, batch.labels, batch.lengths, strict=True):
        assert (ids[length:] == end).all() and (labels[length:] == IGNORED).all()
        assert ids[length - 1] == labels[length - 1] == end, "the answer's own end is learned"
        assert ((labels == IGNORED) | (labels == ids)).all()
    assert batch.supervised == int((batch.labels[:, 1:] != IGNORED).sum()) > 0


def test_padding_value_never_reaches_the_loss(tmp_path: Path, tokenizer: Path) -> None:
    """DP-08: another padding value, the same loss and the same gradient, bit by bit."""
    from transformers import AutoModelForCausalLM

    from megatrain.model import model_config
    from tests.models import MODELS

    batch = padded(tokenizer, tmp_path).batches(4, 0).batch_at(0)
    config = model_config({**MODELS["llama"], "vocab_size": VOCAB_SIZE})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def loss_and_gradient(padding: int) -> tuple[float, torch.Tensor]:
        ids = torch.from_numpy(batch.input_ids.copy())
        ids[torch.arange(S)[None] >= torch.from_numpy(batch.lengths)[:, None]] = padding
        model.zero_grad()
        out = model(input_ids=ids, labels=torch.from_numpy(batch.labels), num_items_in_batch=batch.supervised)
        out.loss.backward()
        return out.loss.item(), model.lm_head.weight.grad.clone()

    (loss, gradient), (other_loss, other_gradient) = loss_and_gradient(0), loss_and_gradient(200)
    assert loss == other_loss and torch.equal(gradient, other_gradient)


@pytest.mark.parametrize(("validation", "most", "held"), [(0.2, None, 2), (3, None, 3), (1.0, 4, 4)])
def test_held_out_rows_are_never_trained_on(
    tmp_path: Path, tokenizer: Path, validation: Any, most: Any, held: int
) -> None:
    """DP-07 in a run: a share, a number and a capped share; every sample is on one side."""
    found = padded(tokenizer, tmp_path, validation=validation, validation_max=most)
    assert found.validation is not None and (len(found.train), len(found.validation)) == (10 - held, held)
    trained = found.batches(10 - held, 0).batch_at(0).input_ids
    tested = np.concatenate([batch.input_ids for batch in batches_in_order(found.validation, 10)])[:held]
    assert len({row.tobytes() for row in (*trained, *tested)}) == 10


def test_validation_data_may_be_a_file_of_its_own(tmp_path: Path, tokenizer: Path) -> None:
    """Kept in a cache of its own; the data to train on is whole."""
    other = chat_rows(tmp_path / "held-out.jsonl", 3)
    found = padded(tokenizer, tmp_path, validation=str(other))
    assert found.validation is not None and (len(found.train), len(found.validation)) == (10, 3)
    assert (tmp_path / "cache" / "validation" / "samples.json").is_file()


def test_evaluation_sees_every_row_once_and_fills_up_with_nothing(tmp_path: Path, tokenizer: Path) -> None:
    """The last batch keeps the shape of the others; what fills it is not counted."""
    rows = padded(tokenizer, tmp_path).train
    batches = list(batches_in_order(rows, 4))
    assert [batch.input_ids.shape for batch in batches] == [(4, S)] * 3
    assert batches[2].lengths[2:].tolist() == [0, 0] and (batches[2].labels[2:] == IGNORED).all()
    whole = next(batches_in_order(rows, 10))
    assert sum(batch.supervised for batch in batches) == whole.supervised


def tokens_config(*paths: Path, **changes: Any) -> DataConfig:
    return DataConfig(
        **{"kind": "tokens", "paths": tuple(map(str, paths)), "tokenizer": "bytes", "seq_len": 8, **changes}
    )


def written(folder: Path, ids: NDArray[Any], kind: str) -> DataConfig:
    if kind == "npy":
        np.save(folder / "ids.npy", ids.astype(np.int64))
        return tokens_config(folder / "ids.npy")
    (folder / "ids.bin").write_bytes(ids.astype(np.dtype(kind).newbyteorder("<")).tobytes())
    return tokens_config(folder / "ids.bin", dtype=kind)


@pytest.mark.parametrize("kind", ["npy", "uint16", "uint32", "int32"])
def test_token_files_are_mapped_where_they_lie(tmp_path: Path, kind: str) -> None:
    """kind: tokens: the ids of the file in windows; nothing is copied, and the check is done once."""
    ids = np.random.default_rng(0).integers(0, 300, size=100)
    data = written(tmp_path, ids, kind)
    looked: list[int] = []
    for _ in range(2):
        found = open_data(data, 300, tmp_path / "cache", 0, lambda done, total: looked.append(done))
        rows = np.concatenate([batch.input_ids for batch in batches_in_order(found.train, 4)])
        assert np.array_equal(rows, ids[:96].reshape(12, 8))
    assert len(looked) == 1 and [path.name for path in (tmp_path / "cache").iterdir()] == ["arrays.json"]


def test_windows_do_not_cross_token_files(tmp_path: Path) -> None:
    """Each file's last incomplete window is left out."""
    for name, first in (("a", 0), ("b", 100)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 20))
    found = open_data(tokens_config(tmp_path), 300, tmp_path / "cache", 0)
    rows = [found.train.fill(n, row := np.zeros(8, np.int64), np.zeros(8, np.int64), None) and row[0] for n in range(4)]
    assert [int(first) for first in rows] == [0, 8, 100, 108]


@pytest.mark.parametrize(
    ("bad", "words"),
    [(64, "token 5 has the id 64, but the model's table has 64 rows"), (-1, "token 5 has the id -1")],
)
def test_token_beyond_the_table_is_refused(tmp_path: Path, bad: int, words: str) -> None:
    """MA-11: position, id and table size."""
    ids = np.arange(20)
    ids[5] = bad
    with pytest.raises(UserError) as caught:
        open_data(written(tmp_path, ids, "int32"), 64, tmp_path / "cache", 0)
    assert words in str(caught.value)


def test_token_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """CF-05: no dtype, half an id, a pickle, numbers with fractions, fewer tokens than a window."""
    (tmp_path / "odd.bin").write_bytes(b"xyz")
    np.save(tmp_path / "floats.npy", np.zeros(20))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.zeros(7, dtype=np.int32))
    faults = {
        "odd.bin": (None, "data.dtype: uint16, uint32 or int32"),
        "odd.bin ": ("uint16", "3 bytes, which are no whole ids of 2 bytes"),
        "floats.npy": (None, "holds float64"),
        "objects.npy": (None, "cannot be read as token ids"),
        "short.npy": (None, "has 7 tokens, one window of data.seq_len needs 8"),
    }
    for name, (dtype, words) in faults.items():
        with pytest.raises(UserError) as caught:
            open_data(tokens_config(tmp_path / name.strip(), dtype=dtype), 64, tmp_path / "cache", 0)
        assert words in str(caught.value), name


def test_several_turns_all_count(tmp_path: Path, tokenizer: Path) -> None:
    """Loss weighted by supervised tokens: `supervised` counts both answers and both ends of turn."""
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns("q", "abc", "q", "de")}])
    batch = open_data(chat_config(tokenizer, path), VOCAB_SIZE, tmp_path / "cache", 0).batches(2, 0).batch_at(0)
    assert batch.supervised == 2 * (len("abc") + 1 + len("de") + 1), END
