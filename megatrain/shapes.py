"""Unit sizes of well-known architectures by arithmetic on their config alone: the answer before torch is imported.

Scope: enough to refuse a budget that is too small within a second. The tests hold every figure here against the model
itself; a config that this file does not know in full gives None, and the model is asked.
Not here: the model's real layout (`model.py`), which is what a run uses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.programs import UnitSize
from tiering.workload import pages

ALIGN = 16  # elements; as `model.ALIGN`

_TIED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "mixtral": False, "gemma3_text": True}
"""Architectures of one family, and whether they tie their embeddings where the config does not say."""


def unit_sizes(config: Mapping[str, Any]) -> list[UnitSize] | None:
    """Units in the order of a forward with their bytes, or None if the config says too little or something unknown."""
    try:
        if config["model_type"] == "gpt2":
            return _gpt2(config)
        if config["model_type"] in _TIED:
            return _family(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return None


def _nbytes(numels: Sequence[int]) -> int:
    """Bytes of a unit: each tensor starts at a multiple of 16 elements, the whole is padded to pages."""
    top = sum(-(-numel // ALIGN) * ALIGN for numel in numels[:-1])
    return pages(4 * (top + numels[-1]))


def _family(config: Mapping[str, Any]) -> list[UnitSize]:
    kind = config["model_type"]
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, vocabulary = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    head = config["head_dim"] if kind in ("gemma3_text", "qwen3") else config.get("head_dim") or hidden // heads
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("biases: ask the model")
    queries, keys = heads * head, kv_heads * head
    attention = [queries * hidden, keys * hidden, keys * hidden, hidden * queries]
    if kind == "qwen2":
        attention = [queries * hidden, queries, keys * hidden, keys, keys * hidden, keys, hidden * queries]
    if kind in ("qwen3", "gemma3_text"):
        attention += [head, head]
    mlp = [inner * hidden] * 3
    if kind == "mixtral":
        experts = config["num_local_experts"]
        mlp = [experts * hidden, experts * 2 * inner * hidden, experts * hidden * inner]
    norms = [hidden] * (4 if kind == "gemma3_text" else 2)
    layer = _nbytes([*attention, *mlp, *norms])
    units = [UnitSize(name="model.embed_tokens", nbytes=_nbytes([vocabulary * hidden]))]
    units += [UnitSize(name=f"model.layers.{number}", nbytes=layer) for number in range(layers)]
    units.append(UnitSize(name="model.norm", nbytes=_nbytes([hidden])))
    return [*units, _head(config.get("tie_word_embeddings", _TIED[kind]), units[0])]


def _gpt2(config: Mapping[str, Any]) -> list[UnitSize]:
    hidden, layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * hidden
    if config.get("add_cross_attention"):
        raise ValueError("cross attention: ask the model")
    attention = [3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    mlp = [hidden * inner, inner, inner * hidden, hidden]
    norm = [hidden, hidden]
    layer = _nbytes([*norm, *attention, *norm, *mlp])
    units = [
        UnitSize(name="transformer.wte", nbytes=_nbytes([config["vocab_size"] * hidden])),
        UnitSize(name="transformer.wpe", nbytes=_nbytes([config["n_positions"] * hidden])),
    ]
    units += [UnitSize(name=f"transformer.h.{number}", nbytes=layer) for number in range(layers)]
    units.append(UnitSize(name="transformer.ln_f", nbytes=_nbytes(norm)))
    return [*units, _head(config.get("tie_word_embeddings", True), units[0])]


def _head(tied: bool, embedding: UnitSize) -> UnitSize:
    if tied:
        return UnitSize(name="lm_head", nbytes=0, borrows=(embedding.name,))
    return UnitSize(name="lm_head", nbytes=embedding.nbytes)
