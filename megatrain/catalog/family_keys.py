"""The keys of a Hugging Face config, and what transformers takes where a key is missing, family by family.

Scope: defaults, second names and null values of sizes; reading one key. Hard numbers: transformers is not imported, the
tests hold them against it.
Not here: what the values mean for the model (`families.py`).
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
    "qwen3_moe": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    "mixtral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma": {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
               "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "gpt_neox": {"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
                 "num_attention_heads": 64},
    "phi3": {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
             "num_attention_heads": 32},
    "olmo2": {"vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32},
    "olmo3": {"vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "sliding_window": 4096},
    "olmoe": {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
              "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    "granite": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                "num_attention_heads": 32},
    "cohere": {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
               "num_attention_heads": 64},
    "opt": {"vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 2048},
    "starcoder2": {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
                   "num_attention_heads": 24, "num_key_value_heads": 2},
    "falcon": {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
    "deepseek_v3": {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
                    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    "gpt_oss": {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
                "num_experts_per_tok": 4, "sliding_window": 128},
    "smollm3": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                "num_attention_heads": 16, "num_key_value_heads": 4},
    "glm": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
             "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
                 "num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1,
                 "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
}  # fmt: skip
"""Sizes that transformers takes where a config leaves them out, by `model_type`."""

TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gpt2", "cohere", "opt", "starcoder2", "falcon", "smollm3"})
"""Families that tie their embeddings where the config does not say."""

ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "n_positions": "max_position_embeddings"},
    "mixtral": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "olmoe": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts"},
    "glm4_moe": {"n_routed_experts": "num_local_experts"},
}  # fmt: skip
"""Second names that transformers takes for a key."""

NULLABLE: dict[str, frozenset[str]] = {
    "head_dim": frozenset({"llama", "mistral", "mixtral", "starcoder2"}),
    "num_key_value_heads": frozenset(
        {"llama", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "olmoe", "granite", "cohere", "smollm3"}
    ),
}
"""Families that take null for a key; the others cannot be built with it. Keys that are not listed: all families."""


_LARGEST, _MOST_LAYERS = 1 << 40, 100_000
"""Beyond every model; a list with an entry a layer still fits."""


class Keys:
    """The values of a config, with the family's own defaults. Raises ValueError for what is no size."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.kind: str = config["model_type"]
        self._defaults = DEFAULTS[self.kind]

    def size(self, key: str) -> int:
        """A positive number; a key that is missing takes transformers' default."""
        return self._positive(key, self._value(key))

    def size_or(self, key: str, default: int) -> int:
        """As `size`; `default` where the key is missing and the family has none, or null where that is allowed."""
        value = self._value(key)
        if value is None and key in self.config and self.kind not in NULLABLE.get(key, (self.kind,)):
            raise ValueError(f"{key} is null")
        return default if value is None else self._positive(key, value)

    def count_or(self, key: str, default: int) -> int:
        """As `size_or`, and zero is allowed."""
        return 0 if self._value(key) == 0 else self.size_or(key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}")
        return value

    def fraction(self, key: str, default: float) -> bool:
        """True if a probability is above zero."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {value!r}")
        return value > 0

    def _value(self, key: str) -> object:
        alias = ALIASES.get(self.kind, {}).get(key, key)
        if alias != key and alias in self.config:
            if self.config.get(key, self.config[alias]) != self.config[alias]:
                raise ValueError(f"{key} and {alias} differ")
            return self.config[alias]
        return self.config.get(key, self._defaults.get(key))

    def _positive(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise ValueError(f"{key} is {value!r}")
        if key == "num_hidden_layers" and value > _MOST_LAYERS:
            raise ValueError(f"{key} is {value!r}, which is more than {_MOST_LAYERS}")
        return value
