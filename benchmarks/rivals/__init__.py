"""Other ways to train the same model on the same tokens from the same first weights, beside ours.

Scope: `python -m benchmarks.rivals` (`__main__.py`); one module a way, each run in a process of its own.
Not here: how near our step is to the hardware's limit (`benchmarks/step.py`).
"""
