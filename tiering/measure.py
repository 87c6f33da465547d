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


def measure(path: Path, *, width: int, tokens: int, memory: int, disk_bytes: int = 192 * MiB) -> Hardware:
    """Rates of the drive of `path` and of this CPU.

    width: hidden size, tokens: rows of a matrix product. memory: bytes that measuring may take at a time. Raises what
    the engine raises.
    """
    folder = folder_beside(path)
    with PosixEngine() as engine:
        write, read = _disk(engine, folder, disk_bytes, memory)
    return Hardware(
        read=read,
        write=write,
        compute=_compute(*product_shape(width, tokens, memory)),
        update=_update(update_elements(memory)),
    )


def _disk(engine: IOEngine, folder: Path, nbytes: int, memory: int) -> tuple[Rate, Rate]:
    """Write and read rate of one file, requests of 8 MiB (less if memory is), all in flight."""
    piece = min(8 * MiB, 1 << max(16, memory.bit_length() - 1))
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


def product_shape(width: int, tokens: int, memory: int) -> tuple[int, int]:
    """(width, tokens) of the product to time: as asked, halved until its three matrices fit in `memory` bytes."""
    while 4 * (5 * tokens * width + 4 * width * width) > memory and max(width, tokens) > 16:
        width, tokens = (width // 2, tokens) if width >= tokens else (width, tokens // 2)
    return width, tokens


def update_elements(memory: int) -> int:
    """Elements of each of an update's four tensors: 32 MiB, which come from memory and not from a cache, as those of a
    run do; less if `memory` bytes are less.
    """
    return max(1024, min(1 << 23, memory // 16))


def _compute(width: int, tokens: int) -> Rate:
    """FLOP/s of [tokens, width] x [width, 4 width] in FP32, the best of a few."""
    a, b = torch.rand(tokens, width), torch.rand(width, 4 * width)
    flops = 2 * tokens * width * 4 * width
    best_s = min(_timed(lambda: torch.mm(a, b)) for _ in range(8))
    return Rate(
        per_s=flops / best_s, source="measured", how=f"FP32 matmul [{tokens}, {width}] x [{width}, {4 * width}]"
    )


def _update(count: int) -> Rate:
    """Bytes/s of weight, grad and both moments through the fused AdamW kernel."""
    parameter, gradient, mean, square = (torch.rand(count) for _ in range(4))
    step = torch.ones(())

    def run() -> None:
        torch._fused_adamw_(
            [parameter], [gradient], [mean], [square], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    best_s = min(_timed(run) for _ in range(4))
    return Rate(per_s=16 * count / best_s, source="measured", how=f"fused AdamW on tensors of {4 * count} bytes")


def _timed(work: object) -> float:
    begin_s = time.perf_counter()
    work()  # type: ignore[operator]
    return max(time.perf_counter() - begin_s, 1e-9)
