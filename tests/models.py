"""Small models of every architecture that the tests hold against the plain loop.

Scope: inline configs with a vocabulary of 256 (one token a byte).
Not here: the run file around them (`conftest.py`).
"""

from typing import Any

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 8, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        **_SIZES,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}

TIED = ("llama-tied", "gemma3", "gpt2")
