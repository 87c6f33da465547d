"""What a run may take of a device's memory: the sum beside the planned arena, and the refusal of what does not fit.

Scope: `tiers.device_memory` or what is free, less what torch and CUDA take; a shortage told line by line.
Not here: what computing takes (`workspace.py`), the arena on the device (`tiering/plan.py`), host memory (`fit.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatrain.accelerator import Accelerator
from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.sizes import format_size
from megatrain.workspace import DEVICE_CONTEXT
from tiering.errors import BudgetError
from tiering.plan import Line, ShortError

UNUSED_SHARE = 1 / 16
"""Of what is free, where no bound was set: torch's allocator cuts its blocks from larger pieces."""
_TOKEN_TENSORS, _TOKEN_BYTES = 3, 8
"""Ids, labels and positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """given_bytes: of the device, for all of the run. compute: what torch takes beside the arena; context: what CUDA
    takes.
    """

    given_bytes: int
    compute: tuple[Line, ...]
    context: Line

    @property
    def beside(self) -> tuple[Line, ...]:
        return (*self.compute, self.context)

    @property
    def budget_bytes(self) -> int:
        """What is left for the arena."""
        return max(0, self.given_bytes - sum(line.nbytes for line in self.beside))


def room_beside(run: RunConfig, accelerator: Accelerator, compute: tuple[Line, ...], buffer_bytes: int) -> DeviceRoom:
    """Raises UserError for a `tiers.device_memory` that the device does not have. buffer_bytes: of the model."""
    tokens = _TOKEN_TENSORS * _TOKEN_BYTES * run.train.batch * run.data.seq_len
    inputs = Line(what="buffers of the model and token ids", nbytes=buffer_bytes + tokens)
    return DeviceRoom(
        given_bytes=_given(run, accelerator),
        compute=(*compute, inputs),
        context=Line(what="CUDA context", nbytes=DEVICE_CONTEXT),
    )


def _given(run: RunConfig, accelerator: Accelerator) -> int:
    asked, free = run.tiers.device_memory, accelerator.free_bytes
    if asked is None:
        return int((1 - UNUSED_SHARE) * free)
    if asked > free:
        taken = accelerator.memory_bytes - free
        raise UserError(
            f"tiers.device_memory: {asked} bytes; {accelerator.name} has {accelerator.memory_bytes}, and "
            f"{format_size(taken)} of them are taken already. Fix: at most {free}, or end what else uses it"
        )
    return asked


@contextmanager
def exhaustion_told(room: DeviceRoom | None, when: str) -> Iterator[None]:
    """Inside, torch's failure to find memory on the device is told beside what was planned. Raises BudgetError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if room is None:
            raise
        said = " ".join(str(error).split())[:300]
        rows = "".join(f"\n  {line.what:<34} {line.nbytes:>14} bytes" for line in room.beside)
        raise BudgetError(
            f"DEVICE had no room in {when}: {said}\n"
            f"Beside the arena of at most {room.budget_bytes} bytes were planned:{rows}\n"
            "Fix: a lower tiers.device_memory, so that the arena leaves more, a smaller train.micro_batch, or end what "
            "else uses the device"
        ) from error


@contextmanager
def device_shortage(room: DeviceRoom | None) -> Iterator[None]:
    """Inside, the planner's refusal of a device's arena is told with all that stands beside it."""
    try:
        yield
    except ShortError as short:
        if short.tier != "DEVICE" or room is None:
            raise
        fix = "tiers.device_memory >= {}, a smaller train.micro_batch, train.loss_chunk, or device: cpu"
        raise ShortError("DEVICE", (*short.lines, *room.beside), room.given_bytes, short.cause, fix) from None
