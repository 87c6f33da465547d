"""How many rows the token tables of a model have, where a run wants another number than the model folder has.

Scope: `model.resize_vocabulary` and `model.pad_to_multiple_of` as one number; that number in a config.json's content.
Not here: the tensors (`checkpoint.py` fills new rows), ids that are in no row (`megatrain/data/`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import UserError

BYTE_TOKENS = 256
_KEY = "vocab_size"
_TEXT = "text_config"


def rows_wanted(
    asked: int | Literal["auto"] | None, multiple: int | None, content: Mapping[str, Any], tokenizer: Path | None
) -> int | None:
    """Rows after the resize; None: as many as the model has. content: of its config.json. tokenizer: None: bytes.

    `auto`: as many as the tokenizer has tokens, if the model has fewer. Raises UserError where that cannot be told.
    """
    if asked is None and multiple is None:
        return None
    rows = asked if isinstance(asked, int) else _rows(content)
    if asked == "auto":
        rows = max(rows, BYTE_TOKENS if tokenizer is None else tokens_of(tokenizer))
    return rows if multiple is None else -(-rows // multiple) * multiple


def tokens_of(file: Path) -> int:
    """The ids that a tokenizer.json can give: the highest, and all below it."""
    from tokenizers import Tokenizer  # here, so that a run file is refused without loading it

    if not file.is_file():
        raise UserError(
            f"data.tokenizer: {file} is not a file, and model.resize_vocabulary: auto counts its tokens. Fix: a "
            "tokenizer.json, or a folder that holds one"
        )
    try:
        return max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()) + 1
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"data.tokenizer: {file} is not a tokenizer.json: {error}") from None


def with_rows(content: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The configuration with so many rows."""
    if _nested(content):
        return {**content, _TEXT: {**content[_TEXT], _KEY: rows}}
    return {**content, _KEY: rows}


def _rows(content: Mapping[str, Any]) -> int:
    found = (content[_TEXT] if _nested(content) else content).get(_KEY)
    if not isinstance(found, int):
        raise UserError(f"model.path: its config.json has no {_KEY}. Fix: model.resize_vocabulary with a number")
    return found


def _nested(content: Mapping[str, Any]) -> bool:
    return _KEY not in content and isinstance(content.get(_TEXT), dict)
