"""fio's figures for the same drive, requests and depths, where fio is installed.

Scope: finding fio, running it on a probe file, reading its JSON.
Not here: the figures beside it (`disk.py`).

fio has one buffer for each request in flight. With small tiles they stay in the processor's cache, and its figure can
be above that of the engines, whose buffers do not.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tiering.hardware import READ_SHARE, Rate
from tiering.measure_disk import DiskRates
from tiering.posix import PosixEngine
from tiering.probe_file import MIXES, What, probe_file

ENGINES = ("io_uring", "libaio")
TIMEOUT_S = 120
WAYS: dict[What, list[str]] = {
    "read": ["--rw=read"],
    "write": ["--rw=write"],
    "mixed": ["--rw=rw", f"--rwmixread={100 * READ_SHARE:.0f}"],
}


class FioError(Exception):
    """fio could not be run; the message is its own, on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The fio of this machine, and the best of `ENGINES` that it has."""

    path: str
    ioengine: str


def found() -> Program | None:
    """None where fio is not installed, or has none of `ENGINES`."""
    path = shutil.which("fio")
    if path is None:
        return None
    listed = subprocess.run([path, "--enghelp"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout.split()
    return next((Program(path=path, ioengine=name) for name in ENGINES if name in listed), None)


def rates(
    program: Program, path: Path, tiles: Sequence[int], depths: Sequence[int], pass_bytes: int
) -> tuple[list[DiskRates], int]:
    """Rows by tile size and depth, and the bytes written. Raises FioError."""
    rows: list[DiskRates] = []
    written = 0
    for tile in tiles:
        with PosixEngine() as engine:
            with probe_file(path, engine, nbytes=pass_bytes, request_bytes=tile, memory=8 * tile) as file:
                for depth in depths:
                    one = {what: _rate(program, what, file.path, tile, depth, file.nbytes) for what in MIXES}
                    rows.append(
                        DiskRates(
                            queue_depth=depth,
                            request_bytes=tile,
                            read=one["read"],
                            write=one["write"],
                            mixed=one["mixed"],
                        )
                    )
                    written += int(file.nbytes * (2 - READ_SHARE))
                written += file.written_bytes
    return rows, written


def _rate(program: Program, what: What, file: Path, tile: int, depth: int, nbytes: int) -> Rate:
    command = [
        program.path, "--name=measure", f"--filename={file}", f"--size={nbytes}", f"--bs={tile}",
        f"--iodepth={depth}", f"--ioengine={program.ioengine}", "--direct=1", "--output-format=json", *WAYS[what],
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise FioError(f"it took longer than {TIMEOUT_S} s for {nbytes} bytes") from None
    if done.returncode != 0:
        raise FioError(f"exit code {done.returncode}: {' '.join(done.stderr.split())[:200]}")
    try:
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        per_s = float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioError(f"its JSON has no rate: {error!r}") from None
    if per_s <= 0:
        raise FioError("it moved nothing")
    how = f"fio {what}: {nbytes} bytes in requests of {tile}, {depth} in flight, {program.ioengine}, direct"
    return Rate(per_s=per_s, source="measured", how=how, date=date.today().isoformat())
