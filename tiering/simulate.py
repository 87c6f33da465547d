"""Event simulation of a schedule: when would each action run, and how long is a pass in the steady state.

Scope: lanes as servers that take the first ready action by rank, exactly as `pipeline.py` does; what lanes take
from each other where they share a drive or a processor.
Not here: measured spans (`trace.py`), closed-form bounds (`costs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from tiering.hardware import Hardware
from tiering.schedule import Action, Schedule, Verb
from tiering.workload import Lane, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Predicted figures of one pass in the steady state: seconds and bytes.

    io_s, h2d_s, d2h_s, compute_s, update_s: how long each lane is busy. Where updates and computing share processors
    (those of the host, or those of the device), compute_s is both. serial_s: one action after the other.
    direct_bytes: of those read, what goes straight to the device.
    """

    pass_s: float
    io_s: float
    h2d_s: float
    d2h_s: float
    compute_s: float
    update_s: float
    serial_s: float
    read_bytes: int
    written_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    direct_bytes: int = 0

    @property
    def limit_s(self) -> float:
        """The busiest resource: no order of the same actions can be faster."""
        return max(self.busy().values())

    @property
    def bottleneck(self) -> str:
        """The resource that `limit_s` is the busy time of."""
        busy = self.busy()
        return max(busy, key=lambda name: busy[name])

    def busy(self) -> dict[str, float]:
        """Seconds that each resource is busy."""
        return {
            "NVMe": self.io_s,
            "H2D": self.h2d_s,
            "D2H": self.d2h_s,
            "compute": self.compute_s,
            "update": self.update_s,
        }


def op_seconds(workload: Workload, hardware: Hardware) -> dict[str, float]:
    """How long each whole op computes: as measured, else its flops at the machine's rate."""
    ops = (op for program in workload.programs.values() for op in program.ops)
    return {op.name: op.seconds or op.flops / hardware.compute.per_s for op in ops}


def seconds(action: Action, op_s: Mapping[str, float], hardware: Hardware) -> float:
    """How long the action takes with all its resources to itself."""
    if action.verb is Verb.READ:
        return action.nbytes / hardware.read.per_s
    if action.verb is Verb.N2D:
        assert hardware.direct_read is not None, f"{action} needs a drive that reads into the device"
        return action.operands[0].nbytes / hardware.direct_read.per_s
    if action.verb is Verb.WRITE:
        return action.nbytes / hardware.write.per_s
    if action.verb is Verb.DROP:
        return 0.0
    if action.verb in (Verb.H2D, Verb.D2H):
        rate = hardware.h2d if action.verb is Verb.H2D else hardware.d2h
        assert rate is not None, f"{action} needs a device, and the hardware has none"
        return action.operands[0].nbytes / rate.per_s
    if action.lane == "update":
        rate = hardware.device_update if action.updates_there else hardware.update
        assert rate is not None, f"{action} needs a device, and the hardware has none"
        return action.nbytes / rate.per_s
    return op_s[action.op]


def simulate(schedule: Schedule, workload: Workload, hardware: Hardware) -> Timeline:
    """Run passes of a cyclic schedule until one takes as long as the one before (one of any other); the last one."""
    moved = dict.fromkeys(Verb, 0)
    for action in schedule.actions:
        moved[action.verb] += action.nbytes
    direct_bytes = moved[Verb.N2D] // 2  # two operands each, as the copies
    cost = alone_s(schedule, workload, hardware)
    busy = _busy_s(schedule, cost)
    pass_s = _steady(schedule, cost, hardware)[1]
    shared, kept = sharing(schedule, hardware)
    slowed_s = (busy["compute"] + busy["update"]) / kept if shared else busy["compute"] + busy["update"] / kept
    return Timeline(
        pass_s=pass_s,
        io_s=busy["io"],
        h2d_s=busy["h2d"],
        d2h_s=busy["d2h"],
        compute_s=busy["compute"] + (busy["update"] if shared else 0.0),
        update_s=busy["update"],
        serial_s=busy["io"] + busy["h2d"] + busy["d2h"] + slowed_s,
        read_bytes=moved[Verb.READ] + direct_bytes,
        written_bytes=moved[Verb.WRITE],
        h2d_bytes=moved[Verb.H2D] // 2,
        d2h_bytes=moved[Verb.D2H] // 2,
        direct_bytes=direct_bytes,
    )


def sharing(schedule: Schedule, hardware: Hardware) -> tuple[bool, float]:
    """Whether updates and computing have the same processors; the share of its speed that an update keeps beside a busy
    drive.
    """
    if any(action.updates_there for action in schedule.actions):
        return True, 1.0
    return not hardware.update_beside_compute, 1 - hardware.io_steals


def alone_s(schedule: Schedule, workload: Workload, hardware: Hardware) -> list[float]:
    """Seconds of each action alone, but for a drive that reads and writes share."""
    op_s = op_seconds(workload, hardware)
    cost = [seconds(action, op_s, hardware) for action in schedule.actions]
    verbs = {action.verb for action in schedule.actions}
    if Verb.WRITE not in verbs or verbs.isdisjoint((Verb.READ, Verb.N2D)):
        return cost
    stretch = hardware.mixed_stretch()
    return [c * stretch if a.lane == "io" else c for a, c in zip(schedule.actions, cost, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """When one line of a schedule runs, in seconds since its pass was opened. back: 1 in the pass before."""

    line: int
    back: int
    begin_s: float
    end_s: float


def slots(schedule: Schedule, workload: Workload, hardware: Hardware) -> list[Slot]:
    """The pass that `simulate` reports, line by line, and the one before it (back=1), whose end may reach into it."""
    run, _ = _steady(schedule, alone_s(schedule, workload, hardware), hardware)
    passes = run.passes
    opened_s = run.done_at[run.gate + (passes - 2) * run.count] if passes > 1 else 0.0
    return [
        Slot(line=line, back=back, begin_s=run.begun_at[at] - opened_s, end_s=run.done_at[at] - opened_s)
        for back in range(min(2, passes))
        for line in range(run.count)
        for at in [line + (passes - 1 - back) * run.count]
    ]


def _busy_s(schedule: Schedule, cost: Sequence[float]) -> dict[Lane, float]:
    """Seconds for which each lane is busy in a pass."""
    busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    for action, duration in zip(schedule.actions, cost, strict=True):
        busy[action.lane] += duration
    return busy


def _steady(schedule: Schedule, cost: list[float], hardware: Hardware) -> "tuple[_Run, float]":
    """Passes in a row, and how long one takes. The first ones may be faster than the busiest lane lets all: what it has
    not done yet still finds room in memory.
    """
    busy = _busy_s(schedule, cost)
    shared, _ = sharing(schedule, hardware)
    least_s = max(*busy.values(), busy["compute"] + (busy["update"] if shared else 0.0))
    if not schedule.cyclic:
        run = _Run(schedule, cost, hardware, 1)
        return run, run.ends()[0]
    for passes in _PASSES:
        run = _Run(schedule, cost, hardware, passes)
        *_, first_s, second_s, third_s = run.ends()
        pass_s = third_s - second_s
        if pass_s >= least_s * (1 - _STEADY) and abs(pass_s - (second_s - first_s)) <= _STEADY * pass_s:
            break
    return run, max(pass_s, least_s)


LANES: tuple[Lane, ...] = ("io", "h2d", "d2h", "update", "compute")
_PASSES, _STEADY = (3, 6), 1e-3
"""Passes that are run, the second number where three are not enough; what two of them may differ by."""
_INDEX_BITS = 32
_INDEX = (1 << _INDEX_BITS) - 1
_NEVER = 1 << 62
"""More waits than there are: of actions in a pass after the last one."""


class _Run:
    """The state of a simulated run. Actions are numbered on through all passes."""

    def __init__(self, schedule: Schedule, cost: list[float], hardware: Hardware, passes: int) -> None:
        self.actions = schedule.actions
        self.count = len(schedule.actions)
        self.cost = cost
        self.passes = passes
        self.shared, self.kept = sharing(schedule, hardware)
        runs = [i for i, a in enumerate(schedule.actions) if a.verb is Verb.RUN and a.lane == "compute"]
        self.gate = runs[-1] if runs else self.count - 1
        self.followers: list[list[int]] = [[] for _ in self.actions]  # those of the next pass: beyond `count`
        self.missing = self._waits(runs)
        ranks = schedule.ranks or range(self.count)
        self.keys = [  # rank, counted on through passes, and the number of the action
            rank + number * self.count << _INDEX_BITS | line + number * self.count
            for number in range(passes + 1)
            for line, rank in enumerate(ranks)
        ]
        self.ready: dict[Lane, list[int]] = {lane: [] for lane in LANES}
        self.queues = [None if a.verb is Verb.DROP else self.ready[a.lane] for a in self.actions] * 2  # as followers
        self.running: dict[Lane, list[float]] = {}  # lane -> [action, seconds of work left]
        self.speeds: dict[tuple[Lane, ...], list[tuple[Lane, float]]] = {}
        self.begun_at = [0.0] * (self.count * passes)
        self.done_at = [0.0] * (self.count * passes)
        self.now = 0.0

    def _waits(self, runs: list[int]) -> list[int]:
        """How many others each action still waits for; fills `followers` line by line."""
        before = {later: earlier for earlier, later in pairwise(runs)}  # computing ops are entered in order
        opens = (self.gate, 1)  # a pass is opened when the one before has computed
        first, later = [0] * self.count, [0] * self.count
        for line, action in enumerate(self.actions):
            waits = action.after if opens in action.after else (*action.after, opens)
            if line in before and (before[line], 0) not in waits:
                waits = (*waits, (before[line], 0))
            later[line] = len(waits)
            for waited, back in waits:
                first[line] += not back
                self.followers[waited].append(line + back * self.count)
        return first + later * (self.passes - 1) + [_NEVER] * self.count

    def ends(self) -> list[float]:
        """Times at which the last computing op of each pass ends (the last action, where nothing computes)."""
        for index, missing in enumerate(self.missing):
            if not missing:
                self._enter(index)
        running = self.running
        while self._start():
            busy = tuple(running)
            speeds = self.speeds.get(busy) or self._speeds(busy)
            first, passed_s = speeds[0][0], inf
            for lane, speed in speeds:
                if running[lane][1] / speed < passed_s:
                    first, passed_s = lane, running[lane][1] / speed
            self.now += passed_s
            for lane, speed in speeds:
                running[lane][1] -= passed_s * speed
            self._finish(int(running.pop(first)[0]))
        return [self.done_at[self.gate + number * self.count] for number in range(self.passes)]

    def _enter(self, index: int) -> None:
        """Everything that `index` waits for has completed."""
        queue = self.queues[index % self.count]
        if queue is not None:
            heappush(queue, self.keys[index])
        else:
            self.begun_at[index] = self.now
            self._finish(index)

    def _start(self) -> bool:
        """Give every free lane its first ready action; False if nothing runs."""
        running = self.running
        for lane, queue in self.ready.items():
            if queue and lane not in running:
                index = heappop(queue) & _INDEX
                running[lane] = [index, self.cost[index % self.count]]
                self.begun_at[index] = self.now
        return bool(running)

    def _speeds(self, busy: tuple[Lane, ...]) -> list[tuple[Lane, float]]:
        """Work done a second by each running lane that gets on; an update goes before an op on the same processors."""
        speed: dict[Lane, float] = dict.fromkeys(busy, 1.0)
        if "io" in speed:
            for lane in ("compute", "update") if self.shared else ("update",):
                if lane in speed:
                    speed[lane] = self.kept
        if self.shared and "update" in speed:
            speed.pop("compute", None)
        self.speeds[busy] = list(speed.items())
        return self.speeds[busy]

    def _finish(self, index: int) -> None:
        """`index` is done, and with it what only gives up bytes and waited for nothing else."""
        count, missing, queues, keys = self.count, self.missing, self.queues, self.keys
        done = [index]
        for index in done:
            self.done_at[index] = self.now
            line = index % count
            opened = index - line
            for follower in self.followers[line]:
                waiting = opened + follower
                missing[waiting] -= 1
                if missing[waiting]:
                    continue
                queue = queues[follower]
                if queue is not None:
                    heappush(queue, keys[waiting])
                else:
                    self.begun_at[waiting] = self.now
                    done.append(waiting)
