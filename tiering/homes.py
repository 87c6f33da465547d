"""Which bytes of which block live in HOST, and where: a placement.

Scope: the record, and addresses for homes side by side.
Not here: choosing what is worth a home in HOST (`plan.py`); bytes that only pass through (`lower.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tiering.workload import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Homes: the first `host_bytes[name]` bytes of a block live in HOST at `address[name]`, the rest on NVME.

    Only blocks that are never touched as a whole may be split; the split is at a multiple of the tile size.
    `fixed_bytes` is the room that all homes in HOST take, from address 0.
    """

    host_bytes: Mapping[str, int]
    address: Mapping[str, int]
    fixed_bytes: int


def place(homes: Mapping[str, int]) -> Placement:
    """Addresses for homes in HOST: one after the other from 0, none over another."""
    address: dict[str, int] = {}
    top = 0
    for name, nbytes in homes.items():
        assert nbytes % PAGE == 0, f"{name}: {nbytes} bytes are no whole pages"
        address[name] = top
        top += nbytes
    return Placement(host_bytes=dict(homes), address=address, fixed_bytes=top)
