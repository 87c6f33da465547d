"""A new file that shares the bytes of another one, where the file system can (btrfs, xfs): no byte is moved.

Scope: `clone`.
Not here: copying where it cannot, and what is cloned (`tiering/history.py`).

Each of the two files gets room of its own for what is written to it later.
"""

import errno
import fcntl
import os
from pathlib import Path

FICLONE = 0x40049409
"""_IOW(0x94, 9, int) of linux/fs.h: ioctl_ficlone(2)."""
CANNOT = (
    errno.EOPNOTSUPP,  # this file system has no reflinks
    errno.ENOTTY,  # or knows nothing of them
    errno.ENOSYS,
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # two files that cannot share: other block sizes, other attributes
    errno.EPERM,  # a sandbox that refuses the call
)


def clone(source: Path, target: Path) -> bool:
    """Makes `target`, a new file, with the bytes of `source`. False, and no file, where they cannot be shared."""
    old = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(new, FICLONE, old)
        except OSError as error:
            os.unlink(target)
            if error.errno not in CANNOT:
                raise OSError(error.errno, error.strerror, str(target)) from error
            return False
        finally:
            os.close(new)
    finally:
        os.close(old)
    return True
