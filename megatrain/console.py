"""How a command ends: an exit code, a message on stderr, a result on stdout.

Scope: what every command of `megatrain` and every benchmark does around its work.
Not here: the commands (`megatrain/cli.py`, `benchmarks/`), the errors (`megatrain/errors.py`, `tiering/errors.py`).

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 3 a drive failed, 4 gradients are not finite, 130 interrupted.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from megatrain.errors import UserError
from megatrain.sizes import parse_size
from tiering.errors import TieringError

FAILED = 1
INTERRUPTED = 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, all else to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def new_app() -> typer.Typer:
    """A command line without colours of its own and without rich tracebacks: errors are written by `reported`."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run_app(app: typer.Typer, program: str) -> None:
    """Runs the command of `sys.argv` and exits with its code."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # an option that is missing, unknown or out of range
        print(f"error: {error.format_message().rstrip('.')}. See: {program} --help", file=sys.stderr)
        code = getattr(error, "exit_code", FAILED)
    sys.exit(code)


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
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
def stdout_kept(kept: bool) -> Iterator[None]:
    """While stdout is for the result alone, whatever a library prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
        yield


def print_json(result: dict[str, Any]) -> None:
    """One object on one line of stdout."""
    print(json.dumps(result))


def size_option(name: str, text: str, *, least: int = 1) -> int:
    """Bytes of a size that was typed for an option. Raises UserError for what is none, or less than `least`."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    if nbytes < least:
        raise UserError(f"{name} {text} is {nbytes} bytes; at least {least} are needed. Fix: {name} {least}")
    return nbytes
