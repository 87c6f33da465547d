"""Whatever fails in a run, it says what, issues nothing more, and goes on from its last commit to the same bits.

Scope: whole runs from a run file, with one system call after the other failing, and with what happens to drives:
vanished, read-only, full, a file deleted or cut, a clock set back, a lock that somebody left.
Not here: an engine by itself (`test_engine.py`), a store by itself (`test_commit.py`), kills (`test_torture.py`).
"""

import datetime
import errno
import fcntl
import os
import random
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import RunFile
from rich.console import Console

import megatrain.goodbye
import megatrain.trainer
import tiering.new_store
import tiering.posix
from megatrain.cli import accepted
from megatrain.config import RunConfig, load_run
from megatrain.engine import StepEngine
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError, PlaceError, TieringError
from tiering.pipeline import Pipeline
from tiering.pooled import PooledEngine
from tiering.scrub import scrub
from tiering.store import BlockStore

pytestmark = pytest.mark.usefixtures("known_machine")

FIRST, LAST = 2, 6
"""Steps of the run before the fault, and at the end; it commits every second one."""

CALLS = {
    "read": ("preadv",),
    "write": ("pwritev",),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
}


@dataclass
class Base:
    """A run at step `FIRST`, and what it comes to at step `LAST` when nothing fails."""

    folder: Path
    at: Callable[[Path, int], RunConfig]
    losses: dict[int, float] = field(default_factory=dict)
    wanted: dict[str, bytes] = field(default_factory=dict)

    def copy(self, to: Path) -> Path:
        """The run at step `FIRST` again; its links are relative."""
        shutil.copytree(self.folder, to, symlinks=True)
        return to


def state(root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c")]
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


def go_on(run: RunConfig) -> int:
    return megatrain.trainer.train(run, resume=True, console=Console(quiet=True))


def committed(root: Path) -> int | None:
    with BlockStore.open(root, read_only=True) as store:
        return store.step


@pytest.fixture
def base(run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Base:
    """The run, trained to `FIRST`; plans are made once, because they are always the same."""
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)
    real, plans = megatrain.trainer.prepare, {}

    def prepared(run: RunConfig, *args: Any, **options: Any) -> Any:
        key = run.model_dump_json(include={"model", "tiers", "train"}, exclude={"tiers": {"nvme"}})
        if key not in plans:
            plans[key] = real(run, *args, **options)
        import dataclasses

        return dataclasses.replace(plans[key], run=run)

    monkeypatch.setattr(megatrain.trainer, "prepare", prepared)

    def at(folder: Path, steps: int) -> RunConfig:
        path = run_file(
            {
                "train.steps": steps,
                "train.commit_every": 2,
                "train.max_grad_norm": getattr(request, "param", None),
                "tiers.resident": 0.3,
                "tiers.host_memory": "1MiB",
                "tiers.nvme": str(folder / "nvme"),
                "output.dir": str(folder),
            }
        )
        return load_run(path)

    made = Base(folder=tmp_path / "base", at=at)
    assert megatrain.trainer.train(at(made.folder, FIRST), resume=False, console=Console(quiet=True)) == 0
    straight = made.copy(tmp_path / "straight")
    assert go_on(at(straight, LAST)) == 0
    made.wanted = state(straight / "nvme")
    return made


@dataclass
class Fault:
    """The nth call of a kind fails, once; what is submitted after the pipeline has seen it is counted."""

    kind: str
    nth: int
    code: int = errno.EIO
    calls: int = 0
    submitted_after: int = 0
    lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def planted(self) -> Iterator["Fault"]:
        pipelines: list[Pipeline] = []
        init, submit = Pipeline.__init__, PooledEngine._submit

        def remember(pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
            pipelines.append(pipeline)
            init(pipeline, *args, **kwargs)

        def counted(engine: PooledEngine, *args: Any) -> Any:
            self.submitted_after += any(pipeline._failure is not None for pipeline in pipelines)
            return submit(engine, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pipeline, "__init__", remember)
            patch.setattr(PooledEngine, "_submit", counted)
            for name in CALLS[self.kind]:
                patch.setattr(os, name, self._failing(getattr(os, name)))
            yield self

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                self.calls += 1
                fails = self.calls == self.nth
            if fails:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


def check_failure(error: TieringError, kind: str, root: Path) -> None:
    """A typed error that names step and file, of transfers also block, offset and bytes, and the way out."""
    said = str(error)
    assert re.search(r"step \d", said), f"no step: {said}"
    assert str(root) in said, f"no file: {said}"
    assert "Fix:" in said, f"no way out: {said}"
    if kind in ("read", "write"):
        assert re.search(rf"block \S+/\w+: {kind} of \d+ bytes at offset \d+ of {root}", said), said
    assert error.exit_code == 3, f"exit code {error.exit_code}: {said}"


def fail_at(base: Base, folder: Path, kind: str, nth: int) -> int:
    """One fault; returns the calls of that kind if none of them was the nth, 0 if it failed and went on."""
    root = base.copy(folder) / "nvme"
    with Fault(kind, nth).planted() as fault:
        try:
            assert go_on(base.at(folder, LAST)) == 0
        except IOFailedError as error:
            failed = error
        else:
            assert fault.calls < nth, f"{kind} {nth} failed and nobody noticed"
            assert state(root) == base.wanted
            return fault.calls
    check_failure(failed, kind, root)
    assert fault.submitted_after == 0, f"{fault.submitted_after} requests after {kind} {nth} had failed"
    step = committed(root)
    assert step in (2, 4, 6), f"{kind} {nth}: the store is at step {step}"
    told = re.search(r"committed state is step (\d)", str(failed))
    assert told, failed
    assert int(told[1]) == step, f"the store is at step {step}: {failed}"
    if step != LAST or kind in ("fsync", "rename"):
        assert go_on(base.at(folder, LAST)) == 0
        assert state(root) == base.wanted, f"{kind} {nth}: other bits after going on from step {step}"
    shutil.rmtree(folder)
    return 0


@pytest.mark.parametrize("base", [0.5], indirect=True, ids=["clipped"])
@pytest.mark.parametrize("kind", CALLS)
def test_any_call_that_fails_leaves_a_commit_to_go_on_from(base: Base, tmp_path: Path, kind: str) -> None:
    """P3, I10, IO-06: reads, writes, flushes, renames: the first, some in between, the last, and a run that passes."""
    total = fail_at(base, tmp_path / "passes", kind, 10**9)
    assert total >= {"read": 20, "write": 20, "fsync": 6, "rename": 2}[kind], f"only {total} calls of {kind}"
    between = random.Random(kind).sample(range(2, total), min(3, total - 2))
    for nth in dict.fromkeys([1, *sorted(between), total]):
        assert fail_at(base, tmp_path / f"fail-{nth}", kind, nth) == 0, f"{kind} {nth} of {total} was not reached"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", [None, 0.5], indirect=True, ids=["fused", "clipped"])
@pytest.mark.parametrize("kind", CALLS)
def test_every_single_call_that_fails_leaves_a_commit_to_go_on_from(base: Base, tmp_path: Path, kind: str) -> None:
    """P3, I10, IO-06: the nth call, for every n until a whole run passes."""
    nth = 0
    while not fail_at(base, tmp_path / f"fail-{nth}", kind, (nth := nth + 1)):
        pass
    assert nth > 2, "hardly anything was tried"


@contextmanager
def before_step(number: int, action: Callable[[], object]) -> Iterator[None]:
    """`action` happens when step `number` of this life is about to begin."""
    real, count = StepEngine.step, [0]

    def step(engine: StepEngine, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            action()
        return real(engine, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepEngine, "step", step)
        yield


@pytest.fixture
def few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are opened again and again, as in a run of many blocks: what is open goes on to work without its name."""
    monkeypatch.setattr(tiering.posix, "MAX_OPEN_FILES", 1)


def test_a_drive_that_vanishes_ends_the_run_and_comes_back_with_its_commit(
    base: Base, tmp_path: Path, few_open_files: None
) -> None:
    """P3: the folder is gone in step 4: block, file, step, bytes; once it is back, the run goes on."""
    root = base.copy(tmp_path / "run") / "nvme"
    away = tmp_path / "away"
    with before_step(2, lambda: root.rename(away)), pytest.raises(IOFailedError) as raised:
        go_on(base.at(tmp_path / "run", LAST))
    assert not isinstance(raised.value, DamagedStateError), raised.value
    assert re.search(
        rf"^step 4: block \S+: \w+ of \d+ bytes at offset \d+ of {root}.*folder is gone", str(raised.value)
    )
    assert not root.exists(), "the run made a new folder where the drive had been"
    away.rename(root)
    assert committed(root) == FIRST
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


def test_a_drive_that_vanishes_before_a_commit_is_noticed_by_the_commit(base: Base, tmp_path: Path) -> None:
    """P3: open files work on without their folder; the commit does not."""
    root = base.copy(tmp_path / "run") / "nvme"
    away = tmp_path / "away"
    with before_step(2, lambda: root.rename(away)), pytest.raises(IOFailedError, match=r"step 4.*state is step 2"):
        go_on(base.at(tmp_path / "run", LAST))
    away.rename(root)
    assert committed(root) == FIRST
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


@pytest.mark.parametrize("few", [True, False], ids=["reopened", "open"])
def test_a_file_that_is_deleted_in_the_middle_is_never_committed(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """IO-10: of the slot that is being written: whether it is open or not, the last commit stays whole."""
    if few:
        monkeypatch.setattr(tiering.posix, "MAX_OPEN_FILES", 1)
    root = base.copy(tmp_path / "run") / "nvme"
    current = (root / "model.layers.1/weight/c/0").resolve()
    other = {"a": "b", "b": "a"}[current.parent.parent.name]
    spare = root / ".slots" / other / "model.layers.1" / "weight"
    kept = spare.read_bytes()
    with before_step(2, spare.unlink), pytest.raises(DamagedStateError) as raised:
        go_on(base.at(tmp_path / "run", LAST))
    said = str(raised.value)
    assert str(spare) in said and "step 4" in said and "committed state is step 2" in said, said
    assert committed(root) == FIRST
    with pytest.raises(DamagedStateError, match=r"model\.layers\.1/weight.*missing"):
        go_on(base.at(tmp_path / "run", LAST))
    spare.write_bytes(kept)  # any bytes of that size: the slot is written before it is read
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


def test_a_file_that_is_cut_in_the_middle_is_damage_by_name(base: Base, tmp_path: Path, few_open_files: None) -> None:
    """IO-12: block, file, offset, bytes wanted and found; opening says the same; nothing is retried."""
    root = base.copy(tmp_path / "run") / "nvme"
    files = [(root / f"model.layers.1/{kind}/c/0").resolve() for kind in ("weight", "exp_avg", "exp_avg_sq")]

    def cut() -> None:
        for path in files:
            os.truncate(path, 4096)

    with before_step(1, cut), pytest.raises(DamagedStateError) as raised:
        go_on(base.at(tmp_path / "run", LAST))
    said = str(raised.value)
    found = re.search(
        r"^step 3: block (model\.layers\.1/\w+): (\S+) .*wanted \d+ bytes, found \d+.*state is step 2", said
    )
    assert found and found[2] in map(str, files), said
    with pytest.raises(DamagedStateError, match=r"model\.layers\.1/weight.* of step 2 is damaged"):
        BlockStore.open(root)


@contextmanager
def mounted(*command: str, at: Path) -> Iterator[None]:
    """A mount for the test; skips where there is no right to make one."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *command, str(at)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_a_read_only_file_system_is_refused_at_the_start(base: Base, tmp_path: Path) -> None:
    """IO-16: a bind mount, read-only: refused before the model is opened; reading the commit still works."""
    base.copy(tmp_path / "run")
    root = tmp_path / "run/nvme"
    run = base.at(tmp_path / "run", LAST)
    with mounted("--bind", str(root), at=root):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(root)], check=True)
        with pytest.raises(PlaceError, match="read-only file system"):
            accepted(_written(run, tmp_path), [])
        assert committed(root) == FIRST
    assert go_on(run) == 0


def _written(run: RunConfig, folder: Path) -> Path:
    from megatrain.config import dump_run

    path = folder / "again.yaml"
    path.write_text(dump_run(run))
    return path


def test_a_file_system_that_becomes_read_only_ends_the_run(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: what Linux does to a disk with faults: every write is refused from then on."""
    root = base.copy(tmp_path / "run") / "nvme"

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch, before_step(2, lambda: patch.setattr(os, "pwritev", read_only)):
        with pytest.raises(IOFailedError, match=rf"^step 4: block \S+: write .* of {root}.*make it writable"):
            go_on(base.at(tmp_path / "run", LAST))
    assert committed(root) == FIRST
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


def test_a_limit_that_is_met_in_the_middle_is_a_full_disk(base: Base, tmp_path: Path) -> None:
    """IO-06: a real limit of the system (RLIMIT_FSIZE): bytes wanted and free, exit code 3, the last step that was
    committed is what is on disk.
    """
    root = base.copy(tmp_path / "run") / "nvme"
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with before_step(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, kept[1]))):
            with pytest.raises(DiskFullError) as raised:
                go_on(base.at(tmp_path / "run", LAST))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    said = str(raised.value)
    assert re.search(rf"^step 4: block \S+: write of \d+ bytes at offset \d+ of {root}.*wanted \d+ bytes, \d+", said), (
        said
    )
    assert raised.value.exit_code == 3
    assert committed(root) == FIRST
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


def test_a_disk_that_is_full_at_a_commit_keeps_the_one_before(base: Base, tmp_path: Path) -> None:
    """IO-06: a small disk of its own, filled by somebody else: all room of the state was taken before, the manifest's
    was not.
    """
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    if subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True).returncode:
        pytest.skip("no mkfs.ext4")

    def fill() -> None:
        with open(disk / "filler", "wb", buffering=0) as file:
            for size in (1 << 20, 4096, 512):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error

    with mounted("-o", "loop", str(image), at=disk):
        root = base.copy(disk / "run") / "nvme"
        log = disk / "run" / "log.jsonl"
        log.unlink()
        log.symlink_to(tmp_path / "log.jsonl")  # on the full disk it would fail first
        with before_step(2, fill), pytest.raises(DiskFullError) as raised:
            go_on(base.at(disk / "run", LAST))
        said = str(raised.value)
        assert "commit of step 4" in said and "bytes are free" in said and "state is step 2" in said, said
        assert committed(root) == FIRST
        (disk / "filler").unlink()
        assert go_on(base.at(disk / "run", LAST)) == 0
        assert state(root) == base.wanted


def test_a_log_that_cannot_be_written_is_a_full_disk_too(base: Base, tmp_path: Path) -> None:
    """IO-06: the run's own files lie on a disk as well; the state is that of the last commit."""
    root = base.copy(tmp_path / "run") / "nvme"
    log = tmp_path / "run" / "log.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=rf"^step 3: {log}: the row of step 3, \d+ bytes.*state is step 2"):
        go_on(base.at(tmp_path / "run", LAST))
    assert committed(root) == FIRST
    log.unlink()
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert state(root) == base.wanted


def test_transfers_that_move_only_a_part_change_no_bit(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: a page of every transfer, some bytes of every manifest and file of checksums; the rest follows."""
    root = base.copy(tmp_path / "run") / "nvme"
    reads, writes, puts, parts = os.preadv, os.pwritev, os.pwrite, [0]

    def read(fd: int, views: list[memoryview], at: int) -> int:
        return reads(fd, [views[0][:4096]], at)

    def write(fd: int, views: list[memoryview], at: int) -> int:
        parts[0] += len(views[0]) > 4096
        return writes(fd, [views[0][:4096]], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        patch.setattr(os, "pwritev", write)
        patch.setattr(os, "pwrite", lambda fd, data, at: puts(fd, data[:1000], at))
        assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert parts[0] > 10, "hardly any transfer was cut short"
    found = scrub(root)
    assert (found.step, found.damage) == (LAST, ()), found.damage
    assert state(root) == base.wanted


def test_a_clock_that_is_set_back_changes_nothing(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: dates in a manifest are told, never compared; steps decide."""
    root = base.copy(tmp_path / "run") / "nvme"

    class Earlier(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime(1999, 12, 31, 23, 59, tzinfo=tz)

    monkeypatch.setattr(tiering.new_store, "datetime", Earlier)
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert "1999-12-31" in (root / "manifest.json").read_text(), "the clock was not set back"
    assert committed(root) == LAST
    assert state(root) == base.wanted


def test_a_lock_that_another_host_left_is_no_obstacle(base: Base, tmp_path: Path) -> None:
    """IO-14: what the file says is told, what the kernel holds decides."""
    root = base.copy(tmp_path / "run") / "nvme"
    (root / ".lock").write_text("host elsewhere, pid 4711, user nobody\n")
    assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert (root / ".lock").read_text() == "", "the owner is still named after it has gone"
    assert state(root) == base.wanted


def test_a_file_system_without_locks_is_used_with_one_warning(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-28: the call is not implemented: a whole run goes on, with the warning."""
    root = base.copy(tmp_path / "run") / "nvme"

    def no_lock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.warns(RuntimeWarning, match="no locks") as said:
        assert go_on(base.at(tmp_path / "run", LAST)) == 0
    assert len(said) == 1, [str(one.message) for one in said]
    assert state(root) == base.wanted
