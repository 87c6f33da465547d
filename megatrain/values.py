"""How single values of a run file are read: paths, numbers, sizes, lists, and what `auto` or a path may stand for.

Scope: the types that the sections are made of; each turns what a person typed into one form, or says what is allowed.
Not here: the sections, their defaults and ranges (`megatrain/config.py`).
"""

import json
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, StrictFloat, StrictInt

from megatrain.data.chat_sources import HUB_PREFIX
from megatrain.sizes import parse_size

_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|(?P<name>\w+)|\{(?P<braced>\w+)\})")


def expand_path(text: object) -> str:
    """An absolute path (or pattern) from what was typed: `~`, `$NAME` and `${NAME}` expand, `$$` is a dollar sign.

    `$PYTHON_STDLIB` is the folder of Python's standard library unless the environment says otherwise.
    """
    if isinstance(text, Path):
        return str(text.absolute())
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is not allowed: must be a path")

    def value_of(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["name"] or match["braced"]
        value = os.environ.get(name, sysconfig.get_path("stdlib") if name == "PYTHON_STDLIB" else None)
        if value is None:
            raise ValueError(f"{text!r} is not allowed: the environment variable {name} is not set")
        return value

    try:
        home = str(Path(text.strip()).expanduser())
    except RuntimeError:
        raise ValueError(f"{text!r} is not allowed: that user has no home folder") from None
    return str(Path(_VARIABLE.sub(value_of, home)).absolute())


def _number(value: object) -> object:
    """Numbers as people type them: text that is a number is one, true and false are none."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not allowed: must be a number")
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not allowed: must be a number") from None
    return value


def _size(value: object) -> int:
    nbytes = parse_size(value)
    if nbytes == 0:
        raise ValueError(f"{value!r} is not allowed: must be > 0")
    return nbytes


def _auto_or(convert: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None or value == "auto" else convert(value)


def _model_config(value: object) -> object:
    """An inline configuration as plain JSON, or the path of one."""
    if not isinstance(value, dict):
        return None if value is None else Path(expand_path(value))
    if not isinstance(value.get("model_type"), str):
        raise ValueError("has no `model_type`. Fix: name the architecture, for example model_type: llama")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds something that JSON cannot: {error}") from None


def _share(value: object) -> object:
    return "auto" if value is None or value == "auto" else _number(value)


def _rows(value: object) -> object:
    return value if value is None or value == "auto" else _number(value)


def as_list(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def escape(path: object) -> str:
    return str(path).replace("$", "$$")


def _data_path(value: object) -> str:
    return value if isinstance(value, str) and value.startswith(HUB_PREFIX) else expand_path(value)


def _validation(value: object) -> object:
    """A number of rows, a share of them, or the path of other data."""
    if value is None or isinstance(value, Path):
        return value
    try:
        number = _number(value)
    except ValueError:
        if isinstance(value, bool):
            raise
        return Path(expand_path(value))
    if isinstance(number, int) and number < 1:
        raise ValueError(f"{number!r} is not allowed: must be >= 1 rows, a share such as 0.05, or a path")
    if isinstance(number, float) and not 0 < number <= 1:
        raise ValueError(f"{number!r} is not allowed: a share must be > 0 and <= 1")
    return number


def _warmup(value: object) -> int | float:
    """A number of steps, or a share of them: text may say `3%`."""
    percent = isinstance(value, str) and value.strip().endswith("%")
    number = _number(str(value).strip()[:-1] if percent else value)
    if isinstance(number, int | float):
        number = number / 100 if percent else number
        if 0 < number < 1:
            return number
        if number == 0 or (number >= 1 and number == number // 1 and not percent):
            return int(number)
    raise ValueError(f"{value!r} is not allowed: must be a number of steps, or a share such as 3% or 0.03")


def _as_written(value: object) -> object:
    return escape(value) if isinstance(value, Path) else value


# Typed text goes through `expand_path` once; `escape` keeps a literal dollar sign when the run is written again.
FilePath = Annotated[Path, BeforeValidator(expand_path), PlainSerializer(escape)]
DataPath = Annotated[str, BeforeValidator(_data_path), PlainSerializer(escape)]
Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_list)]
Share = Annotated[Literal["auto"] | float, BeforeValidator(_share)]
Rows = Annotated[Literal["auto"] | Annotated[int, Field(ge=1)] | None, BeforeValidator(_rows)]
AutoSize = Annotated[int | None, BeforeValidator(_auto_or(_size))]
AutoSteps = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_auto_or(_number))]
ModelSource = Annotated[dict[str, Any] | Path | None, BeforeValidator(_model_config), PlainSerializer(_as_written)]
Warmup = Annotated[StrictInt | StrictFloat, BeforeValidator(_warmup)]
HeldOut = Annotated[StrictInt | StrictFloat | Path | None, BeforeValidator(_validation), PlainSerializer(_as_written)]
