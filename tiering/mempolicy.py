"""Asks the kernel to take pages of a mapping from certain NUMA nodes, and where pages lie.

Scope: `bind_pages` and `page_nodes`, by the system calls `mbind` and `move_pages` themselves: no library is needed.
Not here: which nodes (`numa.py`), the mapping (`arena.py`).

Sources: the manual pages mbind(2) and move_pages(2); `linux/mempolicy.h`; the tables of system calls of each processor.
"""

import ctypes
import os
import platform
from collections.abc import Sequence

from tiering.workload import PAGE

_NUMBERS = {
    "x86_64": {"mbind": 237, "move_pages": 279},
    "aarch64": {"mbind": 235, "move_pages": 239},
}
_MODES = {"prefer": 1, "bind": 2, "interleave": 3}
_WORD_BITS = 64


def bind_pages(address: int, nbytes: int, policy: str, nodes: Sequence[int]) -> str | None:
    """Pages of [address, address + nbytes) that are not there yet come from `nodes` from now on; None if the kernel
    agreed, otherwise what it said. The range is of whole pages.
    """
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    most = words * _WORD_BITS + 1  # the kernel takes one off
    return _call(
        "mbind",
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MODES[policy]),
        mask,
        ctypes.c_ulong(most),
        ctypes.c_ulong(0),
    )


def page_nodes(address: int, nbytes: int, samples: int) -> list[int]:
    """The nodes of up to `samples` pages, spread evenly; of those that are there. Empty where it is not told."""
    pages = nbytes // PAGE
    count = min(samples, pages)
    if count == 0:
        return []
    places = (ctypes.c_void_p * count)(*(address + at * pages // count * PAGE for at in range(count)))
    found = (ctypes.c_int * count)()
    refused = _call(
        "move_pages", ctypes.c_long(0), ctypes.c_ulong(count), places, ctypes.c_void_p(None), found, ctypes.c_long(0)
    )
    return [] if refused else [node for node in found if node >= 0]


def _call(name: str, *arguments: object) -> str | None:
    machine = platform.machine()
    number = _NUMBERS.get(machine, {}).get(name)
    if number is None:
        return f"{name}: its number on {machine} is not known here"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(number), *arguments):
        return f"{name}: {os.strerror(ctypes.get_errno())}"
    return None
