"""Memory that computing takes beside the arena, line by line, and the micro-batch that leaves room for the rest.

Scope: what torch holds at its peak, what the libraries take before anything starts.
Not here: what one unit takes (`profile.py`, `catalog/estimate.py`), the arena's own lines (`tiering/plan.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatrain.catalog.unit_cost import UnitCost
from tiering.plan import Line

GiB = 1 << 30
HOST_LIBRARIES = GiB // 2
"""Python with torch (CPU), transformers and zarr takes 0.24 GiB after their import; threads and data take the rest."""
CUDA_LIBRARIES = 2 * GiB
"""The same with a CUDA build of torch and a CUDA context: its kernels are loaded into host memory too."""
DEVICE_CONTEXT = GiB // 2
"""What a CUDA context and the workspace of cuBLAS take of a device before the first tensor."""
WORKING_ROOM = 24 << 20
"""What Python takes on top once a run starts: threads, the store's bookkeeping, proving schedules. 2 to 17 MiB seen."""
LOGITS = "logits and loss of one"
"""How the line of the head's workspace begins."""
KEPT = "pieces of it that the heap keeps"
KEPT_SHARE = 2
"""Freed tensors leave holes between objects that live on: 0.3 to 0.5 of the workspace was seen, and half of it is
assumed where no trial has shown it.
"""
SPARE_SHARE = 4
"""A chosen micro-batch computes in a quarter of the memory at most."""


def compute_lines(
    costs: Mapping[str, UnitCost], head: str, micro_batches: int, *, chunked: bool = False, on_host: bool = True
) -> tuple[Line, ...]:
    """Memory that torch takes at its peak, where it computes.

    in flight: the last output, the gradient by it, and the gradients by a unit's output and input while it runs
    backward.
    workspace: the widest backward of one micro-batch; the head's is that of the logits and the loss. chunked: costs are
    those of a head that runs on one chunk of a micro-batch at a time.
    """
    inner = {name: cost for name, cost in costs.items() if name != head}
    widest = max(cost.output_bytes for cost in inner.values())
    of_layers = max(cost.workspace_bytes for cost in inner.values())
    of_head = costs[head].workspace_bytes
    workspace = (
        Line(what=f"{LOGITS} {'chunk' if chunked else 'micro-batch'}", nbytes=of_head)
        if of_head > of_layers
        else Line(what="workspace of one micro-batch", nbytes=of_layers)
    )
    kept = (Line(what=KEPT, nbytes=workspace.nbytes // KEPT_SHARE),) if on_host else ()
    return (Line(what="outputs and gradients in flight", nbytes=4 * micro_batches * widest), workspace, *kept)


def seen(lines: tuple[Line, ...], grown_bytes: int) -> tuple[Line, ...]:
    """`lines` of computing on the host, of which a trial with one micro-batch made the heap `grown_bytes` larger."""
    in_flight, workspace, kept = lines
    return in_flight, workspace, replace(kept, nbytes=max(0, grown_bytes - workspace.nbytes))


def chosen_micro_batch(rows: int, memory_bytes: int, workspace_bytes: Callable[[int], int]) -> int:
    """The largest power of two that divides `rows` and computes in a quarter of `memory_bytes`; 1 if none does.

    >>> chosen_micro_batch(24, 400, lambda rows: 20 * rows)
    4
    >>> chosen_micro_batch(24, 4000, lambda rows: 20 * rows)
    8
    """
    chosen = 1
    while rows % (2 * chosen) == 0 and SPARE_SHARE * workspace_bytes(2 * chosen) <= memory_bytes:
        chosen *= 2
    return chosen
