"""The error of a person's input: a run file, a path or an option that cannot be used.

Scope: `UserError`, raised before anything heavy starts; its message is complete (what, where, how to fix it).
Not here: errors of tiers, store and schedule (`tiering/errors.py`), printing them (`megatrain/cli.py`).
"""


class UserError(Exception):
    """What was asked for cannot be done as written; `exit_code` is what the command returns."""

    exit_code = 2
