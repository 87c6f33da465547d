"""The checks by value: name, what it needs, how long it may take, where it is.

Scope: the table, and nothing that has to be imported for it.
Not here: running them (`__main__.py`, `child.py`), what each does (its module).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check, in a process of its own. needs: modules that it imports besides the standard library. limit_s: seconds
    after which it is ended; least_s: with fewer left it is not begun. place: module and function; it is given a `Rig`.
    """

    name: str
    what: str
    needs: tuple[str, ...]
    limit_s: float
    least_s: float
    place: str


_TORCH = ("torch", "numpy")
_LANES = (*_TORCH, "psutil")
_DISK = (*_LANES, "pydantic", "xxhash")
_RUN = (*_DISK, "zarr", "transformers", "safetensors", "tokenizers", "yaml", "rich")
_COMPILED = (*_RUN, "triton")
_TESTS = (*_RUN, "typer", "pytest", "pytest_timeout", "hypothesis")
DEVICE = "device"


def _check(name: str, what: str, needs: tuple[str, ...], limit_s: float, place: str) -> Check:
    return Check(
        name=name, what=what, needs=needs, limit_s=limit_s, least_s=limit_s / 4, place=f"{__package__}.{place}"
    )


CHECKS = (
    _check(
        DEVICE, "the GPU, its driver and its link, torch, packages, GPUDirect Storage", ("torch",), 60, "facts:facts"
    ),
    _check("lanes", "schedules on four streams come to the bytes of the plain program", _LANES, 60, "order:order"),
    _check("copies", "rates to the GPU, from it and both at once, as a run copies", _LANES, 40, "rates:copies"),
    _check("overlap", "copies both ways and computing hide one another", _LANES, 40, "overlap:overlap"),
    _check("bitwise", "models of every kind equal the plain loop bit for bit", _RUN, 120, "runs:bitwise"),
    _check("memory", "the peak of the GPU's memory is within the plan", _RUN, 60, "runs:memory"),
    _check("larger", "models larger than the GPU, and than GPU and RAM, give the same bits", _RUN, 90, "runs:larger"),
    _check("disk", "rates of the drive", _DISK, 40, "rates:disk"),
    _check("compute", "FP32 is exact; rates of matrix products and of AdamW", _LANES, 40, "rates:compute"),
    _check("io-bound", "fraction of the limit where the drive is the limit", _RUN, 80, "fraction:io_bound"),
    _check("pcie-bound", "fraction of the limit where the link is", _RUN, 80, "fraction:pcie_bound"),
    _check("compute-bound", "fraction of the limit where computing is", _RUN, 80, "fraction:compute_bound"),
    _check("gds", "kvikio: host and GPU memory, and the path that the bytes took", _DISK, 40, "storage:storage"),
    _check("compiled", "compiled layers equal the compiled plain loop bit for bit", _COMPILED, 90, "runs:compiled"),
    _check("tests", "the tests marked gpu", _TESTS, 180, "marked:marked"),
)
BY_NAME = {check.name: check for check in CHECKS}
