"""The schedule as a value: a tuple of actions, the order they must keep, and a text form.

Scope: `Action`, `Operand`, `Schedule`; `order` (who waits for whom, from the bytes touched); printing.
Not here: making one from a program (`lower.py`), proving it (`check.py`), predicting it (`simulate.py`), running it
(`pipeline.py`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from tiering.workload import Lane, Tier


class Verb(StrEnum):
    READ = "READ"
    """NVME to HOST."""
    WRITE = "WRITE"
    """HOST to NVME."""
    RUN = "RUN"
    """One op, or one tile of it."""
    H2D = "H2D"
    """An op that copies from HOST to DEVICE."""
    D2H = "D2H"
    """An op that copies from DEVICE to HOST."""
    N2D = "N2D"
    """An H2D op's work without HOST: NVME to DEVICE."""
    DROP = "DROP"
    """The bytes are given up; what they held lives elsewhere or is not needed any more."""

    @property
    def is_op(self) -> bool:
        """True for what does an op's work, and not a transfer around it."""
        return self in (Verb.RUN, Verb.H2D, Verb.D2H, Verb.N2D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Bytes `lo:hi` of a block, at `address` (an offset in bytes) of the arena of its tier; NVME has none."""

    block: str
    lo: int
    hi: int
    address: int
    reads: bool
    writes: bool
    tier: Tier | Literal["NVME"] = "HOST"

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        mode = ("r" if self.reads else "") + ("w" if self.writes else "")
        place = {"HOST": f"@{self.address}", "NVME": "@NVME"}.get(self.tier, f"@{self.tier}:{self.address}")
        return f"{self.block}[{self.lo}:{self.hi}]{place}" + (f":{mode}" if mode else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One line of a schedule. `after` names the actions that must have completed: (index, 0) in the same pass,
    (index, 1) in the pass before. `next_pass` marks work for the pass to come: a last pass leaves it out.
    """

    verb: Verb
    name: str
    lane: Lane
    operands: tuple[Operand, ...]
    after: tuple[tuple[int, int], ...] = ()
    next_pass: bool = False

    @property
    def nbytes(self) -> int:
        return sum([operand.hi - operand.lo for operand in self.operands])

    @property
    def title(self) -> str:
        """Its name for a person: that of a copy's op would hide that a drive makes it."""
        if self.verb is not Verb.N2D:
            return self.name
        x = self.operands[0]
        return f"{self.verb} {x.block}[{x.lo}:{x.hi}]"

    @property
    def updates_there(self) -> bool:
        """True for an update on the device."""
        return self.lane == "update" and self.operands[0].tier == "DEVICE"

    @property
    def op(self) -> str:
        """Name of the op that the action belongs to, without its tile."""
        return self.name.partition("#")[0]

    def __str__(self) -> str:
        operands = " ".join(map(str, self.operands))
        if self.verb.is_op:
            return f"{self.verb:<5} {self.name}  {operands}"
        return f"{self.verb:<5} {operands}" + ("  (next pass)" if self.next_pass else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`actions` in the order in which a serial run does them. A cyclic schedule starts with its lead-in, which reads
    what a pass in the middle would find left in HOST by the pass before it. `host_bytes` is the arena it needs, homes
    included; `ring_bytes` of it stage tiles, `lost_bytes` are lost to fit. `device_bytes` is the arena of DEVICE.
    ranks: which ready action of a lane goes first, where that is not the earlier line. No two are the same, also where
    they count on from pass to pass, one a line: below 0 in the pass before, from the number of lines on in the next.
    """

    name: str
    actions: tuple[Action, ...]
    cyclic: bool = False
    lead_in: tuple[Action, ...] = ()
    host_bytes: int = 0
    ring_bytes: int = 0
    lost_bytes: int = 0
    device_bytes: int = 0
    ranks: tuple[int, ...] = ()

    def text(self) -> str:
        lines = [f"schedule {self.name}: {len(self.actions)} actions, {self.host_bytes} bytes of HOST"]
        lines += [f"  lead-in {action}" for action in self.lead_in]
        lines += [f"  {index:>4} {action}" for index, action in enumerate(self.actions)]
        return "\n".join(lines)

    def around(self, index: int, reach: int = 4) -> str:
        """The lines next to `index`, with an arrow at it: what an error shows."""
        lines = []
        for at in range(max(0, index - reach), min(len(self.actions), index + reach + 1)):
            lines.append(f"{'-->' if at == index else '   '} {at:>4} {self.actions[at]}")
        return "\n".join(lines)


def moved_bytes(actions: Sequence[Action], verb: Verb) -> int:
    """Of all operands: a copy has two."""
    return sum(action.nbytes for action in actions if action.verb is verb)


_NOBODY = -(1 << 62)
"""The writer of bytes that nothing has written yet."""


class _Space:
    """Who touched which bytes of one address space last, as far as it still matters.

    edges: all addresses at which a touch begins or ends. The bytes between two of them always share their fate.
    """

    def __init__(self, edges: Iterable[int]) -> None:
        self.piece = {edge: number for number, edge in enumerate(sorted(edges))}
        self.writers = [_NOBODY] * len(self.piece)
        self.readers: list[list[int]] = [[] for _ in self.piece]  # since the last write

    def touch(self, first: int, last: int, index: int, writes: bool, waits: set[int]) -> None:
        """Record a touch of pieces first:last; adds to `waits` the indices of earlier actions that it waits for."""
        if last - first == 1:  # the usual case, written out because there are so many
            waits.add(self.writers[first])
            if writes:
                waits.update(self.readers[first])
                self.writers[first], self.readers[first] = index, []
            else:
                self.readers[first].append(index)
            return
        waits.update(self.writers[first:last])
        if not writes:
            for readers in self.readers[first:last]:
                readers.append(index)
            return
        self.writers[first:last] = [index] * (last - first)
        for readers in self.readers[first:last]:
            if readers:
                waits.update(readers)
                readers.clear()


class Touching(Protocol):
    """What moves or uses bytes: an action, or one that is not written out yet."""

    @property
    def verb(self) -> Verb: ...

    @property
    def operands(self) -> tuple[Operand, ...]: ...


def touched(action: Touching) -> Iterator[tuple[str, int, int, bool]]:
    """(space, lo, hi, writes) of an action. Spaces: HOST and DEVICE with arena addresses, "NVME/<block>" with block
    bytes.
    """
    verb = action.verb
    fills, stores = verb is Verb.READ, verb is Verb.WRITE
    for operand in action.operands:
        at, lo, hi = operand.address, operand.lo, operand.hi
        if operand.tier == "NVME":
            yield f"NVME/{operand.block}", lo, hi, operand.writes
            continue
        yield operand.tier, at, at + hi - lo, operand.writes or fills or verb is Verb.DROP
        if fills or stores:
            yield f"NVME/{operand.block}", lo, hi, stores


def order(actions: Sequence[Touching], cyclic: bool) -> list[tuple[tuple[int, int], ...]]:
    """For each action the earlier ones that touched the same bytes, unless both only read them (I2, I3).

    Cyclic: the list is taken as repeating itself, so waits may reach into the pass before.
    """
    met = [list(touched(action)) for action in actions]
    edges: dict[str, set[int]] = defaultdict(set)
    for found in met:
        for name, lo, hi, _ in found:
            edges[name].update((lo, hi))
    spaces = {name: _Space(found) for name, found in edges.items()}
    touches = [
        [
            (space, space.piece[lo], space.piece[hi], writes)
            for name, lo, hi, writes in found
            for space in [spaces[name]]
        ]
        for found in met
    ]
    result: list[tuple[tuple[int, int], ...]] = []
    count = len(actions)
    for index in range(-count if cyclic else 0, count):
        waits: set[int] = set()
        for space, first, last, writes in touches[index]:  # below 0: counted from the end, which is the pass before
            space.touch(first, last, index, writes, waits)
        if index >= 0:
            waits -= {index, _NOBODY}
            result.append(tuple([(w, 0) if w >= 0 else (w + count, 1) for w in sorted(waits, reverse=True)]))
    return result
