"""How long each kind of unit computes on this machine: its real forward and backward, with random weights.

Scope: a step of one micro-batch through the first units of each kind, over a ring of places that all of them share,
on the device that will compute.
Not here: flops and bytes (`profile.py`), rates of matrix products and disks (`tiering/measure.py`).

A matrix product at its best says too little: norms, attention, small matrices and the handing over of gradients take
their share. So the planner is given seconds that were measured on the code that will run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from megatrain.call_order import passing_on
from megatrain.inputs import every_token
from megatrain.model import Slice, Unit, Units
from megatrain.optim import GradientNorm
from megatrain.precision import weight_kind
from megatrain.programs import HEAD, block_name
from megatrain.stream import StreamedModel
from tiering.arena import Arena

_CPU = torch.device("cpu")
REPEATS = 3
BEYOND_CACHE = 512 << 20
"""Bytes: more than the last cache of usual machines holds."""
ALIKE = 2
"""Units of one kind that are run: the second one no longer meets cold code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Seconds of one micro-batch. The head's backward is in its forward: it runs both at once."""

    forward_s: float
    backward_s: float


def time_units(
    units: Units,
    micro_batch: int,
    seq_len: int,
    memory: int = 0,
    loss_chunk: int | None = None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    *,
    typical: Callable[[Iterable[float]], float] = median,
    repeats: int = REPEATS,
) -> dict[str, UnitTime]:
    """Measured times by unit name, for a micro-batch of [micro_batch, seq_len] tokens and its loss in chunks.

    typical: of a unit's repeats and those of its like.

    Takes the memory of the largest unit's weights and gradients, and of one micro-batch; before the arena exists. With
    more `memory` (bytes) every op is lent other bytes than the one before: in a run weights come from memory, not from
    a cache. device: where that memory and the model's buffers are; an op has ended when the device says so. dtype: of
    the weights that units compute with.
    """
    kinds = _kinds(units)
    skipped = [unit for kind in kinds for unit in kind[ALIKE:]]
    spans = _Spans(units, memory, device, dtype)
    model = StreamedModel(units, spans.lend, spans.norms, device=device, dtype=dtype)
    vocabulary = units.model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (micro_batch, seq_len), generator=torch.Generator().manual_seed(0))
    try:
        with passing_on([unit.module for unit in skipped if unit.module is not None], lambda *call: None):
            for _ in range(1 + repeats):
                spans.begin()
                model.step(every_token(ids), micro_batch, loss_chunk)
    finally:
        model.close()
    times: dict[str, UnitTime] = {}
    for kind in kinds:
        forward_s = typical(spans.of([HEAD if u is units.head else f"fwd.{u.name}" for u in kind[:ALIKE]]))
        backward_s = 0.0 if units.head in kind else typical(spans.of([f"bwd.{u.name}" for u in kind[:ALIKE]]))
        times |= {unit.name: UnitTime(forward_s=forward_s, backward_s=backward_s) for unit in kind}
    return times


def _kinds(units: Units) -> list[list[Unit]]:
    """Units that run the same code on the same shapes."""
    kinds: dict[Any, list[Unit]] = {}
    for unit in units:
        shapes = tuple(binding.slice.shape for binding in unit.bindings)
        kinds.setdefault((type(unit.module), shapes, unit is units.head), []).append(unit)
    return list(kinds.values())


class _Spans:
    """Lends every op two places, one after the other of a ring, and notes how long it keeps them."""

    def __init__(self, units: Units, memory: int, device: torch.device, dtype: torch.dtype) -> None:
        largest = max(unit.nbytes for unit in units.stored)
        self._places = max(1, min(memory, BEYOND_CACHE) // (2 * largest))
        self._largest, self._turn = largest, 0
        ring_bytes = largest * self._places
        if device.type == "cpu":  # not of the heap, whose size tells what computing takes
            arena = Arena(2 * ring_bytes)
            self._weights, self._grads = arena.tensor(0, ring_bytes), arena.tensor(ring_bytes, 2 * ring_bytes)
        else:
            self._weights, self._grads = (torch.empty(ring_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        one = self._weights[:largest].view(dtype)
        one.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(0))
        self._weights.view(self._places, largest)[1:] = self._weights[:largest]
        self._grads.zero_()
        self._synchronize = torch.get_device_module(device).synchronize
        self._sizes = {unit.name: unit.nbytes for unit in units.stored}
        self._kind = weight_kind(dtype)
        self._norm = GradientNorm(units, device)
        self.seconds: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._norm.begin()

    def of(self, ops: Sequence[str]) -> list[float]:
        """Seconds of these ops, the first repeat left out."""
        return [value for op in ops for value in self.seconds[op][1:]]

    def norms(self, unit: str, gradients: Mapping[Slice, torch.Tensor]) -> None:
        self._norm.add(gradients)

    @contextmanager
    def lend(self, op: str) -> Iterator[dict[str, torch.Tensor]]:
        start = self._turn % self._places * self._largest
        self._turn += 1
        weights, grads = self._weights[start:], self._grads[start:]
        views = {block_name(name, self._kind): weights[:nbytes] for name, nbytes in self._sizes.items()}
        views |= {block_name(name, "grad"): grads[:nbytes] for name, nbytes in self._sizes.items()}
        self._synchronize()
        begin_s = time.perf_counter()
        yield views
        self._synchronize()
        self.seconds.setdefault(op, []).append(time.perf_counter() - begin_s)
