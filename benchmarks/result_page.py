"""A result as a Markdown page: what was asked, what it was seen on, tables.

Scope: the page, its head, `markdown_table`, the option that names its file.
Not here: the facts of the machine (`machine.py`), what the tables hold (each benchmark).
"""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import Rates, machine_lines
from megatrain.errors import UserError

Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write a page of it there, with what it was seen on.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPage:
    """module: of the benchmark that was called. path: the folder that it wrote to. before, after: rates of its drive,
    measured just before and just after it.
    """

    title: str
    module: str
    path: Path
    before: Rates
    after: Rates

    def text(self, *parts: str) -> str:
        """The head, then `parts`."""
        facts = [*machine_lines(self.path), f"drive before: {self.before}", f"drive after: {self.after}"]
        head = [f"# {self.title}", f"`{command(self.module, sys.argv[1:])}`", "\n".join(f"- {fact}" for fact in facts)]
        return "\n\n".join([*head, *parts]) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """
    >>> print(markdown_table(["case", "step"], [["io", "2.61 s"]]))
    | case | step |
    |---|---|
    | io | 2.61 s |
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines)


def command(module: str, arguments: Sequence[str]) -> str:
    """What a reader types, with folders and files of their own.

    >>> command("benchmarks.step", ["--case", "io", "--path", "/mnt/a b", "--markdown", "x.md"])
    'python -m benchmarks.step --case io --path DIR --markdown FILE'
    """
    stands_for: Mapping[str, str] = {
        "--path": "DIR",
        "--markdown": "FILE",
        "--plot": "PLOT",
        "--deepspeed-python": "ds/bin/python",
    }
    words = ["python", "-m", module]
    for before, word in zip(["", *arguments], arguments, strict=False):
        words.append(stands_for.get(before, word))
    return shlex.join(words)


def check_page(file: Path | None) -> None:
    """Before anything is measured. Raises UserError where the page cannot be written."""
    if file is not None and not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise UserError(f"--markdown {file}: {file.parent} is no folder that can be written. Fix: one that is")
