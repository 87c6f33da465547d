"""Measurements that one looks at: tables and JSON of a drive, a link, the AdamW kernel and matrix products.

Scope: `python -m benchmarks.NAME`, from the project's folder.
Not here: how things are measured (`tiering/measure_disk.py`, `tiering/measure_memory.py`), the one file with all that a
plan needs (`megatrain measure`).
"""
