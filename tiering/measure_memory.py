"""Measures memory and processors: copies within the host, the AdamW kernel, matrix products on any device.

Scope: rates of one operation each, on operands that come from memory and not from a cache.
Not here: drives (`measure_disk.py`), copies to and from a device (`measure_device.py`), how much memory there is
(`limits.py`), whole units of a model (the trainer's).
"""

import time
from collections.abc import Callable
from datetime import date

import torch

from tiering.checksums import GRAIN_BYTES, checksum
from tiering.hardware import Rate

MiB = 1 << 20
COPY_BYTES = 256 * MiB
REPEATS = 4
BUSY_S = 0.3
TILE_ELEMENTS = 2 << 20
"""Of each tensor that is updated at a time: the planner's usual tile. What was written is still in the cache then."""
CPU = torch.device("cpu")


def product_shape(width: int, tokens: int, memory: int) -> tuple[int, int]:
    """(width, tokens) of the product to time: as asked, halved until its three matrices fit in `memory` bytes."""
    while 4 * (5 * tokens * width + 4 * width * width) > memory and max(width, tokens) > 16:
        width, tokens = (width // 2, tokens) if width >= tokens else (width, tokens // 2)
    return width, tokens


def update_elements(memory: int) -> int:
    """Elements of each of an update's four tensors: 128 MiB, which come from memory and not from a cache, as those of a
    run do; less if `memory` bytes are less.
    """
    return max(1024, min(1 << 25, memory // 16))


def compute_rate(width: int, tokens: int, device: torch.device = CPU, *, dtype: torch.dtype = torch.float32) -> Rate:
    """FLOP/s of [tokens, width] x [width, 4 width], the best of a few. 2 flops a multiply and add."""
    return product_rate(tokens, width, 4 * width, device=device, dtype=dtype)


def product_rate(
    rows: int,
    inner: int,
    columns: int,
    *,
    device: torch.device = CPU,
    repeats: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Rate:
    """FLOP/s of [rows, inner] x [inner, columns] in `dtype`: 2 rows inner columns, by the best of a few. FP32 is TF32
    where this process has been set so.
    """
    a, b = torch.rand(rows, inner, device=device, dtype=dtype), torch.rand(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    best_s = min(timed(lambda: torch.mm(a, b, out=out), device) for _ in range(repeats))
    where = "" if device.type == "cpu" else f" on {device.type}"
    numbers = "BF16" if dtype == torch.bfloat16 else "FP32"
    how = f"{numbers} matmul [{rows}, {inner}] x [{inner}, {columns}]{where}"
    return measured(2 * rows * inner * columns / best_s, how)


def update_rate(count: int, *, scaled: bool = False, device: torch.device = CPU) -> Rate:
    """Bytes/s of weight, grad and both moments (16 an element) through the fused AdamW kernel of the device; on the CPU
    tile by tile, with the checksums of what will be written.

    scaled: gradients are multiplied by a factor first, as clipping does; it goes over them once more.
    """
    factor = torch.full((), 0.5, device=device)
    parameter, gradient, mean, square = (torch.rand(count, device=device) for _ in range(4))
    step = torch.ones((), device=device)

    tiled = device.type == "cpu"

    def run() -> None:
        tiles = zip(
            *(x.split(TILE_ELEMENTS if tiled else count) for x in (parameter, gradient, mean, square)), strict=True
        )
        for weight, grad, exp_avg, exp_avg_sq in tiles:
            if scaled:
                torch._foreach_mul_([grad], factor)
            torch._fused_adamw_(
                [weight], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
                weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            for written in (weight, exp_avg, exp_avg_sq) if tiled else ():
                data = memoryview(written.numpy()).cast("B")
                for lo in range(0, len(data), GRAIN_BYTES):
                    checksum(data[lo : lo + GRAIN_BYTES])

    repeats = max(REPEATS, min(64, COPY_BYTES // (16 * count)))  # a short run is disturbed more easily
    best_s = min(timed(run, device) for _ in range(repeats))
    before = ", gradients scaled" if scaled else ""
    what, where = ("AdamW and checksums", "") if tiled else ("AdamW", f" on {device.type}")
    return measured(16 * count / best_s, f"fused {what} on tensors of {4 * count} bytes{before}{where}")


def host_copy_rate(nbytes: int = COPY_BYTES) -> Rate:
    """Bytes/s copied from one pageable host buffer to another (each byte is read once and written once)."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    best_s = min(timed(lambda: target.copy_(source)) for _ in range(REPEATS))
    return measured(nbytes / best_s, f"host copy, pageable, buffers of {nbytes / MiB:.0f} MiB")


def busy_seconds(width: int, tokens: int, for_s: float = BUSY_S) -> float:
    """Seconds that one matrix product takes on the CPU, as a mean over `for_s`: for a comparison with a busy drive."""
    a, b = torch.rand(tokens, width), torch.rand(width, 4 * width)
    out = torch.mm(a, b)
    begin_s, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - begin_s) < for_s or not count:
        torch.mm(a, b, out=out)
        count += 1
    return took_s / count


def timed(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds of one call, with what it started on the device; never 0."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    begin_s = time.perf_counter()
    work()
    synchronize()
    return max(time.perf_counter() - begin_s, 1e-9)


def measured(per_s: float, how: str) -> Rate:
    """A rate that was measured today."""
    return Rate(per_s=per_s, source="measured", how=how, date=date.today().isoformat())
