"""The C library's heap, where torch computes on a CPU: it keeps what it is given back, whole and in huge pages.

Scope: `start_again` and `Heap`, for Linux with glibc; elsewhere they do nothing.
Not here: how much computing takes (`workspace.py`); weights and gradients, which have a place in the arena.

A step of a language model asks for gigabytes of tensors that live for a moment. As glibc comes, three things go wrong:

- A tensor of some MiB is memory that the kernel hands out anew, one page fault for each 4096 bytes of it, and takes
  away when the tensor goes. Kept memory in huge pages computes 10 to 15 % faster (layers of 12M parameters).
- torch asks for aligned memory, so glibc cuts a sliver off each place, and its caches for threads take the slivers:
  what was freed never grows together again, and the heap became four times as large as all that was ever alive in it
  (323 against 72 MiB, 512 tokens). Without those caches it was 127 MiB, and no slower. They can only be switched off in
  the environment that a process starts with, so a command starts again once.
- What it takes is then the memory of the widest moment, for good: a figure that a plan can count.
"""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import psutil

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of `mallopt`; source: `malloc.h`."""
TUNABLES, THREAD_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"
"""Source: the GNU C Library manual, "Memory Allocation Tunables"."""
MAPS = Path("/proc/self/maps")


def start_again() -> None:
    """The same command in this process, from its beginning, without the heap's caches for threads; once."""
    tunables = os.environ.get(TUNABLES, "")
    if _glibc() is None or THREAD_CACHES in tunables:
        return
    os.environ[TUNABLES] = f"{tunables}:{THREAD_CACHES}=0".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Heap:
    """From its making on, freed memory stays with the process, and the heap's growth is huge pages."""

    def __init__(self, nbytes: int) -> None:
        """nbytes: addresses to grow into; no memory is taken. Without room for them the heap stays as it was."""
        self.nbytes = nbytes
        self._libc = _glibc()
        if self._libc is not None:
            self._libc.mallopt(M_MMAP_MAX, 0)
            self._libc.mallopt(M_TRIM_THRESHOLD, -1)
            self._reserve(self._libc)

    def release(self) -> int:
        """Give back what is kept and not in use; returns the bytes by which the process became smaller.

        That is about what computing has taken since the last time.
        """
        if self._libc is None:
            return 0
        before = psutil.Process().memory_info().rss
        self._libc.malloc_trim(0)
        after = psutil.Process().memory_info().rss
        self._reserve(self._libc)
        return int(max(0, before - after))

    def _reserve(self, libc: ctypes.CDLL) -> None:
        place = libc.malloc(self.nbytes)
        if place is None:
            return
        libc.free(place)
        for line in MAPS.read_text().splitlines():
            if line.endswith("[heap]"):
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # only glibc has it
    except (OSError, AttributeError):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
