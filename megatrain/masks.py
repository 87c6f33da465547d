"""What transformers is told of packed rows, so that it need not look at their positions on the device.

Scope: answering `find_packed_sequence_indices` from what the host knows of a step's inputs.
Not here: packing (`data/packing.py`), the masks themselves (transformers makes them).

transformers asks once for each mask, after the embedding: "does any row restart?". On a device the host would have to
wait there for the embedding's weights. The answer is the same, so are the masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import masking_utils

from megatrain.inputs import Inputs

_ASKED = "find_packed_sequence_indices"


def are_packed(inputs: Inputs) -> bool:
    """Does any row of these inputs, which are on the host, hold several samples?"""
    positions = inputs.get("position_ids")
    return positions is not None and bool((positions.diff(dim=-1) != 1).any())


@contextmanager
def told_of_packing(packed: bool) -> Iterator[None]:
    """Inside, masks are made for rows that are packed, or not."""
    own = getattr(masking_utils, _ASKED, None)
    if own is None:  # a release that does not ask
        yield
        return
    setattr(masking_utils, _ASKED, _sample_numbers if packed else lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, _ASKED, own)


def _sample_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of the sample that each token belongs to, from 0 on in its row, [B, S]: as transformers has it."""
    restarts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return restarts.cumsum(-1)
