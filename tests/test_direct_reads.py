"""Reads from a drive straight into memory of a device: planned, proven, carried out, checked, refused.

Scope: schedules with N2D over toy models and a small Llama, carried out through the stand-in; where they are planned.
Not here: kvikio, which moves memory of a real device (`test_gds.py`); copies and streams (`test_device_lanes.py`).
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, parameters, run_in, same_bits
from committed_runs import trained as trained_run
from conftest import RunFile, slow
from models import MODELS
from small_runs import small_llama, state, train
from streams import DirectEngine, OutOfOrderLanes
from test_device_lanes import DEVICE, matters, without
from test_device_runs import THERE, TIGHT, pretend  # noqa: F401
from toy import toy_units, toy_workload
from toy_runs import ROOMY, ToyRun, device_plan, interpreted, trained, with_device
from typer.testing import CliRunner

import megatrain.prepare
import tiering.manager
from megatrain.cli import app
from megatrain.config import load_run
from megatrain.prepare import prepare
from megatrain.programs import WEIGHT_BF16
from megatrain.tierplan.command import app as tierplan
from megatrain.verify import verify
from tiering import gds
from tiering.check import check
from tiering.engine import View
from tiering.errors import DamagedStateError, IOFailedError, ScheduleError
from tiering.hardware import Drive, Rate, all_direct
from tiering.measure import shared
from tiering.measure_disk import direct_read_rate
from tiering.passes import on_device
from tiering.plan import Plan, make_plan
from tiering.posix import PosixEngine
from tiering.schedule import Verb
from tiering.workload import PAGE, Workload

PLACES = {"host": False, "device": True}
LAYERS = 6
"""Of so many the bytes of one are not near to their next use."""
DEEP = {"model.config": {**MODELS["llama"], "num_hidden_layers": LAYERS}}


@lru_cache
def workload(mode: str) -> Workload:
    return toy_workload(toy_units(LAYERS, 3 * PAGE, 5 * PAGE, activation=2 * PAGE), mode)


@lru_cache
def plan(mode: str, device: str, *, there: bool = False) -> Plan:
    """Nothing is at home in HOST. there: updates on the device."""
    return device_plan(workload(mode), ROOMY, DEVICE[device], update_there=there, direct=True)


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["fused", *(slow(mode) for mode in ("deferred", "mixed"))])
def test_what_is_read_straight_into_the_device_changes_no_byte(
    tmp_path: Path, mode: str, place: str, device: str
) -> None:
    """I2, I3, I8, P1: copies late and out of order, or one action after the other."""
    made, wanted = plan(mode, device, there=PLACES[place]), interpreted(workload(mode))
    for seed, serial in enumerate((False, False, True)):
        found = trained(made, tmp_path / str(seed), OutOfOrderLanes(seed), serial=serial)
        unlike = wanted.unlike(found)
        assert not unlike, f"seed {seed}: {unlike[:4]}\n{made.schedules['step'].text()}"


@pytest.mark.parametrize("place", PLACES)
def test_spilled_activations_come_back_straight(tmp_path: Path, place: str) -> None:
    """I2, P1: what forward left on NVMe, and what has no checksum, where RAM holds neither weights nor activations."""
    units = toy_units(LAYERS, 3 * PAGE, 5 * PAGE, activation=12 * PAGE)
    spilling = toy_workload(units, "fused")
    made = device_plan(spilling, 60 * PAGE, None, update_there=PLACES[place], direct=True)
    found = {a.operands[0].block for a in made.schedules["step"].actions if a.verb is Verb.N2D}
    assert {spilling.blocks[name].life for name in found} == {"durable", "passing"}, found
    unlike = interpreted(spilling).unlike(trained(made, tmp_path / "s", OutOfOrderLanes(1)))
    assert not unlike, unlike[:4]


@pytest.mark.parametrize("place", PLACES)
def test_copies_of_half_the_bytes_are_read_straight_too(tmp_path: Path, place: str) -> None:
    """I2, P1: weights that ops compute with in BF16, and the FP32 ones where the device updates."""
    halves = toy_workload(toy_units(LAYERS, 3 * PAGE, 5 * PAGE, activation=2 * PAGE), "fused", bf16=True)
    made = device_plan(halves, 30 * PAGE, None, update_there=PLACES[place], direct=True)
    kinds = {a.operands[0].block.rpartition("/")[2] for a in made.schedules["step"].actions if a.verb is Verb.N2D}
    assert WEIGHT_BF16 in kinds and ("weight" in kinds) == PLACES[place], kinds
    unlike = interpreted(halves).unlike(trained(made, tmp_path / "s", OutOfOrderLanes(1)))
    assert not unlike, unlike[:4]


def test_updates_of_the_device_read_both_moments_straight_into_it(tmp_path: Path) -> None:
    """P5: bytes of a step that never come to HOST, as planned and as an engine counts them."""
    made = plan("fused", "roomy", there=True)
    step = made.schedules["step"]
    direct = {x.block for a in step.actions if a.verb is Verb.N2D for x in a.operands if x.tier == "NVME"}
    moments = [name for name in direct if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert len(moments) >= 4, direct
    with ToyRun(made, tmp_path / "s", OutOfOrderLanes()) as run:
        run.begin(0)
        run.enter(0, run.ops(0))
        run.manager.pipeline.drain()
        first = run.engine.read_bytes
        run.manager.trace.take()
        run.begin(1)
        run.enter(1, run.ops(1))
        run.manager.pipeline.drain()
        _, figures = run.manager.trace.take()
    assert run.engine.read_bytes - first == made.timeline.direct_bytes > 0
    assert (figures.read_bytes, figures.direct_bytes) == (made.timeline.read_bytes, made.timeline.direct_bytes)


def test_bytes_that_go_straight_to_the_device_take_no_room_in_host() -> None:
    """P2: the arena of HOST is smaller by what would have been staged."""
    straight = plan("fused", "roomy", there=True)
    staged = make_plan(
        workload("fused"),
        with_device(),
        ROOMY,
        0.0,
        device_budget=ROOMY,
        update_there=True,
        candidates=[replace(straight.knobs, direct=False)],
    )
    assert straight.timeline.read_bytes == staged.timeline.read_bytes
    saved = staged.timeline.h2d_bytes - straight.timeline.h2d_bytes
    assert saved == straight.timeline.direct_bytes > 0
    assert straight.host_bytes < staged.host_bytes


@pytest.mark.parametrize("place", PLACES)
def test_a_read_that_does_not_wait_for_the_device_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """I1, I3: without what orders a direct read after the last use of its place, the proof fails; carried out all the
    same, some order of the device meets bytes that are in use, or wrong ones.
    """
    made = plan("fused", "tight", there=PLACES[place])
    step = made.schedules["step"]
    found = [
        (line, edge)
        for line, action in enumerate(step.actions)
        for edge in action.after
        if action.verb is Verb.N2D and on_device(step.actions[edge[0]]) and matters(without(step, line, edge))
    ]
    assert found, "no direct read comes after anything of the device"
    wanted, unseen = interpreted(workload("fused")), []
    for number, (line, edge) in enumerate(found[:: max(1, len(found) // 6)]):
        broken = without(step, line, edge)
        with pytest.raises(ScheduleError, match="I2/I3: nothing orders"):
            check(made.workload, made.placement, broken)
        with monkeypatch.context() as patch:
            patch.setattr(tiering.manager, "check", lambda *args: None)
            plans = replace(made, schedules={**made.schedules, "step": broken})
            seen = False
            for seed in range(8):
                try:
                    seen = bool(wanted.unlike(trained(plans, tmp_path / f"{number}-{seed}", OutOfOrderLanes(seed))))
                except (IOFailedError, AssertionError):
                    seen = True
                if seen:
                    break
        if not seen:
            unseen.append(f"{step.actions[line]} without {step.actions[edge[0]]}")
    assert len(unseen) <= 1, "\n".join(unseen)


def test_a_direct_read_of_old_bytes_is_refused_before_anything_moves() -> None:
    """I2: one that stands before the WRITE of its bytes does not pass the proof."""
    units = toy_units(LAYERS, 3 * PAGE, 5 * PAGE, activation=12 * PAGE)
    spilling = toy_workload(units, "fused")
    made = device_plan(spilling, 60 * PAGE, None, update_there=True, direct=True)
    step = made.schedules["step"]
    reads = {a.operands[0].block: line for line, a in enumerate(step.actions) if a.verb is Verb.N2D}
    block = next(name for name in reads if spilling.blocks[name].life == "passing")
    late = next(n for n, a in enumerate(step.actions) if a.verb is Verb.WRITE and a.operands[0].block == block)
    drop = next(n for n, a in enumerate(step.actions) if a.verb is Verb.DROP and a.operands[0].block == block)
    order = [line for line in range(len(step.actions)) if line not in (late, drop)]
    order[order.index(reads[block]) + 1 : order.index(reads[block]) + 1] = [late, drop]
    broken = replace(step, actions=tuple(replace(step.actions[line], after=()) for line in order))
    with pytest.raises(ScheduleError, match=rf"I2: {re.escape(block)}.* on NVME is not its newest version"):
        check(made.workload, made.placement, broken, whole=False)


@pytest.mark.parametrize("verb", [Verb.N2D, Verb.H2D, Verb.RUN])
def test_a_verb_that_does_not_fit_where_its_bytes_are_is_refused(verb: Verb) -> None:
    """I2: an N2D of bytes in HOST would read others, and a copy or an op of bytes on NVME would be lent anything."""
    made = plan("fused", "roomy", there=True)
    step = made.schedules["step"]
    line = next(n for n, a in enumerate(step.actions) if a.verb is Verb.N2D)
    x, target = step.actions[line].operands
    wrong = (replace(x, tier="HOST"), target) if verb is Verb.N2D else (x, target)
    actions = list(step.actions)
    actions[line] = replace(actions[line], verb=verb, operands=wrong)
    with pytest.raises(ScheduleError, match=f"{verb} does not lead from"):
        check(made.workload, made.placement, replace(step, actions=tuple(actions)))


def test_damage_is_found_where_bytes_go_straight_to_the_device(tmp_path: Path) -> None:
    """P3: the first read of a resumed run compares checksums, wherever it goes."""
    made = plan("fused", "roomy", there=True)
    step = made.schedules["step"]
    victim = next(
        a.operands[0].block for a in step.actions if a.verb is Verb.N2D and a.operands[0].block.endswith("exp_avg_sq")
    )
    with ToyRun(made, tmp_path / "s", OutOfOrderLanes()) as run:
        extent, *_ = run.manager.store.read_extents(victim, 0, PAGE)[0]
        content = bytearray(extent.path.read_bytes())
        content[extent.offset] ^= 1
        extent.path.write_bytes(content)
        checksums = run.manager.store._checksums
        assert checksums is not None
        checksums._to_compare[:] = True  # as of a store that was opened just now
        with pytest.raises(DamagedStateError, match=victim):
            run.train()


def test_the_planner_reads_straight_where_that_is_faster() -> None:
    """P5: not without a rate, and not where that is slow; it is where the link is the limit."""
    w = workload("fused")
    tight = replace(with_device(), h2d=Rate(per_s=1e8, source="assumed", how="a link that is the limit"))

    def planned(direct: Rate | None) -> Plan:
        hardware = replace(tight, direct_read=direct)
        return make_plan(w, hardware, ROOMY, 0.0, device_budget=ROOMY, update_there=True)

    none, slow, fast = (planned(direct) for direct in (None, replace(tight.read, per_s=1e6), tight.read))
    assert not none.knobs.direct and not slow.knobs.direct
    assert fast.knobs.direct and fast.timeline.pass_s < none.timeline.pass_s
    assert slow.timeline.pass_s == none.timeline.pass_s


def test_a_model_whose_weights_skip_ram_gives_the_bits_of_the_cpu(
    run_file: RunFile, known_machine: None, tmp_path: Path
) -> None:
    """I8, P1: losses and state of a small Llama, updated by the CPU or by the stand-in."""
    prepared = small_llama(run_file, None, **DEEP)
    wanted = train(prepared, tmp_path / "plain"), state(prepared, tmp_path / "plain")
    for name, there in PLACES.items():
        made = device_plan(prepared.plan.workload, ROOMY, ROOMY, update_there=there, direct=True)
        elsewhere = replace(prepared, plan=made)
        root = tmp_path / name
        assert train(elsewhere, root, lanes=OutOfOrderLanes(1)) == wanted[0]
        assert state(elsewhere, root) == wanted[1]


def rate(per_s: float) -> Rate:
    return Rate(per_s=per_s, source="measured", how="measured: for tests", date="2026-01-01")


def test_drives_together_read_no_faster_into_a_device_than_its_link_and_all_of_them_must() -> None:
    """P5: what several drives do is a sum, one that cannot makes it none, and no link no device."""
    assert all_direct([rate(1e9), rate(2e9)], rate(25e9)) == replace(
        rate(3e9), source="derived", how="sum of 2 drives: measured: for tests"
    )
    assert all_direct([rate(20e9), rate(20e9)], rate(25e9)) == rate(25e9)
    assert all_direct([rate(1e9), None], rate(25e9)) is None
    assert all_direct([rate(1e9)], None) is None
    half = shared(Drive(name="d", read=rate(2e9), write=rate(2e9), direct_read=rate(2e9)), 2)
    assert half.direct_read is not None and half.direct_read.per_s == 1e9


def test_a_rate_into_a_device_is_that_of_reads_into_it(tmp_path: Path) -> None:
    """P5: every byte of the file once, into memory of the device, which the engine was told of."""
    seen: list[torch.Tensor] = []

    class Seeing(PosixEngine):
        def register(self, view: View) -> str:
            assert isinstance(view, torch.Tensor)
            seen.append(view)
            return ""

    with Seeing() as engine:
        found = direct_read_rate(tmp_path, engine, torch.device("cpu"), memory=16 << 20, depth=4)
    assert found.per_s > 0 and found.source == "measured" and found.how.startswith("into memory of cpu, read: 192 MiB")
    assert [view.numel() for view in seen] == [4 * (2 << 20)]


Pretend = Callable[..., list[OutOfOrderLanes]]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> list[DirectEngine]:  # noqa: F811
    """A pretend device that pretend drives can read into; returns the engines that were used."""
    opened, engines = pretend(), []
    monkeypatch.setattr(gds, "probe", lambda path: None)
    monkeypatch.setattr(gds, "probe_device", lambda path, device: gds.DeviceProbe(path="gds"))
    monkeypatch.setattr(gds, "KvikioEngine", lambda *args, **kwargs: PosixEngine())
    monkeypatch.setattr(megatrain.prepare, "direct_read_rate", lambda *args, **kwargs: rate(1e12))
    monkeypatch.setattr(megatrain.prepare, "all_direct", lambda rates, link: rates[0])

    def chosen(*args: Any, **kwargs: Any) -> tuple[DirectEngine, str]:
        engines.append(DirectEngine(opened[-1]))
        return engines[-1], "a pretend engine"

    monkeypatch.setattr(tiering.manager, "choose_engine", chosen)
    return engines


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("settings", "clip"), [(TIGHT, None), (THERE, None), (THERE, 0.5)], ids=["host", "device", "device-clipped"]
)
def test_a_run_that_reads_straight_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, direct: list[DirectEngine], settings: dict[str, Any], clip: float | None
) -> None:
    """P1, I8: from a run file, with two micro-batches; `direct_reads: off` is obeyed."""
    changes = {"train.max_grad_norm": clip, "train.micro_batch": 2, **DEEP}
    for direct_reads in ("auto", "off"):
        run = load_run(run_file({**settings, **changes, "tiers.direct_reads": direct_reads}))
        result = verify(run, 3, QUIET)
        assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}
        assert (direct[-1].read_bytes > 0) == (direct_reads == "auto")


@pytest.mark.usefixtures("known_machine")
def test_a_resumed_run_reads_straight_what_the_first_one_wrote(
    run_file: RunFile, tmp_path: Path, direct: list[DirectEngine]
) -> None:
    """P1, P3: its first reads are compared with the checksums of the commit."""
    folders = {}
    for name, parts in (("once", [4]), ("twice", [2, 4])):
        for steps in parts:
            changes = {
                **THERE,
                **DEEP,
                "tiers.nvme": str(tmp_path / name / "state"),
                "output.dir": str(tmp_path / name / "run"),
                "train.steps": steps,
            }
            folders[name] = trained_run(run_file, changes, resume=steps != parts[0])
            assert direct[-1].read_bytes > 0
    once, twice = (parameters(run_in(folder).tiers.nvme[0]) for folder in folders.values())
    assert once.keys() == twice.keys() and all(same_bits(once[name], twice[name]) for name in once)


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("settings", [TIGHT, THERE], ids=PLACES)
@pytest.mark.gpu
def test_a_run_that_reads_straight_into_a_gpu_equals_the_plain_loop(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """P1, I8: through kvikio, where that does not go through RAM."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    reason = gds.probe(tmp_path)
    if reason is None:
        probe = gds.probe_device(tmp_path, torch.device("cuda", 0))
        reason = probe.line() if probe.refusal or probe.path == gds.COMPAT else None
    if reason is not None:
        pytest.skip(f"nothing can be read straight here: {reason}")
    monkeypatch.setattr(megatrain.prepare, "direct_read_rate", lambda *args, **kwargs: rate(1e12))
    run = load_run(run_file({**settings, **DEEP, "device": "cuda", "tiers.engine": "kvikio"}))
    assert prepare(run).plan.knobs.direct
    result = verify(run, 3, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


@pytest.mark.usefixtures("known_machine", "direct")
@pytest.mark.parametrize("why", ["off", "posix", "no kvikio", "refused", "through RAM", "fails"])
def test_nothing_is_read_straight_where_that_was_not_asked_for_or_does_not_work(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """P6, EN-02: a run goes on without it; and none depends on how fast it is."""
    changes: dict[str, Any] = {**THERE, **DEEP}
    assert prepare(load_run(run_file(changes))).plan.knobs.direct
    probes = {"refused": gds.DeviceProbe(refusal="no cuFile here"), "through RAM": gds.DeviceProbe(path=gds.COMPAT)}
    if why == "off":
        changes["tiers.direct_reads"] = "off"
    elif why == "posix":
        changes["tiers.engine"] = "posix"
    elif why == "no kvikio":
        monkeypatch.setattr(gds, "probe", lambda path: why)
    elif why == "fails":

        def fails(*args: object, **kwargs: object) -> Rate:
            raise IOFailedError("the second drive cannot")

        monkeypatch.setattr(megatrain.prepare, "direct_read_rate", fails)
    else:
        monkeypatch.setattr(gds, "probe_device", lambda path, device: probes[why])
    prepared = prepare(load_run(run_file(changes)))
    assert prepared.hardware.direct_read is None and not prepared.plan.knobs.direct


@pytest.mark.usefixtures("known_machine")
def test_an_engine_that_cannot_is_refused_before_it_is_given_device_memory(
    run_file: RunFile, tmp_path: Path, direct: list[DirectEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EN-02, P6: should the drive have changed its mind since it was tried; one error, with the key."""
    monkeypatch.setattr(DirectEngine, "device_refusal", "no cuFile here")
    result = CliRunner().invoke(app, ["train", str(run_file({**THERE, **DEEP}))])
    assert result.exit_code == 2 and "no cuFile here" in result.output, result.output
    assert "Fix: tiers.direct_reads: off, and --resume" in result.output and direct[-1].read_bytes == 0
    fixed = ["train", str(run_file({**THERE, **DEEP, "tiers.direct_reads": "off"})), "--resume"]
    result = CliRunner().invoke(app, fixed)
    assert result.exit_code == 0 and direct[-1].read_bytes == 0, result.output


def test_tierplan_says_what_goes_straight_to_the_gpu() -> None:
    """P5: asked for with --gds; refused where there is no GPU."""
    asked = ["--model", "gpt2", "--host-memory", "2300MiB", "--gpu", "rtx4090", "--nvme", "7.0,6.0", "--json"]
    asked += ["--tokens", "1024", "--update-on", "device"]
    found = {}
    for flag in ("", "--gds"):
        result = CliRunner().invoke(tierplan, [*asked, *([flag] if flag else [])])
        assert result.exit_code == 0, result.output
        found[flag] = json.loads(result.stdout)
    assert found[""]["direct_read_bytes"] == 0 < found["--gds"]["direct_read_bytes"]
    assert found["--gds"]["step_s"] <= found[""]["step_s"] * 1.001
    refused = CliRunner().invoke(tierplan, ["--model", "gpt2", "--nvme", "7.0,6.0", "--gds"])
    assert refused.exit_code == 2 and "--gds: the CPU computes here" in refused.output, refused.output
