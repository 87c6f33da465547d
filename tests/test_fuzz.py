"""No file that is read can do harm: whatever it holds, it is used or refused with a typed error.

Scope: manifests, drive markers, checksums, run files, model configurations, safetensors files and indexes, text, JSONL,
JSON, Parquet, token arrays, dataset_info.json, tokenizers, caches of tokens, hardware files, snapshots: mutated from
whole ones. Each input: no other error, nothing opened outside the folders it was given, no network, no process, no
pickle, in bounded time and memory.
Not here: what each fault is called (the tests of each part).

`-m slow` (or `make fuzz`) tries `MANY` inputs, the usual run a few of each kind. A failure prints the seed of its
input: `FUZZ_SEED=seed` tries that one alone.
"""

import ast
import contextlib
import copy
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from chat_tokenizer import VOCAB_SIZE, save_tokenizer, turns, write_rows
from conftest import TEXT, RunFile
from models import MODELS
from rich.console import Console
from store_bytes import IDENTITY, blocks, content, put_all, sync

import megatrain
import megatrain.goodbye
import megatrain.trainer
import tiering
from megatrain.checkpoint import Checkpoint
from megatrain.config import DataConfig, load_run
from megatrain.data.run_data import open_data
from megatrain.errors import UserError
from megatrain.fit import refuse_early
from megatrain.model import build, find_units, model_config
from megatrain.preflight import check_files
from megatrain.snapshot import FILE_NAME as SNAPSHOT_NAME
from megatrain.snapshot import read_snapshot
from megatrain.trainer import train
from tiering.drives import root_first
from tiering.errors import TieringError
from tiering.hardware import assumed_hardware
from tiering.hardware_file import load as load_hardware
from tiering.store import BlockStore

MANY, FEW = 10_400, 10
MOST_S = 20.0
"""Of one input, on a machine with other work. All of them together take less than a millisecond each, mostly."""
MOST_BYTES = 2 << 30
"""That one input may map beyond what the process has."""
PACKAGES = (Path(megatrain.__file__).parent, Path(tiering.__file__).parent)

# --- What the process does meanwhile ---------------------------------------------------------------------------------

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
}
"""Audit events that change a folder: which arguments are a path, and the descriptor of the folder that it is below."""
NEVER = ("pickle.find_class", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
LIBRARIES = tuple(
    os.path.realpath(folder)
    for folder in (
        sys.prefix,
        sys.base_prefix,
        *map(str, PACKAGES),
        os.path.dirname(__file__),
        "/proc",
        "/sys",
        "/dev",
        "/usr",
    )
)
"""Reading these is no harm: Python, its packages, what the system tells of itself."""


class Watch:
    """What is opened, changed or started while `folder` is given; one hook a process, which cannot be removed."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        self.installed = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = args
            self._path(event, path, bool((flags or 0) & WRITING))
        elif event in CHANGES:
            for path, folder in CHANGES[event]:
                self._path(event, args[path], True, args[folder] if folder is not None else -1)
        elif event in NEVER:
            self.seen.append(f"{event} {args[:2]}")

    def _path(self, event: str, path: Any, writes: bool, folder: int = -1) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is open already
        above = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
        above, name = os.path.split(os.path.join(above, os.fsdecode(path)))
        # A rename or a removal of a link changes the link, not what it points at.
        real = os.path.join(os.path.realpath(above), name)
        if event not in CHANGES:
            real = os.path.realpath(real)
        allowed = (self.folder, *(() if writes else LIBRARIES))
        if not any(real == folder or real.startswith(f"{folder}/") for folder in allowed):
            self.seen.append(f"{event} of {real}{' for writing' if writes else ''}")

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        if not self.installed:
            sys.addaudithook(self.hook)
            self.installed = True
        self.seen, self.folder = [], os.path.realpath(folder)
        try:
            yield self.seen
        finally:
            self.folder = None


WATCH = Watch()


class TooLongError(BaseException):
    """Not an Exception: nobody may take it for a fault of the file."""


@contextmanager
def at_most(seconds: float, nbytes: int) -> Iterator[None]:
    """Inside, time is up after so many seconds, and memory after so many bytes more than there are now."""
    assert threading.current_thread() is threading.main_thread()

    def late(*_: object) -> None:
        raise TooLongError(f"more than {seconds} s")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, limit[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limit)


# --- Mutations -------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], [None], {"": None}, ["../x"], {"a": {"b": {"c": 1}}}, [1] * 1000),
    *(-1, 0, 1, 2, 3, 4095, 4096, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, 10**30, -(10**30)),
    *(0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf")),
    *("", " ", ".", "..", "../../../../etc/passwd", "/etc/passwd", "/", "~root", "a\0b", "a\nb", "\ud800"),
    *("x" * 100_000, "${HOME}", "$HOME", "{{ 7*7 }}", "__class__", "auto", "null", "1e400"),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*at, key))
    return found


def odd(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(ODD))  # what is put in may be changed again


def mutated_tree(chance: random.Random, tree: Any) -> Any:
    """The tree with one to three places changed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randint(1, 3)):
        known = places(tree)
        if not known:
            return odd(chance)
        *path, last = chance.choice(known)
        node = tree
        for key in path:
            node = node[key]
        what = chance.random()
        if what < 0.15:
            del node[last]
        elif what < 0.25 and isinstance(node, dict):
            node[chance.choice(["unknown", "__proto__", "..", "/", "", str(last) * 2])] = odd(chance)
        elif what < 0.35 and isinstance(node[last], int | float):
            node[last] = node[last] * chance.choice([-1, 0, 2, 0.5, 1e6, 1e12])
        elif what < 0.4:
            node[last] = nested(chance.choice([10, 200]))
        elif what < 0.5:
            node[last] = [node[last]] if chance.random() < 0.5 else str(node[last])
        else:
            node[last] = odd(chance)
    return tree


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """The bytes flipped, cut, doubled, with some of another kind put in."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(found) + 1)
        what = chance.randrange(6)
        if what == 0 and found:
            found[min(at, len(found) - 1)] ^= 1 << chance.randrange(8)
        elif what == 1:
            del found[at:]
        elif what == 2:
            del found[at : at + chance.randrange(1, 64)]
        elif what == 3:
            found[at:at] = chance.choice(
                [b"\0", b"\xff\xfe", b'"', b"[" * 5000, b"{", b"\n", b"NaN", b"\xf0\x9f", b"9" * 5000]
            )
        elif what == 4:
            found[at:at] = found[at : at + 200]
        else:
            found[at : at + 8] = chance.randbytes(8)
    return bytes(found)


def as_json(chance: random.Random, tree: Any) -> bytes:
    """A mutated tree as JSON, now and then with mutated bytes too."""
    text = json.dumps(mutated_tree(chance, tree)).encode("utf-8", "surrogatepass")
    return mutated_bytes(chance, json.dumps(tree).encode()) if chance.random() < 0.25 else text


# --- What is read ----------------------------------------------------------------------------------------------------

Try = Callable[[random.Random], object]
"""Writes one mutated input and reads it as the program does."""


def store(folder: Path, drives: int = 1) -> Path:
    others = [folder / f"drive{number}" for number in range(1, drives)]
    with BlockStore.create(folder / "root", blocks(), identity=IDENTITY, others=others, rates=[1.0] * drives) as made:
        put_all(made, content(made, 1))
        made.commit(1, {"step": 1}, sync)
    return folder / "root"


def read_store(root: Path, others: list[Path], read_only: bool) -> None:
    with BlockStore.open(root, others=others, read_only=read_only) as found:
        for name, block in found.blocks.items():
            found.read_extents(name, 0, block.nbytes)


def manifests(folder: Path) -> Try:
    root = store(folder)
    whole = json.loads((root / "manifest.json").read_text())

    def attempt(chance: random.Random) -> None:
        (root / "manifest.json").write_bytes(as_json(chance, whole))
        read_store(root, [], chance.random() < 0.5)

    return attempt


def manifests_of_drives(folder: Path) -> Try:
    root = store(folder, drives=3)
    others = [folder / "drive1", folder / "drive2"]
    files = {path: path.read_bytes() for path in (root / "manifest.json", *(other / "drive.json" for other in others))}

    def attempt(chance: random.Random) -> None:
        hit = chance.choice(list(files))
        for path, data in files.items():
            path.write_bytes(as_json(chance, json.loads(data)) if path == hit else data)
        read_store(*_split(root_first([root, *others])), chance.random() < 0.5)

    return attempt


def _split(folders: list[Path]) -> tuple[Path, list[Path]]:
    return folders[0], folders[1:]


def files_of_a_store(folder: Path) -> Try:
    """Every small file of a store but those above: checksums, zarr's metadata, the lock."""
    root = store(folder)
    small = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != "manifest.json" and path.stat().st_size < 9000
    ]
    files = {path: path.read_bytes() for path in small}

    def attempt(chance: random.Random) -> None:
        hit = chance.choice(small)
        for path, data in files.items():
            path.write_bytes(mutated_bytes(chance, data) if path == hit else data)
        read_store(root, [], chance.random() < 0.5)

    return attempt


def small_llama() -> dict[str, Any]:
    return {**MODELS["llama"], "num_hidden_layers": 2}


def run_tree(folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_text(TEXT)
    return {
        "model": {"config": small_llama()},
        "data": {"paths": [str(folder / "text.txt")], "tokenizer": "bytes", "seq_len": 16, "kind": "text"},
        "train": {"steps": 4, "batch": 4, "micro_batch": 2, "commit_every": 3, "max_grad_norm": 1.0, "seed": 1},
        "optimizer": {
            "lr": 1e-3,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "schedule": "linear",
            "warmup_steps": "30%",
            "schedule_steps": 9,
        },
        "device": "cpu",
        "tiers": {"nvme": [str(folder / "nvme")], "host_memory": "8MiB", "resident": 0.5, "serial": False},
        "output": {"dir": str(folder / "out")},
    }


def run_files(folder: Path) -> Try:
    tree, path = run_tree(folder), folder / "run.yaml"

    def attempt(chance: random.Random) -> None:
        if chance.random() < 0.7:
            changed = mutated_tree(chance, tree)
            try:
                said = yaml.safe_dump(changed, allow_unicode=True)
            except RecursionError:  # the writer gives up before the reader does; JSON is YAML too
                said = json.dumps(changed)
            text = said.encode("utf-8", "surrogatepass")
        else:
            text = mutated_bytes(chance, yaml.safe_dump(tree).encode())
        path.write_bytes(text)
        sets = [f"{'.'.join(map(str, chance.choice(places(tree))))}={chance.choice(ODD)!s:.200}"]
        load_run(path, sets if chance.random() < 0.3 else ())

    return attempt


def model_configs(folder: Path) -> Try:
    """From config.json to units: sizes are taken from it long before anything is allocated."""
    tree = run_tree(folder)
    path, models = folder / "config.json", [*MODELS.values()]
    tree["model"]["config"] = str(path)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))

    def attempt(chance: random.Random) -> None:
        path.write_bytes(as_json(chance, chance.choice(models)))
        run = load_run(folder / "run.yaml")
        check_files(run)
        refuse_early(run)
        find_units(build(model_config(run.model.json_config())))

    return attempt


def model_files(folder: Path) -> Try:
    """Safetensors headers and the index of shards."""
    from transformers import AutoModelForCausalLM

    config = model_config(small_llama())
    model, units = AutoModelForCausalLM.from_config(config), find_units(build(config))
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="64KB")
    single = folder / "single" / "model.safetensors"
    index = folder / "sharded" / "model.safetensors.index.json"
    data, names = single.read_bytes(), json.loads(index.read_text())
    length = int.from_bytes(data[:8], "little")

    def attempt(chance: random.Random) -> None:
        if chance.random() < 0.4:
            index.write_bytes(as_json(chance, names))
            checkpoint = Checkpoint(folder / "sharded", units)
        else:
            header = data[8 : 8 + length]
            if chance.random() < 0.6:
                changed = as_json(chance, json.loads(header))
                whole = len(changed).to_bytes(8, "little") + changed + data[8 + length :]
            else:
                whole = mutated_bytes(chance, data[: 8 + length]) + data[8 + length :]
            single.write_bytes(whole)
            checkpoint = Checkpoint(folder / "single", units)
        import torch

        unit = next(unit for unit in units if unit.nbytes)
        checkpoint.fill(unit, torch.empty(unit.nbytes, dtype=torch.uint8))

    return attempt


def read_data(folder: Path, **fields: Any) -> None:
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=folder))
    data = open_data(DataConfig(seq_len=16, **fields), VOCAB_SIZE, cache, 0)
    data.batches(2, 0).batch_at(0)


def texts(folder: Path) -> Try:
    path, whole = folder / "text.txt", (TEXT + "ünïcödé 🎈 \u2028 end\n").encode()

    def attempt(chance: random.Random) -> None:
        path.write_bytes(chance.choice([mutated_bytes(chance, whole), chance.randbytes(chance.randrange(3000)), b""]))
        read_data(folder, paths=str(path))

    return attempt


def chats(folder: Path) -> Try:
    """JSONL, JSON and Parquet with rows of every format."""
    import pyarrow
    import pyarrow.parquet

    tokenizer = save_tokenizer(folder / "tokenizer")
    rows: list[Any] = [
        {"messages": turns("q1", "a1", "q2", "a2", system="s"), "tools": [{"name": "f"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"instruction": "q", "input": "more", "output": "a", "history": [["q0", "a0"]]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1] * 9), folder / "whole.parquet")
    table = (folder / "whole.parquet").read_bytes()
    options = {"kind": "chat", "tokenizer": str(tokenizer)}

    def attempt(chance: random.Random) -> None:
        kind = chance.choice(["jsonl", "json", "parquet"])
        path = folder / f"rows.{kind}"
        if kind == "jsonl":
            lines = [as_json(chance, row) if chance.random() < 0.5 else json.dumps(row).encode() for row in rows * 2]
            path.write_bytes(b"\n".join(lines))
        elif kind == "json":
            path.write_bytes(as_json(chance, rows))
        else:
            path.write_bytes(mutated_bytes(chance, table))
        read_data(folder, paths=str(path), **options)

    return attempt


def dataset_infos(folder: Path) -> Try:
    """What LLaMA-Factory's list of data sets names lies in its own folder, or is refused."""
    tokenizer = save_tokenizer(folder / "tokenizer")
    home = folder / "sets"
    home.mkdir()
    write_rows(home / "rows.jsonl", [{"instruction": "q", "input": "", "output": "a"}] * 3)
    entry = {"file_name": "rows.jsonl", "formatting": "alpaca", "split": "train", "num_samples": 3}
    columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    whole = {"mine": {**entry, "columns": columns, "tags": tags}}

    def attempt(chance: random.Random) -> None:
        (home / "dataset_info.json").write_bytes(as_json(chance, whole))
        read_data(folder, paths=str(home), kind="chat", tokenizer=str(tokenizer))

    return attempt


def token_arrays(folder: Path) -> Try:
    """`.npy` headers and raw ids."""
    np.save(folder / "whole.npy", np.arange(200, dtype=np.uint16))
    whole = (folder / "whole.npy").read_bytes()
    (folder / "whole.npy").unlink()

    def attempt(chance: random.Random) -> None:
        suffix = chance.choice(["npy", "bin"])
        path = folder / f"ids.{suffix}"
        path.write_bytes(mutated_bytes(chance, whole if chance.random() < 0.8 else whole[128:]))
        options = {} if suffix == "npy" else {"dtype": chance.choice(["uint16", "uint32", "int32"])}
        read_data(folder, paths=str(path), kind="tokens", **options)

    return attempt


def caches(folder: Path) -> Try:
    """The run's own files of tokens: those of another program or version are made anew, never trusted."""
    path, cache = folder / "text.txt", folder / "cache"
    path.write_text(TEXT)
    data = DataConfig(seq_len=16, paths=str(path))
    open_data(data, VOCAB_SIZE, cache, 0)
    files = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}

    def attempt(chance: random.Random) -> None:
        hit = chance.choice(list(files))
        for file, whole in files.items():
            parsed = file == hit and file.suffix == ".json"
            damaged = as_json(chance, json.loads(whole)) if parsed else mutated_bytes(chance, whole)
            file.write_bytes(damaged if file == hit and (parsed or chance.random() < 0.2) else whole)
        open_data(data, VOCAB_SIZE, cache, 0).batches(2, 0).batch_at(0)

    return attempt


def tokenizers(folder: Path) -> Try:
    """tokenizer.json and what stands beside it, with the chat template."""
    home = save_tokenizer(folder / "tokenizer")
    rows = write_rows(folder / "rows.jsonl", [{"messages": turns("q", "a")}] * 4)
    (folder / "text.txt").write_text(TEXT)
    files = {path: path.read_bytes() for path in sorted(home.iterdir())}

    def attempt(chance: random.Random) -> None:
        hit = chance.choice(list(files))
        for path, whole in files.items():
            damaged = as_json(chance, json.loads(whole)) if path.suffix == ".json" else mutated_bytes(chance, whole)
            path.write_bytes(damaged if path == hit else whole)
        if chance.random() < 0.5:
            read_data(folder, paths=str(rows), kind="chat", tokenizer=str(home))
        else:
            read_data(folder, paths=str(folder / "text.txt"), tokenizer=str(home))

    return attempt


def hardware_files(folder: Path) -> Try:
    rates = assumed_hardware()
    byte_rate = {"value": rates.read.per_s, "source": "measured", "how": "timed", "date": "2025-01-31", "unit": "B/s"}
    flop_rate = {**byte_rate, "unit": "FLOP/s"}
    host = {
        "memory_bytes": 1 << 34, "limit": "RAM", "cpu_cores": 2, "torch_version": "2", "torch_threads": 2,
        "compute": flop_rate, "update": byte_rate,
    }  # fmt: skip
    drive = {"path": "/mnt", "queue_depth": 8, "request_bytes": 1 << 20, "read": byte_rate, "write": byte_rate}
    whole = {"version": 1, "created": "2025-01-31", "host": host, "drives": [drive], "device": None}

    def attempt(chance: random.Random) -> None:
        (folder / "hardware.json").write_bytes(as_json(chance, whole))
        load_hardware(folder / "hardware.json").hardware()

    return attempt


def snapshots(folder: Path) -> Try:
    """What describes a portable snapshot."""
    whole = {
        "format": 1, "megatrain": "0.1.0", "created": "2025-01-31", "step": 3, "parameters": {"head.weight": [4, 4]},
        "run": {"step": 3}, "identity": {"numerics": {"seed": 0}}, "config": small_llama(),
    }  # fmt: skip

    def attempt(chance: random.Random) -> None:
        (folder / SNAPSHOT_NAME).write_bytes(as_json(chance, whole))
        read_snapshot(folder)

    return attempt


TARGETS: dict[Callable[[Path], Try], int] = {
    manifests: 2400,
    manifests_of_drives: 1600,
    files_of_a_store: 800,
    run_files: 1600,
    model_configs: 300,
    model_files: 500,
    texts: 800,
    chats: 600,
    dataset_infos: 400,
    token_arrays: 600,
    caches: 200,
    tokenizers: 100,
    hardware_files: 400,
    snapshots: 100,
}
"""How many inputs the slow form tries of each: more of what is quick, and of what commits rest on."""


def fault(attempt: Try, seed: int, folder: Path) -> str | None:
    """What is wrong with how one input was taken; None if nothing is."""
    chance = random.Random(seed)
    with WATCH.over(folder.resolve()) as seen:
        try:
            with at_most(MOST_S, MOST_BYTES), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(chance)
        except (UserError, TieringError) as error:
            if not str(error).strip():
                return f"{type(error).__name__} says nothing"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            at = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in at if any(Path(frame.filename).is_relative_to(p) for p in PACKAGES)]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "no file of ours"
            return f"{type(error).__name__} at {where}: {str(error)[:120]!r}"
    return f"outside its folder: {sorted(set(seen))[:3]}" if seen else None


def faults(make: Callable[[Path], Try], count: int, folder: Path) -> dict[str, list[int]]:
    """Every kind of fault with the seeds that show it."""
    attempt = make(folder)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(random.Random(-1))  # unwatched: what is imported on first use is opened where it lies
    only = os.environ.get("FUZZ_SEED")
    found: dict[str, list[int]] = {}
    for seed in [int(only)] if only else range(count):
        what = fault(attempt, seed, folder)
        if what is not None:
            found.setdefault(what, []).append(seed)
    return found


def told(found: dict[str, list[int]]) -> str:
    return "\n".join(f"{len(seeds)} x {what} (seeds {seeds[:3]})" for what, seeds in found.items())


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_no_file_can_do_harm(make: Callable[[Path], Try], tmp_path: Path) -> None:
    """P3, CF-05: a few mutated inputs of each kind."""
    count = {model_configs: 12, tokenizers: 8, caches: 20, chats: 25, model_files: 30}.get(make, 2 * FEW)
    found = faults(make, count, tmp_path)
    assert not found, told(found)


@pytest.mark.parametrize(
    ("make", "seed"),
    [(run_files, 439), (model_configs, 34), (chats, 75), (dataset_infos, 314), (caches, 100), (caches, 178)],
)
def test_what_did_harm_once_does_none_again(make: Callable[[Path], Try], seed: int, tmp_path: Path) -> None:
    """P3, CF-05: deep nesting, layers without end, half of a surrogate pair, a header of tokens with odd types."""
    attempt = make(tmp_path)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(random.Random(-1))  # as in `faults`
    what = fault(attempt, seed, tmp_path)
    assert what is None, f"seed {seed}: {what}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_none_of_many_files_can_do_harm(make: Callable[[Path], Try], tmp_path: Path) -> None:
    """P3, CF-05: `MANY` of them in all."""
    assert sum(TARGETS.values()) >= MANY - FEW
    found = faults(make, TARGETS[make], tmp_path)
    assert not found, told(found)


# --- No pickle -------------------------------------------------------------------------------------------------------

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_nothing_in_the_packages_can_read_a_pickle(package: Path) -> None:
    """P3: no module that unpickles is imported, `torch.load` is never named, numpy is never allowed to."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            at = f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                wrong += [f"{at} import {a.name}" for a in node.names if a.name.partition(".")[0] in PICKLES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
                wrong.append(f"{at} from {node.module}")
            elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in ("torch", "th"):
                wrong.append(f"{at} torch.load")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{at} allow_pickle={ast.unparse(node.value)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                wrong += [f"{at} np.load"] * ("allow_pickle" not in [k.arg for k in node.keywords])
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("known_machine")
def test_a_run_reads_no_pickle_and_stays_in_its_folders(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: a whole run and its resume, with every open, change, connection and process of Python watched."""
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)

    def trained(name: str, steps: int, resume: bool) -> None:
        where = {"tiers.nvme": str(tmp_path / name / "nvme"), "output.dir": str(tmp_path / name)}
        changes = {"train.steps": steps, "tiers.host_memory": "1MiB", "tiers.engine": "posix"}
        assert train(load_run(run_file({**where, **changes})), resume=resume, console=Console(quiet=True)) == 0

    trained("first", 1, False)  # unwatched: what is imported on first use is opened where it lies
    with WATCH.over(tmp_path) as seen:
        trained("run", 2, False)
        trained("run", 4, True)
    assert not seen, "\n".join(sorted(set(seen)))


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    """A test of the tests: a read and a write outside, a rename, a pickle, a process."""
    import pickle
    import subprocess

    outside = tmp_path / "outside"
    (tmp_path / "inside").mkdir()
    outside.write_text("x")
    data = pickle.dumps(Path("x"))
    with WATCH.over(tmp_path / "inside") as seen:
        outside.read_text()
        outside.write_text("y")
        outside.rename(tmp_path / "moved")
        pickle.loads(data)  # noqa: S301
        subprocess.run(["true"])
    for part in (f"open of {outside}", "for writing", "os.rename", "pickle.find_class", "subprocess.Popen"):
        assert any(part in one for one in seen), f"{part} was not seen: {seen}"
