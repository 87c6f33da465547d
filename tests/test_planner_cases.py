"""Conditions that real users of offloaded training ran into, and what the planner says to each.

Scope: sizes, refusals and the loss term by arithmetic alone; planned memory against that of real runs.
Not here: locked memory (`test_pinning.py`, `test_doctor.py`), what the planner promises in general (`test_plan.py`).
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from run_memory import measure_run
from transformers import AutoModelForCausalLM

from megatrain.catalog.estimate import LOSS_BYTES, head_cost
from megatrain.catalog.known_models import resolve_model
from megatrain.catalog.parts import parse_drives
from megatrain.catalog.shapes import parameters, unit_sizes
from megatrain.model import build, find_units, model_config
from megatrain.programs import UnitSize, training_workload
from megatrain.tierplan.question import Question, ShortageError, forecast, sized
from tiering.costs import state_bytes
from tiering.errors import BudgetError
from tiering.hardware import assumed_hardware
from tiering.plan import make_plan, refuse
from tiering.turns import Knobs
from tiering.workload import pages

MiB = 1 << 20
GiB = 1 << 30
ROOT = Path(__file__).parent.parent
L0: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def question(config: dict[str, Any], host_memory: int, **more: Any) -> Question:
    """A question to a machine without a GPU."""
    settings = {"tokens": 128, "seq_len": 64, "micro_batch": 1, **more}
    asked = Question(
        model="case", config=config, host_memory=host_memory, hardware=assumed_hardware(), drives=(), **settings
    )
    return asked.with_drives(parse_drives("(7.0,6.0)"))


@pytest.mark.parametrize(("tied", "count", "nbytes"), [(True, 6_224, 99_584), (False, 7_248, 115_968)])
def test_tied_weights_are_counted_once(tied: bool, count: int, nbytes: int) -> None:
    """PL-02: by arithmetic, by the units of the real model, and in the plan; a state dict has them twice."""
    config = L0 | {"tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(model_config(config))
    named = sum(tensor.numel() for tensor in model.state_dict().values())
    assert named == 7_248, f"the state dict names {named} elements"
    units = find_units(build(model_config(config)))
    found = (parameters(config), units.parameters, forecast(question(config, 2 * GiB)).parameters)
    assert found == (count,) * 3, f"by arithmetic, by units, in the plan: {found}, wanted {count}"
    assert state_bytes(count) == nbytes, f"{state_bytes(count)} bytes of state, wanted {nbytes}"


WIDE = L0 | {"vocab_size": 128_103, "hidden_size": 4_096, "num_attention_heads": 32, "num_key_value_heads": 32}
WIDE["tie_word_embeddings"] = True
TABLE_BYTES = 4 * 128_103 * 4_096
BUFFER_BYTES = 4 * 100_000_000


def wide_refusal() -> str:
    """What the planner says to a table that is five times its budget."""
    sizes = unit_sizes(WIDE)
    assert sizes is not None and sizes[0].nbytes == pages(TABLE_BYTES) == pages(2_098_839_552), f"{sizes}"
    with pytest.raises(BudgetError) as refused:
        refuse(training_workload(sizes, deferred=False), BUFFER_BYTES)
    return str(refused.value)


def test_a_tensor_wider_than_its_budget_is_refused_with_the_least_that_works() -> None:
    """PL-04: 128,103 x 4,096 elements, room for 100,000,000; from the config alone, and the advice holds."""
    said = wide_refusal()
    least = re.search(r"Fix: host_budget >= (\d+)MiB", said)
    assert least is not None and int(least[1]) * MiB >= TABLE_BYTES, said
    sizes = unit_sizes(WIDE)
    assert sizes is not None
    refuse(training_workload(sizes, deferred=False), int(least[1]) * MiB)
    with pytest.raises(ShortageError) as refused:
        forecast(question(WIDE, 1_600_000_000))
    shortage = refused.value
    assert shortage.tier == "HOST" and shortage.needed_bytes >= TABLE_BYTES, f"{shortage.needed_bytes}: {shortage}"
    enough = forecast(question(WIDE, shortage.needed_bytes))
    assert enough.plan.host_bytes >= TABLE_BYTES, f"{enough.plan.host_bytes} bytes of HOST for {TABLE_BYTES}"


def test_the_refusal_names_what_is_too_wide() -> None:
    """PL-04: the unit that no budget below its size can hold."""
    said = wide_refusal()
    assert "model.embed_tokens" in said, said


def test_an_update_is_cut_into_tiles_whatever_the_size_of_its_tensor() -> None:
    """PL-04: 524,709,888 elements of moments pass through a ring of 100,000,000 elements and less."""
    unit = UnitSize(name="model.embed_tokens", nbytes=pages(TABLE_BYTES))
    workload = training_workload([unit, UnitSize(name="lm_head", nbytes=0, borrows=(unit.name,))], deferred=False)
    plan = make_plan(workload, assumed_hardware(), 3 * unit.nbytes, 0.0)
    lines = {line.what: line.nbytes for line in plan.lines}
    assert plan.knobs.tile_bytes <= BUFFER_BYTES, f"tiles of {plan.knobs.tile_bytes} bytes, a buffer of {BUFFER_BYTES}"
    assert lines["tile ring"] <= 2 * BUFFER_BYTES * plan.knobs.ring, f"{lines}"
    assert lines["tile ring"] < unit.nbytes * 2, f"{lines}: both moments are staged whole"


@pytest.mark.parametrize("numel", [513_000, 513_024])
def test_bytes_are_planned_from_the_aligned_number_of_elements(numel: int) -> None:
    """PL-05: 513,000 FP32 elements are 513,024 (2,052,096 bytes) on the grid of 4096 bytes and on that of 1024."""
    aligned = pages(4 * numel)
    assert (aligned // 4, aligned) == (513_024, 2_052_096), f"{numel} elements: {aligned} bytes"
    assert aligned % 1024 == 0 and aligned - 1024 < 4 * 513_000, f"{aligned} is not the least on the grid of 1024"
    units = [UnitSize(name="embed", nbytes=aligned), UnitSize(name="head", nbytes=0, borrows=("embed",))]
    knobs = Knobs(lookahead=0, lag=0, tile_bytes=aligned, ring=1)
    workload = training_workload(units, deferred=False)
    plan = make_plan(workload, assumed_hardware(), 4 * aligned, 0.0, candidates=[knobs])
    # Weight, gradient and one tile of each moment; a tile is the whole block here.
    assert plan.host_bytes == 4 * aligned, f"an arena of {plan.host_bytes} bytes, wanted {4 * aligned}"
    with pytest.raises(BudgetError):
        make_plan(workload, assumed_hardware(), 4 * 4 * 513_000, 0.0, candidates=[knobs])


def test_staging_buffers_are_on_the_bill_and_refused_where_they_do_not_fit() -> None:
    """PL-06: four tiles of 1e9 FP32 elements are 16e9 bytes; on a host of 16e9 the plan is refused with that line."""
    tile = pages(4 * 10**9)
    units = [UnitSize(name="embed", nbytes=2 * tile), UnitSize(name="head", nbytes=0, borrows=("embed",))]
    workload = training_workload(units, deferred=False)

    def ring(nbytes: int) -> Knobs:
        return Knobs(lookahead=0, lag=0, tile_bytes=nbytes, ring=2)  # two tiles of each of both moments

    with pytest.raises(BudgetError) as refused:
        make_plan(workload, assumed_hardware(), 16 * 10**9, 0.0, candidates=[ring(tile)])
    row = re.search(r"tile ring +([\d.]+) MiB", str(refused.value))
    assert row is not None and float(row[1]) * MiB == pytest.approx(4 * tile, rel=1e-4), str(refused.value)
    small = pages(2 * 10**8)
    plan = make_plan(workload, assumed_hardware(), 20 * 10**9, 0.0, candidates=[ring(small)])
    lines = {line.what: line.nbytes for line in plan.lines}
    assert lines["tile ring"] == 4 * small, f"{lines}, wanted a ring of {4 * small}"


def test_logits_take_at_least_18_bytes_each_and_less_in_smaller_pieces() -> None:
    """PL-12: 32,768 tokens x 151,936 words; one tensor of them is 18.55 GiB, the loss about 83 GiB, a 32nd for 1,024
    tokens at a time.
    """
    tokens, words = 32_768, 151_936
    assert round(4 * tokens * words / GiB, 2) == 18.55
    whole, piece = (head_cost(64, words, count).workspace_bytes for count in (tokens, 1_024))
    assert LOSS_BYTES >= 18 and whole >= 18 * tokens * words > 83 * GiB, f"{whole} bytes"
    assert piece * 32 == whole, f"{piece} bytes for a 32nd, {whole} for all"
    config = L0 | {"vocab_size": words, "hidden_size": 64, "model_type": "qwen3", "head_dim": 32}
    settings = {"tokens": tokens, "seq_len": 1_024}
    planned = [
        {line.what: line.nbytes for line in sized(question(config, 200 * GiB, micro_batch=rows, **settings)).compute}
        for rows in (32, 1)
    ]
    loss = [lines["logits and loss of one micro-batch"] for lines in planned]
    assert loss[0] >= 18 * tokens * words and loss[1] * 32 == loss[0], f"{loss} bytes for 32 rows and for one"


def test_planning_makes_no_weights() -> None:
    """PL-04: 405B parameters in a fresh process that never takes a gigabyte; torch is not imported."""
    name, _ = resolve_model("llama-3.1-405b")
    code = (
        "import sys; from megatrain.tierplan import command\n"
        "try: command.main()\n"
        "except SystemExit as stopped: assert not stopped.code, stopped.code\n"
        # Not ru_maxrss: that of a child begins with what its parent had.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(peak.split()[1]) * 1024, 'torch' in sys.modules, file=sys.stderr)"
    )
    options = f"--model {name} --host-memory 256GiB --nvme (7.0,6.0) --tokens 4096 --seq 2048 --micro-batch 1 --json"
    done = subprocess.run(
        [sys.executable, "-c", code, *options.split()], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    peak, torch = done.stderr.splitlines()[-1].split()
    assert int(peak) < GiB and torch == "False", f"peak {peak} bytes, torch imported: {torch}"


def llama(hidden: int, inner: int, layers: int) -> dict[str, Any]:
    changes = {"vocab_size": 256, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return L0 | changes | {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}


SIZES = {
    "1M": (llama(128, 352, 5), "4MiB"),
    "10M": (llama(320, 864, 8), "32MiB"),
    "50M": (llama(512, 1408, 15), "160MiB"),
}
ROOMY = "900MiB"
"""A budget that holds all of the largest one."""
Measured = Callable[[str, float], dict[str, int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Bytes of a run by size and resident share; each is made once."""

    @cache
    def run(size: str, resident: float) -> dict[str, int]:
        folder = tmp_path_factory.mktemp("run")
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        config, budget = SIZES[size]
        tree = {
            "model": {"config": config},
            "data": {"paths": str(folder / "text.txt"), "tokenizer": "bytes", "seq_len": 64},
            "train": {"steps": 100, "batch": 2, "micro_batch": 1},
            "tiers": {"nvme": str(folder / "nvme"), "host_memory": ROOMY if resident else budget, "resident": resident},
            "output": {"dir": str(folder / "run")},
        }
        (folder / "run.yaml").write_text(json.dumps(tree))  # JSON is YAML
        return measure_run(folder / "run.yaml", 3)

    return run


def planned(found: dict[str, int]) -> int:
    return found["baseline"] + found["arena"] + found["compute"]


@pytest.mark.parametrize("size", ["1M", *(pytest.param(size, marks=pytest.mark.slow) for size in ("10M", "50M"))])
def test_a_run_is_not_planned_for_much_more_than_it_takes(measured: Measured, size: str) -> None:
    """PL-15, P2: planned <= 1.25 x measured + 64 MiB."""
    found = measured(size, 0.0)
    assert planned(found) <= 1.25 * found["peak"] + 64 * MiB, f"planned {planned(found)}, measured {found}"


@pytest.mark.parametrize("size", ["1M", "10M", pytest.param("50M", marks=pytest.mark.slow)])
def test_a_run_takes_no_more_than_it_is_planned_for(measured: Measured, size: str) -> None:
    """PL-15, P2: measured <= planned, and nothing is taken twice for a moment on the way."""
    found = measured(size, 0.0)
    assert found["peak"] <= planned(found), f"measured {found['peak']}, planned {planned(found)}: {found}"


@pytest.mark.slow
def test_what_is_planned_to_leave_ram_leaves_it(measured: Measured) -> None:
    """PL-13: moments alone are 8 bytes a parameter; at least 90 % of them, and of the plan's own figure, are seen."""
    inside, outside = measured("50M", 1.0), measured("50M", 0.0)
    saved = inside["steady"] - outside["steady"]
    promised = inside["arena"] - outside["arena"]
    moments = 8 * inside["parameters"]
    assert saved >= 0.9 * moments, f"{saved} bytes saved, moments are {moments}: {inside} {outside}"
    assert saved >= 0.9 * promised, f"{saved} bytes saved, the plan says {promised}: {inside} {outside}"
