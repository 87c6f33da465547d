"""Which bytes of which block live in HOST, and where: a placement.

Scope: the record; what is worth a home in HOST, by what each block costs without one; addresses side by side.
Not here: how many bytes there are for homes (`plan.py`); bytes that only pass through (`lower.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiering.workload import PAGE, Block, Workload


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


def choose_homes(
    workload: Workload, gain: Mapping[str, float], tile_bytes: int, durable: int, carried: int | None
) -> dict[str, int]:
    """Bytes of each block to pin, at most `durable` of durable blocks and `carried` of carried and passing ones.

    carried None: both share the first figure. What gains most a byte goes first; within a class the share is spread
    evenly over the blocks, so that no stretch of the pass is short of I/O while another has too much.
    """
    tiles = workload.tile_only()
    homes: dict[str, int] = {}
    left = {"durable": durable, "carried": durable if carried is None else carried}
    pool = sorted(workload.of_life("durable", "carried", "passing"), key=lambda block: -gain[block.name])
    # Others never leave HOST anyway, or no pass needs them there.
    idle = ("passing",) if carried is not None else ("passing", "durable")
    pool = [block for block in pool if gain[block.name] or block.life not in idle]
    for level in sorted({round(gain[block.name], 3) for block in pool}, reverse=True):
        for purse, lives in (("durable", ("durable",)), ("carried", ("carried", "passing"))):
            same = [block for block in pool if round(gain[block.name], 3) == level and block.life in lives]
            spent = spread_share(same, left[purse], tile_bytes, tiles, homes)
            for key in left if carried is None else (purse,):
                left[key] -= spent
    return homes


def spread_share(
    blocks: Sequence[Block], room: int, tile_bytes: int, tiles: frozenset[str], homes: dict[str, int]
) -> int:
    """Pin an even share of `blocks` within `room` bytes; returns the bytes spent."""
    total = sum(block.nbytes for block in blocks)
    share = min(1.0, max(0, room) / total) if total else 0.0
    seen = spent = 0
    for block in blocks:
        seen += block.nbytes
        due = min(room, round(share * seen)) - spent
        if due >= block.nbytes:
            homes[block.name] = block.nbytes
        elif block.name in tiles and due >= tile_bytes:
            homes[block.name] = due // tile_bytes * tile_bytes
        spent += homes.get(block.name, 0)
    return spent
