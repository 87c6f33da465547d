"""Settings under which true FP32, or TF32, is computed, with the same bits each time it is asked for.

Scope: the switches of torch and cuBLAS that decide it, for a run and for the plain loop that it is compared with.
Not here: which device computes (`accelerator.py`), random numbers (`random_state.py`).

Without them two runs of the same plain loop on a GPU differ: the backward of memory-efficient attention adds up in any
order, and so do gathers and scatters. What they cost is the speed of those kernels. An operator of which torch has no
deterministic form raises, with its name. Sources: torch's notes on reproducibility; `attention_backward.cu`, which
keeps to one order only where operators without one raise (`warn_only=False`); cuBLAS, "Results reproducibility".

A CPU needs them too: there the backward of an index (`x[i]`, which experts are routed with) adds with atomics from
32,768 elements on, in the order in which its threads come by (`IndexKernel.cpp`). All else is left as torch has it, so
that a plain loop elsewhere comes to the same bits. Setting the number of threads, even to what it is, would not do:
MKL may then no longer choose it (`mkl_set_dynamic`), and attention's backward adds up in another way.
"""

import os

import torch
import torch.utils.deterministic

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


def compute_exactly(*, tf32: bool = False) -> None:
    """From now on, in this process. Before the device has computed anything: cuBLAS looks once.

    tf32: matrix products of FP32 numbers drop 13 bits of each factor. They give the same bits each time too.
    """
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # all is written first


def compute_repeatably() -> None:
    """The same for a CPU, unless a device has it already. torch warns of an operator that has no such form."""
    if torch.are_deterministic_algorithms_enabled():
        return
    torch.set_float32_matmul_precision("highest")  # lower ones let oneDNN round to BF16
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # all is written first


def is_inexact(error: BaseException) -> bool:
    """Was it raised because an operator cannot give the same bits each time?"""
    return isinstance(error, RuntimeError) and _NOT_DETERMINISTIC in str(error)
