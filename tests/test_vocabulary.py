"""A model whose tokenizer has more tokens than the model gets rows for them; the others stay as they are.

Scope: `model.resize_vocabulary` and `model.pad_to_multiple_of`: the number of rows, their values, whole runs.
Not here: ids that no row is for (`test_data.py`, `test_data_chat.py`), model folders as such (`test_checkpoint.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunFile
from rich.console import Console
from test_checkpoint import filled, saved
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import Checkpoint
from megatrain.companions import byte_tokenizer
from megatrain.config import RunConfig, dump_run, load_run
from megatrain.errors import UserError
from megatrain.export import export
from megatrain.model import build, find_units, model_config
from megatrain.supported import TESTED
from megatrain.trainer import train
from megatrain.verify import verify
from megatrain.vocabulary import with_rows

FEW = 12
"""Rows, fewer than the tables have columns: the rows' covariance has no full rank, and transformers adds no noise."""
KINDS = ["llama", "gemma2", "gpt2", "opt", "gptj", "phi"]
"""Heads of their own and tied ones, with and without biases, an embedding that is narrower than the model."""


def config_of(kind: str, rows: int) -> dict[str, Any]:
    *_, row = (row for row in TESTED if row.model_type == kind)
    return {**row.config, "vocab_size": rows}


def resized(folder: Path, rows: int) -> dict[str, torch.Tensor]:
    """The tensors of the folder with so many rows of tokens, as a run would read them."""
    content = json.loads((folder / "config.json").read_text())
    units = find_units(build(model_config(with_rows(content, rows))))
    return filled(Checkpoint(folder, units, stored_rows=content["vocab_size"]), units)


def compared(found: dict[str, torch.Tensor], model: Any) -> None:
    expected = model.state_dict()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, f"{name}: {tensor.shape} {expected[name].shape}"
        assert torch.equal(tensor, expected[name]), f"{name}: {(tensor - expected[name]).abs().max()} apart"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_added_as_transformers_adds_them_where_it_adds_no_noise(kind: str, tmp_path: Path) -> None:
    """Every tensor, bit by bit, against `resize_token_embeddings`; a bias of the head is the mean of the old ones."""
    saved(tmp_path, config_of(kind, FEW), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    mean = None if bias is None else bias.detach().mean()
    model.resize_token_embeddings(FEW + 9)
    if mean is not None:
        with torch.no_grad():
            model.get_output_embeddings().bias[FEW:] = mean  # transformers adds noise of 1e-9 of their spread
    compared(resized(tmp_path, FEW + 9), model)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_new_rows_are_the_mean_of_the_old_ones_and_near_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """With noise transformers' rows lie within some 3e-5 of the spread of the old ones; here no seed decides."""
    saved(tmp_path, config_of(kind, 256))
    found = resized(tmp_path, 300)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    old = model.get_input_embeddings().weight.detach().clone()
    name = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    assert torch.equal(found[name][:256], old)
    assert torch.equal(found[name][256:], old.mean(dim=0).expand(44, -1)), found[name][256:] - old.mean(dim=0)
    model.resize_token_embeddings(300)
    furthest = (model.get_input_embeddings().weight[256:] - found[name][256:]).abs().max().item()
    assert 0 < furthest < 3e-4 * old.std().item(), (furthest, old.std().item())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dropped_as_transformers_drops_them(kind: str, tmp_path: Path) -> None:
    """The last ones go; every tensor is that of `resize_token_embeddings`, bit by bit."""
    saved(tmp_path, config_of(kind, 256), max_shard_size="20KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.resize_token_embeddings(200)
    compared(resized(tmp_path, 200), model)


def test_a_table_that_is_not_the_configurations_is_refused_with_a_resize_too(tmp_path: Path) -> None:
    """CK: the folder has to be right in itself first."""
    saved(tmp_path, config_of("llama", 256))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": 250}))
    with pytest.raises(UserError, match=r"has shape \(256, 32\), config.json says \(250, 32\)"):
        resized(tmp_path, 300)


def byte_words(folder: Path, words: int) -> Path:
    """A tokenizer of all bytes and some words of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<word-{number}>") for number in range(words)])
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


def run_of(run_file: RunFile, tmp_path: Path, words: int, **model: Any) -> RunConfig:
    saved(tmp_path / "model", config_of("llama", 256))
    tokenizer = byte_words(tmp_path, words)
    (tmp_path / "text.txt").write_text("a <word-0> and <word-1>, then <word-2>\n" * 40)
    path = {"path": str(tmp_path / "model"), **model}
    return load_run(run_file({"model": path, "data.tokenizer": str(tokenizer), "tiers.host_memory": "8MiB"}))


@pytest.mark.parametrize(
    ("words", "model", "rows"),
    [
        (5, {"resize_vocabulary": "auto"}, 261),
        (0, {"resize_vocabulary": "auto"}, 256),
        (5, {"resize_vocabulary": "auto", "pad_to_multiple_of": 64}, 320),
        (5, {"resize_vocabulary": 270}, 270),
        (5, {"resize_vocabulary": 270, "pad_to_multiple_of": 100}, 300),
        (5, {"pad_to_multiple_of": 100}, 300),
        (5, {}, 256),
    ],
)
def test_the_rows_are_those_asked_for(
    words: int, model: dict[str, Any], rows: int, run_file: RunFile, tmp_path: Path
) -> None:
    """CF-04: the number is in the run file that is written down, and loading that asks for the same."""
    run = run_of(run_file, tmp_path, words, **model)
    assert run.model.json_config()["vocab_size"] == rows, run.model
    assert run.numerics()["model"]["config"]["vocab_size"] == rows
    (tmp_path / "again.yaml").write_text(dump_run(run))
    assert load_run(tmp_path / "again.yaml") == run, dump_run(run)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"resize_vocabulary": 0}, "must be >= 1"),
        ({"resize_vocabulary": "some"}, "some"),
        ({"pad_to_multiple_of": 0}, "must be >= 1"),
    ],
)
def test_a_number_of_rows_that_cannot_be_is_refused(
    model: dict[str, Any], words: str, run_file: RunFile, tmp_path: Path
) -> None:
    """CF-03: the key is named."""
    with pytest.raises(UserError) as caught:
        run_of(run_file, tmp_path, 0, **model)
    assert words in str(caught.value) and f"model.{next(iter(model))}" in str(caught.value), caught.value


def test_a_model_from_scratch_says_its_rows_in_its_config(run_file: RunFile) -> None:
    """One place for one number."""
    with pytest.raises(UserError, match="vocab_size"):
        load_run(run_file({"model.resize_vocabulary": 300}))


def test_auto_without_a_tokenizer_is_refused_by_its_path(run_file: RunFile, tmp_path: Path) -> None:
    """CF: the file and both keys are named."""
    saved(tmp_path / "model", config_of("llama", 256))
    model = {"path": str(tmp_path / "model"), "resize_vocabulary": "auto"}
    with pytest.raises(UserError, match=r"data.tokenizer: .*none.json is not a file, and model.resize_vocabulary"):
        load_run(run_file({"model": model, "data.tokenizer": str(tmp_path / "none.json")}))


@pytest.mark.usefixtures("known_machine")
def test_tokens_without_a_row_are_refused_and_with_rows_the_bits_are_those_of_the_plain_loop(
    run_file: RunFile, tmp_path: Path
) -> None:
    """P1: `from_pretrained` and `resize_token_embeddings` are the reference; what is exported has the rows."""
    quiet = Console(quiet=True)
    with pytest.raises(UserError, match=r"has the id 256, .*model.resize_vocabulary: auto"):
        train(run_of(run_file, tmp_path, 3), resume=False, console=quiet)
    run = run_of(run_file, tmp_path, 3, resize_vocabulary="auto", pad_to_multiple_of=8)
    result = verify(run, 2, quiet)
    assert result["identical"], result
    assert train(run, resume=False, console=quiet) == 0
    export(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_bytes=1 << 30, force=False, console=quiet)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loaded.config.vocab_size == 264 and len(loaded.lm_head.weight) == 264, loaded.config.vocab_size
    assert not torch.equal(loaded.lm_head.weight[256], loaded.lm_head.weight[257]), "no row learned on its own"
