"""What each unit of a model costs to compute, from its config alone: flops and bytes of memory of one micro-batch.

Scope: sums over the parts of a decoder; no torch. The tests hold them against `megatrain/profile.py`, which runs the
model's own code.
Not here: which operations keep what (`layer_tape.py`), how fast a machine is (`parts.py`, `tiering/measure.py`).

Flops, for T tokens in sequences of S: 2 T for each element of a matrix that a token meets, and 2 T S heads (head_dim +
value_dim) for attention, whose kernel skips the causal half while all of it is counted. Backward is the forward again
and twice as much; fused attention 2.5 times as much, since it computes the scores once more. All of it is derived.
"""

from collections.abc import Mapping
from typing import Any

from megatrain.catalog.anatomy import Anatomy, Experts, Layer
from megatrain.catalog.families import anatomy
from megatrain.catalog.layer_tape import Rows, is_fused, layer, norm
from megatrain.catalog.tape import Tape, Value
from megatrain.catalog.unit_cost import UnitCost
from megatrain.chunks import chunk_length

FLOAT_BYTES = 4
LOSS_BYTES = 18
"""Bytes a logit that the head is given. FP32 needs 12 (the logits' log-softmax, its gradient, theirs), a soft cap 16;
the rest is room for a head that casts."""


def estimate(
    config: Mapping[str, Any], micro_batch: int, seq_len: int, *, gpu: bool = False, loss_chunk: int | None = None
) -> dict[str, UnitCost] | None:
    """Cost of each unit for a micro-batch of [micro_batch, seq_len] tokens, by unit name; None for a config that is not
    known in full. gpu: its attention kernels can do more than those of the CPU. loss_chunk: tokens whose logits exist
    at a time (None: all).
    """
    found = anatomy(config)
    return None if found is None else costs_of(found, micro_batch, seq_len, gpu=gpu, loss_chunk=loss_chunk)


def costs_of(
    model: Anatomy, micro_batch: int, seq_len: int, *, gpu: bool = False, loss_chunk: int | None = None
) -> dict[str, UnitCost]:
    """Cost of each unit, in the order of a forward."""
    shape = Rows(rows=micro_batch, seq_len=seq_len, gpu=gpu)
    width = shape.tokens * model.hidden
    costs: dict[str, UnitCost] = {}
    for table in model.embeddings:
        vectors = seq_len * model.hidden if table.once else width
        # The vectors and their gradient beside the gradient of the whole table.
        costs[table.name] = _cost(0.0, 0.0, table.rows * model.hidden + (table.copies + 1) * vectors, 0, vectors)
    known = {part: _layer_cost(part, shape) for part in set(model.layers)}
    for number, part in enumerate(model.layers):
        costs[f"{model.layers_name}.{number}"] = known[part]
    tape = Tape()
    norm(tape, model.norm, Value(width, stored=False), model.hidden)
    costs[model.norm_name] = _cost(0.0, 0.0, tape.peak(), width, width)
    chunk = micro_batch * chunk_length(micro_batch, seq_len, loss_chunk)
    costs[model.head_name] = head_cost(model.hidden, model.vocabulary, shape.tokens, chunk)
    return costs


def head_cost(hidden: int, vocabulary: int, tokens: int, chunk: int | None = None) -> UnitCost:
    """The head with the loss, on `tokens`, `chunk` of them at a time (None: all).

    32,768 tokens by a vocabulary of 151,936 take 18 bytes a logit; in chunks of 1,024 tokens a 32nd of that:

    >>> head_cost(1024, 151936, 32768).workspace_bytes / 2**30
    83.4609375
    >>> head_cost(1024, 151936, 32768, 1024).workspace_bytes / 2**30
    2.608154296875
    """
    held = tokens if chunk is None else chunk
    logits, table = held * vocabulary, hidden * vocabulary
    flops = 2.0 * tokens * table
    states = held * hidden * (1 if held == tokens else 2)  # their gradient; a chunk of several sequences is a copy
    after = FLOAT_BYTES * (logits + table + states + 2)  # the loss, and its gradient
    return UnitCost(
        forward_flops=flops,
        backward_flops=3 * flops,
        workspace_bytes=max(LOSS_BYTES * logits, after),
        output_bytes=FLOAT_BYTES,
    )


def _layer_cost(part: Layer, shape: Rows) -> UnitCost:
    tape = Tape()
    layer(tape, part, shape)
    attention = part.attention
    products = 2.0 * shape.tokens * _matrices(part)
    scores = 2.0 * shape.tokens * shape.seq_len * attention.heads * (attention.head_dim + attention.value_dim)
    width = shape.tokens * part.hidden
    again = 3.5 if is_fused(attention, shape.gpu) else 3.0
    return _cost(products + scores, 3 * products + again * scores, tape.peak(), width, width)


def _matrices(part: Layer) -> int:
    """Elements of all matrices that one token meets."""
    mlp = part.mlp
    total = sum(columns * rows for columns, rows, _ in part.attention.matrices())
    if not isinstance(mlp, Experts):
        return total + sum(columns * rows for columns, rows, _ in mlp.matrices())
    total += mlp.experts * mlp.hidden + mlp.routed * 3 * mlp.inner * mlp.hidden + (mlp.hidden if mlp.shared_gate else 0)
    return total + (sum(columns * rows for columns, rows, _ in mlp.shared.matrices()) if mlp.shared else 0)


def _cost(forward: float, backward: float, workspace: float, inputs: int, output: int) -> UnitCost:
    return UnitCost(
        forward_flops=forward,
        backward_flops=backward,
        workspace_bytes=round(FLOAT_BYTES * workspace),
        output_bytes=FLOAT_BYTES * output,
        input_bytes=FLOAT_BYTES * inputs,
    )
