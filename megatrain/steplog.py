"""The row that a step leaves in `log.jsonl`: what happened, how long each lane was busy, and what was predicted.

Scope: the keys of a row and what they mean, adding one to the file, the largest stall in words.
Not here: measuring (`tiering/trace.py`), predicting (`tiering/timetable.py`), the trace of single actions
(`tracing.py`).
"""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import psutil

from megatrain.sizes import format_seconds
from tiering.errors import DiskFullError, IOFailedError
from tiering.place import free_bytes
from tiering.timetable import Timetable
from tiering.trace import Figures

KEYS = {
    "step": "number of the step, from 1; a row 0 has the validation before the first step, and nothing else",
    "loss": "mean over the supervised tokens of the step",
    "lr": "learning rate of the step; a skipped step leaves it to the next one",
    "grad_norm": "global norm of the gradient, before clipping",
    "clipped": "whether the gradient was scaled down",
    "skipped": "the first tensor whose gradient is not finite, for which the step was skipped; null",
    "tokens_per_s": "tokens of the step by wall_s",
    "wall_s": "seconds since the row before; a commit in between is in it, a validation is not",
    "commit_s": "seconds of the commit after the step; null where none followed",
    "validation_loss": "mean over the supervised tokens of the held-out rows, after the step; null where none followed",
    "read_bytes": "from NVMe",
    "written_bytes": "from RAM to NVMe",
    "update_bytes": "read or written by updates, where they run",
    "io_s": "seconds with at least one transfer in flight",
    "read_s": "seconds with at least one read in flight",
    "write_s": "seconds with at least one write in flight",
    "compute_s": "seconds in forward and backward, without the updates that ran in between",
    "update_s": "seconds in updates",
    "stall_s": "seconds in which compute had nothing to do but wait",
    "stalls": "cause -> seconds of stall_s: an action without its tile, the longest first; the rest is `other`",
    "rss_bytes": "memory of the process at the end of the step",
    "predicted_s": "wall_s of the plan; it knows no commits",
    "predicted_read_bytes": "read_bytes of the plan",
    "predicted_written_bytes": "written_bytes of the plan",
    "predicted_io_s": "io_s of the plan",
    "predicted_read_s": "read_s of the plan",
    "predicted_write_s": "write_s of the plan",
    "predicted_compute_s": "compute_s of the plan",
    "predicted_update_s": "update_s of the plan",
    "predicted_stall_s": "stall_s of the plan",
}
"""Every row has these. Where a device has memory of its own, the copies too: see `COPIES`."""
COPIES = ("h2d_bytes", "h2d_s", "d2h_bytes", "d2h_s", "direct_bytes")
"""Copies to the device and back, bytes and busy seconds, and bytes read straight into it; with `predicted_` before them
those of the plan.
"""
MOST_CAUSES = 20
OTHER = "other"
WORTH_SAYING = 0.05
"""Share of a step from which its largest stall is told."""
_PREDICTED = ("read_bytes", "written_bytes", "io_s", "read_s", "write_s", "compute_s", "update_s", "stall_s")


def step_row(
    number: int, result: Mapping[str, Any], figures: Figures, tokens: int, predicted_s: float, plan: Timetable
) -> dict[str, Any]:
    """The row of step `number`; its keys are `KEYS`. result: what was computed. predicted_s: the step of the plan;
    plan: its lanes.
    """
    measured, expected = asdict(figures), asdict(plan.figures)
    copies = [key for key in COPIES if any(expected[key] or measured[key] for key in COPIES)]
    return {
        "step": number,
        **result,
        "tokens_per_s": tokens / figures.wall_s,
        "commit_s": None,
        "validation_loss": None,
        **{key: value for key, value in measured.items() if key not in COPIES or key in copies},
        "stalls": top_causes(figures.stalls),
        "rss_bytes": psutil.Process().memory_info().rss,
        "predicted_s": predicted_s,
        **{f"predicted_{key}": expected[key] for key in (*_PREDICTED, *copies)},
    }


def first_row(validation_loss: float) -> dict[str, Any]:
    """The row of a validation before the first step."""
    return {**dict.fromkeys(KEYS), "step": 0, "validation_loss": validation_loss, "stalls": {}}


def append_row(log: FileIO, row: Mapping[str, Any]) -> None:
    """Adds a row, in one call of the system. Raises `DiskFullError` or `IOFailedError`."""
    data = json.dumps(row).encode() + b"\n"
    try:
        if log.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what a disk does that fills in the middle of it
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise (DiskFullError if full else IOFailedError)(
            f"{log.name}: the row of step {row['step']}, {len(data)} bytes, cannot be written: {error.strerror}; "
            f"{free_bytes(Path(log.name))} bytes are free. Fix: make room, then resume from the last commit."
        ) from error


def top_causes(stalls: Mapping[str, float]) -> dict[str, float]:
    """At most `MOST_CAUSES`, the longest first; all others as `other`."""
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    if len(ordered) <= MOST_CAUSES:
        return dict(ordered)
    rest_s = sum(seconds for _, seconds in ordered[MOST_CAUSES - 1 :])
    return {**dict(ordered[: MOST_CAUSES - 1]), OTHER: rest_s}


def largest_stall(figures: Figures) -> str:
    """`compute waited 0.31 s for READ L7/weight`; empty if no stall took a share of the step worth saying."""
    cause = max(figures.stalls, key=lambda name: figures.stalls[name], default="")
    if not cause or figures.stalls[cause] <= WORTH_SAYING * figures.wall_s:
        return ""
    return f"compute waited {format_seconds(figures.stalls[cause])} for {cause}"
