"""Where a model's folder is, and what its config.json says; nothing heavy is imported.

Scope: names of the Hugging Face hub, reading a configuration, refusing what would need code of its own or another tool.
Not here: weights (`checkpoint.py`), the config object and the model (`model.py`).
"""

import json
import re
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "LICENCE*", "NOTICE*", "README.md")


def local_folder(path: object) -> object:
    """`model.path` as typed; a hub name (`org/name`) that is no folder here becomes the folder it is downloaded to.

    Raises UserError where the hub cannot be reached or has no such model.
    """
    if not isinstance(path, str) or not _HUB_NAME.fullmatch(path.strip()) or Path(path.strip()).exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    name = path.strip()
    try:
        return snapshot_download(name, allow_patterns=list(_FILES))
    except GatedRepoError as error:
        raise UserError(
            f"model.path: {name}: its terms have to be accepted first. Fix: do so on its page of the hub, then log in "
            "with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model.path: {name} is no folder here, and the hub has no such model. Fix: the path of a folder, or the "
            "name as its page on the hub has it"
        ) from error
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.path: {name} is no folder here, and the hub cannot be reached: {_first_line(error)}. Fix: the path "
            "of a folder; or download it where there is a network: hf download " + name
        ) from error


def read_config(key: str, file: Path) -> dict[str, Any]:
    """The configuration in the JSON file or the model folder `file`. key: of the run file, for what is refused."""
    if key == "model.path":
        _refuse_other(file)
    if file.is_dir():
        file = file / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{key}: {file} cannot be read: {error.strerror}. Fix: give the path of a model's config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key}: {file} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(f"{key}: {file} has no `model_type`; it is not the configuration of a model")
    return content


def _refuse_other(path: Path) -> None:
    if path.suffix == ".gguf" and path.is_file():
        raise UserError(f"model.path: {path} is a GGUF file. Fix: megatrain unpack {path} -o DIR, then model.path: DIR")
    if not path.is_dir():
        raise UserError(f"model.path: {path} is not a folder. Fix: give the folder that holds config.json")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
