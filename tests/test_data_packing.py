"""Packed samples: each in one row, and none sees another.

Scope: `packing.py` and packed rows of `batch.py`, against separate samples in transformers.
Not here: padded rows (`test_data_batches.py`).
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megatrain.config import load_run
from megatrain.data import IGNORED, Batch, batches_in_order, open_data
from megatrain.data.files import PACKED_MODEL_TYPES
from megatrain.data.packing import pack
from megatrain.data.run_data import RunData
from megatrain.errors import UserError
from megatrain.model import model_config
from megatrain.preflight import check_files
from tests.chat_tokenizer import VOCAB_SIZE, chat_config, save_tokenizer, turns, write_rows
from tests.families import FAMILIES
from tests.models import MODELS

S = 64
TOLERANCE = 5e-6
"""Of a logit, relative to the largest one: the rounding of FP32 in matrices of other sizes."""


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), spare=st.integers(0, 5))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int], spare: int) -> None:
    """And no two rows could have been one."""
    room = 20 + spare
    rows = pack(lengths, room)
    assert sorted(int(sample) for row in rows for sample in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[sample] for sample in row) for row in rows)
    assert used[-1] <= room and (len(used) < 2 or used[0] + used[1] > room), (used, room)


@pytest.fixture
def both(tmp_path: Path) -> tuple[RunData, RunData]:
    """The same eight conversations, packed and padded."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": turns(f"q{n}", "a" * (n % 4) + str(n))} for n in range(7)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, {"messages": turns("q" * 20, "long")}])
    packed, padded = (
        open_data(chat_config(tokenizer, path, seq_len=S * 2, packing=on), VOCAB_SIZE, tmp_path / str(on), 0)
        for on in (True, False)
    )
    return packed, padded


def test_packed_rows_hold_what_separate_rows_hold(both: tuple[RunData, RunData]) -> None:
    """The same samples, fewer rows, the same count of supervised tokens; positions restart where a sample begins."""
    packed, padded = both
    assert len(packed.train) < len(padded.train) == 8
    one, other = next(batches_in_order(packed.train, 8)), next(batches_in_order(padded.train, 8))
    assert one.supervised == other.supervised
    samples = {row[:length].tobytes() for row, length in zip(other.input_ids, other.lengths, strict=True)}
    assert {ids.tobytes() for ids, _, _ in _pieces(one)} == samples
    for _, labels, positions in _pieces(one):
        assert labels[0] == IGNORED and positions.tolist() == list(range(len(positions)))
    assert (one.lengths < one.input_ids.shape[1]).all(), "a row ends with padding"
    assert ((one.position_ids == 0).sum(axis=1) >= 2).all(), "rows that hold nothing have two sequences too"


def _pieces(batch: Batch) -> list[Any]:
    """(ids, labels, positions) of every sample in a packed batch."""
    assert batch.position_ids is not None
    found = []
    for row, length in enumerate(batch.lengths):
        begins = [*np.flatnonzero(batch.position_ids[row, :length] == 0), length]
        found += [
            tuple(part[row, begin:end] for part in (batch.input_ids, batch.labels, batch.position_ids))
            for begin, end in pairwise(begins)
        ]
    return found


def _model(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    changes = {"n_positions": 2 * S} if config["model_type"] == "gpt2" else {"max_position_embeddings": 2 * S}
    full = {**config, **changes, "vocab_size": VOCAB_SIZE}
    return AutoModelForCausalLM.from_config(model_config(full), dtype=torch.float32).eval()


def _furthest(model: Any, batch: Batch) -> float:
    """The largest difference of a logit of a packed sample from the sample alone, relative to the largest logit."""
    with torch.no_grad():
        whole = model(
            input_ids=torch.from_numpy(batch.input_ids),
            position_ids=torch.from_numpy(batch.position_ids),
            use_cache=False,
        ).logits
        furthest = 0.0
        for row, length in enumerate(batch.lengths):
            begins = [*np.flatnonzero(batch.position_ids[row, :length] == 0), int(length)]
            for begin, end in pairwise(begins):
                ids = torch.from_numpy(batch.input_ids[row : row + 1, begin:end])
                alone = model(input_ids=ids, use_cache=False).logits[0]
                furthest = max(furthest, (whole[row, begin:end] - alone).abs().max().item())
    return furthest / whole.abs().max().item()


@pytest.mark.parametrize("name", sorted(PACKED_MODEL_TYPES))
def test_no_sample_sees_another(both: tuple[RunData, RunData], name: str) -> None:
    """Every model that packing is allowed for: the logits of a packed sample are those of the sample alone."""
    batch = next(batches_in_order(both[0].train, 3))
    found = _furthest(_model(FAMILIES[name]), batch)
    assert found < TOLERANCE, (name, found)


@pytest.mark.parametrize("name", ["opt", "gpt_oss"])
def test_models_that_packing_is_refused_for_do_see_others(both: tuple[RunData, RunData], name: str) -> None:
    """The refusal is not idle: there a packed sample has other logits. When this fails, the list may grow."""
    assert name not in PACKED_MODEL_TYPES
    assert _furthest(_model(FAMILIES[name]), next(batches_in_order(both[0].train, 3))) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_loss_and_gradient_of_packed_rows_are_those_of_separate_rows(both: tuple[RunData, RunData], name: str) -> None:
    """The loss of a step is weighted by its supervised tokens, so packing changes neither loss nor gradient."""
    model = _model(MODELS[name])
    found = []
    for data in both:
        batch = next(batches_in_order(data.train, 8))
        positions = None if batch.position_ids is None else torch.from_numpy(batch.position_ids)
        model.zero_grad()
        out = model(
            input_ids=torch.from_numpy(batch.input_ids),
            labels=torch.from_numpy(batch.labels),
            position_ids=positions,
            num_items_in_batch=batch.supervised,
            use_cache=False,
        )
        out.loss.backward()
        found.append((out.loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, gradient), (other_loss, other_gradient) = found
    assert abs(loss - other_loss) < TOLERANCE * other_loss
    assert (gradient - other_gradient).norm() < 10 * TOLERANCE * other_gradient.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_micro_batches_of_packed_rows_are_masked_as_the_whole_batch(both: tuple[RunData, RunData], name: str) -> None:
    """P1: every row has more than one sequence, so the mask of some rows is those rows of the whole mask."""
    from transformers.masking_utils import create_causal_mask

    model = _model(MODELS[name])
    batch = next(batches_in_order(both[0].train, 8))
    positions = torch.from_numpy(batch.position_ids)

    def mask(rows: slice) -> torch.Tensor:
        embeds = torch.zeros(*positions[rows].shape, 4)
        return create_causal_mask(
            config=model.config, inputs_embeds=embeds, attention_mask=None, cache=None, position_ids=positions[rows]
        )

    whole = mask(slice(None))
    assert whole is not None
    for row in range(len(positions)):
        part = mask(slice(row, row + 1))
        assert part is not None and torch.equal(part, whole[row : row + 1]), row


def test_packing_is_refused_by_the_name_of_the_model(tmp_path: Path, run_file: Any) -> None:
    """Where it is not shown that samples do not see each other, with the list of models where it is."""
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns("q", "a")}])
    changes = {
        "data": {
            "kind": "chat",
            "paths": str(path),
            "tokenizer": str(save_tokenizer(tmp_path / "tokenizer")),
            "seq_len": 32,
            "packing": True,
        },
    }
    check_files(load_run(run_file(changes)))
    with pytest.raises(UserError, match=r"data\.packing: .* not shown for opt, only for cohere, "):
        check_files(load_run(run_file({**changes, "model": {"config": FAMILIES["opt"]}})))
