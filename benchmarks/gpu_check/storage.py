"""kvikio on this machine: does it work, how fast, and which path do the bytes take?

Scope: `storage`: the engine's own probe, its settings as tried on this drive, rates with host memory and with memory of
the device (registered and not), the path that the bytes took, counters of the nvidia-fs driver.
Not here: the engine (`tiering/gds.py`), the other engine (`rates.py`).
"""

import importlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from tiering import gds
from tiering.engine import Extent, IOEngine
from tiering.errors import TieringError
from tiering.gds_trial import best_settings
from tiering.measure_disk import rates_by_depth
from tiering.probe_file import probe_file

MiB = 1 << 20
NBYTES = 256 * MiB
NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
SETTINGS = ("compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size", "auto_direct_io_read")
DRIVER = ("is_gds_available", "major_version", "minor_version", "allow_compat_mode", "max_device_cache_size")


def storage(rig: Rig) -> dict[str, Any]:
    """`ok` None where kvikio is not there; False where it is, and moves nothing or other bytes."""
    try:
        kvikio = importlib.import_module("kvikio")
    except ImportError as error:
        return {"ok": None, "skipped": f"needs kvikio ({error}): pip install 'megatrain[gds]'"}
    found: dict[str, Any] = {"version": getattr(kvikio, "__version__", ""), **_settings()}
    refusal = gds.probe(rig.folder)
    if refusal is not None:
        return {"ok": False, "why": f"no transfer of host memory: {refusal}", **found}
    before = _nvidia_fs()
    settings = best_settings(rig.folder, memory=rig.sized(128 * MiB))
    found |= {"chosen": settings.line(), "driver_line": gds.driver_line()}
    with gds.KvikioEngine(settings=settings) as engine:
        found |= _host_rates(rig, engine)
        try:
            found |= _device_rates(rig, engine)
        except (TieringError, OSError, RuntimeError, TypeError, ValueError) as error:
            found |= {"ok": False, "why": f"no transfer of the device's memory: {' '.join(str(error).split())[:300]}"}
        moved = engine.traffic()
    told = {"paths": moved.by_path(), "moved": moved.line(engine.name)}
    return {"ok": True} | found | told | {"nvidia_fs": {"before": before, "after": _nvidia_fs()}}


def _host_rates(rig: Rig, engine: IOEngine) -> dict[str, float]:
    """Bytes/s of the engine with host memory."""
    nbytes, request = rig.sized(NBYTES), rig.sized(8 * MiB)
    with probe_file(rig.folder, engine, nbytes=nbytes, request_bytes=request, memory=16 * request) as file:
        (rates,) = rates_by_depth(file, (8,), request_bytes=request, most_bytes=nbytes, most_s=2.0)
    return {
        "host_read_per_s": rates.read.per_s,
        "host_write_per_s": rates.write.per_s,
        "host_mixed_per_s": rates.mixed.per_s,
    }


def _device_rates(rig: Rig, engine: IOEngine) -> dict[str, Any]:
    """Bytes/s of one buffer on the device to a file and back, in pieces of the size of a tile; then registered."""
    nbytes = rig.sized(NBYTES, 1 / 8)
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=rig.device)
    back = torch.zeros_like(sent)
    rig.wait()
    path = rig.folder / "device.bin"
    with open(path, "wb") as file:
        file.truncate(nbytes)
    found: dict[str, Any] = {"device_bytes": nbytes}
    for name in ("device", "registered"):
        if name == "registered":
            found["register"] = [engine.register(view) for view in (sent, back)]
        rates, why = _there_and_back(rig, engine, path, sent, back)
        found |= {f"{name}_{way}_per_s": rate for way, rate in rates.items()}
        if why:
            return found | {"ok": False, "why": why}
    for view in (sent, back):
        engine.deregister(view)
    return found


def _there_and_back(
    rig: Rig, engine: IOEngine, path: Path, sent: torch.Tensor, back: torch.Tensor
) -> tuple[dict[str, float], str]:
    """Bytes/s by direction, and what was wrong."""
    nbytes, piece = sent.nbytes, rig.sized(8 * MiB, 1 / 64)
    back.zero_()
    rig.wait()
    rates = {}
    for way, submit, buffer in (("write", engine.submit_write, sent), ("read", engine.submit_read, back)):
        begin_s = time.perf_counter()
        futures = [
            submit(Extent(path=path, offset=lo, nbytes=len(part), block="check"), part)
            for lo, part in ((lo, buffer[lo : lo + piece]) for lo in range(0, nbytes, piece))
        ]
        for future in futures:
            future.result()  # waits for a piece, all of which is moved then
        rates[way] = nbytes / (time.perf_counter() - begin_s)
    return rates, "" if torch.equal(sent, back) else "the device's memory came back with other bytes"


def _settings() -> dict[str, Any]:
    """By whatever names this version has."""
    return {
        "settings": _asked("kvikio.defaults", SETTINGS),
        "driver": _asked("kvikio.cufile_driver", DRIVER),
    }


def _asked(module: str, names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(Exception):  # another version's names, or no driver
            there = importlib.import_module(module)
            found[name] = str(there.get(name) if hasattr(there, "get") else getattr(there, name)())
    return found


def _nvidia_fs() -> list[str]:
    """Lines of the driver's statistics that count reads and writes; empty without it."""
    with suppress(OSError):
        return [line for line in NVIDIA_FS.read_text().splitlines() if line.startswith(("Reads", "Writes", "IO stats"))]
    return []
