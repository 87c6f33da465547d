"""Spans as a trace that Perfetto and chrome://tracing open (Trace Event Format): one track a lane.

Scope: processes one below the other, tracks without overlaps, what a slice says about itself, bytes in flight.
Not here: where spans come from (`trace.py`, `timetable.py`), which steps are kept and when a file is written (the
caller).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiering.schedule import Operand, Verb
from tiering.trace import COMPUTE, UPDATE, WAIT, Span, own_s

STEP = "step"
TRACKS = {
    STEP: "steps",
    COMPUTE: "compute",
    WAIT: "compute waits",
    UPDATE: "update",
    Verb.H2D: "copy h2d",
    Verb.D2H: "copy d2h",
    Verb.READ: "io read",
    Verb.N2D: "io read to device",
    Verb.WRITE: "io write",
}
"""What a span is -> its track, in the order in which they are shown."""
RARE = (Verb.H2D, Verb.D2H, Verb.N2D)
"""Their tracks are left out where nothing is on them."""
TRACK_ROOM = 1000
"""Thread ids a lane."""
IN_FLIGHT = "NVMe bytes in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """A span and the step that it belongs to."""

    step: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the processes that are shown one below the other: "measured", "predicted"."""

    name: str
    spans: Sequence[InStep]


def document(sides: Sequence[Side], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole JSON object. Times are microseconds since the first span of all."""
    origin_s = min((item.span.begin_s for side in sides for item in side.spans), default=0.0)
    events = [event for pid, side in enumerate(sides, start=1) for event in _side(pid, side, origin_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _side(pid: int, side: Side, origin_s: float) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, name=side.name)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for order, (what, track) in enumerate(TRACKS.items()):
        lane = [item for item in side.spans if item.span.what == what]
        if what in RARE and not lane:
            continue
        rows = _rows(lane, origin_s)
        for number, row in enumerate(rows):
            tid = 1 + TRACK_ROOM * order + number
            yield _metadata("thread_name", pid, tid, name=track if len(rows) == 1 else f"{track} {number}")
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            for item in row:
                begin_ns, end_ns = _times_ns(item.span, origin_s)
                event = {"ph": "X", "cat": track, "name": _title(item.span), "pid": pid, "tid": tid}
                yield {**event, "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000, "args": _args(item)}
    yield from _in_flight(pid, side, origin_s)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _times_ns(span: Span, origin_s: float) -> tuple[int, int]:
    return round((span.begin_s - origin_s) * 1e9), round((span.end_s - origin_s) * 1e9)


def _rows(lane: Sequence[InStep], origin_s: float) -> list[list[InStep]]:
    """Spans that overlap go to rows of their own, each to the first one that is free; at least one row."""
    rows: list[list[InStep]] = [[]]
    free_ns = [0]
    for item in sorted(lane, key=lambda item: item.span.begin_s):
        begin_ns, end_ns = _times_ns(item.span, origin_s)
        number = next((number for number, free in enumerate(free_ns) if free <= begin_ns), len(rows))
        if number == len(rows):
            rows.append([])
            free_ns.append(0)
        rows[number].append(item)
        free_ns[number] = end_ns
    return rows


def _title(span: Span) -> str:
    return f"wait for {span.name}" if span.what == WAIT else span.name


def _args(item: InStep) -> dict[str, Any]:
    """What a slice says when one clicks it. bytes: moved or touched; of a wait, those it waited for."""
    span = item.span
    args: dict[str, Any] = {"bytes": span.nbytes, "step": item.step}
    if span.what == WAIT:
        args["cause"] = span.name
    if span.what in (WAIT, COMPUTE):
        args |= {"own_s": round(own_s(span), 9), "paused_for_updates_s": round(span.paused_s, 9)}
    if span.at is not None:
        action = span.at.action
        args |= {"program": span.at.schedule.name, "op": action.op, "block": _blocks(action.operands)}
        args["tile"] = _tile(action.operands)
    return args


def _blocks(operands: Sequence[Operand]) -> str:
    return ", ".join(dict.fromkeys(operand.block for operand in operands))


def _tile(operands: Sequence[Operand]) -> str:
    """The bytes of each block, `lo:hi`; tiled ops have the same ones of all their blocks."""
    return ", ".join(dict.fromkeys(f"{operand.lo}:{operand.hi}" for operand in operands))


def _in_flight(pid: int, side: Side, origin_s: float) -> Iterator[dict[str, Any]]:
    """A counter of the bytes that are being read and written."""
    changes: list[tuple[int, str, int]] = []
    for item in side.spans:
        if item.span.what in (Verb.READ, Verb.N2D, Verb.WRITE):
            begin_ns, end_ns = _times_ns(item.span, origin_s)
            series = "written" if item.span.what == Verb.WRITE else "read"
            changes += [(begin_ns, series, item.span.nbytes), (end_ns, series, -item.span.nbytes)]
    now = {"read": 0, "written": 0}
    for at_ns, series, change in sorted(changes):
        now[series] += change
        yield {"ph": "C", "name": IN_FLIGHT, "pid": pid, "tid": 0, "ts": at_ns / 1000, "args": dict(now)}
