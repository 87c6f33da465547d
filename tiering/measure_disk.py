"""Measures a drive through an I/O engine: reads, writes and both at once, in requests as large as the trainer's.

Scope: rates by queue depth, burst and sustained rates, a quick form for the start of a run.
Not here: the file that is read and written (`probe_file.py`), facts that the system tells (`drive.py`), memory and
processors (`measure_memory.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from tiering.engine import IOEngine
from tiering.hardware import READ_SHARE, Rate
from tiering.probe_file import MIXES, MiB, ProbeFile, What, probe_file
from tiering.transfers import REQUEST_BYTES
from tiering.workload import PAGE

GiB = 1 << 30
DEPTHS = (1, 2, 4, 8)
QUICK_DEPTHS = (2, 8)
QUICK_BYTES = 192 * MiB
QUICK_PASS_S = 0.15
TIE = 0.02
"""Mixed rates that differ by less than this share are taken as equal."""
STEADY = 0.05
"""Windows within this share of their median are taken as the drive's lasting rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes/s at one queue depth and request size; of the mix both directions together."""

    queue_depth: int
    request_bytes: int
    read: Rate
    write: Rate
    mixed: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A long run, in windows. burst: the best one. sustained: the median of the last third. steady:
    the last third agreed with one another before the bound of bytes was reached.
    """

    burst: Rate
    sustained: Rate
    steady: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """All that was measured of a drive. queue_depth: the best of those in `by_depth`; the series are at that one."""

    queue_depth: int
    request_bytes: int
    by_depth: tuple[DiskRates, ...]
    read: Series
    write: Series
    mixed: Series
    written_bytes: int


def request_size(memory: int, wanted: int = REQUEST_BYTES) -> int:
    """Bytes of a request of which eight have a buffer each within `memory`; at most the trainer's.

    >>> request_size(1 << 30) == REQUEST_BYTES, request_size(16 << 20) >> 20, request_size(1000)
    (True, 2, 4096)
    """
    return min(wanted, max(PAGE, 1 << max(0, (memory // 8).bit_length() - 1)))


def _within(file_bytes: int, request_bytes: int) -> int:
    """A request of which a file of that size holds eight."""
    return min(request_bytes, max(PAGE, file_bytes // 8 // PAGE * PAGE))


def rates_by_depth(
    file: ProbeFile, depths: Sequence[int], *, request_bytes: int, most_bytes: int, most_s: float = float("inf")
) -> list[DiskRates]:
    """read, write and mixed at each depth, of about `most_bytes` (and at most `most_s` seconds) each."""
    found = []
    for depth in depths:
        rates = {
            what: file.rate(what, depth=depth, request_bytes=request_bytes, most_bytes=most_bytes, most_s=most_s)
            for what in MIXES
        }
        found.append(
            DiskRates(
                queue_depth=depth,
                request_bytes=request_bytes,
                read=rates["read"],
                write=rates["write"],
                mixed=rates["mixed"],
            )
        )
    return found


def best_depth(found: Sequence[DiskRates]) -> DiskRates:
    """The one with the best mixed rate, which is what a step is made of; of equal ones the deepest."""
    top = max(rates.mixed.per_s for rates in found)
    return max((r for r in found if r.mixed.per_s >= (1 - TIE) * top), key=lambda r: r.queue_depth)


def series(file: ProbeFile, what: What, *, depth: int, request_bytes: int, most_bytes: int) -> Series:
    """One run, seen in windows of requests: until `most_bytes` have been moved, or half of them and the last third of
    the windows is steady.

    A drive's fast cache, or a virtual drive's credit, can be larger than that: the sustained rate says over how many
    bytes it was seen.
    """
    count = max(1, most_bytes // request_bytes)
    mix = len(MIXES[what])
    window = min(count, -(-max(2 * depth, count // 12) // mix) * mix)

    def settled(ends: list[float]) -> bool:
        rates = _windows(ends, window, request_bytes)
        return len(rates) >= max(6, count // window // 2) and _steady(_last_third(rates))

    def go_on(ends: list[float]) -> bool:
        return len(ends) % window != 0 or not settled(ends)

    ends = file.completions(what, depth, request_bytes, most_bytes, go_on)
    rates, moved = _windows(ends, window, request_bytes), len(ends) * request_bytes
    return Series(
        burst=file.named(what, max(rates), moved, depth, request_bytes),
        sustained=file.named(what, median(_last_third(rates)), moved, depth, request_bytes),
        steady=settled(ends),
    )


def _windows(ends: Sequence[float], window: int, request_bytes: int) -> list[float]:
    """Bytes/s of each whole window of requests, from the times at which they ended."""
    marks = [0.0, *ends[window - 1 :: window]]
    return [window * request_bytes / max(after - before, 1e-9) for before, after in pairwise(marks)]


def _last_third(windows: Sequence[float]) -> Sequence[float]:
    return windows[-max(1, len(windows) // 3) :]


def _steady(windows: Sequence[float]) -> bool:
    middle = median(windows)
    return all(abs(rate - middle) <= STEADY * middle for rate in windows)


def quick_rates(
    path: Path, engine: IOEngine, *, memory: int, disk_bytes: int = QUICK_BYTES, link_bytes_per_s: float = 0.0
) -> DiskRates:
    """Rates at the better of two depths, in about a second: what a run plans with when nothing better is known."""
    request_bytes = _within(disk_bytes, request_size(memory))
    with probe_file(
        path,
        engine,
        nbytes=min(disk_bytes, 512 * MiB),
        request_bytes=request_bytes,
        memory=memory,
        link_bytes_per_s=link_bytes_per_s,
    ) as file:
        return best_depth(
            rates_by_depth(file, QUICK_DEPTHS, request_bytes=request_bytes, most_bytes=file.nbytes, most_s=QUICK_PASS_S)
        )


def direct_read_rate(path: Path, engine: IOEngine, device: torch.device, *, memory: int, depth: int) -> Rate:
    """`Hardware.direct_read` of the drive of `path`, in a fraction of a second, by an engine that moves memory of
    `device`. memory: bytes of either that measuring may take. Raises what the engine and the device's allocator raise.
    """
    request_bytes = _within(QUICK_BYTES, request_size(memory))
    with probe_file(path, engine, nbytes=QUICK_BYTES, request_bytes=request_bytes, memory=memory) as file:
        return file.rate_into(device, depth=min(depth, memory // request_bytes), request_bytes=request_bytes)


def measure_drive(
    path: Path,
    engine: IOEngine,
    *,
    memory: int,
    request_bytes: int = REQUEST_BYTES,
    depths: Sequence[int] = DEPTHS,
    most_written_bytes: int = 8 * GiB,
    link_bytes_per_s: float = 0.0,
    buffered: bool = False,
) -> DriveRates:
    """Rates by depth, then burst and sustained ones at the best depth.

    At most about `most_written_bytes` are written: half of them for the file and the depths, the rest in series.
    """
    passes = 1 + len(depths) * (2 - READ_SHARE)  # the fill, then a write and the writes of a mix at each depth
    file_bytes = min(512 * MiB, int(most_written_bytes / 2 / passes))
    request_bytes = _within(file_bytes, request_size(memory, request_bytes))
    with probe_file(
        path,
        engine,
        nbytes=file_bytes,
        request_bytes=request_bytes,
        memory=memory,
        link_bytes_per_s=link_bytes_per_s,
        buffered=buffered,
    ) as file:
        found = rates_by_depth(file, depths, request_bytes=request_bytes, most_bytes=file.nbytes)
        depth = best_depth(found).queue_depth
        rest = max(0, most_written_bytes - file.written_bytes) // 2
        amounts: dict[What, int] = {"read": rest, "write": rest, "mixed": int(rest / (1 - READ_SHARE))}
        lasting = {
            what: series(file, what, depth=depth, request_bytes=request_bytes, most_bytes=nbytes)
            for what, nbytes in amounts.items()
        }
        return DriveRates(
            queue_depth=depth,
            request_bytes=request_bytes,
            by_depth=tuple(found),
            read=lasting["read"],
            write=lasting["write"],
            mixed=lasting["mixed"],
            written_bytes=file.written_bytes,
        )
