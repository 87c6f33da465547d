"""Schedules carried out on a device by a loop of a few lines come to the bytes of the program they are made from.

Scope: `order`; plans of a made-up model, their actions issued in list order on the lanes, the same ops on the CPU.
Not here: the pipeline (the tests marked gpu run it), rates.

What an op computes is integer arithmetic, so that the device and the CPU agree in every bit. The list is one legal
order; what the device makes of it within the events is its own. As a control the same list is issued without its
events: bytes that come out wrong then show that this check would see a missing one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch

from benchmarks.gpu_check.rig import Rig
from megatrain.programs import UnitSize, training_workload
from tiering.arena import Arena
from tiering.hardware import Rate, assumed_hardware
from tiering.lanes import Event, Lanes
from tiering.passes import on_device
from tiering.plan import Plan, ShortError, make_plan
from tiering.schedule import Action, Operand, Verb
from tiering.workload import Op, Workload

MiB = 1 << 20
LAYER_BYTES, LAYERS = 8 * MiB, 5
PASSES = 2
SLOW = 16
"""Rounds of arithmetic in an op that takes longer than its copies."""
_MASK = (1 << 31) - 1
State = Mapping[str, torch.Tensor]
"""Block to its int32 words on the CPU."""


def order(rig: Rig) -> dict[str, Any]:
    """Tight and roomy devices; ops that are faster than their copies and ops that are slower."""
    workload = _workload(rig)
    least = _plan(workload, None)
    roomy = _plan(workload, max(least.device_bytes, rig.sized(1 << 30, 1 / 2)))
    wrong: dict[str, list[str]] = {}
    seen = 0
    updates = _plan(workload, None, update_there=True)
    plans = {"tight": least, "roomy": roomy, "updates there": updates}
    for rounds in (1, SLOW):
        wanted = _interpreted(workload, rounds)
        for name, plan in plans.items():
            differing = _unlike(wanted, _carried_out(plan, rig, rounds, waits=True))
            if differing:
                wrong[f"{name}, {rounds} rounds"] = differing
            seen += bool(_unlike(wanted, _carried_out(plan, rig, rounds, waits=False)))
    return {
        "ok": not wrong,
        "why": f"other bytes than the program's: {wrong}" if wrong else "",
        "actions": {name: len(plan.schedules["step"].actions) for name, plan in plans.items()},
        "device_bytes": {name: plan.device_bytes for name, plan in plans.items()},
        "host_bytes": roomy.host_bytes,
        "passes": PASSES,
        "seen_without_events": f"{seen} of {2 * len(plans)}",
    }


def _workload(rig: Rig) -> Workload:
    layer = rig.sized(LAYER_BYTES, 1 / 64)
    sizes = {"embed": 2 * layer} | {f"L{number}": layer for number in range(LAYERS)} | {"head": 2 * layer}
    units = [
        UnitSize(name=name, nbytes=nbytes, activation_bytes=0 if name in ("embed", "head") else layer)
        for name, nbytes in sizes.items()
    ]
    return training_workload(units, deferred=False)


def _plan(workload: Workload, device_bytes: int | None, *, update_there: bool = False) -> Plan:
    """Everything at home in HOST; None: the least of the device that works."""
    link = Rate(per_s=1e10, source="assumed", how="any: only the order matters")
    hardware = replace(assumed_hardware(), h2d=link, d2h=link, device_update=link)
    whole = 4 * sum(block.nbytes for block in workload.blocks.values())
    try:
        return make_plan(workload, hardware, whole, 1.0, device_budget=device_bytes or 0, update_there=update_there)
    except ShortError as short:
        if device_bytes is not None:
            raise
        return make_plan(workload, hardware, whole, 1.0, device_budget=short.needed_bytes, update_there=update_there)


def _first_state(workload: Workload) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        block.name: torch.randint(0, _MASK, (block.nbytes // 4,), dtype=torch.int32, generator=generator)
        for block in workload.of_life("durable")
    }


def _interpreted(workload: Workload, rounds: int) -> State:
    """The program by itself, with every block at hand as a whole."""
    blocks = _first_state(workload)
    durable = list(blocks)
    for block in workload.of_life("local", "passing", "carried"):
        blocks[block.name] = torch.zeros(block.nbytes // 4, dtype=torch.int32)
    for _ in range(PASSES):
        for op in workload.programs["step"].ops:
            _compute(op, [(blocks[t.block], t.reads, t.writes) for t in op.touches], rounds)
    return {name: blocks[name] for name in durable}


def _carried_out(plan: Plan, rig: Rig, rounds: int, *, waits: bool) -> State:
    """waits: False issues every action of the device without the events that it comes after."""
    lanes = rig.lanes(True)
    with Arena(plan.host_bytes) as host:
        lanes.open(host, plan.device_bytes)
        try:
            loop = _Loop(plan, host, lanes, rounds, waits)
            loop.run()
            return loop.homes()
        finally:
            lanes.close()


class _Loop:
    """Issues the actions of a schedule one after the other, over several passes."""

    def __init__(self, plan: Plan, host: Arena, lanes: Lanes, rounds: int, waits: bool) -> None:
        self._plan, self._host, self._lanes, self._rounds, self._waits = plan, host, lanes, rounds, waits
        self._schedule = plan.schedules["step"]
        self._ops = {op.name: op for op in plan.workload.programs["step"].ops}
        self._before: dict[int, list[Event]] = {}
        self._now: dict[int, list[Event]] = {}
        for name, words in _first_state(plan.workload).items():
            self._home(name).copy_(words)

    def run(self) -> None:
        moved = [action for action in self._schedule.actions if action.verb in (Verb.READ, Verb.WRITE, Verb.N2D)]
        assert not moved, f"everything is at home in HOST, and this moves: {moved[0]}"
        for _ in range(PASSES):
            self._before, self._now = self._now, {}
            for line, action in enumerate(self._schedule.actions):
                self._now[line] = self._issued(action, self._awaited(action))
        for events in self._now.values():
            _wait(events)

    def homes(self) -> State:
        return {block.name: self._home(block.name).clone() for block in self._plan.workload.of_life("durable")}

    def _home(self, block: str) -> torch.Tensor:
        at, nbytes = self._plan.placement.address[block], self._plan.workload.blocks[block].nbytes
        return self._host.tensor(at, at + nbytes).view(torch.int32)

    def _awaited(self, action: Action) -> list[Event]:
        found = (event for line, back in action.after for event in (self._before if back else self._now).get(line, ()))
        return list({id(event): event for event in found}.values())

    def _issued(self, action: Action, after: list[Event]) -> list[Event]:
        """Its events; none for what the host has done by then."""
        if not on_device(action):
            _wait(after)
            if action.verb is Verb.RUN:
                _compute(self._ops[action.op], list(self._views(action)), self._rounds)
            return []
        if action.verb is Verb.DROP:
            return after
        given = after if self._waits else []
        if action.lane == "update":
            work = partial(_compute, self._ops[action.op], list(self._views(action)), self._rounds)
            return [self._lanes.update(work, [self._bytes(x) for x in action.operands], given)]
        if action.lane != "compute":
            source, target = (self._bytes(x) for x in action.operands)
            return [self._lanes.copy(action.lane, source, target, given)]
        self._lanes.begin_compute(given)
        _compute(self._ops[action.op], list(self._views(action)), self._rounds)
        event = self._lanes.end_compute()
        return [] if event is None else [event]

    def _views(self, action: Action) -> Iterator[tuple[torch.Tensor, bool, bool]]:
        return ((self._bytes(x).view(torch.int32), x.reads, x.writes) for x in action.operands)

    def _bytes(self, x: Operand) -> torch.Tensor:
        arena = self._lanes if x.tier == "DEVICE" else self._host
        return arena.tensor(x.address, x.address + x.nbytes)


def _wait(events: Sequence[Event]) -> None:
    for event in events:
        event.synchronize()


def _compute(op: Op, operands: Sequence[tuple[torch.Tensor, bool, bool]], rounds: int) -> None:
    """What `op` makes of (words, reads, writes): word by word if it is an update, else of all words of all it reads."""
    tiled = op.lane == "update"
    salt = crc32(op.name.encode())
    read = [words.to(torch.int64) * (number + 3) for number, (words, reads, _) in enumerate(operands) if reads]
    for number, (words, _, writes) in enumerate(operands):
        if not writes:
            continue
        mixed = torch.zeros_like(words, dtype=torch.int64) if tiled else _places(words)
        for found in read:
            mixed = mixed + (found if tiled else (found * _places(found)).sum())
        for turn in range(1 if tiled else rounds):
            mixed = (mixed * 1103515245 + salt + number + turn) & _MASK
        words.copy_(mixed.to(torch.int32))


def _places(words: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, words.numel() + 1, device=words.device)


def _unlike(wanted: State, found: State) -> list[str]:
    return [name for name, words in wanted.items() if not torch.equal(words, found[name])]
