"""Planning before there is a machine: from a question (model, memory, drives) to a forecast, with advice and sweeps.

Scope: the `tierplan` command and everything that only it needs; the forecast that `megatrain plan` prints too.
Not here: the planner (`tiering/plan.py`), planning a run file (`megatrain/prepare.py`, `megatrain/report.py`).
"""
