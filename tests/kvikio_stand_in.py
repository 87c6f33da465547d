"""kvikio's interface over plain files and memory, for machines without a GPU driver.

Scope: what `tiering/gds.py` calls of kvikio 26.10: `CuFile`, registering memory, counting, settings, facts of the
driver; `DeviceBytes`, memory that only kvikio may touch. What is odd about kvikio is odd here too: a read past the end
of a file raises, and small requests of device memory never take the direct path.
Not here: the tests (`test_engine.py`, `test_choose_engine.py`, `test_gds.py`).
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

GDS_THRESHOLD = 16384


class DeviceBytes:
    """Flat bytes that have CUDA's array interface, and no other one: numpy and `memoryview` cannot see them."""

    def __init__(self, content: bytes | np.ndarray) -> None:
        self._array = np.frombuffer(bytearray(content), np.uint8) if isinstance(content, bytes) else content

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._array.__array_interface__["data"][0]
        shape = (len(self._array),)
        return {"data": (address, False), "shape": shape, "typestr": "|u1", "strides": None, "version": 2}

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def __getitem__(self, index: slice) -> "DeviceBytes":
        return DeviceBytes(self._array[index])

    def content(self) -> bytes:
        return self._array.tobytes()


def _memory(buffer: Any) -> tuple[memoryview, bool]:
    """The bytes of a buffer as kvikio finds them, and whether they are of a device."""
    facts = getattr(buffer, "__cuda_array_interface__", None)
    if facts is None:
        return memoryview(buffer), False
    return memoryview((ctypes.c_uint8 * facts["shape"][0]).from_address(facts["data"][0])), True


class StandIn:
    """kvikio's CuFile over plain files. counts: bytes by backend, of all files."""

    counts: dict[str, int] = {}  # noqa: RUF012
    compat = True
    lock = threading.Lock()

    def __init__(self, path: Path, flags: str) -> None:
        self._file = open(  # noqa: SIM115 (closed by close, as the real one)
            path, {"r": "rb", "r+": "r+b", "w+": "w+b"}[flags], buffering=0
        )

    def pread(self, buf: Any, size: int, file_offset: int) -> SimpleNamespace:
        def get() -> int:
            view, device = _memory(buf)
            moved = os.preadv(self._file.fileno(), [view[:size]], file_offset)
            if moved < size and not device:
                raise RuntimeError("KvikIO failure at: /src/posix_io.hpp:177: POSIX error on pread: EOF")
            return self._counted(moved, device)

        return SimpleNamespace(get=get)

    def pwrite(self, buf: Any, size: int, file_offset: int) -> SimpleNamespace:
        def get() -> int:
            view, device = _memory(buf)
            return self._counted(os.pwritev(self._file.fileno(), [view[:size]], file_offset), device)

        return SimpleNamespace(get=get)

    def _counted(self, nbytes: int, device: bool) -> int:
        backend = "GDS" if device and nbytes >= GDS_THRESHOLD and not self.compat else "POSIX"
        with self.lock:
            self.counts[backend] = self.counts.get(backend, 0) + nbytes
        return nbytes

    def is_direct_io_supported(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class _Monitor:
    """Counts from when it was made."""

    def __init__(self) -> None:
        self._before = dict(StandIn.counts)
        self.stopped = False

    def get(self) -> SimpleNamespace:
        assert not self.stopped
        moved = {name: StandIn.counts.get(name, 0) - self._before.get(name, 0) for name in ("POSIX", "GDS")}
        return SimpleNamespace(by_backend={name: {"bytes_transferred": nbytes} for name, nbytes in moved.items()})

    def stop(self) -> None:
        self.stopped = True


class Library(SimpleNamespace):
    """The module `kvikio`. log: what was registered and deregistered, by address. settings: as they are now."""

    log: list[tuple[str, int]]
    settings: dict[str, Any]
    set_log: list[dict[str, Any]]


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    compat: bool = True,
    refuses: str = "",
) -> Library:
    """Puts the stand-in in the place of kvikio. compat: without cuFile. refuses: what registering memory says."""
    kvikio = Library(log=[], settings={"num_threads": 1, "auto_direct_io_read": False}, set_log=[])
    monkeypatch.setattr(StandIn, "compat", compat)
    monkeypatch.setattr(StandIn, "counts", {})

    def noted(what: str) -> Callable[[Any], None]:
        def note(buffer: Any) -> None:
            if refuses:
                raise RuntimeError(f"KvikIO failure at: /src/buffer.cpp:31: {refuses}")
            kvikio.log.append((what, buffer.__cuda_array_interface__["data"][0]))

        return note

    def put(config: dict[str, Any]) -> None:
        kvikio.settings |= config
        kvikio.set_log.append(config)

    kvikio.CuFile, kvikio.SummaryMonitor = StandIn, _Monitor
    kvikio.memory_register, kvikio.memory_deregister = noted("register"), noted("deregister")
    facts = {"is_gds_available": not compat, "major_version": 2, "minor_version": 24}
    defaults, driver = ModuleType("kvikio.defaults"), ModuleType("kvikio.cufile_driver")
    vars(defaults).update(set=put, get=kvikio.settings.get, is_compat_mode_preferred=lambda: compat)
    vars(driver).update(get=facts.__getitem__)
    for name, module in (("kvikio", kvikio), ("kvikio.defaults", defaults), ("kvikio.cufile_driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    return kvikio
