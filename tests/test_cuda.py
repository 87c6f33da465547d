"""The lanes of CUDA: what they ask of the driver, and the arena that is locked for it.

Scope: `tiering/cuda.py`, `tiering/pin_probe.py`, `Arena.pin`; without a device through a driver that does everything at
once and keeps a log; with one, for real.
Not here: copies that are late or out of order (`test_device_lanes.py`).
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import toy_units, toy_workload
from toy_runs import ROOMY, ToyRun, device_plan, interpreted, trained

import tiering.cuda
from tiering.arena import Arena
from tiering.cuda import CudaLanes
from tiering.errors import DeviceError
from tiering.pin_probe import refusal
from tiering.workload import PAGE, Workload

WORKLOAD, IN_BF16 = (
    toy_workload(toy_units(3, 3 * PAGE, 5 * PAGE, activation=2 * PAGE), "fused", bf16=bf16) for bf16 in (False, True)
)
NO_DEVICE = "torch sees no CUDA device"


class _Driver:
    """What `torch.cuda` is to the lanes. refuses: the error of locking memory, 0 for none."""

    def __init__(self, refuses: int = 0) -> None:
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self.refuses = refuses
        self.streams = 0

    def event(self, *, enable_timing: bool, blocking: bool = False) -> "_DriverEvent":
        return _DriverEvent(self, blocking)

    def stream(self, device: torch.device) -> "_DriverStream":
        self.streams += 1
        return _DriverStream(self, f"stream {self.streams}")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 0
        if not self.refuses:
            self.locked[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {2: "out of memory"}[code]


class _DriverStream:
    def __init__(self, driver: _Driver, name: str) -> None:
        self.driver = driver
        self.name = name

    def wait_event(self, event: "_DriverEvent") -> None:
        assert event.at_s, "an event that was never recorded holds nobody up"
        self.driver.log.append(f"{self.name} waits for {event.stream}")


class _DriverEvent:
    def __init__(self, driver: _Driver, blocking: bool) -> None:
        self.driver = driver
        self.blocking = blocking
        self.at_s = 0.0
        self.stream = ""

    def record(self, stream: _DriverStream) -> None:
        self.at_s = time.perf_counter()
        self.stream = stream.name
        self.driver.log.append(f"{stream.name}: {'end' if self.blocking else 'begin'}")

    def synchronize(self) -> None:
        assert self.at_s, "an event that was never recorded"

    def elapsed_time(self, other: "_DriverEvent") -> float:
        return (other.at_s - self.at_s) * 1e3


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Driver]:
    """The current stream is "default" at first; a copy is noted with the stream that it is on."""
    made = _Driver()
    current = [_DriverStream(made, "default")]

    @contextmanager
    def on(stream: _DriverStream) -> Iterator[None]:
        made.log.append(f"{stream.name}: copy")
        yield

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "device": nullcontext,
        "Stream": made.stream,
        "Event": made.event,
        "stream": on,
        "current_stream": lambda device: current[-1],
        "set_stream": current.append,
        "empty_cache": lambda: None,
        "synchronize": lambda device: made.log.append("device: wait"),
        "cudart": lambda: made,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield made
    assert not made.locked, f"still locked: {made.locked}"
    assert current[-1].name == "default", f"left on {current[-1].name}"


def cuda_lanes() -> CudaLanes:
    """Lanes of the driver above, whose memory is that of the host."""
    lanes = CudaLanes()
    lanes.device = torch.device("cpu")
    return lanes


def test_without_a_device_the_lanes_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: one line, with why and what to do; and no other device in place of the one that was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"sees no CUDA device \(.+\)\. Fix: compute on the CPU, or"):
        CudaLanes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"no CUDA device 2, torch sees 2\. Fix: 0 to 1\."):
        CudaLanes(2)


def test_importing_the_lanes_touches_no_driver() -> None:
    """P6: whoever computes on the CPU pays nothing for them."""
    code = "import tiering.cuda, torch; print(torch.cuda.is_initialized())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_copy_waits_on_its_own_stream_and_computing_on_one_that_is_not_the_default(driver: _Driver) -> None:
    """I2, I3: for the ends of what they come after; and each is timed between its waits and its end."""
    with Arena(2 * PAGE) as host:
        lanes = cuda_lanes()
        lanes.open(host, 2 * PAGE)
        driver.log.clear()
        first = lanes.copy("h2d", host.tensor(0, PAGE), lanes.tensor(0, PAGE), [])
        lanes.begin_compute([first])
        op = lanes.end_compute()
        back = lanes.copy("d2h", lanes.tensor(0, PAGE), host.tensor(PAGE, 2 * PAGE), [first, op])
        asked = driver.log.copy()
        lanes.close()
    h2d, current, d2h = "stream 1", "stream 4", "stream 2"
    assert asked == [
        *(f"{h2d}: begin", f"{h2d}: copy", f"{h2d}: end"),
        *(f"{current} waits for {h2d}", f"{current}: begin", f"{current}: end"),
        *(f"{d2h} waits for {h2d}", f"{d2h} waits for {current}", f"{d2h}: begin", f"{d2h}: copy", f"{d2h}: end"),
    ]
    before_s = time.perf_counter()
    for event in (first, op, back):
        event.synchronize()
    assert (
        before_s - 5 < first.begin_s <= first.end_s <= op.begin_s <= op.end_s <= back.begin_s <= back.end_s < before_s
    )


def test_an_update_is_issued_on_a_stream_of_its_own(driver: _Driver) -> None:
    """I2, P4: behind the events that it is given, beside computing; what it takes for itself belongs to that stream."""
    with Arena(PAGE) as host:
        lanes = cuda_lanes()
        lanes.open(host, PAGE)
        moved = lanes.copy("h2d", host.tensor(0, PAGE), lanes.tensor(0, PAGE), [])
        driver.log.clear()
        issued: list[str] = []
        event = lanes.update(lambda: issued.extend(driver.log), [lanes.tensor(0, PAGE)], [moved])
        lanes.close()
    asked = ["stream 3 waits for stream 1", "stream 3: begin", "stream 3: copy"]
    assert issued == asked and driver.log[3] == "stream 3: end", driver.log
    event.synchronize()
    assert moved.end_s <= event.begin_s <= event.end_s


def test_the_clock_is_set_again_before_it_drifts(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: times of the device stay in the clock of the host, and an event keeps the setting that it was made under."""
    with Arena(PAGE) as host:
        lanes = cuda_lanes()
        lanes.open(host, PAGE)
        first = lanes._clock.base
        lanes.begin_compute([])
        event = lanes.end_compute()
        monkeypatch.setattr(tiering.cuda, "RESET_S", 0.0)
        event.synchronize()
        assert lanes._clock.base is not first
        assert 0 <= event.begin_s - first[1] < 5 and event._base is first
        lanes.close()


def test_a_plan_is_carried_out_on_cuda_lanes(driver: _Driver, tmp_path: Path) -> None:
    """P1: all calls fit together; this driver does everything at once."""
    cases = {"host": (WORKLOAD, False), "device": (WORKLOAD, True), "device, bf16": (IN_BF16, True)}
    for name, (workload, there) in cases.items():
        found = trained(device_plan(workload, 90 * PAGE, update_there=there), tmp_path / name, cuda_lanes())
        unlike = interpreted(workload).unlike(found)
        assert not unlike, f"{name}: {unlike[:4]}"


def test_the_host_arena_is_locked_in_its_exact_size_and_unlocked_before_it_goes(driver: _Driver) -> None:
    """I5: no power of two, no copy; and closing either of them in any order leaves nothing locked."""
    host = Arena(3 * PAGE)
    lanes = cuda_lanes()
    lanes.open(host, PAGE)
    assert driver.locked == {host.tensor(0, 1).data_ptr(): 3 * PAGE}
    assert lanes.pin_line == "HOST arena of 0.0 MiB: locked for copies"
    lanes.close()
    assert not driver.locked
    lanes.close()
    host.close()
    other = Arena(PAGE)
    assert other.pin() is None
    other.close()


@pytest.mark.parametrize(
    ("release", "limit_bytes", "refuses", "said"),
    [
        ("6.8.0-generic", None, 2, r"not locked, out of memory \(CUDA error 2\); copies go through .+ slower"),
        ("6.8.0-generic", PAGE, 0, r"not locked, at most 4096 bytes may be \(a limit that was set\); copies"),
        ("6.6.0-microsoft-standard-WSL2", None, 0, r"not locked, the trial failed; copies"),
    ],
    ids=["the driver refuses", "a limit", "a trial"],
)
def test_where_memory_cannot_be_locked_copies_go_on_and_one_line_says_what_it_costs(
    driver: _Driver,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    limit_bytes: int | None,
    refuses: int,
    said: str,
) -> None:
    """P6: the path in use is named, with the reason; only on WSL a child tries first."""
    driver.refuses = refuses
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(tiering.cuda, "refusal", lambda nbytes: "the trial failed")
    nbytes = 300 << 20  # more than may be locked without a trial
    with Arena(nbytes) as host:
        lanes = CudaLanes(pin_limit_bytes=limit_bytes)
        lanes.device = torch.device("cpu")
        lanes.open(host, PAGE)
        lanes.close()
    assert re.fullmatch(f"HOST arena of 300.0 MiB: {said}.*", lanes.pin_line), lanes.pin_line


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo locked", None),
        ("echo 'out of memory (CUDA error 2)'", "a trial with 4096 bytes failed: out of memory (CUDA error 2)"),
        ("echo no CUDA >&2; exit 1", "a trial with 4096 bytes failed: no CUDA"),
        ("kill -9 $$", "a trial with 4096 bytes was ended by signal 9"),
        ("sleep 20", "a trial with 4096 bytes gave no answer within 0.3 s"),
    ],
)
def test_whatever_happens_to_a_trial_becomes_one_line(script: str, why: str | None) -> None:
    """P6: a driver that takes its process down takes only the child down."""
    timeout_s = 0.3 if "sleep" in script else 20.0
    assert refusal(PAGE, program=["sh", "-c", script], timeout_s=timeout_s) == why


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_trial_without_a_device_says_so() -> None:
    """P6: the child is this module's own; it locks nothing here, and says why."""
    said = refusal(PAGE)
    assert said is not None and said.startswith("a trial with 4096 bytes failed: "), said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_DEVICE)
@pytest.mark.parametrize(
    ("workload", "update_there"),
    [(WORKLOAD, False), (WORKLOAD, True), (IN_BF16, True)],
    ids=["host", "device", "device-bf16"],
)
@pytest.mark.parametrize("device_bytes", [None, ROOMY], ids=["tight", "roomy"])
def test_streams_and_events_of_a_real_device_keep_the_order(
    tmp_path: Path, device_bytes: int | None, workload: Workload, update_there: bool
) -> None:
    """I2, I3, I8, P2: the same bytes as the program says; the device holds the arena and nothing else."""
    made = device_plan(workload, 200 * PAGE, device_bytes, update_there=update_there)
    for number in range(4):
        lanes = CudaLanes()
        torch.cuda.reset_peak_memory_stats(lanes.device)
        held = torch.cuda.memory_allocated(lanes.device)
        with ToyRun(made, tmp_path / str(number), lanes) as run:
            found = run.train()
            assert "locked for copies" in lanes.pin_line, lanes.pin_line
            _, figures = run.manager.trace.take()
        unlike = interpreted(workload).unlike(found)
        assert not unlike, unlike[:4]
        peak = torch.cuda.max_memory_allocated(lanes.device) - held
        assert made.device_bytes <= peak < made.device_bytes + (1 << 20), (made.device_bytes, peak)
        assert figures.h2d_s > 0 and figures.compute_s > 0, figures
