"""kvikio on this machine: does it work, how fast, and which path do the bytes take?

Scope: `storage`: the engine's own probe and rates with host memory, transfers of the device's memory, kvikio's settings
and counters, those of the nvidia-fs driver.
Not here: the engine (`tiering/gds.py`), the other engine (`rates.py`).
"""

import importlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from tiering import gds
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
    monitor, before = _monitor(kvikio), _nvidia_fs()
    found |= _host_rates(rig)
    try:
        found |= _device_rates(rig, kvikio)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        found |= {"ok": False, "why": f"no transfer of the device's memory: {' '.join(str(error).split())[:300]}"}
    return {"ok": True} | found | {"paths": monitor(), "nvidia_fs": {"before": before, "after": _nvidia_fs()}}


def _host_rates(rig: Rig) -> dict[str, float]:
    """Bytes/s of the engine with host memory."""
    nbytes, request = rig.sized(NBYTES), rig.sized(8 * MiB)
    with (
        gds.KvikioEngine() as engine,
        probe_file(rig.folder, engine, nbytes=nbytes, request_bytes=request, memory=16 * request) as file,
    ):
        (rates,) = rates_by_depth(file, (8,), request_bytes=request, most_bytes=nbytes, most_s=2.0)
    return {
        "host_read_per_s": rates.read.per_s,
        "host_write_per_s": rates.write.per_s,
        "host_mixed_per_s": rates.mixed.per_s,
    }


def _device_rates(rig: Rig, kvikio: Any) -> dict[str, Any]:
    """Bytes/s of one buffer on the device to a file and back, in pieces of the size of a tile."""
    nbytes, piece = rig.sized(NBYTES, 1 / 8), rig.sized(8 * MiB, 1 / 64)
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=rig.device)
    back = torch.zeros_like(sent)
    rig.wait()
    path = rig.folder / "device.bin"
    takes = {}
    with kvikio.CuFile(path, "w+") as file:
        for way, start, buffer in (("write", file.pwrite, sent), ("read", file.pread, back)):
            begin_s = time.perf_counter()
            futures = [
                start(buffer[lo : lo + piece], size=min(piece, nbytes - lo), file_offset=lo)
                for lo in range(0, nbytes, piece)
            ]
            moved = sum(int(future.get()) for future in futures)  # waits for every piece
            takes[way] = time.perf_counter() - begin_s
            if moved != nbytes:
                return {"ok": False, "why": f"{way} of the device's memory moved {moved} of {nbytes} bytes"}
    same = torch.equal(sent, back)
    return {
        "ok": same,
        **({} if same else {"why": "the device's memory came back with other bytes"}),
        "device_write_per_s": nbytes / takes["write"],
        "device_read_per_s": nbytes / takes["read"],
        "device_bytes": nbytes,
    }


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


def _monitor(kvikio: Any) -> Callable[[], Any]:
    """Bytes by backend since now, where this version counts them."""
    with suppress(Exception):
        counts = kvikio.SummaryMonitor()
        return lambda: counts.get().by_backend
    return lambda: "this version of kvikio does not count"


def _nvidia_fs() -> list[str]:
    """Lines of the driver's statistics that count reads and writes; empty without it."""
    with suppress(OSError):
        return [line for line in NVIDIA_FS.read_text().splitlines() if line.startswith(("Reads", "Writes", "IO stats"))]
    return []
