"""Schedules for a device with memory of its own, carried out by a stand-in that is late and out of order.

Scope: copies and events between the pipeline and the lanes; steps of toy models and of a small Llama over a real store.
Not here: such schedules as values (`test_lower.py`, `test_check.py`), the lanes of CUDA (`test_cuda.py`).
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from conftest import RunFile, slow
from small_runs import small_llama, state, train
from streams import OutOfOrderLanes
from toy import toy_units, toy_workload
from toy_runs import ROOMY, Outcome, ToyRun, device_plan, interpreted, trained

import tiering.manager
from megatrain.prepare import Prepared
from tiering.errors import IOFailedError
from tiering.lanes import Event
from tiering.passes import on_device
from tiering.plan import Plan
from tiering.schedule import Action, Schedule, Verb, order
from tiering.workload import PAGE, Lane, Workload

TIGHT_HOST, SOME_HOST = 90 * PAGE, 200 * PAGE
DEVICE = {"tight": None, "roomy": ROOMY}


@lru_cache
def workload(mode: str, *, tied: bool = False, bf16: bool = False) -> Workload:
    return toy_workload(toy_units(3, 3 * PAGE, 5 * PAGE, tied=tied, activation=2 * PAGE), mode, bf16=bf16)


@lru_cache
def plan(
    mode: str, device: str, host_bytes: int = SOME_HOST, *, tied: bool = False, update_there: bool = False
) -> Plan:
    return device_plan(workload(mode, tied=tied), host_bytes, DEVICE[device], update_there=update_there)


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred", "mixed"])
@pytest.mark.parametrize("tied", [slow(False, id="untied"), pytest.param(True, id="tied")])
def test_copies_that_are_late_and_out_of_order_change_no_byte(
    tmp_path: Path, mode: str, device: str, tied: bool
) -> None:
    """I2, I3, P1: every op reads what its program says, whatever the device does between the events."""
    wanted = interpreted(workload(mode, tied=tied))
    for seed, host_bytes in enumerate((TIGHT_HOST, SOME_HOST, ROOMY)):
        made = plan(mode, device, host_bytes, tied=tied)
        found = trained(made, tmp_path / str(seed), OutOfOrderLanes(seed))
        unlike = wanted.unlike(found)
        assert not unlike, f"seed {seed}: {unlike[:4]}\n{made.schedules['step'].text()}"


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred", "mixed"])
def test_copies_of_half_the_bytes_change_no_byte_either(tmp_path: Path, mode: str, device: str) -> None:
    """I2, I3, P1: weights that ops compute with in BF16, made anew by every update; and half of their bytes move."""
    wanted = interpreted(workload(mode, bf16=True))
    for seed, host_bytes in enumerate((TIGHT_HOST, ROOMY)):
        made = device_plan(workload(mode, bf16=True), host_bytes, DEVICE[device])
        found = trained(made, tmp_path / str(seed), OutOfOrderLanes(seed))
        unlike = wanted.unlike(found)
        assert not unlike, f"seed {seed}: {unlike[:4]}\n{made.schedules['step'].text()}"


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_a_serial_run_of_a_device_comes_to_the_same_bytes(tmp_path: Path, mode: str, device: str) -> None:
    """I8: serial and overlapped runs are the same, on a device too."""
    wanted = interpreted(workload(mode))
    found = trained(plan(mode, device), tmp_path / "serial", OutOfOrderLanes(), serial=True)
    unlike = wanted.unlike(found)
    assert not unlike, unlike[:4]


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
def test_a_model_on_a_device_gives_the_bits_of_the_cpu(
    run_file: RunFile, known_machine: None, tmp_path: Path, clip: float | None, device: str
) -> None:
    """I8, P1: losses and state, with two micro-batches a step; copies are late and out of order, or serial."""
    prepared = small_llama(run_file, clip)
    wanted = train(prepared, tmp_path / "plain"), state(prepared, tmp_path / "plain")
    there = _there(prepared, device)
    for seed in range(2):
        root = tmp_path / f"late-{seed}"
        assert train(there, root, lanes=OutOfOrderLanes(seed)) == wanted[0]
        assert state(there, root) == wanted[1]
    one_by_one = replace(there, run=there.run.model_copy(update={"tiers": _serial(there)}))
    assert train(one_by_one, tmp_path / "serial", lanes=OutOfOrderLanes()) == wanted[0]
    assert state(there, tmp_path / "serial") == wanted[1]


def _there(prepared: Prepared, device: str) -> Prepared:
    """The same run with its ops on a device."""
    return replace(prepared, plan=device_plan(prepared.plan.workload, 2 * prepared.host_budget, DEVICE[device]))


def _serial(prepared: Prepared) -> object:
    return prepared.run.tiers.model_copy(update={"serial": True})


@pytest.mark.parametrize("device", DEVICE)
def test_the_device_holds_what_was_planned_and_lends_nothing_else(tmp_path: Path, device: str) -> None:
    """I5, P2: its arena is as large as the plan says, and all of it is used."""
    made, lanes = plan("fused", device), OutOfOrderLanes()
    with ToyRun(made, tmp_path / "s", lanes) as run:
        assert lanes.arena is not None
        held = lanes.arena.numel()
        run.train()
    assert (held, lanes.top) == (made.device_bytes, made.device_bytes)


def test_the_copies_of_a_pass_are_those_of_the_plan(tmp_path: Path) -> None:
    """P5: bytes over the link, counted where they move."""
    made = plan("fused", "tight")
    with ToyRun(made, tmp_path / "s", OutOfOrderLanes()) as run:
        for number in range(2):
            run.begin(number)
            run.enter(number, run.ops(number))
        run.manager.pipeline.drain()
        _, figures = run.manager.trace.take()
        wanted = [2 * n for n in (made.timeline.h2d_bytes, made.timeline.d2h_bytes)]
        assert [figures.h2d_bytes, figures.d2h_bytes] == wanted
        assert figures.compute_s > 0 and figures.h2d_s > 0 and figures.d2h_s > 0, figures


class _Happened:
    """An event that has happened, and that says so when the gate is open. See `lanes.Event`."""

    begin_s = end_s = 0.0

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def synchronize(self) -> None:
        self.gate.wait()


class _Gated(OutOfOrderLanes):
    """Does everything at once, and says so when the gate of its lane is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[Lane, threading.Event] = {lane: threading.Event() for lane in ("h2d", "compute", "d2h")}
        self.gave_up = False

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        target.copy_(source)
        return _Happened(self.gates[lane])

    def begin_compute(self, after: Sequence[Event]) -> None:
        return None

    def end_compute(self) -> Event:
        return _Happened(self.gates["compute"])

    @contextmanager
    def opened_at_last(self, after_s: float = 20.0) -> Iterator[None]:
        """Where the host waits for what cannot happen, the gates open after a while, so that the test can fail."""

        def give_up() -> None:
            self.gave_up = True
            self.open_all()

        timer = threading.Timer(after_s, give_up)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self.open_all()

    def open_all(self) -> None:
        for gate in self.gates.values():
            gate.set()


def test_the_host_runs_ahead_of_the_device(tmp_path: Path) -> None:
    """P4: a whole forward and the first of backward are issued while the device has done nothing at all."""
    made, lanes = plan("fused", "tight", ROOMY), _Gated()
    with ToyRun(made, tmp_path / "s", lanes) as run, lanes.opened_at_last():
        run.begin(0)
        names = [action.name for action in run.ops(0)]
        ahead = names.index("loss") + 2
        run.enter(0, run.ops(0)[:ahead])
        assert not lanes.gave_up, f"the host waited for the device at {names[run.entered - 1]}"
        lanes.open_all()
        run.enter(0, run.ops(0)[ahead:])


def test_waiting_for_what_was_computed_runs_updates_meanwhile(tmp_path: Path) -> None:
    """P4: reading a loss holds up no update; here the device gets on only when one has run."""
    made, lanes = plan("fused", "tight", ROOMY), _Gated()
    with ToyRun(made, tmp_path / "s", lanes) as run, lanes.opened_at_last():
        lanes.gates["h2d"].set()
        lanes.gates["d2h"].set()
        run.begin(0)
        names = [action.name for action in run.ops(0)]
        ahead = names.index("loss") + 1
        run.enter(0, run.ops(0)[:ahead])
        assert run.manager.pipeline.updates == 0
        update = run.manager.pipeline._update

        def updated(*args: object) -> None:
            update(*args)  # type: ignore[arg-type]
            lanes.gates["compute"].set()

        run.manager.pipeline._update = updated
        run.manager.computed()
        assert not lanes.gave_up, "no update ran while the host waited for the device"
        run.enter(0, run.ops(0)[ahead:])


class _Failing(OutOfOrderLanes):
    """Copy number `at` is refused, or fails when it is waited for."""

    def __init__(self, at: int, *, refused: bool) -> None:
        super().__init__()
        self.at = at
        self.refused = refused
        self.after_failure = 0

    def copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        self.after_failure += self.refused and self.copies >= self.at
        event = super().copy(lane, source, target, after)
        if self.copies == self.at and self.refused:
            raise IOFailedError(f"copy {self.at} failed")
        if self.copies == self.at:
            event.synchronize = self._fails  # type: ignore[method-assign]
        return event

    def _fails(self) -> None:
        raise IOFailedError(f"copy {self.at} failed")

    def close(self) -> None:
        self._pending.clear()
        super().close()


@pytest.mark.parametrize("refused", [True, False], ids=["when issued", "later"])
def test_after_a_copy_that_fails_nothing_is_issued_and_nothing_committed(tmp_path: Path, refused: bool) -> None:
    """I10: whichever copy it is, its error reaches the thread that computes, and the last commit stays as it was."""
    made = plan("fused", "tight")
    at = passed = 0
    while not passed:
        at += 5
        lanes = _Failing(at, refused=refused)
        with ToyRun(made, tmp_path / str(at), lanes) as run:
            try:
                run.train()
                passed = lanes.copies < at
                assert passed, f"copy {at} failed and nobody noticed"
            except IOFailedError as error:
                assert str(error) == f"copy {at} failed"
                assert (lanes.after_failure, run.manager.store.step) == (0, 0)
    assert at > 30, "hardly anything was tried"


def test_an_op_that_fails_on_a_device_hangs_nobody(tmp_path: Path) -> None:
    """I10: what was issued is waited for, and closing comes to an end."""
    with ToyRun(plan("fused", "tight"), tmp_path / "s", OutOfOrderLanes()) as run:
        run.begin(0)
        run.enter(0, run.ops(0)[:2])
        with pytest.raises(ZeroDivisionError), run.manager.op(run.ops(0)[2].name):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            run.manager.computed()


def edges(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """(line, edge) of all that only a device keeps."""
    actions = schedule.actions
    return [
        (line, edge)
        for line, action in enumerate(actions)
        for edge in action.after
        if on_device(action) and on_device(actions[edge[0]])
    ]


def without(schedule: Schedule, line: int, edge: tuple[int, int]) -> Schedule:
    actions = list(schedule.actions)
    after = tuple(kept for kept in actions[line].after if kept != edge)
    actions[line] = replace(actions[line], after=after)
    return replace(schedule, actions=tuple(actions))


def _entered_in_order(schedule: Schedule) -> Schedule:
    """The same, where each op also waits for the one before it: a stream that computes keeps that by itself."""
    actions = list(schedule.actions)
    computes = [line for line, a in enumerate(actions) if a.verb is Verb.RUN and a.lane == "compute"]
    before = [(computes[-1], 1), *((line, 0) for line in computes[:-1])]
    for line, edge in zip(computes, before, strict=True):
        actions[line] = replace(actions[line], after=tuple({*actions[line].after, edge}))
    return replace(schedule, actions=tuple(actions))


def matters(schedule: Schedule) -> bool:
    """True if two actions that share bytes have lost their order. What does no work only stands between others."""
    found = {x.block for a in schedule.actions for x in a.operands if x.reads or a.verb is Verb.WRITE}

    def works(action: Action) -> bool:
        unread = action.verb is Verb.D2H and action.operands[1].block not in found
        return not unread and action.verb is not Verb.DROP

    working = [action if works(action) else replace(action, operands=()) for action in schedule.actions]
    ordered = _entered_in_order(schedule).actions
    return any(
        not _comes_after(ordered, line, edge) for line, edges in enumerate(order(working, True)) for edge in edges
    )


def _comes_after(actions: Sequence[Action], line: int, edge: tuple[int, int]) -> bool:
    """True if a chain of edges leads from `line` back to `edge`."""
    todo, seen = [(line, 0)], {(line, 0)}
    while todo:
        at, passes = todo.pop()
        found = {(waited, passes + back) for waited, back in actions[at].after} - seen
        if edge in found:
            return True
        seen |= found
        todo += [(waited, back) for waited, back in found if back <= edge[1]]
    return False


Edge = tuple[int, tuple[int, int]]
"""A line, and the line that it waits for: its number, and how many passes back."""


def unseen_without(root: Path, made: Plan, wanted: Outcome, mattering: list[Edge], most: int) -> tuple[int, list[str]]:
    """Takes up to `most` of these edges out of the step, one at a time: how many, and which nobody missed."""
    step = made.schedules["step"]
    taken_out = random.Random(0).sample(mattering, min(most, len(mattering)))
    unseen = []
    for number, (line, edge) in enumerate(taken_out):
        broken = replace(made, schedules={**made.schedules, "step": without(step, line, edge)})
        trials = (trained(broken, root / f"{number}-{seed}", OutOfOrderLanes(seed)) for seed in range(8))
        if not any(map(wanted.unlike, trials)):
            unseen.append(f"{step.actions[line]} without waiting for {step.actions[edge[0]]} ({edge[1]} passes back)")
    return len(taken_out), unseen


def _unseen(root: Path, mode: str, device: str, most: int) -> tuple[int, list[str]]:
    """Of edges between device actions that matter."""
    made = plan(mode, device, ROOMY)
    step = made.schedules["step"]
    mattering = [(line, edge) for line, edge in edges(step) if matters(without(step, line, edge))]
    return unseen_without(root, made, interpreted(workload(mode)), mattering, most)


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_the_stand_in_sees_a_missing_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, device: str
) -> None:
    """I2, I3: without any one edge between device actions that matters, some order of the device gives wrong bytes.

    By lot: one of them may stay unseen.
    """
    monkeypatch.setattr(tiering.manager, "check", lambda *args: None)
    count, unseen = _unseen(tmp_path, mode, device, 10)
    assert count == 10 and len(unseen) <= 1, "\n".join(unseen)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_the_stand_in_sees_any_missing_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, device: str
) -> None:
    """I2, I3: as above, with each edge in turn."""
    monkeypatch.setattr(tiering.manager, "check", lambda *args: None)
    count, unseen = _unseen(tmp_path, mode, device, 1000)
    assert count > 15 and len(unseen) <= 1, "\n".join(unseen)
