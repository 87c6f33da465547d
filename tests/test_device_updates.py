"""AdamW on a device with memory of its own: where it is faster it is chosen, and it changes no byte.

Scope: schedules with device updates on a stand-in that is late and out of order, the bytes that they move, the choice
between host and device, what is refused, a gradient that is not finite, the place that a state keeps to.
Not here: the same schedules as values (`test_lower.py`), whole runs beside others of a device (`test_device_runs.py`).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET
from conftest import RunFile, slow
from models import MODELS, TIED
from streams import OutOfOrderLanes
from test_device_lanes import edges, matters, unseen_without, without
from test_device_runs import THERE, TIGHT, pretend
from toy import toy_units, toy_workload
from toy_runs import ROOMY, ToyRun, device_plan, interpreted, trained
from typer.testing import CliRunner

import tiering.manager
from megatrain.cli import app
from megatrain.config import load_run
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.optim import NonFiniteError
from megatrain.prepare import prepare
from megatrain.programs import WEIGHT_BF16, UnitSize, training_workload
from megatrain.report import PlanReport, device_line
from megatrain.trainer import open_run_batches, open_state, train
from megatrain.training_plan import Limits, UpdateOn, plan_training
from megatrain.update_place import place_of_updates
from megatrain.verify import verify
from tiering.check import check
from tiering.costs import BF16, FP32, d2h_bytes, h2d_bytes
from tiering.device import updates_there
from tiering.errors import BudgetError
from tiering.hardware import Hardware, Rate, assumed_hardware
from tiering.manifest import read_manifest
from tiering.plan import Plan
from tiering.schedule import Schedule, Verb
from tiering.workload import PAGE, Workload

MiB = 1 << 20
TIGHT_HOST, SOME_HOST = 90 * PAGE, 200 * PAGE
DEVICE = {"tight": None, "roomy": ROOMY}
__all__ = ["pretend"]

pytestmark = pytest.mark.usefixtures("known_machine")
Pretend = Callable[..., list[OutOfOrderLanes]]


@lru_cache
def workload(mode: str, *, tied: bool = False, bf16: bool = False) -> Workload:
    return toy_workload(toy_units(3, 3 * PAGE, 5 * PAGE, tied=tied, activation=2 * PAGE), mode, bf16=bf16)


@lru_cache
def plan(mode: str, device: str, host_bytes: int = SOME_HOST, *, tied: bool = False, bf16: bool = False) -> Plan:
    return device_plan(workload(mode, tied=tied, bf16=bf16), host_bytes, DEVICE[device], update_there=True)


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize(
    ("mode", "tied"),
    [
        slow("fused", False),
        slow("deferred", False),
        ("mixed", True),
    ],
)
def test_updates_that_are_late_and_out_of_order_change_no_byte(
    tmp_path: Path, mode: str, device: str, tied: bool
) -> None:
    """I2, I3, P1: every op reads what its program says, whatever the device does between the events."""
    wanted = interpreted(workload(mode, tied=tied))
    for seed, host_bytes in enumerate((TIGHT_HOST, SOME_HOST, ROOMY)):
        made, lanes = plan(mode, device, host_bytes, tied=tied), OutOfOrderLanes(seed)
        found = trained(made, tmp_path / str(seed), lanes)
        unlike = wanted.unlike(found)
        assert not unlike, f"seed {seed}: {unlike[:4]}\n{made.schedules['step'].text()}"
        assert lanes.updates == 3 * 6 - tied * 3, "three steps, each unit that owns weights once"
    found = trained(plan(mode, device, tied=tied), tmp_path / "serial", OutOfOrderLanes(), serial=True)
    assert not wanted.unlike(found), wanted.unlike(found)[:4]


@pytest.mark.parametrize(
    ("mode", "tied", "device"),
    [
        ("fused", False, "tight"),
        ("mixed", True, "roomy"),
        slow("deferred", False, "tight"),
        slow("deferred", False, "roomy"),
    ],
)
def test_updates_that_make_a_copy_to_compute_with_change_no_byte(
    tmp_path: Path, mode: str, device: str, tied: bool
) -> None:
    """I2, I3, P1: the FP32 weight comes for its update alone, and the BF16 copy is made there, before the first step
    too.
    """
    wanted = interpreted(workload(mode, tied=tied, bf16=True))
    for seed, host_bytes in enumerate((TIGHT_HOST, ROOMY)):
        made, lanes = plan(mode, device, host_bytes, tied=tied, bf16=True), OutOfOrderLanes(seed)
        found = trained(made, tmp_path / str(seed), lanes)
        unlike = wanted.unlike(found)
        assert not unlike, f"seed {seed}: {unlike[:4]}\n{made.schedules['step'].text()}"
        assert lanes.updates == (3 + 1) * (6 - tied), f"{lanes.updates}: three steps and the casts, each unit once"


def _of_updates(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """(line, edge) of all edges to and from an update that matter."""
    actions = schedule.actions
    return [
        (line, edge)
        for line, edge in edges(schedule)
        if actions[line].updates_there or actions[edge[0]].updates_there
        if matters(without(schedule, line, edge))
    ]


def _unseen(root: Path, mode: str, device: str, most: int, *, bf16: bool) -> tuple[int, list[str]]:
    """Of edges of updates."""
    made = plan(mode, device, ROOMY, bf16=bf16)
    mattering = _of_updates(made.schedules["step"])
    return unseen_without(root, made, interpreted(workload(mode, bf16=bf16)), mattering, most)


@pytest.mark.parametrize(
    ("mode", "device", "bf16"),
    [
        ("fused", "tight", False),
        ("fused", "tight", True),
        slow("deferred", "roomy", False),
    ],
)
def test_the_stand_in_sees_a_missing_edge_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, device: str, bf16: bool
) -> None:
    """I2, I3: without any one edge to or from an update, some order of the device gives wrong bytes.

    By lot: one of them may stay unseen.
    """
    monkeypatch.setattr(tiering.manager, "check", lambda *args: None)
    count, unseen = _unseen(tmp_path, mode, device, 8, bf16=bf16)
    assert count == 8 and len(unseen) <= 1, "\n".join(unseen)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_the_stand_in_sees_any_missing_edge_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, device: str, bf16: bool
) -> None:
    """I2, I3: as above, with each edge in turn."""
    monkeypatch.setattr(tiering.manager, "check", lambda *args: None)
    count, unseen = _unseen(tmp_path, mode, device, 1000, bf16=bf16)
    assert count > 15 and len(unseen) <= 1, "\n".join(unseen)


def _copied(plan_: Plan, verb: Verb, kind: str) -> int:
    """Bytes of a kind that a step copies."""
    actions = plan_.schedules["step"].actions
    blocks = plan_.workload.blocks
    return sum(a.operands[0].nbytes for a in actions if a.verb is verb and blocks[a.operands[0].block].kind == kind)


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_an_update_on_the_device_moves_both_moments_and_no_gradient_that_need_not_wait(mode: str) -> None:
    """P5: by hand; and the schedules are proven, with nothing of a moment staged whole in HOST."""
    made = plan(mode, "tight")
    weights = sum(
        block.nbytes for block in made.workload.blocks.values() if block.kind == "weight" and "@" not in block.name
    )
    waits = weights if mode == "deferred" else 0
    found = {
        kind: (_copied(made, Verb.H2D, kind), _copied(made, Verb.D2H, kind))
        for kind in ("exp_avg", "exp_avg_sq", "grad")
    }
    assert found == {"exp_avg": (weights, weights), "exp_avg_sq": (weights, weights), "grad": (waits, waits)}, found
    assert _copied(made, Verb.D2H, "weight") == weights, "each weight comes back once"
    for schedule in made.schedules.values():
        check(made.workload, made.placement, schedule)
    assert {name for name in ("L0/exp_avg", "L0/exp_avg_sq") if name not in made.workload.tile_only()} == set()


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_an_update_with_bf16_copies_moves_the_weight_as_a_moment_and_the_copy_back(mode: str) -> None:
    """P5: by hand; nothing of an FP32 weight is staged whole in HOST, and no gradient that need not wait is moved."""
    made = plan(mode, "tight", bf16=True)
    held = [block for name, block in made.workload.blocks.items() if "@" not in name]
    weights, copies = (sum(b.nbytes for b in held if b.kind == kind) for kind in ("weight", WEIGHT_BF16))
    waits = weights if mode == "deferred" else 0
    kinds = ("weight", "exp_avg", "exp_avg_sq", "grad")
    found = {kind: (_copied(made, Verb.H2D, kind), _copied(made, Verb.D2H, kind)) for kind in kinds}
    assert found == {**dict.fromkeys(kinds, (weights, weights)), "grad": (waits, waits)}, found
    assert _copied(made, Verb.D2H, WEIGHT_BF16) == copies, "each copy comes back once"
    for schedule in made.schedules.values():
        check(made.workload, made.placement, schedule)
    whole = {f"{unit}/{kind}" for unit in ("L0", "head") for kind in kinds[:3]} - made.workload.tile_only()
    assert not whole, whole


@pytest.mark.parametrize(
    ("number_bytes", "bytes_there", "bytes_back"), [(FP32, 16, 12), (BF16, 16, 14)], ids=["fp32", "bf16"]
)
def test_the_copies_of_device_updates_are_those_of_the_closed_form(
    number_bytes: int, bytes_there: int, bytes_back: int
) -> None:
    """P5: bytes a parameter there and back; what is used twice within two ops is copied once."""
    units = [UnitSize(name=name, nbytes=MiB) for name in ("embed", *(f"L{i}" for i in range(20)), "head")]
    made = training_workload(units, deferred=False, bf16=number_bytes == BF16)
    timeline = device_plan(made, 1 << 30, update_there=True).timeline
    parameters = len(units) * MiB // 4
    most = h2d_bytes(parameters, number_bytes=number_bytes, update_there=True)
    back = d2h_bytes(parameters, number_bytes=number_bytes, update_there=True)
    assert (most, back) == (bytes_there * parameters, bytes_back * parameters)
    assert timeline.d2h_bytes == back, f"{timeline.d2h_bytes} bytes back, by hand {back}"
    assert most - 4 * MiB <= timeline.h2d_bytes <= most, f"{timeline.h2d_bytes} bytes there, by hand {most}"


def machine(**per_s: float) -> Hardware:
    """A machine with a GPU whose link and memory are fast; rates by name."""
    usual = {
        "compute": 1e13,
        "h2d": 5e10,
        "d2h": 5e10,
        "update": 2e10,
        "device_update": 5e11,
        "read": 1e11,
        "write": 1e11,
    }
    rates = {name: Rate(per_s=value, source="assumed", how="for tests") for name, value in (usual | per_s).items()}
    return replace(assumed_hardware(), **rates, update_beside_compute=True)  # type: ignore[arg-type]


def chosen(
    hardware: Hardware,
    update_on: UpdateOn = "auto",
    *,
    deferred: bool = False,
    bf16: bool = False,
    host: int = 1 << 30,
) -> Plan:
    units = toy_units(12, 4 * MiB, 4 * MiB, flops_per_byte=1.0)
    limits = Limits(host_bytes=host, device_bytes=64 * MiB, update_on=update_on)
    return plan_training(units, hardware, limits, deferred=deferred, bf16=bf16).plan


@pytest.mark.parametrize(
    ("deferred", "bf16"), [(False, False), (True, False), (False, True)], ids=["fused", "deferred", "bf16"]
)
def test_updates_go_to_the_device_where_the_host_is_slow_and_stay_where_the_link_is(deferred: bool, bf16: bool) -> None:
    """P4, P5: the faster one by simulation; the other one, when it is asked for, is no faster."""
    for hardware, there in ((machine(update=2e9), True), (machine(h2d=2e9, d2h=2e9), False)):
        found = {on: chosen(hardware, on, deferred=deferred, bf16=bf16) for on in ("auto", "host", "device")}
        seconds = {on: plan_.timeline.pass_s for on, plan_ in found.items()}
        assert updates_there(found["auto"].workload) == there, seconds
        assert [updates_there(found[on].workload) for on in ("host", "device")] == [False, True]
        assert seconds["auto"] == min(seconds.values()), seconds
        assert max(seconds.values()) > 1.2 * min(seconds.values()), seconds


def test_a_tie_is_the_hosts_and_so_is_a_device_of_which_no_rate_is_known() -> None:
    """P5: where computing is the limit it does not matter; older hardware files know no rate."""
    slow = machine(compute=1e8)
    on_host, on_device = (chosen(slow, on).timeline.pass_s for on in ("host", "device"))
    assert on_device == pytest.approx(on_host, rel=0.01), (on_device, on_host)
    assert not updates_there(chosen(slow).workload)
    unknown = replace(machine(update=2e9), device_update=None)
    assert not updates_there(chosen(unknown).workload)


def test_an_update_shares_the_device_with_computing() -> None:
    """P5: both count as computing, and a busy drive takes nothing from either."""
    hardware = replace(machine(update=2e9), io_steals=0.5)
    timeline = chosen(hardware).timeline
    moved = 16 * sum(unit.nbytes for unit in toy_units(12, 4 * MiB, 4 * MiB)) / 4
    assert timeline.update_s == pytest.approx(moved / 5e11), timeline
    assert timeline.compute_s > timeline.update_s
    assert timeline.pass_s <= timeline.serial_s * 1.0001


def test_what_fits_only_with_updates_on_the_device_is_trained_there() -> None:
    """P2: gradients that are used there need no room in HOST; where neither fits the host's sum is told."""
    hardware = machine()
    least = {}
    for on in ("host", "device"):
        with pytest.raises(BudgetError) as caught:
            chosen(hardware, on, host=PAGE)
        least[on] = caught.value.needed_bytes
    if least["device"] < least["host"]:
        assert updates_there(chosen(hardware, host=least["device"]).workload), least
    with pytest.raises(BudgetError) as caught:
        chosen(hardware, host=PAGE)
    assert caught.value.needed_bytes == least["host"], least


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", ["llama", *(slow(name) for name in ("mixtral", "gpt2"))])
def test_a_run_with_device_updates_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, pretend: Pretend, model: str, clip: float | None
) -> None:
    """P1, I8: all on NVMe, a half of it, all in RAM; one micro-batch and four."""
    for micro_batch, resident in ((4, 0), (1, 0.5), (4, 1)):
        if model in TIED and micro_batch < 4:
            continue
        changes = {"train.max_grad_norm": clip, "train.micro_batch": micro_batch, "tiers.resident": resident}
        lanes = pretend(seed=micro_batch)
        result = verify(load_run(run_file({**THERE, **changes, "model.config": MODELS[model]})), 3, QUIET)
        assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "differing")}
        assert lanes[0].updates > 0


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("model", ["llama", slow("mixtral"), "llama-tied"])
def test_a_bf16_run_with_device_updates_equals_the_plain_bf16_loop_bit_for_bit(
    run_file: RunFile, pretend: Pretend, model: str, clip: float | None
) -> None:
    """P1, I8: the device rounds what it has updated; all on NVMe, and all in RAM. Some units have odd sizes."""
    for micro_batch, resident in ((4, 0), (2, 1)):
        if model in TIED and micro_batch < 4:
            continue
        changes = {"train.max_grad_norm": clip, "train.micro_batch": micro_batch, "tiers.resident": resident}
        settings = {**THERE, **changes, "model.config": MODELS[model], "train.precision": "bf16"}
        lanes = pretend(seed=micro_batch)
        result = verify(load_run(run_file(settings)), 3, QUIET)
        assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "differing")}
        assert lanes[0].updates > 0


@pytest.mark.parametrize(("late", "precision"), [(0.5, "fp32"), (1.0, "fp32"), (0.5, "bf16")])
def test_late_updates_on_the_device_change_no_number(
    run_file: RunFile, pretend: Pretend, late: float, precision: str
) -> None:
    """P1: a share of the units in the next forward, the others in backward; with parameters that do not decay."""
    pretend()
    changes = {"tiers.late_updates": late, "optimizer.no_decay": ["*norm*"], "optimizer.weight_decay": 0.1}
    changes |= {"train.precision": precision}
    result = verify(load_run(run_file({**THERE, **changes})), 3, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


def test_a_plan_says_where_updates_are_made_and_what_they_take(run_file: RunFile, pretend: Pretend) -> None:
    """P2, P5: in a line, in the JSON, and in the sum of the device."""
    pretend()
    found = {}
    for place, settings in (("host", TIGHT), ("device", THERE)):
        prepared = prepare(load_run(run_file(settings)))
        report = PlanReport(prepared=prepared).as_json()
        found[place] = report["device"]["used_bytes"]
        assert report["update_on"] == place and report["hardware"]["device_update"]["unit"] == "B/s"
        assert ("AdamW of the device" in device_line(prepared)) == (place == "device"), device_line(prepared)
    assert found["device"] > found["host"], found


def test_a_plan_that_had_the_choice_says_what_the_other_place_would_take(run_file: RunFile, pretend: Pretend) -> None:
    """P5: `megatrain plan`, in words and in the JSON; nothing where a place was asked for."""
    pretend()
    result = CliRunner().invoke(app, ["plan", str(run_file({**TIGHT, "train.update_on": "auto"}))])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert re.search(r"Updates run on the (device|host) \(auto\); with updates on the (host|device) a step is", said), (
        said
    )
    prepared = prepare(load_run(run_file({**TIGHT, "train.update_on": "auto"})))
    report = PlanReport(prepared=prepared).as_json()
    assert report["update_elsewhere_s"] == prepared.other_place_s and report["step_s"] <= report["update_elsewhere_s"]
    asked = PlanReport(prepared=prepare(load_run(run_file(THERE)))).as_json()
    assert asked["update_elsewhere_s"] is None


def test_updates_on_a_device_that_is_not_there_are_refused(run_file: RunFile, tmp_path: Path) -> None:
    """CF-04: before anything is written."""
    with pytest.raises(UserError, match=r"train\.update_on: device: the CPU computes this run.*Fix: .*auto, or"):
        prepare(load_run(run_file({"train.update_on": "device"})))
    assert not (tmp_path / "run").exists()


def test_a_state_keeps_to_the_place_of_its_updates(run_file: RunFile, pretend: Pretend, tmp_path: Path) -> None:
    """P3: host and device round in different ways, so `auto` does not choose anew; another place is told of."""
    pretend()
    run = load_run(run_file({**THERE, "train.steps": 1}))
    train(run, resume=False, console=QUIET)
    committed = read_manifest(run.tiers.nvme[0]).run
    assert committed["updates_on"] == "device", committed
    for asked, wanted in (("auto", "device"), ("host", "host")):
        again = prepare(load_run(run_file({**THERE, "train.update_on": asked})), committed)
        assert again.updates_there == (wanted == "device"), asked
    free = load_run(run_file({**THERE, "train.update_on": "auto"}))
    assert place_of_updates(free, machine(), {}) == "auto"
    assert place_of_updates(free, machine(), {"updates_on": "host"}) == "host"
    assert place_of_updates(free, assumed_hardware(), committed) == "auto", "no device here: the CPU does all"
    with pytest.raises(UserError, match=r"does not say how fast it makes them\. Fix: measure again"):
        place_of_updates(free, replace(machine(), device_update=None), committed)


def _state(run: Any, name: str) -> bytes:
    """A block of the state as its home holds it now, in HOST; of a copy what is used, which may be no whole pages."""
    manager, (unit, kind) = run.manager, name.split("/")
    at, nbytes = manager.plan.placement.address[name], manager.plan.workload.blocks[name].nbytes
    if kind == WEIGHT_BF16:
        nbytes = manager.plan.workload.blocks[f"{unit}/weight"].nbytes // 2
    return bytes(manager.arena.tensor(at, at + nbytes).numpy())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing_from_there_on(
    run_file: RunFile, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """OM-07: the device finds the flag beside the gradient; what was updated before it in this step has changed. A
    copy to compute with is the old one too.
    """
    pretend()
    ready = StepEngine._gradient_ready
    poisoned = "model.layers.1"

    def broken(self: Any, unit: str, gradients: Any) -> None:
        if unit == poisoned and self.updates == 2:
            next(iter(gradients.values()))[0, 0] = float("inf")
        ready(self, unit, gradients)

    finish = StepEngine._finish

    def settled(self: Any, loss: float) -> Any:
        self.manager.pipeline.drain()  # so that all has come back that was updated
        return finish(self, loss)

    monkeypatch.setattr(StepEngine, "_gradient_ready", broken)
    monkeypatch.setattr(StepEngine, "_finish", settled)
    prepared = prepare(load_run(run_file({**THERE, "tiers.resident": 1, "train.precision": precision})))
    batches = open_run_batches(prepared, tmp_path, QUIET)
    with open_state(prepared, batches, prepared.run.tiers.nvme[0], resume=False, console=QUIET) as manager:
        engine = StepEngine(prepared.run, prepared.units, manager, 0)
        copies = [WEIGHT_BF16] if precision == "bf16" else []
        names = [f"{unit.name}/{kind}" for unit in prepared.units.stored for kind in (*unit.kinds, *copies)]
        inputs = {"input_ids": torch.arange(64).view(4, 16), "labels": torch.arange(64).view(4, 16)}
        engine.step(inputs, last=False)
        before = {name: _state(engine, name) for name in names}
        with pytest.raises(
            NonFiniteError, match=r"gradient of model\.layers\.1\..* is not finite in step 2, and without"
        ):
            engine.step(inputs, last=True)
        after = {name: _state(engine, name) for name in names}
        engine.close()
        changed = {name.partition("/")[0] for name in names if before[name] != after[name]}
    order = [unit.name for unit in prepared.units]
    assert changed == set(order[order.index(poisoned) + 1 :]), changed


def test_the_host_does_not_wait_for_an_update_of_the_device(tmp_path: Path) -> None:
    """P4: a whole step is issued while no update has been done; only transfers and the end of a pass wait for it."""

    class Late(OutOfOrderLanes):
        """Says that an update has happened only when it is let."""

        def __init__(self) -> None:
            super().__init__()
            self.done = 0

        def update(self, work: Any, operands: Any, after: Any) -> Any:
            event = super().update(work, operands, after)
            happen = event.happen

            def happened() -> None:
                self.done += 1
                happen()

            event.happen = happened  # type: ignore[method-assign]
            return event

    made, lanes = plan("fused", "roomy", ROOMY), Late()
    with ToyRun(made, tmp_path / "s", lanes) as run:
        run.begin(0)
        run.enter(0, run.ops(0))
        issued, done = lanes.updates, lanes.done
        assert issued > done, f"all {issued} updates were waited for"
        run.manager.pipeline.drain()
        assert lanes.done == lanes.updates == run.manager.pipeline.updates == 6
