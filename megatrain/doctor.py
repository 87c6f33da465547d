"""`megatrain doctor`: can this machine train, what will be used, and what to do where something is missing.

Scope: the judgement of each fact (ok, warn, fail), the trials that are worth making, the table and the JSON object.
Not here: finding the facts (`environment.py`), trials in a child process (`probes.py`), rates (`measure.py`), the
arithmetic of locked memory (`tiering/pinning.py`).
"""

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.environment import PIN_LIMIT, DirectStorage, Facts, Package
from megatrain.errors import UserError
from megatrain.probes import Outcome, run_probe
from megatrain.sizes import format_count, format_size
from tiering.costs import durable_bytes
from tiering.drive import drive_facts
from tiering.engine import Extent
from tiering.errors import BudgetError, TieringError
from tiering.pinning import UNPROBED_RING_BYTES, PinFacts, Pinned, is_wsl, pin_budget, pinned, refuse_pinning
from tiering.place import check_place, folder_beside, free_bytes
from tiering.posix import PosixEngine
from tiering.workload import PAGE

State = Literal["ok", "warn", "fail"]
Probe = Callable[[Sequence[str]], Outcome]
MiB = 1 << 20
RING = (8 * MiB,) * 8
"""The widest ring of tiles that is usual: what has to be locked where nothing else is asked for."""
MOST_BUFFERS = 100_000
SMALL_SHM = 256 * MiB
SMALL_ROOM = 1 << 30
SMALL_MEMORY = 1 << 30
_BUFFERS = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<size>.+)", re.IGNORECASE)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: what was looked at, how it stands, what was found, and what to do (empty: nothing)."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Nothing that a run needs is broken."""
        return all(check.state != "fail" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "checks": [asdict(check) for check in self.checks]}

    def render(self, console: Console) -> None:
        table = Table("check", "state", "found", "what to do", title_justify="left")
        for check in self.checks:
            state = Text(check.state, style=_COLOURS[check.state])
            table.add_row(Text(check.name), state, Text(check.found), Text(check.fix))
        console.print(table)
        counts = {state: sum(check.state == state for check in self.checks) for state in ("ok", "warn", "fail")}
        console.print(", ".join(f"{count} {state}" for state, count in counts.items()), highlight=False)


def parse_buffers(text: str) -> list[int]:
    """Bytes of each buffer: `64MiB` is one, `4x1GiB` are four. Raises UserError."""
    from megatrain.console import size_option

    match = _BUFFERS.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--pin {text!r} is no size. Fix: --pin 64MiB or --pin 4x1GiB")
    count = int(match["count"] or 1)
    if not 1 <= count <= MOST_BUFFERS:
        raise UserError(f"--pin {text}: {count} buffers; from 1 to {MOST_BUFFERS} can be asked for. Fix: another count")
    return [size_option("--pin", match["size"])] * count


def examine(facts: Facts, path: Path | None, wanted: Sequence[int] = (), *, probe: Probe = run_probe) -> Report:
    """All checks. path: a folder for the NVME tier, None: no drive is looked at. wanted: bytes of each buffer to be
    locked (none: the usual ring of tiles). probe: runs a trial in a child process.
    """
    return Report(
        checks=(
            *(_package(package) for package in facts.packages),
            _cuda(facts),
            _direct_storage(facts, path, probe),
            _shm(facts.shm_bytes),
            _memory(facts),
            *_numa(facts),
            *_pinning(facts, wanted, probe),
            *(() if path is None else _place(path)),
        )
    )


def _package(package: Package) -> Check:
    name, version, wanted = package.name, package.version, package.wanted
    fix = f"install {name}{wanted}" if wanted else f"install {name}"
    if package.error:
        return Check(name=name, state="fail", found=f"{version or 'no version'}: {package.error}", fix=fix)
    if not version:
        return Check(name=name, state="fail", found="not installed", fix=fix)
    if not meets(version, wanted):
        return Check(name=name, state="fail", found=f"{version}, wanted {wanted}", fix=fix)
    return Check(name=name, state="ok", found=version)


def meets(version: str, wanted: str) -> bool:
    """Is a version within bounds such as `<3,>=2.13`? Only `<` and `>=` are understood; other bounds are let pass.

    >>> meets("2.13.0+cpu", "<3,>=2.13"), meets("2.9.1", "<3,>=2.13"), meets("3.0", "<3,>=2.13")
    (True, False, False)
    """
    have = _numbers(version)
    for bound in wanted.replace(" ", "").split(","):
        if bound.startswith(">=") and have < _numbers(bound[2:]):
            return False
        if bound.startswith("<") and not bound.startswith("<=") and have >= _numbers(bound[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _cuda(facts: Facts) -> Check:
    cuda = facts.cuda
    if cuda.device:
        return Check(name="CUDA device", state="ok", found=cuda.device)
    if cuda.card:
        fix = "a build of torch for CUDA, and a driver that is new enough for it"
        return Check(name="CUDA device", state="warn", found=f"there is a card, but {cuda.why}", fix=fix)
    return Check(name="CUDA device", state="ok", found=f"none ({cuda.why}); the CPU computes")


def storage_reasons(storage: DirectStorage, release: str) -> list[tuple[str, str]]:
    """What keeps GPUDirect Storage from working, each with what to do; empty: nothing that is known.

    Source: KvikIO's documentation of its compatibility mode (libcufile, /run/udev, WSL).
    """
    every = (
        (storage.kvikio, "kvikio is not installed", "pip install 'megatrain[gds]'"),
        (storage.libcuda, "libcuda.so.1 is missing", "install the NVIDIA driver, or start the container with its GPU"),
        (storage.libcufile, "libcufile is missing", "install cuFile (GPUDirect Storage) of the CUDA toolkit"),
        (storage.udev, "/run/udev is absent", "in a container: --volume /run/udev:/run/udev:ro"),
        (not is_wsl(release), "the kernel is that of WSL", "a Linux of its own: WSL has no GPUDirect Storage"),
    )
    return [(reason, fix) for holds, reason, fix in every if not holds]


def _direct_storage(facts: Facts, path: Path | None, probe: Probe) -> Check:
    storage = facts.storage
    reasons = storage_reasons(storage, facts.release)
    mode = "posix direct I/O"
    if storage.kvikio and storage.libcuda:
        trial = probe(["kvikio", str(path or tempfile.gettempdir())])
        if not trial.ok:
            reasons.append((f"a probe transfer failed: {trial.why}", "a kvikio that fits the driver"))
        else:
            direct = trial.path == "gds" if trial.path in ("gds", "compat") else not reasons
            mode = "kvikio with GPUDirect Storage" if direct else "kvikio, in its compatibility mode"
            mode += f" ({trial.why})"
    if not reasons:
        return Check(name="GPUDirect Storage", state="ok", found=f"mode used: {mode}")
    found = f"{'; '.join(reason for reason, _ in reasons)}. Mode used: {mode}"
    if not facts.cuda.device:  # without a GPU there is nothing to gain from it
        return Check(name="GPUDirect Storage", state="ok", found=found)
    return Check(name="GPUDirect Storage", state="warn", found=found, fix="; ".join(fix for _, fix in reasons))


def _shm(nbytes: int | None) -> Check:
    if nbytes is None:
        found, fix = "there is none", "mount a tmpfs at /dev/shm where other programs need it; megatrain does not"
        return Check(name="/dev/shm", state="warn", found=found, fix=fix)
    if nbytes >= SMALL_SHM:
        return Check(name="/dev/shm", state="ok", found=format_size(nbytes))
    return Check(
        name="/dev/shm",
        state="warn",
        found=f"{format_size(nbytes)}: too little for worker processes that hand over tensors",
        fix="megatrain itself reads data in one process (0 workers) and is not bound by it; for other loaders: "
        "0 workers, or a container with --shm-size 1g",
    )


def _memory(facts: Facts) -> Check:
    version = {"memory.max": " (v2)", "memory.limit_in_bytes": " (v1)"}.get(Path(facts.memory_why).name, "")
    found = f"{format_size(facts.memory_bytes)}, set by {facts.memory_why}{version}"
    if facts.memory_bytes < SMALL_MEMORY:
        fix = f"more memory: the libraries alone take some hundred MiB of these {facts.memory_bytes} bytes"
        return Check(name="memory", state="warn", found=found, fix=fix)
    return Check(name="memory", state="ok", found=f"{found}; {format_size(facts.available_bytes)} free now")


def _numa(facts: Facts) -> Iterator[Check]:
    """Only where memory is on more than one node."""
    if len(facts.nodes) < 2:
        return
    each = ", ".join(
        f"node {node.number} {format_size(node.memory_bytes)}{'' if node.has_cpus else ' without processors, not used'}"
        for node in facts.nodes
    )
    if not facts.cuda.device:
        yield Check(name="NUMA nodes", state="ok", found=f"{each}; memory comes from where it is first touched")
        return
    near = "not known" if facts.device_node is None else f"node {facts.device_node}"
    found = f"{each}; the GPU: {near}"
    if facts.device_node is None:
        fix = "nothing for a virtual machine; otherwise a firmware that tells the node of PCI devices"
        yield Check(name="NUMA nodes", state="warn", found=found, fix=fix)
        return
    yield Check(name="NUMA nodes", state="ok", found=found)


def _pinning(facts: Facts, wanted: Sequence[int], probe: Probe) -> Iterator[Check]:
    buffers = pinned(wanted or RING, "exact")
    yield _mlock(facts, buffers)
    before = facts.pin_facts()
    locks = pin_budget(before, None if before.has_cuda else "mlock")
    # Where the budget is known, a little shows that locking works; where it is not, only all of it does.
    most = facts.available_bytes // 4 if locks.nbytes is None else min(locks.nbytes, UNPROBED_RING_BYTES)
    nbytes = min(buffers.locked_bytes, most) // PAGE * PAGE
    if not nbytes:
        yield Check(name="pin probe", state="ok", found=f"not made: nothing may be locked ({locks.why})")
        yield _pinned_memory(facts, before, wanted, refused="")
        return
    trial = probe(["cuda" if before.has_cuda else "mlock", str(nbytes)])
    if trial.ok:
        yield Check(name="pin probe", state="ok", found=f"{trial.why} worked, in a child process")
    else:
        fix = "nothing else is hurt: it was made in a child process, and memory that is not locked is used"
        yield Check(name="pin probe", state="warn", found=trial.why, fix=fix)
    yield _pinned_memory(
        facts, facts.pin_facts(nbytes if trial.ok else 0), wanted, refused="" if trial.ok else trial.why
    )


def _mlock(facts: Facts, buffers: Pinned) -> Check:
    limit = "no limit" if facts.memlock_bytes is None else format_size(facts.memlock_bytes)
    used = "; not the path that is used here"
    try:
        refuse_pinning(facts.pin_facts(), buffers, "mlock")
    except BudgetError as error:
        found, fix = _told(error)
        return Check(name="RLIMIT_MEMLOCK", state="ok", found=f"{limit}{used}; {found}", fix=f"only for mlock: {fix}")
    return Check(name="RLIMIT_MEMLOCK", state="ok", found=f"{limit}{used}")


def _pinned_memory(facts: Facts, pin: PinFacts, wanted: Sequence[int], refused: str) -> Check:
    """refused: why a trial could not lock. Buffers that a person asked for and cannot get are a failure."""
    exact, own = pinned(wanted or RING, "exact"), pinned(wanted or RING, "torch allocator")
    if refused:
        pin = replace(pin, has_cuda=False)
    budget = pin_budget(pin)
    sums = (
        f"asked for {format_size(exact.asked_bytes)} ({exact.asked_bytes} bytes), locked "
        f"{format_size(exact.locked_bytes if budget.path != 'pageable' else 0)}; torch's own allocator would lock "
        f"{format_size(own.locked_bytes)}"
    )
    try:
        refuse_pinning(pin, exact)
    except BudgetError as error:
        found, fix = _told(error)
        state: State = "fail" if wanted else "warn"
        fix = fix if budget.path == "pageable" else f"{fix} ({PIN_LIMIT}=SIZE)"
        return Check(name="pinned memory", state=state, found=f"{found}; {sums}", fix=fix)
    if budget.path == "pageable":
        why = f"a trial could not lock: {refused}" if refused else f"no accelerator ({facts.cuda.why})"
        fix = "nothing for a run on the CPU; locked memory needs a CUDA device"
        return Check(name="pinned memory", state="warn", found=f"pageable: {why}; {sums}", fix=fix)
    most = "unknown, must probe" if budget.nbytes is None else format_size(budget.nbytes)
    found = f"{budget.path}; budget {most} ({budget.why}), ring at most {format_size(budget.ring_bytes)}; {sums}"
    return Check(name="pinned memory", state="ok", found=found)


def _told(error: TieringError) -> tuple[str, str]:
    """A message and its remedy."""
    found, _, fix = str(error).partition("Fix: ")
    return found.strip().rstrip("."), fix.strip().rstrip(".")


def _place(path: Path) -> Iterator[Check]:
    """Can the folder hold the NVME tier? Nothing stays there."""
    try:
        check_place(path)
        beside = folder_beside(path)
    except TieringError as error:
        found, fix = _told(error)
        yield Check(name="path", state="fail", found=found, fix=fix)
        return
    drive = drive_facts(beside)
    model = f" ({drive.model})" if drive.model else ""
    yield Check(name="path", state="ok", found=f"{path} on {drive.fs_type} at {drive.mount_point}{model}")
    yield _room(path)
    yield _direct_io(beside)


def _room(path: Path) -> Check:
    free = free_bytes(path)
    found = f"{format_size(free)} free: two copies of the state of {format_count(free // (2 * durable_bytes(1)))}"
    if free < SMALL_ROOM:
        fix = "make room, or name a folder on a larger drive"
        return Check(name="room", state="warn", found=f"{found} parameters", fix=fix)
    return Check(name="room", state="ok", found=f"{found} parameters")


def _direct_io(folder: Path) -> Check:
    """A real transfer there and back."""
    data = os.urandom(16 * PAGE)
    back = bytearray(len(data))
    name = "direct I/O"
    try:
        with warnings.catch_warnings(record=True) as said, PosixEngine(threads=1) as engine:
            warnings.simplefilter("always")
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
                extent = Extent(path=Path(file.name), offset=0, nbytes=len(data), block="probe")
                engine.submit_write(extent, memoryview(bytearray(data))).result()  # waits for the probe's write
                engine.sync([extent.path])
                engine.submit_read(extent, memoryview(back)).result()  # waits for the probe's read
    except (TieringError, OSError) as error:
        found, fix = _told(error) if isinstance(error, TieringError) else (str(error), "name another folder")
        return Check(name=name, state="fail", found=found, fix=fix)
    if back != data:
        return Check(name=name, state="fail", found="other bytes came back than were written", fix="check the drive")
    refusals = [str(warning.message) for warning in said if "direct I/O" in str(warning.message)]
    if refusals:
        return Check(
            name=name, state="warn", found=refusals[0].partition(": ")[2], fix="a folder on ext4, xfs or btrfs"
        )
    return Check(name=name, state="ok", found=f"{len(data)} bytes written and read back past the page cache")
