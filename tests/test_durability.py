"""`docs/durability.md` says what a commit really does, and rests on tests that exist.

Scope: its tables of syncs against a recorded creation and commit; the tests that it names; a test for every case from
the field about I/O and checkpoints.
Not here: what a power cut leaves (`test_power_cut.py`), the page's sums (`test_docs.py`).
"""

import ast
import re
from itertools import groupby
from pathlib import Path

import pytest
from power_cut import Event, Recording, recorded
from store_bytes import IDENTITY, block, content, put_all

from tiering.posix import PosixEngine
from tiering.store import BlockStore

ROOT = Path(__file__).parent.parent
IO_CASES = (1, 2, 3, 4, 6, 9, 10, 11, 12, 14, 16, 18, 20, 21, 23, 25, 27, 28)
CK_CASES = (1, 3, 4, 6, 7, 9, 11, 12, 15, 17, 18, 20, 21, 23)
PAGE_TEXT = (ROOT / "docs" / "durability.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its own heading left out."""
    section = PAGE_TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"docs/durability.md has no section {heading}"
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def plain(path: str, letters: dict[str, str]) -> str:
    """A recorded path in the words of the page."""
    path = path.removeprefix("state").removeprefix("/") or "root"
    found = re.fullmatch(r"\.slots/([ab])/[^/]+/[^/]+", path)
    if found:
        return f"`.slots/{letters[found[1]]}/<unit>/<kind>`"
    found = re.fullmatch(r"\.checksums\.([ab])", path)
    if found:
        return f"`.checksums.{letters[found[1]]}`"
    if path.endswith("zarr.json"):
        return "`zarr.json`"
    return "root" if path == "root" else f"`{re.sub(r'^[^/]+/[^/]+/c/', '<unit>/<kind>/c/', path)}`"


def steps(events: list[Event], letters: dict[str, str]) -> list[tuple[str, str]]:
    """What was made durable or visible, in order; the same thing for several blocks is one step."""
    found = []
    for event in events:
        if event.verb == "sync" and event.node is not None:
            found.append((plain(event.node.first_path, letters), str(event.mark)))
        elif event.verb == "names" and len(event.names) == 2:
            folder, name, _ = event.names[1]
            found.append((plain(f"{folder.first_path}/{name}", letters), "rename"))
    return [step for step, _ in groupby(found)]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """Creation and a first commit on one drive; marks tell where each ends."""
    top = tmp_path / "disk"
    top.mkdir()
    blocks = [block(unit, kind, 2) for unit in ("L0", "L1") for kind in ("weight", "exp_avg")]
    with recorded(top) as recording, PosixEngine(1) as engine:
        with BlockStore.create(top / "state", blocks, identity=IDENTITY) as store:
            recording.mark("created")
            put_all(store, content(store, 1))
            store.commit(1, {}, engine.sync)
    return recording


def test_a_commit_makes_durable_what_the_page_says(recording: Recording) -> None:
    """I7: every sync and rename of a commit, in the page's order, and no other."""
    marks = [number for number, event in enumerate(recording.events) if event.mark == "created"]
    found = steps(recording.events[marks[0] :], {"a": "a", "b": "<other>"})
    wanted = [(what, by) for what, by, _ in table("3. A commit, sync by sync")]
    assert found == wanted, f"\nfound {found}\nwanted {wanted}"


def test_a_creation_makes_durable_what_the_page_says(recording: Recording) -> None:
    """P3: every sync and rename of a creation. Files of one kind of step are synced in any order."""
    marks = [number for number, event in enumerate(recording.events) if event.mark == "created"]
    events = recording.events[: marks[0]]
    folders = "every folder of it, and those above that are new"
    found = []
    for event in events:
        is_folder = event.verb == "sync" and event.node is not None and event.node.kind == "folder"
        found += [(folders, "fsync")] if is_folder else steps([event], {"a": "a", "b": "b"})
    wanted = [(what, by) for what, by in table("4. A new store, sync by sync")]
    at = found.index((folders, "fsync"))
    first = [step for step in wanted if step in found[:at]]
    assert set(found[:at]) == set(wanted[:5]) == set(first), f"\nfound {set(found[:at])}\nwanted {wanted[:5]}"
    rest = [step for step, _ in groupby(found[at:])]
    assert rest[:-1] == wanted[5:-1] and wanted[-1] == ("root", "fsync"), f"\nfound {rest}\nwanted {wanted[5:]}"
    assert rest[-1] == (folders, "fsync") and events[-1].node is not None and events[-1].node.first_path == "state"


def test_every_promise_of_the_page_names_a_test_that_exists() -> None:
    """Rule 14: a promise without a test is none."""
    rows = table("6. What is promised")
    assert len(rows) >= 12, "hardly anything is promised"
    for promise, shown in rows:
        named = re.fullmatch(r"`(tests/\w+\.py)(?:::(\w+))?`", shown)
        assert named, f"{promise}: {shown} names no test"
        path = ROOT / named[1]
        assert path.is_file(), f"{promise}: {named[1]} does not exist"
        if named[2]:
            assert f"def {named[2]}(" in path.read_text(), f"{promise}: {named[1]} has no {named[2]}"


def test_every_case_of_io_and_checkpoints_is_cited_by_a_test() -> None:
    """Rule 14: a test says in its docstring which cases it shows."""
    cited: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                cited |= set(re.findall(r"\b(?:IO|CK)-\d\d\b", ast.get_docstring(node) or ""))
    wanted = {f"IO-{number:02}" for number in IO_CASES} | {f"CK-{number:02}" for number in CK_CASES}
    assert cited == wanted, f"without a test: {sorted(wanted - cited)}; unknown: {sorted(cited - wanted)}"
