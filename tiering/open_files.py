"""A bounded table of open files: those in use, and as many idle ones as there is room for.

Scope: `OpenFiles`: opened when first asked for, the one that was idle longest closed first.
Not here: how a file is opened and what is done with it (`posix.py`, `gds.py`).
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

File = TypeVar("File")


class _Entry(Generic[File]):
    __slots__ = ("file", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0


class OpenFiles(Generic[File]):
    """Files by path; any thread may ask. most: how many may be open, asked at each use; those in use stay open."""

    def __init__(self, opened: Callable[[Path], File], closed: Callable[[File], None], most: Callable[[], int]) -> None:
        self._opened, self._closed, self._most = opened, closed, most
        self._files: OrderedDict[Path, _Entry[File]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, path: Path) -> Iterator[File]:
        """The open file, which stays open inside. Raises what opening raises."""
        with self._lock:
            entry = self._files.get(path)
            if entry is None:
                entry = self._files[path] = _Entry(self._opened(path))
            entry.users += 1
            self._files.move_to_end(path)
            self._close_idle()
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1

    def close(self) -> None:
        """All of them; nobody uses one any more."""
        with self._lock:
            while self._files:
                self._closed(self._files.popitem()[1].file)

    def _close_idle(self) -> None:
        """Until the table is no longer too long. The caller holds the lock."""
        excess = len(self._files) - self._most()
        if excess <= 0:
            return
        for path in [path for path, entry in self._files.items() if entry.users == 0][:excess]:
            self._closed(self._files.pop(path).file)
