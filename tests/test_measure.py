"""Measured figures say how they came about, take no more than they may, and leave nothing behind.

Scope: `tiering/measure.py`, `measure_disk.py`, `probe_file.py`, `measure_memory.py`. No figure is compared with a time.
Not here: facts of the system (`test_drive.py`), the file of figures (`test_hardware_file.py`).
"""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiering import measure as measure_module
from tiering import measure_disk, measure_memory
from tiering.checksums import GRAIN_BYTES
from tiering.drive import DriveFacts
from tiering.engine import Extent
from tiering.errors import DiskFullError, IOFailedError, PlaceError
from tiering.hardware import Rate, assumed_hardware
from tiering.measure import by_drive, io_steals, measure, measure_drives
from tiering.measure_device import device_copy_rates, first_device, quick_device_rates
from tiering.measure_disk import (
    DiskRates,
    best_depth,
    measure_drive,
    quick_rates,
    request_size,
    series,
)
from tiering.measure_memory import host_copy_rate, product_shape, update_elements, update_rate
from tiering.posix import PosixEngine
from tiering.probe_file import MIXES, probe_file, remove_stale
from tiering.spread import rate_of

KiB, MiB = 1 << 10, 1 << 20
PAGE = 4096


class Recorder:
    """An engine on memory alone: notes every request and how many were in flight, and fails where it is told to."""

    name = "recorder"

    def __init__(self, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self.buffers: set[int] = set()
        self.fail_at, self.error = fail_at, error

    def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._move("R", extent, view)

    def submit_write(self, extent: Extent, view: memoryview) -> Future[int]:
        return self._move("W", extent, view)

    def _move(self, verb: str, extent: Extent, view: memoryview) -> Future[int]:
        future: Future[int] = Future()
        self.requests.append((verb, extent.offset, extent.nbytes))
        self.buffers.add(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
        if len(self.requests) == self.fail_at and self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(extent.nbytes)
        return future

    def sync(self, paths: object) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None: ...


def rates(depth: int, mixed: float) -> DiskRates:
    some = Rate(per_s=mixed, source="measured")
    return DiskRates(queue_depth=depth, request_bytes=PAGE, read=some, write=some, mixed=some)


def windows_of(
    speeds: list[float], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[measure_disk.Series, list[float]]:
    """A series of writes in windows of 16 pages, of which window n runs at speeds[n] pages/s; and when each ended."""
    ends: list[float] = []

    def completions(
        what: str, depth: int, request: int, most: int, go_on: Callable[[list[float]], bool]
    ) -> list[float]:
        for number in range(most // request):
            ends.append((ends[-1] if ends else 0.0) + 1 / speeds[number // 16])
            if not go_on(ends):
                break
        return ends

    with probe_file(folder, Recorder(), nbytes=16 * PAGE, request_bytes=PAGE, memory=MiB) as file:
        monkeypatch.setattr(file, "completions", completions)
        return series(file, "write", depth=2, request_bytes=PAGE, most_bytes=12 * 16 * PAGE), ends


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system without direct I/O answers when a file is opened."""
    real = os.open

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)


def test_measured_rates_say_so_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Style rule 9; the probe file is beside the tier, not in it, and gone."""
    tier = tmp_path / "tier"
    tier.mkdir()
    hardware = measure(tier, width=64, tokens=32, memory=64 << 20, disk_bytes=16 << 20)
    assert hardware.mixed is not None
    for rate in hardware.rates().values():
        assert rate.source == "measured"
        assert rate.how and rate.date
        assert rate.per_s > 1e6
    assert hardware.queue_depth in measure_disk.QUICK_DEPTHS
    assert hardware.assumed() == []
    assert [path.name for path in tmp_path.rglob("*")] == ["tier"]


def test_each_drive_is_measured_once_and_shared_by_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: all drives together are the sum; two folders on one drive are not faster than one."""
    facts = {"a": "nvme0n1", "b": "nvme1n1", "c": "nvme0n1"}
    paths = [tmp_path / name / "run" for name in facts]
    for path in paths:
        path.parent.mkdir()
    monkeypatch.setattr(measure_module, "drive_facts", lambda path: DriveFacts(devices=(facts[path.name],)))
    asked: list[Path] = []

    def quick(path: Path, engine: object, **options: object) -> DiskRates:
        asked.append(path)
        return rates(8, 1e9)

    monkeypatch.setattr(measure_module, "quick_rates", quick)
    first = replace(assumed_hardware(), mixed=Rate(per_s=3e9, source="measured"), queue_depth=2)
    assert by_drive(paths) == [[paths[0], paths[2]], [paths[1]]]
    together, drives = measure_drives(first, paths, memory=MiB)
    assert asked == [paths[1]]
    assert together.mixed is not None and together.mixed.per_s == 4e9, together.mixed
    assert (together.queue_depth, together.read.per_s) == (10, first.read.per_s + 1e9)
    assert [drive.name for drive in drives] == [str(path) for path in paths]
    assert [rate_of(drive) for drive in drives] == [1.5e9, 1e9, 1.5e9]
    assert drives[0].read.source == "assumed" and drives[1].read.source == "measured"
    alone, (drive,) = measure_drives(first, paths[:1], memory=MiB)
    assert (alone, drive.mixed) == (first, first.mixed), "one drive is what was measured of it"


@pytest.mark.parametrize("memory", [64 << 10, 1 << 20, 96 << 20, 64 << 30])
def test_measuring_takes_no_more_than_the_budget(memory: int) -> None:
    """P2: the budget holds before training too; with plenty, the shapes are those that were asked for."""
    width, tokens = product_shape(4096, 4096, memory)
    assert 4 * (5 * tokens * width + 4 * width * width) <= memory
    assert 16 * update_elements(memory) <= memory
    assert 8 * request_size(memory) <= memory
    if memory > 1 << 30:
        assert (width, tokens, update_elements(memory)) == (4096, 4096, 1 << 25)
        assert request_size(memory) == measure_disk.REQUEST_BYTES


def test_requests_have_buffers_of_their_own_within_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that all fit in the processor's cache show a rate that no run gets: small ones are many."""
    monkeypatch.setattr("tiering.probe_file.BUFFER_BYTES", 20 * PAGE)
    for memory, count in ((64 * MiB, 20), (5 * PAGE, 5), (1, 1)):
        engine = Recorder()
        with probe_file(tmp_path, engine, nbytes=MiB, request_bytes=PAGE, memory=memory) as file:
            file.rate("mixed", depth=8, request_bytes=PAGE, most_bytes=MiB)
        assert len(engine.buffers) == count, f"{len(engine.buffers)} buffers in {memory} bytes, wanted {count}"


def test_no_two_buffers_hold_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that packs what is alike would show a rate that no run gets."""
    monkeypatch.setattr("tiering.probe_file.RANDOM_BYTES", PAGE)
    with PosixEngine() as engine:
        with probe_file(tmp_path, engine, nbytes=16 * PAGE, request_bytes=PAGE, memory=16 * PAGE) as file:
            written = file.path.read_bytes()
    pages = {written[at : at + PAGE] for at in range(0, len(written), PAGE)}
    assert len(pages) == 16 and all(len(set(page)) > 200 for page in pages)


def test_every_block_is_written_before_anything_is_timed(tmp_path: Path) -> None:
    """Blocks that were never written are read at memory speed, and a first write allocates."""
    engine = Recorder()
    with probe_file(tmp_path, engine, nbytes=16 * PAGE, request_bytes=PAGE, memory=MiB):
        assert engine.requests == [("W", n * PAGE, PAGE) for n in range(16)]


def test_the_mix_is_four_reads_to_three_writes(tmp_path: Path) -> None:
    """READ_SHARE of the bytes are read, one after the other, in whole mixes; both directions walk the file."""
    engine = Recorder()
    with probe_file(tmp_path, engine, nbytes=16 * PAGE, request_bytes=PAGE, memory=MiB) as file:
        del engine.requests[:]
        file.rate("mixed", depth=2, request_bytes=PAGE, most_bytes=21 * PAGE)
        before = file.written_bytes
    verbs = "".join(verb for verb, _, _ in engine.requests)
    assert verbs == 3 * MIXES["mixed"], verbs
    assert [at // PAGE for verb, at, _ in engine.requests if verb == "R"] == list(range(12))
    assert [at // PAGE for verb, at, _ in engine.requests if verb == "W"] == [*range(8, 16), 0]
    assert before == (16 + 9) * PAGE, f"{before} bytes are said to be written, 25 pages were"


def test_requests_stay_on_the_page_grid_and_inside_the_file(tmp_path: Path) -> None:
    """I6, also where the file is an odd number of requests, each an odd number of pages."""
    engine = Recorder()
    size = 3 * PAGE
    with probe_file(tmp_path, engine, nbytes=7 * size, request_bytes=size, memory=MiB) as file:
        file.rate("mixed", depth=4, request_bytes=size, most_bytes=40 * size)
        file.rate("mixed", depth=4, request_bytes=PAGE, most_bytes=40 * size)
        length = file.path.stat().st_size
    assert length == 7 * size
    for request in engine.requests:
        assert request[1] % PAGE == 0 and request[1] + request[2] <= length, request


def test_no_more_requests_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    """The engine sees at most `depth` unfinished requests, each on a buffer that no other one has."""
    most, busy = 0, set()

    class Counting(PosixEngine):
        def submit_read(self, extent: Extent, view: memoryview) -> Future[int]:
            nonlocal most
            at = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
            assert at not in busy, "a buffer that is in use"
            busy.add(at)
            most = max(most, len(busy))
            future = super().submit_read(extent, view)
            future.add_done_callback(lambda _: busy.discard(at))
            return future

    with Counting() as engine, probe_file(tmp_path, engine, nbytes=2 * MiB, request_bytes=64 * KiB, memory=MiB) as file:
        for depth in (1, 3):
            most = 0
            file.rate("read", depth=depth, request_bytes=64 * KiB, most_bytes=2 * MiB)
            assert most <= depth, f"{most} in flight, asked for {depth}"


def test_of_equal_depths_the_deepest_is_taken() -> None:
    """On a virtual disk a shallow queue can be the faster one; within 2 % the deeper one is taken."""
    assert best_depth([rates(1, 100), rates(2, 120), rates(8, 119)]).queue_depth == 8
    assert best_depth([rates(1, 100), rates(2, 120), rates(8, 110)]).queue_depth == 2


def test_burst_is_the_best_window_and_sustained_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive whose fast cache runs out: twelve windows, of which the first ones are fast and the last ones steady."""
    speeds = [9.0, 10.0, 9.0, 8.0, 5.0, 4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    found, ends = windows_of(speeds, tmp_path, monkeypatch)
    assert (found.burst.per_s, found.sustained.per_s) == pytest.approx((10.0 * PAGE, 2.0 * PAGE))
    assert found.steady and len(ends) == 8 * 16, f"{len(ends) / 16} windows: the last two of eight agree"
    assert "write: 512 KiB" in found.burst.how, found.burst.how


def test_a_drive_that_never_settles_stops_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve windows that go up and down: all of them are taken, and the series does not call itself steady."""
    found, ends = windows_of([1.0, 2.0] * 6, tmp_path, monkeypatch)
    assert (len(ends), found.steady) == (12 * 16, False)


def test_bytes_written_are_bounded_and_said(tmp_path: Path) -> None:
    """Drives wear out: a measurement writes about what it may, counted by the requests."""
    engine = Recorder()
    found = measure_drive(tmp_path, engine, memory=MiB, request_bytes=PAGE, most_written_bytes=8 * MiB)
    written = sum(nbytes for verb, _, nbytes in engine.requests if verb == "W")
    assert found.written_bytes == written
    assert written <= 8 * MiB, f"{written} bytes written of at most {8 * MiB}"
    assert {r.queue_depth for r in found.by_depth} == {1, 2, 4, 8}


@pytest.mark.parametrize("buffered", [True, False])
def test_a_figure_of_the_page_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: bool) -> None:
    """IO-25: on a file of 64 MiB, twice; asked for or because the file system refuses, the label is the same."""
    if not buffered:
        refuse_direct(monkeypatch)
    for _ in range(2):
        with PosixEngine(direct=False) as engine:
            found = measure_drive(
                tmp_path,
                engine,
                memory=8 * MiB,
                request_bytes=256 * KiB,
                depths=(8,),
                most_written_bytes=64 * MiB,
                buffered=buffered,
            )
        for rate in (found.read.burst, found.write.sustained, found.mixed.sustained, found.by_depth[0].read):
            assert "cached: page cache" in rate.how, rate.how


def test_a_figure_above_the_link_says_so(tmp_path: Path) -> None:
    """IO-25: nothing comes from a drive faster than its link carries it."""
    for link, said in ((1.0, True), (1e15, False), (0.0, False)):
        found = quick_rates(tmp_path, Recorder(), memory=MiB, disk_bytes=MiB, link_bytes_per_s=link)
        assert ("invalid: above the link" in found.read.how) == said, found.read.how


def test_a_drive_that_is_full_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = Recorder()
    with pytest.raises(DiskFullError, match=r"needs a file of \d+ bytes, \d+ bytes are free. Fix: make room"):
        with probe_file(tmp_path, engine, nbytes=1 << 60, request_bytes=PAGE, memory=MiB):
            pass
    assert (engine.requests, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("error", [IOFailedError("the drive is gone"), KeyboardInterrupt()])
def test_the_file_is_gone_after_an_error_and_after_control_c(tmp_path: Path, error: BaseException) -> None:
    for fail_at in (1, 20):  # while the file is filled, and later
        with pytest.raises(type(error)):
            quick_rates(tmp_path, Recorder(fail_at, error), memory=MiB, disk_bytes=MiB)
        assert list(tmp_path.iterdir()) == []


def test_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    """A probe file is locked as long as its process lives; the kernel drops the lock with it."""
    left, used, other = (tmp_path / name for name in (".measure-1", ".measure-2", "measure-3"))
    for file in (left, used, other):
        file.write_bytes(b"x")
    with used.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == [used, other]


def test_two_measurements_at_once_in_one_process_are_refused(tmp_path: Path) -> None:
    with probe_file(tmp_path, Recorder(), nbytes=MiB, request_bytes=PAGE, memory=MiB):
        with pytest.raises(PlaceError, match="measures there already"):
            with probe_file(tmp_path, Recorder(), nbytes=MiB, request_bytes=PAGE, memory=MiB):
                pass


def test_what_a_busy_drive_takes_from_computing_is_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0 (a drive that needs no processor) to 1; a failing drive is an error and not a share."""
    with PosixEngine() as engine:
        monkeypatch.setattr("tiering.measure.STEAL_BYTES", 8 * MiB)
        found = io_steals(tmp_path, engine, width=64, tokens=64, memory=8 * MiB, depth=2)
    assert 0 <= found <= 1
    assert list(tmp_path.iterdir()) == []
    slow: Callable[..., float] = iter([0.0, 1.0, 4.0]).__next__
    monkeypatch.setattr("tiering.measure.busy_seconds", lambda *shape, for_s=0.0: slow())
    assert io_steals(tmp_path, Recorder(), width=64, tokens=64, memory=8 * MiB, depth=2) == 0.75


def test_the_rate_of_updates_counts_the_checksums_of_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: in a run they are made right after an update, of the weight and both moments."""
    summed: list[int] = []
    monkeypatch.setattr("tiering.measure_memory.checksum", lambda data: summed.append(len(data)))
    monkeypatch.setattr("tiering.measure_memory.REPEATS", 1)
    monkeypatch.setattr("tiering.measure_memory.COPY_BYTES", 1)
    assert update_rate(MiB).per_s > 0
    assert sum(summed) == 3 * 4 * MiB and max(summed) == GRAIN_BYTES, f"{sum(summed)} bytes by up to {max(summed)}"


def test_copies_on_the_host_are_measured_and_those_to_a_device_only_where_there_is_one() -> None:
    copied = host_copy_rate(MiB)
    assert copied.source == "measured" and copied.per_s > 1e6 and "pageable" in copied.how
    if not torch.cuda.is_available():
        assert first_device() is None
    assert device_copy_rates(None, MiB) == {}


def test_the_rates_of_any_device_are_measured_in_the_same_way() -> None:
    """P5: a CPU stands for the device; each rate says what was timed, and a plan takes all of them."""
    found = quick_device_rates(torch.device("cpu"), 64, 64, 8 * MiB)
    hardware = found.beside(assumed_hardware())
    for rate, what in ((hardware.compute, "matmul"), (hardware.h2d, "h2d copy"), (hardware.d2h, "d2h copy")):
        assert rate is not None and rate.per_s > 1e5 and rate.source == "measured" and what in rate.how, rate
    assert hardware.update_beside_compute
    there = hardware.device_update
    assert there is not None and there.per_s > 1e5 and "AdamW" in there.how, there
    assert hardware.read == assumed_hardware().read
    ways = device_copy_rates(torch.device("cpu"), MiB)
    assert ways.keys() == {f"{way}_{kind}" for way in ("h2d", "d2h", "both") for kind in ("pinned", "pageable")}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_to_a_device_have_a_rate_by_direction_and_kind() -> None:
    device = first_device()
    assert device is not None
    found = device_copy_rates(device, 64 * MiB)
    ways = ("h2d", "d2h", "both")
    assert found.keys() == {f"{way}_{kind}" for way in ways for kind in ("pinned", "pageable")}
    assert measure_memory.compute_rate(256, 256, device).per_s > 1e6
