"""Text files as windows of token ids.

Scope: the names that the trainer uses.
Not here: finding files (`sources.py`), tokenising (`text.py`), the token file and the order of windows (`tokens.py`).
"""

from megatrain.data.text import prepare_tokens
from megatrain.data.tokens import Batches, TokenFile

__all__ = ["Batches", "TokenFile", "prepare_tokens"]
