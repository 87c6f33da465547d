"""A store on several drives keeps every promise of one on one drive, and misses none of its drives in silence.

Scope: layout, opening, refusals, room and commits over two and three folders; `tiering/drives.py`, `chunk_files.py`.
Not here: which drive a chunk is on (`test_spread.py`), random sequences of calls (`test_store_machine.py`), whole runs
(`test_drives_run.py`).
"""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from store_bytes import (
    IDENTITY,
    KINDS,
    PAGE,
    block,
    content,
    get_all,
    listing,
    put_all,
    seen_by_zarr,
    sync,
    unlike,
)

from tiering import chunk_files, place
from tiering.drives import MARKER_NAME, root_first, state_root
from tiering.errors import (
    DamagedStateError,
    DiskFullError,
    IOFailedError,
    PlaceError,
    StoreLockedError,
    WrongStateError,
)
from tiering.manifest import seal_of
from tiering.store import BlockStore, StoredBlock

CHUNK = 2 * PAGE
RATES = (2.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages, so that small blocks have several of them, and the last one is used in part."""
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", CHUNK)


def blocks() -> list[StoredBlock]:
    """Two units of 9 and 6 pages, and one that stays whole."""
    return [block(unit, kind, pages) for unit, pages in (("L0", 9), ("L1", 6), ("norm", 1)) for kind in KINDS]


def folders(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"drive{number}" / "run" for number in range(count)]


def create(places: list[Path]) -> BlockStore:
    return BlockStore.create(places[0], blocks(), identity=IDENTITY, others=places[1:], rates=RATES[: len(places)])


def committed(places: list[Path], step: int = 1) -> dict[str, bytes]:
    """A closed store with commits up to `step`, and its content."""
    with create(places) as store:
        for number in range(1, step + 1):
            wanted = content(store, number)
            put_all(store, wanted)
            store.commit(number, {"cursor": number}, sync)
    return wanted


def reopened(places: list[Path], *, read_only: bool = False) -> BlockStore:
    return BlockStore.open(places[0], others=places[1:], read_only=read_only)


@pytest.mark.parametrize("count", [2, 3])
def test_readers_find_one_array_a_block_whatever_drives_it_is_on(tmp_path: Path, count: int) -> None:
    """P3, IO-10: zarr and tensorstore read the committed bytes, after commits into both slots."""
    ts = pytest.importorskip("tensorstore")
    places = folders(tmp_path, count)
    with create(places) as store:
        for step in (1, 2, 3):
            wanted = content(store, step)
            put_all(store, wanted)
            store.commit(step, {}, sync)
            put_all(store, content(store, 100))
            assert unlike(wanted, seen_by_zarr(places[0], wanted)) == []
    for name, data in wanted.items():
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(places[0] / name)},
            "fill_missing_data_reads": False,
        }
        found = np.asarray(ts.open(spec).result().read().result()).tobytes()
        assert found == data, f"{name}: tensorstore reads {found[:8].hex()}, committed is {data[:8].hex()}"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_folder_takes_the_room_that_was_counted(tmp_path: Path, count: int) -> None:
    """IO-09: on each drive, whole chunk files; uneven drives hold uneven shares."""
    places = folders(tmp_path, count)
    scratch = block("head", "grad", 8, scratch=True)
    wanted = BlockStore.room(places, RATES[:count], [*blocks(), scratch])
    with BlockStore.create(
        places[0], [*blocks(), scratch], identity=IDENTITY, others=places[1:], rates=RATES[:count]
    ) as store:
        found = {
            place: sum(path.stat().st_size for path in (place / ".slots").rglob("*") if path.is_file())
            for place in places
        }
        assert found == wanted and store.folders == tuple(places)
        assert set(get_all(store).values()) == {bytes(9 * PAGE), bytes(6 * PAGE), bytes(PAGE)}, "not all zeros"
    if count == 1:
        assert wanted == {places[0]: BlockStore.nbytes_on_disk([*blocks(), scratch])}
    else:
        assert min(wanted.values()) > 0 and wanted[places[0]] > 1.5 * wanted[places[1]], wanted


def test_one_drive_has_the_layout_of_ever(tmp_path: Path) -> None:
    """Nothing of a store on one drive tells that there could be more."""
    (root,) = folders(tmp_path, 1)
    committed([root])
    manifest = json.loads((root / "manifest.json").read_text())
    known = ["blocks", "checksums", "created", "format", "identity", "run", "seal", "step", "updated"]
    assert sorted(manifest) == known
    assert manifest["format"] == 1
    assert {tuple(sorted(entry)) for entry in manifest["blocks"]} == {("kind", "nbytes", "slot", "tensors", "unit")}
    assert os.readlink(root / "L0/weight/c/0") == "../../../.slots/b/L0/weight"
    assert [path.name for path in (root / "L0/weight/c").iterdir()] == ["0"]


def test_opening_leaves_no_trace_on_any_drive(tmp_path: Path) -> None:
    """I9: and the drives may be given in any order."""
    places = folders(tmp_path, 3)
    wanted = committed(places)
    before = listing(tmp_path)
    for order in (places, [places[0], places[2], places[1]]):
        for read_only in (False, True):
            with reopened(order, read_only=read_only) as store:
                assert (store.step, store.folders) == (1, tuple(places))
                assert unlike(wanted, get_all(store)) == []
    assert listing(tmp_path) == before
    turned = [places[2], places[0], places[1]]
    assert (state_root(turned), root_first(turned)) == (places[0], [places[0], places[2], places[1]])
    assert state_root(places[1:]) is None and root_first([tmp_path / "new"]) == [tmp_path / "new"]
    with pytest.raises(WrongStateError, match=rf"drive 0 .*{places[1]} is its drive 1, its root was {places[0]}"):
        root_first([tmp_path / "new", *places[1:]])


def test_the_spread_is_decided_once(tmp_path: Path) -> None:
    """A store keeps its chunks where they are, also when larger chunks are the rule later."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_files, "CHUNK_BYTES", 4 * CHUNK)
        with reopened(places) as store:
            assert unlike(wanted, get_all(store)) == []
            store.add_scratch([block("head", "grad", 20, scratch=True)])
            found = [extent.nbytes for extent, _, _ in store.write_extents("head/grad", 0, 20 * PAGE)]
            assert found == [4 * CHUNK, 4 * CHUNK, 4 * PAGE]
            newer = content(store, 5)
            put_all(store, newer)
            store.commit(5, {}, sync)
    assert unlike(newer, seen_by_zarr(places[0], newer)) == []
    with reopened(places) as store:
        assert (store.step, unlike(newer, get_all(store))) == (5, [])


def test_extents_are_cut_where_the_chunk_or_the_slot_changes(tmp_path: Path) -> None:
    """I2, I6: in the order of the bytes, each inside one file."""
    places = folders(tmp_path, 2)
    committed(places)
    with reopened(places) as store:
        for extent, lo, hi in store.write_extents("L0/weight", PAGE, 3 * PAGE):
            assert extent.nbytes == hi - lo == PAGE
            store.wrote("L0/weight", lo, hi)
        found = [(e.path.name, e.path.parts[-3], e.offset, lo, hi) for e, lo, hi in
                 store.read_extents("L0/weight", 0, 5 * PAGE)]  # fmt: skip
        assert found == [
            ("weight.0", "b", 0, 0, PAGE),
            ("weight.0", "a", PAGE, PAGE, 2 * PAGE),
            ("weight.1", "a", 0, 2 * PAGE, 3 * PAGE),
            ("weight.1", "b", PAGE, 3 * PAGE, 4 * PAGE),
            ("weight.2", "b", 0, 4 * PAGE, 5 * PAGE),
        ]


def test_a_missing_drive_is_named_with_its_path_and_what_it_holds(tmp_path: Path) -> None:
    """P3: exit code 2, nothing is touched; left out, not mounted, of another store, and as a store of its own."""
    places = folders(tmp_path, 3)
    committed(places)
    other = [tmp_path / "other" / str(number) for number in range(2)]
    committed(other)
    shutil.move(places[2], tmp_path / "away")
    places[2].mkdir()  # a mount point with nothing mounted on it
    before = listing(tmp_path)
    for given, said in (
        (places[1:2], ""),
        (places[1:], rf"{places[2]} has no drive\.json"),
        ([places[1], tmp_path / "nowhere"], "nowhere is not there"),
        ([places[1], other[1]], rf"{other[1]} is of another store"),
        ([places[1], other[0]], rf"{other[0]} holds a store of its own"),
    ):
        with pytest.raises(
            WrongStateError, match=rf"(?s)drive 2 of .*was {places[2]}, and \d of 9 blocks.*{said}"
        ) as raised:
            BlockStore.open(places[0], others=given)
        assert raised.value.exit_code == 2
    assert listing(tmp_path) == before


def test_a_drive_at_another_place_is_found_by_its_marker(tmp_path: Path) -> None:
    """P3: links that zarr follows are pointed there, as after a crash; a reader changes nothing."""
    places = folders(tmp_path, 3)
    wanted = committed(places)
    for number in (1, 2):
        shutil.move(places[number], tmp_path / f"mnt{number}")
    moved = [places[0], tmp_path / "mnt2", tmp_path / "mnt1"]
    before = listing(tmp_path)
    with reopened(moved, read_only=True) as store:
        assert unlike(wanted, get_all(store)) == []
    assert listing(tmp_path) == before
    with reopened(moved) as store:
        assert unlike(wanted, get_all(store)) == []
        assert unlike(wanted, seen_by_zarr(places[0], wanted)) == []


@pytest.mark.parametrize("read_only", [False, True], ids=["run", "reader"])
def test_a_copy_of_the_root_alone_is_refused_by_the_name_of_the_first(tmp_path: Path, read_only: bool) -> None:
    """P3: two runs would write the same chunks. Nothing is changed; once the first is gone, the copy is the store."""
    places = folders(tmp_path, 3)
    wanted = committed(places)
    copy = tmp_path / "copy"
    shutil.copytree(places[0], copy, symlinks=True)
    before = listing(tmp_path)
    said = rf"{copy} and {places[0]} are roots of one store, and {places[1]}, its drive 1, belongs to {places[0]}.*Fix"
    with pytest.raises(WrongStateError, match=said) as raised:
        reopened([copy, *places[1:]], read_only=read_only)
    assert raised.value.exit_code == 2
    assert listing(tmp_path) == before
    reopened(places).close()
    shutil.rmtree(places[0])
    with reopened([copy, *places[1:]], read_only=read_only) as store:
        assert unlike(wanted, get_all(store)) == []


def test_the_root_that_a_drive_was_last_used_with_is_the_first(tmp_path: Path) -> None:
    """P3: a root that moved is known by its new place; a copy at its old one is refused, also after the move."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(places[0], copy, symlinks=True)
    shutil.move(places[0], moved)
    with reopened([moved, places[1]]) as store:
        assert unlike(wanted, get_all(store)) == []
    shutil.move(copy, places[0])
    before = listing(tmp_path)
    with pytest.raises(WrongStateError, match=rf"{places[0]} and {moved} are roots of one store"):
        reopened(places)
    assert listing(tmp_path) == before
    reopened([moved, places[1]]).close()
    assert listing(tmp_path) == before, "opening a store where it was leaves a trace"


def test_a_store_that_is_copied_or_moved_as_a_whole_goes_on(tmp_path: Path) -> None:
    """P3: the copy has drives of its own; both go on, each with its own bytes."""
    places = folders(tmp_path, 3)
    wanted = committed(places)
    copies = [tmp_path / f"copy{number}" for number in range(3)]
    for folder, copy in zip(places, copies, strict=True):
        shutil.copytree(folder, copy, symlinks=True)
    with reopened(copies) as store:
        newer = content(store, 5)
        put_all(store, newer)
        store.commit(5, {}, sync)
    with reopened(places) as store:
        assert (store.step, unlike(wanted, get_all(store))) == (1, []), "the copy has written to the first store"
    moved = [tmp_path / f"moved{number}" for number in range(3)]
    for folder, to in zip(copies, moved, strict=True):
        shutil.move(folder, to)
    with reopened(moved) as store:
        assert (store.step, unlike(newer, get_all(store))) == (5, [])
    assert unlike(newer, seen_by_zarr(moved[0], newer)) == []


def test_a_root_without_its_lock_where_it_was_is_no_obstacle(tmp_path: Path) -> None:
    """P3: another store has taken the old place of a root that moved: it is none of ours."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    shutil.move(places[0], tmp_path / "moved")
    committed([places[0], tmp_path / "other"])
    with reopened([tmp_path / "moved", places[1]]) as store:
        assert unlike(wanted, get_all(store)) == []


def test_a_store_of_an_earlier_version_learns_which_root_is_its_first(tmp_path: Path) -> None:
    """P3: its markers do not say so; a reader leaves them, the next run renews them; then a copy is refused."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    marker = places[1] / MARKER_NAME
    items = json.loads(marker.read_text())
    marker.write_text(json.dumps({key: items[key] for key in ("store", "index", "root")}))
    (places[1] / ".lock").unlink()
    copy = tmp_path / "copy"
    shutil.copytree(places[0], copy, symlinks=True)
    before = listing(tmp_path)
    reopened([copy, places[1]], read_only=True).close()
    assert listing(tmp_path) == before
    with reopened(places) as store:
        assert unlike(wanted, get_all(store)) == []
    with pytest.raises(WrongStateError, match="are roots of one store"):
        reopened([copy, places[1]])


def test_a_drive_in_use_is_refused_by_the_name_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IO-14: a copy of the root has another lock; where it cannot see the first root, the lock of the drive decides."""
    places = folders(tmp_path, 2)
    committed(places)
    copy = tmp_path / "copy"
    shutil.copytree(places[0], copy, symlinks=True)
    monkeypatch.setattr("tiering.drives._refuse_copy", lambda *_: None)  # as if the first root were not to be seen
    with reopened(places):
        with pytest.raises(StoreLockedError, match=rf"^{places[1]} is in use by host .*, pid {os.getpid()}, user"):
            reopened([copy, places[1]])
    reopened([copy, places[1]]).close()
    assert (places[1] / ".lock").read_text() == "", "the owner is still named after it has gone"


def test_a_marker_that_cannot_be_renewed_is_an_error_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: any call that renewing makes fails: nothing is written to the drive, and the next try works."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    moved = tmp_path / "moved"
    shutil.move(places[0], moved)
    for name, nth in (("open", 4), ("fsync", 2), ("rename", 1), ("fsync", 3)):
        with monkeypatch.context() as patch:
            calls = failing(patch, name, nth, OSError(errno.EROFS, os.strerror(errno.EROFS)))
            with pytest.raises(IOFailedError, match=rf"^{moved}: taking over .*Read-only.*state is step 1"):
                reopened([moved, places[1]])
            assert calls[0] == nth, f"{name}: {calls[0]} calls"
    with reopened([moved, places[1]]) as store:
        assert unlike(wanted, get_all(store)) == []
    assert json.loads((places[1] / MARKER_NAME).read_text())["root"] == str(moved)


def test_more_folders_than_the_store_has_are_refused(tmp_path: Path) -> None:
    """They would hold nothing, while the plan counts on them; so would a copy of a drive."""
    places = folders(tmp_path, 2)
    committed(places)
    with pytest.raises(WrongStateError, match=r"(?s)made on 2 drives.*extra is not there.*Fix"):
        BlockStore.open(places[0], others=[places[1], tmp_path / "extra"])
    shutil.copytree(places[1], tmp_path / "copy")
    with pytest.raises(WrongStateError, match=rf"{tmp_path / 'copy'} and {places[1]} both hold drive 1"):
        BlockStore.open(places[0], others=[places[1], tmp_path / "copy"])
    alone = tmp_path / "alone"
    committed([alone])
    with pytest.raises(WrongStateError, match=r"(?s)made on 1 drives.*of another store"):
        BlockStore.open(alone, others=[places[1]])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"store": "x"}',
        '{"store": "x", "index": -1, "root": "/"}',
        '{"store": "x", "index": 1, "root": "/", "y": 2}',
    ],
)
def test_a_marker_that_cannot_be_read_is_no_marker(tmp_path: Path, text: str) -> None:
    """P3: refused by name, never guessed."""
    places = folders(tmp_path, 2)
    committed(places)
    (places[1] / MARKER_NAME).write_text(text)
    with pytest.raises(WrongStateError, match=rf"(?s)drive 1 .*{places[1]} has a drive\.json that cannot be read"):
        reopened(places)


def test_a_lost_chunk_is_named_wherever_it_was(tmp_path: Path) -> None:
    """IO-12: block, file and sizes; the last chunk is a whole file too."""
    places = folders(tmp_path, 3)
    committed(places)
    chunks = sorted((path for place in places for path in (place / ".slots/b/L0").glob("weight.*")), key=str)
    assert len(chunks) == 5 and len({path.parents[3] for path in chunks}) == 3, chunks
    for path in chunks:
        kept = path.read_bytes()
        path.write_bytes(kept[:-PAGE])
        with pytest.raises(DamagedStateError, match=rf"L0/weight: .*{path}.* wanted {CHUNK} bytes, found {PAGE}"):
            reopened(places)
        path.unlink()
        with pytest.raises(DamagedStateError, match=rf"L0/weight: .*{path}.* is missing"):
            reopened(places, read_only=True)
        path.write_bytes(kept)
    reopened(places).close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["blocks"][0].pop("spread"), "has None"),
        (lambda m: m["blocks"][0]["spread"].update(drives="01"), "has 2 chunks"),
        (lambda m: m["blocks"][0]["spread"].update(drives="00009"), "on drive 9 of 2"),
        (lambda m: m["blocks"][0]["spread"].update(drives="0000/"), "pattern"),
        (lambda m: m["blocks"][0]["spread"].update(chunk_bytes=4095), "multiple"),
        (lambda m: m["blocks"][0]["spread"].update(chunk_bytes=1 << 70, drives="0"), "has 1 chunks"),
        (lambda m: m.update(format=1), "format 1 with 2 drives"),
        (lambda m: m.update(store=""), "format 2"),
        (lambda m: m.update(store="../x"), "store"),
        (lambda m: m["drives"].pop(), "format 2 with 1 drives"),
        (lambda m: m["drives"][1].update(bytes_per_s=0), "drives"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_damage(tmp_path: Path, change: object, said: str) -> None:
    """P3: checked before any file is looked at."""
    places = folders(tmp_path, 2)
    committed(places)
    path = places[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)  # type: ignore[operator]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedStateError, match=said):
        reopened(places)


def test_paths_in_a_manifest_are_only_told(tmp_path: Path) -> None:
    """P3: files are looked for in the folders that were given, whatever a manifest says."""
    places = folders(tmp_path, 2)
    wanted = committed(places)
    path = places[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["drives"][1]["path"] = "/etc"
    manifest["seal"] = seal_of(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(WrongStateError, match="its folder was /etc"):
        BlockStore.open(places[0])
    with reopened(places) as store:
        assert unlike(wanted, get_all(store)) == []


def test_folders_that_are_no_drives_of_their_own_are_refused(tmp_path: Path) -> None:
    """IO-16: nothing is written; a folder twice, one in another, through a link too, and folders with content."""
    places = folders(tmp_path, 2)
    committed(places)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path)
    before = listing(tmp_path)
    new = tmp_path / "new"
    for given, said in (
        ([new, new], "are one folder"),
        ([new, tmp_path / "link" / "new"], "are one folder"),
        ([new, new / "below"], "one lies in the other"),
        ([tmp_path / "link" / "new" / "below", new], "one lies in the other"),
        ([new, tmp_path / "mine"], r"letter\.txt"),
        ([new, places[0]], "already holds a store"),
        ([new, places[1]], "already is a drive of a store"),
        ([places[1], new], "already is a drive of a store"),
        ([new, tmp_path / "mine" / "letter.txt"], "is a file"),
    ):
        with pytest.raises(PlaceError, match=said):
            create(given)
    assert listing(tmp_path) == before


def test_a_drive_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-06: by arithmetic on each drive, and on what several folders take of one."""
    places = folders(tmp_path, 2)
    wanted = BlockStore.room(places, RATES[:2], blocks())
    device = {places[0]: [places[0]], places[1]: [places[1]]}
    monkeypatch.setattr(place, "by_device", lambda folders: list(device.values()))
    monkeypatch.setattr(place, "free_bytes", lambda path: 1000 if path == places[1] else 1 << 40)
    with pytest.raises(
        DiskFullError, match=rf"^{places[1]}: the store needs {wanted[places[1]]} bytes, 1000 bytes are"
    ):
        create(places)
    total = sum(wanted.values())
    device = {places[0]: places}
    monkeypatch.setattr(place, "free_bytes", lambda path: total - 1)
    with pytest.raises(DiskFullError, match=rf"{places[0]} and {places[1]}: the store needs {total} bytes on this one"):
        create(places)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(place, "free_bytes", lambda path: total)
    with create(places) as store, monkeypatch.context() as patch:
        patch.setattr(place, "free_bytes", lambda path: CHUNK)
        with pytest.raises(DiskFullError, match="needs"):
            store.add_scratch([block("head", "grad", 8, scratch=True)])


def failing(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, error: BaseException) -> list[int]:
    """The nth call of `os.<name>` from now on raises; the list counts calls."""
    real, calls = getattr(os, name), [0]

    def call(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize("name", ["posix_fallocate", "fsync", "symlink", "rename", "open"])
def test_a_creation_that_fails_anywhere_leaves_nothing_on_any_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """IO-06: some Nth system call meets a full disk; what was made is removed, and a second try works."""
    places = folders(tmp_path, 3)
    create(places).close()
    for folder in places:
        shutil.rmtree(folder)
    for nth in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
        with monkeypatch.context() as patch:
            calls = failing(patch, name, nth, OSError(errno.ENOSPC, "No space left on device"))
            try:
                create(places).close()
            except (DiskFullError, OSError):
                pass
            else:
                assert calls[0] < nth, f"call {nth} of {name} failed and creation did not say so"
                break
        left = [path for folder in places if folder.exists() for path in folder.iterdir() if path.name != ".lock"]
        assert left == [], f"call {nth} of {name} failed and left {left}"
    else:
        create(places).close()


class Crash(BaseException):
    """The process dies here: no handler of ours may see it."""


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Crash("kill -9")], ids=["EIO", "kill"])
def test_a_commit_that_fails_anywhere_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """P3, I10, IO-23: the Nth call that makes something durable or visible fails, with chunks on two drives."""
    outcomes = []
    for name, nth in [("fsync", n) for n in (1, 20, 41, 42, 43)] + [("rename", 1), ("symlink", 5), ("replace", 9)]:
        places = folders(tmp_path / f"{name}{nth}", 2)
        old = committed(places)
        with reopened(places) as store:
            new = content(store, 2)
            put_all(store, new)
            with monkeypatch.context() as patch:
                calls = failing(patch, name, nth, error)
                try:
                    store.commit(2, {}, sync)
                except (IOFailedError, Crash):
                    pass
                else:
                    assert calls[0] < nth, f"call {nth} of {name} failed and the commit did not say so"
        with reopened(places) as store:
            wanted = {1: old, 2: new}[store.step or 0]
            outcomes.append(store.step)
            assert unlike(wanted, get_all(store)) == [], f"after call {nth} of {name}, step {store.step} is not whole"
            assert unlike(wanted, seen_by_zarr(places[0], wanted)) == [], f"after call {nth} of {name}: links"
    assert set(outcomes) == {1, 2}, outcomes


def test_scratch_of_an_earlier_run_is_removed_on_every_drive(tmp_path: Path) -> None:
    """A resumed run makes its own; it is spread like other blocks, by what the store remembers of its drives."""
    places = folders(tmp_path, 2)
    committed(places)
    for pages in (8, 6):
        with reopened(places) as store:
            store.add_scratch([block("head", "grad", pages, scratch=True)])
        found = [len(list((folder / ".slots/scratch/head").iterdir())) for folder in places]
        assert sum(found) == pages // 2 and found[0] > found[1] > 0, found


def test_a_folder_of_any_name_can_be_a_drive(tmp_path: Path) -> None:
    """IO-16: names are bytes; what is told of them is text."""
    places = [tmp_path / "a b", tmp_path / os.fsdecode(b"caf\xe9 \xff")]
    wanted = committed(places)
    with reopened(places) as store:
        assert unlike(wanted, get_all(store)) == []
    assert unlike(wanted, seen_by_zarr(places[0], wanted)) == []
    with pytest.raises(WrongStateError, match=r"caf\\xe9 \\xff"):
        BlockStore.open(places[0])
