"""The `megatrain` command: reads the run file, refuses what cannot work, then calls the part that does it.

Scope: the commands and their options. torch and transformers are imported only after the
run file and the files it names have been accepted.
Not here: what the commands do (`megatrain/trainer.py`, `report.py`, `verify.py`, `generate.py`, `export.py`,
`snapshot.py`, `evaluate.py`, `check.py`, `keeping.py`, `measure.py`), exit codes, what goes to stdout and what to
stderr (`console.py`).
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from megatrain import __version__
from megatrain.config import RunConfig, load_run
from megatrain.console import FAILED, AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.errors import UserError
from megatrain.fit import refuse_early
from megatrain.preflight import check_files
from megatrain.tracing import DEFAULT_STEPS, parse_trace
from tiering.place import check_place

app = new_app()

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Overrides a key of the run file; may be given several times."),
]

Step = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="A commit that the run keeps; the last if not given.")
]


def main() -> None:
    """Runs the command of `sys.argv` and exits."""
    run_app(app, "megatrain")


@app.callback(invoke_without_command=True)
def _megatrain(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Train Hugging Face language models in true FP32 with the training state in RAM and on NVMe."""
    if version:
        print(f"megatrain {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UserError.exit_code)


@app.command(epilog="Example: megatrain train run.yaml --set train.steps=200 --resume")
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last commit of this run.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="A trace of some steps, for Perfetto; 100 MB at most."),
    ] = None,
    trace_steps: Annotated[
        str | None,
        typer.Option(
            "--trace-steps",
            metavar="A..B",
            help=f"Steps to trace, counted from where this run starts; {DEFAULT_STEPS} if not given.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train as the run file says."""
    with reported(debug):
        run = accepted(run_file, overrides)
        request = parse_trace(trace, trace_steps)
        from megatrain.trainer import train as start

        code = start(run, resume=resume, console=Console(), trace=request)
    raise typer.Exit(code)


@app.command(epilog="Example: megatrain plan run.yaml --set tiers.host_memory=32GiB")
def plan(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Say where every byte will live, how long a step will take, and whether it fits; trains nothing."""
    with reported(debug):
        run = accepted(run_file, overrides)
        with stdout_kept(as_json):
            from megatrain.report import plan_report

            report = plan_report(run, lambda line: print(line, file=sys.stderr))
        if as_json:
            print_json(report.as_json())
        else:
            report.render(Console())


@app.command(epilog="Example: megatrain data run.yaml --show 3")
def data(
    run_file: RunFile,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option("--show", min=0, help="Samples to print.")] = 3,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what the data looks like: counts, lengths, what is learned, every row left out; keeps the tokens."""
    with reported(debug):
        run = load_run(run_file, overrides or ())
        check_files(run)
        with stdout_kept(as_json):
            from megatrain.data.report import data_report

            report = data_report(run, show, Console(stderr=True))
        if as_json:
            print_json(report.as_json())
        else:
            report.render(Console())


@app.command(epilog="Example: megatrain verify run.yaml --steps 3")
def verify(
    run_file: RunFile,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the same steps tiered and as a plain loop, and compare every bit; exit code 1 if any differs."""
    with reported(debug):
        run = accepted(run_file, overrides)
        with stdout_kept(as_json):
            from megatrain.verify import verify as compare

            result = compare(run, steps, Console(stderr=as_json))
        if as_json:
            print_json(result)
    raise typer.Exit(0 if result["identical"] else FAILED)


@app.command(epilog='Example: megatrain generate runs/first --prompt "def main(" --max-new-tokens 100')
def generate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random draws.")] = 0,
    step: Step = None,
    debug: Debug = False,
) -> None:
    """Print the text that a trained run continues a prompt with."""
    with reported(debug):
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such folder. Fix: give the output.dir of a run")
        with stdout_kept(True):
            from megatrain.generate import generate as continue_text

            text = continue_text(
                run_dir,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                step=step,
                console=Console(stderr=True),
            )
        print(text)


@app.command(epilog="Example: megatrain export runs/first -o models/first --dtype bfloat16")
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="A new folder; missing parents are made.")],
    form: Annotated[
        Literal["safetensors", "zarr"],
        typer.Option("--format", help="A model folder, or a snapshot of weights and moments to import elsewhere."),
    ] = "safetensors",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Of the tensors in a model folder; float32 if not given."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Of a file of a model folder; 5GB if not given."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model or snapshot that is at DIR.")] = False,
    step: Step = None,
    debug: Debug = False,
) -> None:
    """Write a commit of a run as a Hugging Face model folder, or as a portable snapshot of its whole state."""
    with reported(debug):
        if form == "zarr":
            if dtype is not None or max_shard_size is not None:
                given = "--dtype" if dtype is not None else "--max-shard-size"
                raise UserError(f"{given} is for model folders; a snapshot is float32. Fix: leave it out")
            from megatrain.snapshot import export_snapshot

            export_snapshot(run_dir, out, force=force, step=step, console=Console())
            return
        most = size_option("--max-shard-size", max_shard_size or "5GB")
        from megatrain.export import export as export_model

        options: dict[str, Any] = {"dtype": dtype or "float32", "max_shard_bytes": most}
        export_model(run_dir, out, **options, force=force, step=step, console=Console())


@app.command("import", epilog="Example: megatrain import /backup/first-snapshot run.yaml")
def import_(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT_DIR", help="What `export --format zarr` wrote.")],
    run_file: RunFile,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Make the state of a run from a snapshot: on another machine, drive or budget, with the same bits."""
    with reported(debug):
        run = accepted(run_file, overrides)
        from megatrain.snapshot import import_snapshot

        import_snapshot(snapshot, run, Console())


@app.command(epilog="Example: megatrain unpack SmolLM2-135M.Q8_0.gguf -o models/smollm2")
def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A GGUF file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="A new folder; missing parents are made.")],
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a file of the folder.")
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is at DIR.")] = False,
    debug: Debug = False,
) -> None:
    """Write the model of a GGUF file as a model folder in FP32, to train from; the model has to fit in memory once."""
    with reported(debug):
        most = size_option("--max-shard-size", max_shard_size)
        from megatrain.unpack import unpack as unpack_file

        unpack_file(file, out, max_shard_bytes=most, force=force, console=Console())


@app.command("eval", epilog="Example: megatrain eval runs/first --data 'held-out/*.txt'")
def evaluate(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|MODEL_DIR", help="A run's output folder, or a model's.")],
    data: Annotated[
        list[str], typer.Option("--data", metavar="PATH", help="A file, folder or pattern; may be given again.")
    ],
    kind: Annotated[
        Literal["text", "chat", "tokens"] | None, typer.Option("--kind", help="Of the data; as in the run, or text.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=2, help="Tokens in a window; as in the run, or 512.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Windows a pass over the weights; as in the run, or 8.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="PATH", help="`bytes`, a tokenizer.json or its folder; else the model's."),
    ] = None,
    as_json: AsJson = False,
    step: Step = None,
    debug: Debug = False,
) -> None:
    """Loss and perplexity on text or conversations: forwards alone, for models that do not fit in memory too."""
    with reported(debug):
        with stdout_kept(as_json):
            from megatrain.evaluate import evaluate as measured
            from megatrain.evaluate import render

            options: dict[str, Any] = {"kind": kind, "seq_len": seq_len, "batch": batch, "tokenizer": tokenizer}
            found = measured(source, data, **options, step=step, console=Console(stderr=True))
        if as_json:
            print_json(found.as_json())
        else:
            render(found, Console())


@app.command(epilog="Example: megatrain models")
def models(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the architectures that are tested against a plain training loop, with date and releases."""
    with reported(debug):
        from megatrain import supported

        if as_json:
            print_json(supported.as_json())
        else:
            supported.render(Console())


@app.command(epilog="Example: megatrain restore runs/first --step 2000")
def restore(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run.")],
    step: Annotated[int, typer.Option("--step", min=0, metavar="N", help="A commit that is kept.")],
    debug: Debug = False,
) -> None:
    """Make a kept commit the state of its run: `train --resume` goes on from there, the last commit is given up."""
    with reported(debug):
        from megatrain.keeping import restore as bring_back

        bring_back(run_dir, step, Console())


@app.command(epilog="Example: megatrain check runs/first")
def check(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|STATE_DIR", help="A run's output folder, or the folder of its state.")
    ],
    drives: Annotated[
        list[Path] | None,
        typer.Option("--drive", metavar="DIR", help="With STATE_DIR: its folder on a further drive; one for each."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read all of the last commit and of those kept, compare every checksum; exit code 1 if anything is damaged."""
    with reported(debug):
        with stdout_kept(as_json):
            from megatrain.check import check_state

            report = check_state(path, drives or (), Console(stderr=True))
        if as_json:
            print_json(report.as_json())
        else:
            report.render(Console())
    raise typer.Exit(0 if report.clean else FAILED)


@app.command(epilog="Example: megatrain measure --path /mnt/nvme -o hardware.json")
def measure(
    paths: Annotated[list[Path], typer.Option("--path", metavar="DIR", help="A folder on a drive; one for each.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to write what was found.")] = Path(
        "hardware.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Write 2 GiB to a drive at most, not 8 GiB.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure drives, memory and processors of this machine, and write a file that plans can be made with."""
    with reported(debug):
        for path in paths:
            check_place(path)
        with stdout_kept(as_json):
            from megatrain.measure import measure_machine, render

            file = measure_machine(paths, out, quick=quick, console=Console(stderr=True))
        if as_json:
            print_json(file.model_dump(mode="json"))
        else:
            render(file, out, Console())


@app.command(epilog="Example: megatrain doctor --path /mnt/nvme")
def doctor(
    path: Annotated[Path | None, typer.Option("--path", metavar="DIR", help="A folder for the NVMe tier.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option("--pin", metavar="[Nx]SIZE", help="Buffers to lock, such as 64MiB or 4x1GiB.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what this machine has, what will be used, and what to do; exit code 1 if a run cannot work here."""
    with reported(debug):
        with stdout_kept(as_json):
            from megatrain.doctor import examine, parse_buffers
            from megatrain.environment import gather

            wanted = [nbytes for text in pin or () for nbytes in parse_buffers(text)]
            report = examine(gather(), path, wanted)
        if as_json:
            print_json(report.as_json())
        else:
            report.render(Console())
    raise typer.Exit(0 if report.healthy else FAILED)


def accepted(run_file: Path, overrides: list[str] | None) -> RunConfig:
    """The run, after every check that needs neither the model nor the device; nothing has been written yet."""
    run = load_run(run_file, overrides or ())
    check_files(run)
    for root in run.tiers.nvme:
        check_place(root)
    refuse_early(run)
    return run
