"""Parts: a name finds its figures, every figure says where it comes from, and a list of drives reads as it is written.

Scope: GPUs, drives, the host's memory, `--nvme`.
Not here: what a plan makes of them.
"""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.catalog import parts
from megatrain.catalog.part_tables import DRIVES, GPUS, MEMORY_GB_PER_S
from megatrain.catalog.parts import assumed_update, burst_write, find_drive, find_gpu, parse_drives
from megatrain.errors import UserError
from tiering.hardware import all_drives

NO_TF32 = {"t4", "v100", "v100-32gb", "rtx2080ti", "rtx3060-12gb", "rtxpro6000", "mi210", "mi300x"}
"""Older than the format, with a sheet that leaves it out, or AMD's."""


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_says_that_it_is_assumed_and_from_what(name: str) -> None:
    """Rule 9. Its memory is faster than its link, and its rates are below those of the sheet."""
    gpu = find_gpu(name)
    assert gpu.name == name
    for rate in (gpu.compute, gpu.bandwidth, gpu.h2d, gpu.d2h):
        assert rate.source == "assumed" and rate.how.startswith("manufacturer's data sheet"), rate
        assert "% of it assumed" in rate.how, rate
    assert 10 * 2**30 <= gpu.memory_bytes <= 192 * 2**30
    assert 8e12 * 0.5 < gpu.compute.per_s < GPUS[name].fp32 * 1e12
    assert gpu.h2d.per_s < gpu.bandwidth.per_s < GPUS[name].bandwidth * 1e9
    if gpu.tf32 is not None:
        assert "% of it assumed" in gpu.tf32.how and gpu.tf32.per_s < GPUS[name].tf32 * 1e12, gpu.tf32
        assert gpu.tf32.per_s >= gpu.compute.per_s, f"TF32 is no slower than FP32: {gpu.tf32} {gpu.compute}"
    assert (gpu.tf32 is None) == (name in NO_TF32), name


@pytest.mark.parametrize("name", DRIVES)
def test_every_drive_says_that_it_is_assumed_and_from_what(name: str) -> None:
    """Rule 9. A plan reckons with the rate that lasts, which is no higher than that of the first seconds."""
    drive = find_drive(name)
    assert drive.name == name
    for rate in (drive.read, drive.write, burst_write(name)):
        assert rate.source == "assumed" and rate.how.startswith("manufacturer's data sheet"), rate
    assert 0 < drive.write.per_s <= burst_write(name).per_s <= drive.read.per_s
    assert bool(drive.capacity_bytes) == bool(drive.endurance_bytes) == (not name.startswith("generic"))
    if drive.capacity_bytes:
        assert drive.endurance_bytes >= 400 * drive.capacity_bytes, f"{name} may be written fewer than 400 times over"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx_3060", "rtx3060-12gb"),
        ("A100 80GB", "a100-80gb"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("v100", "v100"),
        ("gh200", "gh200-96gb"),
    ],
)
def test_a_gpu_is_found_however_it_is_written(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a100", "can be several. Fix: one of a100-40gb, a100-80gb"),
        ("rtx4099", "is not known. Fix: one of .*rtx4090"),
        ("rtx5070", "is not known"),
        ("l40", "is not known"),
        ("", "is not known"),
    ],
)
def test_a_gpu_that_is_not_one_is_refused_with_the_nearest_names(text: str, message: str) -> None:
    """A 5070 is no 5070 Ti: nothing is taken for something near it."""
    with pytest.raises(UserError, match=message):
        find_gpu(text)


def test_a_link_gives_its_lanes_times_its_generation() -> None:
    """PCIe 4 x16: 31.5 GB/s each way, of which 80 % are assumed; half the lanes, half the rate."""
    wide, narrow = find_gpu("rtx4090").h2d, find_gpu("rtx4060ti-16gb").h2d
    assert wide.per_s == pytest.approx(25.2e9, rel=0.001)
    assert narrow.per_s == pytest.approx(wide.per_s / 2)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("4x(7.0,6.0)", [(7.0, 6.0)] * 4),
        ("(7.0,6.0)", [(7.0, 6.0)]),
        ("7.0,6.0", [(7.0, 6.0)]),
        (" 2 x ( 7 , 6 ) + 1x(3.5,3) ", [(7.0, 6.0), (7.0, 6.0), (3.5, 3.0)]),
        ("2x micron-7450-3.84tb", [(6.8, 5.3)] * 2),
        ("Optane P5800X+(3,2)", [(7.2, 6.2), (3.0, 2.0)]),
        ("samsung-990-pro-4tb", [(7.45, 6.9 * 0.25)]),
    ],
)
def test_a_list_of_drives_reads_as_it_is_written(text: str, rates: list[tuple[float, float]]) -> None:
    drives = parse_drives(text)
    assert [drive.read.per_s / 1e9 for drive in drives] == pytest.approx([read for read, _ in rates])
    assert [drive.write.per_s / 1e9 for drive in drives] == pytest.approx([write for _, write in rates])
    read, write, _ = all_drives(drives)
    assert read.per_s == pytest.approx(1e9 * sum(pair[0] for pair in rates))
    assert write.source == "assumed"


def test_endurance_and_capacity_may_follow_the_rates() -> None:
    drives = parse_drives("4x(7.0,6.0,1200TBW,2TB)+(7,6,1.2PBW)+(7,6,500GB)")
    told = [(drive.endurance_bytes / 1e12, drive.capacity_bytes / 1e12) for drive in drives]
    assert told == [(1200, 2)] * 4 + [(1200, 0), (0, 0.5)]


@pytest.mark.parametrize(
    "text",
    ["", "+", "(7)", "7.0", "0x(7,6)", "9999x(7,6)", "(7,-6)", "(7,nan)", "(7,inf)", "(7,6", "(a,b)", "(7,6,5)",
     "(7,6,0TBW)", "(7,6,TB)", "4x(7.0;6.0)", "4x", "no-such-drive", "(7,6)+", "samsung-990-pro"],
)  # fmt: skip
def test_what_is_no_list_of_drives_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=re.escape("4x(7.0,6.0)")) as caught:
        parse_drives(text)
    assert repr(text) in str(caught.value)


@given(st.text(alphabet="0123456789.,()+x TBWtb-nvmea", max_size=24))
def test_any_text_is_a_list_of_drives_or_a_clear_refusal(text: str) -> None:
    try:
        drives = parse_drives(text)
    except UserError:
        return
    assert drives and all(drive.read.per_s > 0 and drive.write.per_s > 0 for drive in drives)


def test_an_update_is_bound_by_memory_or_by_cores() -> None:
    """28 bytes are moved for 16 that count; two cores do not use what twelve channels give."""
    assert assumed_update("ddr5-2ch").per_s == pytest.approx(70e9 * 16 / 28)
    assert assumed_update("DDR5 12ch", cores=2).per_s < assumed_update("ddr5-12ch").per_s
    assert all(assumed_update(kind).source == "assumed" for kind in MEMORY_GB_PER_S)
    with pytest.raises(UserError, match="ddr5-2ch"):
        assumed_update("sdram")


def test_sums_in_the_documentation_come_out_as_written() -> None:
    result = doctest.testmod(parts)
    assert result.attempted and not result.failed, result
