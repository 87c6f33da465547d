"""What one step is given: tensors under the names that transformers uses.

Scope: `Inputs`, made of a batch or of token ids alone, and brought to a device; how many of its labels the loss
counts.
Not here: where batches come from (`megatrain/data/`), what is done with them (`stream.py`).
"""

from collections.abc import Mapping

import torch

from megatrain.data.batch import IGNORED, Batch

Inputs = Mapping[str, torch.Tensor]
"""`input_ids` and `labels`, both [B, S]: labels are not shifted, and IGNORED where nothing is learned. `position_ids`,
[B, S], where rows are packed: they restart at each sample. There is no mask: padding is on the right, where a causal
model does not look."""


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch as tensors that share its memory."""
    found = {"input_ids": torch.from_numpy(batch.input_ids), "labels": torch.from_numpy(batch.labels)}
    if batch.position_ids is not None:
        found["position_ids"] = torch.from_numpy(batch.position_ids)
    return found


def on_device(inputs: Inputs, device: torch.device) -> dict[str, torch.Tensor]:
    """The same inputs there, once for all units of a step; the very tensors where the device is the host itself."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def every_token(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs in which each token, [B, S], is the label of the one before it."""
    return {"input_ids": input_ids, "labels": input_ids}


def supervised(labels: torch.Tensor) -> int:
    """Labels that the loss counts: the first of a row has nothing before it."""
    return int((labels[:, 1:] != IGNORED).sum())
