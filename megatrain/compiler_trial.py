"""A trial of what `torch.compile` needs: a compiler, headers, a folder that it may write and run code from.

Scope: `refuse_uncompilable`, before anything is loaded: it compiles one small function and runs it.
Not here: compiling layers (`compiled.py`).

Inductor writes C++ for a CPU and Triton's Python for a GPU, and keeps what it made in a folder:
`TORCHINDUCTOR_CACHE_DIR`, by default `torchinductor_USER` below the system's folder for temporary files. A run that
finds its graphs there starts in seconds.
"""

import tempfile

import torch
import torch._dynamo
from torch._inductor import cpp_builder, exc
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._triton import has_triton

from megatrain.compiled import settings
from megatrain.errors import UserError

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OFF = "or train.compile: false"
_NOT_RUN = ("failed to map segment", "Operation not permitted")
"""What the loader says of a library in a file system that is mounted `noexec`."""


def refuse_uncompilable(device: torch.device) -> None:
    """Raises UserError if nothing can be compiled for `device` here."""
    folder = _cache()
    if device.type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            raise UserError(
                "train.compile: torch.compile needs a C++ compiler on a CPU, and there is none (CXX, g++). "
                f"Fix: install g++, or CXX=/path/to/a/compiler, {_OFF}"
            ) from error
    elif not has_triton():
        raise UserError(
            f"train.compile: torch.compile needs Triton on {device.type}, and none works with this device. "
            f"Fix: a build of torch that comes with it, {_OFF}"
        )
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        torch.compile(_trial, **settings(1))(torch.zeros(64, device=device))
    except Exception as error:  # many classes: of the compiler, the loader, the file system
        raise UserError(f"train.compile: {_why(error, folder)}") from error
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] == made:
        raise UserError(
            "train.compile: torch.compile made no graph of a trial function: it is switched off (TORCHDYNAMO_DISABLE, "
            f"TORCH_COMPILE_DISABLE). Fix: unset these, {_OFF}"
        )


def _trial(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + 1


def _cache() -> str:
    """Inductor's folder. Raises UserError if nothing can be written there."""
    try:
        folder = cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            f"train.compile: torch.compile cannot write to its folder, {error.filename or CACHE}: {error.strerror}. "
            f"Fix: {CACHE}=/a/folder/that/is/yours, {_OFF}"
        ) from error


def _why(error: BaseException, folder: str) -> str:
    """What went wrong in the trial, and what to do."""
    inner: BaseException = getattr(error, "inner_exception", error)
    if isinstance(inner, exc.CppCompileError):
        said = [line.strip() for line in inner.output.splitlines() if "error:" in line or "fatal" in line]
        return (
            f"the C++ compiler failed at a trial: {(said or [inner.output.strip()[-200:]])[0]}. "
            f"Fix: a compiler with its headers and those of this Python, {_OFF}"
        )
    text = " ".join(str(inner).split())
    if any(words in text for words in _NOT_RUN):
        return (
            f"what torch.compile made cannot be run from its folder, {folder}: is it mounted noexec? "
            f"Fix: {CACHE}=/a/folder/elsewhere, {_OFF}"
        )
    return f"a trial of torch.compile failed: {type(inner).__name__}: {text[:300]}. Fix: {_OFF.removeprefix('or ')}"
