"""The loss in chunks: what it saves, what is refused, and what a run file and a plan say about it.

Scope: tensors as large as a chunk, refusals, whole runs, the identity of a store.
Not here: the bits of every family (`test_stream.py`), costs by arithmetic (`test_estimate.py`, `test_tierplan.py`).
"""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.loss.loss_utils
from conftest import RunFile
from models import MODELS
from rich.console import Console
from test_stream import ROWS, TOKENS, Lent, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatrain import chunks
from megatrain.chunks import chunk_length
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.inputs import every_token
from megatrain.loss import refuse_uncuttable
from megatrain.model import build, find_units, model_config
from megatrain.prepare import prepare
from megatrain.profile import profile
from megatrain.verify import verify

WORDS = 2048


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lent = {leaf.untyped_storage().data_ptr() for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in lent:
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2", "gemma3"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(model: str) -> None:
    """P2: at a vocabulary that outgrows everything else; without chunks the logits of all tokens exist."""
    lent = Lent({**MODELS[model], "vocab_size": WORDS})
    largest = {}
    for loss_chunk in (None, 72, 50):
        with Largest() as seen:
            lent.streamed.step(every_token(token_ids()), ROWS, loss_chunk)
        largest[loss_chunk] = seen.numel
    assert largest == {None: ROWS * TOKENS * WORDS, 72: 72 * WORDS, 50: 48 * WORDS}, largest


@pytest.mark.parametrize("loss_chunk", [None, 256, 300, 3])
def test_the_workspace_of_the_head_is_that_of_a_chunk(loss_chunk: int | None) -> None:
    """P2, P5: seen on the model's own code; flops stay those of all tokens."""
    units = find_units(build(model_config({**MODELS["llama"], "vocab_size": 8192})))
    rows, seq_len = 4, 256
    whole, cut = (profile(units, rows, seq_len, chunk)["lm_head"] for chunk in (None, loss_chunk))
    tokens = rows * chunk_length(rows, seq_len, loss_chunk)
    logits = 4 * tokens * 8192
    table = 4 * 32 * 8192
    assert 2 * logits <= cut.workspace_bytes <= 3 * logits + 2 * table, f"{cut}, {tokens} tokens at a time"
    assert cut.forward_flops == pytest.approx(whole.forward_flops, rel=1e-12), (cut, whole)
    assert cut.backward_flops == pytest.approx(whole.backward_flops, rel=1e-12), (cut, whole)


def without_shift(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **more: Any) -> torch.Tensor:
    """A loss that shifts by itself and nothing else."""
    words = logits[:, :-1].reshape(-1, vocab_size)
    return torch.nn.functional.cross_entropy(words, labels[:, 1:].reshape(-1), reduction="sum")


def unlike_a_sum(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **more: Any) -> torch.Tensor:
    return logits.float().logsumexp((0, 1, 2))


@pytest.mark.parametrize("loss", [without_shift, unlike_a_sum])
def test_a_model_whose_loss_cannot_be_cut_is_refused_by_name(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    """CF-05: before anything is loaded or written; without the setting the same model is planned."""
    monkeypatch.setitem(transformers.loss.loss_utils.LOSS_MAPPING, "ForCausalLM", loss)
    units = find_units(build(model_config(MODELS["llama"])))
    with pytest.raises(UserError, match=r"--loss-chunk: the loss of LlamaForCausalLM cannot be cut") as refused:
        refuse_uncuttable(units, "--loss-chunk")
    assert "\n" not in str(refused.value) and "shift_labels" in str(refused.value), str(refused.value)
    assert units.model.loss_function is loss and "forward" not in vars(units.model.base_model), "the model was changed"
    with pytest.raises(UserError, match=r"train\.loss_chunk: the loss of LlamaForCausalLM"):
        prepare(load_run(run_file({"train.loss_chunk": 8})))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("known_machine")
def test_a_run_that_has_no_room_for_its_logits_is_told_of_chunks(run_file: RunFile) -> None:
    """P2: where the logits are the largest thing; a chunk as small as is said helps."""
    changes = {"model.config.vocab_size": 4096, "tiers.device_memory": "24.7MiB"}
    with pytest.raises(UserError, match=r"logits and loss of one micro-batch") as refused:
        prepare(load_run(run_file(changes)))
    assert "train.loss_chunk < 32" in str(refused.value), str(refused.value)
    lines = prepare(load_run(run_file({**changes, "train.loss_chunk": 2}))).compute_lines
    assert any("chunk" in line.what for line in lines), lines


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2", "mixtral"])
def test_a_tiered_run_in_chunks_equals_the_plain_loop_in_chunks(run_file: RunFile, model: str) -> None:
    """P1, I8: `megatrain verify` with `train.loss_chunk`; clipped and not, chunks that divide a sequence and not."""
    for loss_chunk, clip, resident in ((16, None, 0), (20, 0.5, 0), (7, 0.5, 1)):
        settings = {"train.loss_chunk": loss_chunk, "train.max_grad_norm": clip, "tiers.resident": resident}
        changes = {"model.config": MODELS[model], "train.micro_batch": 4, "tiers.host_memory": "8MiB", **settings}
        result = verify(load_run(run_file({"optimizer.lr": 0.01, **changes})), 3, Console(quiet=True))
        shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
        assert result["identical"], f"{settings}: {shown}"


def test_a_chunk_is_an_item_of_the_numbers_only_where_it_is_set(run_file: RunFile) -> None:
    """P1, CK-21: a store that was made before there were chunks goes on; another chunk is another run."""
    plain, eight, nine = (
        load_run(run_file({} if chunk is None else {"train.loss_chunk": chunk})).numerics()["train"]
        for chunk in (None, 8, 9)
    )
    assert set(plain) == {"batch", "micro_batch", "max_grad_norm", "seed"}, plain
    assert (eight, nine) == ({**plain, "loss_chunk": 8}, {**plain, "loss_chunk": 9})


def test_a_chunk_is_typed_as_other_counts_are(run_file: RunFile) -> None:
    """CF-04, CF-05: whole and positive; more than there are tokens is all of them."""
    for typed, wanted in (("1024", 1024), ("1e3", 1000), (1, 1), (10**9, 10**9), (None, None)):
        assert load_run(run_file({"train.loss_chunk": typed})).train.loss_chunk == wanted, typed
    for typed in (0, -4, 1.5, True, "many", "4x"):
        with pytest.raises(UserError, match=r"train\.loss_chunk"):
            load_run(run_file({"train.loss_chunk": typed}))
    assert chunk_length(2, 16, 10**9) == 16


def test_sums_in_the_documentation_come_out_as_written() -> None:
    result = doctest.testmod(chunks)
    assert result.attempted and not result.failed, result
