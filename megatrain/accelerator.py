"""The device that computes a run, where it has memory of its own: which one, its facts, how work is given to it.

Scope: `Accelerator`, finding the one that `device:` asks for, the refusal where there is none.
Not here: streams and copies (`tiering/cuda.py`), its rates (`tiering/measure_device.py`), how much of its memory a
plan may take (`prepare.py`), the facts that need no run (`environment.py`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatrain.config import RunConfig
from megatrain.environment import Cuda, cuda_facts, pin_limit
from megatrain.errors import UserError
from megatrain.exactness import compute_exactly
from megatrain.precision import compute_dtype
from megatrain.programs import Precision
from tiering.cuda import CudaLanes
from tiering.lanes import Lanes
from tiering.measure_device import DeviceRates, quick_device_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device beside the host. memory_bytes: in all; free_bytes: before the run takes any, its own context taken.

    lanes: opens it for a run. rates: what it does a second, by hidden size and tokens of a product, the bytes that
    measuring may take of it, and whether gradients are clipped. count: how many of its kind the machine has; one is
    used.
    """

    device: torch.device
    name: str
    memory_bytes: int
    free_bytes: int
    lanes: Callable[[], Lanes]
    rates: Callable[[int, int, int, bool], DeviceRates]
    count: int = 1


def find_accelerator(run: RunConfig) -> Accelerator | None:
    """The device of `device: cuda`, or of `auto` where there is one; None: the CPU computes.

    Raises UserError where `cuda` is asked for and torch sees none, and for a precision that only a device has.
    """
    cuda = Cuda() if run.device == "cpu" else cuda_facts()
    if cuda.device:
        return _cuda(run.train.precision)
    if run.device == "cuda":
        raise UserError(f"device: cuda: {cuda.why}. Fix: {_fix(cuda)}")
    if run.train.precision == "tf32":
        why = "device: cpu" if run.device == "cpu" else cuda.why or "torch sees no GPU"
        raise UserError(
            f"train.precision: tf32: a mode of the matrix units of a GPU, and the CPU computes this run ({why}). "
            "Fix: train.precision: fp32, or bf16"
        )
    return None


def why_none(run: RunConfig) -> str:
    """Why `auto` computes on the CPU of a machine that has a card; empty where there is nothing to say."""
    cuda = cuda_facts() if run.device == "auto" else Cuda()
    return f"there is a card, but {cuda.why}" if cuda.card and not cuda.device else ""


def forwards_note(run: RunConfig) -> str:
    """For what is made of forwards alone, which the CPU computes; empty where it computes the training too."""
    elsewhere = run.device == "cuda" or (run.device == "auto" and bool(cuda_facts().device))
    return f"the CPU computes (device: {run.device} is for training)" if elsewhere else ""


def _fix(cuda: Cuda) -> str:
    if cuda.card:
        return "a build of torch for CUDA and a driver that is new enough for it (megatrain doctor), or device: cpu"
    return "device: cpu, or a machine with a GPU and a build of torch for CUDA"


def _cuda(precision: Precision) -> Accelerator:
    """The first CUDA device. Everything of this process computes exactly from here on, as far as `precision` goes."""
    compute_exactly(tf32=precision == "tf32")
    device = torch.device("cuda", 0)
    module = torch.get_device_module(device)
    free_bytes, memory_bytes = module.mem_get_info(device)
    return Accelerator(
        device=device,
        name=module.get_device_name(device),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        lanes=partial(CudaLanes, device.index, pin_limit_bytes=pin_limit(os.environ)),
        rates=partial(quick_device_rates, device, dtype=compute_dtype(precision)),
        count=module.device_count(),
    )


def pin_line(lanes: Lanes) -> str:
    """Whether host memory is locked for copies, and what it costs where it is not; empty where nothing is copied."""
    return lanes.pin_line if isinstance(lanes, CudaLanes) else ""


def node_line(lanes: Lanes) -> str:
    """On which NUMA node host memory lies; empty where nothing is copied, and on a machine with one node."""
    return lanes.node_line if isinstance(lanes, CudaLanes) else ""


def move_buffers(model: nn.Module, device: torch.device) -> int:
    """Brings what the model computes with besides its parameters (`inv_freq`, masks) there; returns its bytes."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    return sum(buffer.nbytes for buffer in moved.values())
