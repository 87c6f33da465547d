"""How much memory this process may take.

Scope: the machine's RAM and every memory cgroup (v1, v2, hybrid) on the process's path; the smallest counts. What the
system counts as RAM and is a GPU's is left out.
Not here: rates (`measure.py`), what a run asks for (the caller).
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from tiering.numa import device_memory

CGROUP = Path("/sys/fs/cgroup")


def memory_limit() -> tuple[int, str]:
    """Bytes of RAM that this process may take, and what sets that limit: the machine, or a cgroup file."""
    limit, why = psutil.virtual_memory().total, "the machine's RAM"
    if taken := sum(node.memory_bytes for node in device_memory()):
        limit, why = max(0, limit - taken), f"{why} without {taken} bytes on NUMA nodes of the GPU"
    for file in _limit_files():
        text = file.read_text().strip() if file.is_file() else "max"
        if text.isdigit() and int(text) < limit:
            limit, why = int(text), f"cgroup {file}"
    return limit, why


def memory_available() -> int:
    """Bytes of RAM that are free now or could be, within the limit."""
    taken = sum(node.free_bytes for node in device_memory())
    return min(memory_limit()[0], max(0, psutil.virtual_memory().available - taken))


def _limit_files(of: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """The file that would hold a limit, for each group from the process's own up to the root."""
    for line in of.read_text().splitlines() if of.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = CGROUP, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUP / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (place / name for place in (folder, *folder.parents) if place.is_relative_to(root))
