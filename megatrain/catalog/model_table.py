"""Well-known models: the sizes in their config.json, and how many parameters their authors publish.

Scope: data alone. The tests hold our arithmetic to within 1 % of the published figure, or to its last digit.
Not here: finding a model by name (`known_models.py`), what the keys mean (`families.py`).

Keys that do not change the number or the shape of parameters (rope, token ids, names of activations) are left to
transformers' defaults: the tables serve planning and training from scratch, not loading weights.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """published: parameters in all, as the model card, the paper or the count of the published weights says. active:
    those that one token uses, as published; empty for a dense model.
    """

    published: str
    config: dict[str, Any]
    active: str = ""


def _decoder(
    kind: str,
    published: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    **more: Any,
) -> KnownModel:
    """A config in the names that most families share. `active` goes to the entry, other keys to the config."""
    active = more.pop("active", "")
    sizes = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }
    return KnownModel(published=published, active=active, config={**sizes, **more})


def _gpt2(published: str, hidden: int, layers: int, heads: int) -> KnownModel:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return KnownModel(published=published, config={"model_type": "gpt2", **sizes})


def _neox(published: str, hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> KnownModel:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }
    return KnownModel(published=published, config={"model_type": "gpt_neox", **sizes})


def _opt(published: str, hidden: int, layers: int, heads: int) -> KnownModel:
    sizes = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }
    return KnownModel(published=published, config={"model_type": "opt", **sizes})


_TIED = {"tie_word_embeddings": True}
_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_GLM_MOE = {"head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "attention_bias": True}

MODELS: dict[str, KnownModel] = {
    # Repository and paper of GPT-2 (the sizes as corrected there).
    "gpt2": _gpt2("124M", 768, 12, 12),
    "gpt2-medium": _gpt2("355M", 1024, 24, 16),
    "gpt2-large": _gpt2("774M", 1280, 36, 20),
    "gpt2-xl": _gpt2("1.558B", 1600, 48, 25),
    # Table of the Pythia repository; paper of GPT-NeoX.
    "pythia-70m": _neox("70.43M", 512, 6, 8),
    "pythia-160m": _neox("162.3M", 768, 12, 12),
    "pythia-410m": _neox("405.3M", 1024, 24, 16),
    "pythia-1b": _neox("1.012B", 2048, 16, 8),
    "pythia-1.4b": _neox("1.415B", 2048, 24, 16),
    "pythia-2.8b": _neox("2.775B", 2560, 32, 32),
    "pythia-6.9b": _neox("6.857B", 4096, 32, 32, 50432),
    "pythia-12b": _neox("11.85B", 5120, 36, 40, 50688),
    "gpt-neox-20b": _neox("20.55B", 6144, 44, 64, 50432),
    # Names of the OPT models.
    "opt-125m": _opt("125M", 768, 12, 12),
    "opt-1.3b": _opt("1.3B", 2048, 24, 32),
    "opt-2.7b": _opt("2.7B", 2560, 32, 32),
    "opt-6.7b": _opt("6.7B", 4096, 32, 32),
    "opt-13b": _opt("13B", 5120, 40, 40),
    "opt-30b": _opt("30B", 7168, 48, 56),
    "opt-66b": _opt("66B", 9216, 64, 72),
    # Model cards and the counts of the published weights.
    "tinyllama-1.1b": _decoder("llama", "1.10B", 2048, 5632, 22, 32, 4, 32000),
    "smollm2-135m": _decoder("llama", "135M", 576, 1536, 30, 9, 3, 49152, **_TIED),
    "smollm2-360m": _decoder("llama", "362M", 960, 2560, 32, 15, 5, 49152, **_TIED),
    "smollm2-1.7b": _decoder("llama", "1.71B", 2048, 8192, 24, 32, 32, 49152, **_TIED),
    "smollm3-3b": _decoder("smollm3", "3.08B", 2048, 11008, 36, 16, 4, 128256, **_TIED),
    "llama-2-7b": _decoder("llama", "6.74B", 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _decoder("llama", "13.0B", 5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _decoder("llama", "69.0B", 8192, 28672, 80, 64, 8, 32000),
    "codellama-34b": _decoder("llama", "33.7B", 8192, 22016, 48, 64, 8, 32000),
    "llama-3.2-1b": _decoder("llama", "1.24B", 2048, 8192, 16, 32, 8, 128256, head_dim=64, **_TIED),
    "llama-3.2-3b": _decoder("llama", "3.21B", 3072, 8192, 28, 24, 8, 128256, head_dim=128, **_TIED),
    "llama-3-8b": _decoder("llama", "8.03B", 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _decoder("llama", "70.6B", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _decoder("llama", "406B", 16384, 53248, 126, 128, 8, 128256),
    "yi-6b": _decoder("llama", "6.06B", 4096, 11008, 32, 32, 4, 64000),
    "yi-34b": _decoder("llama", "34.4B", 7168, 20480, 60, 56, 8, 64000),
    "deepseek-llm-67b": _decoder("llama", "67.4B", 8192, 22016, 95, 64, 8, 102400),
    "mistral-7b": _decoder("mistral", "7.24B", 4096, 14336, 32, 32, 8, 32000),
    "mistral-nemo-12b": _decoder(
        "mistral", "12.2B", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None
    ),
    "mistral-small-24b": _decoder(
        "mistral", "23.6B", 5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None
    ),
    "mistral-large-123b": _decoder(
        "mistral", "123B", 12288, 28672, 88, 96, 8, 32768, head_dim=128, sliding_window=None
    ),
    "mixtral-8x7b": _decoder(
        "mixtral", "46.7B", 4096, 14336, 32, 32, 8, 32000, active="12.9B", num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _decoder(
        "mixtral", "141B", 6144, 16384, 56, 48, 8, 32768, active="39B", num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _decoder("qwen2", "0.49B", 896, 4864, 24, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _decoder("qwen2", "1.54B", 1536, 8960, 28, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _decoder("qwen2", "3.09B", 2048, 11008, 36, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _decoder("qwen2", "7.61B", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _decoder("qwen2", "14.7B", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _decoder("qwen2", "32.8B", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _decoder("qwen2", "72.7B", 8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _decoder("qwen3", "0.6B", 1024, 3072, 28, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-1.7b": _decoder("qwen3", "1.7B", 2048, 6144, 28, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-4b": _decoder("qwen3", "4.0B", 2560, 9728, 36, 32, 8, 151936, head_dim=128, **_TIED),
    "qwen3-8b": _decoder("qwen3", "8.2B", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _decoder("qwen3", "14.8B", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _decoder("qwen3", "32.8B", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "qwen1.5-moe-a2.7b": _decoder(
        "qwen2_moe", "14.3B", 2048, 5632, 24, 16, 16, 151936, active="2.7B", num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    ),
    "qwen2-57b-a14b": _decoder(
        "qwen2_moe", "57.4B", 3584, 18944, 28, 28, 4, 151936, active="14B", num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
    ),
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe", "30.5B", 2048, 6144, 48, 32, 4, 151936, active="3.3B", moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "qwen3-235b-a22b": _decoder(
        "qwen3_moe", "235B", 4096, 12288, 94, 64, 4, 151936, active="22B", moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "qwen3-coder-480b-a35b": _decoder(
        "qwen3_moe", "480B", 6144, 8192, 62, 96, 8, 151936, active="35B", moe_intermediate_size=2560,
        **{**_QWEN3_MOE, "num_experts": 160},
    ),
    "gemma-2b": _decoder("gemma", "2.51B", 2048, 16384, 18, 8, 1, 256000, head_dim=256),
    "gemma-7b": _decoder("gemma", "8.54B", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "gemma-2-2b": _decoder("gemma2", "2.61B", 2304, 9216, 26, 8, 4, 256000, head_dim=256),
    "gemma-2-9b": _decoder("gemma2", "9.24B", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "gemma-2-27b": _decoder("gemma2", "27.2B", 4608, 36864, 46, 32, 16, 256000, head_dim=128),
    "gemma-3-270m": _decoder("gemma3_text", "268M", 640, 2048, 18, 4, 1, 262144, head_dim=256, sliding_window=512),
    "gemma-3-1b": _decoder("gemma3_text", "1.00B", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
    "phi-3-mini": _decoder("phi3", "3.82B", 3072, 8192, 32, 32, 32, 32064),
    "phi-3-medium": _decoder("phi3", "14.0B", 5120, 17920, 40, 40, 10, 32064),
    "phi-4": _decoder("phi3", "14.7B", 5120, 17920, 40, 40, 10, 100352),
    "phi-4-mini": _decoder("phi3", "3.84B", 3072, 8192, 32, 24, 8, 200064, **_TIED),
    "olmo-2-1b": _decoder("olmo2", "1.48B", 2048, 8192, 16, 16, 16, 100352),
    "olmo-2-7b": _decoder("olmo2", "7.30B", 4096, 11008, 32, 32, 32, 100352),
    "olmo-2-13b": _decoder("olmo2", "13.7B", 5120, 13824, 40, 40, 40, 100352),
    "olmo-2-32b": _decoder("olmo2", "32.2B", 5120, 27648, 64, 40, 8, 100352),
    "olmoe-1b-7b": _decoder(
        "olmoe", "6.92B", 2048, 1024, 16, 16, 16, 50304, active="1.3B", num_experts=64, num_experts_per_tok=8
    ),
    "granite-3.1-2b": _decoder("granite", "2.53B", 2048, 8192, 40, 32, 8, 49155, **_TIED),
    "granite-3.1-8b": _decoder("granite", "8.17B", 4096, 12800, 40, 32, 8, 49155, **_TIED),
    "starcoder2-3b": _decoder("starcoder2", "3.03B", 3072, 12288, 30, 24, 2, 49152),
    "starcoder2-7b": _decoder("starcoder2", "7.17B", 4608, 18432, 32, 36, 4, 49152),
    "starcoder2-15b": _decoder("starcoder2", "16.0B", 6144, 24576, 40, 48, 4, 49152, tie_word_embeddings=False),
    "command-r-35b": _decoder("cohere", "35B", 8192, 22528, 40, 64, 64, 256000),
    "command-r-plus-104b": _decoder("cohere", "104B", 12288, 33792, 64, 96, 8, 256000, use_qk_norm=True),
    "glm-4-9b": _decoder("glm4", "9.40B", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
    "glm-4.5-air": _decoder(
        "glm4_moe", "106B", 4096, 10944, 46, 96, 8, 151552, active="12B", moe_intermediate_size=1408,
        n_routed_experts=128, first_k_dense_replace=1, **_GLM_MOE,
    ),
    "glm-4.5": _decoder(
        "glm4_moe", "355B", 5120, 12288, 92, 96, 8, 151552, active="32B", moe_intermediate_size=1536,
        n_routed_experts=160, first_k_dense_replace=3, use_qk_norm=True, **_GLM_MOE,
    ),
    "gpt-oss-20b": _decoder(
        "gpt_oss", "20.9B", 2880, 2880, 24, 64, 8, 201088, active="3.6B", num_local_experts=32, **_GPT_OSS
    ),
    "gpt-oss-120b": _decoder(
        "gpt_oss", "117B", 2880, 2880, 36, 64, 8, 201088, active="5.1B", num_local_experts=128, **_GPT_OSS
    ),
    "moonlight-16b-a3b": _decoder(
        "deepseek_v3", "16B", 2048, 11264, 27, 16, 16, 163840, active="3B", moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1,
        topk_group=1, q_lora_rank=None, **_LATENT,
    ),
    "deepseek-v3": _decoder(
        "deepseek_v3", "671B", 7168, 18432, 61, 128, 128, 129280, active="37B", moe_intermediate_size=2048,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, q_lora_rank=1536,
        **_LATENT,
    ),
    "kimi-k2": _decoder(
        "deepseek_v3", "1.03T", 7168, 18432, 61, 64, 64, 163840, active="32B", moe_intermediate_size=2048,
        n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, n_group=1,
        topk_group=1, q_lora_rank=1536, **_LATENT,
    ),
}  # fmt: skip

ALIASES: dict[str, str] = {
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "deepseek-r1": "deepseek-v3",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-large": "mistral-large-123b",
    "command-r": "command-r-35b",
    "command-r-plus": "command-r-plus-104b",
    "smollm3": "smollm3-3b",
}
"""Other names of the same sizes."""
