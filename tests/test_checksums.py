"""A byte that changed on disk is noticed before it is used, and named; checking costs the computing thread nothing.

Scope: `tiering/checksums.py`, comparing in the store, the pipeline, `generate` and `export`; the seal of a manifest.
Not here: reading a whole commit (`test_scrub.py`), power cuts (`test_power_cut.py`).
"""

import json
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from committed_runs import QUIET, run_in, trained, untrained
from conftest import RunFile
from hypothesis import given, settings
from hypothesis import strategies as st
from store_bytes import IDENTITY, PAGE, block, blocks, content, get, get_all, listing, put, put_all, sync, unlike
from toy import MODES, toy_units, toy_workload

from megatrain.export import export
from megatrain.generate import generate
from megatrain.trainer import train
from tiering import checksums, chunk_files
from tiering.checksums import GRAIN_BYTES
from tiering.engine import Extent
from tiering.errors import BudgetError, DamagedStateError, WrongStateError
from tiering.hardware import assumed_hardware
from tiering.manifest import OTHER, read_manifest, seal_of
from tiering.plan import MiB, make_plan
from tiering.posix import PosixEngine
from tiering.schedule import Verb
from tiering.store import BlockStore
from tiering.transfers import REQUEST_BYTES

WEIGHT = "model.layers.0/weight"
GRAIN = 2 * PAGE


@pytest.fixture
def small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grains of two pages, so that small blocks have several of them, the last one shorter."""
    monkeypatch.setattr(checksums, "GRAIN_BYTES", GRAIN)


def committed(root: Path, steps: int = 1, pages: int = 5) -> dict[str, bytes]:
    """A closed store with commits up to `steps`, and its content."""
    with BlockStore.create(root, blocks(pages), identity=IDENTITY) as store:
        for step in range(1, steps + 1):
            wanted = content(store, step)
            put_all(store, wanted)
            store.commit(step, {}, sync)
    return wanted


def flip(path: Path, at: int) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 4]))


def slot_file(root: Path, name: str, *, spare: bool = False) -> Path:
    """The file that holds the committed bytes of a block, or the other one."""
    manifest = json.loads((root / "manifest.json").read_text())
    slot = next(entry["slot"] for entry in manifest["blocks"] if f"{entry['unit']}/{entry['kind']}" == name)
    return root / ".slots" / (OTHER[slot] if spare else slot) / name


def in_file(root: Path) -> dict[str, list[int]]:
    """The checksums of the last commit by block, by what the format says and nothing else."""
    manifest = json.loads((root / "manifest.json").read_text())
    said = manifest["checksums"]
    data = (root / f".checksums.{said['slot']}").read_bytes()
    assert xxhash.xxh3_64_hexdigest(data) == said["checksum"], "the manifest does not fit the file of checksums"
    magic, grain, count, zero = struct.unpack_from("<8sQQQ", data)
    assert (magic, grain, zero, len(data) % PAGE) == (b"xxh3_64\n", said["grain_bytes"], 0, 0)
    values = list(struct.unpack_from(f"<{count}Q", data, 32))
    assert not any(data[32 + 8 * count :]), "the rest of the file is not zeros"
    found = {}
    for entry in manifest["blocks"]:
        own = -(-entry["nbytes"] // grain)
        found[f"{entry['unit']}/{entry['kind']}"], values = values[:own], values[own:]
    assert values == []
    return found


def of_content(wanted: dict[str, bytes], grain: int) -> dict[str, list[int]]:
    return {
        name: [xxhash.xxh3_64_intdigest(data[lo : lo + grain]) for lo in range(0, len(data), grain)]
        for name, data in wanted.items()
    }


def test_the_file_holds_what_the_format_says(tmp_path: Path, small_grains: None) -> None:
    """P3: before the first commit, after commits into both slots, and after one that changed a single block."""
    root = tmp_path / "nvme"
    with BlockStore.create(root, blocks(5), identity=IDENTITY) as store:
        assert in_file(root) == of_content({name: bytes(b.nbytes) for name, b in store.blocks.items()}, GRAIN)
        for step in (1, 2, 3):
            wanted = content(store, step)
            put_all(store, wanted)
            store.commit(step, {}, sync)
            assert in_file(root) == of_content(wanted, GRAIN), f"step {step}"
        wanted[WEIGHT] = content(store, 9)[WEIGHT]
        put(store, WEIGHT, wanted[WEIGHT])
        store.commit(4, {}, sync)
        assert in_file(root) == of_content(wanted, GRAIN)
    assert sorted(path.name for path in root.glob(".checksums.*")) == [".checksums.a", ".checksums.b"]


@pytest.mark.parametrize("at_hand", [True, False])
def test_what_is_written_off_the_grid_has_its_checksums_too(tmp_path: Path, small_grains: None, at_hand: bool) -> None:
    """I6: pages in any order; without their bytes at hand, the commit reads back what was written."""
    root = tmp_path / "nvme"
    committed(root)
    with BlockStore.open(root) as store:
        wanted = content(store, 2)
        for lo in (PAGE, 4 * PAGE, 0, 3 * PAGE, 2 * PAGE):
            put(store, WEIGHT, wanted[WEIGHT][lo : lo + PAGE], lo, at_hand=at_hand)
        store.commit(2, {}, sync)
    assert in_file(root)[WEIGHT] == of_content(wanted, GRAIN)[WEIGHT]


@pytest.mark.parametrize("at", [0, GRAIN - 1, GRAIN, 5 * PAGE - 1])
def test_a_flipped_bit_is_named_when_its_bytes_are_first_read(tmp_path: Path, small_grains: None, at: int) -> None:
    """P3: block, file, offset, bytes, step, tensors, both checksums and what to do."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    path = slot_file(root, WEIGHT)
    flip(path, at)
    grain = at // GRAIN * GRAIN
    with BlockStore.open(root) as store:
        others = {name: get(store, name) for name in store.blocks if name != WEIGHT}
        assert unlike(wanted, others | {WEIGHT: wanted[WEIGHT]}) == []
        with pytest.raises(DamagedStateError) as raised:
            get(store, WEIGHT)
    size = min(GRAIN, 5 * PAGE - grain)
    before, after = of_content(wanted, GRAIN)[WEIGHT], of_content({WEIGHT: path.read_bytes()}, GRAIN)[WEIGHT]
    number = grain // GRAIN
    for part in (
        f"block {WEIGHT}: {path} at offset {grain}: {size} bytes of step 1",
        f"their checksum is {after[number]:016x}, {before[number]:016x} was written",
        "They hold model.layers.0.w, model.layers.0.b." if grain == 0 else "They hold no tensor.",
        "earlier commit",
    ):
        assert part in str(raised.value), f"{part!r} is not in {raised.value}"


def test_a_part_of_a_grain_is_compared_as_a_whole_one(tmp_path: Path, small_grains: None) -> None:
    """P3: whoever reads a page only is told of damage beside it, too."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    flip(slot_file(root, WEIGHT), GRAIN - 1)
    with BlockStore.open(root, read_only=True) as store:
        with pytest.raises(DamagedStateError, match=rf"{WEIGHT}: .* at offset 0: {GRAIN} bytes"):
            store.compare(WEIGHT, 0, wanted[WEIGHT][:PAGE])
        store.compare(WEIGHT, 2 * PAGE, wanted[WEIGHT][2 * PAGE : 3 * PAGE])


def test_writing_beside_damage_does_not_bless_it(tmp_path: Path, small_grains: None) -> None:
    """P3: what the commit holds of a grain is compared before a part of that grain is written anew."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    flip(slot_file(root, WEIGHT), GRAIN - 1)
    with BlockStore.open(root) as store, pytest.raises(DamagedStateError, match="at offset 0"):
        put(store, WEIGHT, wanted[WEIGHT][:PAGE])


def test_bytes_are_compared_once(tmp_path: Path, small_grains: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first read, and after a write, reading costs no checksum."""
    root = tmp_path / "nvme"
    committed(root)
    made: list[int] = []
    real = checksums.checksum
    with BlockStore.open(root) as store:
        put(store, "model.layers.1/weight", content(store, 2)["model.layers.1/weight"])
        monkeypatch.setattr(checksums, "checksum", lambda data: (made.append(len(data)), real(data))[1])
        get_all(store)
        first = len(made)
        get_all(store)
    assert first == sum(-(-b.nbytes // GRAIN) for name, b in store.blocks.items() if name != "model.layers.1/weight")
    assert len(made) == first, f"{len(made) - first} checksums were made again"


def test_the_spare_slot_is_never_compared(tmp_path: Path, small_grains: None) -> None:
    """P3: what no commit names can hold anything."""
    root = tmp_path / "nvme"
    wanted = committed(root, steps=2)
    for name in wanted:
        flip(slot_file(root, name, spare=True), 0)
    with BlockStore.open(root) as store:
        assert unlike(wanted, get_all(store)) == []
        put_all(store, content(store, 3))
        store.commit(3, {}, sync)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "wanted 4096 bytes, found 4088"),
        (lambda path: flip(path, 0), "is damaged: its checksum is"),
        (lambda path: flip(path, 40), "is damaged: its checksum is"),
        (lambda path: flip(path, 4095), "is damaged: its checksum is"),
    ],
)
def test_a_damaged_file_of_checksums_is_named(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    """P3: never taken for damage of the blocks."""
    root = tmp_path / "nvme"
    committed(root)
    change(root / f".checksums.{json.loads((root / 'manifest.json').read_text())['checksums']['slot']}")
    for read_only in (True, False):
        with pytest.raises(DamagedStateError, match=rf"checksum file .*\.checksums\.. of step 1 .*{said}"):
            BlockStore.open(root, read_only=read_only)


def test_a_lost_spare_file_of_checksums_is_noticed_when_opened_for_a_run(tmp_path: Path) -> None:
    """IO-06: a commit finds its room reserved; a reader does not need it."""
    root = tmp_path / "nvme"
    committed(root)
    spare = OTHER[json.loads((root / "manifest.json").read_text())["checksums"]["slot"]]
    (root / f".checksums.{spare}").unlink()
    BlockStore.open(root, read_only=True).close()
    with pytest.raises(DamagedStateError, match=rf"\.checksums\.{spare} .* is missing"):
        BlockStore.open(root)


def test_every_character_of_a_manifest_is_sealed(tmp_path: Path) -> None:
    """P3: a flipped bit in any byte is a typed error, or changes nothing that is said."""
    root = tmp_path / "nvme"
    committed(root)
    path = root / "manifest.json"
    text = path.read_bytes()
    harmless = []
    for at in range(len(text)):
        path.write_bytes(text[:at] + bytes([text[at] ^ (1, 4, 64)[at % 3]]) + text[at + 1 :])
        try:
            BlockStore.open(root, read_only=True).close()
        except (DamagedStateError, WrongStateError):
            continue
        harmless.append(at)
        assert json.loads(path.read_bytes()) == json.loads(text), f"byte {at}: {path.read_bytes()[at:]!r}"
    assert len(harmless) < len(text) // 10, "hardly anything was noticed"


def test_a_store_of_an_earlier_version_still_opens(tmp_path: Path) -> None:
    """Its manifest has neither checksums nor a seal; it goes on without checksums."""
    root = tmp_path / "nvme"
    BlockStore.create(root, blocks(), identity=IDENTITY, checksums=False).close()
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    assert "checksums" not in manifest and list(root.glob(".checksums.*")) == []
    del manifest["seal"]
    path.write_text(json.dumps(manifest))
    with BlockStore.open(root, expect=IDENTITY) as store:
        wanted = content(store, 1)
        put_all(store, wanted)
        store.commit(1, {}, sync)
    flip(slot_file(root, WEIGHT), 0)
    before = listing(root)
    with BlockStore.open(root, read_only=True) as store:
        assert [text.partition(":")[0] for text in unlike(wanted, get_all(store))] == [WEIGHT]
    assert listing(root) == before


def test_a_manifest_with_checksums_needs_its_seal(tmp_path: Path) -> None:
    """P3: the seal cannot be lost without being missed."""
    root = tmp_path / "nvme"
    committed(root)
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["seal"] == seal_of(manifest)
    del manifest["seal"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedStateError, match="its seal is None"):
        BlockStore.open(root)


def test_a_reader_that_is_overtaken_is_told_so(tmp_path: Path, small_grains: None) -> None:
    """P3: bytes that a later step overwrites are not called damage."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    with BlockStore.open(root) as store, BlockStore.open(root, read_only=True) as reader:
        put_all(store, content(store, 2))
        assert get(reader, WEIGHT) == wanted[WEIGHT], "what is not committed disturbs a reader"
        store.commit(2, {}, sync)
        put_all(store, content(store, 3))
        with pytest.raises(WrongStateError, match="its run committed step 2 while step 1 was being read"):
            get(reader, "model.layers.1/weight")


def test_grains_that_lie_in_two_chunks_are_compared(
    tmp_path: Path, small_grains: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several drives: chunks and grains need not fit; both files are named."""
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", PAGE)
    folders = [tmp_path / "first", tmp_path / "second"]
    with BlockStore.create(folders[0], [block("L0", "weight", 5)], identity={}, others=folders[1:]) as store:
        wanted = content(store, 1)
        put_all(store, wanted)
        store.commit(1, {}, sync)
    chunks = sorted(path for folder in folders for path in folder.glob(".slots/b/L0/weight.[01]"))
    flip(chunks[1], 17)
    with BlockStore.open(folders[0], others=folders[1:]) as store, pytest.raises(DamagedStateError) as raised:
        get(store, "L0/weight")
    for path in chunks:
        assert f"{path} at offset 0" in str(raised.value), raised.value


@st.composite
def _units(draw: st.DrawFn) -> Any:
    layer = draw(st.sampled_from([PAGE, 5 * PAGE, MiB // 4 + PAGE, MiB, MiB + 7 * PAGE, 5 * MiB + PAGE]))
    embedding = min(draw(st.integers(1, 20)) * layer, 40 * MiB)
    return toy_units(draw(st.integers(1, 3)), layer, embedding // PAGE * PAGE, tied=draw(st.booleans()))


@given(_units(), st.sampled_from(MODES), st.sampled_from([None, 0.0, 0.3, 0.7]), st.floats(0.05, 1.2))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_every_request_of_a_plan_is_on_the_grid(units: Any, mode: str, resident: float | None, share: float) -> None:
    """A checksum never needs more bytes than a request has: begin and end of each are on a grain or a block's end."""
    workload = toy_workload(units, mode)
    total = sum(b.nbytes for b in workload.blocks.values())
    try:
        plan = make_plan(workload, assumed_hardware(), round(share * total) + MiB, resident)
    except BudgetError:
        return
    durable = {b.name: b.nbytes for b in workload.of_life("durable")}
    for schedule in [*plan.schedules.values(), plan.load, plan.save]:
        for action in [*schedule.actions, *schedule.lead_in]:
            if action.verb not in (Verb.READ, Verb.WRITE) or action.operands[0].block not in durable:
                continue
            (x,) = action.operands
            assert x.lo % GRAIN_BYTES == 0, f"{action.name} starts off the grid"
            assert x.hi % GRAIN_BYTES == 0 or x.hi == durable[x.block], f"{action.name} ends off the grid"
    assert REQUEST_BYTES % GRAIN_BYTES == chunk_files.CHUNK_BYTES % GRAIN_BYTES == 0


@pytest.mark.parametrize("resident", [0, 1], ids=["streamed", "resident"])
def test_a_run_makes_checksums_right_after_updates_of_what_they_write(
    run_file: RunFile, known_machine: None, monkeypatch: pytest.MonkeyPatch, resident: float
) -> None:
    """P4: while the cache has the bytes; a step makes none of what it does not write. What a run wrote has checksums of
    its bytes.
    """
    memory = {"tiers.resident": resident, "tiers.host_memory": "64MiB" if resident else "8MiB"}
    run_dir = untrained(run_file, memory)
    made: Counter[str] = Counter()
    steady = threading.Event()
    real_sum = checksums.checksum

    def noted(data: Any) -> int:
        if steady.is_set():
            made[threading.current_thread().name] += len(data)
        return real_sum(data)

    import megatrain.engine

    real_step = megatrain.engine.StepEngine.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.updates > 0:  # the first step compares what it reads
            steady.set()
        try:
            return real_step(self, *args, **kwargs)
        finally:
            self.manager.pipeline.drain()
            steady.clear()

    monkeypatch.setattr(checksums, "checksum", noted)
    monkeypatch.setattr(megatrain.engine.StepEngine, "step", step)
    run = run_in(run_dir)
    assert train(run, resume=True, console=QUIET) == 0
    durable = sum(entry.nbytes for entry in read_manifest(run.tiers.nvme[0]).blocks)
    wanted = {} if resident else {"MainThread": (run.train.steps - 1) * durable}
    assert made == wanted, f"bytes summed by threads: {made}, wanted {wanted}"
    root = run.tiers.nvme[0]
    files = {
        str(path.parent.parent.relative_to(root)): path.read_bytes() for path in root.glob("*/*/c/0") if path.is_file()
    }
    assert in_file(root) == of_content(files, GRAIN_BYTES)


def test_a_byte_that_changes_between_an_update_and_its_write_is_noticed(
    run_file: RunFile, known_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: the checksum is of what the update made, not of what lay in memory later."""
    run_dir = untrained(run_file, {"tiers.resident": 0, "tiers.host_memory": "8MiB", "train.steps": 1})
    real_write = PosixEngine.submit_write
    flipped: list[str] = []

    def write(self: PosixEngine, extent: Extent, view: Any) -> Any:
        if extent.block == "model.layers.1/exp_avg" and not flipped:
            flipped.append(extent.block)
            view[100] ^= 1
        return real_write(self, extent, view)

    run = run_in(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(PosixEngine, "submit_write", write)
        assert train(run, resume=True, console=QUIET) == 0 and flipped
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 2})})
    with pytest.raises(DamagedStateError, match=r"block model\.layers\.1/exp_avg"):
        train(longer, resume=True, console=QUIET)


@pytest.mark.parametrize("resident", [0, 1], ids=["streamed", "resident"])
def test_no_command_uses_a_damaged_byte(
    run_file: RunFile, known_machine: None, tmp_path: Path, resident: float
) -> None:
    """P3: `train --resume`, `generate` and `export` stop, and name block, file and tensor; nothing is committed."""
    memory = {"tiers.resident": resident, "tiers.host_memory": "64MiB" if resident else "8MiB"}
    run_dir = trained(run_file, memory)
    run = run_in(run_dir)
    root = run.tiers.nvme[0]
    name = "model.layers.1/weight"
    path = slot_file(root, name)
    flip(path, 100)
    said = rf"block {name}: {path} at offset 0: .* of step 4 are damaged.*They hold .*layers\.1\."
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 6})})
    before = (root / "manifest.json").read_bytes()
    with pytest.raises(DamagedStateError, match=said):
        train(longer, resume=True, console=QUIET)
    with pytest.raises(DamagedStateError, match=said):
        generate(run_dir, "line", max_new_tokens=1, temperature=0, seed=0, console=QUIET)
    with pytest.raises(DamagedStateError, match=said):
        export(run_dir, tmp_path / "model", dtype="float32", max_shard_bytes=1 << 30, force=False, console=QUIET)
    assert not (tmp_path / "model").exists()
    assert (root / "manifest.json").read_bytes() == before
    assert DamagedStateError.exit_code == 3
