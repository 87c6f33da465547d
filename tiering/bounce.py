"""Direct I/O off the page grid: an aligned buffer in between, edge pages read before they are written.

Scope: `on_grid`, and `read`/`write` for any offset, length and address over transfers that take only whole pages.
Not here: the transfers themselves and their errors (`tiering/engine.py`). The trainer makes no such request; imports,
tests and tools may.
"""

import mmap
import os
from collections.abc import Callable

import numpy as np

from tiering.workload import PAGE

Move = Callable[[int, memoryview], int]  # (offset in the file, bytes) -> bytes moved


def on_grid(offset: int, view: memoryview) -> bool:
    """Are offset, length and address multiples of 4096?"""
    address = int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
    return (offset | view.nbytes | address) % PAGE == 0


def _pages(nbytes: int) -> memoryview:
    """Aligned pages of zeros. Not a `with`: the traceback of a failed transfer may still hold a view of them, and
    closing then would hide the failure behind a BufferError; the last view unmaps them."""
    return memoryview(mmap.mmap(-1, nbytes))


def _outer(offset: int, nbytes: int) -> tuple[int, int]:
    return offset // PAGE * PAGE, -(-(offset + nbytes) // PAGE) * PAGE


def read(read_pages: Move, offset: int, view: memoryview) -> int:
    """Fills `view` from `offset` on; returns the bytes found, fewer at the end of the file."""
    lo, hi = _outer(offset, view.nbytes)
    pages = _pages(hi - lo)
    found = min(view.nbytes, max(0, read_pages(lo, pages) - (offset - lo)))
    view[:found] = pages[offset - lo : offset - lo + found]
    return found


def write(read_pages: Move, write_pages: Move, fd: int, offset: int, view: memoryview) -> int:
    """Writes `view` at `offset`; the bytes around it stay, the file ends at max(old end, offset + length).

    The caller keeps other such writes to the same pages away meanwhile.
    """
    lo, hi = _outer(offset, view.nbytes)
    end = max(os.fstat(fd).st_size, offset + view.nbytes)
    pages = _pages(hi - lo)
    for edge in {0, hi - lo - PAGE}:
        read_pages(lo + edge, pages[edge : edge + PAGE])  # short past the end of the file: zeros stay
    pages[offset - lo : offset - lo + view.nbytes] = view
    moved = write_pages(lo, pages)
    if hi > end:
        os.ftruncate(fd, end)
    return min(view.nbytes, max(0, moved - (offset - lo)))
