"""What a run's data needs, looked for before anything heavy is imported.

Scope: data, tokenizer and template are there; the model can take packed rows.
Not here: the sections of the run file (`megatrain/config.py`), reading the data (`run_data.py`).
"""

from pathlib import Path

from megatrain.config import DataConfig
from megatrain.data.chat_sources import list_chat_sources
from megatrain.data.sources import ARRAY_SUFFIXES, TEXT_SUFFIXES, list_sources
from megatrain.errors import UserError

PACKED_MODEL_TYPES = frozenset(
    "cohere deepseek_v3 falcon gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_neox granite llama ministral "
    "mistral mixtral olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2".split()
)
"""They take `position_ids`, and transformers blocks attention where those restart: a packed sample has the logits of
one alone, to the rounding of another matrix size (`tests/test_data_packing.py`). OPT and GPT-OSS do not."""


def check_data_files(data: DataConfig, model_type: str) -> None:
    """Raises UserError for data, a tokenizer or a template that is not there, and for packing with another model."""
    validation = (str(data.validation),) if isinstance(data.validation, Path) else ()
    if data.kind == "chat":
        list_chat_sources(data.paths, data.datasets, data.split)
        if validation:
            list_chat_sources(validation, (), data.split)
    else:
        list_sources((*data.paths, *validation), ARRAY_SUFFIXES if data.kind == "tokens" else TEXT_SUFFIXES)
    tokenizer = data.tokenizer_file
    if tokenizer is not None and not tokenizer.is_file():
        raise UserError(
            f"data.tokenizer: {tokenizer} is not a file. Fix: `bytes`, a tokenizer.json, or a folder that holds one"
        )
    if data.chat_template is not None and not data.chat_template.is_file():
        raise UserError(f"data.chat_template: {data.chat_template} is not a file. Fix: a file with a Jinja template")
    if data.packing and model_type not in PACKED_MODEL_TYPES:
        raise UserError(
            f"data.packing: that packed samples do not see each other is not shown for {model_type}, only for "
            f"{', '.join(sorted(PACKED_MODEL_TYPES))}. Fix: data.packing: false"
        )
