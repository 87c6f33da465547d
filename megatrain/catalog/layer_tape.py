"""A decoder layer, its norms and its attention as the operations that transformers' code runs.

Scope: which tensors each operation makes, keeps for backward, and needs beside its gradients; sizes in FP32 elements.
Not here: counting what is alive (`tape.py`), flops (`estimate.py`).

Attention is torch's fused kernel, which never holds the scores; it holds a number a token and head, and a mask where a
layer has a window. Where a model asks for the plain form, or the kernel cannot do it (`is_fused`), rows x heads x
seq_len x seq_len scores are counted.
"""

from dataclasses import dataclass

from megatrain.catalog.anatomy import Attention, Dense, Experts, Layer, NormKind, norm_tensors
from megatrain.catalog.tape import Tape, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A micro-batch: rows x seq_len tokens, computed on a CPU or a GPU."""

    rows: int
    seq_len: int
    gpu: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


def is_fused(part: Attention, gpu: bool) -> bool:
    """The CPU's kernel takes no dropout, and no values that are narrower than queries. A GPU's are assumed to."""
    return not part.eager and (gpu or not (part.dropout or part.head_dim != part.value_dim))


def layer(tape: Tape, part: Layer, shape: Rows) -> None:
    """A whole layer on an input that is not counted: it is a boundary activation."""
    x = Value(shape.tokens * part.hidden, stored=False)
    if part.parallel:
        y = norm(tape, part.norm, x, part.hidden)
        attended = _attention(tape, part.attention, y, shape)
        if part.norms == "am":
            y = norm(tape, part.norm, x, part.hidden)
        tape.add(tape.add(x, attended), _mlp(tape, part.mlp, y, shape))
        return
    y = norm(tape, part.norm, x, part.hidden) if "a" in part.norms else x
    y = _dropped(tape, _attention(tape, part.attention, y, shape), part)
    if "A" in part.norms:
        y = norm(tape, part.norm, y, part.hidden)
    x = tape.add(x, y)
    y = norm(tape, part.norm, x, part.hidden) if "m" in part.norms else x
    y = _dropped(tape, _mlp(tape, part.mlp, y, shape), part)
    if "M" in part.norms:
        y = norm(tape, part.norm, y, part.hidden)
    tape.add(x, y)


def norm(tape: Tape, kind: NormKind, x: Value, width: int) -> Value:
    """Rows of `width` elements, as the models spell it."""
    n, rows = x.size, x.size / width
    weight = sum(norm_tensors(kind, width))
    if kind == "layer":
        return tape.op(n, [x], saves=[x, Value(2 * rows)], weight=weight)
    centred = x
    if kind == "mean":
        mean = tape.op(rows, [x])
        centred = tape.op(n, [x, mean])
        x = tape.add(x)
    squares = tape.op(n, [centred], saves=[centred], scratch=2 * n)
    inverse = tape.op(rows, [tape.op(rows, [squares])], saves_out=True)
    scaled = tape.op(n, [x, inverse], saves=[x, inverse], scratch=n)
    return tape.op(n, [scaled], saves=[scaled], scratch=n, weight=weight)


def _dropped(tape: Tape, x: Value, part: Layer) -> Value:
    """Dropout keeps its noise."""
    if isinstance(part.mlp, Dense) and part.mlp.dropout:
        return tape.op(x.size, [x], saves=[Value(x.size)])
    return x


def _linear(tape: Tape, x: Value, tokens: float, matrix: tuple[int, int, bool]) -> Value:
    columns, rows, bias = matrix
    return tape.op(tokens * rows, [x], saves=[x], weight=columns * rows + (rows if bias else 0))


def _attention(tape: Tape, part: Attention, x: Value, shape: Rows) -> Value:
    tokens = shape.tokens
    *inner, last = part.matrices()
    if part.kv_rank:
        q, k, v = _low_rank(tape, part, x, tokens)
    elif part.packed:
        packed = _linear(tape, x, tokens, inner[0])
        q, k, v = tape.split(packed, [tokens * width for width in (part.queries, part.keys, part.values)])
    else:
        q, k, v = [_linear(tape, x, tokens, matrix) for matrix in inner]
        if part.qk_norm != "none":
            q = norm(tape, "rms", q, part.head_dim if part.qk_norm == "head" else part.queries)
            k = norm(tape, "rms", k, part.head_dim if part.qk_norm == "head" else part.keys)
    if part.rotary:
        q, k = _rotary(tape, q), _rotary(tape, k)
    masked = 0 < part.window < shape.seq_len
    fused = is_fused(part, shape.gpu)
    if part.kv_heads < part.heads and (masked or not fused or part.head_dim > 256):
        k = tape.op(tokens * part.queries, [k])
        v = tape.op(tokens * part.output, [v])
    if not fused:
        out = _scores(tape, part, q, k, v, shape)
    else:
        sums = Value(tokens * part.heads)
        mask = Value(tokens * shape.seq_len if masked else 0)
        out = tape.op(tokens * part.output, [q, k, v], saves=[q, k, v, sums, mask], saves_out=True)
    return _linear(tape, out, tokens, last)


def _low_rank(tape: Tape, part: Attention, x: Value, tokens: int) -> tuple[Value, Value, Value]:
    *inner, _ = part.matrices()
    q = x
    if part.q_rank:
        q = norm(tape, "rms", _linear(tape, x, tokens, inner[0]), part.q_rank)
        inner = inner[1:]
    q = _linear(tape, q, tokens, inner[0])
    both = _linear(tape, x, tokens, inner[1])
    narrow, _ = tape.split(both, [tokens * part.kv_rank, tokens * part.rope_dim])
    wide = _linear(tape, norm(tape, "rms", narrow, part.kv_rank), tokens, inner[2])
    plain, v = tape.split(wide, [wide.size - tokens * part.output, tokens * part.output])
    return q, tape.op(tokens * part.queries, [plain]), v


def _rotary(tape: Tape, x: Value) -> Value:
    """x * cos + rotate_half(x) * sin; cos and sin get gradients too, which nobody reads."""
    n = x.size
    straight = tape.op(n, [x], saves=[x], scratch=n)
    turned = tape.op(n, [x], scratch=n / 2)
    return tape.add(straight, tape.op(n, [turned], saves=[turned], scratch=n))


def _scores(tape: Tape, part: Attention, q: Value, k: Value, v: Value, shape: Rows) -> Value:
    """Attention with its scores in memory: softmax keeps them, and so does each of soft cap and dropout."""
    n = shape.tokens * shape.seq_len * part.heads
    q, k = tape.op(q.size, [q]), tape.op(k.size, [k])
    scores = tape.op(n, [q, k], saves=[q, k])
    if part.softcap:
        scores = tape.op(n, [scores], saves_out=True)
    if part.sinks:
        scores = tape.op(n, [scores])
    chances = tape.op(n, [scores], saves_out=True)
    if part.sinks:
        (chances,) = tape.split(chances, [n])  # what went to the sink is cut off
    if part.dropout:
        chances = tape.op(n, [chances], saves=[Value(n)])
    return tape.op(shape.tokens * part.output, [chances, v], saves=[chances, v])


def _mlp(tape: Tape, part: Dense | Experts, x: Value, shape: Rows) -> Value:
    if isinstance(part, Dense):
        return _dense(tape, part, x, shape.tokens)
    tokens = shape.tokens
    if not part.shared_gate:
        routed = _experts(tape, part, x, tokens)
        return routed if part.shared is None else tape.add(routed, _dense(tape, part.shared, x, tokens))
    assert part.shared is not None
    shared = _dense(tape, part.shared, x, tokens)
    routed = _experts(tape, part, x, tokens)
    gate = tape.op(tokens, [_linear(tape, x, tokens, (part.hidden, 1, False))], saves_out=True)
    gated = tape.op(x.size, [gate, shared], saves=[gate, shared], scratch=x.size)
    return tape.add(routed, gated)


def _dense(tape: Tape, part: Dense, x: Value, tokens: float) -> Value:
    n = tokens * part.inner
    *inner, last = part.matrices()
    if not part.gated:
        return _linear(tape, _activation(tape, part, _linear(tape, x, tokens, inner[0])), tokens, last)
    if part.packed:
        gate, up = tape.split(_linear(tape, x, tokens, inner[0]), [n, n])
        active = tape.op(n, [gate], saves=[gate])
    else:
        gate = _linear(tape, x, tokens, inner[0])
        active = tape.op(n, [gate], saves=[gate])
        up = _linear(tape, x, tokens, inner[1])
    return _linear(tape, tape.op(n, [active, up], saves=[active, up]), tokens, last)


def _activation(tape: Tape, part: Dense, x: Value) -> Value:
    """One fused kernel that keeps its input, or GPT-2's formula for gelu spelled out."""
    n = x.size
    if not part.spelled_out:
        return tape.op(n, [x], saves=[x])
    half = tape.op(n, [x])
    cube = tape.op(n, [tape.op(n, [x], saves=[x], scratch=2 * n)])
    curve = tape.op(n, [tape.op(n, [tape.add(x, cube)])], saves_out=True)
    factor = tape.add(curve)
    return tape.op(n, [half, factor], saves=[half, factor])


def _experts(tape: Tape, part: Experts, x: Value, tokens: int) -> Value:
    """A copy of each token for each of its experts, sorted by expert, through grouped products, and back in order."""
    routed = tokens * part.routed
    n, wide = routed * part.inner, routed * part.hidden
    router = tape.op(tokens * part.experts, [x], saves=[x], weight=part.experts * part.hidden)
    chances = tape.op(routed, [tape.op(router.size, [router], saves_out=True)])
    up, down, *biases = part.stacked()
    both = tape.op(2 * n, [copies := tape.op(wide, [x])], saves=[copies], weight=up)
    gate, linear = tape.split(both, [n, n])
    if part.clamped:
        gate, linear = tape.op(n, [gate], saves=[gate]), tape.op(n, [linear], saves=[linear])
        slope = tape.op(n, [tape.op(n, [gate])], saves_out=True)
        active = tape.op(n, [gate, slope], saves=[gate, slope])
        linear = tape.op(n, [linear])
    else:
        active = tape.op(n, [gate], saves=[gate])
    product = tape.op(n, [active, linear], saves=[active, linear])
    out = tape.op(wide, [product], saves=[product], weight=down + sum(biases))
    weighted = tape.op(wide, [out, chances], saves=[out, chances], scratch=wide)
    return tape.op(x.size, [tape.op(wide, [weighted])])
