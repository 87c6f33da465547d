"""A process seen from the kernel: bytes that it moved, memory that it took at its peak, and a limit to both of them.

Scope: counters of this process; a child that prints one JSON object, inside a memory cgroup if one can be made.
Not here: what a child does (the benchmarks that start one), limits that are there already (`tiering/limits.py`).
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class OsBytes:
    """Bytes that a process has had read from and written to drives, as the kernel counts them."""

    read_bytes: int
    written_bytes: int

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def since(self, before: "OsBytes") -> "OsBytes":
        return OsBytes(
            read_bytes=self.read_bytes - before.read_bytes, written_bytes=self.written_bytes - before.written_bytes
        )


def os_bytes() -> OsBytes:
    """Of this process so far. What is read into the page cache counts when the drive gives it, a page that is made
    dirty counts at once.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return OsBytes(read_bytes=int(fields["read_bytes"]), written_bytes=int(fields["write_bytes"]))


def reset_peak() -> None:
    """Forget the peak of resident memory so far, where the kernel allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The most resident memory of this process since `reset_peak`."""
    return _status_bytes("VmHWM")


def rss_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A cgroup of its own. `limit`: what bounds it, in words; `folder` None: there is none, and `limit` says why."""

    folder: Path | None
    limit: str
    peak_file: str = ""

    def peak_bytes(self) -> int | None:
        """The most that was charged to the group, page cache and kernel memory included."""
        file = self.folder / self.peak_file if self.folder is not None else None
        return int(file.read_text()) if file is not None and file.is_file() else None


@contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[MemoryGroup]:
    """A memory cgroup (v1 or v2) for one child; without the right to make one the child runs without a limit."""
    if limit_bytes is None:
        yield MemoryGroup(folder=None, limit="none asked for")
        return
    first = (CGROUP_V1 / "memory.limit_in_bytes").exists()
    root = CGROUP_V1 if first else CGROUP_V2
    limit_file, peak_file = (
        ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if first else ("memory.max", "memory.peak")
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=root))
    except OSError as error:
        yield MemoryGroup(folder=None, limit=f"none: no right to make a memory cgroup in {root} ({error.strerror})")
        return
    try:
        try:
            (folder / limit_file).write_text(str(limit_bytes))
            group = MemoryGroup(folder=folder, limit=f"{limit_bytes} bytes", peak_file=peak_file)
        except OSError as error:
            group = MemoryGroup(folder=None, limit=f"none: {folder / limit_file}: {error.strerror}")
        yield group
    finally:
        with suppress(OSError):
            folder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended. result: the JSON object on its last line of stdout; empty if it did not get so far.
    killed: the kernel or a limit ended it.
    """

    code: int
    result: Mapping[str, Any]
    errors: str
    killed: bool
    limit: str
    group_peak_bytes: int | None


def run_child(
    command: Sequence[str],
    *,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Runs `command` (in `folder`) to its end; never raises for what the child does, also not for a time that ran out.

    environment: on top of this process's.
    """
    with memory_group(limit_bytes) as group:
        start = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{group.folder}/cgroup.procs"] if group.folder else []
        process = subprocess.Popen(
            [*start, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
        late = ""
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = f"ended after {timeout_s} s"
            _end(process)
            out, errors = process.communicate()
        except BaseException:
            _end(process)
            process.wait()  # its group can be removed only then
            raise
        return Ended(
            code=process.returncode,
            result=_last_object(out),
            errors=f"{errors.strip()}\n{late}".strip(),
            killed=process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) and not late,
            limit=group.limit,
            group_peak_bytes=group.peak_bytes(),
        )


def _end(process: subprocess.Popen[str]) -> None:
    """With whatever it started: it has a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_object(out: str) -> dict[str, Any]:
    for line in reversed(out.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
