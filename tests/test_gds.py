"""The kvikio engine moves memory of a device too, tells cuFile of it, is set from a trial, and says what it moved how.

Scope: `tiering/gds.py`, `tiering/gds_settings.py`, `tiering/gds_trial.py`, `tiering/traffic.py`, against a stand-in
with kvikio's interface; with a GPU and kvikio, for real.
Not here: the contract of engines for host memory (`test_engine.py`), which engine is chosen (`test_choose_engine.py`).
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvikio_stand_in import DeviceBytes, Library, StandIn, install

from megatrain.probes import transfer_with_kvikio
from tiering import gds, gds_trial
from tiering.choose import choose_engine
from tiering.engine import Extent, on_device
from tiering.errors import DamagedStateError, IOFailedError
from tiering.gds import KvikioEngine, probe_device
from tiering.gds_settings import ASSUMED, TRIALS, GdsSettings, best
from tiering.gds_trial import best_settings
from tiering.hardware import Rate
from tiering.hardware_file import KvikioEntry
from tiering.posix import PosixEngine
from tiering.probe_file import ProbeFile

PAGE, MIB = 4096, 1 << 20
CUDA = torch.device("cuda", 0)


def extent(path: Path, nbytes: int, offset: int = 0) -> Extent:
    return Extent(path=path, offset=offset, nbytes=nbytes, block="head/exp_avg")


def new_file(path: Path, nbytes: int) -> Path:
    path.write_bytes(bytes(nbytes))
    return path


@pytest.fixture(params=[True, False], ids=["compat", "gds"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return install(monkeypatch, compat=request.param)


@pytest.fixture
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory only kvikio can see."""
    monkeypatch.setattr(gds, "_to_device", lambda payload, device: DeviceBytes(payload))
    monkeypatch.setattr(gds, "_from_device", lambda there: there.content())


def test_what_is_memory_of_a_device_is_seen_by_its_interface_alone() -> None:
    """I6: tensors of the CPU, arrays and views are host memory."""
    assert on_device(DeviceBytes(bytes(4)))
    for view in (memoryview(bytearray(4)), torch.zeros(4), torch.zeros(4).numpy()):
        assert not on_device(view), view


def test_memory_of_a_device_goes_to_a_file_and_comes_back(library: Library, tmp_path: Path) -> None:
    """I6: many requests at once, each whole, between others of host memory; a plain read of the file agrees."""
    piece, count = 5 * PAGE, 12
    path = new_file(tmp_path / "f", 2 * count * piece)
    parts = [os.urandom(piece) for _ in range(2 * count)]
    views = [DeviceBytes(part) if at % 2 else memoryview(bytearray(part)) for at, part in enumerate(parts)]
    back = [DeviceBytes(bytes(piece)) for _ in parts]
    with KvikioEngine(4) as engine:
        places = [extent(path, piece, at * piece) for at in range(2 * count)]
        written = [engine.submit_write(place, view) for place, view in zip(places, views, strict=True)]
        assert [future.result() for future in written] == [piece] * (2 * count)
        engine.sync([path])
        assert path.read_bytes() == b"".join(parts), "the file holds other bytes than were written"
        read = [engine.submit_read(place, view) for place, view in zip(places, back, strict=True)]
        assert [future.result() for future in read] == [piece] * (2 * count)
        assert [view.content() for view in back] == parts, "other bytes were read than are in the file"
        moved = engine.traffic()
    assert (moved.host_read_bytes, moved.host_write_bytes) == (0, count * piece), moved
    assert (moved.device_read_bytes, moved.device_write_bytes) == (2 * count * piece, count * piece), moved
    path_of = "compat" if StandIn.compat else "gds"
    assert moved.by_path()[path_of] == 3 * count * piece == moved.device_bytes, moved.by_path()


def test_small_requests_are_told_by_the_path_that_they_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P6: with cuFile there, kvikio still moves little of a device's memory through RAM: its own count says so."""
    install(monkeypatch, compat=False)
    path = new_file(tmp_path / "f", 16 * PAGE)
    with KvikioEngine(2) as engine:
        engine.submit_write(extent(path, PAGE), DeviceBytes(bytes(PAGE))).result()
        engine.submit_write(extent(path, 8 * PAGE, 8 * PAGE), DeviceBytes(bytes(8 * PAGE))).result()
    after = engine.traffic()
    assert after.by_path() == {"posix": 0, "gds": 8 * PAGE, "compat": PAGE}, after
    line = after.line(engine.name)
    assert "0.0 MiB by GPUDirect Storage" in line and "\n" not in line, line


def test_a_version_that_does_not_count_is_told_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P6: no path is claimed that nobody saw."""
    del install(monkeypatch).SummaryMonitor
    with KvikioEngine(1) as engine:
        engine.submit_write(extent(new_file(tmp_path / "f", PAGE), PAGE), DeviceBytes(bytes(PAGE))).result()
        moved = engine.traffic()
    assert moved.by_path() == {"posix": 0, "uncounted": PAGE} and "was not counted" in moved.line("kvikio"), moved


def test_a_short_file_is_damage_for_device_memory_too(library: Library, tmp_path: Path) -> None:
    """I6: block, file, offset, bytes wanted and found."""
    path = new_file(tmp_path / "f", 3 * PAGE)
    with KvikioEngine(1) as engine, pytest.raises(DamagedStateError, match="wanted 8192 bytes, found 4096"):
        engine.submit_read(extent(path, 2 * PAGE, 2 * PAGE), DeviceBytes(bytes(2 * PAGE))).result()


def test_an_engine_that_cannot_move_it_refuses_memory_of_a_device(library: Library, tmp_path: Path) -> None:
    """I6: posix, and kvikio where a probe has shown that it fails: with the reason, and the engine goes on."""
    path = new_file(tmp_path / "f", PAGE)
    reason = "no peer-to-peer here"
    for engine in (PosixEngine(1), KvikioEngine(1, device_refusal=reason)):
        with engine:
            for submit in (engine.submit_read, engine.submit_write):
                with pytest.raises(IOFailedError) as raised:
                    submit(extent(path, PAGE), DeviceBytes(bytes(PAGE))).result()
                said = str(raised.value)
                assert f"the {engine.name} engine moves no memory of a device" in said and "Fix:" in said, said
                assert (reason in said) is (engine.name == "kvikio") and engine.device_refusal in said, said
            assert engine.submit_write(extent(path, PAGE), memoryview(bytearray(PAGE))).result() == PAGE
            assert engine.traffic().device_bytes == 0, engine.traffic()
            assert engine.register(DeviceBytes(bytes(4))) == "" or engine.name == "kvikio"


def test_registered_memory_is_told_to_cufile_and_taken_back_before_it_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P6: once each; what was not deregistered is when the engine closes; host memory has nothing to register."""
    library = install(monkeypatch, compat=False)
    first, second = DeviceBytes(bytes(MIB)), DeviceBytes(bytes(MIB))
    with KvikioEngine(1) as engine:
        assert engine.register(memoryview(bytearray(4))) == ""
        assert engine.register(first) == "device memory of 1.0 MiB: registered with cuFile"
        engine.register(second)
        engine.deregister(first)
        engine.deregister(first)
    log = [(what, {gds._address(first): 1, gds._address(second): 2}[address]) for what, address in library.log]
    assert log == [("register", 1), ("register", 2), ("deregister", 1), ("deregister", 2)], log


def test_memory_that_cannot_be_registered_is_told_in_one_line_and_moved_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P6: a window of the bus that is too small is no end of a run."""
    install(monkeypatch, compat=False, refuses="CU_FILE_INVALID_MAPPING_SIZE")
    path, view = new_file(tmp_path / "f", 4 * PAGE), DeviceBytes(os.urandom(4 * PAGE))
    with KvikioEngine(1) as engine:
        line = engine.register(view)
        assert "not registered with cuFile, CU_FILE_INVALID_MAPPING_SIZE" in line and "\n" not in line, line
        engine.deregister(view)
        engine.submit_write(extent(path, 4 * PAGE), view).result()
    assert path.read_bytes() == view.content()
    install(monkeypatch, compat=True)
    with KvikioEngine(1) as engine:
        assert "kvikio is in its compatibility mode" in engine.register(view)


def test_the_settings_are_given_to_kvikio_with_direct_io_for_ram(library: Library) -> None:
    """P2: kvikio's own defaults are one thread, and reads through the page cache."""
    with KvikioEngine(settings=GdsSettings(threads=16, task_bytes=2 * MIB)):
        now = dict(library.settings)
    wanted = {"num_threads": 16, "task_size": 2 * MIB, "auto_direct_io_read": True, "auto_direct_io_write": True}
    assert now == wanted, f"{now} against {wanted}"


def test_open_files_of_kvikio_are_bounded(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks of two slots, two descriptors each, are more than a process may hold open."""
    monkeypatch.setattr(gds, "MAX_OPEN_FILES", 4)
    paths = [new_file(tmp_path / str(number), PAGE) for number in range(30)]
    before = len(os.listdir("/proc/self/fd"))
    with KvikioEngine(3) as engine:
        for done in [engine.submit_read(extent(path, PAGE), memoryview(bytearray(PAGE))) for path in paths]:
            done.result()
        opened = len(os.listdir("/proc/self/fd")) - before
        engine.sync(paths)
    assert opened <= 4 + 3, f"{opened} files are open"
    assert len(os.listdir("/proc/self/fd")) == before, "close left files open"


def rated(settings: GdsSettings, per_s: float) -> GdsSettings:
    return replace(settings, mixed=Rate(per_s=per_s, source="measured", how="by hand", date="2025-01-31"))


def test_of_equal_settings_the_one_with_the_fewest_threads_is_taken() -> None:
    """P6: rates within two percent are equal; a thread more has to gain something."""
    slow, few, many = (GdsSettings(threads=n, task_bytes=MIB) for n in (2, 4, 32))
    assert best([rated(slow, 1e9), rated(many, 2.03e9), rated(few, 2e9)]).threads == 4
    assert best([rated(slow, 1e9), rated(many, 2.2e9), rated(few, 2e9)]).threads == 32
    coarse = replace(few, task_bytes=8 * MIB)
    assert best([rated(few, 2e9), rated(coarse, 2e9)]) == rated(coarse, 2e9)


def test_a_trial_tries_every_pair_on_the_drive_and_takes_the_best(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: each pass runs with the settings that it is to judge; nothing stays on the drive."""
    named = ProbeFile.named

    def faked(self: ProbeFile, what: object, per_s: float, moved: int, depth: int, request_bytes: int) -> Rate:
        rate = named(self, what, per_s, moved, depth, request_bytes)  # type: ignore[arg-type]
        return replace(rate, per_s=1e9 * {4: 1, 8: 2, 16: 4, 32: 3}[library.settings["num_threads"]])

    monkeypatch.setattr(ProbeFile, "named", faked)
    monkeypatch.setattr(gds_trial, "TRIAL_S", 60.0)
    found = best_settings(tmp_path, memory=256 << 10)
    assert (found.threads, found.task_bytes) == (16, 4 * MIB), found
    assert found.mixed is not None and found.mixed.source == "measured" and "kvikio" in found.mixed.how, found
    tried = [(one["num_threads"], one["task_size"]) for one in library.set_log if "num_threads" in one]
    assert tried[-len(TRIALS) :] == [(one.threads, one.task_bytes) for one in TRIALS], tried
    assert list(tmp_path.iterdir()) == []
    kept = KvikioEntry.of(found)
    assert kept is not None and KvikioEntry.model_validate_json(kept.model_dump_json()) == kept
    assert KvikioEntry.of(ASSUMED) is None, "what nobody tried is not kept as measured"


def test_a_trial_ends_in_time_and_within_its_bytes(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: a slow drive costs about two seconds, and at most 512 MiB are written however fast it is."""
    assert gds_trial.FILE_BYTES + len(TRIALS) * gds_trial.PASS_REQUESTS * 8 * MIB * 3 // 7 <= 512 * MIB
    monkeypatch.setattr(gds_trial, "TRIAL_S", 0.0)
    before_s = time.perf_counter()
    found = best_settings(tmp_path, memory=64 << 10)
    tried = [one["num_threads"] for one in library.set_log if "num_threads" in one]
    assert found.threads == TRIALS[0].threads and found.mixed is not None, found
    assert tried[-1] == TRIALS[0].threads, f"the first pair alone fits into no time: {tried}"
    assert time.perf_counter() - before_s < 30


def test_a_kvikio_that_cannot_be_told_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P6: another version's settings are left alone, and nothing is claimed as measured."""
    install(monkeypatch)
    monkeypatch.delitem(sys.modules, "kvikio.defaults")
    assert best_settings(tmp_path, memory=64 << 10) == ASSUMED and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("pretend_device")
def test_a_probe_says_of_ram_and_of_device_memory_whether_they_work(library: Library, tmp_path: Path) -> None:
    """IO-01: a real transfer each, and the path that it took."""
    assert gds.probe(tmp_path) is None
    found = probe_device(tmp_path, CUDA)
    assert not found.refusal and found.path == ("compat" if StandIn.compat else "gds"), found
    wanted = "through a buffer in RAM" if StandIn.compat else "by GPUDirect Storage (nvidia-fs 2.24)"
    assert wanted in found.line(), found.line()
    assert "knows no device of the type mps" in probe_device(tmp_path, torch.device("mps")).refusal
    assert list(tmp_path.iterdir()) == [], "a probe left a file"


@pytest.fixture
def broken_device(monkeypatch: pytest.MonkeyPatch, pretend_device: None) -> Iterator[str]:
    """RAM works, memory of the device does not."""
    why = "cuFile error: GPUDirect Storage not supported"
    real = StandIn.pwrite

    def pwrite(self: StandIn, buf: object, size: int, file_offset: int) -> object:
        if hasattr(buf, "__cuda_array_interface__"):
            raise RuntimeError(f"KvikIO failure at: /src/file_handle.cpp:9: {why}")
        return real(self, buf, size, file_offset)

    monkeypatch.setattr(StandIn, "pwrite", pwrite)
    yield why


def test_an_engine_for_ram_alone_says_why(library: Library, tmp_path: Path, broken_device: str) -> None:
    """IO-01, P6: kvikio is used for what works; the reason for the rest is on the line, and in every refusal."""
    path = new_file(tmp_path / "f", PAGE)
    engine, line = choose_engine("auto", tmp_path, device=CUDA, settings=ASSUMED)
    with engine:
        assert engine.name == "kvikio" and f"device memory: not, {broken_device}" in line and "\n" not in line, line
        assert ASSUMED.line() in line, line
        with pytest.raises(IOFailedError, match=broken_device):
            engine.submit_read(extent(path, PAGE), DeviceBytes(bytes(PAGE))).result()
        assert engine.submit_read(extent(path, PAGE), memoryview(bytearray(PAGE))).result() == PAGE


@pytest.mark.usefixtures("pretend_device")
def test_settings_that_are_known_cost_no_trial(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: those of the hardware file are taken; without them and with bytes to try, a trial is made."""
    known = rated(GdsSettings(threads=3, task_bytes=MIB), 1e9)
    monkeypatch.setattr(gds_trial, "best_settings", lambda path, memory: pytest.fail("a trial was made"))
    engine, line = choose_engine("auto", tmp_path, device=CUDA, settings=known, trial_bytes=MIB)
    engine.close()
    assert library.settings["num_threads"] == 3 and "3 threads, tasks of 1 MiB (1.00 GB/s mixed, measured)" in line
    tried: list[int] = []
    monkeypatch.setattr(gds_trial, "best_settings", lambda path, memory: tried.append(memory) or known)
    choose_engine("auto", tmp_path, trial_bytes=MIB)[0].close()
    choose_engine("auto", tmp_path)[0].close()
    assert tried == [MIB], "one trial where there are bytes for it, none where nothing moves in bulk"


@pytest.mark.usefixtures("pretend_device")
def test_the_doctors_trial_tries_both_memories(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EN-02: RAM, then the device if there is one; and which path its bytes took."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = transfer_with_kvikio(tmp_path)
    assert alone.ok and alone.path == "" and "not tried" in alone.why, alone
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    both = transfer_with_kvikio(tmp_path)
    assert both.ok and both.path in ("gds", "compat") and "device memory:" in both.why, both


@pytest.mark.gpu
def test_memory_of_a_real_device_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    """I6: whatever the path; the bytes are those of the device, and every one is counted."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    reason = gds.probe(tmp_path) or probe_device(tmp_path, CUDA).refusal
    if reason:
        pytest.skip(f"kvikio cannot work here: {reason}")
    nbytes = 8 * MIB
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=CUDA)
    back = torch.zeros_like(sent)
    torch.cuda.synchronize()
    path = new_file(tmp_path / "f", nbytes)
    with KvikioEngine() as engine:
        engine.register(sent)
        cuts = [(lo, lo + MIB) for lo in range(0, nbytes, MIB)]
        for submit, view in ((engine.submit_write, sent), (engine.submit_read, back)):
            for future in [submit(extent(path, hi - lo, lo), view[lo:hi]) for lo, hi in cuts]:
                future.result()
        moved = engine.traffic()
    assert torch.equal(sent, back) and path.read_bytes() == sent.cpu().numpy().tobytes()
    assert sum(moved.by_path().values()) == moved.device_bytes == 2 * nbytes, moved
