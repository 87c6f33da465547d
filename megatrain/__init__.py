"""Trains Hugging Face language models in true FP32 with the training state in RAM and on NVMe.

Scope: the package's name and version. Importing it loads nothing heavy.
Not here: the commands (`megatrain/cli.py`), the tiers (the `tiering` package).
"""

__version__ = "0.1.0"
