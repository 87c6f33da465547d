"""What a result was seen on: GPU, driver, link, torch, packages, what GPUDirect Storage needs, commit.

Scope: facts, read and not judged; that torch sees a GPU and computes on it.
Not here: whether kvikio works (`storage.py`), rates (`rates.py`).
"""

import ctypes
import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "numpy", "transformers", "safetensors", "psutil", "tensorstore", "pydantic", "zarr", "xxhash", "tokenizers",
    "pyyaml", "rich", "typer", "datasets", "pytest", "pytest-timeout", "hypothesis", "kvikio-cu13", "kvikio-cu12",
)  # fmt: skip
_ASKED = ("driver_version", "pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.current", "ecc.mode.current")


def facts() -> dict[str, Any]:
    """`skipped` begins with "no GPU" where torch can use none."""
    why = unusable()
    if why:
        return {"ok": None, "skipped": f"no GPU: {why}"}
    device = torch.device("cuda", 0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    one = torch.ones(1 << 20, device=device)
    summed = one.sum().item()
    return {
        "ok": summed == 1 << 20,
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": total_bytes,
        "free_bytes": free_bytes,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **smi(),
        **host(),
        "gds": storage(),
        "packages": packages(),
    }


def unusable() -> str:
    """Why torch can use no GPU, in one line; empty if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone"
    try:
        if torch.cuda.is_available():
            return ""
        torch.cuda.init()
    except Exception as error:  # the driver's own words say best what is missing
        return " ".join(str(error).split())
    return f"torch {torch.__version__} finds no device"


def smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = [value.strip() for value in done.stdout.strip().split(",")]
    names = (name.replace(".", "_") for name in _ASKED)
    return dict(zip(names, found, strict=True)) if done.returncode == 0 and len(found) == len(_ASKED) else {}


def host() -> dict[str, Any]:
    commit = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
        commit = done.stdout.strip()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
    }


def storage() -> dict[str, Any]:
    """What GPUDirect Storage needs of the system; whether it works only a transfer can tell."""
    return {
        "kvikio": next((version for name, version in packages().items() if name.startswith("kvikio")), None),
        "libcufile": _loads("libcufile.so.0") or _loads("libcufile.so"),
        "nvidia_fs": Path("/proc/driver/nvidia-fs").exists(),
        "udev": Path("/run/udev").is_dir(),
    }


def packages() -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
