"""All work on the computing device: four calls; another device is another implementation, not another code path.

Scope: the `Lanes` protocol and `InlineLanes`, where DEVICE is HOST: views are lent without a copy, everything has
happened when a call returns.
Not here: when a call is made (`pipeline.py`). A device with memory of its own copies in `h2d` and `d2h` on streams of
their own and makes `wait` wait for events; the pipeline then needs nothing else.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Lanes(Protocol):
    """Copies and computing of one device. Called by the thread that computes."""

    device: torch.device

    def h2d(self, host: torch.Tensor, *, fill: bool) -> torch.Tensor:
        """The device's view of bytes in HOST (flat uint8). fill: with their content; otherwise it will be written."""
        ...

    def d2h(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Bring back what was written to a view that `h2d` gave, after all computing issued so far."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Do `work`, which touches only views that have been lent to it."""
        ...

    def wait(self) -> None:
        """Return when all copies back have arrived in HOST and nothing reads lent views any more."""
        ...


class InlineLanes:
    """DEVICE is HOST: nothing is copied, nothing is pending."""

    device = torch.device("cpu")

    def h2d(self, host: torch.Tensor, *, fill: bool) -> torch.Tensor:
        return host

    def d2h(self, device: torch.Tensor, host: torch.Tensor) -> None:
        assert device.data_ptr() == host.data_ptr(), "a lent view was replaced"

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self) -> None:
        return None
