"""Who may import whom: the library knows no model, and its pure half knows no tensors and no files.

Scope: imports of `tiering`, seen in the sources and in a fresh process; the doctests of its modules.
Not here: what the modules do.
"""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tiering

ROOT = Path(tiering.__file__).parent
PURE = (
    "workload",
    "hardware",
    "costs",
    "plan",
    "homes",
    "filling",
    "device",
    "lower",
    "turns",
    "pack",
    "schedule",
    "spread",
    "check",
    "simulate",
    "urgency",
    "errors",
    "gds_settings",
)
MODULES = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "__init__")
FOREIGN = {"megatrain", "transformers", "typer", "rich", "yaml"}
HEAVY = {"torch", "numpy", "zarr", "tensorstore", "kvikio", "psutil", "pydantic"}


def imported(module: str) -> set[str]:
    """Every module that a source file names in an import, wherever in the file it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_the_library_imports_no_model_and_no_command_line(module: str) -> None:
    """`tiering` is a library of its own: bytes, tiers and time."""
    assert not tops(imported(module)) & FOREIGN, f"tiering/{module}.py imports {tops(imported(module)) & FOREIGN}"


@pytest.mark.parametrize("module", PURE)
def test_the_pure_half_imports_neither_tensors_nor_the_live_half(module: str) -> None:
    """A plan can be made where no torch is installed; what it imports is the standard library and the pure half."""
    names = imported(module)
    ours = {name.split(".")[1] for name in names if name.startswith("tiering.")}
    assert ours <= set(PURE), f"tiering/{module}.py imports the live half: {ours - set(PURE)}"
    others = tops(names) - {"tiering"}
    assert others <= set(sys.stdlib_module_names), (
        f"tiering/{module}.py imports {others - set(sys.stdlib_module_names)}"
    )
    files = {"os", "pathlib", "io", "shutil", "tempfile", "mmap"} & others
    assert not files, f"tiering/{module}.py is pure but imports {files}"


@pytest.mark.parametrize("module", PURE)
def test_the_pure_half_opens_no_file(module: str) -> None:
    """The pure half works on values: no call of `open`, no reading or writing."""
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "exec", "eval"}, f"tiering/{module}.py calls {called}"


def test_a_fresh_process_plans_without_heavy_libraries() -> None:
    """Import all of the pure half and look what came with it."""
    code = "import sys; import " + ", ".join(f"tiering.{module}" for module in PURE) + "; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = tops(set(done.stdout.split()))
    assert "tiering" in loaded
    assert not loaded & (HEAVY | FOREIGN), f"the pure half brings {loaded & (HEAVY | FOREIGN)} with it"


def test_programs_of_a_training_step_need_no_heavy_libraries_either() -> None:
    """`tools/tierplan` needs the pure half and the ops of a step; `megatrain.programs` must not cost it torch."""
    code = "import sys; import megatrain.programs; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = tops(set(done.stdout.split()))
    assert not loaded & HEAVY, f"megatrain.programs brings {loaded & HEAVY} with it"


@pytest.mark.parametrize("module", MODULES)
def test_sums_in_the_documentation_come_out_as_written(module: str) -> None:
    """Rule 10: the sum in a docstring is a doctest."""
    loaded = importlib.import_module(f"tiering.{module}")
    result = doctest.testmod(loaded)
    assert result.failed == 0, result
    assert module != "costs" or result.attempted >= 5, "the formulas of costs.py must show their sums"
