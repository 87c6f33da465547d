"""I/O engines move whole transfers or say what went wrong: one contract for every engine and every file system.

Scope: `tiering/engine.py`, `tiering/posix.py`, `tiering/bounce.py`.
Not here: which engine is chosen, and kvikio (`test_choose_engine.py`);
slots and commits (`test_store.py`, `test_commit.py`).
"""

import errno
import fcntl
import mmap
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.fixture(params=["direct", "buffered", "refused"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IOEngine]:
    if request.param == "buffered":
        with PosixEngine(4, direct=False) as made:
            yield made
        return
    skip_without_direct(tmp_path)
    if request.param == "refused":
        refuse_direct(monkeypatch)
    with warnings.catch_warnings(), PosixEngine(4) as made:
        if request.param == "refused":
            warnings.simplefilter("ignore", RuntimeWarning)
        yield made


def test_what_is_written_is_on_disk_and_read_back(engine: IOEngine, tmp_path: Path) -> None:
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
    engine: IOEngine, tmp_path: Path, nbytes: int, offset: int, shift: int
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
def test_a_tensor_of_any_size_keeps_its_tail(engine: IOEngine, tmp_path: Path, nbytes: int) -> None:
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


def test_writes_that_share_a_page_do_not_lose_each_other(engine: IOEngine, tmp_path: Path) -> None:
    """IO-02: two requests off the grid at once each rewrite the shared page with the other's bytes kept."""
    path = new_file(tmp_path / "f", bytes(2 * PAGE))
    data = os.urandom(2 * PAGE)
    for done in [
        engine.submit_write(extent(path, 64, lo), filled(data[lo : lo + 64])) for lo in range(0, 2 * PAGE, 64)
    ]:
        done.result()
    assert path.read_bytes() == data


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


def test_a_short_file_is_damage_and_names_everything(engine: IOEngine, tmp_path: Path) -> None:
    """I6, IO-12: a read past the end is an error with block, file, offset, bytes wanted and found."""
    path = new_file(tmp_path / "f", bytes(PAGE + 1000))
    with pytest.raises(DamagedStateError) as raised:
        engine.submit_read(extent(path, 2 * PAGE, PAGE), aligned(2 * PAGE)).result()
    for part in ("layers.3/exp_avg", str(path), "offset 4096", "wanted 8192", "found 1000", "earlier commit"):
        assert part in str(raised.value)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_missing_file_is_damage_and_is_not_created(engine: IOEngine, tmp_path: Path, verb: str) -> None:
    """I9: an engine never creates a file."""
    submit = engine.submit_read if verb == "read" else engine.submit_write
    with pytest.raises(DamagedStateError, match="missing"):
        submit(extent(tmp_path / "gone", PAGE), aligned(PAGE)).result()
    assert not (tmp_path / "gone").exists()


def test_nothing_to_do_is_done_at_once(engine: IOEngine, tmp_path: Path) -> None:
    """IO-18: no requests, or requests of no bytes, touch no file."""
    engine.sync([])
    assert engine.submit_read(extent(tmp_path / "gone", 0), aligned(0)).result() == 0
    assert engine.submit_write(extent(tmp_path / "gone", 0), aligned(0)).result() == 0


def test_a_full_disk_says_how_much_was_wanted_and_is_free(tmp_path: Path) -> None:
    """IO-06: a slot file that is backed by a full device."""
    path = tmp_path / "slot"
    path.symlink_to("/dev/full")
    with PosixEngine(1, direct=False) as posix, pytest.raises(DiskFullError) as raised:
        posix.submit_write(extent(path, PAGE), aligned(PAGE)).result()
    for part in ("layers.3/exp_avg", str(path), "wanted 4096 bytes", "bytes are free"):
        assert part in str(raised.value)
    assert raised.value.exit_code == 3


def test_a_failing_disk_is_named_with_block_and_offset(
    engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_partial_write_goes_on_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: progress of whole pages is continued; a call that then fails tells why; half a page is an error."""
    real, path = os.pwritev, new_file(tmp_path / "f", bytes(4 * PAGE))
    data = os.urandom(4 * PAGE)
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real(fd, [views[0][:PAGE]], at))
    with PosixEngine(1, direct=False) as posix:
        assert posix.submit_write(extent(path, 4 * PAGE), filled(data)).result() == 4 * PAGE
        assert path.read_bytes() == data

        def full_after_two(fd: int, views: list[memoryview], at: int) -> int:
            if at >= 2 * PAGE:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, [views[0][:PAGE]], at)

        monkeypatch.setattr(os, "pwritev", full_after_two)
        with pytest.raises(DiskFullError, match="wanted 16384"):
            posix.submit_write(extent(path, 4 * PAGE), filled(data)).result()
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
        with pytest.raises(IOFailedError, match="0 of 16384 bytes"):
            posix.submit_write(extent(path, 4 * PAGE), filled(data)).result()


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


def test_closing_waits_for_what_is_outstanding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is never dropped: after `close` every future is done and the bytes are in the file."""
    real, path = os.pwritev, new_file(tmp_path / "f", bytes(8 * PAGE))

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.02)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    posix = PosixEngine(2)
    futures = [posix.submit_write(extent(path, PAGE, i * PAGE), filled(bytes([i + 1]) * PAGE)) for i in range(8)]
    posix.close()
    assert all(future.done() for future in futures)
    assert path.read_bytes() == b"".join(bytes([i + 1]) * PAGE for i in range(8))


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
