"""`hardware.json`: what a machine was found to be able to do, kept between runs and read on other machines.

Scope: the file's content (every rate with value, unit, source, how and date), reading and writing it, the `Hardware`
that the planner takes from it.
Not here: measuring (`measure_disk.py`, `measure_memory.py`), what the rates mean (`hardware.py`).
"""

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tiering.drive import DriveFacts
from tiering.errors import BAD_INPUT, TieringError
from tiering.gds_settings import GdsSettings
from tiering.hardware import Drive, Hardware, Rate, Source, all_direct, all_drives

if TYPE_CHECKING:  # a plan that reads this file needs no torch
    from tiering.measure_disk import DriveRates

VERSION = 1


class HardwareFileError(TieringError):
    """A hardware file cannot be read, written or used as asked; the message names the file and the key."""

    exit_code = BAD_INPUT


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _RateEntry(_Strict):
    value: float = Field(gt=0, allow_inf_nan=False)
    source: Source
    how: str = Field(min_length=1)
    date: str = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")

    @model_validator(mode="after")
    def _dated(self) -> Self:
        if self.source == "measured" and not self.date:
            raise ValueError("a measured rate needs the date on which it was measured")
        return self

    @classmethod
    def of(cls, rate: Rate) -> Self:
        """The entry of a rate."""
        return cls(value=rate.per_s, source=rate.source, how=rate.how, date=rate.date)

    def rate(self) -> Rate:
        """The rate of an entry."""
        return Rate(per_s=self.value, source=self.source, how=self.how, date=self.date)


class ByteRate(_RateEntry):
    """Bytes/s."""

    unit: Literal["B/s"] = "B/s"


class FlopRate(_RateEntry):
    """FLOP/s in FP32."""

    unit: Literal["FLOP/s"] = "FLOP/s"


class HostEntry(_Strict):
    """memory: RAM that a process may take; limit: what sets it. torch_threads: with which the rates were measured."""

    memory_bytes: int = Field(gt=0)
    limit: str
    cpu_cores: int = Field(gt=0)
    torch_version: str
    torch_threads: int = Field(gt=0)
    compute: FlopRate
    update: ByteRate
    copy_rate: ByteRate | None = None
    io_steals: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)


class KvikioEntry(_Strict):
    """What kvikio was found to move most with on the first drive: see `GdsSettings`."""

    threads: int = Field(gt=0)
    task_bytes: int = Field(gt=0)
    mixed: ByteRate

    @classmethod
    def of(cls, settings: GdsSettings) -> Self | None:
        """None for what nobody tried."""
        if settings.mixed is None:
            return None
        return cls(threads=settings.threads, task_bytes=settings.task_bytes, mixed=ByteRate.of(settings.mixed))


class DeviceEntry(_Strict):
    """A GPU. The copies: to it, from it and both at once, of pinned and pageable host memory. update: AdamW on it;
    files that were made before there was such a key lack it, and the CPU updates.
    """

    name: str
    memory_bytes: int = Field(gt=0)
    compute: FlopRate
    h2d_pinned: ByteRate
    d2h_pinned: ByteRate
    update: ByteRate | None = None
    both_pinned: ByteRate | None = None
    h2d_pageable: ByteRate | None = None
    d2h_pageable: ByteRate | None = None
    both_pageable: ByteRate | None = None


class DriveEntry(_Strict):
    """A drive by a path on it: what the system tells (see `DriveFacts`), sustained rates and burst ones.

    direct_read: of a drive that can read into the GPU; files that were made before there was such a key lack it.
    """

    path: str
    mount_point: str = ""
    fs_type: str = "unknown"
    devices: tuple[str, ...] = ()
    model: str = ""
    align_bytes: int = Field(default=4096, gt=0)
    link: ByteRate | None = None
    capacity_bytes: int = Field(default=0, ge=0)
    rotational: bool | None = None
    endurance_bytes: int = Field(default=0, ge=0)
    queue_depth: int = Field(gt=0)
    request_bytes: int = Field(gt=0)
    written_bytes: int = Field(default=0, ge=0)
    read: ByteRate
    write: ByteRate
    mixed: ByteRate | None = None
    read_burst: ByteRate | None = None
    write_burst: ByteRate | None = None
    mixed_burst: ByteRate | None = None
    direct_read: ByteRate | None = None

    @classmethod
    def of(cls, path: Path, facts: DriveFacts, rates: "DriveRates", direct_read: Rate | None = None) -> Self:
        """The entry of a drive that was measured."""
        link = None
        if facts.link_bytes_per_s:
            link = ByteRate(value=facts.link_bytes_per_s, source="derived", how="PCIe link speed x width, as told")
        return cls(
            path=str(path),
            mount_point=facts.mount_point,
            fs_type=facts.fs_type,
            devices=facts.devices,
            model=facts.model,
            align_bytes=facts.align_bytes,
            link=link,
            capacity_bytes=facts.capacity_bytes,
            rotational=facts.rotational,
            endurance_bytes=facts.endurance_bytes,
            queue_depth=rates.queue_depth,
            request_bytes=rates.request_bytes,
            written_bytes=rates.written_bytes,
            read=ByteRate.of(rates.read.sustained),
            write=ByteRate.of(rates.write.sustained),
            mixed=ByteRate.of(rates.mixed.sustained),
            read_burst=ByteRate.of(rates.read.burst),
            write_burst=ByteRate.of(rates.write.burst),
            mixed_burst=ByteRate.of(rates.mixed.burst),
            direct_read=ByteRate.of(direct_read) if direct_read else None,
        )

    def drive(self) -> Drive:
        """What the planner knows of a drive."""
        return Drive(
            name=self.model or ", ".join(self.devices) or self.path,
            read=self.read.rate(),
            write=self.write.rate(),
            mixed=self.mixed.rate() if self.mixed else None,
            direct_read=self.direct_read.rate() if self.direct_read else None,
            capacity_bytes=self.capacity_bytes,
            endurance_bytes=self.endurance_bytes,
        )


class HardwareFile(_Strict):
    """A machine: its memory and processors, its GPU if it has one, and the drives that were asked for."""

    version: Literal[1] = 1
    host: HostEntry
    device: DeviceEntry | None = None
    kvikio: KvikioEntry | None = None
    drives: tuple[DriveEntry, ...] = Field(min_length=1)

    @property
    def gds_settings(self) -> GdsSettings | None:
        """Of kvikio, for an engine; None where it was not tried."""
        kept = self.kvikio
        if kept is None:
            return None
        return GdsSettings(threads=kept.threads, task_bytes=kept.task_bytes, mixed=kept.mixed.rate())

    def hardware(self, *, on_device: bool = False) -> Hardware:
        """The planner's view: all drives together. on_device: the GPU computes, and one of the two updates.

        Raises `HardwareFileError` if the GPU is asked for on a machine that has none.
        """
        if on_device and self.device is None:
            raise HardwareFileError("the hardware file knows no GPU. Fix: compute on the CPU, or measure where one is.")
        device = self.device if on_device else None
        drives = [drive.drive() for drive in self.drives]
        read, write, mixed = all_drives(drives)
        return Hardware(
            read=read,
            write=write,
            mixed=mixed,
            queue_depth=sum(drive.queue_depth for drive in self.drives),
            compute=(device or self.host).compute.rate(),
            update=self.host.update.rate(),
            update_beside_compute=on_device,
            h2d=device.h2d_pinned.rate() if device else None,
            d2h=device.d2h_pinned.rate() if device else None,
            device_update=device.update.rate() if device and device.update else None,
            direct_read=all_direct([drive.direct_read for drive in drives], device.h2d_pinned.rate())
            if device
            else None,
            io_steals=self.host.io_steals,
        )


def dump(file: HardwareFile, path: Path) -> None:
    """Writes the file in one piece: a reader sees the old one or the new one. Raises `HardwareFileError`."""
    refuse_target(path)
    text = json.dumps(file.model_dump(mode="json"), indent=2) + "\n"
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        try:
            with open(beside, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise HardwareFileError(
            f"{path}: {len(text)} bytes cannot be written: {error.strerror}. Fix: make room, or another place."
        ) from error


def refuse_target(path: Path) -> None:
    """Raises `HardwareFileError` where no hardware file can be written, before anything is measured for it."""
    folder = path.parent
    if not folder.is_dir():
        raise HardwareFileError(
            f"{path}: the folder {folder} does not exist. Fix: make it (mkdir -p), or another path."
        )
    if path.is_dir():
        raise HardwareFileError(f"{path} is a folder. Fix: name a file in it, such as {path / 'hardware.json'}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HardwareFileError(f"{path}: the folder {folder} is not writable for you. Fix: another path.")


def load(path: Path) -> HardwareFile:
    """The file at `path`. Raises `HardwareFileError`, with one line for each key that cannot be used."""
    again = "Fix: measure again (megatrain measure)"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HardwareFileError(f"{path}: no such hardware file. Fix: megatrain measure --path DIR -o {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareFileError(f"{path}: cannot be read as text: {error}. {again}.") from error
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HardwareFileError(f"{path}: not JSON: {error}. {again}.") from None
    if not isinstance(tree, dict):
        raise HardwareFileError(f"{path}: not a hardware file: one JSON object is wanted. {again}.")
    if tree.get("version") != VERSION:
        raise HardwareFileError(
            f"{path}: version {tree.get('version', 'missing')} of the file; this program reads {VERSION}. {again}."
        )
    try:
        return HardwareFile.model_validate_json(text)
    except ValidationError as error:
        lines = "".join(f"\n  {_fault(fault)}" for fault in error.errors(include_url=False))
        raise HardwareFileError(f"{path}: not a usable hardware file:{lines}\n{again}, or correct the file.") from None


def _fault(fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _fields(HardwareFile, fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
        return f"`{key}`: no such key; {hint}"
    if fault["type"] == "missing":
        return f"`{key}`: missing"
    return f"`{key}`: {fault['msg']}, got {json.dumps(fault['input'], default=str)[:60]}"


def _fields(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """The keys that are known at a place of the file."""
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(kind for kind in _models(field.annotation))
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation such as `Entry | None` or `tuple[Entry, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
