"""From a Hugging Face config to the parts of the decoder that it describes, for families whose code is known.

Scope: which keys make which parts in each family; the tests hold it against transformers itself.
Not here: the parts (`anatomy.py`), their bytes (`shapes.py`), defaults of keys (`family_keys.py`), a family that is not
listed (`megatrain/model.py` asks transformers).
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatrain.catalog.anatomy import Anatomy, Attention, Dense, Experts, Layer, Table
from megatrain.catalog.family_keys import DEFAULTS, TIED, Keys


def anatomy(config: Mapping[str, Any]) -> Anatomy | None:
    """The decoder of a config.json, or None if the family is unknown or the config says something unknown."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return None
    try:
        return _READERS.get(kind, _decoder)(Keys(config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _tied(keys: Keys) -> bool:
    return keys.flag("tie_word_embeddings", keys.kind in TIED)


def _decoder(keys: Keys) -> Anatomy:
    """The common form: `model.embed_tokens`, `model.layers`, `model.norm`, `lm_head`."""
    hidden, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    kind = keys.kind
    norm = "gemma" if kind.startswith("gemma") else {"starcoder2": "layer", "cohere": "mean"}.get(kind, "rms")
    norms = {"gemma2": "aAmM", "gemma3_text": "aAmM", "glm4": "aAmM", "olmo2": "AM", "olmo3": "AM", "cohere": "a"}
    attention = {window: _attention(keys, window) for window in (0, keys.size_or("sliding_window", 1 << 62))}
    return Anatomy(
        hidden=hidden,
        vocabulary=keys.size("vocab_size"),
        tied=_tied(keys),
        embeddings=(
            Table(name="model.embed_tokens", rows=keys.size("vocab_size"), copies=2 if norm == "gemma" else 1),
        ),
        layers_name="model.layers",
        layers=tuple(
            Layer(
                attention=attention[_window(keys, number, layers)],
                mlp=_mlp(keys, number),
                norm=norm,  # type: ignore[arg-type]
                norms=norms.get(kind, "am"),
                parallel=kind == "cohere",
            )
            for number in range(layers)
        ),
        norm=norm,  # type: ignore[arg-type]
        norm_name="model.norm",
    )


def _window(keys: Keys, number: int, layers: int) -> int:
    """The sliding window of a layer; 0 for full attention."""
    kinds = keys.config.get("layer_types")
    window = keys.size_or("sliding_window", 1 << 62)
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ValueError("layer_types")
        return window if kinds[number] == "sliding_attention" else 0
    if keys.kind in ("gemma2", "gpt_oss"):
        return window if number % 2 == 0 else 0
    if keys.kind in ("gemma3_text", "olmo3"):
        every = keys.size_or("sliding_window_pattern", 6 if keys.kind == "gemma3_text" else 4)
        return window if (number + 1) % every else 0
    everywhere = keys.kind in ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
    return window if everywhere and keys.config.get("sliding_window", keys.kind != "phi3") is not None else 0


def _attention(keys: Keys, window: int) -> Attention:
    if keys.kind == "deepseek_v3":
        return _low_rank(keys)
    hidden, heads, kind = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.kind
    if kind == "ministral":
        keys.size("head_dim")  # transformers builds none without it
    head_dim = keys.size_or("head_dim", hidden // heads)
    if kind == "olmoe" and head_dim != hidden // heads:
        raise ValueError("the norms of this family are as wide as the hidden size")
    biased = {"qwen2": True, "mistral": False, "ministral": False, "mixtral": False, "phi3": False}.get(kind)
    if biased is None:
        key = {"qwen2_moe": "qkv_bias", "starcoder2": "use_bias"}.get(kind, "attention_bias")
        biased = keys.flag(key, kind in ("qwen2_moe", "starcoder2", "gpt_oss", "glm", "glm4"))
    head_norm = kind in ("qwen3", "qwen3_moe", "gemma3_text") or (
        kind == "glm4_moe" and keys.flag("use_qk_norm", False)
    )
    all_norm = kind in ("olmo2", "olmo3", "olmoe") or (kind == "cohere" and keys.flag("use_qk_norm", False))
    return Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=keys.size_or("num_key_value_heads", heads),
        head_dim=head_dim,
        value_dim=head_dim,
        in_bias=biased,
        out_bias=biased and kind not in ("qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe"),
        packed=kind == "phi3",
        qk_norm="head" if head_norm else "all" if all_norm else "none",
        sinks=kind == "gpt_oss",
        eager=kind in ("gemma2", "gpt_oss"),
        softcap=kind == "gemma2" and keys.config.get("attn_logit_softcapping", 50.0) is not None,
        dropout=keys.fraction("attention_dropout", 0.0),
        window=window,
    )


def _low_rank(keys: Keys) -> Attention:
    """Queries, keys and values through narrow matrices; part of each head turns, that of the keys is shared."""
    heads, rope = keys.size("num_attention_heads"), keys.size("qk_rope_head_dim")
    biased = keys.flag("attention_bias", False)
    ranked = keys.config.get("q_lora_rank", DEFAULTS["deepseek_v3"]["q_lora_rank"]) is not None
    return Attention(
        hidden=keys.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=keys.size("qk_nope_head_dim") + rope,
        value_dim=keys.size("v_head_dim"),
        in_bias=biased,
        out_bias=biased,
        q_rank=keys.size("q_lora_rank") if ranked else 0,
        kv_rank=keys.size("kv_lora_rank"),
        rope_dim=rope,
    )


def _mlp(keys: Keys, number: int) -> Dense | Experts:
    hidden, kind = keys.size("hidden_size"), keys.kind
    if kind in ("mixtral", "gpt_oss", "olmoe"):
        return Experts(
            hidden=hidden,
            inner=keys.size("intermediate_size"),
            experts=keys.size("num_experts" if kind == "olmoe" else "num_local_experts"),
            routed=keys.size("num_experts_per_tok"),
            bias=kind == "gpt_oss",
            router_bias=kind == "gpt_oss",
            clamped=kind == "gpt_oss",
        )
    if kind.endswith("_moe") and kind.startswith("qwen") and _is_sparse(keys, number):
        shared = Dense(hidden=hidden, inner=keys.size("shared_expert_intermediate_size")) if "2" in kind else None
        return _routed(keys, "num_experts", shared, shared_gate=shared is not None)
    if kind in ("deepseek_v3", "glm4_moe") and number >= keys.count_or("first_k_dense_replace", 0):
        inner = keys.size("moe_intermediate_size") * keys.size("n_shared_experts")
        return _routed(keys, "n_routed_experts", Dense(hidden=hidden, inner=inner), shared_gate=False)
    biased = {"starcoder2": keys.flag("use_bias", True)}.get(kind, False)
    if kind in ("llama", "granite", "smollm3"):
        biased = keys.flag("mlp_bias", False)
    return Dense(
        hidden=hidden,
        inner=keys.size("intermediate_size"),
        gated=kind != "starcoder2",
        packed=kind in ("phi3", "glm", "glm4"),
        bias=biased,
    )


def _routed(keys: Keys, experts: str, shared: Dense | None, *, shared_gate: bool) -> Experts:
    return Experts(
        hidden=keys.size("hidden_size"),
        inner=keys.size("moe_intermediate_size"),
        experts=keys.size(experts),
        routed=keys.size("num_experts_per_tok"),
        shared=shared,
        shared_gate=shared_gate,
    )


def _is_sparse(keys: Keys, number: int) -> bool:
    dense = keys.config.get("mlp_only_layers") or []
    return number not in dense and (number + 1) % keys.size("decoder_sparse_step") == 0


def _gpt2(keys: Keys) -> Anatomy:
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    if keys.flag("add_cross_attention", False):
        raise ValueError("cross attention")
    drops = keys.fraction("resid_pdrop", 0.1)
    layer = Layer(
        attention=_heads(keys, hidden, heads, packed=True, rotary=False, dropout=keys.fraction("attn_pdrop", 0.1)),
        mlp=Dense(
            hidden=hidden,
            inner=keys.size_or("n_inner", 4 * hidden),
            gated=False,
            bias=True,
            dropout=drops,
            spelled_out=keys.config.get("activation_function", "gelu_new") == "gelu_new",
        ),
        norm="layer",
        norms="am",
    )
    words = Table(name="transformer.wte", rows=keys.size("vocab_size"))
    positions = Table(name="transformer.wpe", rows=keys.size("n_positions"), once=True)
    return _biased(keys, layer, keys.size("n_layer"), (words, positions), "transformer.h", "transformer.ln_f")


def _gpt_neox(keys: Keys) -> Anatomy:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    layer = Layer(
        attention=_heads(keys, hidden, heads, packed=True, biased=keys.flag("attention_bias", True)),
        mlp=Dense(
            hidden=hidden,
            inner=keys.size("intermediate_size"),
            gated=False,
            bias=True,
            dropout=keys.fraction("hidden_dropout", 0.0),
        ),
        norm="layer",
        norms="am",
        parallel=keys.flag("use_parallel_residual", True),
    )
    tables = (Table(name="gpt_neox.embed_in", rows=keys.size("vocab_size")),)
    layers = keys.size("num_hidden_layers")
    return _biased(keys, layer, layers, tables, "gpt_neox.layers", "gpt_neox.final_layer_norm")


def _opt(keys: Keys) -> Anatomy:
    hidden = keys.size("hidden_size")
    plain = keys.flag("enable_bias", True) and keys.flag("layer_norm_elementwise_affine", True)
    before = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    if not plain or not before or keys.size_or("word_embed_proj_dim", hidden) != hidden:
        raise ValueError("one of the rare forms of this family")
    if "word_embed_proj_dim" not in keys.config and hidden != DEFAULTS["opt"]["hidden_size"]:
        raise ValueError("word_embed_proj_dim is missing, and its default is not hidden_size")
    layer = Layer(
        attention=_heads(keys, hidden, keys.size("num_attention_heads"), rotary=False),
        mlp=Dense(
            hidden=hidden,
            inner=keys.size("ffn_dim"),
            gated=False,
            bias=True,
            dropout=keys.fraction("dropout", 0.1),
        ),
        norm="layer",
        norms="am",
    )
    words = Table(name="model.decoder.embed_tokens", rows=keys.size("vocab_size"))
    positions = Table(name="model.decoder.embed_positions", rows=keys.size("max_position_embeddings") + 2)
    layers = keys.size("num_hidden_layers")
    return _biased(keys, layer, layers, (words, positions), "model.decoder.layers", "model.decoder.final_layer_norm")


def _falcon(keys: Keys) -> Anatomy:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    grouped, parallel = keys.flag("new_decoder_architecture", False), keys.flag("parallel_attn", True)
    biased = keys.flag("bias", False)
    kv_heads = heads
    if grouped:
        kv_heads = keys.size_or("num_kv_heads", heads)
    elif keys.flag("multi_query", True):
        kv_heads = 1
    two_norms = keys.size_or("num_ln_in_parallel_attn", 2) == 2 if grouped else not parallel
    layer = Layer(
        attention=_heads(keys, hidden, heads, packed=True, kv_heads=kv_heads, biased=biased),
        mlp=Dense(hidden=hidden, inner=keys.size_or("ffn_hidden_size", 4 * hidden), gated=False, bias=biased),
        norm="layer",
        norms="am" if two_norms else "a",
        parallel=parallel,
    )
    tables = (Table(name="transformer.word_embeddings", rows=keys.size("vocab_size")),)
    return _biased(keys, layer, keys.size("num_hidden_layers"), tables, "transformer.h", "transformer.ln_f")


def _heads(
    keys: Keys,
    hidden: int,
    heads: int,
    *,
    packed: bool = False,
    rotary: bool = True,
    biased: bool = True,
    dropout: bool = False,
    kv_heads: int | None = None,
) -> Attention:
    """Attention with heads that share the hidden size evenly."""
    if hidden % heads:
        raise ValueError(f"{hidden} is no multiple of {heads} heads")
    return Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        in_bias=biased,
        out_bias=biased,
        packed=packed,
        rotary=rotary,
        dropout=dropout or keys.fraction("attention_dropout", 0.0),
    )


def _biased(
    keys: Keys, layer: Layer, layers: int, tables: tuple[Table, ...], layers_name: str, norm_name: str
) -> Anatomy:
    """The older form: LayerNorm with a bias, equal layers, and the names that each family gives."""
    return Anatomy(
        hidden=layer.hidden,
        vocabulary=tables[0].rows,
        tied=_tied(keys),
        embeddings=tables,
        layers_name=layers_name,
        layers=(layer,) * layers,
        norm="layer",
        norm_name=norm_name,
    )


_READERS: dict[str, Callable[[Keys], Anatomy]] = {
    "gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt, "falcon": _falcon,
}  # fmt: skip
