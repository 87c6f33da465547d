"""`megatrain measure`: everything that a plan needs to know about a machine, measured one after the other.

Scope: which measurements make up a hardware file, what is refused before them, the tables that show it.
Not here: the measurements (`tiering/measure_disk.py`, `tiering/measure_memory.py`), the file
(`tiering/hardware_file.py`), whole tables of a drive or a processor (`benchmarks/`).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatrain.errors import UserError
from megatrain.sizes import format_rate, format_size
from tiering import gds
from tiering.choose import choose_engine
from tiering.drive import DriveFacts, drive_facts
from tiering.gds_settings import GdsSettings
from tiering.gds_trial import best_settings
from tiering.hardware import Rate
from tiering.hardware_file import (
    ByteRate,
    DeviceEntry,
    DriveEntry,
    FlopRate,
    HardwareFile,
    HostEntry,
    KvikioEntry,
    dump,
    refuse_target,
)
from tiering.limits import memory_limit
from tiering.measure import io_steals
from tiering.measure_device import device_copy_rates, first_device
from tiering.measure_disk import DEPTHS, QUICK_BYTES, QUICK_DEPTHS, GiB, direct_read_rate, measure_drive
from tiering.measure_memory import (
    COPY_BYTES,
    compute_rate,
    host_copy_rate,
    product_shape,
    update_elements,
    update_rate,
)
from tiering.place import folder_beside
from tiering.probe_file import MiB

WIDTH, TOKENS = 1024, 1024
"""The matrix product that stands for computing: [TOKENS, WIDTH] x [WIDTH, 4 WIDTH]."""
DEVICE_WIDTH, DEVICE_TOKENS = 4096, 8192
MOST_MEMORY = 1 * GiB
WRITTEN_BYTES, QUICK_WRITTEN_BYTES = 8 * GiB, 2 * GiB


def measure_machine(paths: Sequence[Path], out: Path, *, quick: bool, console: Console) -> HardwareFile:
    """Measures the drive of each path, the host and the GPU, and writes `out`. Progress goes to `console`.

    Raises UserError or a TieringError before anything is measured where the result could not be used or written.
    """
    refuse_target(out)
    facts = [drive_facts(folder_beside(path)) for path in paths]
    _refuse_shared(paths, facts)
    memory = min(MOST_MEMORY, memory_limit()[0] // 8)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(paths) + 2)

        def step(what: str) -> None:
            progress.update(task, description=what)

        step("kvikio")
        settings = best_settings(paths[0], memory=memory) if gds.probe(paths[0]) is None else None
        found = first_device()
        drives = []
        for path, fact in zip(paths, facts, strict=True):
            step(f"drive of {path}")
            drives.append(_drive(path, fact, memory, quick, settings, found))
            progress.advance(task)
        host = _host(paths[0], drives[0], memory, settings, step)
        progress.advance(task)
        device = _device(found, host, memory, step) if found is not None else None
        progress.advance(task)
    kvikio = KvikioEntry.of(settings) if settings is not None else None
    file = HardwareFile(host=host, device=device, kvikio=kvikio, drives=tuple(drives))
    dump(file, out)
    return file


def _refuse_shared(paths: Sequence[Path], facts: Sequence[DriveFacts]) -> None:
    """Two paths on one drive would count its speed twice."""
    seen: dict[str, Path] = {}
    for path, fact in zip(paths, facts, strict=True):
        keys = fact.devices or (str(os.stat(folder_beside(path)).st_dev),)
        for key in keys:
            if key in seen:
                name = f"the drive {key}" if fact.devices else f"one file system ({fact.fs_type} at {fact.mount_point})"
                raise UserError(
                    f"--path {seen[key]} and --path {path} are on {name}: its rate would be counted twice. "
                    f"Fix: one --path for each drive"
                )
        seen |= dict.fromkeys(keys, path)


def _drive(
    path: Path,
    facts: DriveFacts,
    memory: int,
    quick: bool,
    settings: GdsSettings | None,
    device: torch.device | None,
) -> DriveEntry:
    with choose_engine("auto", path, device=device, settings=settings)[0] as engine:
        rates = measure_drive(
            path,
            engine,
            memory=min(memory, 128 * MiB),
            depths=QUICK_DEPTHS if quick else DEPTHS,
            most_written_bytes=QUICK_WRITTEN_BYTES if quick else WRITTEN_BYTES,
            link_bytes_per_s=facts.link_bytes_per_s,
        )
        direct = None
        if device is not None and not engine.device_refusal:
            found = direct_read_rate(path, engine, device, memory=min(memory, 128 * MiB), depth=rates.queue_depth)
            lasting = rates.read.sustained.per_s  # it was a short run, and no drive gives more for long
            direct = replace(found, per_s=min(found.per_s, lasting), how=f"{found.how}; at most the sustained rate")
            rates = replace(rates, written_bytes=rates.written_bytes + QUICK_BYTES)
    return DriveEntry.of(path, facts, rates, direct)


def _host(
    path: Path, drive: DriveEntry, memory: int, settings: GdsSettings | None, step: Callable[[str], None]
) -> HostEntry:
    limit, why = memory_limit()
    shape = product_shape(WIDTH, TOKENS, memory)
    step("matrix products")
    compute = FlopRate.of(compute_rate(*shape))
    step("AdamW")
    update = ByteRate.of(update_rate(update_elements(memory)))
    step("host copies")
    copies = ByteRate.of(host_copy_rate(min(COPY_BYTES, memory // 2)))
    step("computing beside a busy drive")
    with choose_engine("auto", path, settings=settings)[0] as engine:
        taken = io_steals(path, engine, width=WIDTH, tokens=TOKENS, memory=memory, depth=drive.queue_depth)
    return HostEntry(
        memory_bytes=limit,
        limit=why,
        cpu_cores=len(os.sched_getaffinity(0)),
        torch_version=torch.__version__,
        torch_threads=torch.get_num_threads(),
        compute=compute,
        update=update,
        copy_rate=copies,
        io_steals=taken,
    )


def _device(device: torch.device, host: HostEntry, memory: int, step: Callable[[str], None]) -> DeviceEntry:
    step("copies to and from the GPU")
    rates = device_copy_rates(device, min(COPY_BYTES, memory // 4))
    copies = {name: ByteRate.of(rate) for name, rate in rates.items()}
    step("AdamW on the GPU")
    update = ByteRate.of(update_rate(update_elements(memory), device=device))
    step("matrix products on the GPU")
    properties = torch.get_device_module(device).get_device_properties(device)
    shape = product_shape(DEVICE_WIDTH, DEVICE_TOKENS, properties.total_memory // 8)
    return DeviceEntry(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute=FlopRate.of(compute_rate(*shape, device=device)),
        update=update,
        **copies,
    )


def render(file: HardwareFile, out: Path, console: Console) -> None:
    """The file as tables: facts, then every rate with its source and date."""
    host, device = file.host, file.device
    console.print(
        f"Host: {host.cpu_cores} cores, {format_size(host.memory_bytes)} ({host.limit}), torch {host.torch_version} "
        f"with {host.torch_threads} threads; a busy drive takes {host.io_steals:.0%} of computing",
        highlight=False,
    )
    console.print(f"GPU: {device.name}, {format_size(device.memory_bytes)}" if device else "GPU: none", highlight=False)
    if file.gds_settings is not None:
        console.print(f"kvikio: {file.gds_settings.line()}", highlight=False)
    for drive in file.drives:
        console.print(_facts(drive), highlight=False, markup=False)
    for title, part in (("Host", host), ("GPU", device), *((f"Drive {drive.path}", drive) for drive in file.drives)):
        if part is not None:
            console.print(_table(title, part))
    console.print(f"Written: {out}", highlight=False, markup=False)


def shown(rate: Rate, unit: str) -> str:
    """A rate as a person reads it: `2.31 GB/s`, `88.2 GFLOP/s`."""
    return format_rate(rate.per_s) if unit == "B/s" else f"{rate.per_s / 1e9:.1f} GFLOP/s"


def _facts(drive: DriveEntry) -> str:
    known = {
        "file system": f"{drive.fs_type} at {drive.mount_point}",
        "device": ", ".join(drive.devices),
        "model": drive.model,
        "capacity": format_size(drive.capacity_bytes) if drive.capacity_bytes else "",
        "direct I/O in": f"{drive.align_bytes} bytes",
        "link": format_rate(drive.link.value) if drive.link else "",
        "endurance": format_size(drive.endurance_bytes) if drive.endurance_bytes else "",
        "best queue depth": str(drive.queue_depth),
        "written to measure": format_size(drive.written_bytes),
    }
    return f"Drive {drive.path}: " + ", ".join(f"{what} {value or 'not told'}" for what, value in known.items())


def _table(title: str, part: HostEntry | DeviceEntry | DriveEntry) -> Table:
    """The rates of one part; of a drive sustained and burst side by side."""
    rates = {name: value for name, value in part if isinstance(value, ByteRate | FlopRate) and name != "link"}
    bursts = {name.removesuffix("_burst"): rates.pop(name) for name in [*rates] if name.endswith("_burst")}
    table = Table(title=title, title_justify="left")
    table.add_column("rate", no_wrap=True)
    table.add_column("sustained" if bursts else "value", justify="right", no_wrap=True)
    if bursts:
        table.add_column("burst", justify="right", no_wrap=True)
    for column in ("source", "date"):
        table.add_column(column, no_wrap=True)
    table.add_column("how")
    for name, entry in rates.items():
        burst = [shown(bursts[name].rate(), entry.unit) if name in bursts else ""] if bursts else []
        rate = entry.rate()
        table.add_row(name.replace("_", " "), shown(rate, entry.unit), *burst, rate.source, rate.date, rate.how)
    return table
