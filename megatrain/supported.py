"""The architectures that the tests train tiered and as a plain loop, and compare bit by bit.

Scope: the table of families, a tiny config each, and its text for people. The test of that name takes its cases from
this table, so a row that does not hold fails; `megatrain models` prints it.
Not here: refusing a model that cannot be trained (`model.py`): it does not look here, so a model that is in no row may
still work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

CHECKED_ON = "2026-11-30"
CHECKED_WITH = {"transformers": "5.24.0", "torch": "2.13.0"}
"""When all rows held last, and with which releases."""
WHAT = (
    "tiered training and the plain loop have the same losses, gradient norms, weights and moments, bit for bit; fused "
    "and clipped, all state on NVMe"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family and the tiny config that stands for it, with a vocabulary of 256 (one token a byte).

    parts: what it has beside attention, an MLP and norms. often: tested at every change, the others before a release.
    """

    family: str
    config: Mapping[str, Any]
    parts: str
    often: bool

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_TIED = {"tie_word_embeddings": True}
_ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS, **_TIED}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_ROUTED,
}
_FALCON = {"ffn_hidden_size": 48, **_TIED}


def _often(family: str, model_type: str, parts: str = "", **own: Any) -> Family:
    return Family(family=family, config={"model_type": model_type, **_SIZES, **own}, parts=parts, often=True)


def _seldom(family: str, model_type: str, parts: str = "", **own: Any) -> Family:
    return Family(family=family, config={"model_type": model_type, **_SIZES, **own}, parts=parts, often=False)


TESTED: tuple[Family, ...] = (
    _often("Llama", "llama"),
    _often("Mistral", "mistral", "sliding window", sliding_window=8),
    _often("Qwen2", "qwen2", "biases in attention"),
    _often("Qwen3", "qwen3", "norms of queries and keys", head_dim=8),
    _often("Qwen3-MoE", "qwen3_moe", "experts, one dense layer", head_dim=8, num_experts=4, mlp_only_layers=[1],
           **_ROUTED),
    _often("Gemma 2", "gemma2", "tied, softcaps, sliding windows", **_GEMMA),
    _often("Gemma 3 text", "gemma3_text", "tied, sliding windows, two rotary tables", **_GEMMA),
    Family(family="GPT-2", config={"model_type": "gpt2", **_GPT2_SIZES}, parts="tied, learned positions", often=True),
    _often("GPT-NeoX", "gpt_neox", "attention beside the MLP"),
    _often("Phi-3", "phi3", "packed projections"),
    _often("OLMo 2", "olmo2", "norms after attention and MLP"),
    _often("Mixtral", "mixtral", "experts", num_local_experts=4, num_experts_per_tok=2),
    _often("Granite", "granite", "multipliers", embedding_multiplier=12.0, residual_multiplier=0.22,
           logits_scaling=8.0, attention_multiplier=0.1),
    _often("Cohere", "cohere", "tied, attention beside the MLP", use_qk_norm=True, **_TIED),
    _often("OPT", "opt", "tied, learned positions", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, **_TIED),
    _often("OPT", "opt", "tied, narrow embedding and its projections", ffn_dim=48, word_embed_proj_dim=16,
           do_layer_norm_before=False, dropout=0.0, **_TIED),
    _often("Falcon 7B", "falcon", "tied, one key-value head", multi_query=True, **_FALCON),
    _often("Falcon RW", "falcon", "tied, ALiBi, biases", multi_query=False, parallel_attn=False, alibi=True,
           bias=True, **_FALCON),
    _often("Falcon 40B", "falcon", "tied, two norms beside each other", new_decoder_architecture=True,
           num_kv_heads=2, **_FALCON),
    _often("StarCoder2", "starcoder2", "tied, biases, sliding window", sliding_window=8, residual_dropout=0.0,
           embedding_dropout=0.0, **_TIED),
    _often("DeepSeek-V3", "deepseek_v3", "latent attention, routed and shared experts", n_group=2, **_LATENT),
    _often("GPT-OSS", "gpt_oss", "experts, attention sinks, sliding windows", head_dim=8, num_local_experts=4,
           num_experts_per_tok=2, **_WINDOWS),
    _often("SmolLM3", "smollm3", "layers without positions", no_rope_layers=[1, 1, 0]),
    _often("GLM-4", "glm4", "four norms a layer", head_dim=8),
    _often("Qwen3-Next", "qwen3_next", "linear attention and experts", head_dim=8, num_experts=4,
           shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
           linear_key_head_dim=8, linear_value_head_dim=8,
           layer_types=["linear_attention", "linear_attention", "full_attention"], **_ROUTED),
    _seldom("Bloom", "bloom", "tied, ALiBi", hidden_size=32, n_layer=3, n_head=4, **_TIED),
    _seldom("Cohere 2", "cohere2", "tied, sliding windows", **_WINDOWS, **_TIED),
    _seldom("DeepSeek-V2", "deepseek_v2", "latent attention and experts", n_group=1, head_dim=4, **_LATENT),
    _seldom("Ernie 4.5", "ernie4_5"),
    _seldom("Gemma", "gemma", "tied", head_dim=8, **_TIED),
    _seldom("GLM", "glm", "packed MLP", head_dim=8),
    _seldom("GLM-4-MoE", "glm4_moe", "experts", head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1, **_ROUTED),
    Family(family="GPT-J", config={"model_type": "gptj", **_GPT2_SIZES, "rotary_dim": 4},
           parts="attention beside the MLP", often=False),
    _seldom("Granite-MoE", "granitemoe", "experts", num_local_experts=4, num_experts_per_tok=2),
    _seldom("LFM2", "lfm2", "short convolutions", layer_types=["conv", "full_attention", "conv"]),
    _seldom("Mamba", "mamba", "state space, no attention", state_size=8),
    _seldom("MiniMax", "minimax", "linear attention and experts", head_dim=8, num_local_experts=4,
            num_experts_per_tok=2, layer_types=["full_attention", "linear_attention", "full_attention"]),
    _seldom("Nemotron", "nemotron"),
    _seldom("OLMo", "olmo", "norms without weights"),
    _seldom("OLMo 3", "olmo3", "sliding windows", **_WINDOWS),
    _seldom("OLMoE", "olmoe", "experts", num_experts=4, num_experts_per_tok=2),
    _seldom("Phi", "phi", "biases"),
    _seldom("Qwen2-MoE", "qwen2_moe", "routed and shared experts", num_experts=4, shared_expert_intermediate_size=16,
            **_ROUTED),
    _seldom("Seed-OSS", "seed_oss", head_dim=8, attention_dropout=0.0, residual_dropout=0.0),
    _seldom("StableLM", "stablelm", "LayerNorm"),
)  # fmt: skip


def as_json() -> dict[str, Any]:
    """The table and when it held; which releases are installed now."""
    rows = [{"family": t.family, "model_type": t.model_type, "parts": t.parts, "every_change": t.often} for t in TESTED]
    now = {name: version(name) for name in CHECKED_WITH}
    return {"tested": WHAT, "date": CHECKED_ON, "with": CHECKED_WITH, "installed": now, "models": rows}


def render(console: Console) -> None:
    """The table for people."""
    table = Table(box=None, pad_edge=False)
    for column in ("family", "model_type", "its parts", "tested"):
        table.add_column(column)
    for row in TESTED:
        table.add_row(row.family, row.model_type, row.parts, "at every change" if row.often else "before a release")
    console.print(table)
    releases = ", ".join(f"{name} {release}" for name, release in CHECKED_WITH.items())
    console.print(f"\nTested: {WHAT}.\nAll rows held on {CHECKED_ON} with {releases}.", highlight=False, soft_wrap=True)
    other = [
        f"{name} {version(name)}" for name, tested in CHECKED_WITH.items() if version(name).split("+")[0] != tested
    ]
    if other:
        console.print(f"[yellow]Installed here: {', '.join(other)}.[/yellow]", highlight=False, soft_wrap=True)
    console.print(
        "Other architectures work if their layers stand in a list, or are refused by name with the reason; "
        "`megatrain verify` compares any model that fits in RAM.",
        highlight=False,
        soft_wrap=True,
    )
