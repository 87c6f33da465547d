"""What is urgent goes first, and nothing else changes.

Scope: `tiering/urgency.py` on schedules that one can follow by hand and on toy steps; the pipeline's queues.
Not here: the simulation as such (`test_simulate.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import RunFile
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import Wrapped, opened, small_llama
from test_simulate import PAGE_A_SECOND, UNSHRUNK, by_hand, planning_problems
from toy import toy_units

from megatrain.prepare import Prepared
from megatrain.programs import training_workload
from tiering.engine import Extent, IOEngine
from tiering.errors import BudgetError
from tiering.hardware import Hardware, assumed_hardware
from tiering.homes import place
from tiering.lower import lower
from tiering.plan import make_plan
from tiering.schedule import Schedule
from tiering.simulate import alone_s, simulate
from tiering.turns import Knobs
from tiering.urgency import by_urgency
from tiering.workload import Workload

UPDATED_THEN_COMPUTED = ("RUN u a@0 c@2 e@3", "RUN f=1 d@4", "WRITE a@0", "WRITE c@2", "WRITE e@3")
"""Three pages are updated (0-3 s), an op computes (3-4), and all three have to be written."""


def urgent(schedule: Schedule, workload: Workload, hardware: Hardware = PAGE_A_SECOND) -> Schedule:
    return by_urgency(schedule, alone_s(schedule, workload, hardware))


def pass_s(schedule: Schedule, workload: Workload) -> float:
    return simulate(schedule, workload, PAGE_A_SECOND).pass_s


def test_a_write_that_nobody_waits_for_gives_way_to_a_read_that_is_needed() -> None:
    """In list order a 3-4, c 4-5, e 5-6, READ b 6-7, g 7-8. By urgency the read follows the op that held its page: a
    3-4, READ b 4-5, g 5-6.
    """
    schedule, workload = by_hand(*UPDATED_THEN_COMPUTED, "READ b@4", "RUN g=1 b@4")
    found = pass_s(schedule, workload), pass_s(urgent(schedule, workload), workload)
    assert found == (8.0, 6.0), f"in list order, by urgency: {found} s"


def test_a_write_whose_page_an_urgent_read_needs_is_as_urgent() -> None:
    """The read goes where e is: by urgency WRITE e 3-4, READ b 4-5, g 5-6; the two others come after."""
    schedule, workload = by_hand(*UPDATED_THEN_COMPUTED, "READ b@3", "RUN g=1 b@3")
    found = pass_s(schedule, workload), pass_s(urgent(schedule, workload), workload)
    assert found == (8.0, 6.0), f"in list order, by urgency: {found} s"


def test_ranks_interleave_the_end_of_a_pass_with_the_beginning_of_the_next() -> None:
    """A read that the next pass begins with has a rank before a write that ends this one."""
    workload = training_workload(toy_units(6, 1 << 20, 1 << 20), deferred=False)
    knobs = Knobs(lookahead=1, lag=1, tile_bytes=1 << 18, ring=4)
    plain = lower(workload, workload.programs["step"], place({}), knobs)
    ranks = urgent(plain, workload, assumed_hardware()).ranks
    count = len(ranks)
    reads = [ranks[line] + count for line, action in enumerate(plain.actions) if action.verb == "READ"]
    writes = [ranks[line] for line, action in enumerate(plain.actions) if action.verb == "WRITE"]
    assert min(reads) < max(writes), f"first read of the next pass {min(reads)}, last write of this one {max(writes)}"


@given(planning_problems(), st.floats(0.1, 1.2))
@settings(UNSHRUNK, max_examples=30)
def test_urgency_orders_the_same_actions_and_never_costs_time(
    problem: tuple[Workload, Hardware, bool], share: float
) -> None:
    """P5: no two lines share a rank, in whatever passes; no plan is slower than its own actions in list order."""
    workload, hardware, device = problem
    total = sum(block.nbytes for block in workload.blocks.values())
    try:
        plan = make_plan(workload, hardware, round(share * total), None, 2 * total if device else None)
    except BudgetError:
        return
    planned = plan.schedules["step"]
    listed = replace(planned, ranks=())
    ranked = urgent(listed, plan.workload, hardware)
    assert replace(ranked, ranks=()) == listed
    assert planned in (listed, ranked)
    assert sorted(rank % len(ranked.actions) for rank in ranked.ranks) == list(range(len(ranked.actions)))
    listed_s = simulate(listed, plan.workload, hardware).pass_s
    assert plan.timeline.pass_s <= listed_s * 1.001, f"in list order {listed_s} s, planned {plan.timeline.pass_s} s"


class Recording(Wrapped):
    """Notes which blocks are asked for, in order."""

    def __init__(self, inner: IOEngine) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def submit_read(self, extent: Extent, view: memoryview) -> Any:
        self.asked.append(extent.block)
        return self.inner.submit_read(extent, view)


@pytest.fixture
def small(run_file: RunFile, known_machine: None) -> Callable[..., Prepared]:
    return partial(small_llama, run_file)


def test_the_pipeline_issues_what_is_ready_by_rank(small: Callable[..., Prepared], tmp_path: Path) -> None:
    """P5: the order that is predicted is the one that runs. All homes can be read at once, in any order."""
    prepared = small(**{"tiers.resident": 1, "tiers.host_memory": "64MiB"})
    with opened(prepared, tmp_path / "s", Recording) as (manager, _):
        load = prepared.plan.load
        count = len(load.actions)
        assert count > 3 and all(x.operands[0].nbytes <= 8 << 20 for x in load.actions)
        for ranks in (range(count), range(count - 1, -1, -1)):
            recording = manager.engine
            assert isinstance(recording, Recording)
            recording.asked = []
            manager.pipeline.run(replace(load, ranks=tuple(ranks)))
            wanted = [load.actions[line].operands[0].block for line in sorted(range(count), key=lambda i: ranks[i])]
            assert recording.asked == wanted
