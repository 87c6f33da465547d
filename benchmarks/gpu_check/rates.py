"""Rates that a plan is made with: copies as a run makes them, the drive, matrix products, AdamW.

Scope: three checks; each rate with the sizes that it was measured with.
Not here: whole tables (the other benchmarks), copies beside computing (`overlap.py`).
"""

import time
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from tiering.arena import Arena
from tiering.lanes import Event, Lanes
from tiering.workload import Lane

MiB = 1 << 20
COPY_BYTES, GRAIN_BYTES = 256 * MiB, 4 * MiB
REPEATS = 3
WAYS: dict[str, tuple[Lane, ...]] = {"h2d": ("h2d",), "d2h": ("d2h",), "both": ("h2d", "d2h")}
WIDTH, TOKENS = 4096, 4096
EXACT = 1e-5
"""Relative to the largest element. FP32 is near 1e-6, TF32 near 1e-3."""


def copies(rig: Rig) -> dict[str, Any]:
    """Bytes/s of copies of the arena, locked for copies and not; `both` counts both directions."""
    nbytes = rig.sized(COPY_BYTES, 1 / 8)
    found: dict[str, Any] = {"ok": True, "copy_bytes": nbytes, "grain_bytes": min(GRAIN_BYTES, nbytes)}
    for kind, locked in (("locked", True), ("pageable", False)):
        lanes = rig.lanes(locked)
        with Arena(2 * nbytes) as host:
            lanes.open(host, 2 * nbytes)  # untouched, so that it comes to lie near the device
            try:
                host.tensor(0, nbytes).random_()
                host.tensor(nbytes, 2 * nbytes).zero_()
                found |= {f"{way}_{kind}_per_s": _rate(lanes, host, nbytes, nbytes, ways) for way, ways in WAYS.items()}
                if locked:
                    found |= {
                        f"{way}_grain_per_s": _rate(lanes, host, nbytes, found["grain_bytes"], ways)
                        for way, ways in WAYS.items()
                    }
                same = _came_back(lanes, host, nbytes)
            finally:
                lanes.close()
        line = getattr(lanes, "pin_line", "")
        found[f"{kind}_arena"] = line
        if node := getattr(lanes, "node_line", ""):
            found[f"{kind}_node"] = node
        if not same or (locked and "not locked" in line):
            found |= {"ok": False, "why": line if same else f"{kind}: other bytes came back than were sent"}
    return found


def _rate(lanes: Lanes, host: Arena, nbytes: int, piece: int, ways: tuple[Lane, ...]) -> float:
    """Of `nbytes` each way, in copies of `piece`, all issued at once; the best of a few."""
    best_s = float("inf")
    for _ in range(1 + REPEATS):
        events: list[Event] = []
        begin_s = time.perf_counter()
        for lo in range(0, nbytes - piece + 1, piece):
            events += [_copied(lanes, host, lane, lo, lo + piece, nbytes) for lane in ways]
        for event in events:
            event.synchronize()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return len(ways) * (nbytes // piece) * piece / best_s


def _copied(lanes: Lanes, host: Arena, lane: Lane, lo: int, hi: int, nbytes: int) -> Event:
    """To the first half of either arena, or from the second half."""
    if lane == "h2d":
        return lanes.copy(lane, host.tensor(lo, hi), lanes.tensor(lo, hi), [])
    return lanes.copy(lane, lanes.tensor(nbytes + lo, nbytes + hi), host.tensor(nbytes + lo, nbytes + hi), [])


def _came_back(lanes: Lanes, host: Arena, nbytes: int) -> bool:
    sent, back = host.tensor(0, nbytes), host.tensor(nbytes, 2 * nbytes)
    back.zero_()
    there = lanes.copy("h2d", sent, lanes.tensor(0, nbytes), [])
    lanes.copy("d2h", lanes.tensor(0, nbytes), back, [there]).synchronize()
    return torch.equal(sent, back)


def disk(rig: Rig) -> dict[str, Any]:
    """Bytes/s of the drive through direct I/O: reads, writes, and the mix of a step, by requests in flight."""
    from tiering.measure_disk import rates_by_depth
    from tiering.place import filesystem_of
    from tiering.posix import PosixEngine
    from tiering.probe_file import probe_file

    nbytes, request = rig.sized(512 * MiB), rig.sized(8 * MiB)
    found: dict[str, Any] = {"ok": True, "file_system": filesystem_of(rig.folder).fs_type, "request_bytes": request}
    with (
        PosixEngine() as engine,
        probe_file(rig.folder, engine, nbytes=nbytes, request_bytes=request, memory=16 * request) as file,
    ):
        for rates in rates_by_depth(file, (2, 8), request_bytes=request, most_bytes=2 * nbytes, most_s=2.0):
            row = {"read": rates.read, "write": rates.write, "mixed": rates.mixed}
            found |= {f"{name}_depth_{rates.queue_depth}_per_s": rate.per_s for name, rate in row.items()}
            found["how"] = rates.mixed.how
    return found


def compute(rig: Rig) -> dict[str, Any]:
    """FLOP/s in true FP32 and how far a product is from its exact value; bytes/s of AdamW, 16 an element."""
    from megatrain.exactness import compute_exactly
    from tiering.measure_memory import compute_rate, host_copy_rate, product_shape, update_elements, update_rate

    compute_exactly()
    width, tokens = product_shape(WIDTH, TOKENS, rig.sized(1 << 30, 1 / 2))
    product = compute_rate(width, tokens, device=rig.device)
    error = _error(rig.device, min(1024, width))
    update, copied = update_rate(update_elements(rig.sized(1 << 30))), host_copy_rate(rig.sized(COPY_BYTES))
    return {
        "ok": error < EXACT,
        "why": f"a product is off by {error:.1e}: not FP32" if error >= EXACT else "",
        "matmul_flop_per_s": product.per_s,
        "matmul_how": product.how,
        "matmul_error": error,
        "adamw_cpu_per_s": update.per_s,
        "adamw_cpu_how": update.how,
        "adamw_device_per_s": update_rate(update_elements(rig.sized(1 << 30, 1 / 2)), device=rig.device).per_s,
        "host_copy_per_s": copied.per_s,
        "cpu_threads": torch.get_num_threads(),
    }


def _error(device: torch.device, width: int) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(width, width, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).cpu().double()
    return ((found - exact).abs().max() / exact.abs().max()).item()
