"""P5: what a config alone tells about bytes and parameters is what the model has.

Scope: unit names, bytes, ties, parameters and active parameters of every known family against transformers' own model,
and its own defaults.
Not here: costs (`test_estimate.py`), refusals that use the sizes (`test_fit.py`).
"""

import doctest
import subprocess
import sys
from typing import Any

import pytest
from families import FAMILIES
from models import MODELS

from megatrain.catalog import shapes
from megatrain.catalog.families import anatomy
from megatrain.catalog.family_keys import ALIASES, DEFAULTS, TIED
from megatrain.catalog.shapes import active_parameters, parameters, unit_sizes
from megatrain.errors import UserError

CHANGES: dict[str, dict[str, Any]] = {
    "head_dim 24": {"head_dim": 24},
    "no head_dim": {"head_dim": None},
    "attention_bias": {"attention_bias": True},
    "no attention_bias": {"attention_bias": False},
    "mlp_bias": {"mlp_bias": True},
    "no word on kv heads": {"num_key_value_heads": ...},
    "kv heads null": {"num_key_value_heads": None},
    "no word on head_dim": {"head_dim": ...},
    "no word on the vocabulary": {"vocab_size": ...},
    "no word on experts a token": {"num_experts_per_tok": ...},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "odd sizes": {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 2},
    "use_qk_norm": {"use_qk_norm": True},
    "no use_bias": {"use_bias": False},
    "no qkv_bias": {"qkv_bias": False},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "some layers dense": {"mlp_only_layers": [0, 2]},
    "no dense layers": {"first_k_dense_replace": 0},
    "two shared experts": {"n_shared_experts": 2},
    "queries of full rank": {"q_lora_rank": None},
    "five experts": {"num_experts": 5},
    "five local experts": {"num_local_experts": 5},
    "sequential": {"use_parallel_residual": False},
    "falcon, grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, many heads": {"multi_query": False},
    "falcon, sequential, biased": {"parallel_attn": False, "bias": True},
    "gpt2, inner": {"n_inner": 40},
    "gpt2, other names": {"n_embd": ..., "n_layer": ..., "hidden_size": 24, "num_hidden_layers": 3},
}


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`config` with some keys set; `...` leaves one out."""
    return {key: value for key, value in {**config, **change}.items() if value is not ...}


@pytest.mark.parametrize(
    "config", [*FAMILIES.values(), *MODELS.values()], ids=[*FAMILIES, *(f"run {n}" for n in MODELS)]
)
def test_sizes_by_arithmetic_are_those_of_the_model(config: dict[str, Any]) -> None:
    """P5: every unit's name, bytes and ties, and the parameters in all."""
    from megatrain.model import build, find_units, model_config

    model = build(model_config(config))
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    if config["model_type"] != "falcon":  # it does not pass its embeddings on as one tensor, and is no model to train
        assert unit_sizes(config) == [unit.size() for unit in find_units(model)]


def test_every_family_is_held_against_its_model() -> None:
    assert set(FAMILIES) == set(DEFAULTS), set(FAMILIES) ^ set(DEFAULTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_config_is_understood_or_left_to_the_model(name: str) -> None:
    """P5: the arithmetic is the model's, or gives no answer; and where no model can be built, it gives none."""
    from megatrain.model import build, model_config

    silent = []
    for what, change in CHANGES.items():
        config = changed(FAMILIES[name], change)
        try:
            real = sum(p.numel() for p in build(model_config(config)).parameters())
        except (UserError, TypeError, ValueError, RuntimeError, AssertionError):
            continue
        answer = parameters(config)
        silent += [what] if answer is None else []
        assert answer in (None, real), f"{name}, {what}: {answer} by arithmetic, {real} in the model"
    assert len(silent) <= 2, f"{name}: no answer for {silent}"


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(name: str) -> None:
    """P5: hard numbers here, because importing transformers takes seconds."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(name)
    ours = {key: getattr(theirs, key) for key in DEFAULTS[name]}
    assert ours == DEFAULTS[name]
    assert theirs.tie_word_embeddings == (name in TIED)
    for key, alias in ALIASES.get(name, {}).items():
        assert getattr(theirs, alias) == getattr(theirs, key), f"{name}: {alias} is not {key}"


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "arcee"},
        {"model_type": None},
        {"hidden_size": None},
        {"hidden_size": -8},
        {"num_hidden_layers": True},
        {"num_key_value_heads": "many"},
        {"attention_bias": "yes"},
        {"tie_word_embeddings": 1},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_what_the_arithmetic_does_not_know_it_does_not_guess(change: dict[str, Any]) -> None:
    config = {**MODELS["llama"], **change}
    assert unit_sizes(config) is None
    assert parameters(config) is None
    assert active_parameters(config) is None


@pytest.mark.parametrize(("tied", "unique"), [(True, 6224), (False, 7248)])
def test_tied_parameters_count_once(tied: bool, unique: int) -> None:
    """PL-02: L0 has 6,224 parameters tied, 99,584 bytes with gradient and both moments; untied 115,968."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    assert parameters(config) == unique
    assert 16 * unique == (99_584 if tied else 115_968)


def test_a_token_is_computed_with_the_experts_it_is_routed_to() -> None:
    """Mixtral of four experts, two a token: half of the experts are idle; a dense model has none."""
    config = MODELS["mixtral"]
    total, active = parameters(config), active_parameters(config)
    assert total is not None and active is not None
    assert total - active == 3 * 2 * 3 * 32 * 48, f"{active} of {total} parameters are active"
    assert active_parameters(MODELS["llama"]) == parameters(MODELS["llama"])


def test_layers_of_one_model_may_differ() -> None:
    """DeepSeek's first layers are dense; Qwen's list of dense layers."""
    for name, dense in (("deepseek_v3", [0]), ("qwen3_moe", [1]), ("glm4_moe", [0, 1])):
        found = anatomy(FAMILIES[name])
        assert found is not None
        kinds = [type(layer.mlp).__name__ for layer in found.layers]
        assert [n for n, kind in enumerate(kinds) if kind == "Dense"] == dense, kinds


def test_the_arithmetic_brings_no_heavy_library_with_it() -> None:
    """P2: a refusal takes a second; torch alone takes longer to import."""
    code = "import sys; from megatrain.catalog import estimate, known_models, parts, shapes; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "megatrain" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "zarr", "pydantic", "psutil"}


def test_sums_in_the_documentation_come_out_as_written() -> None:
    result = doctest.testmod(shapes)
    assert result.attempted and not result.failed, result
