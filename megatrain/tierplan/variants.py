"""A forecast with one thing changed: planned with the knobs at hand, so that it takes a fraction of a second.

Scope: other RAM, other drives, any other question; the least memory that a question takes.
Not here: which changes are worth showing (`advice.py`), ranges of them (`sweep.py`).
"""

from dataclasses import replace

from megatrain.errors import UserError
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.question import Question, ShortageError, Sized, forecast, from_plan, sized
from tiering.errors import BudgetError
from tiering.plan import make_plan
from tiering.simulate import simulate
from tiering.turns import Knobs


def with_drives(ready: Sized, base: Forecast, question: Question) -> Forecast:
    """The schedule at hand on the drives of `question`: no byte moves otherwise."""
    timeline = simulate(base.main(), base.plan.workload, question.hardware)
    plan = replace(base.plan, timeline=timeline)
    return from_plan(replace(ready, question=question), plan, question.hardware, question.drives)


def with_host_memory(ready: Sized, base: Forecast, nbytes: int) -> Forecast:
    """The same ops, those of the device among them, with other homes. Raises `ShortageError`."""
    other = replace(ready, question=replace(ready.question, host_memory=nbytes))
    hardware, resident = other.question.hardware, other.question.resident
    for candidates in ([base.plan.knobs], thriftier(base.plan.knobs, other.frugal())):
        try:
            plan = make_plan(base.plan.workload, hardware, other.host_budget, resident, candidates=candidates)
        except BudgetError:
            continue
        if other.device_budget is None or plan.device_bytes <= other.device_budget:
            return from_plan(other, plan, hardware, other.question.drives)
    return from_plan(other, other.plan([other.frugal()]), hardware, other.question.drives)


def with_question(question: Question, base: Forecast) -> Forecast:
    """Raises UserError and `ShortageError` as `forecast` does."""
    try:
        return forecast(question, [base.plan.knobs])
    except ShortageError:
        return forecast(question, thriftier(base.plan.knobs, sized(question).frugal()))


def thriftier(knobs: Knobs, frugal: Knobs) -> list[Knobs]:
    """From the knobs at hand to those that take the least memory."""
    tile_bytes = max(knobs.tile_bytes, frugal.tile_bytes)
    steps = [
        replace(knobs, lookahead=min(1, knobs.lookahead), ring=min(4, knobs.ring), copies_ahead=1),
        replace(knobs, lookahead=0, lag=0, ring=min(4, knobs.ring), copies_ahead=1),
    ]
    return [*(replace(step, tile_bytes=tile_bytes) for step in steps), frugal]


def shortage_of(question: Question) -> ShortageError | None:
    """What is short in a question, by the plan that takes the least memory; None if it fits."""
    ready = sized(question)
    try:
        ready.plan([ready.frugal()])
    except ShortageError as shortage:
        return shortage
    return None


def fits(question: Question) -> bool:
    """False also for tokens that are no whole micro-batches."""
    try:
        return shortage_of(question) is None
    except UserError:
        return False
