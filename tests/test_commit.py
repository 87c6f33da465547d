"""Nothing committed is ever lost, and nothing half-written is ever committed.

Scope: slots, commits, failed commits, crashes and recovery of `tiering/store.py` and `tiering/manifest.py`.
Not here: layout, opening and owners (`test_store.py`), random sequences of calls (`test_store_machine.py`).
"""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from store_bytes import (
    IDENTITY,
    KINDS,
    PAGE,
    block,
    blocks,
    content,
    get,
    get_all,
    listing,
    put,
    put_all,
    seen_by_zarr,
    sync,
    unlike,
)

from tiering.checksums import GRAIN_BYTES
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError, ScheduleError
from tiering.store import BlockStore

REPOSITORY = Path(__file__).parents[1]
WEIGHT = "model.layers.0/weight"


class Crash(BaseException):
    """The process dies here: no handler of ours may see it."""


def two_commits(root: Path, count: int = 6) -> tuple[BlockStore, dict[str, bytes]]:
    """An open store at step 2, and its content."""
    store = BlockStore.create(root, blocks()[:count], identity=IDENTITY)
    for step in (1, 2):
        wanted = content(store, step)
        put_all(store, wanted)
        store.commit(step, {"cursor": step}, sync)
    return store, wanted


def failing_at(nth: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """The nth system call of a commit raises; returns whether it was reached."""
    calls = [0]

    def wrap(real: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] == nth:
                raise error
            return real(*args, **kwargs)

        return call

    for name in ("open", "fsync", "rename", "symlink", "replace", "unlink"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: calls[0] >= nth


def test_zarr_sees_the_commit_while_newer_bytes_are_written(tmp_path: Path) -> None:
    """P3: bit for bit after commits into both slots, whatever was written since."""
    root = tmp_path / "nvme"
    with BlockStore.create(root, blocks(), identity=IDENTITY) as store:
        for step in range(1, 4):
            wanted = content(store, step)
            put_all(store, wanted)
            store.commit(step, {"cursor": step}, sync)
            newer = content(store, step + 100)
            put(store, WEIGHT, newer[WEIGHT])
            put(store, "model.layers.1/exp_avg", newer["model.layers.1/exp_avg"][:PAGE], 0)
            assert unlike(wanted, seen_by_zarr(root, wanted)) == [], f"zarr does not see the commit of step {step}"
            assert get(store, WEIGHT) == newer[WEIGHT], "the trainer does not see what it wrote"
            with BlockStore.open(root, read_only=True) as reader:
                assert (reader.step, dict(reader.run)) == (step, {"cursor": step})
                assert unlike(wanted, get_all(reader)) == []


def test_what_is_not_committed_is_gone_after_reopening(tmp_path: Path) -> None:
    """P3: a run that dies between commits goes on from the last one."""
    store, wanted = two_commits(tmp_path / "nvme")
    put_all(store, content(store, 3))
    store.close()
    with BlockStore.open(tmp_path / "nvme") as store:
        assert (store.step, unlike(wanted, get_all(store))) == (2, [])


def test_reads_are_cut_where_the_slot_changes(tmp_path: Path) -> None:
    """I2: the current bytes of a half-written block are in both slots."""
    store, _ = two_commits(tmp_path / "nvme")
    with store:
        old = get(store, WEIGHT)
        put(store, WEIGHT, b"\1" * PAGE, PAGE)
        found = [
            (e.path.relative_to(store.root / ".slots").parts[0], e.offset, e.nbytes, e.block, lo, hi)
            for e, lo, hi in store.read_extents(WEIGHT, 0, 3 * PAGE)
        ]
        assert found == [
            ("a", 0, PAGE, WEIGHT, 0, PAGE),
            ("b", PAGE, PAGE, WEIGHT, PAGE, 2 * PAGE),
            ("a", 2 * PAGE, PAGE, WEIGHT, 2 * PAGE, 3 * PAGE),
        ]
        assert get(store, WEIGHT) == old[:PAGE] + b"\1" * PAGE + old[2 * PAGE :]


@pytest.mark.parametrize(("lo", "hi"), [(0, 100), (-PAGE, PAGE), (0, 4 * PAGE), (2 * PAGE, PAGE)])
def test_requests_off_the_grid_or_outside_are_our_fault(tmp_path: Path, lo: int, hi: int) -> None:
    """I6: whole pages inside the block."""
    with BlockStore.create(tmp_path / "nvme", blocks(), identity={}) as store:
        for ask in (store.read_extents, store.write_extents, store.wrote):
            with pytest.raises(AssertionError, match=r"layers\.0/weight\["):
                ask(WEIGHT, lo, hi)


def test_a_half_written_block_is_not_committed(tmp_path: Path) -> None:
    """P3: refused with the block and its ranges; the old commit stays; completing the block makes it work."""
    root = tmp_path / "nvme"
    store, wanted = two_commits(root)
    with store:
        newer = content(store, 3)
        put(store, WEIGHT, newer[WEIGHT][PAGE:], PAGE)
        with pytest.raises(
            ScheduleError,
            match=r"layers\.0/weight of 12288 bytes is written only in part: "
            r"\[\(4096, 12288\)\]",
        ):
            store.commit(3, {}, sync)
        assert (store.step, unlike(wanted, seen_by_zarr(root, wanted))) == (2, [])
        put(store, WEIGHT, newer[WEIGHT][:PAGE])
        store.commit(3, {}, sync)
        assert unlike(wanted | {WEIGHT: newer[WEIGHT]}, seen_by_zarr(root, wanted)) == []


def test_a_commit_is_ordered_data_then_manifest_then_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: the manifest becomes durable only after its data, and links move only after the manifest."""
    store, _ = two_commits(tmp_path / "nvme")
    events: list[str] = []

    def note(name: str) -> Callable:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            events.append(name)
            return real(*args, **kwargs)

        return call

    with store:
        put(store, WEIGHT, content(store, 3)[WEIGHT])
        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, note(name))
        synced: list[Path] = []
        store.commit(3, {}, lambda paths: (events.append("sync"), synced.extend(paths))[0])
    assert events == ["sync", "fsync", "rename", "fsync", "replace"]
    assert synced == [store.root / ".slots" / "b" / WEIGHT], "other files than the written one were synced"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Crash("kill -9")], ids=["EIO", "kill"])
def test_a_commit_that_fails_anywhere_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """P3, I10, IO-23: the Nth system call of a commit fails, for every N; what is then found is whole and one of two.

    After a failure in a live process nothing is written or committed until the store is opened again.
    """
    base = tmp_path / "base"
    store, old = two_commits(base, 2)
    store.close()
    outcomes, nth = [], 0
    while True:
        nth += 1
        root = tmp_path / "nvme"
        shutil.copytree(base, root, symlinks=True)
        store = BlockStore.open(root)
        new = content(store, 3)
        put_all(store, new)
        with monkeypatch.context() as patch:
            reached = failing_at(nth, error, patch)
            try:
                store.commit(3, {"cursor": 3}, sync)
            except (IOFailedError, Crash):
                failed = True
            else:
                failed = False
        if not reached():
            assert not failed
            store.close()
            break
        assert failed, f"call {nth} failed and the commit did not say so"
        for use in (lambda s=store: s.commit(4, {}, sync), lambda s=store: s.write_extents(WEIGHT, 0, PAGE)):
            with pytest.raises(IOFailedError, match="an earlier commit failed"):
                use()
        store.close()
        with BlockStore.open(root) as store:
            outcomes.append(store.step)
            wanted = {2: old, 3: new}[store.step or 0]
            assert dict(store.run) == {"cursor": store.step}
            assert unlike(wanted, get_all(store)) == [], f"after call {nth} failed, step {store.step} is not whole"
            assert unlike(wanted, seen_by_zarr(root, wanted)) == [], f"after call {nth} failed, links are wrong"
            put_all(store, content(store, 5))
            store.commit(5, {}, sync)
        shutil.rmtree(root)
    assert outcomes == sorted(outcomes) and set(outcomes) == {2, 3}, outcomes


def test_a_sync_that_fails_commits_nothing(tmp_path: Path) -> None:
    """I7, I10: the engine's error comes through as it is, the old commit stays."""
    store, wanted = two_commits(tmp_path / "nvme")
    put_all(store, content(store, 3))

    def fail(paths: object) -> None:
        raise IOFailedError("slot file: flushing to the disk failed")

    with pytest.raises(IOFailedError, match=r"^slot file"):
        store.commit(3, {}, fail)
    assert store.step == 2
    store.close()
    with BlockStore.open(tmp_path / "nvme") as store:
        assert (store.step, unlike(wanted, get_all(store))) == (2, [])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_commit_in_place_that_may_not_be_durable_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """I10: the sync of the folder fails after the rename: opening finds the new step, and the error says both steps."""
    store, _ = two_commits(tmp_path / "nvme")
    new = content(store, 3)
    put_all(store, new)

    def fail(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("tiering.store.fsync_directory", fail)
        said = r"commit of step 3 .*committed state is step 3 \(a power cut may bring back step 2\)\. Fix"
        with pytest.raises(DiskFullError if code == errno.ENOSPC else IOFailedError, match=said):
            store.commit(3, {"cursor": 3}, sync)
    assert (store.step, unlike(new, get_all(store))) == (3, []), "what is in place is not what is read"
    with pytest.raises(IOFailedError, match="an earlier commit failed.*state is step 3"):
        store.write_extents(WEIGHT, 0, PAGE)
    store.close()
    with BlockStore.open(tmp_path / "nvme") as store:
        assert (store.step, unlike(new, get_all(store))) == (3, [])


def test_a_state_that_cannot_be_taken_over_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: the sync of opening fails: a typed error with folder and step, and the lock is free again."""
    store, wanted = two_commits(tmp_path / "nvme")
    store.close()

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("tiering.drives.fsync_directory", fail)
        with pytest.raises(IOFailedError, match=rf"^{tmp_path / 'nvme'}: .*state is step 2\. Fix"):
            BlockStore.open(tmp_path / "nvme")
    with BlockStore.open(tmp_path / "nvme") as store:
        assert (store.step, unlike(wanted, get_all(store))) == (2, [])


def test_a_disk_full_during_commit_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IO-06: only the manifest can meet a full disk; state on disk is the last commit."""
    store, wanted = two_commits(tmp_path / "nvme")
    put_all(store, content(store, 3))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(DiskFullError, match=r"commit of step 3 .* bytes are free.*state is step 2"):
            store.commit(3, {}, sync)
    store.close()
    with BlockStore.open(tmp_path / "nvme") as store:
        assert (store.step, unlike(wanted, get_all(store))) == (2, [])


def test_links_behind_the_manifest_are_repaired_when_opened(tmp_path: Path) -> None:
    """IO-23, I9: the one thing that opening changes, and a reader does not."""
    root = tmp_path / "nvme"
    store, wanted = two_commits(root)
    store.close()
    links = [root / WEIGHT / "c" / "0", root / "model.layers.1" / "exp_avg" / "c" / "0"]
    links[0].unlink()
    os.symlink("../../../.slots/b/" + WEIGHT, links[0])
    links[1].unlink()
    (root / ".link.new").symlink_to("left/by/a/crash")
    before = listing(root)
    BlockStore.open(root, read_only=True).close()
    assert listing(root) == before
    BlockStore.open(root).close()
    assert [os.readlink(link) for link in links] == [
        "../../../.slots/a/" + str(link.parent.parent.relative_to(root)) for link in links
    ]
    assert unlike(wanted, seen_by_zarr(root, wanted)) == []


def test_a_copy_that_followed_links_is_refused_not_rewritten(tmp_path: Path) -> None:
    """I9: a file where a link belongs is somebody's bytes."""
    store, _ = two_commits(tmp_path / "nvme")
    store.close()
    shutil.copytree(tmp_path / "nvme", tmp_path / "copy")
    before = listing(tmp_path / "copy")
    with pytest.raises(DamagedStateError, match="not a link"):
        BlockStore.open(tmp_path / "copy")
    assert listing(tmp_path / "copy") == before


def test_a_reader_writes_and_commits_nothing(tmp_path: Path) -> None:
    """Read-only means no lock, so nothing may be changed through it."""
    store, _ = two_commits(tmp_path / "nvme")
    store.close()
    with BlockStore.open(tmp_path / "nvme", read_only=True) as reader:
        for use in (lambda: reader.commit(3, {}, sync), lambda: reader.write_extents(WEIGHT, 0, PAGE)):
            with pytest.raises(ScheduleError, match="read-only"):
                use()


def test_what_json_cannot_hold_is_refused_before_the_commit_starts(tmp_path: Path) -> None:
    """P3: a NaN in the run record must not end a run; the commit can be made again without it."""
    store, _ = two_commits(tmp_path / "nvme")
    with store:
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.commit(3, {"loss": float("nan")}, sync)
        store.commit(3, {"shape": (1, 2)}, sync)  # type: ignore[dict-item]
        assert dict(store.run) == {"shape": [1, 2]}, "a run record reads back otherwise than it is held"


def test_twenty_commits_in_a_row_take_no_more_memory_than_the_first(tmp_path: Path) -> None:
    """P2, CK-23: two grains at most, of 32 MiB that are read back for their checksums, and the same every time."""
    peaks = []
    with BlockStore.create(tmp_path / "nvme", [block("L0", kind, 4096) for kind in KINDS[:2]], identity={}) as store:
        tracemalloc.start()
        try:
            for step in range(20):
                for name, found in store.blocks.items():
                    store.wrote(name, 0, found.nbytes)
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                store.commit(step, {}, sync)
                peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
    assert max(peaks) < 3 * GRAIN_BYTES, f"a commit takes {max(peaks)} bytes"
    assert max(peaks[10:]) < max(peaks[:10]) + (64 << 10), f"commits take more and more: {peaks}"


CHILD = """
import mmap, sys
from pathlib import Path
from tiering.posix import PosixEngine
from tiering.store import BlockStore

with BlockStore.open(Path(sys.argv[1])) as store, PosixEngine(4) as engine:
    step = store.step or 0
    print("open", flush=True)
    while True:
        step += 1
        page = memoryview(mmap.mmap(-1, 64 * 4096))
        page[:] = bytes([step % 251]) * len(page)
        for name, block in store.blocks.items():
            for extent, lo, hi in store.write_extents(name, 0, block.nbytes):
                engine.submit_write(extent, page[lo:hi]).result()
                store.wrote(name, lo, hi)
        store.commit(step, {"cursor": step}, engine.sync)
"""


def test_kill_9_at_any_instant_leaves_whole_steps(tmp_path: Path) -> None:
    """P3: a process that writes and commits without pause through direct I/O is killed at random instants."""
    root = tmp_path / "nvme"
    BlockStore.create(root, [block(f"layers.{i}", "weight", 64) for i in range(4)], identity={}).close()
    rng, steps = random.Random(0), [0]
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD, str(root)], stdout=subprocess.PIPE, cwd=REPOSITORY
        )
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"open\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=0.1 + 0.2 * rng.random())
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
        with BlockStore.open(root) as store:
            step = store.step or 0
            steps.append(step)
            wanted = {name: bytes([step % 251]) * b.nbytes for name, b in store.blocks.items()}
            assert dict(store.run) == ({"cursor": step} if step else {})
            assert unlike(wanted, get_all(store)) == [], f"step {step} is not whole after kill -9"
            assert unlike(wanted, seen_by_zarr(root, wanted)) == []
    assert steps == sorted(steps) and steps[-1] > 0, f"no commit was made or one was lost: {steps}"
