"""A real training run, killed with SIGKILL at random moments again and again, must lose nothing.

Scope: `make torture` runs it with 100 kills; `test_torture.py` with a few. It prints what it saw as one JSON object.
Not here: kills of the store alone (`test_commit.py`), power loss.

Each life of the run is a forked child, so that torch is imported once. A life starts as a person would start it: with
--resume where there is a state, without where there is none. After the last kill the run is brought to a step border
and compared, bit for bit, with a run of as many steps that never stopped.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import megatrain.goodbye
import megatrain.prepare
import megatrain.trainer
from megatrain.config import RunConfig, load_run
from tiering.errors import PlaceError
from tiering.hardware import assumed_hardware
from tiering.store import has_state

ENDLESS = 1_000_000
EXTRA = 3


def run_file(folder: Path, name: str, *, clip: float | None, resident: float) -> Path:
    """A two-layer Llama on a small text, mostly on NVMe, with commits every second step."""
    (folder / "text.txt").write_text("".join(f"line {n}: the quick brown fox\n" for n in range(200)))
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    tree: dict[str, Any] = {
        "model": {"config": {"model_type": "llama", **sizes, **heads}},
        "data": {"paths": str(folder / "text.txt"), "tokenizer": "bytes", "seq_len": 16},
        "train": {"steps": ENDLESS, "batch": 4, "micro_batch": 2, "commit_every": 2, "max_grad_norm": clip},
        "optimizer": {"lr": 0.001},
        "tiers": {"nvme": str(folder / name / "nvme"), "host_memory": "2MiB", "resident": resident},
        "output": {"dir": str(folder / name)},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def live(run: RunConfig) -> int:
    """One life, in this process. A creation that was interrupted is cleared away, as its error says."""
    root = run.tiers.nvme[0]
    try:
        return megatrain.trainer.train(run, resume=has_state(root), console=Console(quiet=True))
    except PlaceError as error:
        if "creation was interrupted" not in str(error):
            raise
        shutil.rmtree(root)
        return megatrain.trainer.train(run, resume=False, console=Console(quiet=True))


def fork(run: RunConfig, kill: Callable[[], None] | None) -> bool:
    """A life in a child; True if it was killed, which happens when `kill` returns. Raises if it failed on its own."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = live(run)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    if kill is not None:
        kill()
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"a life ended by itself with exit code {os.WEXITSTATUS(status)}")
    return False


def _until(reached: Callable[[], bool], most_s: float = 200.0) -> None:
    end_s = time.perf_counter() + most_s
    while not reached():
        assert time.perf_counter() < end_s, f"nothing was committed in {most_s} s"
        time.sleep(0.01)


def committed(root: Path) -> int:
    """The step of the last commit; -1 before the first."""
    manifest = root / "manifest.json"
    step = json.loads(manifest.read_text())["step"] if manifest.exists() else None
    return -1 if step is None else int(step)


def bits(root: Path) -> dict[str, bytes]:
    """What the links of the hierarchy point at: the committed state."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("*/*/c/0"))}


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def torture(folder: Path, kills: int, seed: int, *, clip: float | None, resident: float) -> dict[str, Any]:
    """Kill, resume, compare; returns the figures."""
    megatrain.prepare.measure = lambda *args, **kwargs: assumed_hardware()  # type: ignore[assignment]
    megatrain.prepare.time_units = lambda *args: {}  # type: ignore[assignment]
    megatrain.goodbye.SAMPLE_MOST_S = 0.0
    chance = random.Random(seed)
    run = load_run(run_file(folder, "killed", clip=clip, resident=resident))
    root = run.tiers.nvme[0]
    seen = [committed(root)]
    begin_s = time.perf_counter()
    assert fork(run, lambda: _until(lambda: committed(root) >= 2))
    life_s = time.perf_counter() - begin_s  # how long a life takes on this machine to get somewhere
    seen.append(committed(root))
    for _ in range(kills - 1):
        assert fork(run, lambda: time.sleep(chance.uniform(0.02, 1.5) * life_s))
        seen.append(committed(root))
        assert seen[-1] >= seen[-2], f"a commit was lost: {seen[-2]} -> {seen[-1]}"
    steps = max(seen[-1], 0) + EXTRA
    ended = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    fork(ended, None)
    straight = load_run(run_file(folder, "straight", clip=clip, resident=resident), [f"train.steps={steps}"])
    fork(straight, None)
    other = straight.tiers.nvme[0]
    ours, theirs = bits(root), bits(other)
    return {
        "kills": kills,
        "lives_without_progress": sum(a == b for a, b in pairwise(seen)),
        "steps": steps,
        "identical": ours == theirs and committed(root) == committed(other) == steps,
        "differing": [name for name in theirs if ours.get(name) != theirs[name]],
        "disk_bytes": disk_bytes(root),
        "disk_bytes_clean": disk_bytes(other),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=None, help="train.max_grad_norm")
    parser.add_argument("--resident", type=float, default=0.3)
    parser.add_argument("--folder", type=Path, default=None, help="on the drive to test; a temporary one by default")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=options.folder))
    result = torture(folder, options.kills, options.seed, clip=options.clip, resident=options.resident)
    print(json.dumps(result))
    if result["identical"] and result["disk_bytes"] == result["disk_bytes_clean"]:
        shutil.rmtree(folder)
        return 0
    print(f"kept for a look: {folder}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
