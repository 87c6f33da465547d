"""Trials that may crash, each in a process of its own: locking memory, a transfer with kvikio.

Scope: `run_probe`, and what the child does (`python -m megatrain.probes`): it prints one JSON object.
Not here: what follows from a trial (`doctor.py`), the transfer itself (`tiering/gds.py`), locking by the CUDA driver
(`tiering/pin_probe.py`).
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiering.pin_probe import attempt

PROBE_S = 60.0
"""Seconds after which a trial counts as failed."""
FIRST_TO_DIE = 1000
"""The highest `oom_score_adj`: where memory runs out, the kernel ends the trial and not who asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Did the trial work, and what did it see; one line. path: how memory of a device was moved, where that was tried
    (of the names of `Traffic.by_path`).
    """

    ok: bool
    why: str
    path: str = ""


def run_probe(arguments: Sequence[str], *, program: Sequence[str] = (), timeout_s: float = PROBE_S) -> Outcome:
    """Run one trial in a child process; whatever happens to it becomes an `Outcome`. program: in place of this module's
    own."""
    command = [*(program or (sys.executable, "-m", "megatrain.probes")), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return Outcome(ok=False, why=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Outcome(ok=False, why=f"cannot be started: {error.strerror}")
    if done.returncode < 0:
        return Outcome(ok=False, why=f"ended by {_signal_name(-done.returncode)}")
    lines = done.stdout.splitlines()
    with suppress(ValueError, KeyError, TypeError, IndexError):
        answer = json.loads(lines[-1])
        return Outcome(ok=bool(answer["ok"]), why=str(answer["why"]), path=str(answer.get("path", "")))
    said = done.stderr.strip().splitlines()
    return Outcome(ok=False, why=said[-1] if said else f"exit code {done.returncode} and no word")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def lock_with_mlock(nbytes: int) -> Outcome:
    """Lock a fresh mapping with `mlock`; it goes with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if libc.mlock(address, ctypes.c_size_t(nbytes)):
        return Outcome(ok=False, why=f"mlock of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return Outcome(ok=True, why=f"mlock of {nbytes} bytes")


def register_with_cuda(nbytes: int) -> Outcome:
    """Lock a fresh mapping as a run does, by the CUDA driver."""
    what, why = f"cudaHostRegister of {nbytes} bytes", attempt(nbytes)
    return Outcome(ok=why is None, why=what if why is None else f"{what}: {why}")


def transfer_with_kvikio(path: Path) -> Outcome:
    """Bytes of RAM to a file below `path` and back, then bytes of the device, if there is one."""
    from tiering import gds

    reason = gds.probe(path)
    if reason is not None:
        return Outcome(ok=False, why=reason)
    import torch

    if not torch.cuda.is_available():
        return Outcome(ok=True, why="RAM: a probe transfer worked; device memory: not tried, torch sees no device")
    found = gds.probe_device(path, torch.device("cuda", 0))
    return Outcome(ok=True, why=f"RAM: a probe transfer worked; {found.line()}", path=found.path)


def main(arguments: Sequence[str]) -> None:
    """`mlock NBYTES`, `cuda NBYTES` or `kvikio DIR`."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_DIE))
    what, value = arguments
    if what == "mlock":
        found = lock_with_mlock(int(value))
    elif what == "cuda":
        found = register_with_cuda(int(value))
    else:
        assert what == "kvikio", f"no such trial: {what}"
        found = transfer_with_kvikio(Path(value))
    print(json.dumps({"ok": found.ok, "why": found.why, "path": found.path}))


if __name__ == "__main__":
    main(sys.argv[1:])
