"""One variable of a question over a range: a point for each value, and the values where something changes.

Scope: reading `host-memory=32GiB..512GiB`, the points, the knees, their table and JSON.
Not here: a single forecast (`question.py`), the picture (`plot.py`).
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatrain.errors import UserError
from megatrain.programs import KINDS
from megatrain.sizes import format_count, format_seconds, format_size, parse_count, parse_size
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.question import Question, ShortageError, Sized
from megatrain.tierplan.variants import shortage_of, with_drives, with_host_memory, with_question

Axis = Literal["host-memory", "device-memory", "tokens", "drives"]
AXES: tuple[Axis, ...] = get_args(Axis)
EXAMPLE = "write it like host-memory=32GiB..512GiB, tokens=8K..1M or drives=1..8, with :POINTS for another number"
POINTS = 9
MOST_POINTS = 100
MiB = 1 << 20
AROUND = 5
_APART = 0.1
"""Points that are nearer to the given memory, as a share of it, say nothing new."""
_KNEE_TRIES = 2
_NEARLY = 0.04
"""Share of the RAM within which a knee is looked for."""
_SAME = 1.001
"""Steps that differ by less are equally long to the planner, which then takes the one that moves fewer bytes."""
_KNEES = (
    ("layers' weights in RAM", ("weight",)),
    ("layers' weights and moments in RAM", KINDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Values of an axis from `low` to `high`, evenly spread as ratios."""

    axis: Axis
    low: int
    high: int
    points: int = POINTS

    def values(self) -> list[int]:
        """Whole numbers, ascending; drives: each of them."""
        if self.axis == "drives":
            return list(range(self.low, self.high + 1))
        steps = max(1, self.points - 1)
        ratio = (self.high / self.low) ** (1 / steps)
        inner = [round(self.low * ratio**step) for step in range(1, steps)]
        grain = MiB if self.axis.endswith("memory") else 1
        rounded = [value // grain * grain for value in inner]
        return sorted({self.low, *rounded, self.high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value and its forecast, or why there is none. knee: what begins here, empty at other points."""

    value: int
    forecast: Forecast | None = None
    shortage: ShortageError | None = None
    knee: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Points in ascending order. least: bytes below which nothing fits (memory axes)."""

    axis: Axis
    points: tuple[Point, ...]
    least: int | None = None

    def as_json(self) -> dict[str, Any]:
        """In bytes, seconds, tokens or drives."""
        return {"axis": self.axis, "least": self.least, "points": [_point_json(point) for point in self.points]}

    def table(self) -> Table:
        """A row a point."""
        table = Table(
            title=f"Sweep over {self.axis}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for column in (self.axis, "a step", "bottleneck", "NVMe B/param", "tokens/s", ""):
            table.add_column(column, justify="left" if column in ("bottleneck", "") else "right", no_wrap=column != "")
        for point in self.points:
            shown = format_value(self.axis, point.value)
            if point.forecast is None:
                assert point.shortage is not None
                needed = format_size(point.shortage.needed_bytes)
                table.add_row(shown, "-", "does not fit", "", "", f"{point.shortage.tier} needs {needed}", style="dim")
                continue
            found = point.forecast
            figures = (format_seconds(found.step_s), found.bottleneck, f"{found.bytes_per_param:.1f}")
            table.add_row(shown, *figures, format_count(found.tokens_per_s), point.knee)
        return table


def format_value(axis: Axis, value: int) -> str:
    """A value of an axis as people read it."""
    return format_size(value) if axis.endswith("memory") else str(value)


def parse_range(text: str) -> Range:
    """`AXIS=LOW..HIGH[:POINTS]`. Raises UserError."""
    match = re.fullmatch(r"\s*([\w-]+)\s*=\s*(.+?)\s*\.\.\s*([^:]+?)\s*(?::\s*(\d+)\s*)?", text)
    axis = next((axis for axis in AXES if match and match[1].replace("_", "-") == axis), None)
    if match is None or axis is None:
        raise UserError(f"--sweep {text}: not a range of one of {', '.join(AXES)}. Fix: {EXAMPLE}")
    parse = parse_size if axis.endswith("memory") else parse_count
    try:
        low, high = parse(match[2]), parse(match[3])
    except ValueError as error:
        raise UserError(f"--sweep {text}: {error}") from None
    points = int(match[4]) if match[4] else POINTS
    if not 0 < low <= high or not 2 <= points <= MOST_POINTS or (axis == "drives" and high - low >= MOST_POINTS):
        raise UserError(f"--sweep {text}: an upward range with 2 to {MOST_POINTS} points is wanted. Fix: {EXAMPLE}")
    return Range(axis=axis, low=low, high=high, points=points)


def sweep(ready: Sized, base: Forecast, wanted: Range) -> Sweep:
    """The points of a range around a forecast, planned with its knobs."""
    question = replace(ready.question, micro_batch=ready.micro_batch)
    if wanted.axis == "drives":
        return Sweep(axis="drives", points=tuple(_drive_points(ready, base, wanted)))
    if wanted.axis == "host-memory":
        least = least_host_memory(question)
        points = _host_points(ready, base, wanted.values(), least)
        found = knees(ready, base, points, least)
        points += [knee for knee in found if wanted.low <= knee.value <= wanted.high]
        return Sweep(axis="host-memory", points=_never_slower(points), least=least)
    if wanted.axis == "device-memory":
        if question.device_memory is None:
            raise UserError("--sweep device-memory: the CPU computes here. Fix: --gpu or --device-memory, too")
        asked = [(value, replace(question, device_memory=value)) for value in wanted.values()]
    else:
        asked = [(value, replace(question, tokens=value)) for value in _whole(wanted.values(), question)]
    return Sweep(axis=wanted.axis, points=tuple(_point(value, other, base) for value, other in asked))


def around(ready: Sized, base: Forecast) -> Sweep:
    """Host memory from the least that works to where all state lives in it, the given value among the points."""
    given = ready.question.host_memory
    least = least_host_memory(replace(ready.question, micro_batch=ready.micro_batch))
    state = sum(block.nbytes for block in base.plan.workload.of_life("durable", "carried"))
    high = int(1.1 * max(given, least + state))
    spread = Range(axis="host-memory", low=-(-least // MiB) * MiB, high=high, points=AROUND).values()
    ends = (spread[0], spread[-1])
    points = _host_points(ready, base, [v for v in spread if v in ends or abs(v / given - 1) > _APART], least)
    points.append(Point(value=given, forecast=base))
    return Sweep(axis="host-memory", points=_never_slower([*points, *knees(ready, base, points, least)]), least=least)


def least_host_memory(question: Question) -> int:
    """Bytes of RAM below which nothing fits."""
    shortage = shortage_of(replace(question, host_memory=1))
    assert shortage is not None and shortage.tier == "HOST", "the device was known to fit"
    return shortage.needed_bytes


def knees(ready: Sized, base: Forecast, points: Sequence[Point], least: int) -> Iterator[Point]:
    """About the least RAM at which the layers' weights, then their weights and moments, live in it: looked for between
    the points that are known.
    """
    layers = {unit.name for unit in ready.units if unit.activation_bytes}
    known = {ready.question.host_memory: base}
    known |= {point.value: point.forecast for point in points if point.forecast is not None}
    for name, kinds in _KNEES:
        missing = {value: _missing(found, layers, kinds) for value, found in known.items()}
        for _ in range(_KNEE_TRIES):
            value = _guess(missing, least)
            if value is None:
                break
            known[value] = with_host_memory(ready, base, value)
            missing[value] = _missing(known[value], layers, kinds)
        enough = [value for value, nbytes in missing.items() if not nbytes]
        if enough:
            yield Point(value=min(enough), forecast=known[min(enough)], knee=name)


def _guess(missing: dict[int, int], least: int) -> int | None:
    """RAM to try next, from the bytes that are missing at each that was tried; None: what is known is near enough."""
    high = min((value for value, nbytes in missing.items() if not nbytes), default=None)
    low = max((value for value in missing if high is None or value < high), default=least)
    wanted = low + missing.get(low, 0)
    if high is None:
        return int(wanted * (1 + _NEARLY)) // MiB * MiB
    margin = (high - low) // 8
    if high - low <= _NEARLY * high:
        return None
    return min(max(wanted, low + margin), high - margin) // MiB * MiB


def _missing(found: Forecast, units: Collection[str], kinds: Collection[str]) -> int:
    """Bytes of these kinds of these units that have their home on NVMe; 0 for less than a fiftieth of them."""
    blocks = [b for b in found.plan.workload.of_life("durable") if b.kind in kinds and b.unit in units]
    total = sum(block.nbytes for block in blocks)
    missing = total - sum(found.plan.placement.host_bytes.get(block.name, 0) for block in blocks)
    return missing if 50 * missing > total else 0


def _host_points(ready: Sized, base: Forecast, values: Sequence[int], least: int) -> list[Point]:
    points = []
    for value in values:
        if value < least:
            other = replace(ready.question, host_memory=value, micro_batch=ready.micro_batch)
            points.append(Point(value=value, shortage=shortage_of(other)))
        else:
            points.append(Point(value=value, forecast=with_host_memory(ready, base, value)))
    return points


def _point(value: int, question: Question, base: Forecast) -> Point:
    try:
        return Point(value=value, forecast=with_question(question, base))
    except ShortageError as error:
        return Point(value=value, shortage=error)


def _never_slower(points: Sequence[Point]) -> tuple[Point, ...]:
    """Ascending. What is planned for less RAM fits into more: a point that would be slower takes the plan before it."""
    best: Forecast | None = None
    result = []
    for point in sorted(points, key=lambda point: point.value):
        found = point.forecast
        if found is not None and best is not None and found.step_s > best.step_s * _SAME:
            point = replace(point, forecast=best)
        elif found is not None and (best is None or found.step_s < best.step_s):
            best = found
        result.append(point)
    return tuple(result)


def _whole(values: Sequence[int], question: Question) -> list[int]:
    """Tokens rounded to whole micro-batches."""
    chunk = question.seq_len * (question.micro_batch or 1)
    return sorted({max(1, round(value / chunk)) * chunk for value in values})


def _drive_points(ready: Sized, base: Forecast, wanted: Range) -> Iterator[Point]:
    if not ready.question.drives:
        raise UserError("--sweep drives: no drive is known. Fix: --nvme '(7.0,6.0)'")
    for count in wanted.values():
        question = ready.question.with_drives([ready.question.drives[0]] * count)
        yield Point(value=count, forecast=with_drives(ready, base, question))


def _point_json(point: Point) -> dict[str, Any]:
    found = point.forecast
    if found is None:
        assert point.shortage is not None
        return {
            "value": point.value,
            "fits": False,
            "short_tier": point.shortage.tier,
            "needed_bytes": point.shortage.needed_bytes,
        }
    return {
        "value": point.value,
        "fits": True,
        "knee": point.knee,
        "step_s": found.step_s,
        "bottleneck": found.plan.timeline.bottleneck,
        "busy_s": found.plan.timeline.busy(),
        "limit_s": found.plan.timeline.limit_s,
        "serial_s": found.plan.timeline.serial_s,
        "bytes_per_param": found.bytes_per_param,
        "tokens_per_s": found.tokens_per_s,
    }
