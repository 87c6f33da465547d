"""Parts that one can buy, as rates that the planner reckons with: GPUs, drives, the host's memory.

Scope: finding a part by name, reading `--nvme '4x(7.0,6.0)'`, and the shares of data-sheet figures that a run gets;
every rate says that it is assumed, and from what.
Not here: the figures (`part_tables.py`), measured rates (`tiering/measure.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite

from megatrain.catalog.part_tables import DRIVES, GPUS, MEMORY_GB_PER_S, PCIE_LANE_GB_PER_S
from megatrain.errors import UserError
from tiering.hardware import Drive, Rate

GB, TB = 10**9, 10**12
COMPUTE_SHARE = 0.75
"""Assumed: of a GPU's peak in FP32 or TF32, what matrix products of a training step reach."""
BANDWIDTH_SHARE = 0.85
"""Assumed: of a GPU's memory bandwidth, what a copy or an update reaches."""
LINK_SHARE = 0.80
"""Assumed: of a link's rate, what copies of some MiB from pinned memory reach."""
SUSTAINED_SHARE = 0.25
"""Assumed where the sheet gives no sustained figure: what is left of a desktop drive's write rate when its cache is
full."""
UPDATE_SHARE = 16 / 28
"""Derived: an update reads 16 bytes a parameter and writes 12; its rate counts the 16 of its operands."""
CORE_BYTES_PER_S = 8e9
"""Assumed: operand bytes of an update that one core gets through, where memory is not the limit."""
SHEET = "manufacturer's data sheet"
EXAMPLE = "'4x(7.0,6.0)' is four drives of 7.0 GB/s read and 6.0 GB/s write; '2x samsung-990-pro-4tb'; join with +"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """compute: FLOP/s in FP32. tf32: in TF32; None where its sheet gives none. bandwidth: bytes/s of its own memory.
    h2d, d2h: bytes/s of copies, each way alone. update: bytes/s of all operands of an update.
    """

    name: str
    memory_bytes: int
    compute: Rate
    bandwidth: Rate
    h2d: Rate
    d2h: Rate
    update: Rate
    tf32: Rate | None = None


def find_gpu(text: str) -> Gpu:
    """A GPU of the table; publisher, case and separators do not matter. Raises UserError with the nearest names."""
    name = _find(text, GPUS, what="GPU")
    sheet = GPUS[name]
    link = sheet.link or PCIE_LANE_GB_PER_S[sheet.pcie] * sheet.lanes
    kind = "NVLink-C2C" if sheet.link else f"PCIe {sheet.pcie} x{sheet.lanes}"
    copies = _share(link * GB, LINK_SHARE, f"{SHEET}: {kind}, {link:.1f} GB/s")
    bandwidth = _share(sheet.bandwidth * GB, BANDWIDTH_SHARE, f"{SHEET}: {sheet.bandwidth} GB/s")
    update = replace(
        bandwidth,
        per_s=bandwidth.per_s * UPDATE_SHARE,
        how=f"its memory moves {bandwidth.per_s / GB:.0f} GB/s, 28 bytes for 16 updated",
    )
    return Gpu(
        name=name,
        memory_bytes=round(sheet.memory * 2**30),
        compute=_share(sheet.fp32 * 1e12, COMPUTE_SHARE, f"{SHEET}: {sheet.fp32} TFLOP/s in FP32"),
        bandwidth=bandwidth,
        h2d=copies,
        d2h=copies,
        update=update,
        tf32=_share(sheet.tf32 * 1e12, COMPUTE_SHARE, f"{SHEET}: {sheet.tf32} TFLOP/s in TF32") if sheet.tf32 else None,
    )


def find_drive(text: str) -> Drive:
    """A drive of the table, with the rate at which it keeps on writing. Raises UserError with the nearest names."""
    name = _find(text, DRIVES, what="drive")
    sheet = DRIVES[name]
    write = Rate(per_s=sheet.sustained * GB, source="assumed", how=f"{SHEET}: {sheet.sustained} GB/s sustained write")
    if not sheet.sustained:
        write = _share(sheet.burst * GB, SUSTAINED_SHARE, f"{SHEET}: {sheet.burst} GB/s write while its cache lasts")
    return Drive(
        name=name,
        read=Rate(per_s=sheet.read * GB, source="assumed", how=f"{SHEET}: {sheet.read} GB/s read"),
        write=write,
        capacity_bytes=round(sheet.capacity * TB),
        endurance_bytes=round(sheet.tbw * TB),
    )


def burst_write(name: str) -> Rate:
    """The write rate of a drive while its cache lasts. Raises UserError with the nearest names."""
    sheet = DRIVES[_find(name, DRIVES, what="drive")]
    return Rate(per_s=sheet.burst * GB, source="assumed", how=f"{SHEET}: {sheet.burst} GB/s write")


def assumed_update(memory: str = "ddr5-2ch", cores: int | None = None) -> Rate:
    """Bytes/s of all operands of an update on the host's cores. Raises UserError for an unknown kind of memory.

    >>> assumed_update("ddr5-2ch").per_s / 1e9
    40.0
    """
    bandwidth = MEMORY_GB_PER_S[_find(memory, MEMORY_GB_PER_S, what="kind of memory")] * GB
    per_s, how = bandwidth * UPDATE_SHARE, f"{memory}: {bandwidth / GB:.0f} GB/s, 28 bytes moved for 16 updated"
    if cores is not None and cores * CORE_BYTES_PER_S < per_s:
        per_s, how = cores * CORE_BYTES_PER_S, f"{cores} cores of {CORE_BYTES_PER_S / GB:.0f} GB/s"
    return Rate(per_s=per_s, source="assumed", how=how)


def parse_drives(text: str) -> list[Drive]:
    """The drives that `text` lists, one entry a drive. Raises UserError, with an example, for what is no list.

    Each summand: an optional count with `x`, then `(read, write)` in GB/s, or a name of the table. Behind the two rates
    may stand an endurance (`1200TBW`) and a capacity (`2TB`). One pair needs no parentheses.

    >>> [(drive.read.per_s, drive.write.per_s) for drive in parse_drives("2x(7,6)+(3.5,3)")]
    [(7000000000.0, 6000000000.0), (7000000000.0, 6000000000.0), (3500000000.0, 3000000000.0)]
    """
    drives: list[Drive] = []
    for summand in text.split("+"):
        match = re.fullmatch(r"\s*(?:(?P<count>\d+)\s*[xX*×]\s*)?(?P<what>\S.*?)\s*", summand)
        if match is None:
            raise _no_drives(text, "a summand is empty")
        count = int(match["count"] or 1)
        if not 1 <= count <= 256:
            raise _no_drives(text, f"{count} drives")
        what = match["what"]
        inner = what[1:-1] if what.startswith("(") and what.endswith(")") else what
        is_pair = inner != what or "," in what or re.match(r"[\d.]+$", what)
        drives += [_given(inner, text) if is_pair else _named(what, text)] * count
    return drives


def _named(name: str, text: str) -> Drive:
    try:
        return find_drive(name)
    except UserError as error:
        raise UserError(f"nvme {text!r}: {error}; or {EXAMPLE}") from error


def _given(inner: str, text: str) -> Drive:
    """A drive from `read, write[, endurance][, capacity]`."""
    items = [item.strip() for item in inner.split(",")]
    if len(items) < 2:
        raise _no_drives(text, f"({inner}) has no two rates")
    read, write = (_number(item, "", text) for item in items[:2])
    endurance = capacity = 0.0
    for item in items[2:]:
        if re.search(r"[TP]BW$", item, re.IGNORECASE):
            endurance = _number(item[:-3], item[-3], text)
        else:
            sized = re.search(r"[GTP]B$", item, re.IGNORECASE)
            capacity = _number(item[:-2], item[-2], text) if sized else _number(item, "?", text)
    how = "given on the command line"
    return Drive(
        name=f"({items[0]}, {items[1]}) GB/s",
        read=Rate(per_s=read * GB, source="assumed", how=how),
        write=Rate(per_s=write * GB, source="assumed", how=how),
        endurance_bytes=round(endurance),
        capacity_bytes=round(capacity),
    )


def _number(item: str, unit: str, text: str) -> float:
    """A positive number, times the unit's power."""
    scale = {"": 1.0, "G": 1e9, "T": 1e12, "P": 1e15}.get(unit.upper())
    try:
        value = float(item)
    except ValueError:
        value = 0.0
    if scale is None or not isfinite(value) or value <= 0:
        raise _no_drives(
            text, f"{item!r} is not a positive number" if scale else f"{item!r} has no unit such as TBW or TB"
        )
    return value * scale


def _no_drives(text: str, reason: str) -> UserError:
    return UserError(f"nvme {text!r}: {reason}. Fix: write it like {EXAMPLE}")


def _share(per_s: float, share: float, how: str) -> Rate:
    return Rate(per_s=per_s * share, source="assumed", how=f"{how}; {share:.0%} of it assumed")


def _find(text: str, table: Mapping[str, object], *, what: str) -> str:
    """The name that `text` stands for: its letters and digits, or whole words in a row that one name alone has."""
    key = _key(text)
    found = [name for name in table if _key(name) == key] or [name for name in table if key in _runs(name)]
    if len(found) == 1:
        return found[0]
    names = found or _near(key, table) or list(table)
    raise UserError(f"{what} {text!r} {'can be several' if found else 'is not known'}. Fix: one of {', '.join(names)}")


def _near(key: str, table: Mapping[str, object]) -> list[str]:
    near = get_close_matches(key, [_key(name) for name in table], n=3, cutoff=0.5)
    return [name for name in table if _key(name) in near]


def _runs(name: str) -> set[str]:
    """Every run of a name's words: `a100-80gb` has `a100`, `80gb` and both; `rtx5070ti` has no `rtx5070`."""
    words = name.split("-")
    return {_key("".join(words[i:j])) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _key(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct", "intel"))
