"""What a machine can do, as numbers with a source.

Scope: rates that the planner reckons with, and the drives behind the NVME tier; pure values.
Not here: measuring them (`measure.py`), keeping them in a file (`hardware_file.py`), using them (`simulate.py`,
`costs.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "derived", "assumed"]

READ_SHARE = 16 / 28
"""Share of reads among the bytes that a step without clipping moves: the mix at which `mixed` is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A number per second, and where it comes from. An assumed one is marked wherever it is shown.

    how: what was timed, or which document says so. date: ISO day of the measurement, empty for what was not measured.
    """

    per_s: float
    source: Source
    how: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive of the NVME tier. read, write: bytes/s of one alone, sustained. mixed: bytes/s in all while
    `READ_SHARE` of them are read. direct_read: as `Hardware.direct_read`. capacity, endurance: bytes that it holds, and
    that may be written in its life (0: unknown).
    """

    name: str
    read: Rate
    write: Rate
    mixed: Rate | None = None
    direct_read: Rate | None = None
    capacity_bytes: int = 0
    endurance_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """read, write, mixed: bytes/s of the NVME tier, all drives together (see `Drive`). queue_depth: requests in
    flight at which they were measured. compute: FLOP/s in FP32. update: bytes/s of all operands of a tiled op.
    update_beside_compute: True where the two have separate processors (a GPU computes while the CPU updates).
    h2d, d2h: bytes/s of the copies to and from the device; None where the device is the host itself. device_update: as
    update, on the device; None where that is not known: then nothing is updated there. direct_read: bytes/s of the NVME
    tier into memory of the device, past HOST; None where that cannot be.
    io_steals: the share of its speed that what runs on the CPU loses while the drive is busy: updates, and computing
    where it shares their processors.
    """

    read: Rate
    write: Rate
    compute: Rate
    update: Rate
    mixed: Rate | None = None
    queue_depth: int = 8
    update_beside_compute: bool = False
    h2d: Rate | None = None
    d2h: Rate | None = None
    device_update: Rate | None = None
    direct_read: Rate | None = None
    io_steals: float = 0.0

    def rates(self) -> dict[str, Rate]:
        """Every rate that is known, by name."""
        named = {name: getattr(self, name) for name in RATE_UNITS}
        return {name: rate for name, rate in named.items() if rate is not None}

    def assumed(self) -> list[str]:
        """Names of the rates that nobody measured."""
        return [name for name, rate in self.rates().items() if rate.source == "assumed"]

    def mixed_stretch(self) -> float:
        """How much longer a transfer takes among others of the other direction than alone; at least 1.

        >>> fast = Rate(per_s=3e9, source="measured")
        >>> half = Rate(per_s=2e9, source="measured")
        >>> round(Hardware(read=fast, write=fast, mixed=half, compute=fast, update=fast).mixed_stretch(), 3)
        1.5
        """
        if self.mixed is None:
            return 1.0
        alone_s = READ_SHARE / self.read.per_s + (1 - READ_SHARE) / self.write.per_s
        return max(1.0, 1 / self.mixed.per_s / alone_s)


RATE_UNITS = {
    "read": "B/s", "write": "B/s", "mixed": "B/s", "compute": "FLOP/s", "update": "B/s", "h2d": "B/s", "d2h": "B/s",
    "device_update": "B/s", "direct_read": "B/s",
}  # fmt: skip


def all_drives(drives: Sequence[Drive]) -> tuple[Rate, Rate, Rate | None]:
    """read, write and mixed of several drives together: blocks are spread so that all of them finish at once."""
    read, write = together([drive.read for drive in drives]), together([drive.write for drive in drives])
    mixed = [drive.mixed for drive in drives if drive.mixed is not None]
    return read, write, together(mixed) if len(mixed) == len(drives) else None


def all_direct(rates: Sequence[Rate | None], link: Rate | None) -> Rate | None:
    """`Hardware.direct_read` of several drives, whose link to the device is one; None if a drive cannot, and without a
    device.
    """
    known = [rate for rate in rates if rate is not None]
    if link is None or len(known) < len(rates):
        return None
    return min(together(known), link, key=lambda rate: rate.per_s)


def together(rates: Sequence[Rate]) -> Rate:
    """The sum of what several drives do."""
    if len(rates) == 1:
        return rates[0]
    source: Source = "assumed" if any(rate.source == "assumed" for rate in rates) else "derived"
    how = f"sum of {len(rates)} drives: {rates[0].how}"
    return Rate(per_s=sum(rate.per_s for rate in rates), source=source, how=how, date=rates[0].date)


def assumed_hardware() -> Hardware:
    """Round figures of a desktop, for planning where nothing could be measured."""
    how = "assumed: one PCIe 3 drive and two desktop cores"
    return Hardware(
        read=Rate(per_s=1.7e9, source="assumed", how=how),
        write=Rate(per_s=1.7e9, source="assumed", how=how),
        compute=Rate(per_s=1.5e11, source="assumed", how=how),
        update=Rate(per_s=2.0e10, source="assumed", how=how),
    )
