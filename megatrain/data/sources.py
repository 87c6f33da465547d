"""The files that the entries of `data.paths` stand for, in one fixed order.

Scope: files, folders and glob patterns; what is left out of a folder, counted by reason.
Not here: expanding `~` and variables (`megatrain/config.py`), reading the files (`text.py`).
"""

import glob
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.errors import UserError

TEXT_SUFFIXES = frozenset(".txt .md .py .rst .json .jsonl .html .tex .c .h .rs .go .java .js .ts".split())

ARRAY_SUFFIXES = frozenset((".npy", ".bin"))
CHAT_SUFFIXES = frozenset((".json", ".jsonl", ".parquet"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file; `named` says that the run file names it itself, so that it may not be left out."""

    path: str
    nbytes: int
    mtime_ns: int
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Files sorted by path, and how many were left out for which reason."""

    files: tuple[Source, ...]
    left_out: Counter[str] = field(default_factory=Counter)


def list_sources(paths: Sequence[str], suffixes: frozenset[str] = TEXT_SUFFIXES) -> Sources:
    """The files of `paths`. A folder gives its files with one of `suffixes`, a pattern what it matches, symbolic links
    followed only where they are named. Raises UserError for an entry that stands for no file.
    """
    found: dict[str, Source] = {}
    left_out: Counter[str] = Counter()
    for entry in paths:
        if os.path.lexists(entry) and not os.path.isdir(entry):
            candidates = {entry: _named(entry)}
        elif os.path.isdir(entry):
            candidates = _in_folder(entry, suffixes, left_out)
        elif glob.has_magic(entry):
            candidates = _matching(entry, left_out)
        else:
            raise UserError(
                f"data.paths: {entry} does not exist. Fix: give a file, a folder or a pattern such as ~/corpus/*.txt"
            )
        if not candidates:
            reasons = f" ({describe_left_out(left_out)})" if left_out else ""
            raise UserError(
                f"data.paths: {entry} holds no {'text' if suffixes is TEXT_SUFFIXES else 'data'} file{reasons}. "
                f"Fix: folders give files that end in {' '.join(sorted(suffixes))}; name others, "
                f"or give a pattern such as {entry}/*"
            )
        for path, source in candidates.items():
            if path not in found or source.named:
                found[path] = source
    return Sources(files=tuple(found[path] for path in sorted(found)), left_out=left_out)


def describe_left_out(left_out: Counter[str]) -> str:
    """`3 of another suffix, 1 not readable left out`; empty when nothing was."""
    if not left_out:
        return ""
    return f"{', '.join(f'{count} {reason}' for reason, count in sorted(left_out.items()))} left out"


def _named(path: str) -> Source:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"data.paths: {path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"data.paths: {path} is not a regular file. Fix: give a file or a folder")
    if not os.access(path, os.R_OK):
        raise UserError(f"data.paths: {path} cannot be read: no permission")
    return Source(path=path, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, named=True)


def _in_folder(folder: str, suffixes: frozenset[str], left_out: Counter[str]) -> dict[str, Source]:
    candidates: dict[str, Source] = {}

    def unreadable(_: OSError) -> None:
        left_out["unreadable folder"] += 1

    for parent, folders, files in os.walk(folder, onerror=unreadable):
        left_out["symbolic link"] += sum(os.path.islink(os.path.join(parent, name)) for name in folders)
        for name in files:
            path = os.path.join(parent, name)
            if Path(name).suffix.lower() not in suffixes:
                left_out["of another suffix"] += 1
            elif os.path.islink(path):
                left_out["symbolic link"] += 1
            else:
                _keep(path, candidates, left_out)
    _drop_zeros(left_out)
    return candidates


def _matching(pattern: str, left_out: Counter[str]) -> dict[str, Source]:
    candidates: dict[str, Source] = {}
    for path in glob.iglob(pattern, recursive=True):
        if not os.path.isdir(path):
            _keep(path, candidates, left_out)
    return candidates


def _keep(path: str, candidates: dict[str, Source], left_out: Counter[str]) -> None:
    try:
        status = os.stat(path)
    except OSError:
        left_out["unreadable"] += 1
        return
    if not stat.S_ISREG(status.st_mode):
        left_out["not a regular file"] += 1
    elif not os.access(path, os.R_OK):
        left_out["unreadable"] += 1
    else:
        candidates[path] = Source(path=path, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, named=False)


def _drop_zeros(left_out: Counter[str]) -> None:
    for reason in [reason for reason, count in left_out.items() if count == 0]:
        del left_out[reason]
