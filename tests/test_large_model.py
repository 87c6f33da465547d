"""P2, P5: a model folder larger than the memory of the process passes through `train` and `export`.

Scope: `benchmarks/large_model.py` at a small size; MEGATRAIN_LARGE_MODEL=8GB,2GiB sets folder and limit.
Not here: what a step takes of memory (`test_memory.py`), small folders (`test_checkpoint.py`, `test_export.py`).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks import large_model
from benchmarks.presets import llama
from megatrain.sizes import parse_size

SIZE, LIMIT = os.environ.get("MEGATRAIN_LARGE_MODEL", "1.5GB,800MiB").split(",")


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.timeout(3600)
def test_a_folder_larger_than_memory_is_imported_and_exported_bit_by_bit(tmp_path: Path) -> None:
    """CK-15, P2: both commands run in a memory cgroup, page cache included, and neither is killed."""
    options = ["--path", str(tmp_path), "--size", SIZE, "--limit", LIMIT, "--json"]
    done = CliRunner().invoke(large_model.app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    print(json.dumps(found, indent=1))
    if found["import"]["peak_bytes"] is None:
        pytest.skip(f"no memory cgroup: {found['import']['limit']}")
    assert found["folder_bytes"] > 1.5 * parse_size(LIMIT), "the folder would fit in the limit: this shows nothing"
    assert found["files"] > 2 and found["differing"] == [], found["differing"]
    peaks = found["import"]["peak_bytes"], found["export"]["peak_bytes"]
    assert max(peaks) <= parse_size(LIMIT), (peaks, parse_size(LIMIT))
    assert list(tmp_path.iterdir()) == [], "something is left behind"


def test_the_folder_that_is_made_is_one_that_transformers_loads(tmp_path: Path) -> None:
    """What the long test takes in is a real model folder, of no two tensors alike."""
    config = llama(hidden=64, layers=2, intermediate=128, vocabulary=256)
    files = large_model.write_model(tmp_path / "model", config, torch.bfloat16, 100_000)
    assert len(files) > 2, files
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    kept = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        n: tuple(t.shape) for n, t in kept.items()
    }
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
    assert len({tuple(tensor.flatten()[:8].tolist()) for tensor in kept.values()}) == len(kept)


def test_a_tensor_that_came_out_otherwise_is_named(tmp_path: Path) -> None:
    """One bit is enough, and so is a tensor that is missing."""
    config = llama(hidden=64, layers=1, intermediate=128, vocabulary=256)
    for name in ("one", "two"):
        (file,) = large_model.write_model(tmp_path / name, config, torch.float32, 1 << 30)
    assert large_model.differing(tmp_path / "one", tmp_path / "two") == []
    kept = load_file(file)
    kept["lm_head.weight"].view(torch.int32)[-1, -1] ^= 1
    del kept["model.norm.weight"]
    save_file({name: tensor.clone() for name, tensor in kept.items()}, file, metadata={"format": "pt"})
    found = large_model.differing(tmp_path / "one", tmp_path / "two")
    assert found == ["model.norm.weight", "lm_head.weight"], found
