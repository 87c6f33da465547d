"""Computing the same twice gives the same bits twice, and those of a process that knows nothing of this project.

Scope: `compute_repeatably` on the CPU; a run against plain torch as it comes.
Not here: the settings of a device (`test_device_runs.py`).
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RunFile
from families import FAMILIES
from models import MODELS
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.config import load_run
from megatrain.exactness import compute_repeatably
from megatrain.inputs import tensors
from megatrain.prepare import prepare
from megatrain.trainer import open_run_batches
from megatrain.verify import verify


def test_the_backward_of_an_index_is_the_same_each_time() -> None:
    """P1: by default its threads add with atomics, in the order in which they come by."""
    compute_repeatably()
    torch.manual_seed(0)
    values, rows = torch.randn(8192, 64), torch.randint(0, 2048, (8192,))
    seen = set()
    for _ in range(20):
        x = torch.zeros(2048, 64, requires_grad=True)
        (x[rows] * values).sum().backward()
        assert x.grad is not None
        seen.add(x.grad.numpy().tobytes())
    assert len(seen) == 1, f"{len(seen)} different gradients in 20 backward passes"


def test_lower_precisions_that_a_process_was_given_are_taken_back() -> None:
    """P1: FP32 is computed in FP32, whatever was set before."""
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    compute_repeatably()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("known_machine")
def test_experts_of_a_large_batch_equal_the_plain_loop(run_file: RunFile) -> None:
    """P1: the biases of its experts are looked up for each token; from 32,768 elements on torch adds such gradients up
    in several threads, which come by in another order now and then.
    """
    config = {**FAMILIES["gpt_oss"], "max_position_embeddings": 512}
    changes = {"model.config": config, "data.seq_len": 256, "train.batch": 4, "train.micro_batch": 4}
    result = verify(load_run(run_file(changes)), 2, Console(quiet=True))
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


PLAIN_LOOP = """
import sys
import numpy, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
for ids in torch.from_numpy(numpy.load(sys.argv[2])):
    adamw.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    adamw.step()
    print(loss.item().hex())
"""
"""As anyone would write it, in a process with torch's own defaults."""


WIDE_HEADS = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("model", "sizes", "seq_len"),
    [
        pytest.param("llama", WIDE_HEADS, 128),
        *(pytest.param(name, {}, 16, marks=pytest.mark.slow) for name in ("gpt2", "gemma3", "mixtral", "llama-tied")),
    ],
)
def test_a_run_has_the_bits_of_a_plain_loop_in_a_process_of_its_own(
    run_file: RunFile, tmp_path: Path, model: str, sizes: dict[str, int], seq_len: int
) -> None:
    """P1: no setting of this project changes what torch computes by default. Heads of 128 and 128 tokens: attention's
    backward gives other bits where MKL may not choose its number of threads.
    """
    config = AutoConfig.for_model(**{**MODELS[model], **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    path = run_file(
        {"model": {"path": str(tmp_path / "model")}, "optimizer": optimizer}
        | {"data.seq_len": seq_len, "train.batch": 2, "train.max_grad_norm": None}
    )
    batches = open_run_batches(prepare(load_run(path)), tmp_path, Console(quiet=True))
    np.save(tmp_path / "rows.npy", np.stack([tensors(batches.batch_at(step))["input_ids"] for step in range(4)]))
    plain = [sys.executable, "-c", PLAIN_LOOP, str(tmp_path / "model"), str(tmp_path / "rows.npy")]
    tiered = [sys.executable, "-m", "megatrain", "train", str(path)]
    told = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for command in (plain, tiered)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"].hex() for row in rows if "loss" in row]
    assert losses == told[0].split(), f"tiered {losses}, plain {told[0].split()}"
