"""`megatrain doctor`: what is found, what is used, what to do; trials that crash hurt nobody.

Scope: `megatrain/doctor.py`, `environment.py`, `probes.py`, and planning beside a broken optional library. Facts are
made up; the drive and the child processes are real.
Not here: sums of locked memory (`test_pinning.py`), the choice of an engine (`test_choose_engine.py`).
"""

import doctest
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunFile

from megatrain import doctor
from megatrain.doctor import Check, Report, examine, meets, parse_buffers, storage_reasons
from megatrain.environment import PIN_LIMIT, Cuda, DirectStorage, Facts, Package, gather
from megatrain.errors import UserError
from megatrain.probes import Outcome, run_probe
from tiering.arena import Arena
from tiering.choose import choose_engine

MiB = 1 << 20
GiB = 1 << 30
ROOT = Path(__file__).parent.parent
WSL = "5.15.167.4-microsoft-standard-WSL2"
GPU = Cuda(device="RTX 4090", card=True)
ALL_THERE = DirectStorage(kvikio=True, libcuda=True, libcufile=True, udev=True)


def facts(**changes: Any) -> Facts:
    """A healthy machine with a GPU."""
    return Facts(
        **(
            {
                "packages": (Package(name="torch", version="2.13.0", wanted="<3,>=2.13"),),
                "cuda": GPU,
                "storage": ALL_THERE,
                "release": "6.8.0-generic",
                "shm_bytes": 8 * GiB,
                "memory_bytes": 64 * GiB,
                "memory_why": "the machine's RAM",
                "available_bytes": 60 * GiB,
                "memlock_bytes": 8 * MiB,
                "pin_limit_bytes": None,
            }
            | changes
        )
    )


def works(arguments: Sequence[str]) -> Outcome:
    return Outcome(ok=True, why=" ".join(arguments))


def breaks(arguments: Sequence[str]) -> Outcome:
    return Outcome(ok=False, why=f"{arguments[0]}: ended by SIGSEGV")


def no_trial(arguments: Sequence[str]) -> Outcome:
    pytest.fail(f"a trial was made: {arguments}")


def check(report: Report, name: str) -> Check:
    found = [check for check in report.checks if check.name == name]
    assert len(found) == 1, f"{len(found)} lines named {name}: {report.checks}"
    return found[0]


def states(report: Report) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


def test_a_healthy_machine_has_nothing_to_do(tmp_path: Path) -> None:
    """P6: every line ok, on a real folder of this machine, which is left as it was."""
    report = examine(facts(), None, probe=works)
    assert set(states(report).values()) == {"ok"} and report.healthy, f"{report.checks}"
    examine(facts(), tmp_path / "not" / "yet", probe=works)
    assert list(tmp_path.iterdir()) == []


def test_without_an_accelerator_memory_is_pageable_with_one_warning() -> None:
    """EN-01: torch refuses to lock in two ways, `is_pinned` says False; the doctor says pageable, once."""
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(RuntimeError):
        torch.empty(4, pin_memory=True)
    with pytest.raises(RuntimeError):
        torch.empty(4).pin_memory()
    with Arena(4096) as arena:
        assert arena.tensor(0, 4096).is_pinned() is False
    report = examine(facts(cuda=Cuda(why="torch is built without CUDA")), None, probe=works)
    warned = [check for check in report.checks if check.state != "ok"]
    assert [check.name for check in warned] == ["pinned memory"] and report.healthy, f"{warned}"
    assert "pageable" in warned[0].found and "torch is built without CUDA" in warned[0].found, warned[0].found


REASONS = [
    ({"storage": replace(ALL_THERE, kvikio=False)}, "kvikio is not installed", "posix direct I/O"),
    ({"storage": replace(ALL_THERE, libcuda=False)}, "libcuda.so.1 is missing", "posix direct I/O"),
    ({"storage": replace(ALL_THERE, libcufile=False)}, "libcufile is missing", "kvikio, in its compatibility mode"),
    ({"storage": replace(ALL_THERE, udev=False)}, "/run/udev is absent", "kvikio, in its compatibility mode"),
    ({"release": WSL}, "the kernel is that of WSL", "kvikio, in its compatibility mode"),
]


@pytest.mark.parametrize(("changes", "reason", "mode"), REASONS, ids=[row[1] for row in REASONS])
def test_the_reason_without_direct_storage_is_named_with_the_mode_used(
    changes: dict[str, Any], reason: str, mode: str
) -> None:
    """EN-02: one cause at a time, and no other is named."""
    found = check(examine(facts(**changes), None, probe=works), "GPUDirect Storage")
    assert found.state == "warn" and found.fix, f"{found}"
    assert found.found.startswith(f"{reason}. Mode used: {mode}"), found.found
    assert ("(kvikio " in found.found) is ("kvikio," in mode), "what the trial saw stands beside the mode"


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("gds", "kvikio with GPUDirect Storage"),
        ("compat", "kvikio, in its compatibility mode"),
        ("uncounted", "kvikio with GPUDirect Storage"),
    ],
)
def test_the_path_that_a_trial_took_decides_the_mode_told(path: str, mode: str) -> None:
    """EN-02: everything is in its place, and bytes go through RAM all the same: a transfer knows better than files."""
    seen = "RAM: a probe transfer worked; device memory: it works"
    report = examine(facts(), None, probe=lambda arguments: Outcome(ok=True, why=seen, path=path))
    found = check(report, "GPUDirect Storage")
    assert found.found == f"mode used: {mode} ({seen})", found.found


def test_every_reason_that_applies_is_named() -> None:
    """EN-02: a bare container on WSL has all of them, and no trial is made that cannot work."""
    bare = DirectStorage(kvikio=False, libcuda=False, libcufile=False, udev=False)
    assert len(storage_reasons(bare, WSL)) == 5, storage_reasons(bare, WSL)

    def only_locks(arguments: Sequence[str]) -> Outcome:
        return works(arguments) if arguments[0] != "kvikio" else no_trial(arguments)

    found = check(examine(facts(storage=bare, release=WSL), None, probe=only_locks), "GPUDirect Storage")
    assert all(reason in found.found for reason, _ in storage_reasons(bare, WSL)), found.found


def test_a_transfer_that_fails_is_a_reason_too() -> None:
    """EN-02: everything is there, and it still does not work."""
    found = check(examine(facts(), None, probe=breaks), "GPUDirect Storage")
    assert found.state == "warn" and "a probe transfer failed: kvikio: ended by SIGSEGV" in found.found, found.found
    assert found.found.endswith("Mode used: posix direct I/O"), found.found


@pytest.mark.parametrize(("nbytes", "state"), [(64 * MiB, "warn"), (None, "warn"), (8 * GiB, "ok")])
def test_a_small_shm_is_warned_of(nbytes: int | None, state: str) -> None:
    """EN-04: 64 MiB is what containers have; nothing of a run uses it, so nothing fails."""
    report = examine(facts(shm_bytes=nbytes), None, probe=works)
    found = check(report, "/dev/shm")
    assert found.state == state and report.healthy, f"{found}"
    assert nbytes != 64 * MiB or ("64.00 MiB" in found.found and "0 workers" in found.fix), f"{found}"


CHILDREN = {
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "exit": "import sys; print('no driver', file=sys.stderr); sys.exit(3)",
    "hang": "import time; time.sleep(60)",
    "noise": "print('hello')",
    "refusal": "import json; print(json.dumps({'ok': False, 'why': 'CUDA error 2'}))",
}
SAID = {
    "crash": "ended by SIGSEGV",
    "exit": "no driver",
    "hang": "no answer within 0.5 s",
    "noise": "exit code 0 and no word",
    "refusal": "CUDA error 2",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_trial_that_goes_wrong_hurts_only_its_own_process(name: str) -> None:
    """EN-05: crash, error, hang, nonsense and a plain no each become one line, and the parent goes on working."""
    timeout_s = 0.5 if name == "hang" else 30.0
    program = (sys.executable, "-c", CHILDREN[name])
    found = run_probe(["cuda", "4096"], program=program, timeout_s=timeout_s)
    assert found == Outcome(ok=False, why=SAID[name]), f"{found}, wanted {SAID[name]!r}"
    report = examine(facts(), None, probe=lambda arguments: run_probe(arguments, program=program, timeout_s=timeout_s))
    assert report.healthy and check(report, "pin probe").state == "warn", f"{report.checks}"
    pinned = check(report, "pinned memory")
    assert pinned.found.startswith(f"pageable: a trial could not lock: {SAID[name]}"), pinned.found
    assert int(torch.ones(3).sum()) == 3, "the parent no longer computes"


def test_a_real_trial_locks_memory_in_a_child_process() -> None:
    """EN-05: one page with `mlock`; none of it is locked here."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 4096:
        pytest.skip("not even a page may be locked")
    found = run_probe(["mlock", "4096"])
    assert found == Outcome(ok=True, why="mlock of 4096 bytes"), f"{found}"
    refused = run_probe(["mlock", str(1 << 50)])
    assert not refused.ok and refused.why, f"{refused}"


def test_a_run_on_the_gpu_is_not_bound_by_the_limit_of_mlock() -> None:
    """PL-09: the path in use is named; the other one is refused with its remedy, which stops nothing."""
    report = examine(facts(), None, [64 * MiB], probe=works)
    pinned, limit = check(report, "pinned memory"), check(report, "RLIMIT_MEMLOCK")
    assert report.healthy and pinned.state == "ok" and pinned.found.startswith("CUDA-registered"), f"{pinned}"
    assert f"RLIMIT_MEMLOCK allows {8 * MiB} bytes" in limit.found and "ulimit -l 65536" in limit.fix, f"{limit}"


def test_asked_and_locked_bytes_are_both_shown() -> None:
    """PL-01: 129 MiB take 129 MiB here and 256 MiB with torch's own allocator."""
    found = check(examine(facts(), None, [129 * MiB], probe=works), "pinned memory").found
    assert f"asked for 129.00 MiB ({129 * MiB} bytes), locked 129.00 MiB" in found, found
    assert "torch's own allocator would lock 256.00 MiB" in found, found


def test_buffers_that_a_host_cannot_hold_are_a_failure() -> None:
    """PL-06: 4 x 1e9 elements of FP32 on 16 GB are refused, 5 x 1e8 of 2 bytes are not."""
    small = facts(memory_bytes=16 * 10**9, available_bytes=15 * 10**9)
    for cuda in (GPU, Cuda(why="no GPU")):
        refused = examine(replace(small, cuda=cuda), None, parse_buffers("4x4e9"), probe=works)
        found = check(refused, "pinned memory")
        assert not refused.healthy and "16000000000 bytes" in found.found and found.fix, f"{found}"
        fits = examine(replace(small, cuda=cuda), None, parse_buffers("5x2e8"), probe=works)
        assert fits.healthy and "1000000000 bytes" in check(fits, "pinned memory").found, f"{fits.checks}"


def test_on_wsl_only_a_trial_says_how_much_may_be_locked() -> None:
    """PL-10: without one the budget is unknown; with one it is what the trial locked; the variable wins."""
    asked: list[Sequence[str]] = []

    def noted(arguments: Sequence[str]) -> Outcome:
        asked.append(arguments)
        return works(arguments)

    wsl = facts(release=WSL)
    found = check(examine(wsl, None, [GiB], probe=noted), "pinned memory")
    assert ["cuda", str(GiB)] in asked, asked
    assert found.state == "ok" and "budget 1.00 GiB (WSL kernel: as much as a probe could lock)" in found.found, found
    tight = replace(wsl, available_bytes=GiB)  # the trial is a quarter of what is free, at most
    assert check(examine(tight, None, [GiB], probe=works), "pinned memory").state == "fail"
    limited = examine(replace(wsl, pin_limit_bytes=64 * MiB), None, [GiB], probe=works)
    told = check(limited, "pinned memory")
    assert told.state == "fail" and f"at most {64 * MiB} may be" in told.found and PIN_LIMIT in told.fix, f"{told}"


def test_versions_that_a_run_cannot_use_are_failures() -> None:
    """P6: missing, too old, and one whose native library does not load."""
    packages = (
        Package(name="torch", version="2.9.1", wanted="<3,>=2.13"),
        Package(name="transformers", version=""),
        Package(name="other", version="1.0", error="OSError: libgomp.so.1: cannot open shared object file"),
    )
    report = examine(facts(packages=packages), None, probe=works)
    found = [check(report, package.name) for package in packages]
    assert not report.healthy and [one.state for one in found] == ["fail"] * 3, f"{found}"
    assert found[0].fix == "install torch<3,>=2.13" and "libgomp" in found[2].found, f"{found}"
    assert meets("2.13.0+cpu", ">=2.13.0,<3") and not meets("3.0.1", "<3"), "bounds are read in both orders"
    assert doctest.testmod(doctor).failed == 0


@pytest.mark.parametrize(
    ("why", "version"),
    [
        ("cgroup /sys/fs/cgroup/a/memory.max", "(v2)"),
        ("cgroup /sys/fs/cgroup/memory/memory.limit_in_bytes", "(v1)"),
        ("the machine's RAM", "RAM;"),
    ],
)
def test_what_limits_memory_is_named(why: str, version: str) -> None:
    """P2: the bytes, and the file that sets them."""
    found = check(examine(facts(memory_why=why), None, probe=works), "memory").found
    assert found.startswith(f"64.00 GiB, set by {why}") and version in found, found


def test_a_path_that_can_hold_the_tier_is_tried_for_real(tmp_path: Path) -> None:
    """IO-16: file system, room and a transfer; nothing is left behind."""
    report = examine(facts(), tmp_path / "nvme", probe=works)
    assert check(report, "path").state == "ok" and str(tmp_path / "nvme") in check(report, "path").found
    assert "free" in check(report, "room").found, check(report, "room").found
    assert check(report, "direct I/O").state in ("ok", "warn") and report.healthy, f"{report.checks}"
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used_is_a_failure(tmp_path: Path) -> None:
    """IO-16: a file in the way; the folder's own words and remedy."""
    (tmp_path / "file").write_text("x")
    report = examine(facts(), tmp_path / "file" / "nvme", probe=works)
    found = check(report, "path")
    assert not report.healthy and "is a file, not a folder" in found.found and "name a folder" in found.fix, f"{found}"


def test_a_drive_that_refuses_direct_io_is_warned_of_and_one_that_fails_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IO-16: the kernel's answers are injected."""
    real_open = os.open

    def no_direct(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", no_direct)
    found = check(examine(facts(), tmp_path, probe=works), "direct I/O")
    assert found.state == "warn" and "refuses direct I/O" in found.found, f"{found}"
    monkeypatch.setattr(os, "open", real_open)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    report = examine(facts(), tmp_path, probe=works)
    found = check(report, "direct I/O")
    assert found.state == "fail" and not report.healthy and "Input/output error" in found.found, f"{found}"


def made_up_root(root: Path, *, release: str, capabilities: str, udev: bool) -> Path:
    for name, text in (
        ("proc/sys/kernel/osrelease", release + "\n"),
        ("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if udev:
        (root / "run" / "udev").mkdir(parents=True)
    return root


def test_facts_come_from_the_places_where_the_system_tells_them(tmp_path: Path) -> None:
    """EN-02, PL-09, PL-10: a made-up root, limit and environment."""
    root = made_up_root(tmp_path / "a", release=WSL, capabilities="0000000000000000", udev=True)
    found = gather(root=root, environ={PIN_LIMIT: "1GiB"}, loads=lambda name: "cuda" in name, memlock=lambda: 8 * MiB)
    assert (found.release, found.memlock_bytes, found.pin_limit_bytes) == (WSL, 8 * MiB, GiB), f"{found}"
    assert (found.storage.libcuda, found.storage.libcufile, found.storage.udev) == (True, False, True), f"{found}"
    assert found.shm_bytes is None and found.memory_bytes > 0 and found.memory_why, f"{found}"
    assert [package.name for package in found.packages] == ["python", "torch", "transformers"]
    assert all(package.version and package.wanted and not package.error for package in found.packages), f"{found}"
    able = made_up_root(tmp_path / "b", release="6.8.0", capabilities="0000000000004000", udev=False)
    free = gather(root=able, environ={}, memlock=lambda: 8 * MiB)
    assert (free.memlock_bytes, free.pin_limit_bytes, free.storage.udev) == (None, None, False), f"{free}"
    assert gather(root=root, environ={}, memlock=lambda: resource.RLIM_INFINITY).memlock_bytes is None
    with pytest.raises(UserError, match=PIN_LIMIT):
        gather(root=root, environ={PIN_LIMIT: "banana"})


def test_buffers_are_read_as_people_type_them() -> None:
    """CF-06: one size, or a count of them; what is neither is refused by name."""
    assert parse_buffers("64MiB") == [64 * MiB] and parse_buffers("5 x 1e8") == [10**8] * 5
    for text in ("", "x", "0x4KiB", "4x", "-1", "1000000x1MiB", "4xfoo"):
        with pytest.raises(UserError, match="--pin"):
            parse_buffers(text)


def megatrain(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "megatrain", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, "COLUMNS": "160", **environ}
    )


def test_the_command_prints_one_object_and_its_exit_code_says_if_a_run_can_work(tmp_path: Path) -> None:
    """P6: the same checks as a table and as JSON; exit code 1 where something that a run needs is broken."""
    done = megatrain("doctor", "--path", tmp_path / "nvme", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] is True and {check["state"] for check in found["checks"]} <= {"ok", "warn"}, found
    names = [check["name"] for check in found["checks"]]
    assert names[0] == "python" and {"CUDA device", "GPUDirect Storage", "pin probe", "direct I/O"} <= set(names), names
    assert list(tmp_path.iterdir()) == []
    broken = megatrain("doctor", "--path", "/etc/passwd")
    assert broken.returncode == 1 and "is a file, not a folder" in broken.stdout and "1 fail" in broken.stdout, broken
    assert megatrain("doctor", "--pin", "banana").returncode == 2


BROKEN = {
    "missing library": "raise OSError('libkvikio.so: cannot open shared object file')",
    "too old": "__version__ = '0.1'",
    "crashes": "raise RuntimeError('driver too old')",
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.slow) for name in BROKEN])
def test_planning_and_the_doctor_need_no_optional_library(fault: str, tmp_path: Path, run_file: RunFile) -> None:
    """EN-06: kvikio as a package that breaks on import, or is of another age."""
    (tmp_path / "lib" / "kvikio").mkdir(parents=True)
    (tmp_path / "lib" / "kvikio" / "__init__.py").write_text(BROKEN[fault] + "\n")
    path = {"PYTHONPATH": str(tmp_path / "lib")}
    tierplan = "--model smollm2-135m --host-memory 2GiB --nvme (7.0,6.0) --tokens 512 --seq 512 --json"
    code = (
        "import sys; import megatrain.cli, tiering.choose, tiering.gds; from megatrain.tierplan import command; "
        "assert 'kvikio' not in sys.modules; sys.argv = ['tierplan', *sys.argv[1:]]; command.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *tierplan.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, **path},
    )
    assert done.returncode == 0 and json.loads(done.stdout), done.stdout + done.stderr
    for command in (("plan", run_file({"tiers.host_memory": "4MiB"}), "--json"), ("doctor", "--json")):
        done = megatrain(*command, **path)
        assert done.returncode == 0 and json.loads(done.stdout), f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("fault", ["too old", "crashes"])
def test_an_engine_is_chosen_beside_a_broken_optional_library(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EN-06: `auto` falls back to posix with the reason, as it does where kvikio is not there."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "kvikio.py").write_text(BROKEN[fault] + "\n")
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    try:
        engine, line = choose_engine("auto", tmp_path)
    finally:
        sys.modules.pop("kvikio", None)
    with engine:
        assert engine.name == "posix" and "kvikio cannot work here" in line, line
