"""kvikio's interface over plain files, for machines without a GPU driver.

Scope: what `tiering/gds.py` calls of kvikio: `CuFile` with `pread`, `pwrite`, `fileno`, `close`.
Not here: the tests (`test_engine.py`, `test_choose_engine.py`).
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class StandIn:
    """kvikio's CuFile over plain files."""

    def __init__(self, path: Path, flags: str) -> None:
        self._file = open(  # noqa: SIM115 (closed by close, as the real one)
            path, {"r": "rb", "r+": "r+b"}[flags], buffering=0
        )

    def pread(self, buf: np.ndarray, size: int, file_offset: int) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: os.preadv(self._file.fileno(), [memoryview(buf)[:size]], file_offset))

    def pwrite(self, buf: np.ndarray, size: int, file_offset: int) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: os.pwritev(self._file.fileno(), [memoryview(buf)[:size]], file_offset))

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
