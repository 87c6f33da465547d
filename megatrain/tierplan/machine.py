"""The machine of a question, from what was typed and what was measured: rates, drives, memory of the device.

Scope: `--gpu`, `--gpu-flops`, `--device-memory`, `--nvme`, `--hardware`, `--cpu-flops`, and of `--precision` and
`--update-on` what they ask of a machine, to a `Hardware` with a source for every rate.
Not here: the tables of parts (`megatrain/catalog/parts.py`), the file of measured rates (`tiering/hardware_file.py`),
the options themselves (`command.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.catalog.parts import assumed_update, find_gpu, parse_drives
from megatrain.errors import UserError
from megatrain.programs import Precision
from megatrain.sizes import format_size
from megatrain.training_plan import UpdateOn
from tiering.hardware import Drive, Hardware, Rate, all_direct, all_drives, assumed_hardware
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
    gpu_flops: float | None = None,
    precision: Precision = "fp32",
    update_on: UpdateOn = "auto",
    gds: bool = False,
) -> Machine:
    """What is typed wins over what the file says. gds: drives read into the GPU as fast as into RAM, or as the link.

    Raises UserError, or `HardwareFileError` for a file of no use.
    """
    file = None if hardware_file is None else load(hardware_file)
    on_cpu = gpu is None and device_memory is None
    if on_cpu:
        _refuse_without_gpu(gpu_flops, precision, update_on, gds)
    drives = _drives(nvme, file)
    if gds:
        drives = tuple(map(_with_gds, drives))
    read, write, mixed = all_drives(drives)
    if on_cpu:
        base, title = _on_cpu(file, cpu_flops)
    else:
        if cpu_flops is not None:
            raise UserError("--cpu-flops: the GPU computes here. Fix: leave --cpu-flops out, or --gpu")
        base, title, card_memory = _on_gpu(gpu, file, gpu_flops, precision)
        if update_on == "device" and base.device_update is None:
            raise UserError(
                f"--update-on device: {hardware_file} does not say how fast the GPU updates. Fix: measure again "
                "(megatrain measure), or --gpu"
            )
        device_memory = card_memory if device_memory is None else device_memory
        title = f"{title} with {format_size(device_memory)}"
    direct = all_direct([drive.direct_read for drive in drives], base.h2d)
    return Machine(
        title=f"{title}; {_drives_title(drives)}",
        hardware=replace(base, read=read, write=write, mixed=mixed, direct_read=direct),
        drives=drives,
        device_memory=device_memory,
        host_memory=None if file is None else file.host.memory_bytes,
    )


def _with_gds(drive: Drive) -> Drive:
    """A drive that reads into the GPU as fast as into RAM."""
    return replace(drive, direct_read=replace(drive.read, source="assumed", how="--gds: as fast as into RAM", date=""))


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


def _refuse_without_gpu(gpu_flops: float | None, precision: Precision, update_on: UpdateOn, gds: bool) -> None:
    """Raises UserError for what only a GPU can."""
    if gpu_flops is not None:
        raise UserError("--gpu-flops: the CPU computes here. Fix: --cpu-flops, or --gpu")
    if precision == "tf32":
        raise UserError(
            "--precision tf32: a mode of the matrix units of a GPU, and the CPU computes here. "
            "Fix: --gpu a100-80gb, or --precision fp32 or bf16"
        )
    if gds:
        raise UserError(
            "--gds: the CPU computes here, there is no GPU to read into. Fix: --gpu rtx4090, or without --gds"
        )
    if update_on == "device":
        raise UserError("--update-on device: the CPU computes here. Fix: --gpu rtx4090, or --update-on auto")


def _computing(fp32: Rate, tf32: Rate | None, name: str, gpu_flops: float | None, precision: Precision) -> Rate:
    """The rate of a GPU that is called `name` in `precision`. Raises UserError where nobody knows it."""
    if gpu_flops is not None:
        return Rate(per_s=gpu_flops, source="assumed", how="given on the command line")
    if precision != "tf32":
        return fp32
    if tf32 is None:
        raise UserError(
            f"--precision tf32: no rate of {name} in TF32 is known. Fix: --gpu-flops 1e14 (what its matrix products "
            "reach in TF32, in FLOP/s), or --precision fp32"
        )
    return tf32


def _on_gpu(
    gpu: str | None, file: HardwareFile | None, gpu_flops: float | None, precision: Precision
) -> tuple[Hardware, str, int]:
    """Rates, name and memory of the card; updates run on the host's cores or on it."""
    if gpu is None:
        if file is None or file.device is None:
            raise UserError("--device-memory alone says nothing of the card's speed. Fix: --gpu rtx4090 beside it")
        found, name = file.hardware(on_device=True), file.device.name  # measured in FP32
        found = replace(found, compute=_computing(found.compute, None, name, gpu_flops, precision))
        return found, name, file.device.memory_bytes
    card = find_gpu(gpu)
    host = _host(file)
    compute = _computing(card.compute, card.tf32, card.name, gpu_flops, precision)
    # What I/O takes from computing was measured on the cores that it shares; a card has its own.
    base = replace(host, compute=compute, h2d=card.h2d, d2h=card.d2h, update_beside_compute=True, io_steals=0.0)
    base = replace(base, device_update=card.update)
    return base, card.name, card.memory_bytes


def _drives_title(drives: Sequence[Drive]) -> str:
    """`4 x (7.0, 6.0) GB/s`; different ones are joined."""
    counts: dict[str, int] = {}
    for drive in drives:
        counts[drive.name] = counts.get(drive.name, 0) + 1
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
