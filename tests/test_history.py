"""Commits that are kept have the bytes of their step, whatever happens, and cost the last commit nothing.

Scope: `tiering/history.py` and `tiering/reflink.py` on one and two drives: keeping, removing, restoring, with calls
that fail, power cuts and kills.
Not here: when a run keeps a commit, the commands that read one (`test_keeping.py`).
"""

import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow
from power_cut import Recording, recorded
from store_bytes import (
    IDENTITY,
    PAGE,
    block,
    content,
    get_all,
    listing,
    put,
    put_all,
    seen_by_zarr,
    sync,
    unlike,
)

from tiering import checksums, chunk_files, history, scrub
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError, PlaceError, TieringError, WrongStateError
from tiering.history import HISTORY_NAME, History, is_kept, kept_folders, kept_steps, open_kept
from tiering.posix import PosixEngine
from tiering.reflink import clone
from tiering.store import BlockStore, StoredBlock

REPOSITORY = Path(__file__).parents[1]
GRAIN, CHUNK = 2 * PAGE, 2 * PAGE
KEPT_SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)

Contents = dict[int, dict[str, bytes]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "GRAIN_BYTES", GRAIN)
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(history, "PIECE_BYTES", 2 * GRAIN)
    monkeypatch.setattr(history, "THREADS", 2)
    monkeypatch.setattr(scrub, "THREADS", 1)


def blocks() -> list[StoredBlock]:
    return [block("L0", "weight", 5), block("L0", "exp_avg", 5), block("norm", "weight", 1)]


def places(top: Path, drives: int) -> list[Path]:
    return [top / f"drive{number}" / "state" for number in range(drives)]


def create(folders: list[Path]) -> BlockStore:
    return BlockStore.create(folders[0], blocks(), identity=IDENTITY, others=folders[1:])


def opened(folders: list[Path]) -> BlockStore:
    return BlockStore.open(folders[0], others=folders[1:])


def commit(store: BlockStore, step: int) -> dict[str, bytes]:
    wanted = content(store, step)
    put_all(store, wanted)
    store.commit(step, {"step": step}, sync)
    return wanted


def made(folders: list[Path], steps: int, most: int) -> Contents:
    """A store with a commit of each step from 1, all of them kept once; what each of them holds."""
    with create(folders) as store:
        contents = {}
        for step in range(1, steps + 1):
            contents[step] = commit(store, step)
            assert History(store).keep(most).nbytes > 0
    return contents


def faults(folders: list[Path], contents: Contents) -> str:
    """What is wrong with the kept commits; empty if each has the bytes of its step."""
    for step in kept_steps(folders[0]):
        try:
            with open_kept(folders, step) as kept:
                wrong = unlike(contents[step], get_all(kept))
                if kept.step != step or dict(kept.run) != {"step": step} or wrong:
                    return f"kept step {step} is {kept.step} with {dict(kept.run)}: {wrong}"
            root, *others = kept_folders(folders, step)
            found = scrub.scrub(root, others, spare=False)
        except TieringError as error:
            return f"kept step {step}: {type(error).__name__}: {error}"
        if found.damage or found.links:
            return f"kept step {step}: check says {found.damage} {found.links}"
    return ""


def leftovers(folders: list[Path]) -> list[Path]:
    """Folders that belong to no kept commit."""
    kept = {path for step in kept_steps(folders[0]) for path in kept_folders(folders, step)}
    return [path for folder in folders for path in (folder / HISTORY_NAME).glob("*") if path not in kept]


@pytest.mark.parametrize("drives", [1, 2])
def test_the_newest_are_kept_each_with_the_bytes_of_its_step(tmp_path: Path, drives: int) -> None:
    """P3: the oldest go first; each can be opened and read through zarr, and has what `check` looks for."""
    folders = places(tmp_path, drives)
    contents = made(folders, 5, most=2)
    assert kept_steps(folders[0]) == [4, 5] and not leftovers(folders), leftovers(folders)
    assert faults(folders, contents) == ""
    for step in (4, 5):
        root = kept_folders(folders, step)[0]
        assert is_kept(root) and not is_kept(folders[0])
        assert unlike(contents[step], seen_by_zarr(root, contents[step])) == []
    with opened(folders) as store:
        assert (store.step, unlike(contents[5], get_all(store))) == (5, [])
        assert History(store).tidy() == []
        for step in range(6, 10):
            contents[step] = commit(store, step)
    assert faults(folders, contents) == "", "what is kept has changed with later commits"
    with pytest.raises(WrongStateError, match="step 3 is not kept; those that are: 4, 5. Fix"):
        open_kept(folders, 3)


def test_keeping_a_commit_again_changes_nothing(tmp_path: Path) -> None:
    """P3: a run that ended right after it looks at it once more when it goes on; other bits take its place."""
    folders = places(tmp_path, 2)
    contents = made(folders, 2, most=2)
    before = [listing(folder / HISTORY_NAME) for folder in folders]
    with opened(folders) as store:
        kept = History(store).keep(2)
        assert (kept.step, kept.nbytes, kept.removed) == (2, 0, ())
        assert [listing(folder / HISTORY_NAME) for folder in folders] == before
        put_all(store, contents[1])
        store.commit(2, {"step": 2}, sync)
        assert History(store).keep(2).nbytes > 0
    assert faults(folders, {1: contents[1], 2: contents[1]}) == ""


@pytest.mark.parametrize("drives", [1, 2])
def test_a_kept_commit_can_be_made_the_last_one_again(tmp_path: Path, drives: int) -> None:
    """P3: with its bytes and its record, durably; it stays kept, and the store goes on from there."""
    folders = places(tmp_path, drives)
    contents = made(folders, 3, most=3)
    with opened(folders) as store:
        History(store).restore(1)
        assert (store.step, dict(store.run), unlike(contents[1], get_all(store))) == (1, {"step": 1}, [])
    with opened(folders) as store:
        assert (store.step, unlike(contents[1], get_all(store))) == (1, [])
        assert History(store).steps() == [1, 2, 3]
        contents[2] = commit(store, 2)
        assert (store.step, unlike(contents[2], get_all(store))) == (2, [])
    found = scrub.scrub(folders[0], folders[1:])
    assert not found.damage and not found.links and faults(folders, contents) == ""
    with opened(folders) as store, pytest.raises(WrongStateError, match="those that are: 1, 2, 3"):
        History(store).restore(7)


@pytest.mark.parametrize(("value", "at"), [(np.nan, 5), (np.inf, 256), (-np.inf, 20479 // 4)])
def test_a_state_that_is_not_finite_replaces_none(tmp_path: Path, value: float, at: int) -> None:
    """P3: it is not kept, the tensor is named, and the oldest one stays."""
    folders = places(tmp_path, 2)
    contents = made(folders, 2, most=2)
    with opened(folders) as store:
        bad = content(store, 3)
        values = np.frombuffer(bad["L0/exp_avg"], dtype=np.float32).copy()
        values[at] = value
        put_all(store, bad | {"L0/exp_avg": values.tobytes()})
        store.commit(3, {"step": 3}, sync)
        kept = History(store).keep(2)
    named = "L0.w" if at < 256 else "L0.b" if at < 259 else "no tensor"
    assert kept.not_finite == f"{named} in block L0/exp_avg at byte {4 * at}", kept
    assert (kept.nbytes, kept.removed, kept_steps(folders[0])) == (0, (), [1, 2])
    assert not leftovers(folders) and faults(folders, contents) == ""


def test_nothing_but_kept_commits_is_removed(tmp_path: Path) -> None:
    """P3: what somebody put beside them stays, and no link is followed."""
    folders = places(tmp_path, 2)
    contents = made(folders, 2, most=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    for folder in folders:
        (folder / HISTORY_NAME / "step-7").mkdir()
        (folder / HISTORY_NAME / "best").mkdir()
        (folder / HISTORY_NAME / "notes.txt").write_text("step 2 was good")
        os.symlink(mine, folder / HISTORY_NAME / "step-00000009")
        os.symlink(mine, kept_folders([folder], 1)[0] / "link")
        (folder / HISTORY_NAME / "step-00000005" / "deep").mkdir(parents=True)
    before = listing(mine)
    with opened(folders) as store:
        assert len(History(store).tidy()) == 2, "the two folders of step 5 are left of something"
        for step in (3, 4):
            contents[step] = commit(store, step)
            History(store).keep(2)
        History(store).remove(9)
        assert History(store).steps() == [3, 4]
        assert unlike(contents[4], get_all(store)) == []
    assert listing(mine) == before and faults(folders, contents) == ""
    for folder in folders:
        names = sorted(path.name for path in (folder / HISTORY_NAME).iterdir())
        assert names == ["best", "notes.txt", "step-00000003", "step-00000004", "step-00000009", "step-7"], names


def test_a_history_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """P3: nothing outside the folders of a store is written or removed."""
    folders = places(tmp_path, 1)
    with create(folders) as store:
        os.symlink(tmp_path, folders[0] / HISTORY_NAME)
        with pytest.raises(PlaceError, match=r"\.history is no folder"):
            History(store)


@contextmanager
def failing_at(nth: int, error: BaseException) -> Iterator[Callable[[], bool]]:
    """The nth call to the system raises; says whether it was reached."""
    calls = [0]

    def wrap(real: Callable) -> Callable:
        def call(*args: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == nth:
                raise error
            return real(*args, **more)

        return call

    names = ("open", "fsync", "fdatasync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, "posix_fallocate", "pwrite", "pwritev", "preadv", "scandir"):
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield lambda: calls[0] >= nth


class Crash(BaseException):
    """The process dies here."""


ACTS: dict[str, Callable[[History], object]] = {
    "keep": lambda found: found.keep(2),
    "remove": lambda found: found.remove(1),
    "tidy": lambda found: found.tidy(),
    "restore": lambda found: found.restore(1),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.EIO, "I/O error"), id="EIO", marks=pytest.mark.slow),
        pytest.param(Crash(), id="crash"),
    ],
)
def test_a_call_that_fails_leaves_the_last_commit_and_all_that_are_kept(
    tmp_path: Path, act: str, error: BaseException
) -> None:
    """P3, I10: whichever it is; it is told as a typed error, and the next owner finishes what was begun."""
    base = places(tmp_path / "base", 1)
    contents = made(base, 2, most=2)
    with opened(base) as store:
        contents[3] = commit(store, 3)
    (base[0] / HISTORY_NAME / "step-00000008" / "x").mkdir(parents=True)
    for nth in range(1, 1000):
        folders = places(tmp_path / str(nth), 1)
        shutil.copytree(base[0], folders[0], symlinks=True)
        with opened(folders) as store:
            found = History(store)
            with failing_at(nth, error) as reached:
                try:
                    ACTS[act](found)
                except (TieringError, Crash) as caught:
                    assert isinstance(caught, type(error)) or "Fix: " in str(caught), caught
            ended = not reached()
        with opened(folders) as store:
            found = History(store)
            found.tidy()
            steps = found.steps()
            assert store.step in ((1, 3) if act == "restore" else (3,))
            assert unlike(contents[store.step or 0], get_all(store)) == [], f"{act}, call {nth}"
            assert not leftovers(folders), f"{act}, call {nth}: {leftovers(folders)}"
            assert faults(folders, contents) == "", f"{act}, call {nth}"
            assert set(steps) >= ({2} if act in ("keep", "remove") else {1, 2}), f"{act}, call {nth}: {steps}"
            if store.step == 3:
                found.keep(2)
            assert act == "restore" or found.steps() == [2, 3], f"{act}, call {nth}: {found.steps()}"
        shutil.rmtree(tmp_path / str(nth))
        if ended:
            assert nth > 3, f"{act} makes {nth - 1} calls"
            return
    raise AssertionError(f"{act} never ended")


def write(store: BlockStore, engine: PosixEngine, wanted: dict[str, bytes]) -> None:
    """All blocks through direct I/O, which the recording sees."""
    for name, data in wanted.items():
        buffer = memoryview(mmap.mmap(-1, len(data)))
        buffer[:] = data
        for extent, start, end in store.write_extents(name, 0, len(data)):
            engine.submit_write(extent, buffer[start:end]).result()  # one part
            store.wrote(name, start, end, buffer[start:end])


def session(top: Path, drives: int) -> tuple[Recording, Contents]:
    """Keeps, removes and restores; marks say what begins and ends."""
    folders = places(top, drives)
    contents = made(folders, 1, most=2)
    with recorded(top) as recording, opened(folders) as store, PosixEngine(1) as engine:
        found = History(store)
        for step in (2, 3):
            recording.mark(("commits", step))
            contents[step] = content(store, step)
            write(store, engine, contents[step])
            store.commit(step, {"step": step}, engine.sync)
            recording.mark(("committed", step))
            recording.mark(("keeps", step))
            found.keep(2)
            recording.mark(("kept", step))
        recording.mark(("commits", 2))
        found.restore(2)
        recording.mark(("committed", 2))
        recording.mark(("removes", 3))
        found.remove(3)
        recording.mark(("removed", 3))
    return recording, contents


def expected(marks: list[tuple[str, int]]) -> tuple[set[int], set[int], set[int]]:
    """The steps that the last commit may have, those that must be kept, and those that may be."""
    last, must = {1}, {1}
    may = {1}
    for what, step in marks:
        if what == "commits":
            last = last | {step}
        elif what == "committed":
            last = {step}
        elif what == "keeps":
            may |= {step}
            must -= {1} if step == 3 else set()
        elif what == "kept":
            must |= {step}
            may -= {1} if step == 3 else set()
        elif what == "removes":
            must -= {step}
        elif what == "removed":
            may -= {step}
    return last, must, may


def judge(recording: Recording, end: int, drives: int, contents: Contents) -> str:
    """Empty, or what is wrong with the disk that is there now."""
    folders = places(recording.top, drives)
    last, must, may = expected([event.mark for event in recording.events[:end] if event.verb == "mark"])
    wrong = faults(folders, contents)
    if wrong:
        return wrong
    try:
        with opened(folders) as store:
            step = store.step or 0
            if step not in last or unlike(contents[step], get_all(store)):
                return f"step {step}, it may be {last}: {unlike(contents[step], get_all(store))}"
            found = History(store)
            found.tidy()
            if not must <= set(found.steps()) <= may:
                return f"kept are {found.steps()}, must be {must}, may be {may}"
            if leftovers(folders):
                return f"left are {leftovers(folders)}"
            if end % 4:
                return ""
            found.keep(3)
            if step not in found.steps():
                return f"step {step} cannot be kept any more"
    except TieringError as error:
        return f"{type(error).__name__}: {error}"
    return faults(folders, contents)


def survive(recording: Recording, drives: int, contents: Contents, images: int, seed: int) -> None:
    chance = random.Random(seed)
    count = len(recording.events)
    for number in range(images):
        end = round(number * count / images * 2) if 2 * number <= images else chance.randrange(count + 1)
        keep = chance.choice(KEPT_SHARES)
        recording.image(min(end, count), random.Random(chance.random()), keep)
        wrong = judge(recording, min(end, count), drives, contents)
        around = "\n".join(event.text for event in recording.events[max(0, end - 8) : end])
        assert not wrong, f"cut before event {end} of {count}, {keep} kept: {wrong}\n{around}"


@pytest.mark.parametrize("drives", [1, 2])
def test_a_power_cut_leaves_the_last_commit_and_all_that_are_kept(tmp_path: Path, drives: int) -> None:
    """P3, I7: while one is kept, removed or restored; what was kept when the call returned is there."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", drives)
    survive(recording, drives, contents, 80, seed=drives)


@pytest.mark.slow
@pytest.mark.parametrize("drives", [1, 2])
def test_thousands_of_power_cuts_leave_the_last_commit_and_all_that_are_kept(tmp_path: Path, drives: int) -> None:
    """P3: the same, for as long as one likes."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", drives)
    survive(recording, drives, contents, 2000, seed=10 + drives)


@pytest.mark.parametrize(
    "what",
    [
        "/.slots/a/",
        *(slow(what) for what in (".checksums.a", "/step-00000003", "/.history")),
        ".manifest.new",
    ],
)
def test_a_sync_that_is_left_out_is_noticed(tmp_path: Path, what: str) -> None:
    """I7: no durable step of keeping or removing a commit can be spared: without it some image is wrong."""
    (tmp_path / "disk").mkdir()
    recording, contents = session(tmp_path / "disk", 1)

    def spared(path: str) -> bool:
        return HISTORY_NAME in path and (path.endswith(what) if what[0] == "/" and what[-1] != "/" else what in path)

    kept = [e for e in recording.events if not (e.verb == "sync" and e.node and spared(e.node.first_path))]
    assert len(kept) < len(recording.events), f"nothing of {what} is made durable"
    recording.events = kept
    with pytest.raises(AssertionError, match="cut before event"):
        survive(recording, 1, contents, 600, seed=3)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from store_bytes import content, put_all, sync
from tiering.history import History
from tiering.store import BlockStore

with BlockStore.open(Path(sys.argv[1])) as store:
    found = History(store)
    found.tidy()
    print("ready", flush=True)
    while True:
        step = store.step + 1
        put_all(store, content(store, step))
        store.commit(step, {{"step": step}}, sync)
        found.keep(2)
        if step % 5 == 0:
            found.restore(found.steps()[0])
"""


def test_kill_9_at_any_instant_leaves_the_last_commit_and_all_that_are_kept(tmp_path: Path) -> None:
    """P3: a process that commits, keeps and restores all the time is killed, again and again."""
    folders = places(tmp_path, 1)
    made(folders, 2, most=2)
    chance = random.Random(5)
    code = KILLED.format(tests=str(REPOSITORY / "tests"))
    for number in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folders[0])], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with opened(folders) as store:
            contents = {step: content(store, step) for step in [*kept_steps(folders[0]), store.step or 0]}
            assert unlike(contents[store.step or 0], get_all(store)) == [], f"kill {number}"
            assert faults(folders, contents) == "", f"kill {number}"
            assert History(store).steps(), f"kill {number}: none is kept"
            History(store).tidy()
            assert not leftovers(folders), f"kill {number}: {leftovers(folders)}"


@pytest.mark.parametrize("drives", [1, 2])
def test_a_full_disk_loses_neither_the_commit_nor_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drives: int
) -> None:
    """P3, IO-09: named with file, bytes wanted and free; nothing is left of the attempt."""
    folders = places(tmp_path, drives)
    contents = made(folders, 1, most=3)
    real, calls = os.posix_fallocate, [0]

    def full(fd: int, offset: int, nbytes: int) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    with opened(folders) as store:
        contents[2] = commit(store, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(DiskFullError, match=r"reserving \d+ bytes for .*step-00000002.* bytes are free. Fix"):
                History(store).keep(3)
        assert unlike(contents[2], get_all(store)) == [] and kept_steps(folders[0]) == [1]
        assert not leftovers(folders) and faults(folders, contents) == ""
        assert History(store).keep(3).nbytes > 0
    assert kept_steps(folders[0]) == [1, 2] and faults(folders, contents) == ""


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_is_neither_kept_nor_restored(tmp_path: Path) -> None:
    """P3: bytes that are not those that were written are named where they are first read."""
    folders = places(tmp_path, 1)
    contents = made(folders, 2, most=2)
    with opened(folders) as store:
        contents[3] = commit(store, 3)
        committed = store.read_extents("L0/weight", 0, PAGE)[0][0].path
    with open_kept(folders, 1) as kept:
        flip(kept.read_extents("norm/weight", 0, PAGE)[0][0].path, 100)
    with opened(folders) as store:
        with pytest.raises(DamagedStateError, match=r"norm/weight: .*step-00000001.*bytes of step 1 are damaged"):
            History(store).restore(1)
        assert store.step == 3
    flip(committed, 9000)
    with opened(folders) as store:
        with pytest.raises(DamagedStateError, match="L0/weight: .* bytes of step 3 are damaged"):
            History(store).keep(2)
        assert (store.step, kept_steps(folders[0]), leftovers(folders)) == (3, [1, 2], [])
        History(store).restore(2)
        assert unlike(contents[2], get_all(store)) == [], "a last commit that is damaged is replaced by one that is not"


def test_parts_of_two_kept_commits_are_told_apart(tmp_path: Path) -> None:
    """P3: the folder of another step on a second drive is refused."""
    folders = places(tmp_path, 2)
    made(folders, 2, most=2)
    one, two = (kept_folders(folders, step)[1] for step in (1, 2))
    shutil.rmtree(one)
    os.rename(two, one)
    with pytest.raises(WrongStateError, match="drive 1 of the store at .* is missing"):
        open_kept(folders, 1)
    alone = places(tmp_path / "alone", 1)
    made(alone, 2, most=2)
    os.rename(kept_folders(alone, 2)[0], kept_folders(alone, 8)[0])
    with pytest.raises(WrongStateError, match="holds step 2, its name says 8"):
        open_kept(alone, 8)


def test_a_moved_store_has_its_kept_commits(tmp_path: Path) -> None:
    """CK-17: they are found where the folders are now."""
    contents = made(places(tmp_path / "old", 2), 2, most=2)
    (tmp_path / "old").rename(tmp_path / "new")
    folders = places(tmp_path / "new", 2)
    with opened(folders) as store:
        History(store).restore(1)
        assert unlike(contents[1], get_all(store)) == []
    with open_kept(folders, 2) as kept:
        assert unlike(contents[2], get_all(kept)) == []


def test_a_drive_that_can_shares_and_the_other_one_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: with a reflink for drive 0 alone: the same bytes, and no piece of it is copied."""
    folders = places(tmp_path, 2)

    def share(source: Path, target: Path) -> bool:
        if "drive1" in str(target):
            return False
        shutil.copyfile(source, target)
        return True

    monkeypatch.setattr(history, "clone", share)
    with create(folders) as store:
        contents = {1: commit(store, 1)}
        kept = History(store).keep(1)
        put(store, "norm/weight", content(store, 2)["norm/weight"])
    sizes = [sum(p.stat().st_size for p in (folder / HISTORY_NAME).rglob(".slots/a/*/*")) for folder in folders]
    assert kept.nbytes == sum(sizes) and 0 < kept.shared_bytes == sizes[0] < kept.nbytes, (kept, sizes)
    assert faults(folders, contents) == ""


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.EPERM])
def test_a_file_system_without_reflinks_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """P3: whatever it says to that; asked once for a drive."""
    asked = [0]

    def refuse(*args: object) -> int:
        asked[0] += 1
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    folders = places(tmp_path, 1)
    with create(folders) as store:
        contents = {1: commit(store, 1)}
        kept = History(store).keep(1)
    assert (kept.shared_bytes, asked[0]) == (0, 1) and kept.nbytes == 11 * PAGE, (kept, asked)
    assert faults(folders, contents) == ""


def test_a_reflink_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: an I/O error is no reason to copy."""

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(fcntl, "ioctl", fail)
    folders = places(tmp_path, 1)
    with create(folders) as store:
        commit(store, 1)
        with pytest.raises(IOFailedError, match="keeping step 1: .*step-00000001/.slots/a/.*I/O error"):
            History(store).keep(1)
    assert not leftovers(folders) and kept_steps(folders[0]) == []


def test_a_real_reflink_shares_bytes_until_one_side_is_written(tmp_path: Path) -> None:
    """P3: where the file system of the tests has them."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"old" * PAGE)
    if not clone(source, target):
        assert not target.exists()
        pytest.skip("this file system has no reflinks")
    with open(source, "r+b") as file:
        file.write(b"new")
    assert target.read_bytes() == b"old" * PAGE
    with pytest.raises(FileExistsError):
        clone(source, target)
