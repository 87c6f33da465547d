"""Bytes and seconds in closed form.

Scope: formulas that one can redo by hand, each with its source; the tests hold schedules against them.
Not here: the exact bytes of a schedule (`schedule.moved_bytes`), its time (`simulate.py`).
"""

FP32 = 4


def state_bytes(parameters: int) -> int:
    """Training state in FP32: weight, grad, exp_avg, exp_avg_sq.

    >>> state_bytes(7_000_000_000) / 1e9
    112.0
    """
    return 16 * parameters


def step_io_bytes(parameters: int, resident_bytes: int = 0) -> int:
    """NVME bytes of one step without clipping, each unit read once a pass, the gradient never on disk.

    Nothing resident: weights read in forward and backward (8) and written (4), both moments read and written (16).
    A resident byte of weights saves two reads and a write, one of moments a read and a write; weights come first.
    Source: design, `IO(C) = 28 P - 3 min(C, 4P) - 2 max(0, min(C, 12P) - 4P)`. Turn-around hits save a little more.

    >>> step_io_bytes(7_000_000_000) / 1e9
    196.0
    >>> step_io_bytes(7_000_000_000, resident_bytes=28_000_000_000) / 1e9
    112.0
    >>> step_io_bytes(7_000_000_000, resident_bytes=84_000_000_000)
    0
    """
    weights = 4 * parameters
    durable = 12 * parameters
    return 28 * parameters - 3 * min(resident_bytes, weights) - 2 * max(0, min(resident_bytes, durable) - weights)


def durable_bytes(parameters: int) -> int:
    """What lives on NVME when nothing is resident: weights and both moments. Two slots take twice that.

    >>> durable_bytes(7_000_000_000) / 1e9
    84.0
    """
    return 12 * parameters
