"""A power cut at any instant leaves the last commit or the next one, whole: never a mixture, never nothing.

Scope: creation and commits of a store on one and two drives, through the real I/O engine, over the disks that
`power_cut.py` can make of them; faults that are planted to see that it would notice.
Not here: kills of a process, which lose nothing that was written (`test_commit.py`, `test_torture.py`).
"""

import mmap
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from power_cut import Recording, recorded
from store_bytes import IDENTITY, PAGE, block, content, get_all, unlike

from tiering import checksums, chunk_files, scrub
from tiering.errors import TieringError, WrongStateError
from tiering.posix import PosixEngine
from tiering.store import BlockStore, StoredBlock

GRAIN, CHUNK = 2 * PAGE, 2 * PAGE
KEPT = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.fixture(autouse=True)
def small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "GRAIN_BYTES", GRAIN)
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(scrub, "THREADS", 1)


def blocks() -> list[StoredBlock]:
    return [block("L0", "weight", 5), block("L0", "exp_avg", 5), block("norm", "weight", 1)]


def folders(top: Path, drives: int) -> list[Path]:
    return [top / f"drive{number}" / "state" for number in range(drives)]


def create(places: list[Path]) -> BlockStore:
    return BlockStore.create(places[0], blocks(), identity=IDENTITY, others=places[1:])


def write(store: BlockStore, engine: PosixEngine, wanted: dict[str, bytes]) -> None:
    """All blocks through direct I/O, a page a request, so that there is much to lose."""
    for name, data in wanted.items():
        buffer = memoryview(mmap.mmap(-1, len(data)))
        buffer[:] = data
        parts = [
            (engine.submit_write(extent, buffer[start:end]), start, end)
            for lo in range(0, len(data), PAGE)
            for extent, start, end in store.write_extents(name, lo, lo + PAGE)
        ]
        for future, start, end in parts:
            future.result()  # one page
            store.wrote(name, start, end, buffer[start:end])


def session(top: Path, drives: int) -> tuple[Recording, dict[int, dict[str, bytes]]]:
    """Opens a store at step 1, commits 2 and 3, and goes on writing; the recording, and what each commit holds."""
    places = folders(top, drives)
    contents: dict[int, dict[str, bytes]] = {}
    with create(places) as store, PosixEngine(1) as engine:
        contents[1] = content(store, 1)
        write(store, engine, contents[1])
        store.commit(1, {"step": 1}, engine.sync)
    with recorded(top) as recording:
        with BlockStore.open(places[0], others=places[1:]) as store, PosixEngine(1) as engine:
            for step in (2, 3):
                contents[step] = content(store, step)
                write(store, engine, contents[step])
                recording.mark(("begins", step))
                store.commit(step, {"step": step}, engine.sync)
                recording.mark(("ends", step))
            write(store, engine, content(store, 4))
    return recording, contents


def judge(recording: Recording, end: int, drives: int, contents: dict[int, dict[str, bytes]]) -> str:
    """Empty, or what is wrong with the disk that is there now."""
    marks = [event.mark for event in recording.events[:end] if event.verb == "mark"]
    least = max((step for what, step in marks if what == "ends"), default=1)
    most = max((step for what, step in marks if what == "begins"), default=1)
    places = folders(recording.top, drives)
    try:
        with BlockStore.open(places[0], others=places[1:]) as store:
            step = store.step or 0
            if not least <= step <= most:
                return f"step {step} was found, {least} to {most} may be"
            if dict(store.run) != {"step": step}:
                return f"step {step} has the record {dict(store.run)}"
            wrong = unlike(contents[step], get_all(store))
            if wrong:
                return f"step {step}: {wrong}"
        found = scrub.scrub(places[0], places[1:])
    except TieringError as error:
        return f"{type(error).__name__}: {error}"
    return "" if not found.damage and not found.links else f"check says {found.damage} {found.links}"


def cuts(recording: Recording, images: int, seed: int) -> Iterable[tuple[int, random.Random, float]]:
    """Every instant at least once, with as much kept as chance says; most of them where a commit is under way."""
    chance = random.Random(seed)
    count = len(recording.events)
    busy = [
        number
        for number, event in enumerate(recording.events)
        if event.verb in ("sync", "names", "size") or (event.node and ".checksums" in event.node.first_path)
    ]
    for number in range(images):
        end = number if number <= count else chance.choice(busy) + chance.randrange(2)
        yield end, random.Random(chance.random()), chance.choice(KEPT)


def survive(recording: Recording, drives: int, contents: dict[int, dict[str, bytes]], images: int, seed: int) -> None:
    for end, chance, keep in cuts(recording, images, seed):
        recording.image(end, chance, keep)
        wrong = judge(recording, end, drives, contents)
        around = "\n".join(event.text for event in recording.events[max(0, end - 8) : end])
        assert not wrong, f"cut before event {end}, {keep} kept: {wrong}\n{around}"


def tree(top: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        found[name] = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b"/"
    return found


@pytest.mark.parametrize("drives", [1, 2])
def test_the_recording_misses_nothing(tmp_path: Path, drives: int) -> None:
    """With nothing lost, the image is the disk as it really is: creation, commits and writes."""
    top = tmp_path / "disk"
    top.mkdir()
    with recorded(top) as recording:
        create(folders(top, drives)).close()
    real = tree(top)
    recording.image(len(recording.events), None)
    assert tree(top) == real
    shutil.rmtree(top)
    top.mkdir()
    recording, _ = session(top, drives)
    real = tree(top)
    recording.image(len(recording.events), None)
    assert tree(top) == real


@pytest.mark.parametrize("drives", [1, 2])
def test_a_power_cut_leaves_the_old_or_the_new_commit(tmp_path: Path, drives: int) -> None:
    """P3, I7, IO-23: with its bytes, and `check` finds nothing wrong; a commit that returned is never lost."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", drives)
    survive(recording, drives, contents, 150, seed=drives)


class Crash(BaseException):
    """The process dies here: no handler of ours may see it."""


def after_a_crash(top: Path, drives: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, dict]:
    """A run dies in the commit of step 2, between the rename and its sync; the next one writes over step 1."""
    places = folders(top, drives)
    contents: dict[int, dict[str, bytes]] = {}

    def die(path: Path) -> None:
        raise Crash

    with create(places) as store, PosixEngine(1) as engine:
        contents[1] = content(store, 1)
        write(store, engine, contents[1])
        store.commit(1, {"step": 1}, engine.sync)
    with recorded(top) as recording:
        with BlockStore.open(places[0], others=places[1:]) as store, PosixEngine(1) as engine:
            contents[2] = content(store, 2)
            write(store, engine, contents[2])
            recording.mark(("begins", 2))
            with monkeypatch.context() as patch, pytest.raises(Crash):
                patch.setattr("tiering.store.fsync_directory", die)
                store.commit(2, {"step": 2}, engine.sync)
        with BlockStore.open(places[0], others=places[1:]) as store, PosixEngine(1) as engine:
            recording.mark(("ends", 2))
            assert store.step == 2
            write(store, engine, content(store, 3))
    return recording, contents


@pytest.mark.parametrize("drives", [1, 2])
def test_a_commit_that_a_run_died_in_is_made_durable_before_the_next_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drives: int
) -> None:
    """P3, I7: else a power cut brings back the commit before it, and its slots are those that are written now."""
    (tmp_path / "disk").mkdir()
    recording, contents = after_a_crash(tmp_path / "disk", drives, monkeypatch)
    survive(recording, drives, contents, 150, seed=20 + drives)


def test_a_sync_that_opening_leaves_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: a test of the test above."""
    (tmp_path / "disk").mkdir()
    recording, contents = after_a_crash(tmp_path / "disk", 1, monkeypatch)
    kept = [e for e in recording.events if not (e.verb == "sync" and e.node and e.node.first_path.endswith("/state"))]
    assert len(kept) < len(recording.events), "opening makes nothing durable"
    recording.events = [event for event in kept if event.mark != ("ends", 2)]
    with pytest.raises(AssertionError, match="cut before event"):
        survive(recording, 1, contents, 300, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("drives", [1, 2])
def test_thousands_of_power_cuts_leave_the_old_or_the_new_commit(tmp_path: Path, drives: int) -> None:
    """P3: the same, for as long as one likes."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", drives)
    survive(recording, drives, contents, 2500, seed=10 + drives)


@pytest.mark.parametrize("drives", [1, 2])
def test_a_power_cut_while_a_store_is_made_leaves_none_or_a_whole_one(tmp_path: Path, drives: int) -> None:
    """P3: half a store is refused as that; once creation has returned, it is there."""
    top = tmp_path / "disk"
    top.mkdir()
    places = folders(top, drives)
    with recorded(top) as recording:
        create(places).close()
    count, chance, outcomes = len(recording.events), random.Random(drives), {"none": 0, "whole": 0}
    ends = sorted({*range(0, count, 7), *range(count - 12, count + 1)}) + [count] * 20
    for end in ends:
        recording.image(end, random.Random(chance.random()), chance.choice(KEPT))
        try:
            with BlockStore.open(places[0], others=places[1:]) as store:
                assert store.step is None and not any(map(any, get_all(store).values()))
            found = scrub.scrub(places[0], places[1:])
            assert not found.damage and not found.links, f"cut before event {end}: {found.damage} {found.links}"
            outcomes["whole"] += 1
        except WrongStateError as error:
            assert end < count, f"creation had returned: {error}"
            outcomes["none"] += 1
    assert min(outcomes.values()) > 5, outcomes


@pytest.mark.parametrize("what", [".slots", ".manifest.new", "state", ".checksums"])
def test_a_sync_that_is_left_out_is_noticed(tmp_path: Path, what: str) -> None:
    """I7: none of the durable steps of a commit can be spared: without it some image is wrong."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", 1)

    def spared(path: str) -> bool:
        return path.endswith("/state") if what == "state" else what in path

    kept = [e for e in recording.events if not (e.verb == "sync" and e.node and spared(e.node.first_path))]
    assert len(kept) < len(recording.events), f"nothing of {what} is made durable"
    recording.events = kept
    with pytest.raises(AssertionError, match="cut before event"):
        survive(recording, 1, contents, 600, seed=3)
