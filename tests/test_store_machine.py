"""Any sequence of writes, commits and restarts leaves what two dicts say.

Scope: `tiering/store.py` as a state machine.
Not here: failures inside a commit (`test_commit.py`).
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_bytes import IDENTITY, PAGE, blocks, get_all, put, sync, unlike

from tiering.errors import ScheduleError
from tiering.store import BlockStore


class StoreMachine(RuleBasedStateMachine):
    """The store against two dicts: what was written, and what the last commit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "nvme"

    @initialize()
    def create(self) -> None:
        self.store = BlockStore.create(self.root, blocks(pages=2)[:3], identity=IDENTITY)
        self.current = get_all(self.store)
        self.committed = dict(self.current)
        self.step: int | None = None
        self.marker = 0

    def _put(self, name: str, lo: int, hi: int) -> None:
        self.marker = self.marker % 255 + 1
        data = bytes([self.marker]) * (hi - lo)
        put(self.store, name, data, lo)
        self.current[name] = self.current[name][:lo] + data + self.current[name][hi:]

    @rule(index=st.integers(0, 2), page=st.integers(0, 1), pages=st.integers(1, 2))
    def write(self, index: int, page: int, pages: int) -> None:
        name = list(self.current)[index]
        self._put(name, page * PAGE, min(2, page + pages) * PAGE)

    @rule(whole=st.booleans())
    def commit(self, whole: bool) -> None:
        dirty = [name for name in self.current if self.current[name] != self.committed[name]]
        if whole:
            for name in dirty:
                self._put(name, 0, 2 * PAGE)
        try:
            self.store.commit((self.step or 0) + 1, {}, sync)
        except ScheduleError:
            assert not whole, "a commit of whole blocks was refused"
        else:
            self.step = (self.step or 0) + 1
            self.committed = dict(self.current)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = BlockStore.open(self.root, expect=IDENTITY)
        self.current = dict(self.committed)

    @invariant()
    def agrees(self) -> None:
        """P3: the current bytes and the committed bytes are both what the dicts say."""
        if hasattr(self, "store"):
            assert self.store.step == self.step
            assert unlike(self.current, get_all(self.store)) == []
            with BlockStore.open(self.root, read_only=True) as reader:
                assert unlike(self.committed, get_all(reader)) == []
                links = {n: (self.root / n / "c" / "0").read_bytes() for n in self.committed}
            assert unlike(self.committed, links) == []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
