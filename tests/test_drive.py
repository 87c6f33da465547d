"""What the system tells about a drive is read as it stands, and what it does not tell is empty.

Scope: `tiering/drive.py` on made-up trees of `/sys` and `/proc`.
Not here: rates of a drive (`test_measure.py`).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tiering.drive import DriveFacts, drive_facts

NVME = "devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0/nvme0n1"


@dataclass
class Machine:
    """A tree of `/sys` and `/proc` below a folder."""

    root: Path

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / target)

    def disk(self, at: str, *, gib: int, model: str = "", block: int = 512, rotational: int = 0) -> None:
        self.write(f"sys/{at}/size", str(gib << 21))
        self.write(f"sys/{at}/queue/logical_block_size", str(block))
        self.write(f"sys/{at}/queue/rotational", str(rotational))
        if model:
            self.write(f"sys/{at}/device/model", model)

    def mount(self, number: str, fs_type: str, source: str, point: str = "/") -> None:
        table = self.root / "proc/self/mountinfo"
        before = table.read_text() if table.exists() else ""
        self.write(
            "proc/self/mountinfo", f"{before}7 1 {number} / {point} rw,relatime shared:1 - {fs_type} {source} rw"
        )

    def facts(self, path: str = "/data/run") -> DriveFacts:
        return drive_facts(Path(path), sys_root=self.root / "sys", proc_root=self.root / "proc")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_nvme_drive_is_known_by_model_link_and_capacity(machine: Machine) -> None:
    """Of a partition the whole disk counts; of the links on the way the narrowest."""
    machine.disk(NVME, gib=1024, model="ACME 990", block=4096)
    machine.write(f"sys/{NVME}/nvme0n1p2/partition", "2")
    machine.link("sys/dev/block/259:2", f"sys/{NVME}/nvme0n1p2")
    slot = "sys/devices/pci0000:00/0000:00:01.0"
    for folder, speed, width in ((slot, "8.0 GT/s PCIe", 4), (f"{slot}/0000:01:00.0", "16.0 GT/s PCIe", 4)):
        machine.write(f"{folder}/current_link_speed", speed)
        machine.write(f"{folder}/current_link_width", str(width))
    machine.mount("259:9", "ext4", "/dev/other")
    machine.mount("259:2", "xfs", "/dev/nvme0n1p2", "/data")
    found = machine.facts()
    assert found == DriveFacts(
        mount_point="/data",
        fs_type="xfs",
        devices=("nvme0n1",),
        model="ACME 990",
        align_bytes=4096,
        link_bytes_per_s=found.link_bytes_per_s,
        capacity_bytes=1 << 40,
        rotational=False,
    )
    by_hand = 8e9 * 4 / 8 * 128 / 130
    assert found.link_bytes_per_s == pytest.approx(by_hand), (found.link_bytes_per_s, by_hand)


def test_an_nvme_drive_below_its_subsystem_finds_the_link_of_its_controller(machine: Machine) -> None:
    """A drive with several ports is a virtual device; its controller hangs on PCIe."""
    system = "devices/virtual/nvme-subsystem/nvme-subsys0"
    machine.disk(f"{system}/nvme0n1", gib=1)
    port = "sys/devices/pci0000:00/0000:02:00.0"
    machine.write(f"{port}/current_link_speed", "2.5 GT/s")
    machine.write(f"{port}/current_link_width", "4")
    machine.write(f"{port}/nvme/nvme0/state", "live")
    machine.link(f"sys/{system}/nvme0n1/device/nvme0", "sys/devices/pci0000:00/0000:02:00.0/nvme/nvme0")
    machine.link("sys/dev/block/259:0", f"sys/{system}/nvme0n1")
    machine.mount("259:0", "ext4", "/dev/nvme0n1")
    assert machine.facts().link_bytes_per_s == pytest.approx(1e9), machine.facts()


def test_the_link_of_a_virtual_disk_is_not_believed(machine: Machine) -> None:
    """A virtio disk hangs on a made-up slot, often the slowest that there is."""
    disk = "devices/pci0000:00/0000:00:02.0/virtio1/block/vda"
    machine.disk(disk, gib=256, rotational=1)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/current_link_speed", "2.5 GT/s PCIe")
    machine.write("sys/devices/pci0000:00/0000:00:02.0/current_link_width", "1")
    machine.link("sys/dev/block/254:0", f"sys/{disk}")
    machine.mount("254:0", "ext4", "/dev/vda")
    found = machine.facts()
    assert (found.devices, found.link_bytes_per_s, found.model) == (("vda",), 0, ""), found
    assert (found.capacity_bytes, found.align_bytes, found.rotational) == (256 << 30, 512, True), found


@pytest.mark.parametrize(("fs_type", "source"), [("overlay", "overlay"), ("tmpfs", "none"), ("nfs4", "host:/data")])
def test_a_file_system_without_a_device_says_so(machine: Machine, fs_type: str, source: str) -> None:
    machine.mount("0:40", fs_type, source)
    assert machine.facts() == DriveFacts(mount_point="/", fs_type=fs_type), machine.facts()


def test_stacked_devices_are_the_disks_below_them(machine: Machine) -> None:
    """An encrypted volume on an array of two: both disks, their capacities and links together."""
    for number in (0, 1):
        disk = f"devices/pci0000:00/0000:0{number}:00.0/nvme/nvme{number}/nvme{number}n1"
        machine.disk(disk, gib=512, model="ACME 990")
        machine.write(f"sys/devices/pci0000:00/0000:0{number}:00.0/current_link_speed", "5.0 GT/s PCIe")
        machine.write(f"sys/devices/pci0000:00/0000:0{number}:00.0/current_link_width", "2")
        machine.write(f"sys/{disk}/nvme{number}n1p1/partition", "1")
        machine.link(f"sys/devices/virtual/block/md0/slaves/nvme{number}n1p1", f"sys/{disk}/nvme{number}n1p1")
    machine.disk("devices/virtual/block/md0", gib=1024)
    machine.disk("devices/virtual/block/dm-0", gib=1024)
    machine.link("sys/devices/virtual/block/dm-0/slaves/md0", "sys/devices/virtual/block/md0")
    machine.link("sys/dev/block/252:0", "sys/devices/virtual/block/dm-0")
    machine.mount("252:0", "ext4", "/dev/mapper/data")
    found = machine.facts()
    assert (found.devices, found.model) == (("nvme0n1", "nvme1n1"), "2 x ACME 990"), found
    assert (found.capacity_bytes, found.link_bytes_per_s) == (1 << 40, pytest.approx(2e9)), found


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(machine: Machine) -> None:
    """btrfs shows a device number that no disk has."""
    machine.disk(NVME, gib=1, model="ACME 990")
    machine.link("sys/class/block/nvme0n1", f"sys/{NVME}")
    machine.mount("0:31", "btrfs", "/dev/nvme0n1", "/my\\040data")
    found = machine.facts("/my data/run")
    assert (found.mount_point, found.devices) == ("/my data", ("nvme0n1",)), found


def test_nothing_told_is_no_error(machine: Machine) -> None:
    """No table at all, nonsense in it, and nonsense in the files of a disk."""
    assert machine.facts() == DriveFacts()
    machine.write("proc/self/mountinfo", "nonsense\n1 2 3\n- - -")
    assert machine.facts() == DriveFacts()
    machine.write(f"sys/{NVME}/size", "unknown")
    machine.write("sys/devices/pci0000:00/0000:00:01.0/current_link_speed", "Unknown")
    machine.link("sys/dev/block/259:0", f"sys/{NVME}")
    machine.mount("259:0", "ext4", "/dev/nvme0n1")
    assert machine.facts() == DriveFacts(mount_point="/", fs_type="ext4", devices=("nvme0n1",)), machine.facts()


def test_the_real_tables_can_be_read(tmp_path: Path) -> None:
    assert drive_facts(tmp_path / "not" / "there").mount_point
