"""What a decoder is made of: the parts of each layer with their widths, as values.

Scope: attention, feed-forward part, norms, and the elements of their parameters; pure values, no torch.
Not here: which config means which parts (`families.py`), bytes of units (`shapes.py`), what they cost (`estimate.py`).

`tensors` lists the elements of each parameter. Their order is free: a unit pads every tensor to 16 elements and itself
to pages, so the order does not change its bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "gemma", "layer", "mean"]
"""rms: x / rms(x) * w. gemma: times (1 + w). layer: torch's LayerNorm, with a bias. mean: LayerNorm without one, as a
formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """heads x (head_dim for queries and keys, value_dim for values). `*_rank`: low-rank projections (0: none), of which
    rope_dim columns turn. packed: queries, keys and values come from one matrix. qk_norm: a norm on queries and keys,
    of each head or of all heads at once. eager: scores are whole in memory. window: tokens that a token sees (0: all).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    in_bias: bool = False
    out_bias: bool = False
    packed: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    rotary: bool = True
    sinks: bool = False
    eager: bool = False
    softcap: bool = False
    dropout: bool = False
    window: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def output(self) -> int:
        return self.heads * self.value_dim

    def matrices(self) -> Iterator[tuple[int, int, bool]]:
        """(columns, rows, has a bias) of every projection."""
        if self.kv_rank:
            if self.q_rank:
                yield self.hidden, self.q_rank, self.in_bias
            yield self.q_rank or self.hidden, self.queries, False
            yield self.hidden, self.kv_rank + self.rope_dim, self.in_bias
            yield self.kv_rank, self.heads * (self.head_dim - self.rope_dim + self.value_dim), False
        elif self.packed:
            yield self.hidden, self.queries + self.keys + self.values, self.in_bias
        else:
            for width in (self.queries, self.keys, self.values):
                yield self.hidden, width, self.in_bias
        yield self.output, self.hidden, self.out_bias

    def tensors(self) -> Iterator[int]:
        for columns, rows, bias in self.matrices():
            yield columns * rows
            if bias:
                yield rows
        yield from (rank for rank in (self.q_rank, self.kv_rank) if rank)  # each has a norm
        if self.qk_norm == "head":
            yield from (self.head_dim, self.head_dim)
        if self.qk_norm == "all":
            yield from (self.queries, self.keys)
        if self.sinks:
            yield self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """One feed-forward part. gated: act(gate) * up, in one matrix if packed. spelled_out: the activation is a formula
    of many operations instead of one kernel.
    """

    hidden: int
    inner: int
    gated: bool = True
    packed: bool = False
    bias: bool = False
    dropout: bool = False
    spelled_out: bool = False

    def matrices(self) -> Iterator[tuple[int, int, bool]]:
        if self.packed:
            yield self.hidden, 2 * self.inner, self.bias
        else:
            yield from [(self.hidden, self.inner, self.bias)] * (2 if self.gated else 1)
        yield self.inner, self.hidden, self.bias

    def tensors(self) -> Iterator[int]:
        for columns, rows, bias in self.matrices():
            yield columns * rows
            if bias:
                yield rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`experts` gated parts in stacked tensors, `routed` of them for a token, and one that all tokens pass. clamped:
    the gate's formula bounds its inputs first.
    """

    hidden: int
    inner: int
    experts: int
    routed: int
    bias: bool = False
    router_bias: bool = False
    clamped: bool = False
    shared: Dense | None = None
    shared_gate: bool = False

    def tensors(self) -> Iterator[int]:
        yield self.experts * self.hidden
        if self.router_bias:
            yield self.experts
        yield from self.stacked()
        if self.shared is not None:
            yield from self.shared.tensors()
        if self.shared_gate:
            yield self.hidden

    def stacked(self) -> Iterator[int]:
        """Tensors that hold all experts."""
        yield self.experts * 2 * self.inner * self.hidden
        yield self.experts * self.hidden * self.inner
        if self.bias:
            yield from (self.experts * 2 * self.inner, self.experts * self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """norms: where a norm stands: before and after attention, before and after the feed-forward part ("a", "A", "m",
    "M"). parallel: both parts read the layer's input, and the norms before them may be one ("a" alone).
    """

    attention: Attention
    mlp: Dense | Experts
    norm: NormKind
    norms: str
    parallel: bool = False

    @property
    def hidden(self) -> int:
        return self.attention.hidden

    def tensors(self) -> Iterator[int]:
        yield from self.attention.tensors()
        yield from self.mlp.tensors()
        for _ in self.norms:
            yield from norm_tensors(self.norm, self.hidden)


def norm_tensors(kind: NormKind, width: int) -> list[int]:
    return [width, width] if kind == "layer" else [width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding. once: looked up for one sequence, whose vectors all sequences of a micro-batch share. copies: of
    its vectors, made in forward.
    """

    name: str
    rows: int
    once: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """A decoder. `*_name`: as the model names its modules."""

    hidden: int
    vocabulary: int
    tied: bool
    embeddings: tuple[Table, ...]
    layers_name: str
    layers: tuple[Layer, ...]
    norm: NormKind
    norm_name: str
    head_name: str = "lm_head"
