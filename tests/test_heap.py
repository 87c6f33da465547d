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
from megatrain.config import ModelConfig
from megatrain.profile import profile
from megatrain.run_model import build_units
from megatrain.timing import time_units
llama = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1664,
         "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512,
         "tie_word_embeddings": False}
units = build_units(ModelConfig(config=llama))
alive = max(cost.workspace_bytes for cost in profile(units, 2, 256).values())
heap = Heap(1 << 30)
heap.release()
time_units(units, 2, 256)
print(json.dumps({"alive": alive, "grown": heap.release()}))
"""


@linux_only
def test_the_heap_is_not_much_larger_than_what_is_alive_in_it() -> None:
    """P2: units of a small Llama. With the caches for threads it was 2.2 to 2.4 times as large, without 1.4 to 1.5."""
    found = said(STEP)
    alive, grown = int(str(found["alive"])), int(str(found["grown"]))
    assert grown < 1.8 * alive, f"the heap took {grown} bytes for {alive} that were alive"
