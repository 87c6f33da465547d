"""A small config of every family that is known without transformers, with all sizes different.

Scope: inline configs; `medium` for tests that compare costs.
Not here: the models that whole runs are tested with (`models.py`).
"""

from typing import Any

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_ROUTED,
}
_OWN: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 24, **_ROUTED},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [1], **_ROUTED},
    "mixtral": {"num_local_experts": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 88, "word_embed_proj_dim": 48},
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 2, **_ROUTED},
}
_PLAIN = (
    "llama",
    "mistral",
    "qwen2",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "cohere",
    "starcoder2",
    "gpt_neox",
    "smollm3",
)

FAMILIES: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **_SIZES, **_OWN.get(name, {})} for name in (*_PLAIN, *_OWN, "falcon")
}
FAMILIES["gpt2"] = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64}


def medium(name: str, **changes: Any) -> dict[str, Any]:
    """Sizes at which no single term of a cost is everything: 8 heads of 32, 4 of them for keys and values."""
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "head_dim": 32,
    }
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 2048, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
        "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        "opt": {"word_embed_proj_dim": 256, "ffn_dim": 640},
    }
    if name == "gpt2":
        return {"model_type": "gpt2", "vocab_size": 2048, **own["gpt2"], **changes}
    return {**FAMILIES[name], **sizes, **own.get(name, {}), **changes}
