"""A request that hangs is told of while it hangs, by name.

Scope: `tiering/watchdog.py`, alone and inside an engine.
Not here: what an engine promises otherwise (`test_engine.py`).
"""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from tiering.engine import Extent
from tiering.errors import IOFailedError
from tiering.posix import PosixEngine
from tiering.watchdog import Watchdog

PAGE = 4096
LATE_S = 0.02


class Slow(PosixEngine):
    """Every transfer and flush waits until it is let go, as on a drive that hangs."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(2, direct=False, watchdog=watchdog)
        self.go = threading.Event()

    def _transfer(self, verb, extent, view):  # type: ignore[no-untyped-def]
        assert self.go.wait(30)
        return super()._transfer(verb, extent, view)

    def _sync_one(self, path: Path) -> None:
        assert self.go.wait(30)
        super()._sync_one(path)


def extent(path: Path, nbytes: int = PAGE) -> Extent:
    return Extent(path=path, offset=PAGE, nbytes=nbytes, block="layers.3/exp_avg")


def two_pages(tmp_path: Path) -> Path:
    path = tmp_path / "slot"
    path.write_bytes(bytes(2 * PAGE))
    return path


def wait_for(lines: list[str], count: int) -> None:
    end_s = time.monotonic() + 20
    while len(lines) < count:
        assert time.monotonic() < end_s, f"{count} lines were expected, these came: {lines}"
        time.sleep(0.002)


def seconds(line: str) -> float:
    found = re.search(r"([\d.]+) s", line)
    assert found, line
    return float(found[1])


def test_a_request_that_hangs_is_told_again_and_again_and_when_it_ends(tmp_path: Path) -> None:
    """IO-21: verb, block, file, offset, bytes, seconds; ever rarer; the request itself goes on to its end."""
    path, lines = two_pages(tmp_path), []
    with Slow(Watchdog(LATE_S, lines.append)) as engine:
        pending = engine.submit_write(extent(path), memoryview(bytearray(b"x" * PAGE)))
        wait_for(lines, 3)  # this thread does nothing but wait, as one that computes does
        engine.go.set()
        assert pending.result() == PAGE
        wait_for(lines, 4)
    name = f"block layers.3/exp_avg: write of {PAGE} bytes at offset {PAGE} of {path}"
    assert all(line.startswith(name) for line in lines), lines
    assert ["so far" in line for line in lines[:3]] == [True] * 3, lines
    assert "ended after" in lines[-1], lines
    ages = [seconds(line) for line in lines]
    assert ages == sorted(ages), f"a request grew younger: {ages}"
    assert path.read_bytes()[PAGE:] == b"x" * PAGE


def test_intervals_grow(tmp_path: Path) -> None:
    """A drive that hangs for an hour leaves a handful of lines, not thousands."""
    lines: list[str] = []
    dog = Watchdog(LATE_S, lines.append)
    with dog.watching("read", extent(tmp_path / "f")):
        time.sleep(0.4)
    dog.close()
    assert 3 <= len(lines) <= 6, lines  # about 0.02, 0.05, 0.1, 0.2 and 0.4 s, and its end


def test_a_flush_that_hangs_is_told_of(tmp_path: Path) -> None:
    """I7: making a file durable is the longest request of all."""
    path, lines = two_pages(tmp_path), []
    with Slow(Watchdog(LATE_S, lines.append)) as engine:
        syncing = threading.Thread(target=engine.sync, args=([path],))
        syncing.start()
        wait_for(lines, 1)
        engine.go.set()
        syncing.join()
    assert lines[0].startswith(f"flush of {path} has taken"), lines


def test_requests_that_are_quick_are_not_mentioned_and_leave_nothing(tmp_path: Path) -> None:
    """No line, no entry, no thread: one that fails too."""
    path, lines = two_pages(tmp_path), []
    dog = Watchdog(tell=lines.append)
    before = threading.enumerate()
    with PosixEngine(2, direct=False, watchdog=dog) as engine:
        for _ in range(20):
            engine.submit_read(extent(path), memoryview(bytearray(PAGE))).result()
        with pytest.raises(IOFailedError):
            engine.submit_read(extent(tmp_path / "gone"), memoryview(bytearray(PAGE))).result()
        engine.sync([path])
        assert not dog._open, f"requests that are over are still watched: {dog._open}"
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        assert new.count("io watchdog") == 1, f"one thread looks at all requests: {new}"
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert (lines, left) == ([], [])


def test_an_entry_costs_next_to_nothing(tmp_path: Path) -> None:
    """A request of 8 MiB takes a millisecond at 8 GB/s; being watched takes far less."""
    dog, at = Watchdog(), extent(tmp_path / "f")
    with dog.watching("read", at):
        pass
    begin_s = time.perf_counter()
    for _ in range(1000):
        with dog.watching("read", at):
            pass
    each_s = (time.perf_counter() - begin_s) / 1000
    dog.close()
    assert each_s < 5e-4, f"{each_s * 1e6:.1f} us a request"


def test_the_line_goes_to_stderr_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is for results; the run of a person who looks on says what it waits for."""
    dog = Watchdog(LATE_S)
    with dog.watching("read", extent(tmp_path / "f")):
        time.sleep(3 * LATE_S)
    dog.close()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: block layers.3/exp_avg: read of"), (out, err)
    assert os.linesep in err
