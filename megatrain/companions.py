"""What stands beside the weights in an exported model folder: configuration, tokenizer, licence, model card.

Scope: config.json, generation_config.json, the tokenizer's files, LICENSE files, README.md.
Not here: the weights (`export.py`).
"""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PretrainedConfig

from megatrain import __version__
from megatrain.committed import Committed
from megatrain.config import TOKENIZER_FILE, RunConfig
from megatrain.model import Units
from megatrain.schedules import schedule_words
from megatrain.sizes import format_count

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)(\.\w+)?", re.IGNORECASE)
LOG_FILE = "log.jsonl"


def write_companions(
    folder: Path, run: RunConfig, run_dir: Path, units: Units, dtype: torch.dtype, state: Committed
) -> list[str]:
    """All files but the weights; returns lines for people that say what is not plain to see."""
    config = saved_config(run, units, dtype)
    config.save_pretrained(folder)
    base = run.model.path
    if base is not None and (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
    elif units.model.can_generate():
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    note = write_tokenizer(folder, run)
    licences = _copy_licences(base, folder)
    card = model_card(run, units, state, dtype, loss=_loss_at(run_dir, state.step), licences=licences)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return [note]


def saved_config(run: RunConfig, units: Units, dtype: torch.dtype) -> PretrainedConfig:
    """The model's configuration as its folder should have it: training sets the dtype and turns caches off."""
    config = copy.deepcopy(units.model.config)
    config.dtype = dtype
    config.use_cache = run.model.json_config().get("use_cache", True)
    config.architectures = [type(units.model).__name__]
    return config


def write_tokenizer(folder: Path, run: RunConfig) -> str:
    """The files of the run's tokenizer; returns a line that says what was written."""
    file = run.data.tokenizer_file
    if file is None:
        byte_tokenizer().save(str(folder / TOKENIZER_FILE))
        _write_json(
            folder / TOKENIZER_CONFIG,
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
        )
        return f"Tokenizer: one token a byte, written as a {TOKENIZER_FILE} with the same ids (0 to 255)"
    beside = [file.parent / name for name in TOKENIZER_FILES] if file.name == TOKENIZER_FILE else []
    copied = [source for source in beside if source.is_file()]
    for source in copied:
        shutil.copyfile(source, folder / source.name)
    if file not in copied:
        shutil.copyfile(file, folder / TOKENIZER_FILE)
    if not (folder / TOKENIZER_CONFIG).is_file():
        _write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    return f"Tokenizer: {', '.join(sorted(path.name for path in folder.iterdir() if path.name in TOKENIZER_FILES))}"


def byte_tokenizer() -> Tokenizer:
    """`data.tokenizer: bytes` in the format of the tokenizers library: a token's id is the byte that it stands for."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> Iterator[str]:
    """The character that the tokenizers library writes for each byte, in the order of the bytes (GPT-2's table):
    printable Latin-1 characters stand for themselves, the rest follows from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    spare = 0x100
    for byte in range(256):
        yield chr(byte if byte in printable else spare)
        spare += byte not in printable


def _copy_licences(base: Path | None, folder: Path) -> list[str]:
    if base is None:
        return []
    files = sorted(path for path in base.iterdir() if path.is_file() and LICENCE.fullmatch(path.name))
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return [file.name for file in files]


def _loss_at(run_dir: Path, step: int) -> float | None:
    """The loss that the log has for a step; a resumed run may have logged it twice, the later row counts."""
    try:
        rows = [json.loads(line) for line in (run_dir / LOG_FILE).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return None
    losses = [row["loss"] for row in rows if row.get("step") == step]
    return losses[-1] if losses else None


def _licence_of(base: Path | None) -> str | None:
    """The licence that the base model's card names in its front matter."""
    try:
        text = (base / "README.md").read_text(encoding="utf-8") if base is not None else ""
        front = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
        named = front.get("license")
    except (OSError, ValueError, IndexError, AttributeError, yaml.YAMLError):
        return None
    return named if isinstance(named, str) else None


def model_card(
    run: RunConfig,
    units: Units,
    state: Committed,
    dtype: torch.dtype,
    *,
    loss: float | None,
    licences: list[str],
) -> str:
    """README.md of the folder: what this is and how it came about. Paths of this machine do not appear in it."""
    base, licence = run.model.path, _licence_of(run.model.path)
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["megatrain"]}
    if licence is not None:
        front["license"] = licence
    optimizer = run.optimizer
    tokens = state.step * run.train.batch * run.data.seq_len
    files = f" (see {', '.join(licences)})" if licences else ""
    rows = {
        "base model": "none: trained from scratch" if base is None else f"`{base.name}`",
        "licence of the base model": None if base is None else f"{licence or 'not named in its folder'}{files}",
        "architecture": f"{type(units.model).__name__}, {format_count(units.parameters)} parameters",
        "step": f"{state.step} of {run.train.steps}",
        "tokens": f"{tokens:,} ({run.train.batch} sequences of {run.data.seq_len} a step)",
        "training loss of that step": None if loss is None else f"{loss:.4f}",
        "optimizer": f"AdamW, lr {optimizer.lr:g}, betas {optimizer.betas}, weight decay {optimizer.weight_decay:g}",
        "learning rate": schedule_words(optimizer) or None,
        "precision": f"trained in float32, stored as {str(dtype).removeprefix('torch.')}",
        "made with": f"megatrain {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value is not None)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=True)}---\n\n# A model trained with megatrain\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/of/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")\n```\n'
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
