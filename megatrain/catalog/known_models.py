"""From what a person writes to a config: a well-known model's name, a generic size, a config.json or a model folder.

Scope: forgiving look-up, generic `dense-7b` sizes by rule, reading config.json; no torch.
Not here: the table of models (`model_table.py`), what a config means (`families.py`).
"""

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain.catalog.model_table import ALIASES, MODELS, KnownModel
from megatrain.catalog.shapes import parameters
from megatrain.errors import UserError

EXAMPLE = "--model llama-3-8b, dense-7b, or the path of a config.json"
_UNIT = {"m": 10**6, "b": 10**9, "t": 10**12}
_GENERIC = re.compile(r"dense-?(?P<number>\d+(?:\.\d+)?)(?P<unit>[mbt])")
_PREFIX = re.compile(r"^(?:meta-|c4ai-)")
_NOISE = re.compile(
    r"-(?:hf|instruct|chat|base|it|pt|deduped|thinking|reasoning|\d+k|v0-?\d|v1-\d|(?:0[1-9]|1[0-2])\d\d|2[3-6]\d\d)(?=-|$)"
)
"""What publishers add to a name without changing sizes: tuning, context length, version, date."""
SMALLEST, LARGEST = 10**7, 10**13


def resolve_model(text: str) -> tuple[str, dict[str, Any]]:
    """Name and config of what `text` means. Raises UserError, with the nearest names, if it means nothing.

    A path wins over a name where it looks like one (it has a suffix `.json`, or names a folder with a config.json).
    """
    path = Path(text).expanduser()
    if path.suffix == ".json" or (path.is_dir() and (path / "config.json").exists()):
        return _read(path)
    if (name := known_name(text)) is not None:
        return name, dict(MODELS[name].config)
    if (size := generic_size(text)) is not None:
        return _key(text), dense_config(size)
    if path.exists():
        return _read(path)
    near = get_close_matches(_key(text), [*MODELS, *ALIASES], n=3, cutoff=0.5)
    hint = f"Nearest names: {', '.join(near)}. " if near else ""
    raise UserError(f"model {text!r}: neither a known name nor a path. {hint}Fix: write it like {EXAMPLE}")


def known_name(text: str) -> str | None:
    """The built-in name that `text` stands for: `meta-llama/Llama-3-70B`, `llama_3_70b` and `Llama3-70B` are one."""
    return _BY_KEY.get(_squeezed(_key(text)))


def find_model(text: str) -> KnownModel:
    """The table's entry. Raises UserError for an unknown name."""
    name = known_name(text)
    if name is None:
        resolve_model(text)  # says what is near
        raise UserError(f"model {text!r} is not in the table. Fix: one of {', '.join(MODELS)}")
    return MODELS[name]


def _key(text: str) -> str:
    """Without publisher, case, separators' kind, and what says nothing about sizes.

    >>> _key("meta-llama/Meta-Llama-3.1-8B-Instruct"), _key("allenai/OLMo-2-1124-7B"), _key("Phi-3-mini-4k-instruct")
    ('llama-3-1-8b', 'olmo-2-7b', 'phi-3-mini')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.strip().rstrip("/").rpartition("/")[2].lower()).strip("-")
    return _NOISE.sub("", _PREFIX.sub("", name))


def _squeezed(key: str) -> str:
    """Separators matter between two digits alone: `opt-1.3b` is not `opt-13b`."""
    return re.sub(r"(?<!\d)-|-(?!\d)", "", key)


_BY_KEY = {_squeezed(_key(name)): name for name in MODELS}
_BY_KEY |= {_squeezed(_key(alias)): name for alias, name in ALIASES.items()}


def generic_size(text: str) -> int | None:
    """Parameters that `dense-7b`, `dense-0.5b` or `dense-1t` asks for; None for another name."""
    match = _GENERIC.fullmatch(text.strip().lower().replace("_", "-"))
    return round(float(match["number"]) * _UNIT[match["unit"]]) if match else None


def dense_config(size: int) -> dict[str, Any]:
    """A Llama of about `size` parameters. Raises UserError for a size that the rule is not made for.

    The rule: hidden size = 128 x layers (Llama's shape from 8B to 405B), heads of 128, up to 8 of them for keys and
    values, a feed-forward part of 3.5 x hidden that is then widened or narrowed to meet the size. From 32 layers on
    their number is a multiple of 4. Below 1B: 32,000 words, tied; from there on 128,256 and untied.

    >>> config = dense_config(7_000_000_000)
    >>> config["hidden_size"], config["num_hidden_layers"], parameters(config) / 1e9
    (3968, 31, 7.009071232)
    """
    if not SMALLEST <= size <= LARGEST:
        raise UserError(f"a dense model of {size} parameters: the rule is for {SMALLEST} to {LARGEST}")
    layers = [*range(1, 32), *range(32, 512, 4)]
    config = min((_dense(count, size) for count in layers), key=lambda found: abs(_count(found) - size))
    missing = size - _count(config)
    inner = config["intermediate_size"] + missing / (3 * config["num_hidden_layers"] * config["hidden_size"])
    return {**config, "intermediate_size": max(64, round(inner / 64) * 64)}


def _dense(layers: int, size: int) -> dict[str, Any]:
    small = size < 10**9
    return {
        "model_type": "llama",
        "hidden_size": 128 * layers,
        "intermediate_size": 448 * layers,
        "num_hidden_layers": layers,
        "num_attention_heads": layers,
        "num_key_value_heads": max(count for count in range(1, 9) if layers % count == 0),
        "head_dim": 128,
        "vocab_size": 32000 if small else 128256,
        "tie_word_embeddings": small,
    }


def _count(config: dict[str, Any]) -> int:
    found = parameters(config)
    assert found is not None
    return found


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The config of a file, or of a folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        what = f"the folder {path} has no config.json" if path.is_dir() else f"there is no file {path}"
        raise UserError(f"model: {what}. Fix: write it like {EXAMPLE}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"model: {file} cannot be read as JSON: {error}. Fix: give a Hugging Face config.json"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"model: {file} names no model_type. Fix: give a Hugging Face config.json")
    return (file.parent.resolve().name if file.name == "config.json" else file.stem), config
