"""The `tierplan` command: does it fit, where will every byte live, how long is a step, what would make it faster.

Scope: its options, its output, its refusals; nothing is run and no torch is needed.
Not here: the question and its answer (`question.py`), the machine (`machine.py`), tables (`tables.py`), ranges
(`sweep.py`), the picture (`plot.py`).
"""

import gc
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatrain.catalog.family_keys import DEFAULTS
from megatrain.catalog.known_models import resolve_model
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.errors import UserError
from megatrain.programs import Precision
from megatrain.sizes import format_count, format_size, parse_count
from megatrain.tierplan.advice import Help, helps, remedies
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.machine import Machine, machine
from megatrain.tierplan.plot import draw, refuse_picture
from megatrain.tierplan.question import DEFAULT_SEQ, Question, ShortageError, Sized, sized, told
from megatrain.tierplan.sweep import Sweep, around, parse_range
from megatrain.tierplan.sweep import sweep as sweep_range
from megatrain.tierplan.tables import render
from megatrain.training_plan import UpdateOn

DEFAULT_TOKENS = 65_536
EPILOG = "Example: tierplan --model llama-3-70b --host-memory 128GiB --gpu rtx4090 --nvme '4x(7.0,6.0)' --tokens 32768"
app = new_app()


def main() -> None:
    """Entry point of the `tierplan` script: plans what `sys.argv` asks for and exits."""
    gc.disable()  # a short process that makes millions of small records and no cycles: a fifth of its time
    run_app(app, "tierplan")


_RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Plan this run file, instead of --model.")]
_Model = Annotated[str | None, typer.Option(help="A known name, a config.json, or a model folder.")]
_Host = Annotated[str | None, typer.Option(metavar="SIZE", help="RAM in all, such as 128GiB.")]
_Device = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the GPU; default: the card's.")]
_Gpu = Annotated[str | None, typer.Option(help="A known card; without one the CPU computes.")]
_Nvme = Annotated[
    list[str] | None, typer.Option(metavar="DRIVES", help="'4x(7.0,6.0)': GB/s read and write; or known drives.")
]
_Tokens = Annotated[str | None, typer.Option(metavar="N", help=f"Tokens a step; default: {DEFAULT_TOKENS}.")]
_MicroBatch = Annotated[int | None, typer.Option(min=1, help="Sequences at a time; default: as room allows.")]
_LossChunk = Annotated[
    str | None, typer.Option(metavar="N", help="Tokens whose logits exist at a time; default: a micro-batch.")
]
_Precision = Annotated[
    Precision | None, typer.Option(help="What units compute in, on FP32 masters; default: fp32. tf32: GPU only.")
]
_UpdateOn = Annotated[UpdateOn | None, typer.Option(help="Where AdamW runs beside a GPU; default: auto, the faster.")]
_Gds = Annotated[bool, typer.Option("--gds", help="Drives can read straight into the GPU, as fast as into RAM.")]
_Seq = Annotated[int | None, typer.Option(min=2, help=f"Tokens a sequence; default: {DEFAULT_SEQ}.")]
_Clip = Annotated[bool, typer.Option(help="Clip the gradient norm, which defers updates.")]
_Hardware = Annotated[Path | None, typer.Option(metavar="FILE", help="Rates found by `megatrain measure`.")]
_CpuFlops = Annotated[float | None, typer.Option(min=1.0, help="FLOP/s of the CPU in FP32, such as 1.5e12.")]
_GpuFlops = Annotated[
    float | None, typer.Option(min=1.0, help="FLOP/s of the GPU in --precision, instead of the data sheet's.")
]
_Total = Annotated[str | None, typer.Option(metavar="N", help="Of the whole training, such as 15T.")]
_Sweep = Annotated[str | None, typer.Option(metavar="AXIS=A..B", help="Such as host-memory=32GiB..512GiB.")]
_Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw step time against RAM.")]
_Models = Annotated[bool, typer.Option("--list-models", help="Known models.")]
_Gpus = Annotated[bool, typer.Option("--list-gpus", help="Known GPUs.")]
_Drives = Annotated[bool, typer.Option("--list-drives", help="Known drives.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was typed; each field is an option."""

    model: str | None
    host_memory: str | None
    device_memory: str | None
    gpu: str | None
    nvme: list[str] | None
    tokens: str | None
    micro_batch: int | None
    loss_chunk: str | None
    precision: Precision | None
    update_on: UpdateOn | None
    gds: bool
    seq: int | None
    clip: bool
    hardware: Path | None
    cpu_flops: float | None
    gpu_flops: float | None
    total_tokens: str | None
    sweep: str | None
    plot: Path | None

    def options(self) -> list[str]:
        """Names of the options that were given."""
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, [])]
        return [f"--{name.replace('_', '-')}" for name in given]


@app.command(epilog=EPILOG)
def tierplan(
    run_file: _RunFile = None,
    model: _Model = None,
    host_memory: _Host = None,
    device_memory: _Device = None,
    gpu: _Gpu = None,
    nvme: _Nvme = None,
    tokens: _Tokens = None,
    micro_batch: _MicroBatch = None,
    loss_chunk: _LossChunk = None,
    precision: _Precision = None,
    update_on: _UpdateOn = None,
    gds: _Gds = False,
    seq: _Seq = None,
    clip: _Clip = False,
    hardware: _Hardware = None,
    cpu_flops: _CpuFlops = None,
    gpu_flops: _GpuFlops = None,
    total_tokens: _Total = None,
    sweep: _Sweep = None,
    plot: _Plot = None,
    list_models: _Models = False,
    list_gpus: _Gpus = False,
    list_drives: _Drives = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan the training of a language model in FP32 with its state in RAM and on NVMe; runs nothing."""
    asked = _Asked(
        model=model, host_memory=host_memory, device_memory=device_memory, gpu=gpu, nvme=nvme, tokens=tokens,
        micro_batch=micro_batch, loss_chunk=loss_chunk, seq=seq, clip=clip, hardware=hardware, cpu_flops=cpu_flops,
        total_tokens=total_tokens, sweep=sweep, plot=plot, precision=precision, update_on=update_on,
        gpu_flops=gpu_flops, gds=gds,
    )  # fmt: skip
    with reported(debug):
        if list_models or list_gpus or list_drives:
            _show_lists(models=list_models, gpus=list_gpus, drives=list_drives)
        elif run_file is not None:
            _plan_run(run_file, asked.options(), as_json)
        else:
            _plan_question(asked, as_json)


def _plan_question(asked: _Asked, as_json: bool) -> None:
    """Answer, range, picture and help, then all of it shown."""
    plot = asked.plot
    if plot is not None:
        refuse_picture(plot)
    wanted = None if asked.sweep is None else parse_range(asked.sweep)
    if plot is not None and wanted is not None and wanted.axis != "host-memory":
        raise UserError(f"--plot draws step time against RAM, not over {wanted.axis}. Fix: leave one of them out")
    with stdout_kept(as_json):
        question, where = _question(asked)
        ready, base = _answer(question)
        ranged = None
        if wanted is not None:
            ranged = sweep_range(ready, base, wanted)
        elif plot is not None:
            ranged = around(ready, base)
        if plot is not None and ranged is not None:
            draw(ranged, base, question.host_memory, where.title, plot)
        changes = helps(ready, base)
    _show(base, changes, ranged, plot, where, as_json)


def _question(asked: _Asked) -> tuple[Question, Machine]:
    if asked.model is None:
        raise UserError(f"--model is missing. {EPILOG}; names: tierplan --list-models")
    memory = None if asked.device_memory is None else size_option("--device-memory", asked.device_memory)
    where = machine(
        gpu=asked.gpu,
        device_memory=memory,
        nvme=asked.nvme or (),
        hardware_file=asked.hardware,
        cpu_flops=asked.cpu_flops,
        gpu_flops=asked.gpu_flops,
        precision=asked.precision or "fp32",
        update_on=asked.update_on or "auto",
        gds=asked.gds,
    )
    name, config = resolve_model(asked.model)
    notes, seq = [], asked.seq
    if seq is None:
        most = _most_positions(config)
        seq = min(DEFAULT_SEQ, most or DEFAULT_SEQ)
        bound = ", the most that the model takes" if seq == most else ""
        notes.append(f"sequences of {seq} tokens were assumed{bound}")
    if asked.tokens is None:
        notes.append(f"{DEFAULT_TOKENS} tokens a step were assumed")
    question = Question(
        model=name,
        config=config,
        tokens=DEFAULT_TOKENS if asked.tokens is None else _count("--tokens", asked.tokens),
        seq_len=seq,
        micro_batch=asked.micro_batch,
        loss_chunk=None if asked.loss_chunk is None else _count("--loss-chunk", asked.loss_chunk),
        precision=asked.precision or "fp32",
        update_on=asked.update_on or "auto",
        host_memory=_host_memory(asked.host_memory, where),
        device_memory=where.device_memory,
        hardware=where.hardware,
        drives=where.drives,
        deferred=asked.clip,
        total_tokens=None if asked.total_tokens is None else _count("--total-tokens", asked.total_tokens),
        notes=tuple(notes),
    )
    return question, where


def _host_memory(text: str | None, where: Machine) -> int:
    if text is not None:
        return size_option("--host-memory", text)
    if where.host_memory is None:
        raise UserError("--host-memory is missing. Fix: --host-memory 128GiB, or --hardware FILE")
    return where.host_memory


def _most_positions(config: dict[str, Any]) -> int | None:
    """Tokens that a sequence may have at most, where the config or the family says so."""
    known = DEFAULTS.get(str(config.get("model_type")), {})
    values = (source.get(key) for key in ("max_position_embeddings", "n_positions") for source in (config, known))
    return next((value for value in values if isinstance(value, int) and value > 1), None)


def _count(option: str, text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def _answer(question: Question) -> tuple[Sized, Forecast]:
    """Raises UserError for a question that has no answer, with changes that have been tried."""
    ready = sized(question)
    try:
        found = told(ready)
        _refuse_full(question, found.disk_bytes())
        return ready, found
    except ShortageError as shortage:
        fixes = remedies(question)
        advice = ", or ".join(fixes) if fixes else "a smaller model"
        raise UserError(f"{shortage}\nFix: {advice}") from None


def _refuse_full(question: Question, needed_bytes: int) -> None:
    """Raises UserError if the drives, where their capacity is known, cannot hold the state."""
    sizes = [drive.capacity_bytes for drive in question.drives]
    if not all(sizes) or sum(sizes) >= needed_bytes:
        return
    first = question.drives[0]
    count = len(sizes) - (sum(sizes) - needed_bytes) // first.capacity_bytes
    raise UserError(
        f"NVMe needs {format_size(needed_bytes)} for two slots of the state and what is spilled, the drives hold "
        f"{format_size(sum(sizes))}. Fix: {count} drives like {first.name}, or larger ones"
    )


def _plan_run(run_file: Path, options: list[str], as_json: bool) -> None:
    """What `megatrain plan` prints."""
    if options:
        raise UserError(f"{', '.join(options)}: not beside a run file, which says it all. Fix: leave one of them out")
    from megatrain.cli import accepted

    run = accepted(run_file, None)
    with stdout_kept(as_json):
        from megatrain.report import plan_report

        report = plan_report(run)
    if as_json:
        print_json(report.as_json())
    else:
        report.render(Console())


def _show(
    base: Forecast, changes: list[Help], ranged: Sweep | None, plot: Path | None, where: Machine, as_json: bool
) -> None:
    if as_json:
        more = {"machine": where.title, "helps": [asdict(change) for change in changes]}
        sweep_json = {} if ranged is None else {"sweep": ranged.as_json()}
        print_json(base.as_json() | more | sweep_json | ({} if plot is None else {"plot": str(plot)}))
        return
    console = Console()
    console.print(f"Machine: {where.title}", highlight=False, markup=False)
    render(base, console, changes)
    if ranged is not None:
        console.print(ranged.table())
    if plot is not None:
        console.print(f"Picture: {plot}", highlight=False, markup=False)


def _show_lists(*, models: bool, gpus: bool, drives: bool) -> None:
    console = Console()
    if models:
        console.print(_models())
    if gpus:
        console.print(_gpus())
    if drives:
        console.print(_drives())


def _list(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _models() -> Table:
    from megatrain.catalog.model_table import MODELS
    from megatrain.catalog.shapes import active_parameters, parameters

    table = _list("Known models; any dense-<SIZE> such as dense-100b too", "name", "parameters", "active", "FP32 state")
    for name, entry in MODELS.items():
        count, active = parameters(entry.config), active_parameters(entry.config)
        assert count is not None and active is not None, name
        shown = format_count(active) if active != count else ""
        table.add_row(name, format_count(count), shown, format_size(16 * count))
    return table


def _gpus() -> Table:
    from megatrain.catalog.part_tables import GPUS
    from megatrain.catalog.parts import find_gpu

    table = _list("Known GPUs (assumed, from data sheets)", "name", "memory", "FP32 TFLOP/s", "TF32", "GB/s each way")
    for name in GPUS:
        card = find_gpu(name)
        tf32 = f"{card.tf32.per_s / 1e12:.1f}" if card.tf32 is not None else "-"
        figures = (f"{card.compute.per_s / 1e12:.1f}", tf32, f"{card.h2d.per_s / 1e9:.1f}")
        table.add_row(name, format_size(card.memory_bytes), *figures)
    return table


def _drives() -> Table:
    from megatrain.catalog.part_tables import DRIVES
    from megatrain.catalog.parts import find_drive

    heads = ("name", "read GB/s", "sustained write GB/s", "TB", "endurance TB")
    table = _list("Known drives (assumed, from data sheets)", *heads)
    for name in DRIVES:
        drive = find_drive(name)
        figures = (drive.read.per_s / 1e9, drive.write.per_s / 1e9, drive.capacity_bytes / 1e12)
        table.add_row(name, *(f"{figure:.1f}" for figure in figures), f"{drive.endurance_bytes / 1e12:,.0f}")
    return table
