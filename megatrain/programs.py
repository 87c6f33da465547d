"""The ops of a training step, of its flush and of a plain forward, over the blocks of a model's units.

Scope: which op reads and writes which block, for both update modes; pure values, no torch.
Not here: what an op computes (`stream.py`, `optim.py`), when its bytes move (`tiering`).

Modes (design, section 7). *fused*: without clipping a unit is updated in backward as soon as its gradient is whole.
*deferred*: clipping needs every gradient first, so step t's update of a unit runs just before its forward of step
t + 1, and `flush` ends the last step. Between them: a share of the units, spread evenly, is updated late and the
others in backward, which evens out the bytes that both halves of a step move.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tiering.workload import Block, Life, Moves, Op, Program, Touch, Workload, make_workload, pages

KINDS = ("weight", "exp_avg", "exp_avg_sq")
Precision = Literal["fp32", "tf32", "bf16"]
"""What a forward and a backward compute in. Weights, gradients and moments are FP32 in each of them."""
WEIGHT_BF16 = "weight_bf16"
"""Kind of the copy of a weight that ops compute with in BF16. It is made from the weight, and is in no commit."""
CAST = "cast"
"""The program that makes all these copies, before the first step."""
ACTIVATION = "activation"
"""Kind of the input that a unit's forward leaves for its backward."""
HEAD = "loss"
FORWARD = "forward"
"""The program of forwards alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """A unit as the planner sees it. `nbytes`: its own parameters in FP32, padded (0: it owns none). `borrows`: units
    whose weights it uses too (tied, or frozen). frozen: it computes nothing and has no gradient; others borrow it.
    activation_bytes: its input for the whole step (0: token ids, or the head's, which is used at once). Flops and
    measured seconds (0: not measured) of one step: forward alone, and backward with its recompute.
    """

    name: str
    nbytes: int
    borrows: tuple[str, ...] = ()
    frozen: bool = False
    activation_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


def block_name(unit: str, kind: str) -> str:
    return f"{unit}/{kind}"


def late_units(units: Sequence[UnitSize], share: float) -> frozenset[str]:
    """Names of about `share` (0 to 1) of the bytes of all units that have parameters, spread evenly over them.

    >>> sorted(late_units([UnitSize(name=f"L{i}", nbytes=4096) for i in range(8)], 0.25))
    ['L1', 'L5']
    """
    late, seen, taken = [], 0, 0
    for unit in (unit for unit in units if unit.nbytes and not unit.frozen):
        seen += unit.nbytes
        if taken + unit.nbytes / 2 <= share * seen:
            late.append(unit.name)
            taken += unit.nbytes
    return frozenset(late)


def training_workload(
    units: Sequence[UnitSize],
    *,
    deferred: bool,
    late: Collection[str] = (),
    validates: bool = False,
    bf16: bool = False,
) -> Workload:
    """Programs "step" (cyclic), and where updates are late "first" (nothing pending) and "flush" (updates alone).

    units: in the order in which the forward calls them, the head last; frozen ones anywhere. deferred: all updates are
    late. late: names of the units whose update is, where the others are updated in backward. validates: with "forward"
    too, over the same homes. bf16: ops compute with BF16 copies of the weights, which "cast" makes first and every
    update makes anew.
    """
    step, frozen = _Step(units, bf16=bf16), [unit for unit in units if unit.frozen]
    copied = [unit for unit in units if unit.nbytes] if bf16 else []
    units = step.units
    late = {unit.name for unit in units} if deferred else set(late)
    blocks = [
        *_blocks(units, KINDS, "durable"),
        *_blocks(frozen, KINDS[:1], "durable"),
        *_blocks([unit for unit in units if unit.name in late], ("grad",), "carried"),
        *_blocks([unit for unit in units if unit.name not in late], ("grad",), "local"),
        *(_copy(unit) for unit in copied),
    ]
    blocks += [
        Block(
            name=block_name(unit.name, ACTIVATION),
            unit=unit.name,
            kind=ACTIVATION,
            nbytes=pages(unit.activation_bytes),
            life="passing",
        )
        for unit in units[:-1]
        if unit.activation_bytes
    ]
    names = {unit.name for unit in units}
    backward = tuple(step.backward(update=names - late))
    passes = (*step.forward(leaves=True), *backward)
    programs = [Program(name=CAST, ops=tuple(map(_cast, copied)))] if copied else []
    # Before the others: an op that two programs have is timed as in the last one, and the head of a step trains.
    programs += [Program(name=FORWARD, ops=step.forward_only())] if validates else []
    if not late:
        return make_workload(blocks, [*programs, Program(name="step", ops=passes, cyclic=True)])
    pending = (*step.forward(leaves=True, update=late), *backward)
    flush = tuple(step.update(u, moves="no") for u in units if u.nbytes and u.name in late)
    return make_workload(
        blocks,
        [
            *programs,
            Program(name="step", ops=pending, cyclic=True),
            Program(name="first", ops=passes),
            Program(name="flush", ops=flush),
        ],
    )


def forward_workload(units: Sequence[UnitSize]) -> Workload:
    """The one program "forward": evaluation and generation."""
    step = _Step(units)
    program = Program(name=FORWARD, ops=step.forward_only(), cyclic=True)
    return make_workload(_blocks(units, ("weight",), "durable"), [program])


def _blocks(units: Sequence[UnitSize], kinds: Sequence[str], life: Life) -> list[Block]:
    return [
        Block(name=block_name(unit.name, kind), unit=unit.name, kind=kind, nbytes=unit.nbytes, life=life)
        for kind in kinds
        for unit in units
        if unit.nbytes
    ]


def _copy(unit: UnitSize) -> Block:
    """Carried: it is as new as the weight, and can be made from it again."""
    nbytes = pages(unit.nbytes // 2)
    name = block_name(unit.name, WEIGHT_BF16)
    return Block(name=name, unit=unit.name, kind=WEIGHT_BF16, nbytes=nbytes, life="carried")


def _cast(unit: UnitSize) -> Op:
    touches = (
        Touch(block=block_name(unit.name, "weight"), reads=True, writes=False),
        Touch(block=block_name(unit.name, WEIGHT_BF16), reads=False, writes=True),
    )
    return Op(name=f"{CAST}.{unit.name}", lane="update", touches=touches, tiled=True)


class _Step:
    """units: those that compute. bf16: with copies of the weights."""

    def __init__(self, units: Sequence[UnitSize], *, bf16: bool = False) -> None:
        self.bf16 = bf16
        self.units = [unit for unit in units if not unit.frozen]
        self.of = {unit.name: unit for unit in units}

    def used(self, unit: UnitSize) -> list[str]:
        """Units whose weights `unit` computes with."""
        return [name for name in (unit.name, *unit.borrows) if self.of[name].nbytes]

    def trained(self, unit: UnitSize) -> list[str]:
        """Those of them that have gradients."""
        return [name for name in self.used(unit) if not self.of[name].frozen]

    def reads(self, unit: UnitSize) -> tuple[Touch, ...]:
        kind = WEIGHT_BF16 if self.bf16 else "weight"
        return tuple(Touch(block=block_name(name, kind), reads=True, writes=False) for name in self.used(unit))

    def forward(self, *, leaves: bool = False, update: Collection[str] = ()) -> Iterator[Op]:
        """Forward ops of all units but the head. leaves: activations, for a backward. update: units whose update is
        pending, each just before its weights are first used.
        """
        updated: set[str] = set()
        for unit in self.units:
            for name in self.trained(unit):
                if name in update and name not in updated:
                    updated.add(name)
                    yield self.update(self.of[name], moves="earlier")
            if unit is not self.units[-1]:
                yield Op(
                    name=f"fwd.{unit.name}",
                    lane="compute",
                    touches=(*self.reads(unit), *(self.activation(unit, leaves=True) if leaves else ())),
                    flops=unit.forward_flops,
                    seconds=unit.forward_s,
                )

    def forward_only(self) -> tuple[Op, ...]:
        """All of a pass that computes the loss and nothing else."""
        return (*self.forward(), self.head(train=False))

    def activation(self, unit: UnitSize, *, leaves: bool) -> tuple[Touch, ...]:
        """A forward leaves its input, a backward finds it."""
        if not unit.activation_bytes:
            return ()
        return (Touch(block=block_name(unit.name, ACTIVATION), reads=not leaves, writes=leaves),)

    def head(self, *, train: bool) -> Op:
        """The head: its forward, the loss and, in training, its backward while the logits are there."""
        unit = self.units[-1]
        grads = self.grads(unit, set()) if train else ()
        flops = unit.backward_flops if train else unit.forward_flops  # nothing is computed again
        touches = (*self.reads(unit), *grads)
        return Op(name=HEAD, lane="compute", touches=touches, flops=flops, seconds=unit.forward_s + unit.backward_s)

    def grads(self, unit: UnitSize, begun: set[str]) -> tuple[Touch, ...]:
        """The first op of the pass that adds to a gradient defines it."""
        return tuple(
            Touch(block=block_name(name, "grad"), reads=name in begun, writes=True) for name in self.trained(unit)
        )

    def backward(self, *, update: Collection[str]) -> Iterator[Op]:
        """Backward ops of all units, the head first. update: units that are updated once their gradient is whole."""
        order = list(reversed(self.units))
        last_use = {name: unit.name for unit in order for name in self.trained(unit)}
        begun: set[str] = set()
        for unit in order:
            if unit is self.units[-1]:
                yield self.head(train=True)
            else:
                touches = (*self.reads(unit), *self.activation(unit, leaves=False), *self.grads(unit, begun))
                yield Op(
                    name=f"bwd.{unit.name}",
                    lane="compute",
                    touches=touches,
                    flops=unit.backward_flops,
                    seconds=unit.backward_s,
                )
            begun.update(self.trained(unit))
            for name in self.trained(unit):
                if name in update and last_use[name] == unit.name:
                    yield self.update(self.of[name], moves="later")

    def update(self, unit: UnitSize, *, moves: Moves) -> Op:
        touches = [Touch(block=block_name(unit.name, kind), reads=True, writes=True) for kind in KINDS]
        touches.append(Touch(block=block_name(unit.name, "grad"), reads=True, writes=False))
        if self.bf16:
            touches.append(Touch(block=block_name(unit.name, WEIGHT_BF16), reads=False, writes=True))
        return Op(name=f"upd.{unit.name}", lane="update", touches=tuple(touches), tiled=True, moves=moves)
