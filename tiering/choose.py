"""Which I/O engine is used, and why.

Scope: `choose_engine`, by a real transfer; the early refusal of one that cannot work.
Not here: the engines (`posix.py`, `gds.py`).
"""

from pathlib import Path
from typing import Literal

from tiering import gds
from tiering.engine import IOEngine
from tiering.errors import EngineError
from tiering.posix import PosixEngine

EngineName = Literal["auto", "posix", "kvikio"]


def refuse_engine(name: EngineName, path: Path) -> None:
    """Raises `EngineError` if the engine asked for by name cannot work on the drive of `path`."""
    if name == "kvikio":
        choose_engine(name, path)[0].close()


def choose_engine(name: EngineName, path: Path) -> tuple[IOEngine, str]:
    """The engine for the store at `path`, and one line that says which and why.

    Raises `EngineError` if kvikio is asked for by name and a real transfer with it fails.
    """
    if name == "posix":
        return PosixEngine(), "I/O engine: posix direct I/O (asked for)"
    reason = gds.probe(path)
    if reason is None:
        why = "asked for, a probe transfer worked" if name == "kvikio" else "a probe transfer worked"
        return gds.KvikioEngine(), f"I/O engine: kvikio ({why})"
    if name == "kvikio":
        raise EngineError(
            f"the kvikio I/O engine cannot work here: {reason}. "
            f"Fix: engine auto or posix (direct I/O, no GPU driver needed)."
        )
    return PosixEngine(), f"I/O engine: posix direct I/O (kvikio cannot work here: {reason})"
