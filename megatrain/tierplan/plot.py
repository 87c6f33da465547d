"""The picture of a sweep over host memory: step time against RAM, with what bounds it.

Scope: one figure, written as PNG (or what the suffix says); matplotlib is imported when it is drawn.
Not here: the points (`sweep.py`), figures as tables (`tables.py`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.errors import UserError
from megatrain.sizes import format_count, format_seconds, format_size
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.sweep import Point, Sweep

GiB = 1 << 30
BOUNDS = (
    ("NVMe", ("NVMe",), "tab:blue"),
    ("compute", ("compute",), "tab:red"),
    ("PCIe, the busier direction", ("H2D", "D2H"), "tab:purple"),
    ("update on the CPU", ("update",), "tab:green"),
)
"""Label, resources of a timeline, colour."""


def draw(sweep: Sweep, base: Forecast, given_bytes: int, hardware: str, path: Path) -> None:
    """Writes the picture of a host-memory sweep. Raises UserError for a file that cannot be written."""
    refuse_picture(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    points = [point for point in sweep.points if point.forecast is not None]
    if len(points) < 2:
        raise UserError("--plot: fewer than two points of the range fit, which is no picture. Fix: a wider --sweep")
    figure, axes = plt.subplots(figsize=(10.5, 6.2), layout="constrained")
    try:
        unit, unit_s = _time_unit(points)
        _lines(axes, points, unit_s)
        _axes(axes, points, sweep.least, unit, unit_s)
        _marks(axes, points, sweep.least)
        _star(axes, given_bytes, base, unit_s)
        figure.suptitle(
            f"{base.model}: {format_count(base.parameters)} parameters, {format_count(base.tokens)} tokens a step"
            f"{', clipping' if base.deferred else ''}",
            fontsize=14,
            fontweight="bold",
        )
        axes.set_title(hardware, fontsize=10, color="0.35")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=9, ncols=4)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {error}. Fix: another path, such as out.png") from None
    finally:
        plt.close(figure)


def refuse_picture(path: Path) -> None:
    """Raises UserError for a path that no picture can be written to, before anything is planned for it."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the suffix must be .png, .svg or .pdf. Fix: --plot {path.with_suffix('.png')}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: the folder {path.parent} does not exist. Fix: make it, or another path")


def _lines(axes: Any, points: Sequence[Point], unit_s: float) -> None:
    """The simulated step over the bounds: each is how long one resource alone would take."""
    memory = [point.value / GiB for point in points]
    steps = [_forecast(point).step_s / unit_s for point in points]
    axes.plot(memory, steps, "o-", color="black", linewidth=2.4, markersize=5.5, zorder=5, label="a step, simulated")
    for label, names, colour in BOUNDS:
        seconds = [max(_busy(point)[name] for name in names) for point in points]
        if max(seconds) > 0 and not (label.startswith("update") and _shared(points)):
            shown = [second / unit_s for second in seconds]
            axes.plot(memory, shown, color=colour, linewidth=1.8, alpha=0.75, label=f"{label} alone")


def _shared(points: Sequence[Point]) -> bool:
    """True where the update is part of compute."""
    first = _forecast(points[0])
    return first.updates_there or not first.hardware.update_beside_compute


def _time_unit(points: Sequence[Point]) -> tuple[str, float]:
    """The unit in which the longest step is a number of one to three digits, and its seconds."""
    longest = max(_forecast(point).step_s for point in points)
    units = (("days", 172_800, 86_400.0), ("hours", 7_200, 3_600.0), ("minutes", 120, 60.0), ("seconds", 1, 1.0))
    return next(((name, unit_s) for name, least_s, unit_s in units if longest >= least_s), ("milliseconds", 1e-3))


def _axes(axes: Any, points: Sequence[Point], least: int | None, unit: str, unit_s: float) -> None:
    steps = [_forecast(point).step_s / unit_s for point in points]
    axes.set_xscale("log", base=2)
    low, high = (least or points[0].value) / GiB, points[-1].value / GiB
    left, right = low / (high / low) ** 0.1, high * (high / low) ** 0.04
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1.3 * max(steps))
    first = math.ceil(math.log2(left))
    octaves = [2.0**power for power in range(first - 1, math.floor(math.log2(right)) + 1)]
    few = right / left < 16
    ticks = [tick for octave in octaves for tick in ((octave, 1.5 * octave) if few else (octave,)) if tick > left]
    ticks = [tick for tick in ticks if tick < right]
    axes.set_xticks(ticks, [_size(tick * GiB) for tick in ticks])
    axes.xaxis.set_minor_locator(_no_ticks())
    axes.set_xlabel("host memory")
    axes.set_ylabel(f"time of a step, {unit}")
    axes.grid(True, color="0.9")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _size(nbytes: float) -> str:
    return format_size(nbytes).replace(".00", "")


def _marks(axes: Any, points: Sequence[Point], least: int | None) -> None:
    """What happens where: the least that fits, the knees."""
    top = axes.get_ylim()[1]
    if least is not None:
        axes.axvspan(axes.get_xlim()[0], least / GiB, color="0.88", zorder=0)
        _word(axes, least / GiB, top, f"does not fit: {_size(least)} needed", rotation=90)
        axes.axvline(least / GiB, color="0.4", linewidth=1)
    for row, point in enumerate(point for point in points if point.knee):
        text = f"{point.knee}\n{_size(point.value)}: {format_seconds(_forecast(point).step_s)}"
        axes.axvline(point.value / GiB, color="0.5", linewidth=1.2, linestyle="--")
        _word(axes, point.value / GiB, top, text, row=row)


def _star(axes: Any, given_bytes: int, base: Forecast, unit_s: float) -> None:
    """The plan that was asked for."""
    at = (given_bytes / GiB, base.step_s / unit_s)
    left, right = axes.get_xlim()
    if not left <= at[0] <= right:
        return
    far = math.log(at[0] / left) > 0.75 * math.log(right / left)  # the words would leave the picture
    axes.plot(*[[value] for value in at], "*", color="tab:orange", markersize=18, zorder=6, label="as asked")
    axes.annotate(
        f"{_size(given_bytes)}: {format_seconds(base.step_s)}\n{format_count(base.tokens_per_s)} tokens/s, "
        f"bound by {base.bottleneck}",
        at,
        xytext=(-10 if far else 10, -44),
        textcoords="offset points",
        ha="right" if far else "left",
        fontsize=10,
        fontweight="bold",
        color="tab:orange",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        zorder=7,
    )


def _word(axes: Any, x: float, y: float, text: str, rotation: int = 0, row: int = 0) -> None:
    """Beside a vertical line, on its left, from the top down; rows keep the words of near lines apart."""
    axes.annotate(
        text,
        (x, y),
        xytext=(-4, -4 - 28 * row),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color="0.25",
        rotation=rotation,
    )


def _busy(point: Point) -> dict[str, float]:
    return _forecast(point).plan.timeline.busy()


def _forecast(point: Point) -> Forecast:
    assert point.forecast is not None, "only points that fit are drawn"
    return point.forecast
