"""What a result was seen on: processor, memory, drive and its rates, day and commit, as lines of text.

Scope: facts for the head of a result.
Not here: a file of rates that plans are made with (`megatrain measure`).
"""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain.sizes import format_rate, format_size
from tiering.drive import drive_facts
from tiering.measure_disk import quick_rates
from tiering.place import folder_beside
from tiering.posix import PosixEngine

ROOT = Path(__file__).parent.parent
MEMORY = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes/s of a drive: reads alone, writes alone, the mix of a step."""

    read_per_s: float
    write_per_s: float
    mixed_per_s: float

    def as_json(self) -> dict[str, Any]:
        return {"read_per_s": self.read_per_s, "write_per_s": self.write_per_s, "mixed_per_s": self.mixed_per_s}

    def __str__(self) -> str:
        read, write, mixed = map(format_rate, (self.read_per_s, self.write_per_s, self.mixed_per_s))
        return f"read {read}, write {write}, mixed {mixed}"


def drive_rates(path: Path) -> Rates:
    """The drive of `path` now, in about a second."""
    with PosixEngine() as engine:
        found = quick_rates(path, engine, memory=MEMORY)
    return Rates(read_per_s=found.read.per_s, write_per_s=found.write.per_s, mixed_per_s=found.mixed.per_s)


def machine_lines(path: Path) -> list[str]:
    """Processor, memory, drive, software, day and commit."""
    facts = drive_facts(folder_beside(path))
    drive = facts.model or ", ".join(facts.devices) or "unknown"
    return [
        f"processor: {_processor()}, {os.cpu_count()} cores, torch with {torch.get_num_threads()} threads",
        f"memory: {format_size(psutil.virtual_memory().total)}",
        f"drive: {drive}, {facts.fs_type}",
        f"software: Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}",
        f"date: {date.today().isoformat()}",
        f"commit: {_commit()}",
    ]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """Of the project, and whether files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
