"""Measures a device with memory of its own: copies to it and from it, its matrix products and updates.

Scope: copies by direction and kind of host memory, each way alone and both at once; the few rates that a plan needs, in
a second; a host's `Hardware` with them in it. Any device that torch has a module for.
Not here: the host's memory and processors (`measure_memory.py`), drives (`measure_disk.py`).

State of proof: run on a CPU, as a device of its own, where a copy is one within the host. Not yet on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tiering.hardware import Hardware, Rate
from tiering.measure_memory import (
    COPY_BYTES,
    REPEATS,
    MiB,
    compute_rate,
    measured,
    product_shape,
    timed,
    update_elements,
    update_rate,
)

QUICK_COPY_BYTES = 64 * MiB
WAYS = ("h2d", "d2h", "both")
KINDS = ("pinned", "pageable")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """compute: FLOP/s of matrix products. h2d, d2h: bytes/s of copies of pinned host memory, one way alone. update: as
    `Hardware.device_update`.
    """

    compute: Rate
    h2d: Rate
    d2h: Rate
    update: Rate | None = None

    def beside(self, host: Hardware) -> Hardware:
        """`host` where this device computes, and one of the two updates."""
        there = replace(host, compute=self.compute, h2d=self.h2d, d2h=self.d2h, update_beside_compute=True)
        return replace(there, device_update=self.update)


def quick_device_rates(
    device: torch.device,
    width: int,
    tokens: int,
    memory: int,
    clips: bool = False,
    dtype: torch.dtype = torch.float32,
) -> DeviceRates:
    """width: hidden size, tokens: rows of a matrix product. memory: bytes that measuring may take of the device. clips:
    gradients are scaled before an update. dtype: of the product's numbers.
    """
    copies = _Copies(device, max(MiB, min(QUICK_COPY_BYTES, memory // 4)), "pinned")
    return DeviceRates(
        compute=compute_rate(*product_shape(width, tokens, memory), device=device, dtype=dtype),
        h2d=copies.rate("h2d"),
        d2h=copies.rate("d2h"),
        update=update_rate(update_elements(memory // 2), scaled=clips, device=device),
    )


def device_copy_rates(device: torch.device | None, nbytes: int = COPY_BYTES) -> dict[str, Rate]:
    """Bytes/s between host and device by direction and kind of host memory, such as `h2d_pinned`; empty without one.

    `both` counts the bytes of both directions at once, each on a stream of its own. Only pinned memory is copied by
    the device itself; pageable memory passes through a buffer of the driver.
    """
    if device is None:
        return {}
    found: dict[str, Rate] = {}
    for kind in KINDS:
        copies = _Copies(device, nbytes, kind)
        found |= {f"{way}_{kind}": copies.rate(way) for way in WAYS}
    return found


def first_device() -> torch.device | None:
    """The first accelerator, if torch sees one."""
    return torch.accelerator.current_accelerator(check_available=True)


class _Copies:
    """Two buffers on either side, and a stream a direction."""

    def __init__(self, device: torch.device, nbytes: int, kind: str) -> None:
        self._device, self._nbytes, self._kind = device, nbytes, kind
        self._module = torch.get_device_module(device)
        self._streams = {way: self._module.Stream() for way in ("h2d", "d2h")}
        pins = kind == "pinned" and device.type != "cpu"
        self._host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pins) for _ in range(2)]
        self._there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def rate(self, way: str) -> Rate:
        work: dict[str, Callable[[], None]] = {"h2d": self._h2d, "d2h": self._d2h, "both": self._both}
        best_s = min(timed(work[way], self._device) for _ in range(1 + REPEATS))
        moved = self._nbytes * (2 if way == "both" else 1)
        return measured(moved / best_s, f"{way} copy, {self._kind}, buffers of {self._nbytes / MiB:.0f} MiB")

    def _h2d(self) -> None:
        with self._module.stream(self._streams["h2d"]):
            self._there[0].copy_(self._host[0], non_blocking=True)

    def _d2h(self) -> None:
        with self._module.stream(self._streams["d2h"]):
            self._host[1].copy_(self._there[1], non_blocking=True)

    def _both(self) -> None:
        self._h2d()
        self._d2h()
