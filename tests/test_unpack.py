"""GGUF files become model folders with the values that they stand for.

Scope: `megatrain unpack` on files that the gguf package writes here: weights, tokenizer, refusals.
Not here: training from a model folder (`test_checkpoint.py`, `test_run.py`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import Checkpoint
from megatrain.companions import byte_tokenizer
from megatrain.errors import UserError
from megatrain.model import build, find_units, model_config
from megatrain.supported import TESTED
from megatrain.unpack import unpack

gguf = pytest.importorskip("gguf")

LLAMA = {**next(row for row in TESTED if row.model_type == "llama").config, "intermediate_size": 64, "vocab_size": 257}
"""One token a byte, and `ab`."""
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order in which GGUF keeps the rows of queries and keys: the halves of a head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def written(file: Path, *, quantised: bool = False, leave_out: str = "", merge: str = "a b") -> dict[str, torch.Tensor]:
    """A Llama with random weights as a GGUF file; returns its parameters as transformers names them."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(model_config(dict(LLAMA)), dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(LLAMA["hidden_size"])
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_feed_forward_length(LLAMA["intermediate_size"])
    writer.add_head_count(LLAMA["num_attention_heads"])
    writer.add_head_count_kv(LLAMA["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(LLAMA["vocab_size"])
    words = json.loads(byte_tokenizer().to_str())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(words, key=lambda word: words[word]), "ab"])
    writer.add_token_types([1] * LLAMA["vocab_size"])
    writer.add_token_merges([merge])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, tensor: torch.Tensor) -> None:
        if name == leave_out:
            return
        values = tensor.numpy().astype(np.float32)
        if quantised and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for number in range(LLAMA["num_hidden_layers"]):
        for name, own in BLOCK.items():
            weight = weights[f"model.layers.{number}.{own}.weight"]
            heads = {"attn_q": LLAMA["num_attention_heads"], "attn_k": LLAMA["num_key_value_heads"]}.get(name)
            add(f"blk.{number}.{name}.weight", turned(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def unpacked(file: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    unpack(file, out, **({"max_shard_bytes": 1 << 30, "force": False} | options), console=Console(quiet=True))
    return load_file(out / "model.safetensors")


def test_an_unpacked_folder_has_the_weights_of_the_file_and_can_be_trained_from(tmp_path: Path) -> None:
    """CK: FP32 tensors come through bit by bit, under the names and in the order of rows of transformers."""
    weights = written(tmp_path / "tiny.gguf")
    found = unpacked(tmp_path / "tiny.gguf", tmp_path / "out")
    assert found.keys() == weights.keys(), found.keys() ^ weights.keys()
    unlike = [name for name in weights if not torch.equal(weights[name], found[name])]
    assert not unlike, unlike
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_key_value_heads"] == 2, config
    Checkpoint(tmp_path / "out", find_units(build(model_config(config))))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])


def test_quantised_tensors_become_the_values_that_they_stand_for(tmp_path: Path) -> None:
    """CK: what the gguf package makes of its own blocks is the reference."""
    weights = written(tmp_path / "tiny.gguf", quantised=True)
    found = unpacked(tmp_path / "tiny.gguf", tmp_path / "out")
    q8 = gguf.GGMLQuantizationType.Q8_0
    name = "model.layers.1.mlp.up_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name].numpy(), q8), q8)
    assert torch.equal(found[name], torch.from_numpy(expected)), (found[name] - torch.from_numpy(expected)).abs().max()
    assert not torch.equal(found[name], weights[name])


def test_the_tokenizer_of_the_file_is_beside_the_weights(tmp_path: Path) -> None:
    """The run file's `data.tokenizer` may name the folder."""
    written(tmp_path / "tiny.gguf")
    unpacked(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    found = tokenizer.encode("cab", add_special_tokens=False).ids
    assert found == [ord("c"), 256], found


def test_a_tokenizer_that_cannot_be_read_is_said_with_the_reason_and_the_weights_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge of a token that the file does not have; the weights are of use with a tokenizer from elsewhere."""
    written(tmp_path / "tiny.gguf", merge="x y")
    files = unpack(tmp_path / "tiny.gguf", tmp_path / "out", max_shard_bytes=1 << 30, force=False, console=Console())
    said = " ".join(capsys.readouterr().out.split())
    assert "No tokenizer" in said and "xy" in said, said
    assert files[0].is_file() and not (tmp_path / "out" / "tokenizer.json").exists(), list((tmp_path / "out").iterdir())


def test_what_is_no_gguf_file_or_lacks_a_tensor_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """CK: file and tensor are named."""
    (tmp_path / "text.gguf").write_text("not a model")
    for file in ("text.gguf", "none.gguf"):
        with pytest.raises(UserError, match=r"Fix") as caught:
            unpacked(tmp_path / file, tmp_path / "out")
        assert file in str(caught.value), caught.value
    written(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        unpacked(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists(), list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_in_memory_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: the reader of transformers has all tensors at once; that is said before it starts."""
    written(tmp_path / "tiny.gguf")

    class Little:
        available = 1000

    monkeypatch.setattr("megatrain.unpack.psutil.virtual_memory", lambda: Little)
    with pytest.raises(UserError, match=r"of memory are needed .* 1000 bytes are free|of memory are needed"):
        unpacked(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
