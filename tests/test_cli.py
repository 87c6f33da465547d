"""The command line: exit codes, what goes to stdout and stderr, and that a refusal writes nothing."""

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain import __version__, cli
from megatrain.errors import UserError
from tiering.errors import BudgetError, DamagedStateError, DiskFullError, StoreLockedError

PARTS = {"trainer": "train", "report": "plan_report", "verify": "verify", "generate": "generate"}
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `megatrain ARGS` in this process and returns exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatrain", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts a function in the place of the one that does a command's work."""

    def put(module: str, function: Callable[..., Any]) -> None:
        stand_in = types.ModuleType(f"megatrain.{module}")
        setattr(stand_in, PARTS[module], function)
        monkeypatch.setitem(sys.modules, f"megatrain.{module}", stand_in)

    for module in PARTS:
        put(module, lambda *args, **kwargs: pytest.fail("the work began"))
    return put


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p.relative_to(folder)), p.stat().st_mtime_ns) for p in folder.rglob("*"))


class Report:
    """A plan report that prints while it is made, as libraries do."""

    def as_json(self) -> dict[str, Any]:
        return {"step_s": 1.5, "fits": True}

    def render(self, console: Console) -> None:
        console.print("one line for people")


def test_version_is_the_package_version(invoke: Invoke) -> None:
    """`--version` prints name and version to stdout."""
    assert invoke("--version") == (0, f"megatrain {__version__}\n", "")
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in pyproject


def test_no_command_shows_help_and_fails(invoke: Invoke) -> None:
    """Nothing asked for is bad input; stdout stays empty."""
    code, out, err = invoke()
    assert (code, out) == (2, "") and "train" in err and "generate" in err


@pytest.mark.parametrize("command", ["train", "plan", "verify", "generate"])
def test_help_shows_an_example(invoke: Invoke, command: str) -> None:
    """Each command's help ends with a line that can be copied."""
    code, out, _ = invoke(command, "--help")
    assert code == 0 and f"Example: megatrain {command} " in out, out


def test_train_passes_run_resume_and_exit_code(invoke: Invoke, part: Any, run_file: Any) -> None:
    """The trainer's exit code is the command's."""
    seen: list[Any] = []

    def train(run: Any, *, resume: bool, console: Console, trace: Any) -> int:
        seen.append((run.train.steps, run.optimizer.lr, resume, console.stderr, trace))
        return len(seen) - 1

    part("trainer", train)
    assert invoke("train", run_file())[0] == 0
    assert invoke("train", run_file(), "--set", "train.steps=9", "--set", "optimizer.lr=1e-2", "--resume")[0] == 1
    assert seen == [(4, 3e-4, False, False, None), (9, 1e-2, True, False, None)]


def test_plan_prints_one_json_object_and_nothing_else_to_stdout(invoke: Invoke, part: Any, run_file: Any) -> None:
    """`--json` is for programs: whatever else is printed goes to stderr."""

    def plan_report(run: Any, tell: Any) -> Report:
        print("a library's chatter")
        return Report()

    part("report", plan_report)
    code, out, err = invoke("plan", run_file(), "--json")
    assert code == 0 and json.loads(out) == {"step_s": 1.5, "fits": True} and "chatter" in err
    code, out, _ = invoke("plan", run_file())
    assert code == 0 and "one line for people" in out


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_verify_fails_when_a_bit_differs(invoke: Invoke, part: Any, run_file: Any, identical: bool, code: int) -> None:
    """P1: the verdict is the exit code, in both forms of output."""

    def verify(run: Any, steps: int, console: Console) -> dict[str, Any]:
        console.print(f"compared {steps} steps")
        return {"identical": identical, "steps": steps}

    part("verify", verify)
    found, out, err = invoke("verify", run_file(), "--steps", 3, "--json")
    assert (found, json.loads(out)) == (code, {"identical": identical, "steps": 3}) and "compared 3" in err
    found, out, _ = invoke("verify", run_file(), "--steps", 3)
    assert found == code and "compared 3" in out


def test_generate_prints_the_text_alone(invoke: Invoke, part: Any, tmp_path: Path) -> None:
    """The text goes to stdout as it is, the rest to stderr."""

    def generate(
        run_dir: Path,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        step: int | None,
        console: Console,
    ) -> str:
        console.print("reading weights")
        return f"{prompt}|{max_new_tokens}|{temperature}|{seed}|{step}|[bold]"

    part("generate", generate)
    assert invoke("generate", tmp_path, "--prompt", "a b") == (0, "a b|64|0.8|0|None|[bold]\n", "reading weights\n")
    knobs = ("--max-new-tokens", 3, "--temperature", 0, "--seed", 7, "--step", 2)
    code, out, _ = invoke("generate", tmp_path, "--prompt", "x", *knobs)
    assert (code, out) == (0, "x|3|0.0|7|2|[bold]\n")


BAD_RUNS = [
    ({"train.batch": -4}, "must be >= 1"),
    ({"tiers.engin": "auto"}, "did you mean `tiers.engine`?"),
    ({"data.paths": "/nowhere/text.txt"}, "/nowhere/text.txt does not exist"),
    ({"model": {"path": "/nowhere"}}, "/nowhere is not a folder"),
    ({"tiers.nvme": "/etc/passwd"}, "/etc/passwd"),
    ({"tiers.nvme": "/etc/passwd/below"}, "/etc/passwd"),
    ({"output.dir": "/etc/passwd"}, "/etc/passwd is a file"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_RUNS)
@pytest.mark.parametrize("command", [("train",), ("train", "--resume"), ("plan", "--json"), ("verify", "--steps", "1")])
def test_bad_input_is_one_line_exit_2_and_writes_nothing(
    invoke: Invoke, part: Any, run_file: Any, tmp_path: Path, changes: dict[str, Any], words: str, command: Any
) -> None:
    """CF-05, IO-16: refused before the work begins, with nothing on stdout and nothing on disk."""
    path = run_file(changes)
    before = tree(tmp_path)
    code, out, err = invoke(command[0], path, *command[1:])
    assert (code, out) == (2, "") and err.startswith("error: ") and words in err and err.count("\n") == 1, err
    assert "Traceback" not in err and tree(tmp_path) == before


def test_tmpfs_is_refused_as_a_tier(invoke: Invoke, part: Any, run_file: Any) -> None:
    """IO-16: a RAM file system would hold the state in the memory that the tier is to spare."""
    shm = Path("/dev/shm")
    mounts = Path("/proc/self/mounts").read_text() if shm.is_dir() else ""
    if not re.search(r"^\S+ /dev/shm tmpfs ", mounts, re.MULTILINE):
        pytest.skip("no tmpfs at /dev/shm")
    code, out, err = invoke("train", run_file({"tiers.nvme": "/dev/shm/no-such-run"}))
    assert (code, out) == (2, "") and "tmpfs" in err and err.count("\n") == 1, err
    assert not (shm / "no-such-run").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train"], "Missing argument"),
        (["plan", "RUN", "--bogus"], "--bogus"),
        (["verify", "RUN"], "--steps"),
        (["verify", "RUN", "--steps", "0"], "--steps"),
        (["verify", "RUN", "--steps", "-3"], "--steps"),
        (["generate", "RUN", "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "RUN", "--prompt", "x"], "no such folder"),
        (["train", "/nowhere/run.yaml"], "/nowhere/run.yaml: no such run file"),
        (["plan", "RUN", "--set", "train.steps"], "a.b=value"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(
    invoke: Invoke, part: Any, run_file: Any, args: list[str], words: str
) -> None:
    """CF-06: options are held to their range as the run file is."""
    path = str(run_file())
    code, out, err = invoke(*(path if arg == "RUN" else arg for arg in args))
    assert (code, out) == (2, "") and err.startswith("error: ") and words in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("bad file"), 2),
        (BudgetError("too big"), 2),
        (StoreLockedError("pid 7"), 2),
        (DamagedStateError("short file"), 3),
        (DiskFullError("no room"), 3),
    ],
)
def test_typed_errors_give_their_exit_code(
    invoke: Invoke, part: Any, run_file: Any, error: Exception, code: int
) -> None:
    """IO-06: bad input and a bad drive can be told apart by a script; the traceback only comes when asked for."""

    def train(run: Any, **_: Any) -> int:
        raise error

    part("trainer", train)
    assert invoke("train", run_file()) == (code, "", f"error: {error}\n")
    found, out, err = invoke("train", run_file(), "--debug")
    assert (found, out) == (code, "") and "Traceback" in err and err.endswith(f"error: {error}\n"), err


def test_unexpected_error_is_one_line_with_the_way_to_its_traceback(invoke: Invoke, part: Any, run_file: Any) -> None:
    """CF-05: the trace only with --debug."""

    def train(run: Any, **_: Any) -> int:
        raise RuntimeError("first\nsecond")

    part("trainer", train)
    code, _, err = invoke("train", run_file())
    assert (code, err) == (1, "error: unexpected RuntimeError: first second; run again with --debug\n")
    code, _, err = invoke("train", run_file(), "--debug")
    assert code == 1 and "Traceback" in err and "run again" not in err


def test_interrupt_exits_130(invoke: Invoke, part: Any, run_file: Any) -> None:
    """Ctrl-C is no error of the program."""

    def train(run: Any, **_: Any) -> int:
        raise KeyboardInterrupt

    part("trainer", train)
    assert invoke("train", run_file()) == (130, "", "interrupted\n")


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    """The installed script and `python -m megatrain` agree."""
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "train", str(tmp_path / "no.yaml")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: "), done.stderr
