"""What a check runs on: a device and its lanes, a folder on a drive, and how much of each it may take.

Scope: `Rig`, and the one of the first CUDA device.
Not here: the checks. Each takes a `Rig`, so that a test can give it a stand-in.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tiering.workload import PAGE

if TYPE_CHECKING:
    from tiering.lanes import Lanes

MOST_SHARE = 0.8
"""Of the memory that is free on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """lanes: opens the device, with the host's memory locked for copies or not. room_bytes: of the device's memory.
    until_s: by `time.monotonic`, when a check should end by itself. scale: of all sizes; 1 on a GPU.
    """

    device: torch.device
    lanes: "Callable[[bool], Lanes]"
    folder: Path
    room_bytes: int
    until_s: float
    scale: float = 1.0

    def sized(self, nbytes: int, share: float = 1.0) -> int:
        """Whole pages: `nbytes`, but at most a share of the room."""
        return max(1, int(min(nbytes * self.scale, share * self.room_bytes)) // PAGE) * PAGE

    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        torch.get_device_module(self.device).synchronize()


def cuda_rig(folder: Path, until_s: float) -> Rig:
    """The first CUDA (or HIP) device."""
    device = torch.device("cuda", 0)
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    return Rig(
        device=device, lanes=_cuda_lanes, folder=folder, room_bytes=int(MOST_SHARE * free_bytes), until_s=until_s
    )


def _cuda_lanes(locked: bool) -> "Lanes":
    from tiering.cuda import CudaLanes  # needs more than torch

    return CudaLanes(0) if locked else CudaLanes(0, pin_limit_bytes=0)
