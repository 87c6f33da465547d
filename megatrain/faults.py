"""What is wrong with a run file, one line a fault, in words that name the key and the way out.

Scope: pydantic's error records turned into lines; the nearest known key for an unknown one.
Not here: the rules themselves (`megatrain/config.py`), YAML syntax (`megatrain/runfile.py`).
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

EXAMPLES = {
    "model": "model: {config: {model_type: llama, ...}} or model: {path: /models/llama}",
    "data.paths": "data: {paths: ~/corpus}",
    "data.seq_len": "data: {seq_len: 128}",
    "train.steps": "train: {steps: 100}",
    "train.batch": "train: {batch: 8}",
    "tiers.nvme": "tiers: {nvme: /mnt/nvme/run} (a folder on a drive; there is no default)",
    "output.dir": "output: {dir: ./runs/first}",
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
_LISTS = {"tuple_type": "must be a list", "too_short": "must not be empty", "too_long": "has too many items"}


def known_keys(root: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted key of the run file, sections included: `train`, `train.steps`, ..."""
    keys: list[str] = []
    for name, field in root.model_fields.items():
        keys.append(name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += [f"{name}.{key}" for key in known_keys(kind)]
    return tuple(keys)


def describe(error: ValidationError, root: type[BaseModel], source: str, overridden: Iterable[str] = ()) -> list[str]:
    """One line a fault, in the order of the run file; `overridden` are the dotted keys that came from `--set`."""
    known = known_keys(root)
    overridden = tuple(overridden)
    lines: dict[str, str] = {}
    misplaced = set()
    records = error.errors(include_url=False)
    for record in records:
        if record["type"] == "extra_forbidden":
            misplaced |= set(_nearest(_dotted(record["loc"]), known)[:1])
    for record in records:
        key = _dotted(record["loc"])
        # A key that was found in the wrong place is not also reported as missing from the right one.
        if record["type"] == "missing" and any(key == found or key.startswith(f"{found}.") for found in misplaced):
            continue
        if record["type"] == "default_factory_not_called":  # follows from another fault that is listed
            continue
        text = _line(record, key, known)
        from_option = any(key == o or key.startswith(f"{o}.") or o.startswith(f"{key}.") for o in overridden if key)
        lines.setdefault(key, f"{text} ({'--set' if from_option else source})")
    return list(lines.values())


def _line(record: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    kind, value, context = record["type"], record["input"], record.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, known)
    if kind == "missing":
        example = EXAMPLES.get(key)
        return f"{key}: is required" + (f". Fix: add {example}" if example else "")
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"{key}: {value!r} is not allowed: must be {sign} {context[name]}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        inside = [k.rpartition(".")[2] for k in known if k.startswith(f"{key}.")]
        return f"{key}: {_short(value)} is not allowed: it is a section with the keys {', '.join(inside)}"
    if kind in _LISTS:
        return f"{key}: {_short(value)} is not allowed: {_LISTS[kind]}"
    message = str(record["msg"]).replace("Input should be", "must be", 1)
    return f"{key}: {_short(value)} is not allowed: {message}"


def _unknown(key: str, known: tuple[str, ...]) -> str:
    near = _nearest(key, known)
    if near:
        meant = [f"top level `{k}`" if "." not in k else f"`{k}`" for k in near]
        return f"unknown key `{key}`: did you mean {' or '.join(meant)}?"
    section = key.rpartition(".")[0]
    if section and section not in known:
        section = section.partition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    return f"unknown key `{key}`: {f'`{section}`' if section else 'the top level'} knows {', '.join(siblings)}"


def _nearest(key: str, known: tuple[str, ...]) -> list[str]:
    """The keys that `key` may have meant: the same word elsewhere, else a near word beside it, else one anywhere."""
    section, _, leaf = key.rpartition(".")
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    if elsewhere:
        return elsewhere
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    beside = difflib.get_close_matches(leaf.lower(), siblings, n=1)
    if beside:
        return [siblings[beside[0]]]
    leaves = {k.rpartition(".")[2]: k for k in known}
    return [leaves[word] for word in difflib.get_close_matches(leaf.lower(), leaves, n=1, cutoff=0.75)]


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
