"""The table of models is right, and a name is found however it is written.

Scope: published parameter counts against the arithmetic, look-up, generic sizes, config.json and model folders.
Not here: the arithmetic itself (`test_shapes.py`).
"""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.catalog import known_models
from megatrain.catalog.estimate import estimate
from megatrain.catalog.known_models import dense_config, find_model, generic_size, known_name, resolve_model
from megatrain.catalog.model_table import ALIASES, MODELS
from megatrain.catalog.shapes import active_parameters, parameters, unit_sizes
from megatrain.errors import UserError

SCALE = {"M": 1e6, "B": 1e9, "T": 1e12}


def published(text: str) -> tuple[float, float]:
    """A published figure, and half of its last digit."""
    number, scale = text[:-1], SCALE[text[-1]]
    decimals = len(number.partition(".")[2])
    return float(number) * scale, 0.5 * 10**-decimals * scale


@pytest.mark.parametrize("name", MODELS)
def test_the_arithmetic_comes_to_the_published_parameters(name: str) -> None:
    """P5: within 1 %, or what the published figure was rounded to."""
    figure, rounding = published(MODELS[name].published)
    ours = parameters(MODELS[name].config)
    assert ours is not None
    assert abs(ours - figure) <= max(0.01 * figure, rounding), f"{name}: {ours}, published {MODELS[name].published}"


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.active])
def test_active_parameters_are_near_the_published_ones(name: str) -> None:
    """Publishers count differently (gpt-oss without its embedding, GLM roughly): within 20 %."""
    figure, _ = published(MODELS[name].active)
    ours = active_parameters(MODELS[name].config)
    assert ours == pytest.approx(figure, rel=0.2), f"{name}: {ours}, published {MODELS[name].active}"


def test_the_table_reaches_from_a_tenth_of_a_billion_to_a_trillion() -> None:
    """Every entry can be planned: bytes of each unit, and what each costs."""
    counts = sorted(parameters(model.config) or 0 for model in MODELS.values())
    assert len(counts) >= 40
    assert counts[0] < 0.13e9 and counts[-1] > 1e12
    for name, model in MODELS.items():
        costs = estimate(model.config, 1, 1024)
        assert costs is not None and list(costs) == [unit.name for unit in unit_sizes(model.config) or []], name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_config_of_the_table_builds_the_model_that_it_describes(name: str) -> None:
    """transformers accepts the keys, and its model has the same parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatrain.model import model_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[name].config))
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == parameters(MODELS[name].config)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3-70b", "llama-3-70b"),
        ("meta-llama/Llama-3-70B", "llama-3-70b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("LLAMA_3.70b", "llama-3-70b"),
        ("Llama3-70B", "llama-3-70b"),
        ("meta-llama/Llama-3.1-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("EleutherAI/pythia-6.9b-deduped", "pythia-6.9b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("CohereForAI/c4ai-command-r-v01", "command-r-35b"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_a_name_is_found_however_it_is_written(text: str, name: str) -> None:
    assert resolve_model(text)[0] == name
    assert find_model(text) is MODELS[name]


def test_every_name_and_alias_is_found_as_itself() -> None:
    for name in MODELS:
        assert known_name(name) == name, f"{name} is taken for {known_name(name)}"
    for alias, name in ALIASES.items():
        assert known_name(alias) == name, f"{alias} is taken for {known_name(alias)}"


@pytest.mark.parametrize("text", ["deepseek-v2", "llama-4", "gpt", "qwen3", "", "llama-3-7b"])
def test_another_model_is_not_taken_for_a_known_one(text: str) -> None:
    assert known_name(text) is None


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(UserError, match="Nearest names: llama-3-8b"):
        resolve_model("lama-3-8b")
    with pytest.raises(UserError, match=r"Fix: write it like .*config\.json"):
        resolve_model("no such thing")
    with pytest.raises(UserError, match="Nearest names"):
        find_model("lama-3-8b")
    with pytest.raises(UserError, match="not in the table"):
        find_model("dense-7b")


@pytest.mark.parametrize(
    "text",
    "dense-10m dense-50m dense-100m dense-0.5b dense-1b dense-7b dense-13b dense-100b dense-1t dense-10t".split(),
)
def test_a_generic_model_has_about_the_size_that_it_is_named_after(text: str) -> None:
    """Within 3 %, in Llama's shape."""
    size = generic_size(text)
    assert size is not None
    name, config = resolve_model(text.upper())
    assert config == dense_config(size)
    assert parameters(config) == pytest.approx(size, rel=0.03), f"{name}: {parameters(config)}"
    assert 2 < config["intermediate_size"] / config["hidden_size"] < 5
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_a_generic_size_that_the_rule_is_not_made_for_is_refused() -> None:
    for text in ("dense-1m", "dense-900t"):
        with pytest.raises(UserError, match="the rule is for"):
            resolve_model(text)


def test_a_config_file_and_a_model_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps(config))
    assert resolve_model(str(folder)) == ("my-llama", config)
    assert resolve_model(str(folder / "config.json")) == ("my-llama", config)
    assert resolve_model(str(tmp_path / "other.json")) == ("other", config)


def test_what_is_no_config_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    for name, what in (
        ("bad.json", "cannot be read as JSON"),
        ("list.json", "names no model_type"),
        ("empty.json", "names no model_type"),
        ("folder", "has no config.json"),
        ("gone.json", "there is no file"),
    ):
        with pytest.raises(UserError, match=what) as caught:
            resolve_model(str(tmp_path / name))
        assert name in str(caught.value) and "Fix:" in str(caught.value)


def test_a_config_that_is_changed_leaves_the_table_alone() -> None:
    resolve_model("gpt2")[1]["n_layer"] = 1
    assert resolve_model("gpt2")[1]["n_layer"] == 12


def test_sums_in_the_documentation_come_out_as_written() -> None:
    result = doctest.testmod(known_models, optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed, result
