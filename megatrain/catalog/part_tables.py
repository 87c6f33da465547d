"""GPUs, drives and memory as their data sheets describe them.

Scope: data alone, in the units of data sheets. Figures that the sheet leaves out are 0.
Not here: rates for the planner, which are less (`parts.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSheet:
    """memory: GiB. fp32: TFLOP/s of the plain FP32 units, no tensor cores, no sparsity. bandwidth: GB/s of its memory.
    tf32: TFLOP/s of its tensor cores in TF32, no sparsity (0 too where torch does not take them unless the environment
    says so: AMD).

    pcie, lanes: generation and width of its link. link: GB/s each way where it is none of PCIe's.
    """

    memory: float
    fp32: float
    bandwidth: float
    tf32: float = 0.0
    pcie: int = 4
    lanes: int = 16
    link: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSheet:
    """read, burst: GB/s, sequential. sustained: GB/s written once the fast part of the flash is full. tbw: terabytes
    that may be written in its life. capacity: TB.
    """

    read: float
    burst: float
    sustained: float = 0.0
    tbw: float = 0.0
    capacity: float = 0.0


GPUS: dict[str, GpuSheet] = {
    "t4": GpuSheet(memory=16, fp32=8.1, bandwidth=320, pcie=3),
    "v100": GpuSheet(memory=16, fp32=15.7, bandwidth=900, pcie=3),
    "v100-32gb": GpuSheet(memory=32, fp32=15.7, bandwidth=900, pcie=3),
    "rtx2080ti": GpuSheet(memory=11, fp32=13.4, bandwidth=616, pcie=3),
    "rtx3060-12gb": GpuSheet(memory=12, fp32=12.7, bandwidth=360),
    "rtx3080-10gb": GpuSheet(memory=10, fp32=29.8, bandwidth=760, tf32=29.8),
    "rtx3090": GpuSheet(memory=24, fp32=35.6, bandwidth=936, tf32=35.6),
    "rtx4060ti-16gb": GpuSheet(memory=16, fp32=22.1, bandwidth=288, tf32=22.1, lanes=8),
    "rtx4070": GpuSheet(memory=12, fp32=29.1, bandwidth=504, tf32=29.1),
    "rtx4080": GpuSheet(memory=16, fp32=48.7, bandwidth=717, tf32=48.7),
    "rtx4090": GpuSheet(memory=24, fp32=82.6, bandwidth=1008, tf32=82.6),
    "rtx5070ti": GpuSheet(memory=16, fp32=43.9, bandwidth=896, tf32=43.9, pcie=5),
    "rtx5080": GpuSheet(memory=16, fp32=56.3, bandwidth=960, tf32=56.3, pcie=5),
    "rtx5090": GpuSheet(memory=32, fp32=104.8, bandwidth=1792, tf32=104.8, pcie=5),
    "rtxa6000": GpuSheet(memory=48, fp32=38.7, bandwidth=768, tf32=77.4),
    "rtx6000-ada": GpuSheet(memory=48, fp32=91.1, bandwidth=960, tf32=182.1),
    "rtxpro6000": GpuSheet(memory=96, fp32=125.0, bandwidth=1792, pcie=5),
    "a10": GpuSheet(memory=24, fp32=31.2, bandwidth=600, tf32=62.5),
    "a40": GpuSheet(memory=48, fp32=37.4, bandwidth=696, tf32=74.8),
    "l4": GpuSheet(memory=24, fp32=30.3, bandwidth=300, tf32=60.0),
    "l40s": GpuSheet(memory=48, fp32=91.6, bandwidth=864, tf32=183.0),
    "a100-40gb": GpuSheet(memory=40, fp32=19.5, bandwidth=1555, tf32=156.0),
    "a100-80gb": GpuSheet(memory=80, fp32=19.5, bandwidth=2039, tf32=156.0),
    "h100-pcie": GpuSheet(memory=80, fp32=51.0, bandwidth=2000, tf32=378.0, pcie=5),
    "h100-sxm": GpuSheet(memory=80, fp32=67.0, bandwidth=3350, tf32=494.5, pcie=5),
    "h200": GpuSheet(memory=140, fp32=67.0, bandwidth=4800, tf32=494.5, pcie=5),
    "b200": GpuSheet(memory=179, fp32=75.0, bandwidth=8000, tf32=1125.0, pcie=5),
    "gh200-96gb": GpuSheet(memory=96, fp32=67.0, bandwidth=4000, tf32=494.5, link=450),
    "mi210": GpuSheet(memory=64, fp32=22.6, bandwidth=1638),
    "mi300x": GpuSheet(memory=192, fp32=163.4, bandwidth=5300, pcie=5),
}

DRIVES: dict[str, DriveSheet] = {
    # For desktops: cells of three bits, a part of them used as a fast cache.
    "samsung-970-evo-plus-2tb": DriveSheet(read=3.5, burst=3.3, tbw=1200, capacity=2),
    "samsung-980-pro-1tb": DriveSheet(read=7.0, burst=5.0, sustained=2.0, tbw=600, capacity=1),
    "samsung-980-pro-2tb": DriveSheet(read=7.0, burst=5.1, sustained=2.0, tbw=1200, capacity=2),
    "samsung-990-pro-1tb": DriveSheet(read=7.45, burst=6.9, tbw=600, capacity=1),
    "samsung-990-pro-2tb": DriveSheet(read=7.45, burst=6.9, tbw=1200, capacity=2),
    "samsung-990-pro-4tb": DriveSheet(read=7.45, burst=6.9, tbw=2400, capacity=4),
    "samsung-9100-pro-2tb": DriveSheet(read=14.7, burst=13.4, tbw=1200, capacity=2),
    "samsung-9100-pro-4tb": DriveSheet(read=14.8, burst=13.4, tbw=2400, capacity=4),
    "wd-sn850x-2tb": DriveSheet(read=7.3, burst=6.6, tbw=1200, capacity=2),
    "wd-sn850x-4tb": DriveSheet(read=7.3, burst=6.6, tbw=2400, capacity=4),
    "crucial-t705-2tb": DriveSheet(read=14.5, burst=12.7, tbw=1200, capacity=2),
    "crucial-t705-4tb": DriveSheet(read=14.1, burst=12.6, tbw=2400, capacity=4),
    "solidigm-p44-pro-2tb": DriveSheet(read=7.0, burst=6.5, tbw=1200, capacity=2),
    "kingston-kc3000-2tb": DriveSheet(read=7.0, burst=7.0, tbw=1600, capacity=2),
    # For servers: rates that last. Endurance is one drive write a day for five years, of the Optane drive a hundred.
    "samsung-pm9a3-3.84tb": DriveSheet(read=6.8, burst=4.0, sustained=4.0, tbw=7008, capacity=3.84),
    "micron-7450-3.84tb": DriveSheet(read=6.8, burst=5.3, sustained=5.3, tbw=7008, capacity=3.84),
    "micron-7450-7.68tb": DriveSheet(read=6.8, burst=5.6, sustained=5.6, tbw=14016, capacity=7.68),
    "solidigm-p5520-7.68tb": DriveSheet(read=7.1, burst=4.2, sustained=4.2, tbw=14016, capacity=7.68),
    "kioxia-cm7-7.68tb": DriveSheet(read=14.0, burst=6.75, sustained=6.75, tbw=14016, capacity=7.68),
    "optane-p5800x-1.6tb": DriveSheet(read=7.2, burst=6.2, sustained=6.2, tbw=292000, capacity=1.6),
    # Any drive of its kind.
    "generic-gen3": DriveSheet(read=3.4, burst=3.0),
    "generic-gen4": DriveSheet(read=7.0, burst=6.0),
    "generic-gen5": DriveSheet(read=14.0, burst=12.0),
    "generic-gen4-server": DriveSheet(read=6.8, burst=4.0, sustained=4.0),
    "generic-gen5-server": DriveSheet(read=14.0, burst=6.5, sustained=6.5),
}

MEMORY_GB_PER_S: dict[str, float] = {
    "ddr4-2ch": 40.0,
    "ddr4-8ch": 160.0,
    "ddr5-2ch": 70.0,
    "ddr5-8ch": 250.0,
    "ddr5-12ch": 360.0,
}
"""What the host's memory gives to all cores, about 80 % of modules of 3200 (DDR4), 5600 (two channels of DDR5) and 4800
MT/s (more of them)."""

PCIE_LANE_GB_PER_S: dict[int, float] = {3: 0.985, 4: 1.969, 5: 3.938}
"""Each way, after the line code, before packets."""
