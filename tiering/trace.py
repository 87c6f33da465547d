"""What really happened: spans of every action, and a step's figures made from them.

Scope: `Span`, `Trace` (collects, thread-safe), `Figures` (bytes, busy seconds, stalls by cause).
Not here: predictions (`simulate.py`), printing (the caller).
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiering.schedule import Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action, or one wait of compute for an action, in seconds of `time.perf_counter`. paused_s: seconds of it in
    which its thread ran updates.
    """

    what: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int = 0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One pass as measured: bytes moved, seconds a lane was busy (overlaps counted once), seconds compute waited with
    nothing to do.
    """

    wall_s: float
    read_bytes: int
    written_bytes: int
    io_s: float
    compute_s: float
    update_s: float
    stall_s: float
    stalls: Mapping[str, float]


WAIT = "wait"


class Trace:
    """Collects spans from all threads until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._since_s = time.perf_counter()

    def add(self, what: str, name: str, begin_s: float, nbytes: int = 0, *, paused_s: float = 0.0) -> None:
        """A span that ends now."""
        now = time.perf_counter()
        span = Span(what=what, name=name, begin_s=begin_s, end_s=now, nbytes=nbytes, paused_s=paused_s)
        with self._lock:
            self._spans.append(span)

    def take(self) -> tuple[list[Span], Figures]:
        """Spans since the last call, and their figures."""
        now = time.perf_counter()
        with self._lock:
            spans, self._spans = self._spans, []
            since_s, self._since_s = self._since_s, now
        return spans, figures(spans, now - since_s)


def figures(spans: Sequence[Span], wall_s: float) -> Figures:
    stalls: dict[str, float] = {}
    for span in spans:
        if span.what == WAIT:
            stalls[span.name] = stalls.get(span.name, 0.0) + span.end_s - span.begin_s - span.paused_s
    io = [span for span in spans if span.what in (Verb.READ, Verb.WRITE)]
    return Figures(
        wall_s=wall_s,
        read_bytes=sum(span.nbytes for span in io if span.what == Verb.READ),
        written_bytes=sum(span.nbytes for span in io if span.what == Verb.WRITE),
        io_s=_busy(io),
        compute_s=sum(span.end_s - span.begin_s - span.paused_s for span in spans if span.what == "compute"),
        update_s=_busy([span for span in spans if span.what == "update"]),
        stall_s=sum(stalls.values()),
        stalls=stalls,
    )


def _busy(spans: Sequence[Span]) -> float:
    """Seconds covered by at least one span."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, end))
        end = max(end, span.end_s)
    return total
