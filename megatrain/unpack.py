"""A GGUF file as a model folder: weights in FP32, config, tokenizer, chat template.

Scope: `megatrain unpack`, with the reader of transformers; what it cannot read is refused by name.
Not here: the safetensors format (`safetensors_out.py`), training from the folder (`checkpoint.py`).

A quantised tensor becomes the FP32 values that it stands for; training goes on from those. The reader has all tensors
in memory at once, so the whole model has to fit, once; the training after it need not.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from megatrain.errors import UserError
from megatrain.model import build, model_config
from megatrain.new_folder import appearing, refuse_place
from megatrain.safetensors_out import ALIGN, Entry, write_shards
from megatrain.sizes import format_size

COMPANION_BYTES = 64 << 20
"""Room for the files beside the weights."""
TIMES = 1.25
"""Memory for a copy of the largest tensors beside the model."""


def unpack(file: Path, out: Path, *, max_shard_bytes: int, force: bool, console: Console) -> list[Path]:
    """Write the model of a GGUF file to the folder `out`; returns the weight files.

    Raises UserError or a TieringError; then `out` is what it was before.
    """
    _refuse_file(file)
    target = refuse_place(out, [("the GGUF file", file)], force=force)
    config = model_config(_read(file)["config"])
    model = build(config)
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    _refuse_memory(file, nbytes)
    console.print(f"{file}: {format_size(nbytes)} in FP32, all of it in memory at once", soft_wrap=True)
    with appearing(target, nbytes=nbytes + COMPANION_BYTES) as folder:
        folder.mkdir()
        tensors = _tensors(file, model)
        entries = [Entry(name=n, shape=tuple(t.shape), dtype=torch.float32) for n, t in tensors.items()]
        entries.sort(key=lambda entry: entry.nbytes % ALIGN != 0)

        def data(entry: Entry) -> Iterator[torch.Tensor]:
            yield tensors[entry.name]

        files = write_shards(folder, entries, max_shard_bytes, data)
        note = _write_companions(folder, file, model)
    console.print(f"{target}: {len(entries)} tensors in float32, {format_size(nbytes)}. {note}", soft_wrap=True)
    return [target / path.name for path in files]


def _refuse_file(file: Path) -> None:
    if find_spec("gguf") is None:
        raise UserError(f"{file}: reading GGUF needs the package gguf. Fix: pip install 'megatrain[gguf]'")
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. Fix: the path of a GGUF file") from None
    if magic != b"GGUF":
        raise UserError(f"{file} is not a GGUF file: it begins with {magic!r}. Fix: the path of a GGUF file")


def _refuse_memory(file: Path, nbytes: int) -> None:
    needed, free = int(TIMES * nbytes), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{file}: {format_size(needed)} of memory are needed to unpack a GGUF file, {format_size(free)} are free. "
            "Fix: a machine with more memory, or the safetensors of the model, which are read part by part"
        )


def _read(file: Path, model: PreTrainedModel | None = None) -> dict[str, Any]:
    """What the reader of transformers makes of the file; with `model` its tensors too, named as in memory."""
    try:
        found: dict[str, Any] = load_gguf_checkpoint(
            str(file), return_tensors=model is not None, model_to_load=model, torch_dtype=torch.float32
        )
    except Exception as error:  # it raises whatever its parts raise
        raise UserError(
            f"{file}: transformers cannot read it: {type(error).__name__}: {' '.join(str(error).split())[:300]}. Fix: "
            "the safetensors of the model"
        ) from error
    return found


def _tensors(file: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter, named and cut as `save_pretrained` does it. Raises UserError for one that is not whole."""
    found: dict[str, torch.Tensor] = _read(file, model)["tensors"]
    wanted = dict(model.named_parameters())
    for name, parameter in wanted.items():
        if name not in found or found[name].shape != parameter.shape:
            has = f"has it with shape {tuple(found[name].shape)}" if name in found else "does not have it"
            raise UserError(
                f"{file}: {name} has shape {tuple(parameter.shape)} by its metadata, but the file {has}. Fix: the "
                "safetensors of the model"
            )
        if not torch.isfinite(found[name]).all():
            raise UserError(f"{file}: {name} holds values that are not finite. Fix: another file of the model")
    kept = {name: found[name].contiguous() for name in wanted}
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, kept).items()}


def _write_companions(folder: Path, file: Path, model: PreTrainedModel) -> str:
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = True
    model.config.save_pretrained(folder)
    if model.can_generate():
        GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:  # it raises whatever its parts raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return f"No tokenizer: transformers cannot read that of the file ({reason})"
    return "Its tokenizer is beside them"
