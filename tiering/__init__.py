"""Blocks of bytes across GPU memory, RAM and NVMe, moved by a schedule that is planned, proven and then run.

Scope: this package knows bytes, tiers and time. The pure half (workload, hardware, costs, plan, lower, pack, schedule,
homes, check, simulate) imports no torch and opens no file; the live half does the work. `tiering/README.md` says what
each file is for.
Not here: layers, gradients, models (`megatrain`).
"""
