"""P2, P5: the memory that torch computes in is not much larger than what lives in it, and it is given back."""

import json
import os
import subprocess
import sys

import pytest

from megatrain.heap import THREAD_CACHES, TUNABLES

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages and glibc are of Linux")
MiB = 1 << 20


def said(code: str, *arguments: str, **environment: str) -> dict[str, object]:
    """The object that a fresh Python prints, in this one's environment less its tunables."""
    kept = {name: value for name, value in os.environ.items() if name != TUNABLES}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=kept | environment, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


START = """
import json, os, sys
from megatrain.heap import start_again
print("once" if "glibc.malloc.tcache_count=0" in os.environ.get("GLIBC_TUNABLES", "") else "", end="", file=sys.stderr)
pid = os.getpid()
start_again()
print(json.dumps({"argv": sys.argv, "tunables": os.environ.get("GLIBC_TUNABLES"), "pid": pid == os.getpid()}))
"""


@linux_only
def test_a_command_starts_again_once_with_the_same_arguments() -> None:
    """What a person typed arrives unchanged, and what they set for the C library stays."""
    found = said(START, "train", "a file.yaml", "--set=x='1'")
    assert found == {"argv": ["-c", "train", "a file.yaml", "--set=x='1'"], "tunables": f"{THREAD_CACHES}=0",
                     "pid": True}  # fmt: skip
    mine = "glibc.malloc.check=0"
    assert said(START, **{TUNABLES: mine})["tunables"] == f"{mine}:{THREAD_CACHES}=0"
    chosen = f"{THREAD_CACHES}=3"
    assert said(START, **{TUNABLES: chosen})["tunables"] == chosen, "what a person has chosen was overruled"


KEEPS = """
import json, psutil, torch
from megatrain.heap import Heap
rss = psutil.Process().memory_info
heap = Heap(1 << 30)
begin = rss().rss
tensors = [torch.ones(8 << 20) for _ in range(4)]
full = rss().rss
tensors.clear()
kept = rss().rss
faults = psutil.Process()
given = heap.release()
after = rss().rss
again = [torch.ones(8 << 20) for _ in range(4)]
print(json.dumps({"begin": begin, "full": full, "kept": kept, "given": given, "after": after, "again": rss().rss}))
"""


@linux_only
def test_freed_memory_is_kept_until_it_is_released() -> None:
    """P5: making a heap takes nothing; what computing took stays, and `release` says how much it was."""
    found = said(KEEPS)
    begin, kept, given, after = (int(str(found[name])) for name in ("begin", "kept", "given", "after"))
    assert kept - begin > 120 * MiB, f"128 MiB of tensors left {kept - begin} bytes"
    assert abs(given - (kept - begin)) < 16 * MiB, f"{given} given back of {kept - begin}"
    assert after - begin < 8 * MiB, f"{after - begin} bytes are left"


STEP = """
import json
from megatrain.heap import Heap, start_again
start_again()
import torch
from torch import nn
import ctypes

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
layer = nn.TransformerEncoderLayer(512, 8, 1536, dropout=0.0, batch_first=True)
heap = Heap(1 << 30)
heap.release()
begin, most = libc.mallinfo2().uordblks, 0
def look(*call):
    global most
    most = max(most, libc.mallinfo2().uordblks - begin)
for module in layer.modules():
    module.register_forward_hook(look)
for turn in range(12):
    x = torch.randn(2, 256 + 8 * turn, 512)
    loss = layer(x).square().sum()
    look()
    loss.backward()
    look()
    held = [dict.fromkeys(range(200)) for _ in range(64)]  # the interpreter's own objects, between the tensors
    del x, loss
print(json.dumps({"most": most, "grown": heap.release()}))
"""


@linux_only
def test_the_heap_is_not_much_larger_than_what_was_alive_in_it() -> None:
    """P2: forwards and backwards of changing lengths, with other objects between them."""
    found = said(STEP)
    most, grown = int(str(found["most"])), int(str(found["grown"]))
    assert most > 20 * MiB, f"only {most} bytes were alive: this shows nothing"
    assert grown < 2 * most + 16 * MiB, f"the heap took {grown} bytes for {most} that were alive"
