"""The sources of chat data that the entries of `data.paths` stand for, in one fixed order.

Scope: files, folders of files, data sets that the `datasets` library saved, `datasets:NAME`, and the entries of a
`dataset_info.json` as LLaMA-Factory writes them.
Not here: reading rows (`rows.py`), finding plain files (`sources.py`).
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.data.conversation import AUTO, OPENAI, RowFormat
from megatrain.data.sources import CHAT_SUFFIXES, list_sources
from megatrain.errors import UserError

INFO_NAME = "dataset_info.json"
HUB_PREFIX = "datasets:"
_SAVED = ("state.json", "dataset_dict.json")
_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools")
_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
_UNSUPPORTED = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """One file, saved data set or name. path: where it is, or its name."""

    path: str
    place: Literal["file", "saved", "hub"] = "file"
    nbytes: int = 0
    mtime_ns: int = 0
    fmt: RowFormat = AUTO
    split: str = "train"
    subset: str | None = None
    most_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSources:
    """Sources in order, and how many files were left out for which reason."""

    found: tuple[ChatSource, ...]
    left_out: Counter[str] = field(default_factory=Counter)


def list_chat_sources(paths: Sequence[str], names: Sequence[str] = (), split: str = "train") -> ChatSources:
    """The sources of `paths`; `names` chooses from a dataset_info.json. Raises UserError for what stands for none."""
    found: dict[tuple[str, str, str | None], ChatSource] = {}
    left_out: Counter[str] = Counter()
    for entry in paths:
        if entry.startswith(HUB_PREFIX):
            sources = [ChatSource(path=entry.removeprefix(HUB_PREFIX), place="hub", split=split)]
        elif any((Path(entry) / name).is_file() for name in _SAVED):
            sources = [_saved(Path(entry), split)]
        elif (info := _info_file(entry)) is not None:
            sources = _from_info(info, names, split)
        else:
            listed = list_sources([entry], CHAT_SUFFIXES)
            left_out += listed.left_out
            sources = [ChatSource(path=s.path, nbytes=s.nbytes, mtime_ns=s.mtime_ns) for s in listed.files]
        for source in sources:
            found.setdefault((source.path, source.split, source.subset), source)
    return ChatSources(found=tuple(found[key] for key in sorted(found, key=str)), left_out=left_out)


def _info_file(entry: str) -> Path | None:
    path = Path(entry)
    info = path / INFO_NAME if path.is_dir() else path
    return info if info.name == INFO_NAME and info.is_file() else None


def _saved(folder: Path, split: str) -> ChatSource:
    files = [file.stat() for file in sorted(folder.rglob("*.arrow"))]
    nbytes, mtime_ns = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
    return ChatSource(path=str(folder), place="saved", nbytes=nbytes, mtime_ns=mtime_ns, split=split)


def _from_info(info: Path, names: Sequence[str], split: str) -> list[ChatSource]:
    try:
        entries = json.loads(info.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"data.paths: {info} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.paths: {info} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise UserError(f"data.paths: {info} is not an object with an object for each data set")
    known = ", ".join(entries) or "none"
    if not names and len(entries) != 1:
        raise UserError(
            f"data.datasets: {info} has {len(entries)} data sets. Fix: data.datasets: one or more of {known}"
        )
    missing = [name for name in names if name not in entries]
    if missing:
        raise UserError(f"data.datasets: {info} has no data set `{missing[0]}`. Fix: one or more of {known}")
    return [source for name in names or entries for source in _entry(info, name, entries[name], split)]


_NAMES = {dict: "object", str: "text", int: "number"}
_TYPES: dict[str, type] = {
    "columns": dict, "tags": dict, "split": str, "subset": str, "num_samples": int, "file_name": str, "hf_hub_url": str,
    "formatting": str,
}  # fmt: skip


def _entry(info: Path, name: str, entry: Mapping[str, Any], split: str) -> list[ChatSource]:
    for key, kind in _TYPES.items():
        if entry.get(key) is not None and (not isinstance(entry[key], kind) or isinstance(entry[key], bool)):
            raise UserError(f"data.datasets: `{key}` of `{name}` in {info} is {entry[key]!r}, no {_NAMES[kind]}")
    columns = entry.get("columns") or {}
    for key, value in [*columns.items(), *(entry.get("tags") or {}).items()]:
        if not isinstance(value, str):
            raise UserError(f"data.datasets: `{key}` of `{name}` in {info} is {value!r}, no text")
    unsupported = [key for key in _UNSUPPORTED if key in columns] + ["ranking"] * bool(entry.get("ranking"))
    if unsupported:
        raise UserError(
            f"data.datasets: `{name}` of {info} has `{unsupported[0]}`, and only text to learn answers from is "
            "supported. Fix: another data set"
        )
    common: dict[str, Any] = {
        "fmt": _format(info, name, entry, columns),
        "split": entry.get("split") or split,
        "subset": entry.get("subset"),
        "most_rows": entry.get("num_samples"),
    }
    if entry.get("file_name"):
        path = Path(os.path.abspath(info.parent / entry["file_name"]))
        if not path.is_relative_to(os.path.abspath(info.parent)):
            raise UserError(
                f"data.datasets: `{name}` of {info} names {entry['file_name']}, which is not below {info.parent}. "
                "Fix: name that file in data.paths"
            )
        listed = list_sources([str(path)], CHAT_SUFFIXES)
        return [ChatSource(path=s.path, nbytes=s.nbytes, mtime_ns=s.mtime_ns, **common) for s in listed.files]
    if entry.get("hf_hub_url"):
        return [ChatSource(path=entry["hf_hub_url"], place="hub", **common)]
    raise UserError(f"data.datasets: `{name}` of {info} has neither `file_name` nor `hf_hub_url`; nothing else is read")


def _format(info: Path, name: str, entry: Mapping[str, Any], columns: Mapping[str, str]) -> RowFormat:
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise UserError(
            f"data.datasets: `{name}` of {info} has the formatting {formatting!r}. Fix: alpaca, sharegpt or openai"
        )
    fmt = OPENAI if formatting == "openai" else RowFormat(formatting=formatting)
    tags = entry.get("tags") or {}
    names: dict[str, Any] = {key: columns[key] for key in _COLUMNS if key in columns}
    names |= {key: tags[key] for key in ("role_tag", "content_tag") if key in tags}
    roles = tuple((tags[tag], meaning) for tag, meaning in _TAGS.items() if tag in tags)
    return replace(fmt, roles=roles, **names)
