"""Computing the same twice gives the same bits twice.

Scope: `compute_repeatably` on the CPU. Not here: the settings of a device (`test_device_runs.py`).
"""

import pytest
import torch
from conftest import RunFile
from families import FAMILIES
from rich.console import Console

from megatrain.config import load_run
from megatrain.exactness import compute_repeatably
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
