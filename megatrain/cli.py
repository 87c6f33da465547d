"""The `megatrain` command: reads the run file, refuses what cannot work, then calls the part that does it.

Scope: the commands and their options. torch and transformers are imported only after the
run file and the files it names have been accepted.
Not here: what the commands do (`megatrain/trainer.py`, `report.py`, `verify.py`, `generate.py`, `measure.py`), exit
codes, what goes to stdout and what to stderr (`console.py`).
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatrain import __version__
from megatrain.config import RunConfig, load_run
from megatrain.console import FAILED, AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.errors import UserError
from megatrain.fit import refuse_early
from tiering.place import check_place

app = new_app()

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Overrides a key of the run file; may be given several times."),
]


def main() -> None:
    """Entry point of the `megatrain` script: runs the command of `sys.argv` and exits."""
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
    debug: Debug = False,
) -> None:
    """Train as the run file says."""
    with reported(debug):
        run = accepted(run_file, overrides)
        from megatrain.trainer import train as start

        code = start(run, resume=resume, console=Console())
    raise typer.Exit(code)


@app.command(epilog="Example: megatrain plan run.yaml --set tiers.host_memory=32GiB")
def plan(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Say where every byte will live, how long a step will take, and whether it fits; trains nothing."""
    with reported(debug):
        run = accepted(run_file, overrides)
        with stdout_kept(as_json):
            from megatrain.report import plan_report

            report = plan_report(run)
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
                console=Console(stderr=True),
            )
        print(text)


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
    run.check_files()
    for root in run.tiers.nvme:
        check_place(root)
    refuse_early(run)
    return run
