"""The schedule as a value: a tuple of actions, the order they must keep, and a text form.

Scope: `Action`, `Operand`, `Schedule`; `order` (who waits for whom, from the bytes touched); printing.
Not here: making one from a program (`lower.py`), proving it (`check.py`), predicting it (`simulate.py`), running it
(`pipeline.py`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    DROP = "DROP"
    """The bytes are given up; what they held lives elsewhere or is not needed any more."""

    @property
    def is_op(self) -> bool:
        """True for what does an op's work, and not a transfer around it."""
        return self in (Verb.RUN, Verb.H2D, Verb.D2H)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Bytes `lo:hi` of a block, at `address` (an offset in bytes) of the arena of its tier."""

    block: str
    lo: int
    hi: int
    address: int
    reads: bool
    writes: bool
    tier: Tier = "HOST"

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        mode = ("r" if self.reads else "") + ("w" if self.writes else "")
        place = f"@{self.address}" if self.tier == "HOST" else f"@{self.tier}:{self.address}"
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
        return sum(operand.nbytes for operand in self.operands)

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
    """

    name: str
    actions: tuple[Action, ...]
    cyclic: bool = False
    lead_in: tuple[Action, ...] = ()
    host_bytes: int = 0
    ring_bytes: int = 0
    lost_bytes: int = 0
    device_bytes: int = 0

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
    return sum(action.nbytes for action in actions if action.verb is verb)


@dataclass(slots=True)
class _Span:
    """Bytes lo:hi, who wrote them last (None: nobody yet) and who has read them since."""

    lo: int
    hi: int
    writer: int | None
    readers: tuple[int, ...]


class _Space:
    """Who touched which bytes of one address space last, as far as it still matters: disjoint spans in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.spans: list[_Span] = []

    def touch(self, lo: int, hi: int, index: int, writes: bool) -> set[int]:
        """Record a touch; returns the indices of earlier actions that it has to wait for."""
        first = bisect_left(self.starts, lo)
        if first < len(self.spans) and self.spans[first].lo == lo and self.spans[first].hi == hi:
            return self._touch_one(self.spans[first], index, writes)  # the usual case: the same bytes as before
        self._cut(lo)
        self._cut(hi)
        first, last = bisect_left(self.starts, lo), bisect_left(self.starts, hi)
        met = self.spans[first:last]
        waits = {span.writer for span in met if span.writer is not None}
        fresh = [_Span(lo, hi, index, ())]
        if writes:
            waits.update(reader for span in met for reader in span.readers)
        else:
            fresh = []
            for span in [*met, _Span(hi, hi, None, ())]:
                if span.lo > lo:
                    fresh.append(_Span(lo, span.lo, None, (index,)))
                if span.hi > span.lo:
                    fresh.append(_Span(span.lo, span.hi, span.writer, (*span.readers, index)))
                lo = span.hi
        self.spans[first:last] = fresh
        self.starts[first:last] = [span.lo for span in fresh]
        return waits

    @staticmethod
    def _touch_one(span: _Span, index: int, writes: bool) -> set[int]:
        waits = set() if span.writer is None else {span.writer}
        if writes:
            waits.update(span.readers)
            span.writer, span.readers = index, ()
        else:
            span.readers = (*span.readers, index)
        return waits

    def _cut(self, at: int) -> None:
        """Let no span reach across `at`."""
        index = bisect_left(self.starts, at) - 1
        if index >= 0 and self.spans[index].hi > at:
            old = self.spans[index]
            self.spans[index : index + 1] = [
                _Span(old.lo, at, old.writer, old.readers),
                _Span(at, old.hi, old.writer, old.readers),
            ]
            self.starts.insert(index + 1, at)


def touched(action: Action) -> Iterator[tuple[str, int, int, bool]]:
    """(space, lo, hi, writes) of an action. Spaces: HOST and DEVICE with arena addresses, "NVME/<block>" with block
    bytes.
    """
    for operand in action.operands:
        at = operand.address
        yield operand.tier, at, at + operand.nbytes, operand.writes or action.verb in (Verb.READ, Verb.DROP)
        if action.verb in (Verb.READ, Verb.WRITE):
            yield f"NVME/{operand.block}", operand.lo, operand.hi, action.verb is Verb.WRITE


def order(actions: Sequence[Action], cyclic: bool) -> list[tuple[tuple[int, int], ...]]:
    """For each action the earlier ones that touched the same bytes, unless both only read them (I2, I3).

    Cyclic: the list is taken as repeating itself, so waits may reach into the pass before.
    """
    spaces: dict[str, _Space] = {}
    result: list[tuple[tuple[int, int], ...]] = []
    count = len(actions)
    for index in range(-count if cyclic else 0, count):
        waits: set[int] = set()
        for space, lo, hi, writes in touched(actions[index % count]):
            waits |= spaces.setdefault(space, _Space()).touch(lo, hi, index, writes)
        if index >= 0:
            waits.discard(index)
            result.append(tuple((w, 0) if w >= 0 else (w + count, 1) for w in sorted(waits, reverse=True)))
    return result
