"""The program says which I/O engine is in use and why, and a forced one that cannot work is refused at once.

Scope: `choose_engine`, `gds.probe`, and the transfers of `gds.py` against a stand-in with kvikio's interface.
Not here: the transfers of the POSIX engine (`test_engine.py`).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kvikio_stand_in import StandIn

from tiering.choose import choose_engine
from tiering.engine import Extent
from tiering.errors import DamagedStateError, DiskFullError, EngineError, IOFailedError

PAGE = 4096
NO_CUDA = (
    "KvikIO failure at: /src/shim/utils.cpp:21: libcuda.so.1: cannot open shared object file: No such file or directory"
)


def failing(error: Exception) -> type[StandIn]:
    def get() -> int:
        raise error

    class Failing(StandIn):
        def pread(self, buf: np.ndarray, size: int, file_offset: int) -> SimpleNamespace:
            return SimpleNamespace(get=get)

        pwrite = pread

    return Failing


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[StandIn] | None], None]:
    def put(file: type[StandIn] | None) -> None:
        monkeypatch.setitem(sys.modules, "kvikio", None if file is None else SimpleNamespace(CuFile=file))

    return put


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (None, "pip install 'megatrain[gds]'"),
        (failing(RuntimeError(NO_CUDA)), "libcuda.so.1: cannot open shared object file"),
    ],
)
def test_without_kvikio_auto_says_why_and_a_forced_one_is_refused(
    install: Callable[[type[StandIn] | None], None], tmp_path: Path, file: type[StandIn] | None, reason: str
) -> None:
    """IO-01: posix with the reason on one line; by name an error before anything else; no file is left behind."""
    install(file)
    engine, line = choose_engine("auto", tmp_path / "not" / "yet")
    with engine:
        assert engine.name == "posix"
    assert reason in line and "\n" not in line and "KvikIO failure" not in line, line
    with pytest.raises(EngineError) as raised:
        choose_engine("kvikio", tmp_path)
    assert reason in str(raised.value) and "Fix:" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_posix_by_name_never_touches_kvikio(install: Callable[[type[StandIn] | None], None], tmp_path: Path) -> None:
    """P6: no probe, no import."""
    install(failing(AssertionError("kvikio was used")))
    engine, line = choose_engine("posix", tmp_path)
    with engine:
        assert (engine.name, "asked for" in line) == ("posix", True)


def test_a_kvikio_that_works_is_taken_and_moves_bytes(
    install: Callable[[type[StandIn] | None], None], tmp_path: Path
) -> None:
    """I6: the same contract through kvikio's interface (a stand-in: no GPU here)."""
    install(StandIn)
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * PAGE))
    data = os.urandom(2 * PAGE)
    engine, line = choose_engine("auto", tmp_path)
    assert engine.name == "kvikio" and "a probe transfer worked" in line, line
    with engine:
        extent = Extent(path=path, offset=PAGE, nbytes=2 * PAGE, block="head/weight")
        assert engine.submit_write(extent, memoryview(bytearray(data))).result() == 2 * PAGE
        engine.sync([path])
        back = bytearray(2 * PAGE)
        assert engine.submit_read(extent, memoryview(back)).result() == 2 * PAGE
        assert bytes(back) == data == path.read_bytes()[PAGE : 3 * PAGE]
        short = Extent(path=path, offset=3 * PAGE, nbytes=2 * PAGE, block="head/weight")
        with pytest.raises(DamagedStateError, match="wanted 8192 bytes, found 4096"):
            engine.submit_read(short, memoryview(back)).result()
    assert [p.name for p in tmp_path.iterdir()] == ["f"], "the probe left a file"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("KvikIO failure at: /a.cpp:1: No space left on device", DiskFullError),
        ("cuFile: bad handle", IOFailedError),
        (NO_CUDA, IOFailedError),
    ],
)
def test_what_kvikio_says_becomes_a_typed_error(
    install: Callable[[type[StandIn] | None], None], tmp_path: Path, said: str, kind: type[IOFailedError]
) -> None:
    """IO-06: block, file, offset and bytes are named whatever the engine."""
    install(StandIn)
    engine, _ = choose_engine("kvikio", tmp_path)
    install(failing(RuntimeError(said)))
    path = tmp_path / "f"
    path.write_bytes(bytes(PAGE))
    with engine:
        engine._open = failing(RuntimeError(said))  # type: ignore[attr-defined]
        extent = Extent(path=path, offset=0, nbytes=PAGE, block="head/weight")
        with pytest.raises(kind, match=rf"head/weight: write of 4096 bytes at offset 0 of {path}") as raised:
            engine.submit_write(extent, memoryview(bytearray(PAGE))).result()
    assert type(raised.value) is kind, f"a library that is missing is no damage: {raised.value}"
