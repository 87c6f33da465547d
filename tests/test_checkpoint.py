"""CK: model folders are read exactly, whatever form their files have; what is wrong with them is named before a run.

Scope: `Checkpoint` on folders that `save_pretrained` wrote, for every listed architecture; damage; refusals.
Not here: whole runs from a folder (`test_run.py`), export (`test_export.py`), GGUF (`test_gguf.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunFile
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.checkpoint import Checkpoint, persistent_buffers
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.export import export
from megatrain.model import Units, build, find_units, model_config
from megatrain.model_folder import local_folder
from megatrain.safetensors_in import INDEX, SINGLE, TensorFiles, write_index
from megatrain.supported import TESTED, Family
from megatrain.trainer import train
from megatrain.verify import verify

LLAMA = next(row for row in TESTED if row.model_type == "llama").config
ROWS = [
    pytest.param(row, id=f"{row.family}-{row.parts}".replace(" ", "-"), marks=() if row.often else pytest.mark.slow)
    for row in TESTED
]


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A model with random weights and buffers, and its folder as `save_pretrained` writes it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(model_config(dict(config)), dtype=torch.float32)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.normal_()
    model.to(dtype).save_pretrained(folder, **options)
    return model


def units_of(folder: Path) -> Units:
    return find_units(build(model_config(json.loads((folder / "config.json").read_text()))))


def filled(checkpoint: Checkpoint, units: Units) -> dict[str, torch.Tensor]:
    """Parameters from their blocks, and buffers as the model has them."""
    tensors = {}
    for unit in units.stored:
        block = torch.empty(unit.nbytes, dtype=torch.uint8)
        checkpoint.fill(unit, block)
        tensors |= {place.name: place.of(block).clone() for place in unit.slices}
    return tensors | persistent_buffers(units)


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    units = units_of(folder)
    return filled(Checkpoint(folder, units), units)


@pytest.mark.parametrize("row", ROWS)
def test_a_folder_of_every_listed_architecture_is_read_as_transformers_reads_it(row: Family, tmp_path: Path) -> None:
    """CK-15: BF16 in several shards, experts one by one as hubs have them, buffers that belong to the files."""
    saved(tmp_path, row.config, torch.bfloat16, max_shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    found = read_back(tmp_path)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, expected[name]), f"{name}: {tensor.flatten()[:4]} {expected[name].flatten()[:4]}"
    unread = {name for name in expected if name not in found}
    tied = {name for name in unread if any(expected[name].data_ptr() == expected[n].data_ptr() for n in found)}
    assert unread == tied, unread - tied


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral"])
def test_a_run_from_a_folder_of_experts_has_the_bits_of_the_plain_loop_and_exports_all_it_read(
    run_file: RunFile, tmp_path: Path, kind: str
) -> None:
    """P1, CK-15: `from_pretrained` is the reference; buffers of the folder decide the routing, and leave with it."""
    saved(tmp_path / "model", next(row for row in TESTED if row.model_type == kind).config, torch.bfloat16)
    quiet = Console(quiet=True)
    changes = {"model": {"path": str(tmp_path / "model")}, "data.tokenizer": "bytes", "tiers.host_memory": "8MiB"}
    result = verify(load_run(run_file(changes | {"train.micro_batch": 4})), 2, quiet)
    assert result["identical"], result
    still = {"optimizer.lr": 0.0, "train.steps": 1}
    assert train(load_run(run_file(changes | still)), resume=False, console=quiet) == 0
    export(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_bytes=1 << 30, force=False, console=quiet)
    before, after = load_file(tmp_path / "model" / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    unlike = [name for name in before if not torch.equal(before[name].float(), after[name].float())]
    assert not unlike, unlike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_becomes_fp32_without_a_change(dtype: torch.dtype, tmp_path: Path) -> None:
    """CK-15: the upcast is exact."""
    model = saved(tmp_path, LLAMA, dtype)
    found = read_back(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach().float()), name


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_back(folder)
    text = str(caught.value)
    assert "Fix" in text or "config.json says" in text, text
    return text


def test_a_file_that_is_cut_short_is_named_with_both_sizes(tmp_path: Path) -> None:
    """CK-07: file name, expected and real size."""
    saved(tmp_path, LLAMA)
    file = tmp_path / SINGLE
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    text = refusal(tmp_path)
    assert all(part in text for part in (SINGLE, str(len(whole)), str(len(whole) - 100))), text


def test_shards_without_an_index_are_refused_and_the_index_can_be_made_again(tmp_path: Path) -> None:
    """CK-09: how many shards there are, and the way out works."""
    model = saved(tmp_path, LLAMA, max_shard_size="20KB")
    shards = len(list(tmp_path.glob("*.safetensors")))
    (tmp_path / INDEX).unlink()
    text = refusal(tmp_path)
    assert f"{shards} shards found" in text and "write_index" in text, text
    write_index(tmp_path)
    found = read_back(tmp_path)
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


def test_index_and_shards_are_held_against_each_other_both_ways(tmp_path: Path) -> None:
    """CK-09: a tensor that only the index has, one that only a shard has, and a shard that is not there."""
    saved(tmp_path, LLAMA, max_shard_size="20KB")
    index = tmp_path / INDEX
    content = index.read_text()
    tree = json.loads(content)
    shards = list(tree["weight_map"].values())
    name, shard = next((n, s) for n, s in tree["weight_map"].items() if shards.count(s) > 1)
    tree["weight_map"]["model.layers.0.more.weight"] = shard
    index.write_text(json.dumps(tree))
    assert "model.layers.0.more.weight" in refusal(tmp_path)
    tree = json.loads(content)
    del tree["weight_map"][name]
    index.write_text(json.dumps(tree))
    text = refusal(tmp_path)
    assert name in text and shard in text, text
    index.write_text(content)
    (tmp_path / shard).unlink()
    text = refusal(tmp_path)
    assert shard in text and "1 of" in text, text


def test_a_tensor_that_is_missing_extra_or_of_another_shape_is_named(tmp_path: Path) -> None:
    """CK-11: transformers would draw a missing head at random; here it is refused."""
    saved(tmp_path, LLAMA)
    whole = load_file(tmp_path / SINGLE)

    def without(**changes: torch.Tensor | None) -> str:
        tensors = {**whole, **changes}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, tmp_path / SINGLE, metadata={"format": "pt"})
        return refusal(tmp_path)

    assert "has no tensor lm_head.weight" in without(**{"lm_head.weight": None})
    assert "does not know: model.layers.0.extra" in without(**{"model.layers.0.extra": torch.zeros(1)})
    text = without(**{"lm_head.weight": torch.zeros(255, 32)})
    assert "lm_head.weight has shape (255, 32)" in text and "(256, 32)" in text, text


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """CK: file, tensor and how many values."""
    saved(tmp_path, LLAMA)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.norm.weight"][:2] = torch.tensor([torch.nan, torch.inf])
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    text = refusal(tmp_path)
    assert "model.norm.weight holds 2 values" in text and SINGLE in text, text


def test_a_quantised_folder_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    """CK: 8-bit floats would have to be scaled by tensors that the model does not know."""
    saved(tmp_path, LLAMA)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    text = refusal(tmp_path)
    assert "lm_head.weight is F8_E4M3" in text, text


def test_a_config_that_says_quantised_or_brings_its_own_code_is_refused(tmp_path: Path) -> None:
    """CK: `trust_remote_code` is off; code of a known architecture is not needed, and its `auto_map` is passed over."""
    saved(tmp_path, LLAMA)
    config = json.loads((tmp_path / "config.json").read_text())

    def with_config(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))

    with_config(quantization_config={"quant_method": "mxfp4"})
    assert "mxfp4" in refusal(tmp_path)
    with_config(model_type="own_model", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert "own_model brings code of its own" in refusal(tmp_path)
    with_config(auto_map={"AutoModelForCausalLM": "own.Model"})
    assert read_back(tmp_path)


def test_a_hub_name_that_cannot_be_reached_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """CK: a folder wins over a hub name; without a network there is one clear error, and nothing is tried for paths."""
    import huggingface_hub

    asked: list[str] = []

    def unreachable(name: str, **options: Any) -> str:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"org/none is no folder here, and the hub cannot be reached") as caught:
        local_folder("org/none")
    assert "Fix" in str(caught.value) and "\n" not in str(caught.value), caught.value
    for path in ("/a/b", "./a", "~/a", "a/b/c", "$HOME/a", None):
        assert local_folder(path) == path
    assert asked == ["org/none"], asked


def test_a_hub_name_becomes_the_folder_that_it_was_downloaded_to(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK: the run file that is kept names the folder, so a resume needs no network."""
    import huggingface_hub

    saved(tmp_path / "snapshot", LLAMA)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "snapshot"))
    run = load_run(run_file({"model": {"path": "org/tiny"}, "data.tokenizer": "bytes"}))
    assert run.model.path == tmp_path / "snapshot", run.model.path
    assert run.model.json_config()["model_type"] == "llama"


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    """CK-11: experts are stacked from single tensors; a gap must not shift the others unseen."""
    saved(tmp_path, next(row for row in TESTED if row.model_type == "mixtral").config)
    tensors = load_file(tmp_path / SINGLE)
    gone = next(name for name in tensors if ".experts.2." in name)
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / SINGLE, metadata={"format": "pt"})
    text = refusal(tmp_path)
    assert "experts" in text, text


def test_tied_weights_load_from_either_name_and_are_refused_where_they_differ(tmp_path: Path) -> None:
    """MA-12: files of other tools hold the head's name, or both."""
    saved(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    tensors = load_file(tmp_path / SINGLE)
    words = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": words}, tmp_path / SINGLE, metadata={"format": "pt"})
    assert torch.equal(read_back(tmp_path)["model.embed_tokens.weight"], words)
    both = {**tensors, "lm_head.weight": words.clone(), "model.embed_tokens.weight": words}
    save_file(both, tmp_path / SINGLE, metadata={"format": "pt"})
    assert torch.equal(read_back(tmp_path)["model.embed_tokens.weight"], words)
    save_file({**both, "lm_head.weight": words + 1}, tmp_path / SINGLE, metadata={"format": "pt"})
    text = refusal(tmp_path)
    assert "lm_head.weight differ" in text, text


def test_a_folder_of_the_bare_decoder_with_tables_that_are_computed_now_is_read(tmp_path: Path) -> None:
    """CK: as GPT-2 is on the hub: names without the prefix of the decoder, and causal masks that no release needs."""
    model = saved(tmp_path, next(row for row in TESTED if row.model_type == "gpt2").config)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    save_file(tensors | masks, tmp_path / SINGLE, metadata={"format": "pt"})
    found = read_back(tmp_path)
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


def test_files_of_another_format_are_named(tmp_path: Path) -> None:
    """CK-07: a file of torch, whole or half, is not opened; what is there is said, and what to do."""
    saved(tmp_path, LLAMA)
    (tmp_path / SINGLE).unlink()
    assert "no safetensors file found. Fix" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "found, but pytorch_model.bin" in refusal(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "megatrain unpack" in refusal(tmp_path)


def test_files_are_closed_again(tmp_path: Path) -> None:
    """P2: a mapped shard counts as memory of the process; none stays mapped between units."""
    saved(tmp_path, LLAMA)
    files = TensorFiles(tmp_path)
    with files.reading():
        files.read("lm_head.weight")
        assert files._open
    assert not files._open
