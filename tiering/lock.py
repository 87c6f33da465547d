"""One owner of a store at a time.

Scope: `OwnerLock`, a flock on a file in each folder of a store that also says who holds it.
Not here: what the owner may do (`tiering/store.py`).

The kernel drops a flock when its process dies, however it dies: a stale lock cannot be left behind, whatever the file
still says.
"""

import errno
import fcntl
import getpass
import os
import socket
import warnings
from pathlib import Path

from tiering.errors import DiskFullError, IOFailedError, StoreLockedError, WrongStateError

NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class OwnerLock:
    """Held from construction to `close`. Raises `StoreLockedError` if another process or store object holds it."""

    __slots__ = ("_fds",)

    def __init__(self, path: Path, *, create: bool) -> None:
        self._fds: list[int] = []
        self.extend(path, create=create)

    def extend(self, path: Path, *, create: bool) -> None:
        """Holds the lock of a further folder too: a copy of the root has a lock of its own, and the same drives."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
        except FileNotFoundError:
            raise WrongStateError(
                f"{path} is missing, so nobody can say who owns this store. "
                f"Fix: make sure that no run uses it, then create that file, empty."
            ) from None
        except OSError as error:
            raise (DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else IOFailedError)(
                f"{path} cannot be opened for writing: {error.strerror}, so nobody can own this store. "
                f"Fix: make its folder writable."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 256, 0).decode(errors="replace").strip() or "a process that has not yet said its name"
            os.close(fd)
            raise StoreLockedError(
                f"{path.parent} is in use by {owner}. Fix: wait for it or stop it; the lock goes with the process."
            ) from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                os.close(fd)
                raise
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}); "
                f"make sure that only one process uses the store",
                RuntimeWarning,
                stacklevel=3,
            )
        self._fds.append(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"host {socket.gethostname()}, pid {os.getpid()}, user {_user()}\n".encode(), 0)

    def close(self) -> None:
        while self._fds:
            fd = self._fds.pop()
            os.ftruncate(fd, 0)
            os.close(fd)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())  # a container without a password entry
