"""Ctrl-C and SIGTERM as a wish that the loop of a run sees between two steps.

Scope: collecting signals instead of dying from them.
Not here: what a run does then (`trainer.py`), its exit code (`trainer.py`, `console.py`).
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying; a second SIGINT is the usual KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if number in seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    kept = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
