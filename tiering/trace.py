"""What really happened: spans of every action, and a pass's figures made from them.

Scope: `Span`, `Trace` (collects, thread-safe), `Figures` (bytes, busy seconds, stalls by cause), the cause of a wait.
Not here: predicted spans (`timetable.py`), the file that a viewer opens (`perfetto.py`), printing (the caller).
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiering.schedule import Action, Schedule, Verb

WAIT = "wait"
COMPUTE = "compute"
UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class InPass:
    """Where a span comes from: the line of a schedule, and in which pass through it."""

    pass_number: int
    schedule: Schedule
    line: int

    @property
    def action(self) -> Action:
        return self.schedule.actions[self.line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action, or one wait of compute for an action, in seconds of `time.perf_counter`. name: the action; of a wait,
    the one that it was for. paused_s: seconds of it in which its thread ran updates. at: the action; of a wait, the
    one that waited.
    """

    what: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int = 0
    paused_s: float = 0.0
    at: InPass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One pass: bytes moved, seconds a lane was busy (overlaps counted once), seconds compute waited with nothing to
    do, by cause. io_s: reads and writes together. direct_bytes: of those read, what went straight to the device.
    """

    wall_s: float
    read_bytes: int
    written_bytes: int
    io_s: float
    compute_s: float
    update_s: float
    stall_s: float
    stalls: Mapping[str, float]
    read_s: float
    write_s: float
    update_bytes: int
    h2d_bytes: int
    h2d_s: float
    d2h_bytes: int
    d2h_s: float
    direct_bytes: int


def kind_of(action: Action) -> tuple[str, int]:
    """`what` of an action's span, and its bytes: of a copy those of one side."""
    if action.verb in (Verb.H2D, Verb.D2H, Verb.N2D):
        return action.verb, action.operands[0].nbytes
    what = action.verb if action.verb is not Verb.RUN else UPDATE if action.lane == UPDATE else COMPUTE
    return what, action.nbytes


class Trace:
    """Collects spans from all threads until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._since_s = time.perf_counter()

    def add(
        self,
        what: str,
        name: str,
        begin_s: float,
        nbytes: int = 0,
        *,
        paused_s: float = 0.0,
        at: InPass | None = None,
        end_s: float | None = None,
    ) -> None:
        """A span that ends now, or at `end_s`: what a device did is told later."""
        end_s = time.perf_counter() if end_s is None else end_s
        span = Span(what=what, name=name, begin_s=begin_s, end_s=end_s, nbytes=nbytes, paused_s=paused_s, at=at)
        with self._lock:
            self._spans.append(span)

    def take(self) -> tuple[list[Span], Figures]:
        """Spans since the last call, and their figures."""
        now = time.perf_counter()
        with self._lock:
            spans, self._spans = self._spans, []
            since_s, self._since_s = self._since_s, now
        spans = name_waits(spans)
        return spans, figures(spans, now - since_s)

    def leave_out(self, schedule: str, begin_s: float) -> None:
        """Forget what passes of `schedule` did since `begin_s`, and that time: it belongs to no step."""
        now = time.perf_counter()
        with self._lock:
            self._spans = [s for s in self._spans if s.at is None or s.at.schedule.name.partition(",")[0] != schedule]
            self._since_s += now - max(begin_s, self._since_s)


def figures(spans: Sequence[Span], wall_s: float) -> Figures:
    """The figures of spans that were taken within `wall_s` seconds; their waits are named."""
    of: dict[str, list[Span]] = {}
    for span in spans:
        of.setdefault(span.what, []).append(span)
    nbytes = {what: sum(span.nbytes for span in found) for what, found in of.items()}
    stalls: dict[str, float] = {}
    for wait in of.get(WAIT, []):
        cause = wait.name.partition("[")[0].partition("#")[0]  # all tiles of a block or an op together
        stalls[cause] = stalls.get(cause, 0.0) + own_s(wait)
    reads, writes = [*of.get(Verb.READ, []), *of.get(Verb.N2D, [])], of.get(Verb.WRITE, [])
    return Figures(
        wall_s=wall_s,
        read_bytes=nbytes.get(Verb.READ, 0) + nbytes.get(Verb.N2D, 0),
        written_bytes=nbytes.get(Verb.WRITE, 0),
        io_s=_busy([*reads, *writes]),
        compute_s=sum(map(own_s, of.get(COMPUTE, []))),
        update_s=_busy(of.get(UPDATE, [])),
        stall_s=sum(stalls.values()),
        stalls=stalls,
        read_s=_busy(reads),
        write_s=_busy(writes),
        update_bytes=nbytes.get(UPDATE, 0),
        h2d_bytes=nbytes.get(Verb.H2D, 0),
        h2d_s=_busy(of.get(Verb.H2D, [])),
        d2h_bytes=nbytes.get(Verb.D2H, 0),
        d2h_s=_busy(of.get(Verb.D2H, [])),
        direct_bytes=nbytes.get(Verb.N2D, 0),
    )


def own_s(span: Span) -> float:
    """Seconds of a span without the updates that ran in it."""
    return span.end_s - span.begin_s - span.paused_s


def name_waits(spans: Sequence[Span], others: Sequence[Span] = ()) -> list[Span]:
    """`spans` where each wait has name and bytes of what ended it, looked for in `others` too: of the actions that the
    waiting one comes after, the last to end. Compute may have waited for several; the last one is what cost the time.
    Updates that its own thread ran meanwhile are not waited for, but what they came after is.
    """
    actions = [span for span in (*others, *spans) if span.what != WAIT]
    found = {(span.at.pass_number, span.at.line): span for span in actions if span.at is not None}
    named = []
    for span in spans:
        if span.what == WAIT:
            before = _latest(_awaited(span, found), span)
            cause = before or _latest(actions, span)  # a serial run waits for the line before, whatever it is
            if cause is not None:
                span = replace(span, name=cause.name, nbytes=cause.nbytes)
        named.append(span)
    return named


def _awaited(wait: Span, found: Mapping[tuple[int, int], Span]) -> list[Span]:
    """Spans of what the waiting action comes after. What only stands in between is looked through: a DROP, which takes
    no time, and an update that ran on the waiting thread.
    """
    if wait.at is None:
        return []
    actions = wait.at.schedule.actions
    todo, seen = [(wait.at.pass_number, wait.at.line)], set[tuple[int, int]]()
    spans: list[Span] = []
    while todo:
        number, line = todo.pop()
        for key in {(number - back, waited) for waited, back in actions[line].after} - seen:
            seen.add(key)
            span = found.get(key)
            own = span is not None and span.what == UPDATE and span.begin_s >= wait.begin_s and wait.paused_s > 0
            if own or actions[key[1]].verb is Verb.DROP:
                todo.append(key)
            elif span is not None:
                spans.append(span)
    return spans


def _latest(spans: Iterable[Span], wait: Span) -> Span | None:
    """The last one that ended during `wait`."""
    ended = [span for span in spans if wait.begin_s < span.end_s <= wait.end_s]
    return max(ended, key=lambda span: span.end_s, default=None)


def _busy(spans: Iterable[Span]) -> float:
    """Seconds covered by at least one span."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, end))
        end = max(end, span.end_s)
    return total
