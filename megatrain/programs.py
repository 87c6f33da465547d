"""The ops of a training step, of its flush and of a plain forward, over the blocks of a model's units.

Scope: which op reads and writes which block, for both update modes; pure values, no torch.
Not here: what an op computes (`stream.py`, `optim.py`), when its bytes move (`tiering`).

Modes (design, section 7). *fused*: without clipping a unit is updated in backward as soon as its gradient is whole.
*deferred*: clipping needs every gradient first, so step t's update of a unit runs just before its forward of step
t + 1, and `flush` ends the last step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tiering.workload import Block, Life, Moves, Op, Program, Touch, Workload, make_workload, pages

KINDS = ("weight", "exp_avg", "exp_avg_sq")
ACTIVATION = "activation"
"""Kind of the input that a unit's forward leaves for its backward."""
HEAD = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """A unit as the planner sees it. `nbytes`: its own parameters, padded (0: it owns none). `borrows`: units whose
    weights it uses too (tied). activation_bytes: its input for the whole step (0: token ids, or the head's, which is
    used at once). Flops and measured seconds (0: not measured) of one step: forward alone, and backward with its
    recompute.
    """

    name: str
    nbytes: int
    borrows: tuple[str, ...] = ()
    activation_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


def block_name(unit: str, kind: str) -> str:
    return f"{unit}/{kind}"


def training_workload(units: Sequence[UnitSize], *, deferred: bool) -> Workload:
    """Programs "step" (cyclic), and for deferred updates "first" (nothing pending) and "flush" (updates alone).

    units: in the order in which the forward calls them, the head last.
    """
    step = _Step(units)
    blocks = [*_blocks(units, KINDS, "durable"), *_blocks(units, ("grad",), "carried" if deferred else "local")]
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
    if not deferred:
        ops = (*step.forward(leaves=True), *step.backward(update=True))
        return make_workload(blocks, [Program(name="step", ops=ops, cyclic=True)])
    passes = (*step.forward(leaves=True), *step.backward(update=False))
    pending = (*step.forward(leaves=True, update=True), *step.backward(update=False))
    flush = tuple(step.update(u, moves="no") for u in units if u.nbytes)
    return make_workload(
        blocks,
        [
            Program(name="step", ops=pending, cyclic=True),
            Program(name="first", ops=passes),
            Program(name="flush", ops=flush),
        ],
    )


def forward_workload(units: Sequence[UnitSize]) -> Workload:
    """The one program "forward": evaluation and generation."""
    step = _Step(units)
    program = Program(name="forward", ops=(*step.forward(), step.head(train=False)), cyclic=True)
    return make_workload(_blocks(units, ("weight",), "durable"), [program])


def _blocks(units: Sequence[UnitSize], kinds: Sequence[str], life: Life) -> list[Block]:
    return [
        Block(name=block_name(unit.name, kind), unit=unit.name, kind=kind, nbytes=unit.nbytes, life=life)
        for kind in kinds
        for unit in units
        if unit.nbytes
    ]


@dataclass(slots=True)
class _Step:
    units: Sequence[UnitSize]
    of: dict[str, UnitSize] = field(init=False)

    def __post_init__(self) -> None:
        self.of = {unit.name: unit for unit in self.units}

    def used(self, unit: UnitSize) -> list[str]:
        """Units whose weights `unit` computes with."""
        return [name for name in (unit.name, *unit.borrows) if self.of[name].nbytes]

    def reads(self, unit: UnitSize) -> tuple[Touch, ...]:
        return tuple(Touch(block=block_name(name, "weight"), reads=True, writes=False) for name in self.used(unit))

    def forward(self, *, leaves: bool = False, update: bool = False) -> Iterator[Op]:
        """Forward ops of all units but the head. leaves: activations, for a backward. update: what is pending, for each
        unit just before its weights are first used.
        """
        updated: set[str] = set()
        for unit in self.units:
            for name in self.used(unit) if update else ():
                if name not in updated:
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
            Touch(block=block_name(name, "grad"), reads=name in begun, writes=True) for name in self.used(unit)
        )

    def backward(self, *, update: bool) -> Iterator[Op]:
        order = list(reversed(self.units))
        last_use = {name: unit.name for unit in order for name in self.used(unit)}
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
            begun.update(self.used(unit))
            for name in self.used(unit) if update else ():
                if last_use[name] == unit.name:
                    yield self.update(self.of[name], moves="later")

    def update(self, unit: UnitSize, *, moves: Moves) -> Op:
        touches = [Touch(block=block_name(unit.name, kind), reads=True, writes=True) for kind in KINDS]
        touches.append(Touch(block=block_name(unit.name, "grad"), reads=True, writes=False))
        return Op(name=f"upd.{unit.name}", lane="update", touches=tuple(touches), tiled=True, moves=moves)
