"""Event simulation of a schedule: when would each action run, and how long is a pass in the steady state.

Scope: lanes as servers that take the first ready action in list order, exactly as `pipeline.py` does.
Not here: measured spans (`trace.py`), closed-form bounds (`costs.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from tiering.hardware import Hardware
from tiering.schedule import Action, Schedule, Verb, moved_bytes
from tiering.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Predicted figures of one pass in the steady state: seconds and bytes."""

    pass_s: float
    io_s: float
    compute_s: float
    update_s: float
    read_bytes: int
    written_bytes: int

    @property
    def limit_s(self) -> float:
        """The busiest resource: no order of the same actions can be faster."""
        return max(self.io_s, self.compute_s)


def op_seconds(workload: Workload, hardware: Hardware) -> dict[str, float]:
    """How long each whole op computes: as measured, else its flops at the machine's rate."""
    ops = (op for program in workload.programs.values() for op in program.ops)
    return {op.name: op.seconds or op.flops / hardware.compute.per_s for op in ops}


def seconds(action: Action, op_s: Mapping[str, float], hardware: Hardware) -> float:
    """How long the action keeps its lane busy."""
    if action.verb is Verb.READ:
        return action.nbytes / hardware.read.per_s
    if action.verb is Verb.WRITE:
        return action.nbytes / hardware.write.per_s
    if action.verb is Verb.DROP:
        return 0.0
    if action.lane == "update":
        return action.nbytes / hardware.update.per_s
    return op_s[action.op]


def simulate(schedule: Schedule, workload: Workload, hardware: Hardware) -> Timeline:
    """Run three passes of a cyclic schedule (one of any other) and report the last one."""
    op_s = op_seconds(workload, hardware)
    cost = [seconds(action, op_s, hardware) for action in schedule.actions]
    server = [_server(action, hardware) for action in schedule.actions]
    passes = 3 if schedule.cyclic else 1
    ends = _ends(schedule, cost, server, passes)
    busy = dict.fromkeys(("io", "compute", "update"), 0.0)
    for action, duration in zip(schedule.actions, cost, strict=True):
        busy[action.lane] += duration
    beside = hardware.update_beside_compute
    return Timeline(
        pass_s=ends[-1] - (ends[-2] if passes > 1 else 0.0),
        io_s=busy["io"],
        compute_s=busy["compute"] + (0.0 if beside else busy["update"]),
        update_s=busy["update"],
        read_bytes=moved_bytes(schedule.actions, Verb.READ),
        written_bytes=moved_bytes(schedule.actions, Verb.WRITE),
    )


def _server(action: Action, hardware: Hardware) -> str:
    if action.verb is Verb.DROP:
        return "none"
    if action.lane == "update" and not hardware.update_beside_compute:
        return "compute"
    return action.lane


def _ends(schedule: Schedule, cost: list[float], server: list[str], passes: int) -> list[float]:
    """Times at which the last whole op of each pass ends (the last action, where there is no whole op)."""
    count = len(schedule.actions)
    runs = [i for i, a in enumerate(schedule.actions) if a.verb is Verb.RUN and a.lane == "compute"]
    gate = runs[-1] if runs else count - 1
    before = {later: earlier for earlier, later in pairwise(runs)}  # whole ops are entered in order, ready or not
    missing = [0] * (count * passes)
    followers: list[list[int]] = [[] for _ in range(count * passes)]
    for index in range(count * passes):
        waits = {w + (index // count - back) * count for w, back in schedule.actions[index % count].after}
        if index % count in before:
            waits.add(before[index % count] + index // count * count)
        if index >= count:
            waits.add(gate + (index // count - 1) * count)  # a pass is opened when the one before has computed
        waits = {w for w in waits if w >= 0}
        missing[index] = len(waits)
        for w in waits:
            followers[w].append(index)
    ready: dict[str, list[int]] = {name: [] for name in {*server}}
    for index in range(count * passes):
        if not missing[index]:
            heappush(ready[server[index % count]], index)
    done_at = [0.0] * (count * passes)
    running: list[tuple[float, int]] = []
    free = dict.fromkeys(ready, True)
    now = 0.0
    while running or any(ready.values()):
        for name, queue in ready.items():
            while queue and (free[name] or name == "none"):
                index = heappop(queue)
                free[name] = False
                heappush(running, (now + cost[index % count], index))
        now, index = heappop(running)
        done_at[index] = now
        free[server[index % count]] = True
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready[server[follower % count]], follower)
    return [done_at[gate + number * count] for number in range(passes)]
