"""The `megatrain` command: reads the run file, refuses what cannot work, then calls the part that does it.

Scope: options, exit codes, what goes to stdout and what to stderr. torch and transformers are imported only after the
run file and the files it names have been accepted.
Not here: what the commands do (`megatrain/trainer.py`, `report.py`, `verify.py`, `generate.py`).

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 3 a drive failed, 4 gradients are not finite, 130 interrupted.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.exceptions import TyperException

from megatrain import __version__
from megatrain.config import RunConfig, load_run
from megatrain.errors import UserError
from megatrain.fit import refuse_early
from tiering.errors import TieringError
from tiering.place import check_place

FAILED = 1
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Overrides a key of the run file; may be given several times."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, all else to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point of the `megatrain` script: runs the command of `sys.argv` and exits."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # an option that is missing, unknown or out of range
        print(f"error: {error.format_message().rstrip('.')}. See: megatrain --help", file=sys.stderr)
        code = getattr(error, "exit_code", FAILED)
    sys.exit(code)


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
    with _reported(debug):
        run = _accepted(run_file, overrides)
        from megatrain.trainer import train as start

        code = start(run, resume=resume, console=Console())
    raise typer.Exit(code)


@app.command(epilog="Example: megatrain plan run.yaml --set tiers.host_memory=32GiB")
def plan(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Say where every byte will live, how long a step will take, and whether it fits; trains nothing."""
    with _reported(debug):
        run = _accepted(run_file, overrides)
        with _stdout_kept(as_json):
            from megatrain.report import plan_report

            report = plan_report(run)
        if as_json:
            _print_json(report.as_json())
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
    with _reported(debug):
        run = _accepted(run_file, overrides)
        with _stdout_kept(as_json):
            from megatrain.verify import verify as compare

            result = compare(run, steps, Console(stderr=as_json))
        if as_json:
            _print_json(result)
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
    with _reported(debug):
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such folder. Fix: give the output.dir of a run")
        with _stdout_kept(True):
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


def _accepted(run_file: Path, overrides: list[str] | None) -> RunConfig:
    """The run, after every check that needs neither the model nor the device; nothing has been written yet."""
    run = load_run(run_file, overrides or ())
    run.check_files()
    for root in run.tiers.nvme:
        check_place(root)
    refuse_early(run)
    return run


@contextlib.contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turns an exception into a message on stderr and an exit code; with `debug` its traceback comes first."""
    try:
        yield
    except (UserError, TieringError) as error:
        code, message = error.exit_code, f"error: {error}"
        shown: BaseException = error
    except KeyboardInterrupt as error:
        code, message, shown = INTERRUPTED, "interrupted", error
    except Exception as error:
        detail = " ".join(str(error).split())
        advice = "" if debug else "; run again with --debug"
        code, message, shown = FAILED, f"error: unexpected {type(error).__name__}: {detail}{advice}", error
    else:
        return
    if debug:
        traceback.print_exception(shown, file=sys.stderr)
    print(message, file=sys.stderr)
    raise typer.Exit(code)


@contextlib.contextmanager
def _stdout_kept(kept: bool) -> Iterator[None]:
    """While stdout is for the result alone, whatever a library prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
        yield


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result))
