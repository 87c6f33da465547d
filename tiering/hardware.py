"""What the machine can do, as numbers with a source.

Scope: rates that the planner reckons with; pure values.
Not here: measuring them (`measure.py`), using them (`simulate.py`, `costs.py`).
"""

from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "derived", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A number per second, and where it comes from. An assumed one is marked wherever it is shown."""

    per_s: float
    source: Source
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """read, write: bytes/s of the NVME tier alone; mixed reads and writes share one budget (design: measured).
    compute: FLOP/s in FP32. update: bytes/s of all operands of a tiled op. `update_beside_compute` is True where the
    two have separate processors (a GPU computes while the CPU updates).
    """

    read: Rate
    write: Rate
    compute: Rate
    update: Rate
    update_beside_compute: bool = False

    def assumed(self) -> list[str]:
        """Names of the rates that nobody measured."""
        return [name for name in ("read", "write", "compute", "update") if getattr(self, name).source == "assumed"]


def assumed_hardware() -> Hardware:
    """Round figures of a desktop, for planning where nothing could be measured."""
    how = "assumed: one PCIe 3 drive and two desktop cores"
    return Hardware(
        read=Rate(per_s=1.7e9, source="assumed", how=how),
        write=Rate(per_s=1.7e9, source="assumed", how=how),
        compute=Rate(per_s=1.5e11, source="assumed", how=how),
        update=Rate(per_s=2.0e10, source="assumed", how=how),
    )
