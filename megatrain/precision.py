"""What the setting `train.precision` means: the numbers that a forward and a backward compute with.

Scope: the type of weights and activations, the kind of block that weights are lent from, a model that knows its type.
Not here: TF32, which is a mode of the device (`exactness.py`); which op touches which block (`programs.py`); rounding a
weight (`optim.py`); adding up gradients (`gradients.py`).

Weights, gradients and moments are FP32 in every precision. With `bf16` a unit computes with a copy of its weights,
rounded to nearest even, as FSDP2 does with `MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`. Buffers
of the model (`inv_freq`) stay as they are.
"""

import torch
from torch import nn

from megatrain.programs import WEIGHT_BF16, Precision


def compute_dtype(precision: Precision) -> torch.dtype:
    """Of the weights that a unit computes with, and of its activations."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def weight_kind(dtype: torch.dtype) -> str:
    """Kind of the blocks that hold weights as `dtype`."""
    return WEIGHT_BF16 if dtype == torch.bfloat16 else "weight"


def set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """The model's parameters, which have no memory, are of `dtype`: some models ask for it in their own code."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def precision_note(precision: Precision) -> str:
    """For the line that says which device computes; empty where nothing is special."""
    if precision == "tf32":
        return ", matrix products in TF32"
    return ", computing in BF16 with FP32 masters" if precision == "bf16" else ""
