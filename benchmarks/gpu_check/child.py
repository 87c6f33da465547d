"""One check in this process: `python -m benchmarks.gpu_check.child NAME FOLDER SECONDS` prints one JSON line.

Scope: what is missing, by name; what a check returns or raises, as a line.
Not here: the time limit, and what becomes of a crash (`__main__.py`).

Whatever a library prints goes to stderr: the line is alone on stdout.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checks import BY_NAME, DEVICE, Check

OURS = ("benchmarks", "megatrain", "models", "tiering")
"""What is not there of these is a fault of ours."""
Figures = dict[str, Any]
"""What a check returns: `ok` (None: not decided, `skipped` says why) and its figures; `why` where it is False."""


def main(name: str, folder: Path, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    with _stdout_kept() as out:
        line = {"check": name} | checked(BY_NAME[name], folder, until_s)
        os.write(out, (json.dumps(line, default=str) + "\n").encode())


@contextmanager
def _stdout_kept() -> Iterator[int]:
    """A descriptor of stdout; what anything else writes there comes out on stderr, also from C."""
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        yield out
    finally:
        os.close(out)


def checked(check: Check, folder: Path, until_s: float) -> Figures:
    """What came of it. until_s: by `time.monotonic`, when it should end by itself."""
    lacking = missing(check.needs)
    if lacking:
        gpu = "no GPU: " if check.name == DEVICE else ""
        return {"ok": None, "skipped": f"{gpu}needs {', '.join(lacking)}"}
    try:
        module, _, function = check.place.partition(":")
        work: Callable[..., Figures] = getattr(importlib.import_module(module), function)
        if check.name == DEVICE:
            return work()
        from benchmarks.gpu_check.rig import cuda_rig  # imports torch

        folder.mkdir(parents=True, exist_ok=True)
        return work(cuda_rig(folder, until_s))
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] not in OURS:
            return {"ok": None, "skipped": f"needs {error.name}"}  # found out late
        return {"ok": False, "why": _told(error)}


def missing(needs: Sequence[str]) -> list[str]:
    """Those that cannot be imported, with the reason where it is not that they are not there."""
    lacking = []
    for name in needs:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            lacking.append(name if error.name == name else f"{name} (which needs {error.name})")
        except Exception as error:  # a native library that does not fit raises whatever it likes
            lacking.append(f"{name} ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
    return lacking


def _told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{where}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
