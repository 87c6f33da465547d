"""Which I/O engine is used, and why.

Scope: `choose_engine`, by a real transfer; the early refusal of one that cannot work.
Not here: the engines (`posix.py`, `gds.py`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tiering import gds
from tiering.engine import IOEngine
from tiering.errors import EngineError
from tiering.gds_settings import ASSUMED, GdsSettings
from tiering.posix import PosixEngine

if TYPE_CHECKING:
    import torch

EngineName = Literal["auto", "posix", "kvikio"]


def refuse_engine(name: EngineName, path: Path) -> None:
    """Raises `EngineError` if the engine asked for by name cannot work on the drive of `path`."""
    if name == "kvikio":
        choose_engine(name, path)[0].close()


def choose_engine(
    name: EngineName,
    path: Path,
    *,
    device: "torch.device | None" = None,
    settings: GdsSettings | None = None,
    trial_bytes: int = 0,
) -> tuple[IOEngine, str]:
    """The engine for the store at `path`, and one line that says which and why.

    device: whose memory is wanted to and from files too; None: RAM alone. settings: of kvikio, as measured before;
    None: a trial with buffers of `trial_bytes` in all finds them (0: none is made). Raises `EngineError` if kvikio is
    asked for by name and a real transfer with it fails.
    """
    if name == "posix":
        return PosixEngine(), "I/O engine: posix direct I/O (asked for)"
    reason = gds.probe(path)
    if reason is None:
        why = "asked for, a probe transfer worked" if name == "kvikio" else "a probe transfer worked"
        return _kvikio(path, why, device, settings, trial_bytes)
    if name == "kvikio":
        raise EngineError(
            f"the kvikio I/O engine cannot work here: {reason}. "
            f"Fix: engine auto or posix (direct I/O, no GPU driver needed)."
        )
    return PosixEngine(), f"I/O engine: posix direct I/O (kvikio cannot work here: {reason})"


def _kvikio(
    path: Path, why: str, device: "torch.device | None", settings: GdsSettings | None, trial_bytes: int
) -> tuple[IOEngine, str]:
    found = gds.DeviceProbe(refusal="nobody computes there") if device is None else gds.probe_device(path, device)
    if settings is None and trial_bytes:
        from tiering.gds_trial import best_settings  # imports torch, which the command line does without

        settings = best_settings(path, memory=trial_bytes)
    settings = ASSUMED if settings is None else settings
    line = f"I/O engine: kvikio ({why}); {settings.line()}" + ("" if device is None else f"; {found.line()}")
    return gds.KvikioEngine(settings=settings, device_refusal=found.refusal), line
