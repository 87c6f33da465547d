"""The machine of a question, from what was typed and what was measured: rates, drives, memory of the device.

Scope: `--gpu`, `--device-memory`, `--nvme`, `--hardware`, `--cpu-flops` to a `Hardware` with a source for every rate.
Not here: the tables of parts (`megatrain/catalog/parts.py`), the file of measured rates (`tiering/hardware_file.py`),
the options themselves (`command.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.catalog.parts import assumed_update, find_gpu, parse_drives
from megatrain.errors import UserError
from megatrain.sizes import format_size
from tiering.hardware import Drive, Hardware, Rate, all_drives, assumed_hardware
from tiering.hardware_file import HardwareFile, load

EXAMPLE = "--nvme '4x(7.0,6.0)' (four drives of 7.0 GB/s read and 6.0 GB/s write) or --nvme '2x samsung-990-pro-4tb'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """hardware: rates, of all drives together. device_memory: bytes, None where the CPU computes. host_memory: what the
    hardware file says (None without one).
    """

    title: str
    hardware: Hardware
    drives: tuple[Drive, ...]
    device_memory: int | None = None
    host_memory: int | None = None


def machine(
    *,
    gpu: str | None,
    device_memory: int | None,
    nvme: Sequence[str],
    hardware_file: Path | None,
    cpu_flops: float | None = None,
) -> Machine:
    """What is typed wins over what the file says. Raises UserError, or `HardwareFileError` for a file of no use."""
    file = None if hardware_file is None else load(hardware_file)
    drives = _drives(nvme, file)
    read, write, mixed = all_drives(drives)
    if gpu is None and device_memory is None:
        base, title = _on_cpu(file, cpu_flops)
    else:
        if cpu_flops is not None:
            raise UserError("--cpu-flops: the GPU computes here. Fix: leave --cpu-flops out, or --gpu")
        base, title, card_memory = _on_gpu(gpu, file)
        device_memory = card_memory if device_memory is None else device_memory
        title = f"{title} with {format_size(device_memory)}"
    return Machine(
        title=f"{title}; {_drives_title(drives)}",
        hardware=replace(base, read=read, write=write, mixed=mixed),
        drives=drives,
        device_memory=device_memory,
        host_memory=None if file is None else file.host.memory_bytes,
    )


def _drives(nvme: Sequence[str], file: HardwareFile | None) -> tuple[Drive, ...]:
    if nvme:
        return tuple(drive for text in nvme for drive in parse_drives(text))
    if file is None:
        raise UserError(f"--nvme: no drive is known. Fix: {EXAMPLE}, or --hardware FILE of `megatrain measure`")
    return tuple(entry.drive() for entry in file.drives)


def _on_cpu(file: HardwareFile | None, cpu_flops: float | None) -> tuple[Hardware, str]:
    base = _host(file)
    if cpu_flops is not None:
        base = replace(base, compute=Rate(per_s=cpu_flops, source="assumed", how="given on the command line"))
    return base, f"CPU of {base.compute.per_s / 1e12:.3g} TFLOP/s"


def _host(file: HardwareFile | None) -> Hardware:
    """Rates without a GPU, as measured or of a desktop."""
    if file is not None:
        return file.hardware()
    desktop = assumed_hardware()
    how = "two desktop cores; --cpu-flops or --hardware knows better"
    return replace(desktop, compute=replace(desktop.compute, how=how), update=assumed_update())


def _on_gpu(gpu: str | None, file: HardwareFile | None) -> tuple[Hardware, str, int]:
    """Rates, name and memory of the card; updates run on the host's cores or on it."""
    if gpu is None:
        if file is None or file.device is None:
            raise UserError("--device-memory alone says nothing of the card's speed. Fix: --gpu rtx4090 beside it")
        return file.hardware(on_device=True), file.device.name, file.device.memory_bytes
    card = find_gpu(gpu)
    host = _host(file)
    # What I/O takes from computing was measured on the cores that it shares; a card has its own.
    base = replace(host, compute=card.compute, h2d=card.h2d, d2h=card.d2h, update_beside_compute=True, io_steals=0.0)
    base = replace(base, device_update=card.update)
    return base, card.name, card.memory_bytes


def _drives_title(drives: Sequence[Drive]) -> str:
    """`4 x (7.0, 6.0) GB/s`; different ones are joined."""
    counts: dict[str, int] = {}
    for drive in drives:
        counts[drive.name] = counts.get(drive.name, 0) + 1
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
