"""What is known of models and parts without running anything.

Scope: sizes, costs and parameters of architectures by arithmetic on their configs; well-known models by name; GPUs,
drives and memory as assumed rates. No torch, no transformers.
Not here: the real model (`megatrain/model.py`, `megatrain/profile.py`), the real machine (`megatrain/measure.py`).
"""
