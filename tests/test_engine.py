"""I/O engines move whole transfers or say what went wrong: one contract for every engine and every file system.

Scope: `tiering/engine.py`, `tiering/pooled.py`, `tiering/posix.py`, `tiering/gds.py`, `tiering/bounce.py`.
`TestContract` holds every engine to the same words: posix with direct I/O, through the page cache, where a file system
refuses direct I/O at the first transfer; kvikio over a stand-in, and kvikio itself where a probe transfer works.
Not here: which engine is chosen (`test_choose_engine.py`), requests that hang (`test_watchdog.py`);
slots and commits (`test_store.py`, `test_commit.py`).
"""

import errno
import fcntl
import gc
import mmap
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvikio_stand_in import StandIn, install

from tiering import gds
from tiering import posix as posix_module
from tiering.engine import Extent, IOEngine
from tiering.errors import DamagedStateError, DiskFullError, IOFailedError
from tiering.place import filesystem_of
from tiering.posix import PosixEngine

PAGE = 4096
MIB = 1 << 20


def aligned(nbytes: int, *, shift: int = 0) -> memoryview:
    """Writable memory at a page address plus `shift`."""
    return memoryview(mmap.mmap(-1, nbytes + PAGE))[shift : shift + nbytes]


def filled(data: bytes, *, shift: int = 0) -> memoryview:
    view = aligned(len(data), shift=shift)
    view[:] = data
    return view


def extent(path: Path, nbytes: int, offset: int = 0, block: str = "layers.3/exp_avg") -> Extent:
    return Extent(path=path, offset=offset, nbytes=nbytes, block=block)


def new_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def skip_without_direct(folder: Path) -> None:
    path = new_file(folder / "direct", bytes(PAGE))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [aligned(PAGE)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        pytest.skip(f"{filesystem_of(folder).fs_type} refuses direct I/O: {error.strerror}")


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening with O_DIRECT works, transfers do not: what some file systems do."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def move(fd: int, views: list[memoryview], offset: int, real=real) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, views, offset)

        monkeypatch.setattr(os, name, move)


ENGINES = ("posix-direct", "posix-buffered", "posix-refused", "kvikio-stand-in", "kvikio")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IOEngine]:
    name = request.param
    if name == "kvikio":
        reason = gds.probe(tmp_path)
        if reason is not None:
            pytest.skip(f"kvikio cannot work here: {reason}")
    if name in ("posix-direct", "posix-refused"):
        skip_without_direct(tmp_path)
    if name == "posix-refused":
        refuse_direct(monkeypatch)
    if name == "kvikio-stand-in":
        install(monkeypatch)
    made = gds.KvikioEngine(4) if name.startswith("kvikio") else PosixEngine(4, direct=name != "posix-buffered")
    with warnings.catch_warnings(), made:
        if name == "posix-refused":
            warnings.simplefilter("ignore", RuntimeWarning)
        yield made


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = os.pwritev

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(seconds)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)


def refused_writes(monkeypatch: pytest.MonkeyPatch, code: int, *, at: int = 0) -> None:
    """Every write call from offset `at` on fails."""
    real = os.pwritev

    def call(fd: int, views: list[memoryview], offset: int) -> int:
        if offset >= at:
            raise OSError(code, os.strerror(code))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", call)


@contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """RLIMIT_FSIZE for the tests inside; Python ignores the signal that comes with it."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def posix_only(engine: IOEngine) -> None:
    """The calls of the system cannot be stood in for where a library makes them."""
    if getattr(engine, "_open", StandIn) is not StandIn and engine.name == "kvikio":
        pytest.skip("kvikio makes its calls itself")


class TestContract:
    """Every engine, one contract."""

    def test_what_is_written_is_on_disk_and_read_back(self, engine: IOEngine, tmp_path: Path) -> None:
        """I6: many requests at once, one future each, and a plain read of the file agrees."""
        parts = [os.urandom(3 * PAGE) for _ in range(24)]
        path = new_file(tmp_path / "f", bytes(24 * 3 * PAGE))
        extents = [extent(path, 3 * PAGE, i * 3 * PAGE) for i in range(24)]
        counts = [f.result() for f in [engine.submit_write(e, filled(p)) for e, p in zip(extents, parts, strict=True)]]
        engine.sync([path])
        assert counts == [3 * PAGE] * 24
        assert path.read_bytes() == b"".join(parts), "the file holds other bytes than were written"
        views = [aligned(3 * PAGE) for _ in parts]
        counts = [f.result() for f in [engine.submit_read(e, v) for e, v in zip(extents, views, strict=True)]]
        assert counts == [3 * PAGE] * 24
        assert [bytes(v) for v in views] == parts, "other bytes were read than are in the file"

    @pytest.mark.parametrize(
        ("nbytes", "offset", "shift"),
        [
            (1000, 0, 0),
            (4096, 100, 0),
            (4096, 0, 8),
            (512, 0, 0),
            (4096, 0, 0),
            (9000, 4095, 3),
            (1, 8191, 1),
        ],
    )
    def test_a_request_off_the_page_grid_round_trips(
        self, engine: IOEngine, tmp_path: Path, nbytes: int, offset: int, shift: int
    ) -> None:
        """IO-02: any length, offset and address; the bytes around the write stay, the file does not grow beyond it."""
        before, data = os.urandom(10_000), os.urandom(nbytes)
        path = new_file(tmp_path / "f", before)
        assert engine.submit_write(extent(path, nbytes, offset), filled(data, shift=shift)).result() == nbytes
        wanted = bytearray(before.ljust(offset, b"\0"))
        wanted[offset : offset + nbytes] = data
        assert path.read_bytes() == bytes(wanted), f"{path.stat().st_size} bytes against {len(wanted)}"
        back = aligned(nbytes, shift=shift)
        assert engine.submit_read(extent(path, nbytes, offset), back).result() == nbytes
        assert bytes(back) == data

    @pytest.mark.parametrize("nbytes", [n * 4 for n in (1, 127, 128, 129, 1023, 1024, 1025)] + [28_824_000])
    def test_a_tensor_of_any_size_keeps_its_tail(self, engine: IOEngine, tmp_path: Path, nbytes: int) -> None:
        """IO-04: 1 MiB requests over a size off the grid leave no tail behind and the length is the tensor's."""
        data = os.urandom(nbytes)
        path = new_file(tmp_path / "f", b"")
        cuts = [(lo, min(lo + MIB, nbytes)) for lo in range(0, nbytes, MIB)]
        for lo, hi in cuts:
            engine.submit_write(extent(path, hi - lo, lo), filled(data[lo:hi])).result()
        assert path.stat().st_size == nbytes
        assert path.read_bytes() == data
        padded = new_file(tmp_path / "padded", data + bytes(-nbytes % PAGE))
        back = aligned(nbytes)
        assert engine.submit_read(extent(padded, nbytes), back).result() == nbytes
        assert bytes(back) == data

    def test_writes_that_share_a_page_do_not_lose_each_other(self, engine: IOEngine, tmp_path: Path) -> None:
        """IO-02: two requests off the grid at once each rewrite the shared page with the other's bytes kept."""
        path = new_file(tmp_path / "f", bytes(2 * PAGE))
        data = os.urandom(2 * PAGE)
        for done in [
            engine.submit_write(extent(path, 64, lo), filled(data[lo : lo + 64])) for lo in range(0, 2 * PAGE, 64)
        ]:
            done.result()
        assert path.read_bytes() == data

    def test_a_short_file_is_damage_and_names_everything(self, engine: IOEngine, tmp_path: Path) -> None:
        """I6, IO-12: a read past the end is an error with block, file, offset, bytes wanted and found."""
        path = new_file(tmp_path / "f", bytes(PAGE + 1000))
        with pytest.raises(DamagedStateError) as raised:
            engine.submit_read(extent(path, 2 * PAGE, PAGE), aligned(2 * PAGE)).result()
        for part in ("layers.3/exp_avg", str(path), "offset 4096", "wanted 8192", "found 1000", "earlier commit"):
            assert part in str(raised.value)

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_missing_file_is_damage_and_is_not_created(self, engine: IOEngine, tmp_path: Path, verb: str) -> None:
        """I9: an engine never creates a file."""
        submit = engine.submit_read if verb == "read" else engine.submit_write
        with pytest.raises(DamagedStateError, match="missing"):
            submit(extent(tmp_path / "gone", PAGE), aligned(PAGE)).result()
        assert not (tmp_path / "gone").exists()

    def test_a_folder_that_is_gone_is_no_damage(self, engine: IOEngine, tmp_path: Path) -> None:
        """A drive that vanished comes back with its bytes: the last commit is offered, not an earlier one."""
        (tmp_path / "drive").mkdir()
        path = new_file(tmp_path / "drive" / "f", bytes(PAGE))
        (tmp_path / "drive").rename(tmp_path / "elsewhere")
        with pytest.raises(IOFailedError, match=r"layers\.3/exp_avg: read .*folder is gone.*the last commit") as raised:
            engine.submit_read(extent(path, PAGE), aligned(PAGE)).result()
        assert not isinstance(raised.value, DamagedStateError)

    def test_a_file_that_was_deleted_is_never_made_durable(self, engine: IOEngine, tmp_path: Path) -> None:
        """P3: writes to an open file go on when its name is gone; a commit of them would be lost."""
        path = new_file(tmp_path / "f", bytes(PAGE))
        engine.submit_write(extent(path, PAGE), aligned(PAGE)).result()
        path.unlink()
        assert engine.submit_write(extent(path, PAGE), aligned(PAGE)).result() == PAGE
        with pytest.raises(DamagedStateError, match=f"{path}: the file was deleted"):
            engine.sync([path])

    def test_nothing_to_do_is_done_at_once(self, engine: IOEngine, tmp_path: Path) -> None:
        """IO-18: no requests, or requests of no bytes, touch no file."""
        engine.sync([])
        assert engine.submit_read(extent(tmp_path / "gone", 0), aligned(0)).result() == 0
        assert engine.submit_write(extent(tmp_path / "gone", 0), aligned(0)).result() == 0

    def test_a_failing_disk_is_named_with_block_and_offset(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """I10: EIO becomes a typed error, for transfers and for sync."""
        path = new_file(tmp_path / "f", bytes(2 * PAGE))

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwritev", fail)
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(IOFailedError, match=r"layers\.3/exp_avg: write of 4096 bytes at offset 4096 .* EIO"):
            engine.submit_write(extent(path, PAGE, PAGE), aligned(PAGE)).result()
        with pytest.raises(IOFailedError, match="flushing"):
            engine.sync([path])

    def test_a_partial_write_goes_on_with_the_rest(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """I6: progress of whole pages is continued; a call that then fails tells why; no progress is an error."""
        posix_only(engine)
        real, path = os.pwritev, new_file(tmp_path / "f", bytes(4 * PAGE))
        data = os.urandom(4 * PAGE)
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real(fd, [views[0][:PAGE]], at))
        assert engine.submit_write(extent(path, 4 * PAGE), filled(data)).result() == 4 * PAGE
        assert path.read_bytes() == data

        def full_after_two(fd: int, views: list[memoryview], at: int) -> int:
            if at >= 2 * PAGE:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, [views[0][:PAGE]], at)

        monkeypatch.setattr(os, "pwritev", full_after_two)
        with pytest.raises(DiskFullError, match="wanted 16384"):
            engine.submit_write(extent(path, 4 * PAGE), filled(data)).result()
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
        with pytest.raises(IOFailedError, match="0 of 16384 bytes"):
            engine.submit_write(extent(path, 4 * PAGE), filled(data)).result()

    def test_any_layout_in_memory_is_moved_in_its_logical_order(self, engine: IOEngine, tmp_path: Path) -> None:
        """IO-20: a transposed tensor, a slice with a storage offset, a numpy array, a torch tensor as it is."""
        path = new_file(tmp_path / "f", bytes(PAGE))
        base = torch.arange(128, dtype=torch.float32)
        layouts = {
            "transposed": base[:64].reshape(8, 8).T,
            "a slice": base[3:67],
            "every second": base[::2],
            "numpy": base[:64].reshape(4, 16).numpy().T,
            "a memoryview": memoryview(base[:64].reshape(8, 8).numpy().T),
        }
        for name, array in layouts.items():
            wanted = np.asarray(array).tobytes()
            assert engine.submit_write(extent(path, 256), array).result() == 256
            assert path.read_bytes()[:256] == wanted, f"{name}: other bytes are in the file"
            target = torch.full((128,), -1.0)
            back = target[:64].reshape(8, 8).T
            assert engine.submit_read(extent(path, 256), back).result() == 256
            assert np.asarray(back).tobytes() == wanted, f"{name}: other bytes came back"
            assert (target[64:] == -1).all(), f"{name}: bytes beside the view were changed"

    def test_a_request_owns_its_memory_until_it_is_done(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """IO-21: the future is open as long as the write runs; afterwards the caller may do what it likes."""
        posix_only(engine)
        path = new_file(tmp_path / "f", bytes(2 * PAGE))
        slow_writes(monkeypatch, 0.05)
        data = os.urandom(PAGE)
        reused = filled(data)
        pending = engine.submit_write(extent(path, PAGE), reused)
        assert not pending.done(), "a request was done before its write"
        pending.result()  # the 50 ms of this write
        reused[:] = bytes(PAGE)
        dropped = engine.submit_write(extent(path, PAGE, PAGE), filled(data))
        gc.collect()  # the engine alone holds the memory now
        dropped.result()
        assert path.read_bytes() == data * 2

    def test_a_full_disk_says_how_much_was_wanted_and_is_free(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """IO-06: a slot file that is backed by a full device."""
        path = tmp_path / "slot"
        path.symlink_to("/dev/full")
        warnings.simplefilter("ignore", RuntimeWarning)  # the device takes no direct I/O
        with pytest.raises(DiskFullError) as raised:
            engine.submit_write(extent(path, PAGE), aligned(PAGE)).result()
        for part in ("layers.3/exp_avg", str(path), "wanted 4096 bytes", "bytes are free", "Fix: make room"):
            assert part in str(raised.value), f"{part!r} is not in {raised.value}"
        assert raised.value.exit_code == 3

    def test_a_limit_of_file_sizes_is_named(self, engine: IOEngine, tmp_path: Path) -> None:
        """IO-06: EFBIG, by a real limit: what fits is written, what does not is refused with the way out."""
        path = new_file(tmp_path / "f", bytes(PAGE))
        with files_at_most(64 * MIB):
            with pytest.raises(DiskFullError, match=r"layers\.3/exp_avg.*File too large.*ulimit -f"):
                engine.submit_write(extent(path, PAGE, 64 * MIB), aligned(PAGE)).result()
            assert engine.submit_write(extent(path, PAGE), aligned(PAGE)).result() == PAGE

    @pytest.mark.parametrize(
        ("code", "kind", "said"),
        [
            (errno.EIO, IOFailedError, "EIO"),
            (errno.ENOSPC, DiskFullError, "wanted 8192 bytes"),
            (errno.EDQUOT, DiskFullError, "wanted 8192 bytes"),
            (errno.EROFS, IOFailedError, "make it writable"),
            (errno.ENODEV, IOFailedError, "ENODEV"),
        ],
    )
    def test_what_the_system_says_becomes_a_typed_error(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type, said: str
    ) -> None:
        """I10: block, file, offset and bytes are named, whatever failed; another request is not touched by it."""
        posix_only(engine)
        path = new_file(tmp_path / "f", bytes(4 * PAGE))
        refused_writes(monkeypatch, code, at=2 * PAGE)
        bad = engine.submit_write(extent(path, 2 * PAGE, 2 * PAGE), aligned(2 * PAGE))
        good = engine.submit_write(extent(path, 2 * PAGE), filled(b"x" * 2 * PAGE))
        with pytest.raises(kind) as raised:
            bad.result()
        for part in ("layers.3/exp_avg", str(path), "offset 8192", "8192 bytes", said, "Fix:"):
            assert part in str(raised.value), f"{part!r} is not in {raised.value}"
        assert good.result() == 2 * PAGE
        assert path.read_bytes() == b"x" * 2 * PAGE + bytes(2 * PAGE)

    def test_a_file_that_may_only_be_read_is_read_and_its_write_says_why(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A store on a read-only medium can be read; a write is refused as that, not as a bad descriptor."""
        path = new_file(tmp_path / "f", b"y" * PAGE)
        real, may = os.open, os.access

        def read_only(file: object, flags: int, *rest: int) -> int:
            if file == path and flags & os.O_RDWR:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(file, flags, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", read_only)
        monkeypatch.setattr(os, "access", lambda file, mode: file != path and may(file, mode))
        view = aligned(PAGE)
        assert engine.submit_read(extent(path, PAGE), view).result() == PAGE
        assert bytes(view) == b"y" * PAGE
        with pytest.raises(IOFailedError, match=r"layers\.3/exp_avg: write .*make it writable"):
            engine.submit_write(extent(path, PAGE), aligned(PAGE)).result()
        assert path.read_bytes() == b"y" * PAGE

    def test_closing_waits_for_what_is_outstanding(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request is never dropped: after `close` every future is done and the bytes are in the file."""
        posix_only(engine)
        path = new_file(tmp_path / "f", bytes(8 * PAGE))
        slow_writes(monkeypatch, 0.02)
        futures = [engine.submit_write(extent(path, PAGE, i * PAGE), filled(bytes([i + 1]) * PAGE)) for i in range(8)]
        engine.close()
        assert all(future.done() for future in futures)
        assert path.read_bytes() == b"".join(bytes([i + 1]) * PAGE for i in range(8))

    def test_a_closed_engine_refuses_and_closing_twice_is_harmless(self, engine: IOEngine, tmp_path: Path) -> None:
        """I10: a late request meets a typed error, not a shut-down thread pool."""
        path = new_file(tmp_path / "f", b"z" * PAGE)
        engine.close()
        engine.close()
        for submit in (engine.submit_read, engine.submit_write):
            with pytest.raises(IOFailedError, match=r"layers\.3/exp_avg.*engine is closed"):
                submit(extent(path, PAGE), aligned(PAGE)).result()
        engine.sync([])
        with pytest.raises(IOFailedError, match="engine is closed"):
            engine.sync([path])
        assert path.read_bytes() == b"z" * PAGE

    def test_a_sync_of_several_files_names_the_one_that_fails(
        self, engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """I7, I10: an fsync that failed once has lost data: it is never tried again and never forgotten."""
        paths = [new_file(tmp_path / name, bytes(PAGE)) for name in "abc"]
        real, calls = os.fdatasync, []

        def flush(fd: int) -> None:
            calls.append(fd)
            if os.path.samestat(os.fstat(fd), os.stat(paths[1])):
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        monkeypatch.setattr(os, "fdatasync", flush)
        with pytest.raises(IOFailedError, match=f"{paths[1]}: flushing to the disk failed"):
            engine.sync(paths)
        engine.close()
        assert len(calls) <= 3, "a failed flush was repeated"
        with type(engine)(1) as fresh, pytest.raises(IOFailedError, match=r"gone: flushing"):  # type: ignore[call-arg]
            fresh.sync([tmp_path / "gone"])
        assert not (tmp_path / "gone").exists()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 9_000), st.integers(0, 5)), max_size=6))
def test_any_sequence_of_writes_equals_the_same_on_a_bytearray(writes: list[tuple[int, int, int]]) -> None:
    """IO-02: content and length follow a plain model of a file, on whatever the temporary folder stands on."""
    with tempfile.TemporaryDirectory() as folder, PosixEngine(1) as posix, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        path = new_file(Path(folder) / "f", b"")
        model = bytearray()
        for number, (offset, nbytes, shift) in enumerate(writes):
            data = bytes([number + 1]) * nbytes
            posix.submit_write(extent(path, nbytes, offset), filled(data, shift=shift)).result()
            model.extend(bytes(max(0, offset + nbytes - len(model))))
            model[offset : offset + nbytes] = data
        assert path.read_bytes() == bytes(model)


def test_refused_direct_io_falls_back_once_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IO-03: the first transfer raises EINVAL: data intact, one warning with path and file system type."""
    skip_without_direct(tmp_path)
    refuse_direct(monkeypatch)
    data = os.urandom(2 * PAGE)
    paths = [new_file(tmp_path / name, bytes(2 * PAGE)) for name in ("f", "g")]
    with warnings.catch_warnings(record=True) as caught, PosixEngine(4) as posix:
        warnings.simplefilter("always")
        for path in paths:
            halves = [(0, data[:PAGE]), (PAGE, data[PAGE:])]
            for done in [posix.submit_write(extent(path, PAGE, lo), filled(half)) for lo, half in halves]:
                done.result()
    said = [str(w.message) for w in caught]
    assert [path.read_bytes() for path in paths] == [data, data]
    assert len(said) == 1 and str(paths[0]) in said[0] and filesystem_of(tmp_path).fs_type in said[0], said


def test_einval_after_direct_io_worked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IO-03: the fallback is for file systems that refuse the flag, not a way around a fault."""
    skip_without_direct(tmp_path)
    path = new_file(tmp_path / "f", bytes(PAGE))
    with PosixEngine(1) as posix:
        posix.submit_read(extent(path, PAGE), aligned(PAGE)).result()
        refuse_direct(monkeypatch)
        with pytest.raises(IOFailedError, match="EINVAL"):
            posix.submit_read(extent(path, PAGE), aligned(PAGE)).result()


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks of two slots are more files than a process may usually hold open."""
    monkeypatch.setattr(posix_module, "MAX_OPEN_FILES", 4)
    paths = [new_file(tmp_path / str(i), bytes([i]) * PAGE) for i in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    with PosixEngine(3) as posix:
        views = [aligned(PAGE) for _ in paths]
        for done in [posix.submit_read(extent(p, PAGE), v) for p, v in zip(paths, views, strict=True)]:
            done.result()
        most = 4 + 3  # the table, and what three threads hold at the same time
        assert len(os.listdir("/proc/self/fd")) - before <= most
    assert [bytes(view[:1]) for view in views] == [bytes([i]) for i in range(40)]
    assert len(os.listdir("/proc/self/fd")) == before, "close left files open"
