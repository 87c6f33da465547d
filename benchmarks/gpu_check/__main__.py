"""`python -m benchmarks.gpu_check`: each check in a child with a time limit, one JSON line as it ends.

Scope: arguments, the order of checks, the time that is left, what a child that crashed or hung becomes.
Not here: the checks (`checks.py`), the child (`child.py`).

Exit code 0: no check failed, or there is no GPU (then one line says so); 1: one failed; 2: it cannot be run like that.
`ok` is null for what was not decided: a package is missing, or no time was left; `skipped` says which.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from benchmarks.child import Ended, run_child
from benchmarks.gpu_check.checks import CHECKS, DEVICE, Check
from tiering.errors import TieringError
from tiering.place import check_place, folder_beside, nearest_directory

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 465.0
"""For all checks together: a visit is to end within 8 minutes."""
START_S = 3.0
"""Python, torch and CUDA take so long before a check begins."""
NO_GPU = "no GPU"
CHILD = (sys.executable, "-m", "benchmarks.gpu_check.child")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    chosen = [check for check in CHECKS if options.only in check.name]
    if not chosen:
        print(f"--only {options.only}: no check has that in its name. Fix: one of {_names()}", file=sys.stderr)
        return 2
    try:
        with _opened(options.json_file) as file:
            return _run(chosen, options.path, options.budget_s, file)
    except (TieringError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Run everything that needs a GPU; one JSON line a check.",
        epilog="\n".join(f"  {check.name:<14} {check.what}" for check in CHECKS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="checks with this in their names")
    parser.add_argument("--path", type=Path, metavar="DIR", help="a folder on the drive (default: beside the project)")
    parser.add_argument("--json-file", type=Path, metavar="FILE", help="where the lines are kept too")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all (default: %(default)g)")
    return parser


def _names() -> str:
    return ", ".join(check.name for check in CHECKS)


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with path.open("w") as file:
        yield file


def _run(chosen: Sequence[Check], path: Path | None, budget_s: float, file: TextIO | None) -> int:
    """The device always comes first: without one there is nothing to check."""
    until_s = time.monotonic() + budget_s
    first = CHECKS[0]
    found = [run_check(first, ROOT, min(first.limit_s, budget_s))]
    _tell(found[0], file)
    if str(found[0].get("skipped", "")).startswith(NO_GPU):
        return 0
    rest = [check for check in chosen if check.name != DEVICE] if found[0]["ok"] else []
    with _folder(path) as folder:
        for check in rest:
            left_s = until_s - time.monotonic()
            if left_s < check.least_s:
                line = _line(check, ok=None, skipped=f"{left_s:.0f} of {budget_s:.0f} s were left")
            else:
                line = run_check(check, folder, min(check.limit_s, left_s))
            found.append(line)
            _tell(line, file)
    _tell(_summary(found, budget_s - (until_s - time.monotonic())), file)
    return 1 if any(line["ok"] is False for line in found) else 0


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    """A folder on the drive, gone afterwards. Raises `PlaceError` for what is no drive."""
    place = folder_beside(ROOT) if path is None else path
    check_place(place)
    folder = Path(tempfile.mkdtemp(prefix=".gpu-check-", dir=nearest_directory(place)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_check(check: Check, folder: Path, limit_s: float, command: Sequence[str] = CHILD) -> dict[str, Any]:
    """Its line, whatever becomes of the child. folder: it works in one of its own inside. command: takes the name of
    the check, its folder and its seconds.
    """
    begin_s = time.monotonic()
    own = folder / check.name
    try:
        ended = run_child(
            [*command, check.name, str(own), f"{max(1.0, limit_s - START_S):.1f}"], timeout_s=limit_s, folder=ROOT
        )
    finally:
        shutil.rmtree(own, ignore_errors=True)
    line = _answer(check, ended) or _line(check, ok=False, why=_fault(ended, limit_s))
    return line | {"seconds": round(time.monotonic() - begin_s, 1)}


def _answer(check: Check, ended: Ended) -> dict[str, Any] | None:
    """What the child said, if it is what a child says."""
    said = dict(ended.result)
    whole = ended.code == 0 and said.get("check") == check.name and said.get("ok", "") in (True, False, None)
    return said if whole else None


def _fault(ended: Ended, limit_s: float) -> str:
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    if lines and lines[-1].startswith("ended after"):
        return f"gave no answer within {limit_s:.0f} s"
    if ended.code < 0:
        return f"ended by signal {-ended.code}{last}"
    return f"exit code {ended.code}{last}" if ended.code else f"said nothing that can be read{last}"


def _line(check: Check, **figures: Any) -> dict[str, Any]:
    return {"check": check.name, **figures}


def _summary(found: Sequence[Mapping[str, Any]], took_s: float) -> dict[str, Any]:
    by = {ok: [line["check"] for line in found if line["ok"] is ok] for ok in (True, False, None)}
    ok = not by[False] and (not by[None] or None)
    return {
        "check": "all",
        "ok": ok,
        "passed": by[True],
        "failed": by[False],
        "not_decided": by[None],
        "seconds": round(took_s, 1),
    }


def _tell(line: Mapping[str, Any], file: TextIO | None) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if file is not None:
        print(text, file=file, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
