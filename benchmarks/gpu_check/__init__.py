"""Everything that needs a GPU, in one visit: `python -m benchmarks.gpu_check`, one JSON line a check.

Scope: copies, order, overlap, equal bits, memory, fractions of the limit, GPUDirect Storage, the tests marked `gpu`.
Not here: what is checked (`tiering/cuda.py`, the trainer's `device: cuda`), tables to look at (the other benchmarks).

It runs with the Python of any image that has torch for CUDA: nothing is installed, nothing is downloaded. What a check
needs besides is named where it is missing.
"""
