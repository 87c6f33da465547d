"""P2, P5: what a config alone tells about flops and memory is what torch counts on the model's own code.

Scope: flops, workspace and outputs of every unit against `profile.py`; experts against a real run of one layer.
Not here: sizes and parameters (`test_shapes.py`), measured seconds and memory (`test_memory.py`).
"""

import doctest
from typing import Any

import pytest
import torch
from families import FAMILIES, medium
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megatrain.catalog import estimate as estimate_module
from megatrain.catalog.estimate import LOSS_BYTES, estimate, head_cost
from megatrain.catalog.unit_cost import UnitCost
from megatrain.chunks import chunk_length
from megatrain.model import build, find_units, model_config
from megatrain.profile import _CPU_ATTENTION, _calls, _Peak, profile

EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
DENSE = tuple(sorted(set(FAMILIES) - set(EXPERTS) - {"falcon"}))
BATCHES = ((1, 128), (4, 128), (1, 1024), (4, 1024))
EXTREMES = (BATCHES[0], BATCHES[-1])
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_size": 128, "intermediate_size": 1024, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    {"hidden_size": 768, "intermediate_size": 384, "num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 64},
    {"hidden_size": 2048, "intermediate_size": 256, "num_attention_heads": 16, "head_dim": 128},
)
SHAPE_NAMES = ("medium", "wide", "attention", "weights")
"""As `medium`; a wide feed-forward part; much attention; weights that are large beside the activations."""
GPT2_SHAPES: tuple[dict[str, Any], ...] = ({}, {"n_embd": 128, "n_inner": 2048}, {"n_embd": 768, "n_inner": 256})


def compare(config: dict[str, Any], micro_batch: int, seq_len: int, loss_chunk: int | None = None) -> None:
    """Every unit: flops within 1 %, workspace 0.95 to 1.15 of what torch counts, the same input and output."""
    units = find_units(build(model_config(config)))
    seen = profile(units, micro_batch, seq_len, loss_chunk)
    ours = estimate(config, micro_batch, seq_len, loss_chunk=loss_chunk)
    assert ours is not None and list(ours) == list(seen)
    where = f"{config['model_type']} [{micro_batch}, {seq_len}]"
    for unit in units:
        real, mine = seen[unit.name], ours[unit.name]
        assert mine.forward_flops == pytest.approx(real.forward_flops, rel=0.01), f"{where} {unit.name}"
        assert mine.output_bytes == real.output_bytes, f"{where} {unit.name}"
        assert mine.input_bytes in (0, real.input_bytes), f"{where} {unit.name}: {mine.input_bytes}, {real.input_bytes}"
        if unit is units.head:
            tokens = micro_batch * chunk_length(micro_batch, seq_len, loss_chunk)
            elements = tokens * units.model.config.vocab_size
            assert mine.workspace_bytes >= max(LOSS_BYTES * elements, real.workspace_bytes), f"{where} {mine} {real}"
        else:
            assert_close(mine, real, f"{where} {unit.name}")


def assert_close(mine: UnitCost, real: UnitCost, where: str) -> None:
    assert mine.backward_flops == pytest.approx(real.backward_flops, rel=0.01), where
    share = mine.workspace_bytes / real.workspace_bytes
    assert 0.95 <= share <= 1.15, f"{where}: {mine.workspace_bytes} estimated, {real.workspace_bytes} seen"


@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])], ids=SHAPE_NAMES
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_costs_by_arithmetic_are_those_that_torch_counts(name: str, shape: dict[str, Any]) -> None:
    """P2, P5: the families that runs are tested with, short and long, one sequence and four."""
    for micro_batch, seq_len in EXTREMES if shape else BATCHES:
        compare(medium(name, **shape), micro_batch, seq_len)


@pytest.mark.parametrize("shape", GPT2_SHAPES, ids=["medium", "wide", "narrow"])
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_costs_of_gpt2_are_those_that_torch_counts(shape: dict[str, Any], drop: float) -> None:
    """P2, P5: with dropout on the scores, torch's CPU kernel holds them in memory, and so does the estimate."""
    for micro_batch, seq_len in EXTREMES if shape else BATCHES:
        compare(medium("gpt2", attn_pdrop=drop, resid_pdrop=drop, **shape), micro_batch, seq_len)


@pytest.mark.parametrize("loss_chunk", [1024, 1000, 3, 1 << 20])
def test_costs_of_a_head_in_chunks_are_those_that_torch_counts(loss_chunk: int) -> None:
    """P2, P5: the logits of a chunk, the flops of all; a soft cap keeps more."""
    for name in ("llama", "gemma2"):
        compare(medium(name), 4, 512, loss_chunk)


@pytest.mark.parametrize("name", DENSE)
def test_costs_of_every_dense_family_are_those_that_torch_counts(name: str) -> None:
    compare(medium(name), 2, 512)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in EXPERTS if n != "qwen3_moe")]
)
def test_costs_of_experts_are_those_of_a_real_run(name: str) -> None:
    """P2, P5: routing looks at values, so a whole model runs for the flops, and one layer for its memory."""
    own: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 4} if name == "deepseek_v3" else {}
    own = {"head_dim": 16, **own, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96}
    config = medium(name, mlp_only_layers=[], first_k_dense_replace=0, **own)
    settings = model_config(config)
    model = AutoModelForCausalLM.from_config(settings).train()
    rows, seq_len = 2, 128
    ours = estimate(config, rows, seq_len)
    assert ours is not None
    calls = _calls(find_units(build(model_config(config))), rows, seq_len, torch.device("cpu"))
    arguments, options = tree_map(_filled, calls["model.layers.1"])
    with _Peak() as peak:
        output = tree_flatten(model.model.layers[1](*arguments, **options))[0][0]
    with peak:
        torch.autograd.backward(output, torch.empty_like(output))
    mine = ours["model.layers.1"].workspace_bytes
    assert 0.95 <= mine / peak.peak <= 1.15, f"{mine} estimated, {peak.peak} seen"
    model.set_experts_implementation("eager")  # the counter does not know the grouped product
    ids = torch.zeros(rows, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as backward:
        loss.backward()
    counted = forward.get_total_flops()
    assert sum(cost.forward_flops for cost in ours.values()) == pytest.approx(counted, rel=0.01)
    counted += backward.get_total_flops()
    assert sum(cost.backward_flops for cost in ours.values()) == pytest.approx(counted, rel=0.01)


def _filled(value: Any) -> Any:
    """Numbers in place of zeros, with a gradient, as `profile` asks for them."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_the_loss_has_18_bytes_a_logit_until_it_is_cut_into_chunks() -> None:
    """PL-12: 32,768 tokens by 151,936 words, 83 GiB; in chunks of 1,024 tokens a 32nd of that."""
    whole = head_cost(1024, 151_936, 32_768).workspace_bytes
    chunk = head_cost(1024, 151_936, 32_768, 1024).workspace_bytes
    assert whole == 18 * 32_768 * 151_936
    assert 83.4 < whole / 2**30 < 83.5
    assert chunk == whole // 32


def test_a_gpu_holds_no_scores_where_the_cpu_has_to() -> None:
    """The CPU's fused kernel wants queries as wide as values, and no dropout."""
    for config in (medium("gpt2", attn_pdrop=0.1), medium("deepseek_v3", num_key_value_heads=8)):
        cpu, gpu = estimate(config, 1, 1024), estimate(config, 1, 1024, gpu=True)
        assert cpu is not None and gpu is not None
        layer = next(name for name in cpu if name.endswith(".1"))
        assert cpu[layer].workspace_bytes - gpu[layer].workspace_bytes > 4 * 2 * 8 * 1024 * 1024
        assert gpu[layer].forward_flops == cpu[layer].forward_flops


def test_work_grows_with_the_batch_and_faster_with_the_length() -> None:
    """Twice the sequences is twice the work; twice the length is more."""
    costs = [estimate(medium("llama"), *batch) for batch in ((1, 256), (2, 256), (1, 512))]
    one, rows, length = (sum(cost.backward_flops for cost in found.values()) for found in costs if found is not None)
    assert rows == 2 * one, f"{rows} for two sequences, {one} for one"
    assert length > rows, f"{length} for twice the length, {rows} for twice the sequences"


def test_what_is_not_known_is_not_estimated() -> None:
    assert estimate({"model_type": "arcee"}, 1, 128) is None


def test_sums_in_the_documentation_come_out_as_written() -> None:
    result = doctest.testmod(estimate_module)
    assert result.attempted and not result.failed, result
