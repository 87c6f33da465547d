"""`megatrain train --trace`: which steps are kept, what the plan predicted for them, and when the file is written.

Scope: the option's values, a bounded recording of some steps, one file written in one piece.
Not here: spans (`tiering/trace.py`), predicted ones (`tiering/timetable.py`), the format (`tiering/perfetto.py`), the
log's row of a step (`steplog.py`).
"""

import json
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatrain import __version__
from megatrain.errors import UserError
from tiering.hardware import Hardware
from tiering.perfetto import STEP, InStep, Side, document
from tiering.place import nearest_directory
from tiering.plan import Plan
from tiering.timetable import Timetable, timetable
from tiering.trace import COMPUTE, WAIT, Figures, Span

DEFAULT_STEPS = "3..5"
MOST_SPANS = 60_000
"""Measured ones, and as many predicted ones: a file of about 100 MB. What is left out is counted in it."""
TAIL_STEPS = 2
"""Steps after the last traced one until its writes have ended: a pass may reach into the next one, no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Steps `first` to `last`, counted from where this run starts (1 is the first one it computes)."""

    path: Path
    first: int
    last: int

    def within(self, done: int, steps: int) -> tuple[int, int]:
        """The same as numbers of steps, moved forward where the run ends before."""
        left = steps - done
        last = min(self.last, left)
        return done + max(1, min(self.first, left)), done + last


def parse_trace(path: Path | None, steps: str | None) -> TraceRequest | None:
    """The request of `--trace` and `--trace-steps`; None if there is none. Raises UserError or PlaceError, before
    anything is written."""
    if path is None:
        if steps is not None:
            raise UserError(f"--trace-steps {steps}: no trace is asked for. Fix: add --trace FILE.json")
        return None
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", steps or DEFAULT_STEPS)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--trace-steps {steps}: two steps, 1 or more, the first not after the last. "
                        f"Fix: --trace-steps {DEFAULT_STEPS}")  # fmt: skip
    _refuse_target(path)
    return TraceRequest(path=path, first=first, last=last)


def _refuse_target(path: Path) -> None:
    """Refuses what cannot become a trace. Missing folders are made when it is written."""
    if path.suffix != ".json":
        raise UserError(f"--trace {path}: the name of a trace ends in .json. Fix: --trace {path.with_suffix('.json')}")
    if path.is_dir():
        raise UserError(f"--trace {path} is a folder. Fix: --trace {path / 'trace.json'}")
    folder = nearest_directory(path.parent)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--trace {path}: {folder} is not writable: {error.strerror}. Fix: another place") from None


class Recording:
    """The traced steps of a run. Knows which pass is which step by the ops that were computed in it."""

    def __init__(
        self, request: TraceRequest, steps: tuple[int, int], plan: Plan, hardware: Hardware, console: Console
    ) -> None:
        self.path = request.path
        self.first, self.last = steps
        self.plan = plan
        self.hardware = hardware
        self.console = console
        self.left_out = 0
        self.written = False
        self._passes: list[int] = []  # ascending, as the steps in
        self._numbers: list[int] = []
        self._spans: list[tuple[int, Span]] = []  # with the step in which it was taken
        self._steps: dict[int, Span] = {}
        self._timetables: dict[str, Timetable] = {}
        self._predicted: list[InStep] = []

    def add(self, number: int, spans: Sequence[Span], figures: Figures) -> None:
        """What was taken at the end of step `number`."""
        if self.written or number < self.first - TAIL_STEPS:
            return
        computed = [span for span in spans if span.what in (COMPUTE, WAIT) and span.at is not None]
        mine = [span for span in computed if span.at is not None and span.at.schedule.name in self.plan.schedules]
        if mine:
            mark = self._mark(number, mine, figures)
            if self.first <= number <= self.last:
                self._steps[number] = mark
                self._predict(number, mark, mine[-1])
        self._keep(number, spans)
        if number >= self.last + TAIL_STEPS:
            self.write()

    def _mark(self, number: int, computed: Sequence[Span], figures: Figures) -> Span:
        """The step itself, from its first op until its last one."""
        at = computed[-1].at
        assert at is not None
        self._passes.append(at.pass_number)
        self._numbers.append(number)
        own = [span for span in computed if span.at is not None and span.at.pass_number == at.pass_number]
        begin_s, end_s = min(span.begin_s for span in own), max(span.end_s for span in own)
        nbytes = figures.read_bytes + figures.written_bytes
        return Span(what=STEP, name=f"step {number}", begin_s=begin_s, end_s=end_s, nbytes=nbytes)

    def _predict(self, number: int, mark: Span, computed: Span) -> None:
        """The plan's pass beside the measured one, from the same moment on."""
        assert computed.at is not None
        schedule = computed.at.schedule
        if schedule.name not in self._timetables:
            self._timetables[schedule.name] = timetable(schedule, self.plan.workload, self.hardware)
        found = self._timetables[schedule.name]
        if len(self._predicted) + len(found.spans) >= MOST_SPANS:
            self.left_out += len(found.spans)
            return
        nbytes = found.figures.read_bytes + found.figures.written_bytes
        step = replace(mark, end_s=mark.begin_s + found.pass_s, nbytes=nbytes)
        for span in found.spans:
            moved = replace(span, begin_s=mark.begin_s + span.begin_s, end_s=mark.begin_s + span.end_s)
            self._predicted.append(InStep(step=number, span=moved))
        self._predicted.append(InStep(step=number, span=step))

    def _keep(self, number: int, spans: Sequence[Span]) -> None:
        """Spans of traced steps: whatever ended in one, and what of their passes ended after the last one."""
        for span in spans:
            late = number > self.last and self._step_of(span, number) not in self._steps
            if number < self.first or late:
                continue
            if len(self._spans) >= MOST_SPANS:
                self.left_out += 1
            else:
                self._spans.append((number, span))

    def _step_of(self, span: Span, taken: int) -> int:
        """The step of its pass; of loading, saving and flushing the step before, if there is one."""
        if span.at is None:
            return taken
        earlier = bisect_right(self._passes, span.at.pass_number)
        return self._numbers[earlier - 1] if earlier else taken

    def write(self) -> None:
        """Writes what there is, in one piece; a failure is told and ends no run."""
        self.written = True
        measured = [InStep(step=self._step_of(span, taken), span=span) for taken, span in self._spans]
        measured += [InStep(step=number, span=span) for number, span in self._steps.items()]
        about = {
            "program": f"megatrain {__version__}",
            "steps": sorted(self._steps),
            "predicted_step_s": self.plan.timeline.pass_s,
            "spans_left_out": self.left_out,
        }
        sides = [Side(name="measured", spans=measured), Side(name="predicted", spans=self._predicted)]
        text = json.dumps(document(sides, about))
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(text)
                os.replace(beside, self.path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"Trace: {self.path} could not be written: {error.strerror}")
            return
        few = f"; {self.left_out} spans more did not fit in it" if self.left_out else ""
        self._say(f"Trace of steps {self.first} to {self.last}: {self.path} (open it at https://ui.perfetto.dev){few}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def recording(
    found: Recording | None, take: Callable[[], tuple[list[Span], Figures]], reached: Callable[[], int]
) -> Iterator[None]:
    """However the steps inside end, the trace is written. reached: the last step that was added."""
    try:
        yield
    finally:
        if found is not None and not found.written:
            found.add(reached() + 1, *take())  # of a step that was cut short, and of the last commit
            if not found.written:
                found.write()
