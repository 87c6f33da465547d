"""How kvikio cuts and spreads a transfer: threads and bytes of a task, and which of the tried pairs is best.

Scope: `GdsSettings`, the pairs that are tried, the choice among them. Pure.
Not here: trying them on a drive (`gds_trial.py`), giving them to kvikio (`gds.py`), keeping them (`hardware_file.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.hardware import Rate

MiB = 1 << 20
TIE = 0.02
"""Rates that differ by less than this share are taken as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsSettings:
    """threads: of kvikio's own pool, which all requests share. task_bytes: a request is cut into pieces of so many.
    mixed: bytes/s of a step's mix of reads and writes with them; None: nobody tried.
    """

    threads: int
    task_bytes: int
    mixed: Rate | None = None

    def line(self) -> str:
        """For a person.

        >>> GdsSettings(threads=8, task_bytes=4 * MiB).line()
        '8 threads, tasks of 4 MiB (not measured)'
        """
        how = "not measured" if self.mixed is None else f"{self.mixed.per_s / 1e9:.2f} GB/s mixed, {self.mixed.source}"
        return f"{self.threads} threads, tasks of {self.task_bytes // MiB} MiB ({how})"


ASSUMED = GdsSettings(threads=8, task_bytes=4 * MiB)
"""kvikio's own default is one thread: one piece at a time, whatever is in flight."""
TRIALS = tuple(
    GdsSettings(threads=threads, task_bytes=task * MiB) for threads, task in ((8, 8), (4, 8), (16, 4), (8, 2), (32, 2))
)
"""Its requests are of 8 MiB: whole, in two pieces, in four. The most likely ones first: time may end the trial."""


def best(found: Sequence[GdsSettings]) -> GdsSettings:
    """The one with the best rate; of equal ones that with the fewest threads, then the largest tasks."""
    rates = [0.0 if settings.mixed is None else settings.mixed.per_s for settings in found]
    near = [settings for settings, rate in zip(found, rates, strict=True) if rate >= (1 - TIE) * max(rates)]
    return min(near, key=lambda settings: (settings.threads, -settings.task_bytes))
