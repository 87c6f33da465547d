"""Quick measurements of this machine: what the planner reckons with when nothing better is known.

Scope: disk rates through the real engine on a file that is removed, FP32 matrix products at a model's width, the fused
AdamW kernel. A second or two in all.
Not here: how much memory there is (`limits.py`), sustained rates (a benchmark's business).
"""

import os
import time
from concurrent.futures import wait
from pathlib import Path

import torch

from tiering.arena import Arena
from tiering.engine import Extent, IOEngine
from tiering.hardware import Hardware, Rate
from tiering.place import folder_beside
from tiering.posix import PosixEngine

MiB = 1 << 20


def measure(path: Path, *, width: int, tokens: int, disk_bytes: int = 192 * MiB) -> Hardware:
    """Rates of the drive of `path` and of this CPU.

    width: hidden size, tokens: rows of a matrix product. Raises what the engine raises.
    """
    folder = folder_beside(path)
    with PosixEngine() as engine:
        write, read = _disk(engine, folder, disk_bytes)
    return Hardware(read=read, write=write, compute=_compute(width, tokens), update=_update())


def _disk(engine: IOEngine, folder: Path, nbytes: int) -> tuple[Rate, Rate]:
    """Write and read rate of one fresh file, 8 MiB requests, all in flight."""
    piece = 8 * MiB
    path = folder / f".measure-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        rates = []
        with Arena(piece) as arena:
            arena.tensor(0, piece).fill_(1)
            view = arena.view(0, piece)
            # The first write only fills the file: in a run every byte but the first step's is written over.
            write, read = (engine.submit_write, "write"), (engine.submit_read, "read")
            for submit, verb in (write, write, read):
                extents = [Extent(path=path, offset=at, nbytes=piece, block=verb) for at in range(0, nbytes, piece)]
                begin_s = time.perf_counter()
                for future in wait([submit(extent, view) for extent in extents]).done:
                    future.result()
                took_s = time.perf_counter() - begin_s
                rates.append(
                    Rate(per_s=nbytes / took_s, source="measured", how=f"{nbytes // MiB} MiB {verb} at {folder}")
                )
            del view
    finally:
        os.close(fd)
        path.unlink()
    return rates[1], rates[2]


def _compute(width: int, tokens: int) -> Rate:
    """FLOP/s of [tokens, width] x [width, 4 width] in FP32, the best of a few."""
    a, b = torch.rand(tokens, width), torch.rand(width, 4 * width)
    flops = 2 * tokens * width * 4 * width
    best_s = min(_timed(lambda: torch.mm(a, b)) for _ in range(8))
    return Rate(
        per_s=flops / best_s, source="measured", how=f"FP32 matmul [{tokens}, {width}] x [{width}, {4 * width}]"
    )


def _update() -> Rate:
    """Bytes/s of weight, grad and both moments through the fused AdamW kernel."""
    count = 1 << 23  # four tensors of 32 MiB: as in a run, the bytes come from memory, not from a cache
    parameter, gradient, mean, square = (torch.rand(count) for _ in range(4))
    step = torch.ones(())

    def run() -> None:
        torch._fused_adamw_(
            [parameter], [gradient], [mean], [square], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    best_s = min(_timed(run) for _ in range(4))
    return Rate(per_s=16 * count / best_s, source="measured", how="fused AdamW on 32 MiB tensors")


def _timed(work: object) -> float:
    begin_s = time.perf_counter()
    work()  # type: ignore[operator]
    return max(time.perf_counter() - begin_s, 1e-9)
