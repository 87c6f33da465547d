"""Toy programs carried out for real: by a `Manager`, over a store, on any lanes.

Scope: plans of toy workloads for a device with memory of its own; the passes of a training, run and interpreted.
Not here: the workloads and what an op computes (`toy.py`), lanes (`streams.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from store_bytes import seen_by_zarr, unlike
from streams import DirectEngine, OutOfOrderLanes
from toy import Seen, computed, first_state, interpret

from megatrain.programs import CAST
from tiering.device import copied_from
from tiering.hardware import Hardware, Rate, assumed_hardware
from tiering.lanes import Lanes
from tiering.manager import Manager, scratch_blocks, stored_blocks
from tiering.plan import Plan, ShortError, make_plan
from tiering.posix import PosixEngine
from tiering.schedule import Action, Operand, Verb
from tiering.store import BlockStore
from tiering.workload import Workload

ROOMY = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What passes come to: the durable blocks, and all that every op has read."""

    durable: Mapping[str, bytes]
    seen: Seen

    def unlike(self, other: "Outcome") -> list[str]:
        """What differs, with both sides; empty if nothing does."""
        ops = sorted(key for key in self.seen.keys() | other.seen.keys() if self.seen.get(key) != other.seen.get(key))
        return [*(f"input of {key}" for key in ops), *unlike(self.durable, other.durable)]


def with_device() -> Hardware:
    """Assumed rates, and a link to a device."""
    link = Rate(per_s=1e10, source="assumed", how="a link for tests")
    return replace(assumed_hardware(), h2d=link, d2h=link, device_update=replace(link, how="memory for tests"))


def device_plan(
    workload: Workload,
    host_bytes: int,
    device_bytes: int | None = None,
    *,
    update_there: bool = False,
    direct: bool = False,
) -> Plan:
    """A plan of `workload` for a device with `device_bytes` of memory; None: as little as works. direct: one that reads
    straight into it what it can, with nothing at home in HOST.
    """
    hardware = with_device()
    planned = partial(make_plan, workload, hardware, host_bytes, update_there=update_there)
    budget = device_bytes or 0
    try:
        plan = planned(device_budget=budget)
    except ShortError as short:
        assert short.tier == "DEVICE" and device_bytes is None, str(short)
        budget = short.needed_bytes
        plan = planned(device_budget=budget)
    if not direct:
        return plan
    there = replace(hardware, direct_read=hardware.read)
    knobs = [replace(plan.knobs, direct=True, lookahead=1, lag=0)]
    plan = make_plan(
        workload, there, host_bytes, 0.0, device_budget=budget, update_there=update_there, candidates=knobs
    )
    assert plan.timeline.direct_bytes, "nothing is read straight into the device"
    return plan


def training(workload: Workload) -> list[str]:
    """Programs in the order in which a training of three steps runs them."""
    begins = [name for name in workload.programs if name == CAST]
    if "flush" in workload.programs:
        return [*begins, "first", "step", "step", "flush"]
    (name,) = workload.programs.keys() - set(begins)
    return [*begins, *[name] * 3]


def interpreted(workload: Workload) -> Outcome:
    """What `training` comes to by the programs alone."""
    state, seen = first_state(workload), Seen()
    for number, name in enumerate(training(workload)):
        state, found = interpret(workload, state, workload.programs[name], 1)
        seen |= {(number, op, page): digests for (_, op, page), digests in found.items()}
    durable = {block.name: bytes(state[block.name]) for block in workload.of_life("durable")}
    return Outcome(durable=durable, seen=seen)


class ToyRun:
    """A plan that is open over a new store. A context manager, as its `manager` is."""

    def __init__(self, plan: Plan, root: Path, lanes: Lanes, *, serial: bool = False) -> None:
        self.plan = plan
        self.root = root
        self.seen = Seen()
        self.entered = 0
        store = BlockStore.create(root, [*stored_blocks(plan, {}), *scratch_blocks(plan)], identity={})
        self.engine = DirectEngine(lanes) if isinstance(lanes, OutOfOrderLanes) else PosixEngine()
        self.manager = Manager(plan, store, self.engine, self.compute, serial=serial, lanes=lanes)

    def __enter__(self) -> "ToyRun":
        try:
            state = first_state(self.plan.workload)
            for block in self.plan.workload.of_life("durable"):
                self.manager.put(block.name, _filler(state[block.name]))
            self.manager.commit(0, {})
            self.manager.load()
        except BaseException:
            self.manager.close()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self.manager.close()

    def compute(self, action: Action, views: Mapping[str, torch.Tensor], number: Any) -> None:
        """What the action of pass `number` makes of its bytes."""
        schedule = self._schedule(number)
        ops = {op.name: op for op in self.plan.workload.programs[schedule].ops}
        found = [views[_lent_as(x)].cpu().numpy().tobytes() for x in action.operands]
        for x, fresh in computed(ops[action.op], action.operands, found, number, self.seen):
            views[_lent_as(x)].copy_(torch.frombuffer(bytearray(fresh), dtype=torch.uint8))

    def _schedule(self, number: int) -> str:
        return training(self.plan.workload)[number]

    def ops(self, number: int) -> list[Action]:
        """What is entered in pass `number`."""
        schedule = self.plan.schedules[self._schedule(number)]
        return [action for action in schedule.actions if action.verb is Verb.RUN and action.lane == "compute"]

    def begin(self, number: int) -> None:
        names = training(self.plan.workload)
        last = names[number + 1 : number + 2] != [names[number]]
        self.manager.begin(names[number], last=last, context=number)

    def enter(self, number: int, ops: Sequence[Action]) -> None:
        for action in ops:
            with self.manager.op(action.name) as views:
                self.entered += 1
                self.compute(action, views, number)

    def train(self) -> Outcome:
        """All passes of `training`, and a commit."""
        for number, name in enumerate(training(self.plan.workload)):
            if self.ops(number):
                self.begin(number)
                self.enter(number, self.ops(number))
            else:
                self.manager.run(name, context=number)
        self.manager.computed()
        self.manager.commit(1, {})
        names = [block.name for block in self.plan.workload.of_life("durable")]
        return Outcome(durable=seen_by_zarr(self.root, names), seen=self.seen)


def trained(plan: Plan, root: Path, lanes: Lanes, *, serial: bool = False) -> Outcome:
    with ToyRun(plan, root, lanes, serial=serial) as run:
        return run.train()


def _lent_as(x: Operand) -> str:
    return copied_from(x.block) if x.tier == "DEVICE" else x.block


def _filler(held: bytearray) -> Any:
    return lambda view: view.copy_(torch.frombuffer(held, dtype=torch.uint8))
