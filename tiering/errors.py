"""The errors that a person can meet, each with the exit code that the command line returns.

Scope: typed errors of the tiers, the store and the schedule. Every message is complete for a person: what, where,
how much against what, and how to fix it.
Not here: mapping to the terminal (`megatrain/cli.py`), errors of run files (`megatrain/config.py`).
"""

BAD_INPUT = 2
BAD_MEDIUM = 3


class TieringError(Exception):
    """Base of all errors of this library; `exit_code` is what a command returns for it."""

    exit_code = 1


class BudgetError(TieringError):
    """A plan does not fit; the message holds the sum line by line and the smallest budget that works."""

    exit_code = BAD_INPUT


class PlaceError(TieringError):
    """A path cannot serve as a tier: missing parent, a file, tmpfs, read-only, foreign content."""

    exit_code = BAD_INPUT


class WrongStateError(TieringError):
    """The folder holds another model's or run's state, or none at all."""

    exit_code = BAD_INPUT


class StoreLockedError(TieringError):
    """Another process owns the store; the message names its host and pid."""

    exit_code = BAD_INPUT


class EngineError(TieringError):
    """The I/O engine that was asked for cannot work here; the message says why and which one can."""

    exit_code = BAD_INPUT


class DeviceError(TieringError):
    """The device that was asked for is not there; the message says why."""

    exit_code = BAD_INPUT


class IOFailedError(TieringError):
    """A transfer failed or was short: names the block, the file, the offset, the bytes wanted and found."""

    exit_code = BAD_MEDIUM


class DiskFullError(IOFailedError):
    """No room: names the path, the bytes wanted and the bytes free."""


class DamagedStateError(IOFailedError):
    """A file of the store is missing, short or altered; resume from an earlier commit."""


class ScheduleError(TieringError):
    """A schedule is wrong or was not followed; the message prints the schedule around the fault."""
