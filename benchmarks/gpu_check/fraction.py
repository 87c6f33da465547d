"""How near is a step on the GPU to what its busiest part takes alone?

Scope: a run that the drive bounds, one that the link bounds, one that computing bounds; plain PyTorch beside them.
Not here: the same on the CPU (`benchmarks/step.py`), whether the lanes overlap at all (`overlap.py`).

`limit_s` is the longest of five, each alone: *compute* (units timed one by one on the device), *h2d* and *d2h* (the
step's own copies, with nothing to wait for), *io* (its own requests to the drive), *update* (AdamW at its measured
rate; where the device does it, *compute* has it too). `fraction = limit_s / step_s`. `plain_step_s` is a loop that
keeps everything on the GPU, AdamW too; it computes nothing twice and is no bound.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from benchmarks.gpu_check.small_runs import opened, run_of
from benchmarks.presets import STATE_BYTES, UPDATED_BYTES, llama, parameters, staging_bytes
from benchmarks.yardsticks import RawIO
from megatrain.inputs import Inputs
from megatrain.prepare import Prepared, prepare
from megatrain.verify import plain_model
from tiering.hardware import Hardware
from tiering.lanes import Event
from tiering.limits import memory_limit
from tiering.manager import Manager
from tiering.schedule import Action, Verb

PROMISE = 0.95
"""P4: a step takes at most 1/0.95 of its limit."""
MAIN = "step"
MOST_STEPS, LEAST_STEPS = 9, 2
STEPS_SHARE = 0.5
"""Of the time that is left, what steps may take."""
SEQ_LEN, MOST_ROWS, MICRO_ROWS = 512, 32, 4
ABOVE = 3
"""Computing takes so many times as long as anything else where it is to be the limit."""
STEP_FLOPS = 8
"""A parameter and token: forward, recompute, backward."""
COPIED_BYTES = 8
"""A parameter and step to the device: its weight, twice."""


def io_bound(rig: Rig) -> dict[str, Any]:
    """Everything on the drive, few tokens."""
    return _measured(rig, _model(rig, 1024, 6), 16, 1, resident=0.0)


def pcie_bound(rig: Rig) -> dict[str, Any]:
    """Everything in RAM, few tokens, frozen layers: all weights cross the link, and the CPU has little to update."""
    return _measured(rig, _model(rig, 2048, 4), 16, 1, resident=1.0, freeze=("model.layers.*",))


def compute_bound(rig: Rig) -> dict[str, Any]:
    """Everything in RAM, and so many tokens that computing takes the longest by far."""
    model = _model(rig, 1024, 6)
    hardware = prepare(run_of(rig, "rates", model, _changes(model, 16, 1, 1.0))).hardware
    return _measured(rig, model, _seq_len(rig), _rows(hardware, _seq_len(rig)), resident=1.0)


def _model(rig: Rig, hidden: int, layers: int) -> dict[str, Any]:
    """Smaller on a small machine: the state takes a quarter of its RAM at most."""
    width = max(64, int(hidden * min(1.0, rig.scale)) // 64 * 64)
    model = llama(hidden=width, layers=layers, intermediate=27 * width // 8)
    while layers > 1 and 16 * parameters(model) > memory_limit()[0] // 4:
        layers -= 1
        model["num_hidden_layers"] = layers
    return model


def _seq_len(rig: Rig) -> int:
    return max(16, int(SEQ_LEN * min(1.0, rig.scale)))


def _rows(hardware: Hardware, seq_len: int) -> int:
    """Rows of a step from which on computing takes `ABOVE` times as long as copies to the device, and as updates."""
    link = COPIED_BYTES / hardware.h2d.per_s if hardware.h2d is not None else 0.0
    tokens = ABOVE * hardware.compute.per_s / STEP_FLOPS * max(link, UPDATED_BYTES / hardware.update.per_s)
    return max(MICRO_ROWS, min(MOST_ROWS, round(tokens / seq_len / MICRO_ROWS) * MICRO_ROWS))


def _changes(
    model: dict[str, Any], seq_len: int, rows: int, resident: float, freeze: tuple[str, ...] = ()
) -> dict[str, Any]:
    state = int(resident * STATE_BYTES * parameters(model))
    return {
        "model.freeze": list(freeze),
        "data.seq_len": seq_len,
        "train.batch": rows,
        "train.micro_batch": min(rows, MICRO_ROWS),
        "tiers.resident": resident,
        "tiers.host_memory": state + state // 8 + staging_bytes(model),
    }


def _measured(
    rig: Rig, model: dict[str, Any], seq_len: int, rows: int, *, resident: float, freeze: tuple[str, ...] = ()
) -> dict[str, Any]:
    prepared = prepare(run_of(rig, "run", model, _changes(model, seq_len, rows, resident, freeze)))
    with opened(prepared) as (manager, engine, inputs):
        for _ in range(2):
            engine.step(next(inputs), last=False)
        manager.trace.take()
        until_s, steps_s = rig.until_s - (1 - STEPS_SHARE) * rig.left_s(), list[float]()
        while len(steps_s) < LEAST_STEPS or (len(steps_s) < MOST_STEPS and time.monotonic() < until_s):
            begin_s = time.perf_counter()
            engine.step(next(inputs), last=False)
            steps_s.append(time.perf_counter() - begin_s)
        _, figures = manager.trace.take()
        manager.pipeline.drain()
        alone = {"compute": prepared.plan.timeline.compute_s, "update": prepared.plan.timeline.update_s}
        alone |= {"io": _io_s(rig, prepared, manager)} | _copies_s(prepared, manager)
    step_s, timeline, count = median(steps_s), prepared.plan.timeline, len(steps_s)
    bound = max(alone, key=lambda name: alone[name])
    fraction = alone[bound] / step_s
    told = f"{fraction:.3f} of the limit ({bound}), promised are {PROMISE}"
    return {
        "ok": fraction >= PROMISE,
        "why": "" if fraction >= PROMISE else told,
        "parameters": prepared.units.parameters,
        "tokens": seq_len * rows,
        "step_s": step_s,
        "steps_s": steps_s,
        "limit_s": alone[bound],
        "bound_by": bound,
        "fraction": fraction,
        "alone_s": alone,
        "compute_how": "units timed alone" if prepared.times else "flops at the measured rate",
        "in_run_s": {
            name: getattr(figures, f"{name}_s") / count for name in ("compute", "h2d", "d2h", "io", "update", "stall")
        },
        "stalls_s": dict(sorted(((k, v / count) for k, v in figures.stalls.items()), key=lambda kv: -kv[1])[:5]),
        "predicted_step_s": timeline.pass_s,
        "predicted_limit_s": timeline.limit_s,
        "predicted_bound": timeline.bottleneck,
        "update_on": "device" if prepared.updates_there else "host",
        "h2d_bytes": timeline.h2d_bytes,
        "d2h_bytes": timeline.d2h_bytes,
        "io_bytes": timeline.read_bytes + timeline.written_bytes,
        **_plain(rig, prepared, inputs),
    }


def _io_s(rig: Rig, prepared: Prepared, manager: Manager) -> float:
    """Seconds of the requests of a step alone, the better of two."""
    plan, folder = prepared.plan, rig.folder / "io"
    if not plan.timeline.read_bytes + plan.timeline.written_bytes:
        return 0.0
    folder.mkdir()
    root = prepared.run.tiers.nvme[0]
    with closing(RawIO(plan.schedules[MAIN], manager, plan.queue_depth, {root: folder})) as alone:
        return min(alone.io_s() for _ in range(2))


def _copies_s(prepared: Prepared, manager: Manager) -> dict[str, float]:
    """Seconds of the copies of a step alone, one direction at a time. What is in the arenas afterwards is no state."""
    found = {}
    for lane, verb in (("h2d", Verb.H2D), ("d2h", Verb.D2H)):
        copies = [action for action in prepared.plan.schedules[MAIN].actions if action.verb is verb]
        takes = []
        for _ in range(2):
            begin_s = time.perf_counter()
            events = [_issued(manager, action) for action in copies]
            for event in events:
                event.synchronize()
            takes.append(time.perf_counter() - begin_s)
        found[lane] = min(takes)
    return found


def _issued(manager: Manager, action: Action) -> Event:
    """A copy that comes after nothing."""
    source, target = (
        (manager.lanes if x.tier == "DEVICE" else manager.arena).tensor(x.address, x.address + x.nbytes)
        for x in action.operands
    )
    return manager.lanes.copy(action.lane, source, target, [])


def _plain(rig: Rig, prepared: Prepared, inputs: Iterator[Inputs]) -> dict[str, Any]:
    """Seconds of a step of plain PyTorch with everything on the device, where it fits."""
    activations = sum(prepared.costs[unit.name].workspace_bytes for unit in prepared.units)
    needed = 16 * prepared.units.parameters + activations
    if needed > rig.room_bytes:
        return {"plain_step_s": None, "plain_left_out": f"it needs {needed} bytes, {rig.room_bytes} are there"}
    gc.collect()
    try:
        model = plain_model(prepared.units, prepared.run).to(rig.device).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in prepared.run.model.freeze))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trained, lr=prepared.run.optimizer.lr, fused=True)
        takes = []
        for _ in range(4):
            begin_s = time.perf_counter()
            _plain_step(model, adamw, next(inputs), prepared.run.train.micro_batch, rig.device)
            rig.wait()
            takes.append(time.perf_counter() - begin_s)
    except torch.OutOfMemoryError as error:
        return {"plain_step_s": None, "plain_left_out": " ".join(str(error).split())[:200]}
    return {"plain_step_s": min(takes[1:])}


def _plain_step(
    model: Any, adamw: torch.optim.Optimizer, inputs: Inputs, micro_batch: int, device: torch.device
) -> None:
    supervised = int((inputs["labels"][:, 1:] != -100).sum())
    for begin in range(0, len(inputs["labels"]), micro_batch):
        part = {name: tensor[begin : begin + micro_batch].to(device) for name, tensor in inputs.items()}
        model(**part, use_cache=False, num_items_in_batch=supervised).loss.backward()
    adamw.step()
    adamw.zero_grad()
