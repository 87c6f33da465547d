"""A forecast as a person reads it, for `megatrain plan` and `tierplan` alike.

Scope: tables and lines, with units and a mark on what was assumed.
Not here: the figures and their JSON (`forecast.py`), a run's forecast (`megatrain/report.py`), sweeps (`sweep.py`).
"""

import math
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatrain.programs import WEIGHT_BF16
from megatrain.sizes import format_count, format_rate, format_seconds, format_size
from megatrain.tierplan.advice import Help
from megatrain.tierplan.forecast import DAY_S, MODEL_FLOPS, RECOMPUTED_FLOPS, Elsewhere, Forecast, Memory

YEAR_DAYS = 365.25


def render(forecast: Forecast, console: Console, helps: Sequence[Help] | None = None) -> None:
    """Everything, in the shortest form that still says the units and the sources. helps None: nothing was tried."""
    bound = f"{forecast.bottleneck} is the bottleneck"
    console.print(_headline(forecast), highlight=False)
    console.print(_state(forecast))
    for tier, memory in (("Device", forecast.device), ("Host", forecast.host)):
        if memory is not None:
            console.print(_memory(tier, memory, [assumption.what for assumption in forecast.assumptions]))
    console.print(_links(forecast))
    for line in (*_step_lines(forecast), *_disk_lines(forecast)):
        console.print(line, highlight=False)
    if helps is not None:
        console.print(_helps(forecast, helps) if helps else f"More RAM, drives or tokens would not help: {bound}")
    for note in forecast.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if forecast.assumptions:
        console.print(_assumptions(forecast))


def _headline(forecast: Forecast) -> str:
    sparse = forecast.active_parameters != forecast.parameters
    active = f" ({format_count(forecast.active_parameters)} active)" if sparse else ""
    return (
        f"[bold]Plan[/bold]: {forecast.model}, {format_count(forecast.parameters)} parameters{active}, "
        f"{format_size(16 * forecast.parameters)} of training state in FP32; a step is {forecast.tokens} tokens: "
        f"{forecast.tokens // forecast.seq_len} sequences of {forecast.seq_len}, {forecast.micro_batch} at a time"
    )


def _table(title: str, *columns: str) -> Table:
    """The first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _state(forecast: Forecast) -> Table:
    placement = forecast.placement()
    table = _table("Where the state lives between its uses", "kind", *placement, "all")
    for kind in placement["HOST"]:
        at = [tier[kind] for tier in placement.values()]
        homes = placement["HOST"][kind] + placement["NVME"][kind]
        everywhere = homes + (placement.get("DEVICE", {}).get(kind, 0) if kind == "activation" else 0)
        table.add_row(kind, *(format_size(nbytes) for nbytes in at), format_size(everywhere))
    if "grad" not in placement["HOST"]:
        table.add_row("grad", *("-" for _ in placement), "used at once")
    if any(placement.get("DEVICE", {}).get(kind) for kind in ("weight", WEIGHT_BF16)):
        table.caption, table.caption_justify = "weights on DEVICE: copies that stay from forward to backward", "left"
    share = forecast.nvme_share()
    blank = [""] * (len(placement) - 2)
    table.add_row("weights, moments", *blank, f"{1 - share:.0%}", f"{share:.0%}", "")
    return table


def _memory(tier: str, memory: Memory, assumed: Sequence[str]) -> Table:
    table = _table(f"{tier} memory", "what", "bytes")
    for line in memory.arena:
        table.add_row(line.what, format_size(line.nbytes))
    total = f"arena, of a budget of {format_size(memory.arena_budget_bytes)}"
    table.add_row(total, format_size(memory.arena_bytes), style="bold", end_section=True)
    for line in memory.beside:
        table.add_row(line.what + (" *" if line.what in assumed else ""), format_size(line.nbytes))
    given = "" if memory.given_bytes is None else f", of {format_size(memory.given_bytes)}"
    table.add_row(f"in all{given}", format_size(memory.used_bytes), style="bold")
    return table


def _links(forecast: Forecast) -> Table:
    """What a step keeps busy, and for how long."""
    timeline, rates = forecast.plan.timeline, forecast.hardware.rates()
    table = _table("A step", "resource", "work", "rate", "busy", "of step")

    def row(name: str, work: str, rate: str, busy_s: float | None) -> None:
        rate_text = format_rate(rates[rate].per_s) if rate != "compute" else _flops(rates[rate].per_s)
        marked = rate_text + (" *" if rates[rate].source == "assumed" else "")
        busy = ("", "") if busy_s is None else (format_seconds(busy_s), f"{busy_s / forecast.step_s:.0%}")
        table.add_row(name, work, marked, *busy)

    direct = timeline.direct_bytes
    if direct < timeline.read_bytes or not direct:
        row("NVMe read", format_size(timeline.read_bytes - direct), "read", None)
    if direct:
        row("NVMe read into the device", format_size(direct), "direct_read", None)
    row("NVMe write", format_size(timeline.written_bytes), "write", None)
    table.add_row("NVMe, both", format_size(forecast.nvme_bytes), "", *_busy(timeline.io_s, forecast.step_s))
    if "h2d" in rates and "d2h" in rates:
        row("PCIe to device", format_size(timeline.h2d_bytes), "h2d", timeline.h2d_s)
        row("PCIe to host", format_size(timeline.d2h_bytes), "d2h", timeline.d2h_s)
    there = forecast.updates_there
    beside = forecast.hardware.update_beside_compute and not there
    where, rate = ("update (AdamW, device)", "device_update") if there else ("update (AdamW)", "update")
    row(where, format_size(16 * forecast.parameters), rate, timeline.update_s)
    label = "compute" if beside else "compute and update"
    row(label, f"{forecast.flops / 1e12:,.4g} TFLOP", "compute", timeline.compute_s)
    return table


def _busy(busy_s: float, step_s: float) -> tuple[str, str]:
    return format_seconds(busy_s), f"{busy_s / step_s:.0%}"


def _update_mode(forecast: Forecast) -> str:
    where = "" if forecast.device is None else " on the device" if forecast.updates_there else " on the host"
    if forecast.deferred:
        return f"deferred (clipping){where}"
    late = forecast.late_share()
    return f"fused{where}, {late:.0%} of it in the next forward" if late else f"fused{where}"


def _flops(per_s: float) -> str:
    """`82.6 TFLOP/s`, or GFLOP/s below one."""
    return f"{per_s / 1e12:.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.3g} GFLOP/s"


def _step_lines(forecast: Forecast) -> Iterator[str]:
    timeline, knobs = forecast.plan.timeline, forecast.plan.knobs
    yield (
        f"[bold]{format_seconds(forecast.step_s)} a step[/bold] simulated; at least "
        f"{format_seconds(timeline.limit_s)} ({forecast.bottleneck} alone), at most "
        f"{format_seconds(timeline.serial_s)} (one thing after the other). "
        f"Bottleneck: [bold]{forecast.bottleneck}[/bold]"
    )
    yield (
        f"{format_count(forecast.tokens_per_s)} tokens/s; {_flops(forecast.flops_per_s)} with the recomputed forward "
        f"(about {RECOMPUTED_FLOPS} x active parameters x tokens / step), {_flops(forecast.model_flops_per_s)} of the "
        f"model ({MODEL_FLOPS} x active parameters x tokens / step)"
    )
    yield (
        f"NVMe moves {forecast.bytes_per_param:.1f} bytes a parameter and step; update "
        f"{_update_mode(forecast)}, lookahead {knobs.lookahead} ops, {knobs.ring} "
        f"tiles of {format_size(knobs.tile_bytes)}"
    )
    if forecast.elsewhere is not None:
        yield _place_line(forecast, forecast.elsewhere)
    hidden = forecast.tokens_to_hide_io()
    hidden = None if hidden is None else math.ceil(hidden)
    if hidden is None:
        yield "Computing never hides all I/O: what activations move grows as fast as the work"
    elif hidden > forecast.tokens:
        yield f"Computing would take as long as all I/O from about {format_count(hidden)} tokens a step"
    else:
        yield f"Computing takes as long as all I/O from about {format_count(hidden)} tokens a step: here it does"
    if forecast.total_tokens is not None and forecast.total_s is not None:
        yield f"{format_count(forecast.total_tokens)} tokens take {_days(forecast.total_s / DAY_S)}"


def _place_line(forecast: Forecast, elsewhere: Elsewhere) -> str:
    """Where updates run, and why: by the seconds of the other place, or because it is none."""
    here, other = ("device", "host") if forecast.updates_there else ("host", "device")
    where = f"Updates run on the {here} ({'auto' if elsewhere.asked == 'auto' else f'--update-on {elsewhere.asked}'})"
    if elsewhere.step_s is not None:
        tie = ", which is a tie, and that is the host's"
        is_tie = elsewhere.asked == "auto" and elsewhere.step_s <= forecast.step_s
        why = f"with updates on the {other} a step is {format_seconds(elsewhere.step_s)}"
        return f"{where}; {why}{tie if is_tie else ''}"
    unknown = forecast.hardware.device_update is None
    return f"{where}; {'how fast the device updates is not known' if unknown else f'on the {other} it does not fit'}"


def _disk_lines(forecast: Forecast) -> Iterator[str]:
    yield (
        f"Disk: {format_size(forecast.disk_bytes())} in two slots; an export takes "
        f"{format_size(4 * forecast.parameters)} in FP32, {format_size(2 * forecast.parameters)} in BF16"
    )
    commit = f", a commit {format_size(forecast.commit_bytes)} more" if forecast.commit_bytes else ""
    yield f"Steps without a pause write {format_size(forecast.written_per_day)} a day{commit}"
    shown: dict[str, int] = {}
    for drive, per_day, days in forecast.drive_lives():
        if days is None:
            life = "endurance unknown" if per_day else "nothing is written"
        else:
            life = f"its endurance of {drive.endurance_bytes / 1e12:,.0f} TB lasts {_days(days)}"
        text = f"  {drive.name}: {format_size(per_day)} a day, {life}"
        shown[text] = shown.get(text, 0) + 1
    for text, count in shown.items():
        yield text + (f" (each of {count})" if count > 1 else "")


def _days(days: float) -> str:
    """Always in days, and in years beside it where those are easier to grasp."""
    years = f" ({days / YEAR_DAYS:,.1f} years)" if days >= 2 * YEAR_DAYS else ""
    return f"{days:,.1f} days{years}"


def _helps(forecast: Forecast, helps: Sequence[Help]) -> Table:
    table = _table("What would help", "change", "a step", "tokens/s", "gain")
    for change in helps:
        table.add_row(
            change.what,
            format_seconds(change.step_s),
            format_count(change.tokens_per_s),
            f"{change.gain - 1:+.0%}" if change.gain < 10 else f"x{change.gain:.0f}",
        )
    table.add_row("as it is", format_seconds(forecast.step_s), format_count(forecast.tokens_per_s), "", style="dim")
    return table


def _assumptions(forecast: Forecast) -> Table:
    table = Table("figure", "value", "source", title="Assumed, not measured (*)", box=SIMPLE_HEAD, pad_edge=False)
    table.title_justify, table.title_style = "left", "yellow"
    names = RATE_NAMES | ({"compute": "compute, TF32"} if forecast.precision == "tf32" else {})
    for assumption in forecast.assumptions:
        table.add_row(names.get(assumption.what, assumption.what), assumption.value, assumption.source)
    return table


RATE_NAMES = {
    "read": "NVMe read",
    "write": "NVMe write",
    "mixed": "NVMe read and write mixed",
    "compute": "compute, FP32",
    "update": "update (AdamW on the CPU)",
    "h2d": "PCIe to device",
    "d2h": "PCIe to host",
    "device_update": "update (AdamW on the device)",
    "direct_read": "NVMe read into the device",
}
"""Names of a machine's rates as people read them."""
