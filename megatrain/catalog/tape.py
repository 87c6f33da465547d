"""How many elements are alive at once while a chain of operations runs backward, counted on values without data.

Scope: what autograd keeps, hands on and lets go; pure arithmetic.
Not here: which operations a layer is made of (`layer_tape.py`), the same count on torch's own graph
(`megatrain/profile.py`).

The rules are those of torch's engine. A value stays as long as an operation that needs it has not run backward. An
operation makes the gradients of all its inputs before it lets go of its own; a second gradient of a value is added in
place, unless the first one is shared. Gradients of parameters stay until the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of so many elements. base: the tensor whose bytes a view is part of. stored: False for what is not
    counted: the layer's input, weights.
    """

    size: float
    base: "Value | None" = None
    stored: bool = True
    savers: int = 0


@dataclass(slots=True, eq=False)
class _Gradient:
    """Elements that are the gradient of `users` values."""

    size: float
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    outs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    saves: tuple[Value, ...] = ()
    scratch: float = 0.0
    weight: float = 0.0
    shares: bool = False


class Tape:
    """Record the operations of a forward, then ask `peak`."""

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        self._live = 0.0
        self._peak = 0.0

    def op(
        self,
        size: float,
        inputs: Sequence[Value],
        *,
        saves: Sequence[Value] = (),
        saves_out: bool = False,
        scratch: float = 0.0,
        weight: float = 0.0,
    ) -> Value:
        """An operation with an output of its own. saves: what its backward needs. scratch: elements that its backward
        takes beside the gradients of its inputs. weight: elements of the parameters whose gradients it makes.
        """
        out = Value(size)
        kept = tuple(value.base or value for value in (*saves, *([out] if saves_out else [])))
        for value in kept:
            value.savers += 1
        self._ops.append(_Op(outs=(out,), inputs=tuple(inputs), saves=kept, scratch=scratch, weight=weight))
        return out

    def add(self, *inputs: Value) -> Value:
        """A sum: nothing is kept, and all inputs get the same gradient."""
        out = Value(inputs[0].size)
        self._ops.append(_Op(outs=(out,), inputs=inputs, shares=True))
        return out

    def split(self, value: Value, sizes: Sequence[float]) -> list[Value]:
        """Views of parts of a value; backward joins their gradients in one."""
        views = [Value(size, base=value.base or value) for size in sizes]
        self._ops.append(_Op(outs=tuple(views), inputs=(value,)))
        return views

    def peak(self) -> float:
        """The most elements alive in backward: it begins with the last operation's output and the gradient of it."""
        (output,) = self._ops[-1].outs
        kept = {value for op in self._ops for value in op.saves if value.stored} | {output}
        output.savers += 1
        self._live = sum(value.size for value in kept) + output.size
        self._peak = self._live
        gradients = {output: _Gradient(output.size, users=2)}  # the caller holds it too
        for op in reversed(self._ops):
            given = [gradients.pop(out) for out in op.outs if out in gradients]
            if not given:
                continue
            self._grow(op.weight)
            fresh = given * len(op.inputs) if op.shares else [_Gradient(value.size) for value in op.inputs]
            if not op.shares:
                self._grow(sum(gradient.size for gradient in fresh), op.scratch)
            for value, gradient in zip(op.inputs, fresh, strict=True):
                self._hand_on(gradients, value, gradient)
            for gradient in given:
                gradient.users -= 1
                self._free(gradient)
            for value in op.saves:
                value.savers -= 1
                if value.savers == 0 and value.stored:
                    self._live -= value.size
        return self._peak

    def _grow(self, size: float, scratch: float = 0.0) -> None:
        self._live += size
        self._peak = max(self._peak, self._live + scratch)

    def _free(self, gradient: _Gradient) -> None:
        if gradient.users == 0:
            self._live -= gradient.size

    def _hand_on(self, gradients: dict[Value, _Gradient], value: Value, fresh: _Gradient) -> None:
        first = gradients.get(value)
        if first is None:
            gradients[value] = fresh
            fresh.users += 1
            return
        if first.users > 1:
            first.users -= 1
            self._grow(value.size)
            gradients[value] = _Gradient(value.size, users=1)
        self._free(fresh)
