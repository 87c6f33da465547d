"""What the system tells about the drive under a path: model, capacity, link, alignment.

Scope: `drive_facts`, from the tables of the kernel below `/proc` and `/sys`. Nothing here raises: what is not told is
empty or 0.
Not here: how fast the drive is (`measure_disk.py`), whether a path can hold the NVMe tier (`place.py`).
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiering.workload import PAGE

SECTOR = 512
"""Bytes: the unit of `size` in `/sys/block`, whatever the drive's own sectors are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveFacts:
    """devices: names of the whole disks below the file system (several below a striped or mirrored one). model: of
    them. align: bytes that direct I/O must be a multiple of. link_bytes_per_s: what the PCIe links carry in one
    direction (0: unknown, or a virtual disk). capacity, endurance: bytes (0: not told; drives tell their endurance to
    root alone).
    """

    mount_point: str = ""
    fs_type: str = "unknown"
    devices: tuple[str, ...] = ()
    model: str = ""
    align_bytes: int = PAGE
    link_bytes_per_s: float = 0.0
    capacity_bytes: int = 0
    rotational: bool | None = None
    endurance_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    point: Path
    fs_type: str
    number: str
    source: str


def drive_facts(path: Path, *, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> DriveFacts:
    """Facts about the drive of `path`, which need not exist yet."""
    mount = _mount_of(path, proc_root / "self" / "mountinfo")
    if mount is None:
        return DriveFacts()
    device = _device_of(mount, sys_root)
    disks = sorted(set(_disks(device))) if device is not None else []
    models = [_read(disk / "device" / "model") or _read(disk / "device" / "device" / "model") for disk in disks]
    links = [_link_bytes_per_s(disk, sys_root) for disk in disks]
    spinning = [_read(disk / "queue" / "rotational") for disk in disks]
    return DriveFacts(
        mount_point=str(mount.point),
        fs_type=mount.fs_type,
        devices=tuple(disk.name for disk in disks),
        model=_counted([model for model in models if model]),
        align_bytes=max([_number(disk / "queue" / "logical_block_size") for disk in disks], default=0) or PAGE,
        link_bytes_per_s=float(sum(links)) if all(links) else 0.0,
        capacity_bytes=SECTOR * sum(_number(disk / "size") for disk in disks),
        rotational="1" in spinning if any(spinning) else None,
    )


def _mount_of(path: Path, mountinfo: Path) -> _Mount | None:
    """The mount with the longest matching mount point; of several on one point the last, which hides the others."""
    real = Path(os.path.realpath(path))
    found: _Mount | None = None
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = Path(_unescape(fields[4]))
        if real.is_relative_to(point) and (found is None or len(point.parts) >= len(found.point.parts)):
            found = _Mount(point=point, fs_type=rest[0], number=fields[2], source=_unescape(rest[1]))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _device_of(mount: _Mount, sys_root: Path) -> Path | None:
    """The folder of the mounted block device. A file system with a number of its own (btrfs) names it as its source."""
    folders = [sys_root / "dev" / "block" / mount.number]
    if mount.source.startswith("/dev/"):
        name = os.path.basename(os.path.realpath(mount.source))
        folders += [sys_root / "class" / "block" / name, sys_root / "block" / name]
    for folder in folders:
        if os.path.isdir(folder):
            return Path(os.path.realpath(folder))
    return None


def _disks(device: Path) -> Iterator[Path]:
    """The whole disks that a partition, a volume or an array stands on."""
    if os.path.exists(device / "partition"):
        device = device.parent
    try:
        below = [Path(os.path.realpath(slave)) for slave in (device / "slaves").iterdir()]
    except OSError:
        below = []
    if not below:
        yield device
    for slave in below:
        yield from _disks(slave)


def _link_bytes_per_s(disk: Path, sys_root: Path) -> float:
    """The narrowest PCIe link between the disk and the processor. A virtual disk shows a made-up one: 0."""
    if any(part.startswith("virtio") for part in disk.parts):
        return 0.0
    rates = []
    top = os.path.realpath(sys_root)
    for folder in (folder for place in (disk, *_controllers(disk)) for folder in place.parents):
        if not folder.is_relative_to(top):
            continue
        speed = re.match(r"([\d.]+) GT/s", _read(folder / "current_link_speed"))
        width = _number(folder / "current_link_width")
        if speed and width:
            rates.append(pcie_bytes_per_s(float(speed[1]), width))
    return min(rates, default=0.0)


def _controllers(disk: Path) -> list[Path]:
    """Where the controllers of an NVMe drive are that stands under its subsystem, as those with several ports do."""
    return [Path(os.path.realpath(link)) for link in (disk / "device").glob("nvme[0-9]*") if link.is_symlink()]


def pcie_bytes_per_s(transfers_g_per_s: float, width: int) -> float:
    """Bytes/s of a PCIe link in one direction, less its line code: 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s.

    Source: PCI Express Base Specification. Packet headers take some more, so no transfer reaches this.

    >>> round(pcie_bytes_per_s(8.0, 4) / 1e9, 2), round(pcie_bytes_per_s(5.0, 4) / 1e9, 2)
    (3.94, 2.0)
    """
    code = 128 / 130 if transfers_g_per_s >= 8 else 8 / 10
    return transfers_g_per_s * 1e9 * code * width / 8


def _counted(models: list[str]) -> str:
    """`2 x MODEL` for a pair of the same kind."""
    counts = {model: models.count(model) for model in dict.fromkeys(models)}
    return ", ".join(model if count == 1 else f"{count} x {model}" for model, count in counts.items())


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int:
    text = _read(file)
    return int(text) if text.isdigit() else 0
