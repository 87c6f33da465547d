"""The one command for a visit to a GPU machine: without a GPU it is one line, and whatever a check does is one line.

Scope: `benchmarks/gpu_check/`; its checks through stand-ins for the device, where no figure is compared with a time.
Not here: what they check (`test_device_lanes.py`, `test_device_runs.py`), a real GPU.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import slow
from kvikio_stand_in import StandIn, install
from streams import OutOfOrderLanes

import benchmarks.gpu_check.__main__ as gpu_check
import megatrain.prepare
from benchmarks.gpu_check import child, fraction, marked, order, overlap, rates, runs, small_runs, storage
from benchmarks.gpu_check.checks import BY_NAME, CHECKS, DEVICE, Check
from benchmarks.gpu_check.rig import Rig
from benchmarks.presets import llama
from megatrain.accelerator import Accelerator
from megatrain.config import RunConfig
from tiering import gds
from tiering.errors import PlaceError
from tiering.hardware import Rate
from tiering.lanes import Lanes
from tiering.measure_device import DeviceRates

ROOT = Path(__file__).parent.parent
MiB = 1 << 20
GiB = 1 << 30
CPU = torch.device("cpu")
NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
PACKAGES = {name for check in CHECKS for name in check.needs}
BLOCKER = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else found(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""
"""As if they were not installed."""


def told(*arguments: object, without: set[str] = frozenset(), folder: Path | None = None) -> Any:  # type: ignore[assignment]
    """Runs Python with these arguments, and with packages that cannot be imported."""
    path = [str(ROOT)]
    if without:
        assert folder is not None
        (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=without))
        path.insert(0, str(folder))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)


@NO_DEVICE
def test_without_a_gpu_one_line_says_so_and_nothing_failed() -> None:
    """P6: why there is none; exit code 0, so that a script can call it anywhere."""
    done = told("-m", "benchmarks.gpu_check")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout + done.stderr
    line = json.loads(done.stdout)
    assert (line["check"], line["ok"]) == (DEVICE, None) and line["skipped"].startswith("no GPU: torch"), line


def test_without_torch_it_is_one_line_too(tmp_path: Path) -> None:
    """P6: a Python of some other kind; the parent needs the standard library alone."""
    done = told("-m", "benchmarks.gpu_check", without=PACKAGES, folder=tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout + done.stderr
    assert json.loads(done.stdout)["skipped"] == "no GPU: needs torch", done.stdout


def test_every_check_has_a_name_what_it_needs_and_a_time() -> None:
    """A table that can be read: what is named exists, and the most valuable ones have time for sure."""
    assert len(BY_NAME) == len(CHECKS) and CHECKS[0].name == DEVICE
    for check in CHECKS:
        module, _, function = check.place.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), check
        assert check.what and "torch" in check.needs and 0 < check.least_s <= check.limit_s < 200, check
    assert gpu_check.BUDGET_S < 8 * 60
    assert sum(check.limit_s for check in CHECKS[:6]) < gpu_check.BUDGET_S, "even if all of them hang"


NEEDS = sorted({check.needs for check in CHECKS}, key=len)


@pytest.mark.parametrize("needs", [NEEDS[0], *(slow(needs) for needs in NEEDS[1:-1]), NEEDS[-1]], ids=len)
def test_what_a_check_needs_is_all_that_it_imports(tmp_path: Path, needs: tuple[str, ...]) -> None:
    """P6: with these packages and no other one of the list its module can be imported."""
    modules = [check.place.partition(":")[0] for check in CHECKS if check.needs == needs]
    without = PACKAGES - set(needs)
    done = told("-c", f"import {', '.join(modules)}", without=without or {"nothing"}, folder=tmp_path)
    assert done.returncode == 0, f"without {sorted(without)}:\n{done.stderr}"


def test_a_missing_package_is_said_by_name(tmp_path: Path) -> None:
    """P6: nothing is tried, and nothing has failed; the line is alone on stdout."""
    done = told(
        "-m", "benchmarks.gpu_check.child", "disk", tmp_path, 5, without={"pydantic", "xxhash"}, folder=tmp_path
    )
    wanted = {"check": "disk", "ok": None, "skipped": "needs pydantic, xxhash"}
    assert json.loads(done.stdout) == wanted, done.stdout + done.stderr


NOISY = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu_check import child, rates, rig
def copies(rig):
    print("a library talks")
    os.system("echo so does another one")
    return {"ok": True, "rate_per_s": 1.5}
rates.copies = copies
rig.cuda_rig = lambda folder, until_s: folder.is_dir() or 1 / 0
child.main("copies", Path(sys.argv[1]) / "new", 5.0)
"""


def test_the_line_of_a_child_is_alone_on_stdout(tmp_path: Path) -> None:
    """Whatever is printed beside it, from Python or from C, goes to stderr; the folder is there."""
    done = told("-c", NOISY, tmp_path)
    assert json.loads(done.stdout) == {"check": "copies", "ok": True, "rate_per_s": 1.5}, done.stdout + done.stderr
    assert "a library talks" in done.stderr and "so does another one" in done.stderr, done.stderr


def test_what_a_package_of_its_own_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a package that is there, and cannot be imported, says why."""
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    (tmp_path / "broken.py").write_text("raise OSError('libxyz.so: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert child.missing(["json", "half_there", "broken"]) == [
        "half_there (which needs not_there_at_all)",
        "broken (OSError: libxyz.so: cannot open)",
    ]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import time; print('{}', flush=True); time.sleep(60)", "gave no answer within 1 s"),
        ("print('what is this?')", "said nothing that can be read"),
        ("""print('{"check": "another", "ok": true}')""", "said nothing that can be read"),
        ("""print('{"check": "disk", "ok": "yes"}')""", "said nothing that can be read"),
        ("""print('{"check": "disk", "ok": true}'); raise SystemExit('and died')""", "exit code 1: and died"),
    ],
    ids=["crash", "hang", "garbage", "another", "no verdict", "late"],
)
def test_whatever_a_child_does_becomes_one_line(tmp_path: Path, script: str, why: str) -> None:
    """A crash or a hang costs one line, and its folder is gone."""
    command = [sys.executable, "-c", f"import os, sys; os.makedirs(sys.argv[2])\n{script}"]
    line = gpu_check.run_check(BY_NAME["disk"], tmp_path, 1.0 if "hang" in why or "60" in script else 30.0, command)
    assert (line["check"], line["ok"], line["why"]) == ("disk", False, why), line
    assert line["seconds"] >= 0 and not list(tmp_path.iterdir())


def test_what_a_check_raises_is_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type, words and place; the trace goes to stderr."""
    check = Check(name="x", what="", needs=(), limit_s=1, least_s=1, place="benchmarks.gpu_check.rates:copies")
    monkeypatch.setattr("benchmarks.gpu_check.rig.cuda_rig", lambda *rest: None)
    line = child.checked(check, tmp_path / "x", 0.0)
    assert line["ok"] is False and line["why"].startswith("AttributeError: 'NoneType'"), line
    assert "rates.py:" in line["why"]


Answers = Callable[..., list[str]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Children answer at once: each check with the verdict that is given for it, else True."""

    def make(verdicts: dict[str, Any]) -> list[str]:
        begun: list[str] = []

        def answer(check: Check, folder: Path, limit_s: float) -> dict[str, Any]:
            begun.append(check.name)
            assert 0 < limit_s <= check.limit_s
            return {"check": check.name, "ok": verdicts.get(check.name, True), "seconds": 0.0}

        monkeypatch.setattr(gpu_check, "run_check", answer)
        return begun

    return make


@pytest.mark.parametrize(
    ("verdicts", "code", "ok"), [({}, 0, True), ({"gds": None}, 0, None), ({"gds": False}, 1, False)]
)
def test_one_line_a_check_and_one_for_all(
    answers: Answers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verdicts: dict[str, Any],
    code: int,
    ok: object,
) -> None:
    """Exit code 1 if any check failed; the same lines are kept in a file."""
    begun = answers(verdicts)
    kept = tmp_path / "kept.jsonl"
    assert gpu_check.main(["--path", str(tmp_path), "--json-file", str(kept)]) == code
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines()]
    assert begun == [check.name for check in CHECKS]
    assert [line["check"] for line in lines] == [*begun, "all"] and lines[-1]["ok"] is ok, lines[-1]
    assert kept.read_text() == out
    assert list(tmp_path.iterdir()) == [kept]


def test_what_does_not_fit_any_more_is_told_and_not_begun(
    answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it ends in time; what was left out is no success."""
    begun = answers({})
    assert gpu_check.main(["--path", str(tmp_path), "--budget-s", "12"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert begun == [DEVICE, "copies", "overlap", "disk", "compute", "gds"]
    assert {line["check"]: line for line in lines}["tests"]["skipped"] == "12 of 12 s were left"
    assert lines[-1]["ok"] is None and "tests" in lines[-1]["not_decided"], lines[-1]


def test_only_some_checks(answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device comes first in any case: a result without its machine is none."""
    begun = answers({})
    assert gpu_check.main(["--path", str(tmp_path), "--only", "bound"]) == 0
    assert begun == [DEVICE, "io-bound", "pcie-bound", "compute-bound"]
    assert gpu_check.main(["--only", "nonsense"]) == 2
    assert "Fix: one of device, lanes" in capsys.readouterr().err


def test_a_folder_in_ram_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a RAM disk would be told as those of a drive."""
    monkeypatch.setattr("tiering.place.RAM_FILE_SYSTEMS", frozenset({"ext4", "overlay", "xfs", "tmpfs", "9p", "btrfs"}))
    with pytest.raises(PlaceError, match="is RAM, not a tier"), gpu_check._folder(tmp_path):
        pass


@pytest.fixture
def rig(tmp_path: Path, known_machine: None) -> Rig:
    """A stand-in for a device, with everything small."""
    seeds = iter(range(1 << 20))

    def lanes(locked: bool) -> Lanes:
        return OutOfOrderLanes(next(seeds))

    return Rig(device=CPU, lanes=lanes, folder=tmp_path, room_bytes=GiB, until_s=time.monotonic() + 120, scale=1 / 1024)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device: cuda` is a stand-in for a device with 4 GiB."""
    rate = Rate(per_s=1e9, source="assumed", how="assumed: a pretend device")
    found = DeviceRates(compute=replace(rate, per_s=1e11), h2d=rate, d2h=rate, update=rate)
    device = Accelerator(
        device=CPU,
        name="a pretend device",
        memory_bytes=4 * GiB,
        free_bytes=4 * GiB,
        lanes=OutOfOrderLanes,
        rates=lambda *shape: found,
    )
    monkeypatch.setattr(megatrain.prepare, "find_accelerator", lambda run: device)


def test_schedules_come_to_the_bytes_of_their_program(rig: Rig) -> None:
    """I2, I3: on the stand-in, and the control shows that a missing event would be seen."""
    found = order.order(rig)
    assert found["ok"], found
    assert found["seen_without_events"] == "6 of 6", found
    assert found["device_bytes"]["tight"] < found["device_bytes"]["roomy"], found


def test_an_order_that_is_not_kept_fails_the_check(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: the check can say no, with the blocks that are wrong."""
    monkeypatch.setattr(order._Loop, "_awaited", lambda self, action: [])
    monkeypatch.setattr(order, "_wait", lambda events: None)
    monkeypatch.setattr(OutOfOrderLanes, "close", lambda self: None)
    found = order.order(rig)
    assert found["ok"] is False and "other bytes than the program's" in found["why"], found


def test_copies_are_timed_and_come_back_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: every direction, locked and not; other bytes than were sent are a failure."""
    found = rates.copies(rig)
    assert found["ok"], found
    names = [f"{way}_{kind}_per_s" for way in ("h2d", "d2h", "both") for kind in ("locked", "pageable", "grain")]
    assert all(found[name] > 0 for name in names), found
    monkeypatch.setattr(rates, "_came_back", lambda *rest: False)
    assert rates.copies(rig)["why"] == "pageable: other bytes came back than were sent"


def test_the_drive_and_computing_are_measured(rig: Rig) -> None:
    """P5: rates are there and positive; a product is exact, as FP32 on the CPU is."""
    drive = rates.disk(rig)
    assert drive["ok"] and all(drive[f"{what}_depth_8_per_s"] > 0 for what in ("read", "write", "mixed")), drive
    found = rates.compute(rig)
    assert found["ok"] and 0 < found["matmul_error"] < rates.EXACT, found
    assert (
        min(found["matmul_flop_per_s"], found["adamw_cpu_per_s"], found["adamw_device_per_s"], found["host_copy_per_s"])
        > 0
    ), found


@pytest.mark.slow
def test_overlap_has_its_parts_and_the_bytes_come_out_right(rig: Rig) -> None:
    """P4: which of both is nearer, no stand-in can tell; that every byte was computed on, it can."""
    found = overlap.overlap(rig)
    for name in overlap.SHARES:
        case = found[name]
        assert case["same_bytes"], case
        assert case["limit_s"] == max(case["copies_s"], case["compute_s"]) > 0, case
        assert case["serial_s"] == case["h2d_s"] + case["compute_s"] + case["d2h_s"], case


@pytest.mark.slow
def test_models_are_held_against_the_plain_loop(rig: Rig, pretend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: what is equal is told, what is not is named, and what time did not allow is no success."""
    models, tied = runs.tested_models()
    few = {name: models[name] for name in ("llama", "llama-tied")}
    monkeypatch.setattr(runs, "tested_models", lambda: (few, tied))
    found = runs.bitwise(rig)
    assert found["ok"] and len(found["same"]) == 10, found
    assert "llama, clipped, 4 micro-batches, updates on the device" in found["same"], found
    assert "llama, fused, 1 micro-batches, updates on the device, bf16" in found["same"], found
    late = runs.bitwise(replace(rig, until_s=time.monotonic()))
    assert late["ok"] is None and "no time for llama, fused" in late["skipped"], late
    result = {"identical": False, "losses": [1.0], "plain_losses": [2.0], "max_abs_diff": {}, "differing": ["a", "b"]}
    monkeypatch.setattr(runs, "verify", lambda *rest: result)
    wrong = runs.bitwise(rig)
    assert wrong["ok"] is False and wrong["differing"]["llama, fused, 1 micro-batches, updates on the host"][
        "differing"
    ] == ["a", "b"], wrong


def test_compiled_layers_are_compared_with_updates_in_both_places(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: each run is compiled; without Triton the check is not begun, and its line says what is missing."""
    asked = []

    def verified(run: RunConfig, *rest: Any) -> dict[str, Any]:
        asked.append((run.train.compile, run.train.update_on, run.device))
        return {"identical": True}

    monkeypatch.setattr(runs, "verify", verified)
    found = runs.compiled(rig)
    assert found["ok"] and len(found["same"]) == 2, found
    assert asked == [(True, "host", "cuda"), (True, "device", "cuda")], asked
    assert "triton" in BY_NAME["compiled"].needs


SMALL = llama(hidden=64, layers=4, intermediate=192, vocabulary=256, head=16)


def test_the_peak_of_memory_is_held_against_the_plan(rig: Rig, pretend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: within arena and workspace it passes, above it fails; where nothing counts, nothing is decided."""
    monkeypatch.setattr(runs, "WIDE", SMALL)
    nothing = runs.memory(rig)
    assert nothing["ok"] is None and nothing["skipped"] == "torch counts no memory of cpu", nothing
    most = nothing["arena_bytes"] + sum(nothing["planned_beside_bytes"].values())
    for number, (peak, ok) in enumerate(((nothing["arena_bytes"], True), (most + 1, False), (1, False))):
        counter = SimpleNamespace(
            memory_allocated=lambda: 0,
            max_memory_allocated=lambda peak=peak: peak,
            max_memory_reserved=lambda: 0,
            reset_peak_memory_stats=lambda: None,
        )
        monkeypatch.setattr(runs, "_counter", lambda device, counter=counter: counter)
        found = runs.memory(replace(rig, folder=rig.folder / str(number)))
        assert found["ok"] is ok, found


@pytest.mark.slow
def test_models_larger_than_what_they_are_given_train_to_the_same_bits(
    rig: Rig, pretend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P2: all three runs agree; a run that differs is named with what differs."""
    monkeypatch.setattr(runs, "WIDE", {**SMALL, "num_hidden_layers": 12})
    monkeypatch.setattr(runs, "SMALL_HOST_BYTES", 4 * MiB)
    found = runs.larger(rig)
    assert found["ok"], found
    assert found["device_and_host"]["nvme_bytes"] > 0 == found["device"]["nvme_bytes"], found
    assert found["device"]["device_arena_bytes"] < found["state_bytes"]
    losses = iter(range(3))
    monkeypatch.setattr(
        runs, "trained", lambda *rest: small_runs.Trained(losses=(next(losses),), blocks={"L0/weight": "00"})
    )
    wrong = runs.larger(replace(rig, folder=rig.folder / "again"))
    assert wrong["ok"] is False and wrong["device"]["differing"] == ["losses (0,) and (1,)"], wrong


@pytest.mark.parametrize(
    "name",
    [
        slow("io_bound"),
        "pcie_bound",
        slow("compute_bound"),
    ],
)
def test_a_fraction_of_the_limit_has_its_parts(rig: Rig, pretend: None, name: str) -> None:
    """P4, P5: the limit is the longest of what each part takes alone; the plan and plain PyTorch stand beside it."""
    found = getattr(fraction, name)(replace(rig, until_s=time.monotonic() + 4))
    alone = found["alone_s"]
    assert found["limit_s"] == max(alone.values()) == alone[found["bound_by"]], found
    assert found["fraction"] == found["limit_s"] / found["step_s"] > 0, found
    assert found["ok"] is (found["fraction"] >= fraction.PROMISE)
    assert (alone["io"] > 0) is (name == "io_bound") and alone["h2d"] > 0 and alone["d2h"] > 0, found
    assert min(found["predicted_step_s"], found["predicted_limit_s"], found["plain_step_s"]) > 0, found


def test_kvikio_is_asked_for_host_and_device_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: with counts by path where the version has them; without kvikio nothing is decided."""
    kvikio = install(monkeypatch)
    found = storage.storage(rig)
    assert found["ok"] and found["paths"]["posix"] > 0 and found["moved"].startswith("kvikio moved: RAM"), found
    names = [f"{memory}_{way}_per_s" for memory in ("host", "device", "registered") for way in ("read", "write")]
    assert min(found[name] for name in names) > 0 and "measured" in found["chosen"], found
    assert {setting["num_threads"] for setting in kvikio.set_log if "num_threads" in setting} == {4, 8, 16, 32}, kvikio
    monkeypatch.setattr(StandIn, "pread", lambda *args, **kwargs: SimpleNamespace(get=lambda: kwargs["size"]))
    monkeypatch.setattr(gds, "probe", lambda path: None)
    assert storage.storage(rig)["why"] == "the device's memory came back with other bytes"
    monkeypatch.setattr(gds, "probe", lambda path: "no libcuda.so.1")
    assert storage.storage(rig)["why"] == "no transfer of host memory: no libcuda.so.1"
    monkeypatch.setitem(sys.modules, "kvikio", None)
    none = storage.storage(rig)
    assert none["ok"] is None and none["skipped"].startswith("needs kvikio"), none


def test_the_tests_marked_gpu_are_found_and_what_they_say_is_read() -> None:
    """Counts and the names of those that failed; all skipped is no success."""
    names = {path.name for path in marked.marked_files(ROOT / "tests")}
    assert {"test_cuda.py", "test_device_runs.py"} <= names and Path(__file__).name not in names, names
    passed = marked.told(0, "....\n12 passed, 90 deselected in 5.1s\n", "")
    assert passed == {"ok": True, "tests": {"passed": 12, "deselected": 90}}
    failed = marked.told(1, "FAILED tests/test_x.py::test_y - assert 1 == 2\n1 failed, 3 passed in 2.00s\n", "")
    assert failed["why"] == "FAILED tests/test_x.py::test_y - assert 1 == 2" and failed["tests"]["failed"] == 1, failed
    skipped = marked.told(0, "SKIPPED [2] tests/test_x.py:1: no CUDA device\n2 skipped in 1.00s\n", "")
    assert skipped["ok"] is None and "no CUDA device" in skipped["skipped"], skipped
    broken = marked.told(4, "", "ERROR: unknown option\n")
    assert broken == {"ok": False, "why": "exit code 4: ERROR: unknown option", "tests": {}}


def test_the_facts_of_a_machine_are_read() -> None:
    """What a result was seen on: nothing raises for what is missing."""
    from benchmarks.gpu_check import facts

    host = facts.host()
    assert host["cores"] >= 1 and host["host_memory_bytes"] > 0 and host["commit"], host
    assert facts.packages()["numpy"] and facts.storage().keys() == {"kvikio", "libcufile", "nvidia_fs", "udev"}
    assert bool(facts.unusable()) != torch.cuda.is_available()
