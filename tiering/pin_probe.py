"""A trial in a process of its own: does the CUDA driver lock so many bytes?

Scope: `refusal`, and what the child does (`python -m tiering.pin_probe NBYTES`): it prints one line. `attempt` is for
children alone.
Not here: when a trial is needed (`pinning.py`), locking for good (`arena.py`).

A child, because a driver that is asked for too much may take the process, or the whole machine, down with it.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PROBE_S = 60.0
"""Seconds after which a trial counts as refused."""
LOCKED = "locked"
_FIRST_TO_DIE = "1000"
"""The highest `oom_score_adj`: where memory runs out, the kernel ends the trial and not who asked for it."""


def refusal(nbytes: int, *, program: Sequence[str] = (), timeout_s: float = PROBE_S) -> str | None:
    """None if a child could lock `nbytes`; else why not. program: in place of this module's own child."""
    command = [*(program or (sys.executable, "-m", "tiering.pin_probe")), str(nbytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return f"a trial with {nbytes} bytes gave no answer within {timeout_s:g} s"
    except OSError as error:
        return f"a trial with {nbytes} bytes cannot be started: {error.strerror}"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    said = lines[-1] if lines else "no word"
    if done.returncode == 0 and said == LOCKED:
        return None
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"failed: {said}"
    return f"a trial with {nbytes} bytes {how}"


def attempt(nbytes: int) -> str | None:
    """Lock a fresh mapping, in this process, and let it go; returns what the driver said if it refuses."""
    from tiering.arena import Arena  # imports torch: only a child needs it

    with Arena(nbytes) as arena:
        return arena.pin()


def main(nbytes: int) -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    print(attempt(nbytes) or LOCKED)


if __name__ == "__main__":
    main(int(sys.argv[1]))
