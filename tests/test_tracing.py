"""P5: the trace of a run and the rows of its log say what happened and what was predicted.

Scope: `--trace` from its values to the file, in the Trace Event Format; the keys of a row of the log; the predicted
pass as spans.
Not here: spans and causes one by one (`test_trace.py`), predicted times (`test_simulate.py`).
"""

import io
import json
import os
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import RunFile
from models import MODELS
from rich.console import Console

import megatrain.goodbye
import megatrain.tracing
import megatrain.trainer
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.optim import NonFiniteError
from megatrain.prepare import Prepared, prepare
from megatrain.steplog import COPIES, KEYS, MOST_CAUSES, OTHER, largest_stall, top_causes
from megatrain.tracing import TraceRequest, parse_trace
from megatrain.trainer import train
from tiering.errors import PlaceError
from tiering.perfetto import InStep, Side, document
from tiering.schedule import Verb
from tiering.timetable import timetable
from tiering.trace import Span, figures

TIGHT = {"tiers.resident": 0, "tiers.host_memory": "8MiB", "model.config": MODELS["llama"], "train.commit_every": 100}
MEASURED, PREDICTED = 1, 2
ALWAYS = {"steps", "compute", "compute waits", "update", "io read", "io write"}

pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def traced(run_file: RunFile, path: Path, first: int, last: int, *, resume: bool = False, **changes: Any) -> list[Any]:
    """Train with a trace; the events of its file."""
    run = load_run(run_file({**TIGHT, **changes}))
    request = TraceRequest(path=path, first=first, last=last)
    assert train(run, resume=resume, console=Console(quiet=True), trace=request) == 0
    return events(path)


def events(path: Path) -> list[Any]:
    return list(json.loads(path.read_text())["traceEvents"])


def slices(found: Iterable[Any], pid: int, *tracks: str) -> list[Any]:
    return [e for e in found if e["ph"] == "X" and e["pid"] == pid and (not tracks or e["cat"] in tracks)]


def prepared_of(run_file: RunFile, **changes: Any) -> Prepared:
    return prepare(load_run(run_file({**TIGHT, **changes})))


def refuse_malformed(found: list[Any]) -> None:
    """What the Trace Event Format asks for, and what the tracks of Perfetto do."""
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}
    assert processes == {MEASURED: "measured", PREDICTED: "predicted"}
    on_track: dict[tuple[int, int], list[Any]] = {}
    for event in found:
        assert event["ph"] in ("X", "M", "C"), event
        assert isinstance(event["name"], str) and event["name"] and event["pid"] in processes, event
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"], event
            assert {"bytes", "step"} <= event["args"].keys(), event
            assert event["cat"] == "steps" or {"block", "tile", "program"} <= event["args"].keys(), event
            on_track.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert event["ts"] >= 0 and min(event["args"].values()) >= 0, event
    assert on_track.keys() <= named.keys(), f"tracks without a name: {on_track.keys() - named.keys()}"
    for pid in processes:
        lanes = {name.rstrip("0123456789").rstrip() for (of, _), name in named.items() if of == pid}
        assert lanes == ALWAYS, f"{processes[pid]}: {lanes} are not {ALWAYS}"
    for track in on_track.values():
        for one, other in pairwise(sorted(track, key=lambda event: (event["ts"], event["dur"]))):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6, f"overlap on a track:\n{one}\n{other}"


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_a_trace_shows_every_byte_of_its_steps_beside_those_of_the_plan(
    run_file: RunFile, tmp_path: Path, clip: float | None
) -> None:
    """P5: for each traced step the measured transfers, the predicted ones and the plan's sum are equal."""
    found = traced(run_file, tmp_path / "t.json", 3, 5, **{"train.steps": 8, "train.max_grad_norm": clip})
    refuse_malformed(found)
    timeline = prepared_of(run_file, **{"train.max_grad_norm": clip}).plan.timeline
    for pid in (MEASURED, PREDICTED):
        assert {e["args"]["step"] for e in slices(found, pid, "steps")} == {3, 4, 5}
        for step in (3, 4, 5):
            for track, planned in (("io read", timeline.read_bytes), ("io write", timeline.written_bytes)):
                moved = [e["args"]["bytes"] for e in slices(found, pid, track) if e["args"]["step"] == step]
                assert sum(moved) == planned, f"process {pid}, step {step}, {track}: {sum(moved)}, plan {planned}"


def test_measured_and_predicted_actions_are_the_same_ones(run_file: RunFile, tmp_path: Path) -> None:
    """P5: every action of the plan's pass is in both, once a step; both begin at the same moment."""
    found = traced(run_file, tmp_path / "t.json", 3, 4, **{"train.steps": 8})
    tracks = ("compute", "update", "io read", "io write")
    for step in (3, 4):
        names = [
            Counter(e["name"] for e in slices(found, pid, *tracks) if e["args"]["step"] == step)
            for pid in (MEASURED, PREDICTED)
        ]
        assert names[0] == names[1], f"step {step}: {names[0] - names[1]} / {names[1] - names[0]}"
        begun = [e["ts"] for pid in (1, 2) for e in slices(found, pid, "steps") if e["args"]["step"] == step]
        assert begun[0] == begun[1], f"step {step} begins at {begun}"


def test_causes_of_waits_are_real_actions(run_file: RunFile, tmp_path: Path) -> None:
    """P5: whatever compute waited for has a line in a schedule; in the log without its tile."""
    path = run_file({**TIGHT, "train.steps": 6, "tiers.serial": True})
    request = TraceRequest(path=tmp_path / "t.json", first=2, last=6)
    assert train(load_run(path), resume=False, console=Console(quiet=True), trace=request) == 0
    prepared = prepare(load_run(path))
    schedules = prepared.plan.schedules.values()
    actions = {a.name for s in schedules for a in (*s.actions, *s.lead_in) if a.verb is not Verb.DROP}
    whole = {name.partition("[")[0].partition("#")[0] for name in actions}
    waits = slices(events(tmp_path / "t.json"), MEASURED, "compute waits")
    assert waits, "a serial run waits"
    assert {e["args"]["cause"] for e in waits} <= actions
    for line in (tmp_path / "run/log.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        assert row["stalls"] and set(row["stalls"]) <= whole | {OTHER}, f"{set(row['stalls']) - whole}"
        assert sum(row["stalls"].values()) == pytest.approx(row["stall_s"])


def test_a_trace_of_a_resumed_run_counts_from_where_it_goes_on(run_file: RunFile, tmp_path: Path) -> None:
    """P3, P5: steps 3..5 of a run that goes on from step 4 are 7 to 9; folders of the path are made."""
    assert train(load_run(run_file({**TIGHT, "train.steps": 4})), resume=False, console=Console(quiet=True)) == 0
    found = traced(run_file, tmp_path / "new/t.json", 3, 5, resume=True, **{"train.steps": 9})
    refuse_malformed(found)
    assert {e["args"]["step"] for e in slices(found, MEASURED, "steps")} == {7, 8, 9}


@pytest.mark.parametrize(
    ("done", "steps", "expected"), [(0, 8, (3, 5)), (4, 20, (7, 9)), (0, 4, (3, 4)), (0, 2, (2, 2)), (9, 10, (10, 10))]
)
def test_a_run_that_ends_early_traces_its_last_steps(done: int, steps: int, expected: tuple[int, int]) -> None:
    found = TraceRequest(path=Path("t.json"), first=3, last=5).within(done, steps)
    assert found == expected, f"{found} is not {expected}"


def test_a_run_that_dies_in_a_traced_step_leaves_what_there_is(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: written in one piece, with the begun step; no other file stays behind."""
    ready = megatrain.trainer.StepEngine._gradient_ready
    count = {"heads": 0}

    def broken(self: Any, unit: str, gradients: Any) -> None:
        count["heads"] += unit == "lm_head"
        if count["heads"] == 4 and unit == "model.layers.1":
            next(iter(gradients.values())).fill_(float("nan"))
        ready(self, unit, gradients)

    monkeypatch.setattr(megatrain.trainer.StepEngine, "_gradient_ready", broken)
    with pytest.raises(NonFiniteError):
        traced(run_file, tmp_path / "out/t.json", 3, 5, **{"train.steps": 8})
    found = events(tmp_path / "out/t.json")
    refuse_malformed(found)
    assert {e["args"]["step"] for e in slices(found, MEASURED, "steps")} == {3, 4}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["t.json"]


def test_a_trace_is_bounded_and_says_what_it_leaves_out(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatrain.tracing, "MOST_SPANS", 50)
    found = traced(run_file, tmp_path / "t.json", 1, 3, **{"train.steps": 6})
    measured = [e for e in slices(found, MEASURED) if e["cat"] != "steps"]
    left_out = json.loads((tmp_path / "t.json").read_text())["otherData"]["spans_left_out"]
    assert len(measured) == 50 and left_out > 0, f"{len(measured)} spans, {left_out} left out"


def test_a_trace_that_cannot_be_written_ends_no_run(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: days of training are worth more than a file about them."""

    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "t.json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    request = TraceRequest(path=tmp_path / "t.json", first=1, last=1)
    run = load_run(run_file({**TIGHT, "train.steps": 4}))
    said = io.StringIO()
    assert train(run, resume=False, console=Console(file=said), trace=request) == 0
    assert "t.json could not be written: No space left on device" in said.getvalue(), said.getvalue()
    assert not list(tmp_path.glob("*t.json*"))


@pytest.mark.parametrize(
    ("path", "steps", "words"),
    [
        (None, "3..5", "no trace is asked for"),
        ("t.json", "5..3", "the first not after the last"),
        ("t.json", "0..3", "1 or more"),
        ("t.json", "three", "Fix: --trace-steps 3..5"),
        ("t.yaml", None, "ends in .json"),
        ("folder.json", None, "is a folder"),
        ("file/t.json", None, "is a file"),
        ("/proc/t.json", None, "not writable"),
    ],
)
def test_a_trace_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, path: str | None, steps: str | None, words: str
) -> None:
    """CF-05: one clear line; nothing is written."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises((UserError, PlaceError), match=words) as caught:
        parse_trace(tmp_path / path if path else None, steps)
    assert caught.value.exit_code == 2 and "Fix: " in str(caught.value), str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.json"]


def test_one_step_and_a_range_of_steps_can_be_asked_for(tmp_path: Path) -> None:
    for text, expected in ((None, (3, 5)), ("4", (4, 4)), ("2..9", (2, 9))):
        found = parse_trace(tmp_path / "t.json", text)
        assert found is not None and (found.first, found.last) == expected, f"{text}: {found}"
    assert parse_trace(None, None) is None


def test_overlapping_transfers_get_tracks_of_their_own() -> None:
    """Reads 0 to 2, 1 to 3 and 2 to 4: the third one fits behind the first."""
    spans = [Span(what=Verb.READ, name=str(n), begin_s=n, end_s=n + 2, nbytes=8) for n in range(3)]
    side = Side(name="measured", spans=[InStep(step=1, span=span) for span in spans])
    found = document([side], {})["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    placed = {e["name"]: tracks[e["tid"]] for e in found if e["ph"] == "X"}
    assert placed == {"0": "io read 0", "1": "io read 1", "2": "io read 0"}
    flown = [(e["ts"], e["args"]["read"]) for e in found if e["ph"] == "C"]
    assert flown == [(0, 8), (1e6, 16), (2e6, 8), (2e6, 16), (3e6, 8), (4e6, 0)], flown


def test_a_row_of_the_log_has_the_documented_keys_and_no_other(run_file: RunFile, tmp_path: Path) -> None:
    """P5: `megatrain.steplog.KEYS` is the one place that says what they mean; `docs/tracing.md` shows it."""
    assert train(load_run(run_file({**TIGHT, "train.steps": 3})), resume=False, console=Console(quiet=True)) == 0
    timeline = prepared_of(run_file).plan.timeline
    for line in (tmp_path / "run/log.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row.keys() == KEYS.keys(), f"{row.keys() ^ KEYS.keys()}"
        assert row["rss_bytes"] > 1 << 20 and row["read_s"] <= row["io_s"] <= row["read_s"] + row["write_s"] + 1e-9
        assert row["predicted_s"] == timeline.pass_s
        assert row["predicted_io_s"] == pytest.approx(timeline.io_s)
        assert (row["predicted_read_bytes"], row["predicted_written_bytes"]) == (
            timeline.read_bytes,
            timeline.written_bytes,
        )
    assert not set(COPIES) & KEYS.keys()


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_the_predicted_pass_adds_up_to_its_timeline(run_file: RunFile, clip: float | None) -> None:
    """P5: computing, updates and waits of one processor fill the pass, and no lane does two things at a time."""
    prepared = prepared_of(run_file, **{"train.max_grad_norm": clip})
    plan = prepared.plan
    found = timetable(plan.schedules["step"], plan.workload, prepared.hardware)
    assert found.pass_s == pytest.approx(plan.timeline.pass_s)
    assert found.figures.update_s == pytest.approx(plan.timeline.update_s, rel=0.5), "I/O may slow it down"
    for what in ("READ", "WRITE", "compute", "update"):
        lane = sorted((s for s in found.spans if s.what == what), key=lambda s: s.begin_s)
        for one, other in pairwise(lane):
            assert one.end_s <= other.begin_s + 1e-9, f"{one}\n{other}"
    on_processor = [s for s in found.spans if s.what in ("compute", "wait")]
    filled_s = sum(s.end_s - s.begin_s for s in on_processor)
    assert filled_s == pytest.approx(found.pass_s), f"{filled_s} s of {found.pass_s} s"
    assert min(s.begin_s for s in found.spans) >= -1e-9


def test_the_largest_stall_is_told_where_it_is_worth_it() -> None:
    """P5: from a twentieth of the step on, in words."""

    def waited(*seconds: float) -> str:
        spans = [Span(what="wait", name=f"READ L{n}/weight[0:8]", begin_s=0, end_s=s) for n, s in enumerate(seconds)]
        return largest_stall(figures(spans, 1.0))

    assert waited(0.1, 0.31) == "compute waited 310.0 ms for READ L1/weight"
    assert waited(0.04, 0.05) == waited() == ""


def test_a_long_list_of_causes_is_cut_and_keeps_its_sum() -> None:
    stalls = {f"READ L{n}/weight": float(n) for n in range(100)}
    top = top_causes(stalls)
    assert len(top) == MOST_CAUSES and next(iter(top)) == "READ L99/weight"
    assert sum(top.values()) == sum(stalls.values()) and top[OTHER] == sum(range(81))
