"""P2: what cannot work is refused early, cheaply, and for the right reason.

Scope: early refusals, memory limits of cgroups.
Not here: the arithmetic that they use (`test_shapes.py`), the plan's own refusal (`test_plan.py`), whole commands
(`test_cli.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RunFile
from models import MODELS

from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.fit import host_budget, refuse_budget, refuse_early
from megatrain.programs import UnitSize
from tiering import gds, limits
from tiering.errors import BudgetError, EngineError


def test_a_small_budget_is_refused_before_torch_is_even_imported(run_file: RunFile, tmp_path: Path) -> None:
    """P2: in a second, before weights are made, with the sum line by line and the smallest budget that works."""
    path = run_file({"model.config": MODELS["llama"], "tiers.host_memory": "64KiB"})
    code = (
        "import sys; from megatrain.cli import main; sys.argv = ['megatrain', 'train', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'zarr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == "[]", done.stdout
    assert "The least that works" in done.stderr
    assert "Fix: tiers.host_memory >= " in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_architecture_is_refused_by_its_real_sizes(run_file: RunFile) -> None:
    """P2: `arcee` is not in the arithmetic; the model's own sizes give the same kind of answer."""
    from megatrain.prepare import prepare

    config = {**MODELS["llama"], "model_type": "arcee"}
    run = load_run(run_file({"model.config": config, "tiers.host_memory": "64KiB"}))
    refuse_early(run)
    with pytest.raises(BudgetError, match="The least that works"):
        prepare(run)


def test_what_is_refused_before_anybody_knows_of_a_device_would_be_refused_with_one_too(run_file: RunFile) -> None:
    """P2: a device asks for no less of HOST with updates there, and for less with updates of its own."""
    units = [UnitSize(name=f"L{number}", nbytes=64 << 20, activation_bytes=256 << 20) for number in range(4)]

    def refused(place: str, has_device: bool | None, host_memory: str = "1MiB") -> float:
        changes = {"tiers.host_memory": host_memory, "tiers.resident": 0, "train.max_grad_norm": clip}
        run = load_run(run_file({**changes, "train.update_on": place}))
        with pytest.raises(BudgetError, match="HOST needs") as caught:
            refuse_budget(run, units, has_device=has_device)
        return float(str(caught.value).split()[2])

    for clip in (None, 1.0):
        alone, beside, there = refused("auto", False), refused("host", True), refused("device", True)
        assert alone <= beside and there <= beside, (clip, alone, beside, there)
        assert (refused("auto", None), refused("auto", True)) == (alone, beside), "the sum with updates on the host"
        least = {"tiers.host_memory": f"{int(min(alone, there)) + 1}MiB", "train.max_grad_norm": clip}
        refuse_budget(load_run(run_file({**least, "tiers.resident": 0})), units, has_device=None)


def test_more_memory_than_the_machine_has_is_refused_at_once(run_file: RunFile) -> None:
    """CF-04, CF-05."""
    with pytest.raises(UserError, match="more than"):
        refuse_early(load_run(run_file({"tiers.host_memory": "900TiB"})))


def test_an_engine_that_cannot_work_is_refused_before_anything_is_written(run_file: RunFile, tmp_path: Path) -> None:
    """IO-01: kvikio asked for by name; the message names the one that can work."""
    if gds.probe(tmp_path) is None:
        pytest.skip("kvikio works here")
    with pytest.raises(EngineError, match="posix"):
        refuse_early(load_run(run_file({"tiers.engine": "kvikio"})))
    assert not (tmp_path / "run").exists()


def test_the_smallest_limit_on_the_cgroup_path_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P2: v2 and v1, and a parent's limit below its child's."""
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    of = tmp_path / "self"
    for controllers, root, name in (
        ("", tmp_path, "memory.max"),
        ("memory", tmp_path / "memory", "memory.limit_in_bytes"),
    ):
        (root / "a" / "b").mkdir(parents=True, exist_ok=True)
        (root / "a" / name).write_text("5000\n")
        (root / "a" / "b" / name).write_text("7000\n" if controllers else "max\n")
        of.write_text(f"3:cpu:/elsewhere\n0:{controllers}:/a/b\n")
        files = list(limits._limit_files(of))
        monkeypatch.setattr(limits, "_limit_files", lambda files=files: iter(files))
        assert limits.memory_limit() == (5000, f"cgroup {root / 'a' / name}")
        monkeypatch.undo()
        monkeypatch.setattr(limits, "CGROUP", tmp_path)


def test_the_budget_is_what_was_asked_for_or_half_of_what_is_free(run_file: RunFile) -> None:
    assert host_budget(load_run(run_file({"tiers.host_memory": "64MiB"}))) == 64 << 20
    limit, _ = limits.memory_limit()
    assert 0 < host_budget(load_run(run_file({"tiers.host_memory": "auto"}))) <= limit // 2


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.01, []), (1.0, ["Timing units of each kind: about 22.00 s"]), (9.0, [])]
)
def test_a_wait_for_the_trial_of_the_units_is_told(
    run_file: RunFile, known_machine: None, monkeypatch: pytest.MonkeyPatch, seconds: float, said: list[str]
) -> None:
    """Long work says so first; a trial that is short, or too long to be made, has nothing to say."""
    import megatrain.prepare

    monkeypatch.setattr(megatrain.prepare, "_kinds_s", lambda costs, hardware: seconds)
    told: list[str] = []
    megatrain.prepare.prepare(load_run(run_file(), ()), told.append)
    assert told == said
