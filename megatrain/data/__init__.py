"""The data of a run: text, conversations or token ids, as rows of equal length.

Scope: the names that the trainer uses.
Not here: the kinds (`text.py`, `chat.py`, `token_arrays.py`), rows and batches (`batch.py`), both together
(`run_data.py`).
"""

from megatrain.data.batch import IGNORED, Batch, StepBatches, batches_in_order
from megatrain.data.run_data import RunData, open_data
from megatrain.data.text import prepare_tokens
from megatrain.data.tokens import TokenFile

__all__ = [
    "IGNORED",
    "Batch",
    "RunData",
    "StepBatches",
    "TokenFile",
    "batches_in_order",
    "open_data",
    "prepare_tokens",
]
