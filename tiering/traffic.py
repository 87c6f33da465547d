"""How many bytes an I/O engine moved: read and written, in RAM and on a device, and by which path.

Scope: `Traffic`, which is told at the end of a run, and `Counter`, which adds up while threads move bytes.
Not here: moving them (`pooled.py`), how kvikio moved those of a device (`gds.py` asks it).
"""

import threading
from dataclasses import dataclass
from typing import Literal

MiB = 1 << 20
Memory = Literal["host", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of files, read into memory and written from it. gds_bytes: of those of the device, moved by GPUDirect
    Storage, as the library counts them; None where nobody counts.
    """

    host_read_bytes: int = 0
    host_write_bytes: int = 0
    device_read_bytes: int = 0
    device_write_bytes: int = 0
    gds_bytes: int | None = None

    @property
    def host_bytes(self) -> int:
        return self.host_read_bytes + self.host_write_bytes

    @property
    def device_bytes(self) -> int:
        return self.device_read_bytes + self.device_write_bytes

    def by_path(self) -> dict[str, int]:
        """posix: calls of the system, for host memory. gds: cuFile. compat: device memory by way of a buffer in RAM.

        >>> Traffic(host_read_bytes=5, device_read_bytes=3, device_write_bytes=4, gds_bytes=6).by_path()
        {'posix': 5, 'gds': 6, 'compat': 1}
        >>> Traffic(device_read_bytes=3).by_path()
        {'posix': 0, 'uncounted': 3}
        """
        if self.gds_bytes is None:
            return {"posix": self.host_bytes} | ({"uncounted": self.device_bytes} if self.device_bytes else {})
        gds_bytes = min(self.gds_bytes, self.device_bytes)  # the library counts all of a process
        return {"posix": self.host_bytes, "gds": gds_bytes, "compat": self.device_bytes - gds_bytes}

    def line(self, engine: str) -> str:
        """For a person.

        >>> Traffic(host_read_bytes=3 << 20, host_write_bytes=1 << 19, gds_bytes=0).line("kvikio")
        'kvikio moved: RAM 3.0 MiB read, 0.5 MiB written (posix calls); device memory none'
        """
        ram = f"RAM {_mib(self.host_read_bytes)} read, {_mib(self.host_write_bytes)} written (posix calls)"
        if not self.device_bytes:
            return f"{engine} moved: {ram}; device memory none"
        paths = self.by_path()
        how = "the path was not counted"
        if "gds" in paths:
            how = f"{_mib(paths['gds'])} by GPUDirect Storage, {_mib(paths['compat'])} through a buffer in RAM"
        device = f"{_mib(self.device_read_bytes)} read, {_mib(self.device_write_bytes)} written ({how})"
        return f"{engine} moved: {ram}; device memory {device}"


class Counter:
    """Bytes so far, by direction and memory. Any thread adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = {(verb, memory): 0 for verb in ("read", "write") for memory in ("host", "device")}

    def add(self, verb: str, memory: Memory, nbytes: int) -> None:
        with self._lock:
            self._bytes[verb, memory] += nbytes

    def traffic(self, gds_bytes: int | None) -> Traffic:
        with self._lock:
            moved = {f"{memory}_{verb}_bytes": nbytes for (verb, memory), nbytes in self._bytes.items()}
        return Traffic(**moved, gds_bytes=gds_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MiB:.1f} MiB"
