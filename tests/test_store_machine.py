"""Any sequence of writes, commits and restarts leaves what two dicts say, on one drive and on several.

Scope: `tiering/store.py` as a state machine.
Not here: failures inside a commit (`test_commit.py`).
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_bytes import IDENTITY, PAGE, blocks, get_all, put, sync, unlike

from tiering import checksums, chunk_files
from tiering.errors import ScheduleError
from tiering.store import BlockStore

PAGES = 5
GRAIN_PAGES = 3  # so that writes cover grains in part, and grains lie in two chunks
CHUNK_PAGES = 2  # so that the last chunk of a block is half used


class StoreMachine(RuleBasedStateMachine):
    """The store against two dicts: what was written, and what the last commit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "nvme"

    @initialize(drives=st.integers(1, 3), rates=st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=3, max_size=3))
    def create(self, drives: int, rates: list[float]) -> None:
        self.others = [Path(self.folder.name) / f"drive{number}" for number in range(1, drives)]
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(chunk_files, "CHUNK_BYTES", CHUNK_PAGES * PAGE)
        self.patch.setattr(checksums, "GRAIN_BYTES", GRAIN_PAGES * PAGE)
        self.store = BlockStore.create(
            self.root, blocks(pages=PAGES)[:3], identity=IDENTITY, others=self.others, rates=rates[:drives]
        )
        self.current = get_all(self.store)
        self.committed = dict(self.current)
        self.step: int | None = None
        self.marker = 0

    def _put(self, name: str, lo: int, hi: int, *, at_hand: bool = True) -> None:
        self.marker = self.marker % 255 + 1
        data = bytes([self.marker]) * (hi - lo)
        put(self.store, name, data, lo, at_hand=at_hand)
        self.current[name] = self.current[name][:lo] + data + self.current[name][hi:]

    @rule(index=st.integers(0, 2), page=st.integers(0, PAGES - 1), pages=st.integers(1, PAGES), at_hand=st.booleans())
    def write(self, index: int, page: int, pages: int, at_hand: bool) -> None:
        name = list(self.current)[index]
        self._put(name, page * PAGE, min(PAGES, page + pages) * PAGE, at_hand=at_hand)

    @rule(whole=st.booleans())
    def commit(self, whole: bool) -> None:
        dirty = [name for name in self.current if self.current[name] != self.committed[name]]
        if whole:
            for name in dirty:
                self._put(name, 0, PAGES * PAGE)
        try:
            self.store.commit((self.step or 0) + 1, {}, sync)
        except ScheduleError:
            assert not whole, "a commit of whole blocks was refused"
        else:
            self.step = (self.step or 0) + 1
            self.committed = dict(self.current)

    @rule(turned=st.booleans())
    def reopen(self, turned: bool) -> None:
        self.store.close()
        if turned:
            self.others.reverse()
        self.store = BlockStore.open(self.root, others=self.others, expect=IDENTITY)
        self.current = dict(self.committed)

    @invariant()
    def agrees(self) -> None:
        """P3: the current bytes and the committed bytes are both what the dicts say, and have their checksums."""
        if hasattr(self, "store"):
            assert self.store.step == self.step
            assert unlike(self.current, get_all(self.store)) == []
            with BlockStore.open(self.root, others=self.others, read_only=True) as reader:
                assert unlike(self.committed, get_all(reader)) == []
            links = {name: self._through_links(name) for name in self.committed}
            assert unlike(self.committed, links) == []

    def _through_links(self, name: str) -> bytes:
        """What zarr would read; it takes too long here."""
        chunks = sorted((self.root / name / "c").iterdir(), key=lambda link: int(link.name))
        return b"".join(chunk.read_bytes() for chunk in chunks)[: PAGES * PAGE]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.patch.undo()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
