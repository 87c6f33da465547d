"""A run file's YAML text as plain dicts, and back.

Scope: reading with line and column in every error, duplicate keys refused, numbers such as `1e-3` read as numbers,
`--set a.b=value` laid over the file.
Not here: which keys exist and what they may hold (`megatrain/config.py`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatrain.errors import UserError

# YAML 1.1, which PyYAML reads, takes a float only with a dot and a signed exponent, so that 1e-3 would be text.
_EXPONENT_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key_node.value!r} is written twice, first in line {seen[key].line + 1}",
                    key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes the text which `_Loader` would take for a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+0123456789"))


def read_mapping(path: Path) -> dict[str, Any]:
    """The top level of the run file at `path`. Raises UserError for a missing file and for anything but YAML keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such run file. Fix: give the path of a YAML file, see tools/demo.yaml") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    tree = _parse(text, str(path))
    if tree is None:
        raise UserError(f"{path}: the run file is empty. Fix: start from tools/demo.yaml")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a run file is a mapping of sections (`model:`, `data:`, ...), not {_kind(tree)}")
    return tree


def overlay(tree: dict[str, Any], overrides: Sequence[str]) -> frozenset[str]:
    """Lays `a.b=value` items over `tree` in place and returns the dotted keys that were set."""
    dotted_keys = set()
    for item in overrides:
        dotted, equals, text = item.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {item}: not of the form a.b=value. Fix: for example --set train.steps=10")
        node = tree
        for depth, part in enumerate(parts[:-1], start=1):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise UserError(f"--set {item}: `{'.'.join(parts[:depth])}` is {_kind(node)} here and has no keys")
        node[parts[-1]] = _parse(text, f"--set {item}")
        dotted_keys.add(".".join(parts))
    return frozenset(dotted_keys)


def write_mapping(tree: dict[str, Any]) -> str:
    """YAML text that `read_mapping` turns into an equal dict."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True))


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = " (indent with spaces, not tabs)" if "'\\t'" in str(error.problem) else ""
        raise UserError(f"{source}{where}: not valid YAML: {error.problem or error.context}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2025-99-99
        raise UserError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{source}: not a run file: nested too deeply") from None


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else f"the value {value!r}"
