"""When a run commits: often enough to lose little, seldom enough to cost little.

Scope: what a commit will cost, the number of steps between two, the words for it; what a transfer that failed says of
the step that it was for, and of the last commit.
Not here: what a commit does (`tiering/store.py`), the loop that makes it (`trainer.py`).

A commit of `c` seconds after every `n` steps of `t` seconds costs the share c / (n t + c) of a run. `auto` takes the
smallest n whose share is under 1 %, but never more than 30 minutes of steps. Before the first commit c and t are
those of the plan, then measured.

>>> pace = CommitPace(None, done=0, step_s=2.0, commit_s=0.5)
>>> pace.every  # 0.5 / (25 * 2.0 + 0.5) is 0.0099
25
>>> CommitPace(None, done=0, step_s=20.0, commit_s=300.0).every  # 30 minutes
90
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.sizes import format_seconds
from tiering.errors import IOFailedError
from tiering.hardware import Hardware
from tiering.plan import Plan
from tiering.store import BlockStore
from tiering.timetable import timetable

SHARE = 0.01
MOST_S = 1800.0
"""What may be lost at most, as far as whole steps allow."""
FLUSH_S = 0.004
"""Making one file durable whose bytes were written with direct I/O: the drive's own cache and the file's record.
Assumed: 1 to 10 ms on NVMe drives. The first commit measures it.
"""
FLUSHES_AT_ONCE = 8
MANIFEST_FLUSHES = 2
"""The new manifest, and the folder that it is renamed in."""


def predicted_commit_s(plan: Plan, hardware: Hardware) -> float:
    """Seconds of a commit: updates that are late, changed bytes that live in RAM, every file made durable."""
    moving = [plan.save, *(plan.schedules[name] for name in ("flush",) if name in plan.schedules)]
    moved_s = sum(timetable(schedule, plan.workload, hardware).pass_s for schedule in moving if schedule.actions)
    files = sum(1 for _ in plan.workload.of_life("durable"))
    return moved_s + FLUSH_S * (math.ceil(files / FLUSHES_AT_ONCE) + MANIFEST_FLUSHES)


class CommitPace:
    """Decides before each step whether a commit follows it.

    every: as the run file says; None: auto. done: the step of the last commit. step_s, commit_s: predicted seconds.
    """

    def __init__(
        self,
        every: int | None,
        *,
        done: int,
        step_s: float,
        commit_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fixed = every
        self.commit_s = commit_s
        self.step_s = step_s
        self.commits = 0
        self.committing_s = 0.0
        self.stepping_s = 0.0
        self._steps = 0
        self._last = done
        self._now = now
        self._since_s = now()

    @property
    def every(self) -> int:
        """Steps between two commits."""
        if self.fixed is not None:
            return self.fixed
        cheap = math.ceil(self.commit_s * (1 - SHARE) / (SHARE * self.step_s)) if self.step_s > 0 else 1
        return max(1, min(cheap, math.floor(MOST_S / self.step_s) if self.step_s > 0 else cheap))

    @property
    def share(self) -> float:
        """Of a run, that commits take."""
        return self.commit_s / (self.every * self.step_s + self.commit_s)

    def due(self, number: int) -> bool:
        """Does a commit follow step `number`, which is about to begin?"""
        if self.fixed is not None:
            return number % self.fixed == 0
        late = self._now() - self._since_s + self.step_s > MOST_S
        return late or number - self._last >= self.every

    def stepped(self, seconds: float) -> None:
        """A step took this long, without its commit."""
        self._steps += 1
        self.stepping_s += seconds
        self.step_s = self.stepping_s / self._steps

    def committed(self, number: int, seconds: float) -> None:
        """Step `number` is committed, which took this long."""
        self.commits += 1
        self.committing_s += seconds
        self.commit_s = self.committing_s / self.commits
        self._last, self._since_s = number, self._now()

    def plan_line(self, left: int) -> str:
        """What is to be expected. left: steps that the run still has."""
        asked = "auto" if self.fixed is None else str(self.fixed)
        if self.every >= left:
            return f"Commits: after the last step, and on Ctrl-C (train.commit_every: {asked})"
        bound = ", which is the 30 minutes that may be lost at most" if self.share >= SHARE and asked == "auto" else ""
        return (
            f"Commits: every {self.every} steps (about {format_seconds(self.every * self.step_s)}, costs "
            f"{100 * self.share:.2g} %{bound}), after the last step, and on Ctrl-C (train.commit_every: {asked})"
        )

    def summary(self) -> str:
        """What it came to."""
        whole_s = self.stepping_s + self.committing_s
        what = "1 commit" if self.commits == 1 else f"{self.commits} commits"
        share = 100 * self.committing_s / whole_s if whole_s else 0.0
        return f"{what} took {format_seconds(self.committing_s)} ({share:.2g} % of the time)"


@contextmanager
def failures_named(store: BlockStore, what: str) -> Iterator[None]:
    """Adds to the error of a transfer what it was for, and from where the run goes on."""
    try:
        yield
    except IOFailedError as error:
        said, committed = str(error), f"The committed state is step {store.step}"
        if not said.startswith(what):
            error.args = (f"{what}: {said}" + ("" if committed in said else f" {committed}."), *error.args[1:])
        raise
