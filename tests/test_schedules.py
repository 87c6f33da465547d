"""Learning-rate schedules: every rate is that of transformers, whenever the update runs and wherever a run was cut.

Scope: the rates alone, how the keys are read, whole runs under a schedule against the plain loop, resumes.
Not here: the kernel that uses a rate (`test_optim.py`), runs with a constant one (`test_same_numbers.py`).
"""

import doctest
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from conftest import RunFile
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from rich.console import Console
from transformers import get_scheduler

import megatrain.goodbye
import megatrain.optim
import megatrain.schedules
import megatrain.trainer
from megatrain.companions import model_card
from megatrain.config import OptimizerConfig, dump_run, load_run
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.schedules import lr_at, schedule_lines
from megatrain.trainer import train
from megatrain.verify import verify
from tiering.errors import WrongStateError

pytestmark = pytest.mark.usefixtures("known_machine")

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_min_lr")
TIGHT = {"model.config": MODELS["llama"], "tiers.resident": 0, "tiers.host_memory": "8MiB"}


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def plain_rates(optimizer: OptimizerConfig, steps: int) -> list[float]:
    """What a loop of torch has before each `optimizer.step()`, with transformers' own scheduler."""
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=optimizer.lr, fused=True)
    name, specific = str(optimizer.schedule), {}
    if name == "constant" and optimizer.warmup_steps:
        name = "constant_with_warmup"
    if name == "cosine_with_min_lr":
        specific["min_lr"] = optimizer.min_lr
    assert isinstance(optimizer.warmup_steps, int)
    scheduler = get_scheduler(name, adamw, optimizer.warmup_steps, optimizer.schedule_steps, specific)
    rates = []
    for _ in range(steps):
        rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        scheduler.step()
    return rates


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    lr=st.floats(1e-8, 10),
    share=st.floats(0, 1),
    warmup=st.integers(0, 40),
    length=st.integers(1, 60),
)
def test_every_rate_is_that_of_transformers_to_the_last_bit(
    schedule: Any, lr: float, share: float, warmup: int, length: int
) -> None:
    """P1: compared with `==`, through the warm-up, to the end of the schedule and beyond it."""
    optimizer = OptimizerConfig(
        lr=lr,
        schedule=schedule,
        warmup_steps=warmup,
        schedule_steps=None if schedule == "constant" else length,
        min_lr=min(lr, lr * share) if schedule == "cosine_with_min_lr" else 0,
    )
    found = [lr_at(optimizer, update) for update in range(1, 80)]
    wanted = plain_rates(optimizer, 79)
    unlike = [(n + 1, f, w) for n, (f, w) in enumerate(zip(found, wanted, strict=True)) if f != w]
    assert not unlike, f"update, found, wanted: {unlike[:3]}"


def test_the_sum_in_the_documentation_of_a_rate_comes_out() -> None:
    """Rule 10."""
    outcome = doctest.testmod(megatrain.schedules)
    assert outcome.attempted and not outcome.failed, outcome


def scheduled(schedule: str, **more: Any) -> dict[str, Any]:
    floor = {"optimizer.min_lr": 0.002} if schedule == "cosine_with_min_lr" else {}
    return {**TIGHT, "optimizer.lr": 0.01, "optimizer.schedule": schedule, "train.steps": 5, **floor, **more}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "when",
    [
        pytest.param({"tiers.late_updates": 0}, id="at-once"),
        pytest.param({"tiers.late_updates": 0.5}, id="late", marks=pytest.mark.slow),
        pytest.param({"train.max_grad_norm": 0.5}, id="clipped"),
    ],
)
def test_a_run_under_a_schedule_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, schedule: str, when: dict[str, Any]
) -> None:
    """P1, I8, OM-11: transformers' scheduler in the plain loop, one rate for the four micro-batches of a step; updates
    that run in the next pass have the rate of their own step. The fifth update is a flush.
    """
    rows = {"train.batch": 4, "train.micro_batch": 1}
    run = load_run(run_file(scheduled(schedule, **{"optimizer.warmup_steps": 2, **rows, **when})))
    result = verify(run, 5, Console(quiet=True))
    assert len(set(result["lrs"][:3])) == 3, f"the rate does not change: {result['lrs']}"
    assert result["lrs"] == result["plain_lrs"]
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


@pytest.mark.parametrize("when", [{"tiers.late_updates": 0.5}, {"train.max_grad_norm": 0.5}], ids=["late", "clipped"])
def test_verify_sees_an_update_with_the_rate_of_the_next_step(
    run_file: RunFile, when: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: the comparison itself: updates with the rate of the pass that they run in are found out by their bits."""
    run = load_run(run_file(scheduled("linear", **when)))
    monkeypatch.setattr(megatrain.optim, "lr_at", lambda optimizer, update: lr_at(optimizer, update + 1))
    result = verify(run, 2, Console(quiet=True))
    assert result["lrs"] == result["plain_lrs"] and result["differing"], result


def test_rates_of_a_run_file_are_read_as_people_type_them(run_file: RunFile) -> None:
    """CF-04: a number of steps, a share or a percentage, rounded as transformers does; an end that is recorded."""
    linear = {"optimizer.schedule": "linear", "train.steps": 90}
    for typed, steps in ((7, 7), ("7", 7), (7.0, 7), (0, 0), ("3%", 3), (0.03, 3), ("0.03", 3), (" 50 % ", 45)):
        run = load_run(run_file({**linear, "optimizer.warmup_steps": typed}))
        found = (run.optimizer.warmup_steps, run.optimizer.schedule_steps)
        assert found == (steps, 90), f"{typed!r}: {found}"
    again = load_run(run_file(linear, "again.yaml"), ["train.steps=200", "optimizer.schedule_steps=90"])
    assert (again.train.steps, again.optimizer.schedule_steps) == (200, 90)
    constant = load_run(run_file({"optimizer.warmup_steps": "3%", "train.steps": 90}))
    assert (constant.optimizer.warmup_steps, constant.optimizer.schedule_steps) == (3, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resolved_schedule_is_written_and_read_again(run_file: RunFile, tmp_path: Path, schedule: str) -> None:
    """CF-04: run.yaml records the numbers, so that more steps do not change them."""
    run = load_run(run_file(scheduled(schedule, **{"optimizer.warmup_steps": "30%"})))
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_run(run))
    assert load_run(path) == run
    longer = load_run(path, ["train.steps=50"])
    assert longer.optimizer == run.optimizer, f"{longer.optimizer}, at first {run.optimizer}"


def test_a_schedule_that_cannot_be_is_refused(run_file: RunFile) -> None:
    """CF: one line that names the key."""
    floor = {"optimizer.schedule": "cosine_with_min_lr"}
    for changes, match in (
        ({"optimizer.warmup_steps": "100%"}, r"warmup_steps: '100%' is not allowed: must be a number of steps, or a"),
        ({"optimizer.warmup_steps": 1.5}, r"warmup_steps: 1\.5 is not allowed"),
        ({"optimizer.warmup_steps": -1}, r"warmup_steps: -1 is not allowed"),
        ({"optimizer.warmup_steps": float("nan")}, r"warmup_steps: nan is not allowed"),
        ({"optimizer.warmup_steps": float("inf")}, r"warmup_steps: inf is not allowed"),
        ({"optimizer.warmup_steps": True}, r"warmup_steps: True is not allowed"),
        ({"optimizer.warmup_steps": []}, r"warmup_steps: \[\] is not allowed"),
        ({"optimizer.warmup_steps": "%"}, r"warmup_steps: '' is not allowed"),
        ({"optimizer.warmup_steps": "3%", "train.steps": 10**400}, r"train\.steps: .* must be < 9223372036854775808"),
        ({"optimizer.schedule": "wsd"}, r"schedule: 'wsd' is not allowed: must be 'constant', 'linear'"),
        ({"optimizer.schedule_steps": 5}, r"`schedule_steps` is how long"),
        ({"optimizer.min_lr": 1e-5}, r"`min_lr` is for `schedule: cosine_with_min_lr`"),
        ({**floor, "optimizer.min_lr": 1}, r"`min_lr` is 1, `lr` 0\.0003"),
        ({**floor, "optimizer.lr": 0}, r"falls from an lr > 0"),
    ):
        with pytest.raises(UserError, match=match):
            load_run(run_file(changes))


def test_a_run_without_a_schedule_has_the_identity_that_it_had_before_there_were_any(run_file: RunFile) -> None:
    """P3: stores of an earlier version go on."""
    assert load_run(run_file()).numerics()["optimizer"].keys() == {"lr", "betas", "eps", "weight_decay"}


def test_the_plan_says_how_the_rate_goes_on(run_file: RunFile) -> None:
    """P5: nothing where it is constant; a decay that is over before the run is, is said."""

    def said(*overrides: str) -> list[str]:
        return schedule_lines(load_run(run_file(), ["train.steps=100", *overrides]))

    assert said() == []
    assert said("optimizer.warmup_steps=3%") == ["learning rate: constant, 0.0003 after 3 steps of warm-up"]
    assert said("optimizer.schedule=cosine") == ["learning rate: cosine, from 0.0003, 0 after step 100"]
    floor = said("optimizer.schedule=cosine_with_min_lr", "optimizer.min_lr=1e-5", "optimizer.warmup_steps=5")
    assert floor == ["learning rate: cosine_with_min_lr, 0.0003 after 5 steps of warm-up, 1e-05 after step 100"]
    beyond = "train.steps 100 is beyond optimizer.schedule_steps 60: the learning rate"
    linear = said("optimizer.schedule=linear", "optimizer.schedule_steps=60")[1:]
    assert linear == [f"{beyond} is 0 from step 61 on"]
    cosine = said("optimizer.schedule=cosine", "optimizer.schedule_steps=60")[1:]
    assert cosine == [f"{beyond} rises again after step 61, as the cosine of transformers does"]


def test_the_card_of_an_exported_model_names_the_schedule(run_file: RunFile) -> None:
    """A model card says how the model came about; without a schedule there is nothing to say."""
    units: Any = SimpleNamespace(model=object(), parameters=7)
    at: Any = SimpleNamespace(step=3)
    for changes, lines in (
        ({}, []),
        ({"optimizer.schedule": "linear"}, ["| learning rate | linear, from 0.0003, 0 after step 4 |"]),
    ):
        card = model_card(load_run(run_file(changes)), units, at, torch.float32, loss=None, licences=[])
        assert [line for line in card.splitlines() if "learning rate" in line] == lines


def run(run_file: RunFile, folder: Path, changes: dict[str, Any], *, resume: bool = False) -> str:
    """Trains; returns what was printed."""
    where = {"tiers.nvme": str(folder / "nvme"), "output.dir": str(folder)}
    said = io.StringIO()
    path = run_file({**changes, **where})
    assert train(load_run(path), resume=resume, console=Console(file=said, width=300)) == 0
    return said.getvalue()


def state(root: Path) -> dict[str, bytes]:
    group = zarr.open_group(root, mode="r")
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob("*/*/c")]
    return {name: np.asarray(group[name][:]).tobytes() for name in names}  # type: ignore[index]


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("when", [{"tiers.late_updates": 0.5}, {"train.max_grad_norm": 0.5}], ids=["late", "clipped"])
def test_a_resumed_schedule_goes_on_where_it_was(run_file: RunFile, tmp_path: Path, when: dict[str, Any]) -> None:
    """P3, CK-01: cut at step 3 of 7 with the schedule's length given; every rate of the log, and every bit."""
    changes = scheduled("cosine", **{"optimizer.warmup_steps": 2, "optimizer.schedule_steps": 7, **when})
    run(run_file, tmp_path / "straight", {**changes, "train.steps": 7})
    run(run_file, tmp_path / "cut", {**changes, "train.steps": 3})
    said = run(run_file, tmp_path / "cut", {**changes, "train.steps": 7}, resume=True)
    assert "note: learning rate: cosine, 0.01 after 2 steps of warm-up, 0 after step 7" in said, said
    wanted = plain_rates(load_run(tmp_path / "cut" / "run.yaml").optimizer, 7)
    assert rates(tmp_path / "cut") == rates(tmp_path / "straight") == wanted
    assert state(tmp_path / "cut" / "nvme") == state(tmp_path / "straight" / "nvme")


def test_more_steps_leave_a_schedule_as_it_was_or_are_refused(run_file: RunFile, tmp_path: Path) -> None:
    """P3, CK-21: from the recorded run file the schedule stays and the plan says what follows; a run file that means
    another length is refused by name, and what the run recorded stays.
    """
    changes, folder = scheduled("linear", **{"train.steps": 3}), tmp_path / "run"
    assert "train.steps=6" not in run(run_file, folder, changes), "a decay that is over is said to go on"
    recorded = (folder / "run.yaml").read_text()
    with pytest.raises(WrongStateError, match=r"optimizer\.schedule_steps: wanted 5, found 3"):
        run(run_file, folder, {**changes, "train.steps": 5}, resume=True)
    assert (folder / "run.yaml").read_text() == recorded
    said = io.StringIO()
    longer = load_run(folder / "run.yaml", ["train.steps=5"])
    assert train(longer, resume=True, console=Console(file=said, width=300)) == 0
    assert "beyond optimizer.schedule_steps 3: the learning rate is 0 from step 4 on" in said.getvalue()
    assert rates(folder)[3:] == [0.0, 0.0]


def test_another_schedule_is_refused_by_name_when_resuming(run_file: RunFile, tmp_path: Path) -> None:
    """CK-21: as for betas."""
    changes = scheduled("cosine_with_min_lr", **{"optimizer.warmup_steps": 2, "train.steps": 1})
    changes["optimizer.schedule_steps"] = 9
    run(run_file, tmp_path / "run", changes)
    for more, name in (
        ({"optimizer.schedule": "linear", "optimizer.min_lr": 0}, "schedule"),
        ({"optimizer.schedule": "constant", "optimizer.min_lr": 0, "optimizer.schedule_steps": None}, "min_lr"),
        ({"optimizer.warmup_steps": 0}, "warmup_steps"),
        ({"optimizer.warmup_steps": 3}, "warmup_steps"),
        ({"optimizer.schedule_steps": 10}, "schedule_steps"),
        ({"optimizer.min_lr": 0.001}, "min_lr"),
    ):
        with pytest.raises(WrongStateError, match=rf"numerics\.optimizer\.{name}: wanted"):
            run(run_file, tmp_path / "run", {**changes, **more}, resume=True)


def test_a_skipped_step_leaves_its_rate_to_the_next_one(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OM-07: a step that is skipped is no update, neither for AdamW nor for the schedule; also over a resume."""
    ready = StepEngine._gradient_ready

    def broken(self: StepEngine, unit: str, gradients: Any) -> None:
        if broken_now["step"] and unit == "model.layers.1":
            next(iter(gradients.values()))[0, 0] = float("nan")
        ready(self, unit, gradients)

    def step(self: StepEngine, *args: Any, **more: Any) -> Any:
        broken_now["number"] += 1
        broken_now["step"] = broken_now["number"] == 3
        return one(self, *args, **more)

    broken_now, one = {"number": 0, "step": False}, StepEngine.step
    monkeypatch.setattr(StepEngine, "_gradient_ready", broken)
    monkeypatch.setattr(StepEngine, "step", step)
    changes = scheduled("linear", **{"train.max_grad_norm": 1.0, "optimizer.schedule_steps": 6})
    run(run_file, tmp_path / "run", {**changes, "train.steps": 4})
    run(run_file, tmp_path / "run", {**changes, "train.steps": 6}, resume=True)
    one_to_five = plain_rates(load_run(tmp_path / "run" / "run.yaml").optimizer, 5)
    wanted = [*one_to_five[:3], one_to_five[2], *one_to_five[3:]]
    assert rates(tmp_path / "run") == wanted, f"{rates(tmp_path / 'run')}, wanted {wanted}"
