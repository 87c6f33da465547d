"""Copies to the device, computing, and copies back hide one another.

Scope: `overlap`: the same rounds in parts and together, where computing is a fraction of the copies and where it is
as long.
Not here: whole steps (`fraction.py`), the order of what is issued (`order.py`).

*serial*: the parts one after the other. *limit*: the longest of both copies at once and computing; no order of the
same work is faster. A run shows that lanes overlap if it is nearer to the limit than to serial, by `NEAR`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from tiering.arena import Arena
from tiering.lanes import Event, Lanes

MiB = 1 << 20
CHUNK_BYTES, ROUNDS, PLACES = 64 * MiB, 24, 3
WIDTH = 1024
SHARES = {"little_arithmetic": 0.25, "as_much_arithmetic": 1.0}
"""Seconds of computing to those of a copy to the device."""
NEAR = 0.25
"""Of what could be hidden, the part that may stay unhidden."""


def overlap(rig: Rig) -> dict[str, Any]:
    chunk = rig.sized(CHUNK_BYTES, 1 / (4 * PLACES))
    lanes = rig.lanes(True)
    found: dict[str, Any] = {"ok": True, "chunk_bytes": chunk, "rounds": ROUNDS}
    with Arena(2 * chunk) as host:
        lanes.open(host, PLACES * chunk)  # untouched, so that it comes to lie near the device
        try:
            host.tensor(0, chunk).view(torch.int32).random_(0, 1 << 30)
            for name, share in SHARES.items():
                found[name] = _case(_Rounds(rig, lanes, host, chunk), share)
        finally:
            lanes.close()
    bad = [name for name in SHARES if not found[name]["ok"]]
    if bad:
        found |= {"ok": False, "why": f"not hidden, or other bytes: {', '.join(bad)}"}
    return found


def _case(rounds: "_Rounds", share: float) -> dict[str, Any]:
    rounds.tune(share)
    h2d_s, d2h_s, both_s, compute_s = (
        _best(lambda parts=parts: rounds.run(parts))  # type: ignore[misc]
        for parts in (("h2d",), ("d2h",), ("h2d", "d2h"), ("compute",))
    )
    together_s = _best(lambda: rounds.run(("h2d", "compute", "d2h"), ordered=True))
    serial_s, limit_s = h2d_s + compute_s + d2h_s, max(both_s, compute_s)
    most_s = limit_s + NEAR * max(0.0, serial_s - limit_s)
    same = rounds.came_out_right()
    return {
        "ok": same and together_s <= most_s,
        "same_bytes": same,
        "h2d_s": h2d_s,
        "d2h_s": d2h_s,
        "copies_s": both_s,
        "compute_s": compute_s,
        "together_s": together_s,
        "serial_s": serial_s,
        "limit_s": limit_s,
        "fraction": limit_s / together_s,
    }


def _best(work: Callable[[], None], repeats: int = 3) -> float:
    """Seconds of the fastest of a few; the first one is not counted."""
    found = []
    for _ in range(1 + repeats):
        begin_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin_s)
    return min(found[1:])


class _Rounds:
    """Each takes a chunk to the device, adds 1 to its words, multiplies matrices, and brings it back."""

    def __init__(self, rig: Rig, lanes: Lanes, host: Arena, chunk: int) -> None:
        self.lanes, self.host, self.chunk = lanes, host, chunk
        self.products = 0
        width = max(16, int(WIDTH * min(1.0, rig.scale)))
        self._a = torch.rand(width, width, device=rig.device)
        self._out = torch.empty_like(self._a)

    def tune(self, share: float) -> None:
        """As many products a round as take `share` of a copy."""
        copy_s = _best(lambda: self.run(("h2d",)))
        self.products = 0
        bare_s = _best(lambda: self.run(("compute",)))
        self.products = 8
        product_s = max(1e-7, (_best(lambda: self.run(("compute",))) - bare_s) / 8)
        self.products = max(0, min(2000, round((share * copy_s - bare_s) / product_s)))

    def run(self, parts: Sequence[str], *, ordered: bool = False) -> None:
        """ordered: each part after the one before it of its round, and a chunk's place free before it is filled."""
        back: dict[int, list[Event]] = {}
        events: list[Event] = []
        for number in range(ROUNDS):
            after = back.get(number % PLACES, []) if ordered else []
            for part in parts:
                issued = self._issued(part, number % PLACES, after)
                events += issued
                after = issued if ordered else []
            back[number % PLACES] = after
        for event in events:
            event.synchronize()

    def came_out_right(self) -> bool:
        """After `run` in order."""
        sent, back = (self.host.tensor(lo, lo + self.chunk).view(torch.int32) for lo in (0, self.chunk))
        return torch.equal(sent + 1, back)

    def _issued(self, part: str, place: int, after: Sequence[Event]) -> list[Event]:
        lo = place * self.chunk
        if part == "compute":
            self.lanes.begin_compute(after)
            self.lanes.tensor(lo, lo + self.chunk).view(torch.int32).add_(1)
            for _ in range(self.products):
                torch.mm(self._a, self._a, out=self._out)
            event = self.lanes.end_compute()
            return [] if event is None else [event]
        there, nbytes = self.lanes.tensor(lo, lo + self.chunk), self.chunk
        if part == "h2d":
            return [self.lanes.copy("h2d", self.host.tensor(0, nbytes), there, after)]
        return [self.lanes.copy("d2h", there, self.host.tensor(nbytes, 2 * nbytes), after)]
