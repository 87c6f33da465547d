"""What a disk may hold after a power cut: every write that was not made durable kept, lost, torn or out of order.

Scope: `recorded` (the file operations of a piece of code, as the system sees them), `Recording.image` (a disk that a
cut after any of them may leave). Used by `test_power_cut.py`.
Not here: which images have to hold which commit (`test_power_cut.py`), kills of a process (`torture.py`).

The model is stricter than usual file systems. The data and size of a file are durable after fsync or fdatasync of that
file; a name is durable after fsync of its folder. All else may be there or not, each sector of 512 or 4096 bytes of a
write by itself. Only a rename is atomic.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(eq=False, slots=True)
class Node:
    """A file, a folder or a link. `entries` is what its names are now, while recording."""

    kind: str
    first_path: str
    target: str = ""
    entries: dict[str, "Node"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """verb: write, size, names (all of them or none: a rename has two), sync, mark. names: (folder, name, what it names
    now or None). mark: what the test said; of a sync, the function that was called.
    """

    verb: str
    node: Node | None = None
    offset: int = 0
    data: bytes = b""
    size: int = 0
    names: tuple[tuple[Node, str, Node | None], ...] = ()
    mark: Any = None

    @property
    def text(self) -> str:
        where = self.node.first_path if self.node else ", ".join(f"{d.first_path}/{name}" for d, name, _ in self.names)
        return f"{self.verb} {where}"


class Recording:
    """The events in their order, and the tree that they started from."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.events: list[Event] = []
        self.first_data: dict[Node, bytes] = {}
        self.first_entries: dict[Node, dict[str, Node]] = {}
        self.root = self._scan(top)
        self.lock = threading.RLock()
        self.fds: dict[int, Node] = {}

    def mark(self, value: Any) -> None:
        """Something that the test wants to find between the events."""
        with self.lock:
            self.events.append(Event(verb="mark", mark=value))

    def _scan(self, path: Path) -> Node:
        name = str(path.relative_to(self.top))
        if path.is_symlink():
            return Node("link", name, target=os.readlink(path))
        if path.is_file():
            node = Node("file", name)
            self.first_data[node] = path.read_bytes()
            return node
        node = Node("folder", name, entries={child.name: self._scan(child) for child in path.iterdir()})
        self.first_entries[node] = dict(node.entries)
        return node

    def find(self, path: Any) -> tuple[Node, str] | None:
        """Folder and name of a path as it is now; None for one that is elsewhere."""
        full = Path(os.path.abspath(os.fspath(path)))
        if not full.is_relative_to(self.top):
            return None
        if full == self.top:
            return self.root, "."
        node = self.root
        for part in full.relative_to(self.top).parent.parts:
            if part not in node.entries:  # made by somebody whom we do not see
                self.appear(node, part)
            node = node.entries[part]
        return node, full.name

    def appear(self, folder: Node, name: str) -> Node:
        """A name that is there and that no event has made."""
        path = self.top / folder.first_path / name
        node = Node("folder" if path.is_dir() else "file", str(path.relative_to(self.top)))
        self.change((folder, name, node))
        return node

    def change(self, *names: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in names:
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self.events.append(Event(verb="names", names=names))

    def seen(self, node: Node, fd: int) -> None:
        """Writes that went past `os` (those of file objects) are noticed when their file is made durable."""
        size = os.fstat(fd).st_size
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            real = file.read()
        if bytes(self.contents(node)) != real:
            self.events.append(Event(verb="size", node=node, size=size))
            self.events.append(Event(verb="write", node=node, data=real))

    def contents(self, node: Node) -> bytearray:
        data = bytearray(self.first_data.get(node, b""))
        for event in self.events:
            if event.node is node:
                _apply(event, data)
        return data

    def image(self, end: int, chance: random.Random | None, keep: float = 0.5) -> None:
        """Makes `top` a disk after a cut before event `end`. chance None: nothing was lost. keep: how much of what was
        not durable is there.
        """
        events = self.events[:end]
        durable = _durable(events)
        data = {node: bytearray(content) for node, content in self.first_data.items()}
        entries = {node: dict(names) for node, names in self.first_entries.items()}
        for event, safe in zip(events, durable, strict=True):
            sure = safe or chance is None
            if event.verb == "names":
                if sure or (chance and chance.random() < keep):
                    for folder, name, node in event.names:
                        entries.setdefault(folder, {}).pop(name, None)
                        if node is not None:
                            entries[folder][name] = node
            elif event.verb in ("write", "size"):
                assert event.node is not None
                content = data.setdefault(event.node, bytearray())
                for part in [event] if sure else _torn(event, chance, keep):  # type: ignore[arg-type]
                    _apply(part, content)
        shutil.rmtree(self.top)
        self._make(self.root, self.top, data, entries)

    def _make(self, node: Node, path: Path, data: dict[Node, bytearray], entries: dict[Node, dict[str, Node]]) -> None:
        if node.kind == "link":
            os.symlink(node.target, path)
        elif node.kind == "file":
            path.write_bytes(data.get(node, b""))
        else:
            path.mkdir()
            for name, child in entries.get(node, {}).items():
                self._make(child, path / name, data, entries)


def _durable(events: list[Event]) -> list[bool]:
    """Of each event: was what it did made durable later?"""
    synced: set[Node] = set()
    found = []
    for event in reversed(events):
        if event.verb == "sync":
            assert event.node is not None
            synced.add(event.node)
        nodes = {folder for folder, _, _ in event.names} or {event.node}
        found.append(nodes <= synced)
    return found[::-1]


def _torn(event: Event, chance: random.Random, keep: float) -> Iterator[Event]:
    """What is left of an event that nothing made durable."""
    if event.verb == "size":
        if chance.random() < keep:
            yield event
        return
    sector = chance.choice((512, 4096, 1 << 30))
    for lo in range(0, len(event.data), sector):
        if chance.random() < keep:
            yield Event(verb="write", node=event.node, offset=event.offset + lo, data=event.data[lo : lo + sector])


def _apply(event: Event, data: bytearray) -> None:
    if event.verb == "size":
        del data[event.size :]
        data.extend(bytes(event.size - len(data)))
    elif event.verb == "write":
        data.extend(bytes(max(0, event.offset + len(event.data) - len(data))))
        data[event.offset : event.offset + len(event.data)] = event.data


@contextmanager
def recorded(top: Path) -> Iterator[Recording]:
    """Everything that happens below `top` inside. What is there now counts as durable."""
    recording = Recording(top)
    with pytest.MonkeyPatch.context() as patch:
        calls = _Calls(recording)
        for name in PATCHED:
            patch.setattr(os, name, calls.call(name))
        yield recording


class _Calls:
    """The functions that stand in for those of `os`: each does the real thing and notes it, at once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._name = ""
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in PATCHED}

    def call(self, name: str) -> Callable[..., Any]:
        """What stands in for `os.<name>`."""

        def call(*args: Any, **more: Any) -> Any:
            assert not more, f"os.{name} with {list(more)} is not recorded"
            with self._recording.lock:
                result = self._real[name](*args)
                self._name = name
                PATCHED[name](self, result, *args)
                return result

        return call

    def opened(self, fd: int, path: Any, flags: int, mode: int = 0) -> None:
        recording = self._recording
        recording.fds.pop(fd, None)
        found = recording.find(path)
        if found is None:
            return
        folder, name = found
        node = folder if name == "." else folder.entries.get(name)
        node = node or recording.appear(folder, name)
        recording.fds[fd] = node
        if flags & os.O_TRUNC:
            recording.events.append(Event(verb="size", node=node, size=0))

    def wrote(self, done: int, fd: int, data: Any, at: int) -> None:
        node = self._recording.fds.get(fd)
        if node is not None:
            parts = data if isinstance(data, list) else [data]
            kept = b"".join(bytes(part) for part in parts)[:done]
            self._recording.events.append(Event(verb="write", node=node, offset=at, data=kept))

    def synced(self, _: None, fd: int) -> None:
        node = self._recording.fds.get(fd)
        if node is not None:
            if node.kind == "file":
                self._recording.seen(node, fd)
            self._recording.events.append(Event(verb="sync", node=node, mark=self._name))

    def truncated(self, _: None, fd: int, size: int) -> None:
        node = self._recording.fds.get(fd)
        if node is not None:
            self._recording.events.append(Event(verb="size", node=node, size=size))

    def reserved(self, _: None, fd: int, offset: int, nbytes: int) -> None:
        self.truncated(None, fd, offset + nbytes)  # the store reserves new files only

    def renamed(self, _: None, source: Any, target: Any) -> None:
        old, new = self._recording.find(source), self._recording.find(target)
        if old is not None and new is not None:
            self._recording.change((*old, None), (*new, old[0].entries[old[1]]))

    def linked(self, _: None, target: Any, path: Any) -> None:
        self._made("link", path, os.fspath(target))

    def made_folder(self, _: None, path: Any, mode: int = 0) -> None:
        self._made("folder", path, "")

    def _made(self, kind: str, path: Any, target: str) -> None:
        found = self._recording.find(path)
        if found is not None and found[1] != ".":
            where = str(Path(os.path.abspath(path)).relative_to(self._recording.top))
            self._recording.change((*found, Node(kind, where, target=target)))

    def unlinked(self, _: None, path: Any) -> None:
        found = self._recording.find(path)
        if found is not None:
            self._recording.change((*found, None))


PATCHED: dict[str, Callable[..., None]] = {
    "open": _Calls.opened,
    "pwrite": _Calls.wrote,
    "pwritev": _Calls.wrote,
    "fsync": _Calls.synced,
    "fdatasync": _Calls.synced,
    "ftruncate": _Calls.truncated,
    "posix_fallocate": _Calls.reserved,
    "rename": _Calls.renamed,
    "replace": _Calls.renamed,
    "symlink": _Calls.linked,
    "mkdir": _Calls.made_folder,
    "unlink": _Calls.unlinked,
    "rmdir": _Calls.unlinked,
}
