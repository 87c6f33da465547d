"""The model's own head and loss on given hidden states, whole or in chunks of the sequence.

Scope: the head without its base model, the labels of a chunk, and the refusal of an architecture whose loss cannot be
cut.
Not here: how long a chunk is (`chunks.py`), the lent weights and the gradients (`stream.py`).

m rows a micro-batch, S tokens a row, H hidden size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.data.batch import IGNORED
from megatrain.errors import UserError
from megatrain.inputs import Inputs, every_token, supervised
from megatrain.model import Units

_TRIED, _CUT = 5, 3
"""Tokens that a loss is tried on, and those of the first of two chunks."""


class Hidden(dict[str, Any]):
    """Stands for any output of a base model: what is not there is None; by number it is a tuple of what is there."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@contextmanager
def answering(model: PreTrainedModel, output: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the base model returns `output`: the model's own forward becomes its head.

    Some heads do not call the base model but the decoder inside it, so that one answers too.
    """
    parts = dict.fromkeys((model.base_model, model.get_decoder()))
    for part in parts:
        part.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for part in parts:
            del part.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The rows and positions `at` of a step, and what the head needs of them; `counted` labels of the whole step are
    the divisor. following: the label of each position, for a chunk that ends inside its sequences; None: the model
    shifts `labels` itself.
    """

    at: tuple[slice, slice]
    input_ids: torch.Tensor
    labels: torch.Tensor
    counted: int
    following: torch.Tensor | None = None


def chunks(inputs: Inputs, rows: slice, length: int, *, counted: int, whole: bool) -> Iterator[Chunk]:
    """The chunks of a micro-batch in the order of the sequence, `length` positions each. counted: labels of the step,
    as `supervised` counts them; whole: there is only one chunk.
    """
    ids, labels = inputs["input_ids"], inputs["labels"]
    following = None if whole else next_tokens(labels)
    for begin in range(0, labels.shape[1], length):
        at = rows, slice(begin, begin + length)
        shifted = None if following is None else following[at]
        yield Chunk(at=at, input_ids=ids[at], labels=labels[at], counted=counted, following=shifted)


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The label of each position, [m, S]: that of the token after it. The last one of a row has none."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def head_loss(model: PreTrainedModel, output: Mapping[str, Any], chunk: Chunk) -> torch.Tensor:
    """The loss that the model's own head and loss make of a base model's `output` for a chunk."""
    shifted = {} if chunk.following is None else {"shift_labels": chunk.following.contiguous()}
    with answering(model, output):
        out = model(
            input_ids=chunk.input_ids,
            labels=chunk.labels,
            use_cache=False,
            num_items_in_batch=chunk.counted,
            **shifted,
        )
    loss: torch.Tensor = out.loss
    return loss


def refuse_uncuttable(units: Units, setting: str) -> None:
    """Raises UserError, by name, for a model whose loss is not the sum of its chunks' losses.

    setting: what the person asked for. Tried on a few random logits, before any weight exists: the head runs on the
    meta device and the model's loss function is handed those logits instead.
    """
    reason = _fault(units)
    if reason is not None:
        raise UserError(
            f"{setting}: the loss of {type(units.model).__name__} cannot be cut into chunks: {reason}. "
            f"Fix: leave {setting} out; a smaller micro-batch takes less memory too"
        )


def _fault(units: Units) -> str | None:
    """Why the loss of this model cannot be cut; None if it can."""
    inputs, row = every_token(torch.arange(1, _TRIED + 1)[None]), slice(0, 1)
    try:
        counted = supervised(inputs["labels"])
        (whole,) = (_tried(units, chunk) for chunk in chunks(inputs, row, _TRIED, counted=counted, whole=True))
        parts = [_tried(units, chunk) for chunk in chunks(inputs, row, _CUT, counted=counted, whole=False)]
    except Exception as error:  # any class: whatever the model's code does with a head alone
        return f"it does not run on a head alone ({' '.join(str(error).split())[:200]})"
    if abs(whole - sum(parts)) <= 1e-4 * abs(whole):
        return None
    return "it does not take `shift_labels`, or is no sum over tokens"


def _tried(units: Units, chunk: Chunk) -> float:
    """The loss of a chunk on random logits, which are the same ones in every call."""
    model = units.model
    original = model.loss_function

    def on_known_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.autograd.grad(logits.sum(), hidden, allow_unused=True)[0] is None:
            raise ValueError("it does not read what the base model returns")
        shape = (1, _TRIED, logits.shape[-1])
        return original(torch.randn(shape, generator=torch.Generator().manual_seed(0))[chunk.at], *args, **kwargs)

    width = next(b.slice.shape[1] for b in units.head.bindings if len(b.slice.shape) == 2)
    hidden = torch.empty(*chunk.labels.shape, width, device="meta", requires_grad=True)
    had = vars(model).get("_loss_function")
    model.loss_function = on_known_logits
    try:
        return head_loss(model, Hidden(last_hidden_state=hidden), chunk).item()
    finally:
        if had is None:
            del model._loss_function
        else:
            model.loss_function = had
