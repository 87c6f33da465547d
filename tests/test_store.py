"""The store on disk: laid out as plain Zarr, all room reserved, opened without a trace, owned by one process.

Scope: `tiering/store.py` (create, open, layout), `tiering/zarr_layout.py`, `tiering/lock.py`, `tiering/manifest.py`.
Not here: slots and commits (`test_commit.py`), where a store may be (`test_place.py`).
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from store_bytes import (
    IDENTITY,
    KINDS,
    PAGE,
    block,
    blocks,
    content,
    get_all,
    listing,
    put_all,
    seen_by_zarr,
    sync,
    unlike,
)

from tiering.errors import (
    DamagedStateError,
    DiskFullError,
    IOFailedError,
    PlaceError,
    StoreLockedError,
    WrongStateError,
)
from tiering.store import BlockStore, StoredBlock, TensorSpec, has_state

REPOSITORY = Path(__file__).parents[1]


def committed(root: Path, value: int = 1) -> dict[str, bytes]:
    """A closed store with one commit of step `value`."""
    with BlockStore.create(root, blocks(), identity=IDENTITY) as store:
        wanted = content(store, value)
        put_all(store, wanted)
        store.commit(value, {"cursor": 7}, sync)
    return wanted


def test_all_room_is_taken_at_creation(tmp_path: Path) -> None:
    """IO-09: the bytes on disk are at least those of the plan, although nothing was written yet."""
    planned = [*blocks(), block("head", "grad", 2, scratch=True)]
    with BlockStore.create(tmp_path / "nvme", planned, identity=IDENTITY) as store:
        taken = sum(os.stat(Path(f) / n).st_blocks * 512 for f, _, ns in os.walk(store.root / ".slots") for n in ns)
        wanted = BlockStore.nbytes_on_disk(planned)
        assert wanted == 2 * sum(b.nbytes for b in blocks()) + 2 * PAGE
        assert taken >= wanted, f"{taken} bytes are reserved, {wanted} are planned"
        assert set(get_all(store).values()) == {bytes(3 * PAGE), bytes(4 * PAGE)}, "a new store is not zeros"


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-06: by arithmetic, with bytes wanted and free."""
    monkeypatch.setattr("tiering.place.free_bytes", lambda path: 1000)
    wanted = BlockStore.nbytes_on_disk(blocks())
    with pytest.raises(DiskFullError, match=f"needs {wanted} bytes, 1000 bytes are free"):
        BlockStore.create(tmp_path / "nvme", blocks(), identity=IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_during_creation_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-06: the block is named, what was made is removed, and a second try works."""
    real, calls = os.posix_fallocate, []

    def fill_up(fd: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(DiskFullError, match=r"model\.layers\.0/exp_avg_sq: reserving 12288 bytes"):
        BlockStore.create(tmp_path / "nvme", blocks(), identity=IDENTITY)
    assert listing(tmp_path / "nvme") == {}
    assert not has_state(tmp_path / "nvme")
    BlockStore.create(tmp_path / "nvme", blocks(), identity=IDENTITY).close()


def test_the_layout_is_what_zarr_writes(tmp_path: Path) -> None:
    """The metadata equals zarr's own for the same arrays, and holds the tensors."""
    with BlockStore.create(tmp_path / "nvme", blocks(), identity=IDENTITY):
        pass
    own = zarr.create_group(tmp_path / "own", zarr_format=3).create_array(
        "weight",
        shape=(3 * PAGE // 4,),
        chunks=(3 * PAGE // 4,),
        dtype="<f4",
        fill_value=float("nan"),
        compressors=None,
        filters=None,
        attributes={
            "tensors": [
                {"name": "model.layers.0.w", "shape": [16, 16], "offset": 0},
                {"name": "model.layers.0.b", "shape": [3], "offset": 256},
            ]
        },
    )
    wanted = json.loads((tmp_path / "own" / "weight" / "zarr.json").read_text())
    found = json.loads((tmp_path / "nvme" / "model.layers.0" / "weight" / "zarr.json").read_text())
    assert found == wanted, f"\n{found}\n{wanted}"
    group = zarr.open_group(tmp_path / "nvme", mode="r")
    assert dict(group.attrs) == {"project": "megatrain", "format": 1}
    assert group["model.layers.0/weight"].metadata.codecs == own.metadata.codecs  # type: ignore[union-attr]
    with pytest.warns(zarr.errors.ZarrUserWarning, match="not recognized"):  # our own files beside the groups
        assert sorted(group.group_keys()) == ["model.layers.0", "model.layers.1"]


def test_tensorstore_reads_the_committed_bytes(tmp_path: Path) -> None:
    """IO-10: another reader, which treats a lost chunk as an error when asked to."""
    ts = pytest.importorskip("tensorstore")
    wanted = committed(tmp_path / "nvme")
    name = "model.layers.1/weight"
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(tmp_path / "nvme" / name)},
        "fill_missing_data_reads": False,
    }
    assert np.asarray(ts.open(spec).result().read().result()).tobytes() == wanted[name]
    (tmp_path / "nvme" / name / "c" / "0").unlink()
    with pytest.raises(ValueError, match="missing"):
        ts.open(spec).result().read().result()


def test_opening_leaves_no_trace(tmp_path: Path) -> None:
    """I9: names, sizes and times are the same before and after, for every way to open."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    before = listing(root)
    for read_only in (False, True):
        with BlockStore.open(root, expect={"seed": 0}, read_only=read_only) as store:
            assert (store.step, dict(store.run), dict(store.identity)) == (1, {"cursor": 7}, dict(IDENTITY))
            assert list(store.blocks.values()) == blocks()
            assert unlike(wanted, get_all(store)) == []
    with pytest.raises(WrongStateError):
        BlockStore.open(root, expect={"seed": 1})
    with pytest.raises(WrongStateError):
        BlockStore.open(tmp_path / "elsewhere")
    assert listing(root) == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"optimizer": {"lr": 3e-4}}, "optimizer.lr: wanted 0.0003, found 0.001"),
        ({"model": {"hidden": 8, "layers": 2, "heads": 4}}, "model.heads: wanted 4, found 'nothing'"),
        ({"model": {"hidden": 8}}, "model.layers: wanted 'nothing', found 2"),
        ({"seed": False}, "seed: wanted False, found 0"),
        ({"data": "x"}, "data: wanted 'x', found 'nothing'"),
    ],
)
def test_another_runs_state_is_refused_by_the_name_of_the_item(tmp_path: Path, expect: dict, said: str) -> None:
    """P3: a resume never goes on with another model's or plan's numbers."""
    committed(tmp_path / "nvme")
    with pytest.raises(WrongStateError) as raised:
        BlockStore.open(tmp_path / "nvme", expect=expect)
    assert said in str(raised.value)


@pytest.mark.parametrize("change", ["missing", "short", "long"])
@pytest.mark.parametrize("slot", ["a", "b"])
def test_a_damaged_slot_file_is_refused_by_name(tmp_path: Path, change: str, slot: str) -> None:
    """IO-12: block, file, step, bytes wanted and found; resuming from an earlier commit is offered, a retry is not."""
    root = tmp_path / "nvme"
    committed(root)
    path = root / ".slots" / slot / "model.layers.1" / "exp_avg"
    found = {"missing": 0, "short": 1000, "long": 5 * PAGE}[change]
    if change == "missing":
        path.unlink()
    else:
        os.truncate(path, found)
    before = listing(root)
    with pytest.raises(DamagedStateError) as raised:
        BlockStore.open(root)
    for part in (
        "model.layers.1/exp_avg",
        str(path),
        "step 1",
        f"wanted {4 * PAGE} bytes, found {found}",
        "earlier commit",
    ):
        assert part in str(raised.value), f"{part!r} is not in {raised.value}"
    assert listing(root) == before
    if slot == "a":  # the first commit is in b: whoever only reads needs no spare slot
        BlockStore.open(root, read_only=True).close()


def test_a_lost_chunk_shows_as_nan_through_zarr_and_is_refused_here(tmp_path: Path) -> None:
    """IO-10: zarr fills a lost chunk; NaN cannot pass for a fresh moment. We refuse to open."""
    root = tmp_path / "nvme"
    committed(root)
    (root / ".slots" / "b" / "model.layers.0" / "weight").unlink()
    values = np.frombuffer(seen_by_zarr(root, ["model.layers.0/weight"])["model.layers.0/weight"], np.float32)
    assert np.isnan(values).all(), f"a lost chunk reads as {values[:4]}"
    with pytest.raises(DamagedStateError, match=r"model\.layers\.0/weight.* is missing"):
        BlockStore.open(root, read_only=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": "1"}',
        "\xff",
        "[" * 100_000,
    ],
)
def test_a_torn_manifest_is_damage(tmp_path: Path, text: str) -> None:
    """IO-23: never a traceback, never a guess."""
    committed(tmp_path / "nvme")
    (tmp_path / "nvme" / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedStateError, match=r"manifest\.json is damaged"):
        BlockStore.open(tmp_path / "nvme")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unit", ".."),
        ("unit", "../../etc"),
        ("unit", "/etc"),
        ("unit", ".slots"),
        ("unit", ""),
        ("unit", "a..b"),
        ("unit", "manifest.json"),
        ("unit", "zarr.json"),
        ("kind", "../weight"),
        ("kind", "Weight"),
        ("slot", "../a"),
        ("slot", "c"),
        ("nbytes", 4095),
        ("nbytes", 0),
        ("nbytes", "4096"),
        ("tensors", [{"name": "w", "shape": [9999], "offset": 0}]),
        ("path", "/etc"),
    ],
)
def test_a_manifest_cannot_name_a_path_or_nonsense(tmp_path: Path, key: str, value: object) -> None:
    """P3: what a manifest says is checked before any file is looked at."""
    path = tmp_path / "nvme" / "manifest.json"
    committed(tmp_path / "nvme")
    manifest = json.loads(path.read_text())
    manifest["blocks"][0][key] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedStateError, match="blocks"):
        BlockStore.open(tmp_path / "nvme")


def test_a_newer_format_is_not_called_damage(tmp_path: Path) -> None:
    committed(tmp_path / "nvme")
    path = tmp_path / "nvme" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(WrongStateError, match="format 3"):
        BlockStore.open(tmp_path / "nvme")


@pytest.mark.parametrize(
    "wrong",
    [
        StoredBlock(name="../weight", unit="..", kind="weight", nbytes=PAGE),
        StoredBlock(name="a/b/weight", unit="a/b", kind="weight", nbytes=PAGE),
        StoredBlock(name="b/weight", unit="a", kind="weight", nbytes=PAGE),
        StoredBlock(name="a/weight", unit="a", kind="weight", nbytes=PAGE + 1),
        StoredBlock(
            name="a/weight",
            unit="a",
            kind="weight",
            nbytes=PAGE,
            tensors=(TensorSpec(name="w", shape=(32, 33), offset=0),),
        ),
    ],
)
def test_blocks_that_are_no_blocks_are_refused(tmp_path: Path, wrong: StoredBlock) -> None:
    """I6: one path component each, whole pages, tensors inside."""
    with pytest.raises(ValueError, match=r"unit|must be named|multiple|ends at byte"):
        BlockStore.create(tmp_path / "nvme", [wrong], identity={})
    assert list(tmp_path.iterdir()) == []


def test_creation_never_touches_a_folder_with_content(tmp_path: Path) -> None:
    """I9: an earlier run, or anything else, is not overwritten; the message tells which it is."""
    committed(tmp_path / "run")
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "run", half, symlinks=True)
    (half / "manifest.json").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    before = listing(tmp_path)
    for name, said in (("run", "already holds a store"), ("half", "interrupted"), ("mine", r"letter\.txt")):
        with pytest.raises(PlaceError, match=said):
            BlockStore.create(tmp_path / name, blocks(), identity=IDENTITY)
    with pytest.raises(WrongStateError, match="interrupted"):
        BlockStore.open(half)
    assert listing(tmp_path) == before
    assert [has_state(tmp_path / name) for name in ("run", "half", "mine", "no")] == [True, False, False, False]


def test_scratch_is_on_disk_but_in_no_commit(tmp_path: Path) -> None:
    """Scratch blocks have one slot, are in neither manifest nor hierarchy, and are made anew for a resumed run."""
    root, scratch = tmp_path / "nvme", block("head", "grad", 2, scratch=True)
    with BlockStore.create(root, [*blocks(), scratch], identity=IDENTITY) as store:
        ((written, _, _),) = store.write_extents("head/grad", 0, PAGE)
        ((read, _, _),) = store.read_extents("head/grad", 0, PAGE)
        assert written == read and written.path == root / ".slots" / "scratch" / "head" / "grad"
        store.wrote("head/grad", 0, PAGE)
        store.commit(1, {}, sync)
    assert "head" not in (root / "manifest.json").read_text()
    assert not (root / "head").exists()
    with BlockStore.open(root) as store:
        assert "head/grad" not in store.blocks
        store.add_scratch([block("head", "grad", 3, scratch=True), block("norm", "grad", 1, scratch=True)])
        assert [os.stat(root / ".slots" / "scratch" / u / "grad").st_size for u in ("head", "norm")] == [3 * PAGE, PAGE]


def test_two_owners_are_impossible_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    """IO-14: the second process reads pid and host of the first; after kill -9 the store opens at once."""
    root = tmp_path / "nvme"
    committed(root)
    code = (
        "import sys, time; from pathlib import Path; from tiering.store import BlockStore\n"
        "store = BlockStore.open(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(StoreLockedError, match=rf"in use by host {os.uname().nodename}, pid {owner.pid},"):
            BlockStore.open(root)
        BlockStore.open(root, read_only=True).close()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    with BlockStore.open(root) as store, pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        assert store.step == 1
        BlockStore.open(root)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_lock_that_cannot_be_opened_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """IO-16: a file system that became read-only since: the file is named, and reading still works."""
    wanted = committed(tmp_path / "nvme")
    lock, real = tmp_path / "nvme" / ".lock", os.open

    def refuse(path: object, *rest: int) -> int:
        if path == lock:
            raise OSError(code, os.strerror(code))
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskFullError if code == errno.ENOSPC else IOFailedError, match=rf"^{lock} .*Fix"):
        BlockStore.open(tmp_path / "nvme")
    with BlockStore.open(tmp_path / "nvme", read_only=True) as store:
        assert unlike(wanted, get_all(store)) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """IO-28: one warning, then work goes on."""
    wanted = committed(tmp_path / "nvme")

    def no_lock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.warns(RuntimeWarning, match="no locks") as said, BlockStore.open(tmp_path / "nvme") as store:
        assert unlike(wanted, get_all(store)) == []
    assert len(said) == 1


def test_an_empty_request_touches_nothing(tmp_path: Path) -> None:
    """IO-18: no bytes, no extents; a commit without writes names the same slots."""
    root = tmp_path / "nvme"
    wanted = committed(root)
    with BlockStore.open(root) as store:
        assert store.read_extents("model.layers.0/weight", PAGE, PAGE) == []
        assert store.write_extents("model.layers.0/weight", PAGE, PAGE) == []
        store.wrote("model.layers.0/weight", PAGE, PAGE)
        synced: list[Path] = []
        store.commit(2, {}, synced.extend)
        assert (synced, store.step, unlike(wanted, get_all(store))) == ([], 2, [])


@pytest.mark.slow
def test_a_thousand_blocks_are_created_in_seconds(tmp_path: Path) -> None:
    """Creation is mostly the file system's: 3,000 folders, 2,000 reserved files, 1,300 small ones, all made durable."""
    import time

    many = [block(f"model.layers.{i}", kind, 1) for i in range(334) for kind in KINDS]
    start = time.monotonic()
    BlockStore.create(tmp_path / "nvme", many, identity=IDENTITY).close()
    took = time.monotonic() - start
    assert took < 15, f"{took:.1f} s for {len(many)} blocks"
