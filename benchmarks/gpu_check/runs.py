"""Whole runs: equal bits with the plain loop, memory within the plan, models larger than what they are given.

Scope: four checks over `megatrain verify` and the trainer's own engine.
Not here: rates and fractions of a limit (`rates.py`, `fraction.py`), the tests marked gpu (`marked.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_check.rig import Rig
from benchmarks.gpu_check.small_runs import (
    QUIET,
    WIDE,
    beside_bytes,
    opened,
    run_of,
    tested_models,
    trained,
)
from megatrain.prepare import Prepared, prepare
from megatrain.verify import verify

MiB = 1 << 20
STEPS = 3
TIGHT = {"tiers.resident": 0, "tiers.host_memory": 8 * MiB, "optimizer.lr": 0.01}
CLIP = 0.5
ROOMY_HOST_BYTES, SMALL_HOST_BYTES = 2048 * MiB, 160 * MiB
UPDATED_THERE = 2
"""Models whose updates are made on the device too."""
Case = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A model, and what its run changes."""
LEAST_LEFT_S = 15.0
"""A comparison is not begun with less time than this."""


def bitwise(rig: Rig) -> dict[str, Any]:
    """Every model of the tests against the plain loop on the same device: without clipping and whole, with clipping in
    four micro-batches; a model with tied weights in one. Updates by the CPU, and of the first models by the device too,
    in FP32 and with BF16 copies.
    """
    models, tied = tested_models()
    clips, some = (None, CLIP), list(models)[:UPDATED_THERE]
    cases = [(name, clip, "host", "fp32") for clip in clips for name in models]
    cases += [(name, clip, "device", "fp32") for clip in clips for name in some]
    cases += [(name, None, "device", "bf16") for name in some]
    asked: dict[str, Case] = {}
    for name, clip, place, precision in cases:
        micro_batch = 1 if clip is not None and name not in tied else 4
        mode = "fused" if clip is None else "clipped"
        told = f"{name}, {mode}, {4 // micro_batch} micro-batches, updates on the {place}"
        changes = {"train.max_grad_norm": clip, "train.micro_batch": micro_batch, "train.update_on": place}
        changes |= {"train.precision": precision}
        asked[told if precision == "fp32" else f"{told}, {precision}"] = models[name], {**TIGHT, **changes}
    return _compared(rig, asked)


def compiled(rig: Rig) -> dict[str, Any]:
    """Compiled layers against a plain loop whose layers are compiled, and computed again in backward: updates by the
    CPU and by the device.
    """
    models, _ = tested_models()
    model = {**models["llama"], "num_hidden_layers": 2}
    asked: dict[str, Case] = {}
    for place in ("host", "device"):
        changes = {"train.compile": True, "train.micro_batch": 2, "train.max_grad_norm": CLIP, "train.update_on": place}
        asked[f"llama, compiled, updates on the {place}"] = model, {**TIGHT, **changes}
    return _compared(rig, asked)


def _compared(rig: Rig, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Each as `megatrain verify` finds it, as far as there is time."""
    same: list[str] = []
    wrong: dict[str, Any] = {}
    left_out: list[str] = []
    for number, (told, (model, changes)) in enumerate(cases.items()):
        if rig.left_s() < LEAST_LEFT_S:
            left_out.append(told)
            continue
        result = verify(run_of(rig, f"case-{number}", model, changes), STEPS, QUIET)
        if result["identical"]:
            same.append(told)
        else:
            wrong[told] = {key: result[key] for key in ("losses", "plain_losses", "max_abs_diff", "differing")}
            wrong[told]["differing"] = wrong[told]["differing"][:8]
    ok = False if wrong else None if left_out else True
    return {
        "ok": ok,
        **({"why": f"other bits than the plain loop: {', '.join(wrong)}"} if wrong else {}),
        **({"skipped": f"no time for {', '.join(left_out)}"} if left_out else {}),
        "steps": STEPS,
        "same": same,
        "differing": wrong,
    }


def memory(rig: Rig) -> dict[str, Any]:
    """torch's peak on the device is the planned arena at least, and at most arena and all that is planned beside it:
    cuBLAS takes its workspace through torch, and the plan counts it to the context.
    """
    roomy = {"tiers.resident": 0, "tiers.host_memory": 512 * MiB}
    prepared = prepare(run_of(rig, "memory", WIDE, {**roomy, "train.max_grad_norm": CLIP, "data.seq_len": 128}))
    counts = _counter(rig.device)
    before_bytes = counts.memory_allocated() if counts is not None else 0
    if counts is not None:
        counts.reset_peak_memory_stats()
    with opened(prepared) as (manager, engine, inputs):
        for step in range(STEPS):
            engine.step(next(inputs), last=step + 1 == STEPS)
        manager.pipeline.drain()
        peak = counts.max_memory_allocated() if counts is not None else None
        reserved = counts.max_memory_reserved() if counts is not None else None
    room = prepared.room
    assert room is not None, "a run on a device"
    arena, beside = prepared.plan.device_bytes, beside_bytes(prepared)
    figures = {
        "arena_bytes": arena,
        "planned_beside_bytes": {line.what: line.nbytes for line in room.beside},
        "held_before_bytes": before_bytes,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "planned_compute_bytes": sum(line.nbytes for line in room.compute),
    }
    if peak is None:
        return {"ok": None, "skipped": f"torch counts no memory of {rig.device.type}", **figures}
    ok = arena <= peak <= arena + beside
    why = f"a peak of {peak} bytes; planned are {arena} of arena and {beside} beside"
    return {"ok": ok, "why": "" if ok else why, **figures}


def _counter(device: torch.device) -> Any:
    """torch's module for a device that counts its memory; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def larger(rig: Rig) -> dict[str, Any]:
    """The same run three times: roomy, on a device that holds a part of the weights, and with a host that cannot hold
    the rest.
    """
    base = {"tiers.resident": "auto", "train.max_grad_norm": CLIP, "train.micro_batch": 2, "optimizer.lr": 0.001}
    roomy = prepare(run_of(rig, "roomy", WIDE, {**base, "tiers.host_memory": ROOMY_HOST_BYTES}))
    state_bytes = 16 * roomy.units.parameters
    largest = max(unit.nbytes for unit in roomy.units.stored)
    small = {**base, "tiers.device_memory": beside_bytes(roomy) + 4 * largest}
    wanted = trained(roomy, STEPS)
    found: dict[str, Any] = {"ok": True, "state_bytes": state_bytes, "steps": STEPS, "losses": wanted.losses}
    for name, host in (("device", ROOMY_HOST_BYTES), ("device_and_host", SMALL_HOST_BYTES)):
        changes = {**small, "tiers.host_memory": host}
        if name == "device_and_host":
            changes["tiers.resident"] = 0
        prepared = prepare(run_of(rig, name, WIDE, changes))
        unlike = wanted.unlike(trained(prepared, STEPS))
        given = _given(prepared)
        found[name] = given | {"differing": unlike[:8], "nvme_bytes": _nvme_bytes(prepared)}
        most = given["device_arena_bytes"] + (given["host_bytes"] if name == "device_and_host" else 0)
        if unlike or most >= state_bytes:
            found |= {"ok": False, "why": f"{name}: {unlike[:4] or f'{most} bytes hold the state of {state_bytes}'}"}
    return found


def _given(prepared: Prepared) -> dict[str, int]:
    assert prepared.room is not None, "a run on a device"
    return {
        "device_memory_bytes": prepared.room.given_bytes,
        "device_arena_bytes": prepared.plan.device_bytes,
        "host_bytes": prepared.plan.host_bytes,
    }


def _nvme_bytes(prepared: Prepared) -> int:
    """Home of the state on the drive."""
    kinds = {block.kind for block in prepared.plan.workload.of_life("durable")}
    return sum(prepared.plan.bytes_at(kind)[1] for kind in kinds)
