"""Quick measurements of this machine: what the planner reckons with when nothing better is known.

Scope: the rates of one drive and of this CPU as one `Hardware`, in a second or two; those of further drives; what a
busy drive takes from computing.
Not here: how each of them is measured (`measure_disk.py`, `measure_memory.py`), sustained rates and a file of them
(`hardware_file.py`), how much memory there is (`limits.py`).
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tiering.drive import drive_facts
from tiering.engine import IOEngine
from tiering.hardware import Drive, Hardware, Rate, Source, all_drives
from tiering.measure_disk import QUICK_BYTES, quick_rates, request_size
from tiering.measure_memory import busy_seconds, compute_rate, product_shape, update_elements, update_rate
from tiering.place import folder_beside
from tiering.posix import PosixEngine
from tiering.probe_file import MiB, probe_file

STEAL_BYTES = 64 * MiB


def measure(
    path: Path, *, width: int, tokens: int, memory: int, disk_bytes: int = QUICK_BYTES, clips: bool = False
) -> Hardware:
    """Rates of the drive of `path` and of this CPU; of what they take from each other nothing (`io_steals`).

    width: hidden size, tokens: rows of a matrix product. memory: bytes that measuring may take at a time. clips:
    gradients are scaled before an update. Raises what the engine raises.
    """
    link_bytes_per_s = drive_facts(folder_beside(path)).link_bytes_per_s
    with PosixEngine() as engine:
        disk = quick_rates(path, engine, memory=memory, disk_bytes=disk_bytes, link_bytes_per_s=link_bytes_per_s)
        shape = product_shape(width, tokens, memory)
    return Hardware(
        read=disk.read,
        write=disk.write,
        mixed=disk.mixed,
        queue_depth=disk.queue_depth,
        compute=compute_rate(*shape),
        update=update_rate(update_elements(memory), scaled=clips),
    )


def by_drive(paths: Iterable[Path]) -> list[list[Path]]:
    """The paths by the disks below them, in the order given; by file system where the disks are not told."""
    groups: dict[object, list[Path]] = {}
    for path in paths:
        ground = folder_beside(path)
        groups.setdefault(drive_facts(ground).devices or os.stat(ground).st_dev, []).append(path)
    return list(groups.values())


def measure_drives(
    first: Hardware, paths: Sequence[Path], *, memory: int, disk_bytes: int = QUICK_BYTES
) -> tuple[Hardware, tuple[Drive, ...]]:
    """`first`, which was measured on the drive of paths[0], with all drives together; and the drive of each path.

    Drives are measured one after the other, so what they share on the way to memory is not seen. Paths on one drive
    have a part of its rates each.
    """
    groups = by_drive(paths)
    found = [Drive(name=str(paths[0]), read=first.read, write=first.write, mixed=first.mixed)]
    queue_depth = first.queue_depth
    with PosixEngine() as engine:
        for path, *_ in groups[1:]:
            link_bytes_per_s = drive_facts(folder_beside(path)).link_bytes_per_s
            disk = quick_rates(path, engine, memory=memory, disk_bytes=disk_bytes, link_bytes_per_s=link_bytes_per_s)
            found.append(Drive(name=str(path), read=disk.read, write=disk.write, mixed=disk.mixed))
            queue_depth += disk.queue_depth
    read, write, mixed = all_drives(found)
    shares = {
        path: replace(shared(drive, len(group)), name=str(path))
        for group, drive in zip(groups, found, strict=True)
        for path in group
    }
    together = replace(first, read=read, write=write, mixed=mixed, queue_depth=queue_depth)
    return together, tuple(shares[path] for path in paths)


def shared(drive: Drive, count: int) -> Drive:
    """What one of `count` folders on a drive gets of it."""

    def part(rate: Rate) -> Rate:
        source: Source = "assumed" if rate.source == "assumed" else "derived"
        return replace(rate, per_s=rate.per_s / count, source=source, how=f"1/{count} of a drive: {rate.how}")

    if count == 1:
        return drive
    mixed = part(drive.mixed) if drive.mixed else None
    direct = part(drive.direct_read) if drive.direct_read else None
    return replace(drive, read=part(drive.read), write=part(drive.write), mixed=mixed, direct_read=direct)


def io_steals(path: Path, engine: IOEngine, *, width: int, tokens: int, memory: int, depth: int) -> float:
    """The share of its speed that a matrix product on the CPU loses beside a `busy_drive`; from 0 to 1. Half of
    `memory` is for each of the two.
    """
    shape = product_shape(width, tokens, memory // 2)
    busy_seconds(*shape, for_s=0.0)  # the first product is slower
    alone_s = busy_seconds(*shape)
    with busy_drive(path, engine, memory=memory // 2, depth=depth):
        beside_s = busy_seconds(*shape)
    return stolen(alone_s, beside_s)


def stolen(alone_s: float, beside_s: float) -> float:
    """`Hardware.io_steals` from what the same work took with the drive idle and with the drive busy."""
    return min(1.0, max(0.0, 1 - alone_s / beside_s))


@contextmanager
def busy_drive(path: Path, engine: IOEngine, *, memory: int, depth: int) -> Iterator[None]:
    """Inside, the drive of `path` is kept busy with the mix of a step.

    memory: bytes for its buffers. Raises what the engine raised.
    """
    request_bytes = min(request_size(memory), STEAL_BYTES // 8)
    stop = threading.Event()
    failures: list[BaseException] = []
    with probe_file(path, engine, nbytes=STEAL_BYTES, request_bytes=request_bytes, memory=memory) as file:

        def keep_busy() -> None:
            try:
                while not stop.is_set():
                    file.timed("mixed", depth, request_bytes, 4 * request_bytes * depth)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=keep_busy, name="measure")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()  # waits for the last requests of the probe
    if failures:
        raise failures[0]
