"""A small tokenizer with a chat template, made without a network: one token a byte, and three special ones.

Scope: the tokenizer folder, templates of the usual kinds, rows of chat data.
Not here: what is tested with them (`test_data_*.py`).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import DataConfig

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
VOCAB_SIZE = 259

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""CHATML with generation markers around the answer and its end-of-turn token."""
MARKED_SHORT = MARKED.replace(
    " + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}"
)
"""The same with the end-of-turn token outside of the markers."""
COUNTED = "{{ messages | length }}" + CHATML
"""What it writes first depends on all turns: no text of fewer turns is a prefix."""
THINKING = CHATML.replace(
    "message['content'] +", "('<think>' if loop.last and message['role'] == 'assistant' else '') + message['content'] +"
)
"""The last answer is written unlike earlier ones."""


def save_tokenizer(folder: Path, template: str | None = CHATML, *, pad: bool = True, end: bool = True) -> Path:
    """A tokenizer folder as `save_pretrained` writes it. pad, end: with a pad and an end-of-sequence token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (START, END, PAD)])
    special = {"pad_token": PAD} if pad else {}
    special |= {"eos_token": END} if end else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Turns of user and assistant in alternation, after a system turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSONL; a text is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat_config(tokenizer: Path, *paths: Path | str, **changes: Any) -> DataConfig:
    """The data section of a run on chat data."""
    fields = {"kind": "chat", "paths": tuple(str(path) for path in paths), "tokenizer": str(tokenizer), "seq_len": 128}
    return DataConfig(**{**fields, **changes})


def learned(tokenizer: Path, ids: Sequence[int], supervised: Sequence[bool]) -> str:
    """The text of the tokens that are learned, with `|` where others lie between them."""
    from tokenizers import Tokenizer

    decoder, parts, last = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), [], False
    for token, taken in zip(ids, supervised, strict=True):
        if taken and not last:
            parts.append([])
        if taken:
            parts[-1].append(int(token))
        last = bool(taken)
    return "|".join(decoder.decode(part, skip_special_tokens=False) for part in parts)
