"""What was measured comes back as it was written, and a file that cannot be right is refused by the name of its key.

Scope: `tiering/hardware_file.py`.
Not here: measuring (`test_measure.py`), the command (`test_benchmarks.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RunFile

from megatrain.config import load_run
from megatrain.fit import refuse_early
from tiering.drive import DriveFacts
from tiering.hardware import Rate
from tiering.hardware_file import (
    ByteRate,
    DeviceEntry,
    DriveEntry,
    FlopRate,
    HardwareFile,
    HardwareFileError,
    HostEntry,
    dump,
    load,
    refuse_target,
)
from tiering.measure_disk import DriveRates, Series


def rate(per_s: float, how: str = "timed by hand") -> Rate:
    return Rate(per_s=per_s, source="measured", how=how, date="2025-01-31")


def series(per_s: float) -> Series:
    return Series(burst=rate(2 * per_s), sustained=rate(per_s), steady=True)


def drive(path: str, read: float, write: float, mixed: float) -> DriveEntry:
    facts = DriveFacts(
        mount_point="/", fs_type="ext4", devices=("nvme0n1",), link_bytes_per_s=4e9, capacity_bytes=1 << 40
    )
    rates = DriveRates(
        queue_depth=4,
        request_bytes=8 << 20,
        by_depth=(),
        read=series(read),
        write=series(write),
        mixed=series(mixed),
        written_bytes=1 << 30,
    )
    return DriveEntry.of(Path(path), facts, rates)


def machine(*, drives: int = 1, gpu: bool = False) -> HardwareFile:
    some = ByteRate.of(rate(2e10))
    host = HostEntry(
        memory_bytes=1 << 34,
        limit="the machine's RAM",
        cpu_cores=8,
        torch_version="2.13",
        torch_threads=4,
        compute=FlopRate.of(rate(1e11)),
        update=some,
        copy_rate=some,
        io_steals=0.25,
    )
    device = DeviceEntry(
        name="GPU",
        memory_bytes=1 << 35,
        compute=FlopRate.of(rate(5e13)),
        h2d_pinned=some,
        d2h_pinned=ByteRate.of(rate(1e10)),
    )
    entries = tuple(drive(f"/mnt/{n}", 3e9 + n, 2e9 + n, 2.5e9) for n in range(drives))
    return HardwareFile(host=host, device=device if gpu else None, drives=entries)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A hardware file on disk, with dotted keys changed; the value `...` removes a key."""

    def write(changes: dict[str, Any]) -> Path:
        tree = json.loads(machine(gpu=True).model_dump_json())
        for dotted, value in changes.items():
            *places, leaf = dotted.split(".")
            node = tree
            for place in places:
                node = node[int(place)] if place.isdigit() else node[place]
            if value is ...:
                del node[leaf]
            else:
                node[leaf] = value
        path = tmp_path / "hardware.json"
        path.write_text(json.dumps(tree))
        return path

    return write


@pytest.mark.parametrize("gpu", [False, True])
def test_what_was_written_is_read_back(tmp_path: Path, gpu: bool) -> None:
    path, file = tmp_path / "hardware.json", machine(drives=2, gpu=gpu)
    dump(file, path)
    dump(file, path)  # over itself
    assert load(path) == file
    assert [p.name for p in tmp_path.iterdir()] == ["hardware.json"]


def test_a_plan_reads_the_file_without_torch(tmp_path: Path) -> None:
    """Planning works where nothing but the pure half and pydantic is installed."""
    path = tmp_path / "hardware.json"
    dump(machine(), path)
    code = (
        "import sys; from pathlib import Path; from tiering.hardware_file import load; "
        f"print(load(Path({str(path)!r})).hardware().read.per_s, *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    read, *modules = done.stdout.split()
    assert float(read) == 3e9
    heavy = {"torch", "numpy", "zarr", "psutil"} & set(modules)
    assert not heavy, f"reading a hardware file brings {heavy} with it"


def test_every_rate_has_a_value_a_unit_a_source_a_reason_and_a_date() -> None:
    """Style rule 9, also for who reads the file without this program."""

    def entries(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, dict) and "value" in node:
            return [node]
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return [entry for child in children for entry in entries(child)]

    found = entries(json.loads(machine(gpu=True).model_dump_json()))
    assert len(found) == 3 + 3 + 7, found
    for entry in found:
        assert entry["unit"] in ("B/s", "FLOP/s") and entry["how"], entry
        assert entry["source"] == ("measured" if entry["date"] else "derived"), entry


def test_the_planner_gets_sustained_rates_of_all_drives_together() -> None:
    """Two drives: their rates add up, by derivation; bursts are in the file and not in the plan."""
    hardware = machine(drives=2).hardware()
    assert hardware.read.per_s == 6e9 + 1 and hardware.write.per_s == 4e9 + 1
    assert hardware.mixed is not None and hardware.mixed.per_s == 5e9
    assert (hardware.read.source, machine().hardware().read.source) == ("derived", "measured")
    assert (hardware.queue_depth, hardware.io_steals) == (8, 0.25)
    assert hardware.compute.per_s == 1e11 and not hardware.update_beside_compute and hardware.h2d is None


def test_a_gpu_computes_where_it_is_asked_to() -> None:
    hardware = machine(gpu=True).hardware(on_device=True)
    assert hardware.compute.per_s == 5e13 and hardware.update_beside_compute
    assert hardware.h2d is not None and hardware.h2d.per_s == 2e10
    assert hardware.d2h is not None and hardware.d2h.per_s == 1e10
    assert machine(gpu=True).hardware().compute.per_s == 1e11
    assert hardware.device_update is None, "a file that was made before there was such a key"
    file = machine(gpu=True)
    assert file.device is not None
    device = file.device.model_copy(update={"update": ByteRate.of(rate(5e11))})
    newer = HardwareFile.model_validate_json(file.model_copy(update={"device": device}).model_dump_json())
    assert newer.hardware(on_device=True).device_update == rate(5e11)
    assert newer.hardware().device_update is None
    with pytest.raises(HardwareFileError, match="knows no GPU"):
        machine().hardware(on_device=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hots": 1}, r"`hots`: no such key; did you mean `host`\?"),
        ({"host.updte": 1}, r"`host.updte`: no such key; did you mean `update`\?"),
        ({"drives.0.raed": 1}, r"`drives.0.raed`: no such key; did you mean `read`\?"),
        ({"drives.0.read.valu": 1}, r"`drives.0.read.valu`: no such key; did you mean `value`\?"),
        ({"device.h2d_pined": 1}, r"`device.h2d_pined`: no such key; did you mean `h2d_pinned`\?"),
        ({"host.compute": ...}, "`host.compute`: missing"),
        ({"drives": []}, "`drives`: .*at least 1"),
        ({"drives.0.read.value": 0}, "`drives.0.read.value`: .*greater than 0, got 0"),
        ({"drives.0.read.value": -3e9}, "`drives.0.read.value`: .*greater than 0"),
        ({"drives.0.read.value": float("inf")}, "`drives.0.read.value`: .*finite"),
        ({"drives.0.read.value": float("nan")}, "`drives.0.read.value`: "),
        ({"drives.0.read.value": "3e9"}, "`drives.0.read.value`: .*number"),
        ({"drives.0.read.unit": "GB/s"}, "`drives.0.read.unit`: .*'B/s'"),
        ({"host.compute.source": "hearsay"}, "`host.compute.source`: .*measured"),
        ({"host.compute.how": ""}, "`host.compute.how`: "),
        ({"host.compute.date": ""}, "`host.compute`: .*needs the date"),
        ({"host.compute.date": "May"}, "`host.compute.date`: "),
        ({"host.memory_bytes": 0}, "`host.memory_bytes`: .*greater than 0"),
        ({"host.io_steals": 1.5}, "`host.io_steals`: "),
        ({"version": 2}, "version 2 of the file; this program reads 1"),
        ({"version": ...}, "version missing of the file"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_by_its_key(
    written: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    path = written(changes)
    with pytest.raises(HardwareFileError, match=rf"(?s)hardware\.json.*{said}.*Fix: measure again") as refused:
        load(path)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "one JSON object"),
        (b"\xff", "cannot be read"),
        (None, "no such"),
    ],
)
def test_what_is_no_hardware_file_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "hardware.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HardwareFileError, match=f"{path}.*{said}.*Fix: "):
        load(path)


def test_a_place_that_cannot_take_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before anything is measured; nothing is made."""
    for path, said in ((tmp_path / "none" / "hardware.json", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(HardwareFileError, match=f"{said}.*Fix: "):
            refuse_target(path)
        with pytest.raises(HardwareFileError, match=said):
            dump(machine(), path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(HardwareFileError, match="not writable"):
        dump(machine(), tmp_path / "hardware.json")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hardware.json"
    dump(machine(), path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HardwareFileError, match="No space left"):
        dump(machine(drives=2), path)
    assert load(path) == machine()
    assert [p.name for p in tmp_path.iterdir()] == ["hardware.json"]


def test_a_run_is_planned_with_the_rates_of_its_hardware_file(run_file: RunFile, tmp_path: Path) -> None:
    """P5: rates that `megatrain measure` has kept are used as they are, and a file that is none is refused early."""
    from megatrain.prepare import prepare  # here: it takes seconds to import

    kept = tmp_path / "hardware.json"
    dump(machine(), kept)
    run = load_run(run_file({"tiers.hardware": str(kept)}), ())
    refuse_early(run)
    assert prepare(run).hardware == load(kept).hardware()
    kept.write_text("{")
    with pytest.raises(HardwareFileError, match=str(kept)):
        refuse_early(run)
