"""The documents say what is so: their sums come out, and what they name exists.

Scope: README.md, docs/*.md, tiering/README.md against the code, the run file's keys and the command line.
Not here: doctests of the modules (`test_layers.py`), what the commands do (`test_cli.py`).
"""

import contextlib
import doctest
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatrain.cli import app
from megatrain.config import RunConfig, load_run
from megatrain.faults import known_keys
from megatrain.preflight import check_files
from tiering.store import BlockStore, StoredBlock, TensorSpec
from tiering.workload import PAGE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXECUTED = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "tiering" / "README.md"]
DOCUMENTS = [ROOT / "README.md", *EXECUTED]
LISTED = ("megatrain", "tiering", "tools", "tests", "benchmarks")
"""Folders whose every file has a line in the README."""

PATH = re.compile(r"`((?:megatrain|tiering|tools|tests|docs|benchmarks)/[\w./-]+\.\w+)(?:::(\w+))?`")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def section(title: str) -> str:
    """The text of a README section, without its heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section `{title}`"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, heading left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fenced(text: str, language: str) -> str:
    """The content of the one block of that language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"{len(blocks)} blocks of {language}"
    return str(blocks[0])


@pytest.mark.parametrize("path", EXECUTED, ids=name)
def test_every_sum_in_a_document_comes_out_as_written(path: Path) -> None:
    """Rule 10, in a fresh process and as the document says: `python -m doctest FILE` from the project's folder."""
    assert doctest.DocTestParser().get_examples(path.read_text()), f"{path} shows nothing that runs"
    done = subprocess.run(
        [sys.executable, "-m", "doctest", name(path)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_and_tests_that_a_document_names_exist(path: Path) -> None:
    """A test that was renamed, or a file that moved, is missed where a promise rests on it."""
    named = set(PATH.findall(path.read_text()))
    gone = {file for file, _ in named if not (ROOT / file).is_file()}
    assert not gone, f"{name(path)} names files that do not exist: {sorted(gone)}"
    tests = {(file, test) for file, test in named if test}
    lost = {
        test for file, test in tests if not re.search(rf"^\s*def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
    }
    assert not lost, f"{name(path)} names tests that do not exist: {sorted(lost)}"


def test_every_file_has_one_line_in_the_readme() -> None:
    """README, "Files": the table and the folders agree in both directions."""
    listed = [cells[0].strip("`") for cells in rows(section("Files"))]
    present = {
        name(path)
        for folder in LISTED
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and not any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    assert len(listed) == len(set(listed)), "a file is listed twice"
    assert set(listed) == present, (
        f"not in the table: {sorted(present - set(listed))}; not there: {sorted(set(listed) - present)}"
    )


def test_the_library_lists_its_modules() -> None:
    """tiering/README.md: the file table and the folder agree."""
    listed = {cells[0].strip("`") for cells in rows((ROOT / "tiering/README.md").read_text())}
    present = {path.name for path in (ROOT / "tiering").glob("*.py")} - {"__init__.py"}
    assert listed == present, f"not in the table: {present - listed}; not there: {listed - present}"


def leaves() -> dict[str, FieldInfo]:
    """The keys of the run file that hold a value, with their fields."""
    keys = known_keys(RunConfig)
    found: dict[str, FieldInfo] = {}
    for key in keys:
        if any(other.startswith(f"{key}.") for other in keys):
            continue
        model: type[BaseModel] = RunConfig
        *sections, leaf = key.split(".")
        for part in sections:
            annotation = model.model_fields[part].annotation
            assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
            model = annotation
        found[key] = model.model_fields[leaf]
    return found


def documented_default(field: FieldInfo) -> set[str]:
    """What may stand in the column `default`."""
    if field.is_required():
        return {"required"}
    if field.default_factory is not None:
        return {"`train.batch`"}
    return {"none", "`auto`"} if field.default is None else {"a value"}


def test_the_configuration_table_names_every_key_with_its_default() -> None:
    """CF-04: no key without a line, no line without a key, no default but the true one."""
    table = {cells[0].strip("`"): cells[1] for cells in rows(section("Configuration"))}
    fields = leaves()
    assert table.keys() == fields.keys(), (
        f"not in the table: {fields.keys() - table.keys()}; no such key: {table.keys() - fields.keys()}"
    )
    for key, field in fields.items():
        allowed = documented_default(field)
        if allowed != {"a value"}:
            assert table[key] in allowed, f"{key}: the table says {table[key]}, the code {allowed}"
            continue
        written, default = table[key].strip("`"), field.default
        value = written if isinstance(default, str) else json.loads(written)
        wanted = list(default) if isinstance(default, tuple) else default
        assert value == wanted, f"{key}: the table says {written}, the code {default!r}"


def test_the_run_file_of_the_readme_is_accepted(tmp_path: Path) -> None:
    """What a newcomer copies loads, with nothing but the paths replaced, and its files are found."""
    path = tmp_path / "run.yaml"
    path.write_text(fenced(section("Your own run"), "yaml"))
    (tmp_path / "text.txt").write_text("the quick brown fox\n")
    where = {"data.paths": tmp_path / "text.txt", "tiers.nvme": tmp_path / "nvme", "output.dir": tmp_path / "out"}
    run = load_run(path, [f"{key}={value}" for key, value in where.items()])
    check_files(run)
    assert run.train.steps == 200
    assert load_run(path).tiers.host_memory == 32 << 20, "the paths as written are paths too"


def test_the_commands_of_the_readme_exist() -> None:
    """Every `megatrain COMMAND --option` and every `make TARGET` in the README."""
    commands: Any = typer.main.get_command(app)
    shown = [line.split(" #")[0].split() for line in README.splitlines() if line.startswith("megatrain ")]
    assert {words[1] for words in shown} == set(commands.commands), "the README shows every command, and no other"
    for words in shown:
        options = {option for parameter in commands.commands[words[1]].params for option in parameter.opts}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{' '.join(words)}: no such option: {unknown}"
    inline = set(re.findall(r"`megatrain (\w+)", README))
    assert inline <= set(commands.commands), inline - set(commands.commands)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE))
    assert asked and asked <= targets, f"no such target: {asked - targets}"


def test_the_snippet_that_reads_the_state_reads_a_store(tmp_path: Path) -> None:
    """README, "Reading the state": run as it stands, on a store of the real layout."""
    specs = (TensorSpec(name="model.embed_tokens.weight", shape=(256, 4), offset=0),)
    nbytes = math.prod(specs[0].shape) * 4
    assert nbytes % PAGE == 0
    block = StoredBlock(
        name="model.embed_tokens/weight", unit="model.embed_tokens", kind="weight", nbytes=nbytes, tensors=specs
    )
    BlockStore.create(tmp_path / "nvme", [block], identity={}).close()
    snippet = fenced(section("Reading the state"), "python")
    written = "/mnt/nvme/first"
    assert written in snippet and written in fenced(section("Your own run"), "yaml"), "the folder of the run file"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet.replace(written, str(tmp_path / "nvme")), "README.md", "exec"), {})  # noqa: S102
    assert printed.getvalue() == "model.embed_tokens.weight (256, 4) float32\n"


def test_a_promise_names_the_tests_that_show_it() -> None:
    """README: P1 to P6, each with at least one test file."""
    promises = re.split(r"^\*\*(?=P\d )", section("What it promises today"), flags=re.MULTILINE)[1:]
    assert [text[:2] for text in promises] == ["P1", "P2", "P3", "P4", "P5", "P6"]
    without = [text[:2] for text in promises if not re.search(r"^Tests: `tests/", text, re.MULTILINE)]
    assert not without, f"no test is named for {without}"
