"""P5 before anything runs: sums that one can redo, refusals whose advice works, sweeps, the command itself.

Scope: `tierplan` from its options to its output, and the question behind it. Not here: the planner's own promises
(`test_plan.py`), the arithmetic of models and parts (`test_shapes.py`, `test_estimate.py`, `test_parts.py`).
"""

import io
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import slow
from rich.console import Console

from megatrain.catalog.known_models import resolve_model
from megatrain.catalog.parts import parse_drives
from megatrain.errors import UserError
from megatrain.tierplan import command
from megatrain.tierplan.advice import helps, remedies
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.machine import machine
from megatrain.tierplan.question import Question, ShortageError, forecast, sized, told
from megatrain.tierplan.sweep import around, parse_range, sweep
from megatrain.tierplan.tables import render
from megatrain.tierplan.variants import fits, with_drives, with_host_memory
from tiering.costs import step_io_bytes
from tiering.hardware import assumed_hardware

GiB = 1 << 30
MiB = 1 << 20
ROOT = Path(__file__).parent.parent
SMALL = "--model smollm2-135m --host-memory 2.5GiB --nvme (7.0,6.0) --tokens 4096 --seq 512 --micro-batch 1"
SMALL_GPU = f"{SMALL} --gpu rtx4090 --host-memory 3GiB --device-memory 3GiB"
Invoke = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `tierplan OPTIONS` in this process and returns exit code, stdout and stderr."""
    monkeypatch.setattr(command.gc, "disable", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tierplan", *shlex.split(options.replace("(", "'(").replace(")", ")'"))])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def question(model: str, host_memory: int, drives: str = "(7.0,6.0)", **more: Any) -> Question:
    """A question to a machine without a GPU, unless `more` has one."""
    name, config = resolve_model(model)
    settings = {"tokens": 2048, "seq_len": 1024, "micro_batch": 1, "hardware": assumed_hardware(), **more}
    asked = Question(model=name, config=config, host_memory=host_memory, drives=(), **settings)
    return asked.with_drives(parse_drives(drives))


def moved_for_state(found: Forecast) -> int:
    """NVMe bytes of a step, those of activations left out."""
    blocks = found.plan.workload.blocks
    moved = [a for a in found.main().actions if str(a.verb) in ("READ", "WRITE")]
    return sum(a.nbytes for a in moved if blocks[a.operands[0].block].kind != "activation")


def test_seven_billion_parameters_on_disk_move_28_bytes_each() -> None:
    """P5, by hand: 28 P, less the weights and tiles that are still in RAM where the pass turns round."""
    found = forecast(question("dense-7b", 64 * GiB, resident=0.0))
    parameters = found.parameters
    moved = moved_for_state(found)
    bound = step_io_bytes(parameters)
    blocks = found.plan.workload.blocks.values()
    largest = max(block.nbytes for block in blocks if block.kind == "weight")
    head = next(block.nbytes for block in blocks if block.name == "lm_head/weight")
    # The head's weight is read once for forward and backward; lookahead keeps a few units beside it.
    hits = head + (found.plan.knobs.lookahead + 2) * largest
    assert bound - hits <= moved <= bound * 1.001, f"{moved} bytes moved, 28 P is {bound}, hits are at most {hits}"


def test_100_billion_parameters_on_128_gib_move_what_the_formula_says() -> None:
    """P5: `costs.step_io_bytes` with the bytes that are resident, and the seconds that one and four drives take."""
    asked = question("dense-100b", 128 * GiB)
    ready = sized(asked)
    one = told(ready, [ready.frugal()])
    resident = sum(one.plan.bytes_at(kind)[0] for kind in ("weight", "exp_avg", "exp_avg_sq"))
    moved, formula = moved_for_state(one), step_io_bytes(one.parameters, resident)
    assert abs(moved - formula) <= 0.02 * formula, f"{moved} bytes moved, the formula says {formula}"
    four = with_drives(ready, one, asked.with_drives(parse_drives("4x(7.0,6.0)")))
    for found, count in ((one, 1), (four, 4)):
        timeline = found.plan.timeline
        by_hand_s = (timeline.read_bytes / 7e9 + timeline.written_bytes / 6e9) / count
        assert timeline.io_s == pytest.approx(by_hand_s, rel=1e-6), f"{timeline.io_s} s, by hand {by_hand_s} s"
    assert one.step_s / 4 <= four.step_s <= one.step_s, (one.step_s, four.step_s)


def test_the_loss_takes_18_bytes_a_logit() -> None:
    """PL-12: 32,768 tokens x 151,936 words are 83 GiB beside everything else."""
    config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 151_936}
    asked = replace(
        question("gpt2", 200 * GiB), config=config, tokens=32_768, seq_len=4096, micro_batch=8, model="wide"
    )
    lines = {line.what: line.nbytes for line in sized(asked).compute}
    logits = lines["logits and loss of one micro-batch"]
    assert logits >= 18 * 32_768 * 151_936, f"{logits} bytes, {18 * 32_768 * 151_936} are needed"
    quarter = {line.what: line.nbytes for line in sized(replace(asked, micro_batch=2)).compute}
    assert quarter["logits and loss of one micro-batch"] * 4 == logits, "a quarter of the micro-batch, of the logits"


def test_the_loss_in_chunks_takes_18_bytes_a_logit_of_a_chunk() -> None:
    """PL-12: 1,024 of 32,768 tokens at a time are a 32nd of the line; nothing else of the question changes."""
    config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 151_936}
    asked = replace(
        question("gpt2", 200 * GiB), config=config, tokens=32_768, seq_len=4096, micro_batch=8, model="wide"
    )
    whole, cut = sized(asked), sized(replace(asked, loss_chunk=1024))
    logits = {line.what: line.nbytes for line in whole.compute}["logits and loss of one micro-batch"]
    chunk = {line.what: line.nbytes for line in cut.compute}["logits and loss of one chunk"]
    assert chunk * 32 == logits, f"{chunk} bytes a chunk, {logits} in all"
    assert cut.units == whole.units and cut.compute[0] == whole.compute[0], (cut.compute, whole.compute)


def test_a_question_in_bf16_moves_half_the_weights_to_the_device(invoke: Invoke) -> None:
    """P5: half of the bytes over the link, as many back (gradients are FP32), 2 bytes a parameter more on NVMe."""
    found = {}
    for precision in ("fp32", "bf16"):
        options = f"{SMALL} --gpu rtx4090 --host-memory 4GiB --device-memory 2.5GiB --update-on host"
        code, out, err = invoke(f"{options} --precision {precision} --json")
        assert code == 0, err
        found[precision] = json.loads(out)
    one, other = found["fp32"], found["bf16"]
    assert (one["precision"], other["precision"]) == ("fp32", "bf16")
    assert 0.45 < other["h2d_bytes"] / one["h2d_bytes"] < 0.55, (one["h2d_bytes"], other["h2d_bytes"])
    assert (
        other["placement"]["HOST"]["weight_bf16"] + other["placement"]["NVME"]["weight_bf16"] >= 2 * one["parameters"]
    )
    assert any("BF16" in note for note in other["notes"]) and not any("BF16" in note for note in one["notes"])


def test_the_place_of_updates_is_the_one_that_was_asked_for_or_the_faster_one(invoke: Invoke) -> None:
    """P5: each place says the seconds of the other one, and so does the line that people read."""
    from megatrain.sizes import format_seconds

    there = machine(gpu="rtx4090", device_memory=3 * GiB, nvme=["(7.0,6.0)"], hardware_file=None)
    asked = question("gpt2", 4 * GiB, device_memory=there.device_memory, hardware=there.hardware)
    found = {on: forecast(replace(asked, update_on=on)).as_json() for on in ("auto", "host")}
    seconds = {one["update_on"]: one["step_s"] for one in found.values()}
    assert found["host"]["update_on"] == "host", seconds
    other_s = {on: one["update_elsewhere_s"] for on, one in found.items()}
    assert found["auto"]["step_s"] <= min(found["host"]["step_s"], other_s["auto"]), (seconds, other_s)
    assert {found["auto"]["step_s"], other_s["auto"]} == {found["host"]["step_s"], other_s["host"]}, (seconds, other_s)
    options = "--model gpt2 --host-memory 4GiB --nvme (7.0,6.0) --tokens 2048 --seq 1024 --micro-batch 1 --gpu rtx4090"
    code, out, err = invoke(f"{options} --device-memory 3GiB --update-on host")
    said = "Updates run on the host (--update-on host); with updates on the device a step is"
    assert code == 0 and f"{said} {format_seconds(other_s['host'])}" in out, (out, err)


def test_a_gpu_of_which_no_rate_of_updates_is_known_leaves_them_to_the_host() -> None:
    """P5: and that is said."""
    there = machine(gpu="rtx4090", device_memory=3 * GiB, nvme=["(7.0,6.0)"], hardware_file=None)
    asked = question("smollm2-135m", 4 * GiB, device_memory=there.device_memory)
    asked = replace(asked, hardware=replace(there.hardware, device_update=None))
    found = forecast(asked)
    said = Console(file=io.StringIO(), width=200)
    render(found, said)
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert not found.updates_there
    assert "Updates run on the host (auto); how fast the device updates is not known" in text, text


def test_a_question_in_tf32_is_planned_at_the_rate_of_its_data_sheet(invoke: Invoke) -> None:
    """P5, rule 9: the same bytes as in FP32; the source says which figure was taken. What is typed wins."""
    card = {"gpu": "a100-80gb", "device_memory": None, "nvme": ["(7.0,6.0)"], "hardware_file": None}
    asked: list[dict[str, Any]] = [{}, {"precision": "tf32"}, {"precision": "tf32", "gpu_flops": 9e13}]
    rates = [machine(**card, **more).hardware.compute for more in asked]  # type: ignore[arg-type]
    assert [rate.per_s for rate in rates] == pytest.approx([0.75 * 19.5e12, 0.75 * 156e12, 9e13]), rates
    assert "156.0 TFLOP/s in TF32" in rates[1].how and rates[2].how == "given on the command line", rates
    options = SMALL_GPU.replace("rtx4090", "a100-80gb")
    code, out, err = invoke(f"{options} --update-on device --precision tf32")
    assert code == 0 and "compute, TF32" in out and "compute, FP32" not in out, (out, err)
    assert "117 TFLOP/s *" in out and "weight_bf16" not in out, out


LOGITS_TOO_MANY = [
    "--model qwen3-0.6b --host-memory 8GiB --nvme (7,6) --tokens 8192 --seq 2048 --micro-batch 4",
    "--model qwen3-0.6b --host-memory 16GiB --gpu rtx4090 --device-memory 5GiB --nvme (7,6) --tokens 8192 --seq 2048"
    " --micro-batch 4",
]


@pytest.mark.parametrize("options", [LOGITS_TOO_MANY[0], slow(LOGITS_TOO_MANY[1])])
def test_chunks_are_advised_before_a_smaller_micro_batch(invoke: Invoke, options: str) -> None:
    """P2: where the logits alone are too many; the largest power of two that works, and twice as much does not."""
    code, out, err = invoke(options)
    assert (code, out) == (2, "") and "logits and loss of one micro-batch" in err, err
    (advice,) = re.findall(r"^Fix: (.*)$", err, re.MULTILINE)
    fixes = advice.split(", or ")
    chunk = next(int(fix.split()[1]) for fix in fixes if fix.startswith("--loss-chunk "))
    first = next(number for number, fix in enumerate(fixes) if fix.startswith("--loss-chunk "))
    assert "--micro-batch 1" not in fixes[:first], fixes
    code, out, err = invoke(f"{options} --loss-chunk {chunk} --json")
    assert code == 0 and json.loads(out)["loss_chunk"] == chunk, err
    assert invoke(f"{options} --loss-chunk {2 * chunk}")[0] == 2, f"{2 * chunk} tokens work too"


def test_what_passes_through_is_on_the_bill_before_anything_is_pinned() -> None:
    """PL-06: four staged tensors of 1e9 elements are 16e9 bytes of FP32; a host of 16 GB is refused, with the line."""
    config = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 32_768, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 64, "vocab_size": 1024}  # 1.07e9 parameters a layer
    asked = replace(question("gpt2", 4 * 10**9), config=config, model="wide", tokens=64, seq_len=64)
    with pytest.raises(ShortageError) as refused:
        forecast(asked)
    lines = {line.what: line.nbytes for line in refused.value.lines}
    passing = lines["blocks passing through (step)"]
    assert passing >= 2 * 4.2e9, f"a layer's weight and its gradient are {2 * 4.2e9} bytes, {passing} are planned"
    assert sum(lines.values()) == refused.value.needed_bytes, f"{lines} do not add up to {refused.value.needed_bytes}"
    assert "blocks passing through (step)" in str(refused.value), str(refused.value)


REFUSED = [
    "--model qwen3-4b --host-memory 2GiB --nvme (7,6) --tokens 8192",
    "--model qwen3-0.6b --host-memory 24GiB --nvme (7,6) --tokens 131072 --micro-batch 16",
    "--model qwen3-0.6b --host-memory 3GiB --gpu rtx4090 --device-memory 2GiB --nvme (7,6) --tokens 8192",
]
SLOWLY_REFUSED = [
    "--model qwen3-1.7b --host-memory 64GiB --gpu rtx3060-12gb --device-memory 8GiB --nvme (7,6) --tokens 131072",
    "--model smollm2-135m --host-memory 1GiB --nvme (7,6) --tokens 8192 --clip",
]


@pytest.mark.parametrize("options", [*REFUSED, *(slow(options) for options in SLOWLY_REFUSED)])
def test_a_refusal_names_changes_that_work(invoke: Invoke, options: str) -> None:
    """P2: exit code 2, the sum line by line, and each piece of advice, taken, plans."""
    code, out, err = invoke(options)
    assert (code, out) == (2, "") and "The least that works" in err and "  sum " in err, err
    advice = re.search(r"^Fix: (.*)$", err, re.MULTILINE)
    assert advice, err
    for fix in advice[1].split(", or "):
        fixed = options
        for option, value in re.findall(r"(--[\w-]+) (\S+)", fix):
            fixed = re.sub(rf" {option} \S+", "", fixed) + f" {option} {value}"
        code, _, err = invoke(f"{fixed} --json")
        assert code == 0, f"{options}\nwith {fix}: {err}"


def test_a_refusal_names_the_least_memory() -> None:
    """P2: two mebibytes less than what is named is refused again; two terms of the sum are whole mebibytes."""
    asked = question("smollm2-135m", 600 * MiB)
    fixes = remedies(asked)
    named = re.fullmatch(r"--host-memory (\d+)MiB", fixes[0])
    assert named, fixes
    assert fits(replace(asked, host_memory=int(named[1]) * MiB)), fixes
    assert not fits(replace(asked, host_memory=(int(named[1]) - 2) * MiB)), f"less than {fixes[0]} fits too"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--model is missing"),
        ("--model llama-3-7q --host-memory 8GiB --nvme (7,6)", "llama-3-8b"),
        (f"{SMALL} --gpu rtx409O", "rtx4090"),
        (f"{SMALL} --device-memory 8GiB", "Fix: --gpu rtx4090"),
        ("--model gpt2 --host-memory 8GiB", "--nvme '4x(7.0,6.0)'"),
        ("--model gpt2 --nvme (7,6)", "--host-memory is missing"),
        ("--model gpt2 --nvme (7,6) --host-memory much", "--host-memory"),
        ("--model gpt2 --nvme seven --host-memory 8GiB", "4x(7.0,6.0)"),
        (f"{SMALL} --tokens 5000", "Fix: --tokens 4608 or 5120"),
        (f"{SMALL} --tokens 100", "Fix: --tokens 512"),
        (f"{SMALL} --total-tokens many", "15T"),
        (f"{SMALL} --loss-chunk none", "--loss-chunk"),
        (f"{SMALL} --sweep ram=1..2", "host-memory=32GiB..512GiB"),
        (f"{SMALL} --sweep host-memory=8GiB..4GiB", "upward"),
        (f"{SMALL} --sweep device-memory=1GiB..4GiB", "Fix: --gpu"),
        (f"{SMALL} --plot /nowhere/out.png", "does not exist"),
        (f"{SMALL} --plot out.txt", "out.png"),
        (f"{SMALL} --plot out.png --sweep drives=1..4", "leave one of them out"),
        (f"{SMALL} --hardware /nowhere/h.json", "megatrain measure"),
        (f"{SMALL} --update-on device", "Fix: --gpu rtx4090, or --update-on auto"),
        (f"{SMALL} --precision tf32", "--precision fp32 or bf16"),
        (f"{SMALL} --precision tf32 --gpu v100", "no rate of v100 in TF32 is known. Fix: --gpu-flops 1e14"),
        (f"{SMALL} --gpu-flops 1e14", "Fix: --cpu-flops, or --gpu"),
        (f"run.yaml {SMALL}", "--model"),
        ("/nowhere/run.yaml", "no such run file"),
    ],
)
def test_a_wrong_option_is_one_error_that_says_how_to_fix_it(invoke: Invoke, options: str, words: str) -> None:
    """CF-05, CF-06: exit code 2, nothing on stdout."""
    code, out, err = invoke(options)
    assert (code, out) == (2, "") and err.startswith("error: ") and words in err and "Traceback" not in err, err


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        f"{SMALL} --clip",
        *(slow(options) for options in (SMALL_GPU, f"{SMALL_GPU} --clip")),
    ],
)
def test_the_sums_of_the_report_add_up(invoke: Invoke, options: str) -> None:
    """P2, P5: every tier's lines are its bytes, every kind is somewhere, bounds enclose the simulated step."""
    code, out, err = invoke(f"{options} --json")
    assert code == 0, err
    found = json.loads(out)
    for tier in ("host", "device"):
        memory = found[tier]
        if memory is None:
            assert "--gpu" not in options
            continue
        arena, beside = sum(memory["arena"].values()), sum(memory["beside"].values())
        assert arena + beside == memory["used_bytes"] <= memory["given_bytes"], memory
        assert arena <= memory["arena_budget_bytes"], memory
    assert sum(found["host_lines"].values()) == found["arena_bytes"]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        homes = found["placement"]["HOST"][kind] + found["placement"]["NVME"][kind]
        assert 4 * found["parameters"] <= homes <= 4.1 * found["parameters"], (kind, homes)
    assert found["limit_s"] <= found["step_s"] <= found["serial_s"] * (1 + 1e-9), found
    assert found["limit_s"] == max(found["busy_s"].values()) == found["busy_s"][found["bottleneck"]]
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"])
    assert found["disk_bytes"] >= 2 * 12 * found["parameters"]
    assert found["model_flops_per_s"] == pytest.approx(6 * found["active_parameters"] * found["tokens_per_s"])


def test_the_table_shows_what_the_json_says(invoke: Invoke) -> None:
    """P5: one record, two forms."""
    from megatrain.sizes import format_count, format_seconds, format_size

    options = f"{SMALL} --total-tokens 1e9 --nvme (7.0,6.0,600TBW)"
    found = json.loads(invoke(f"{options} --json")[1])
    code, out, err = invoke(options)
    assert code == 0, err
    shown = [format_size(nbytes) for nbytes in found["host_lines"].values()]
    shown += [format_size(found[key]) for key in ("read_bytes", "written_bytes", "disk_bytes", "export_bf16_bytes")]
    shown += [format_seconds(found[key]) for key in ("step_s", "limit_s", "serial_s")]
    shown += [format_count(found["tokens_per_s"]), f"{found['total_s'] / 86_400:,.1f} days", "600 TB"]
    missing = [text for text in shown if text not in out]
    assert not missing, f"{missing} not in\n{out}"
    for what in found["assumed"]:
        assert {"update": "update (AdamW", "compute": "compute, FP32"}.get(what, what) in out, what


def test_a_drive_lives_as_long_as_its_endurance_and_writes_say(invoke: Invoke) -> None:
    """P5, by hand: days = endurance / (bytes written a step x steps a day), shared over the drives."""
    found = json.loads(invoke(f"{SMALL} --nvme (7.0,6.0,600TBW) --json")[1])
    drives = found["drives"]
    assert [drive["endurance_bytes"] for drive in drives] == [0, 600 * 10**12]
    per_day = found["written_bytes"] * 86_400 / found["step_s"] / 2
    assert drives[1]["life_days"] == pytest.approx(600e12 / per_day) and drives[0]["life_days"] is None, drives


def test_from_the_tokens_named_computing_takes_as_long_as_all_io() -> None:
    """P5: planned with those tokens and the same homes, the two are equal; "never" where activations cost more."""
    asked = question("smollm2-135m", 2432 * MiB, "(1.0,1.0)", resident=0.0)
    compute = replace(asked.hardware.compute, per_s=2e12)
    asked = replace(asked, hardware=replace(asked.hardware, compute=compute))
    found = forecast(asked)
    hidden = found.tokens_to_hide_io()
    assert hidden is not None
    tokens = math.ceil(hidden / asked.seq_len) * asked.seq_len
    again = forecast(replace(asked, tokens=tokens), [found.plan.knobs]).plan.timeline
    assert again.compute_s == pytest.approx(again.io_s, rel=0.15), f"{tokens} tokens: {again}"
    fast = replace(asked.hardware, compute=replace(asked.hardware.compute, per_s=1e18))
    spilled = forecast(replace(asked, hardware=fast, host_memory=2132 * MiB))
    assert spilled.plan.bytes_at("activation")[1] > 0, "no activation goes to NVMe: this shows nothing"
    assert spilled.tokens_to_hide_io() is None, spilled.tokens_to_hide_io()


@pytest.mark.parametrize("more", [{}, {"deferred": True}], ids=["fused", "deferred"])
def test_more_memory_never_makes_a_slower_step(more: dict[str, Any]) -> None:
    """P5: over a sweep, knees among its points."""
    asked = question("smollm2-135m", 2432 * MiB, "(2.0,1.0)", **more)
    ready = sized(asked)
    base = told(ready)
    found = sweep(ready, base, parse_range("host-memory=1GiB..5GiB:8"))
    steps = [point.forecast.step_s for point in found.points if point.forecast]
    assert len(steps) >= 5 and not found.points[0].forecast, found.table()
    assert all(more_s <= less_s * 1.001 for less_s, more_s in pairwise(steps)), steps
    for point in found.points:
        if point.shortage is not None:
            assert point.value < point.shortage.needed_bytes == found.least, (point.value, found.least)
    named = [point for point in found.points if point.knee]
    assert [point.knee for point in named] == ["layers' weights in RAM", "layers' weights and moments in RAM"]
    for point, kinds in zip(named, (("weight",), ("weight", "exp_avg", "exp_avg_sq")), strict=True):
        plan = with_host_memory(ready, base, point.value).plan
        blocks = [b for b in plan.workload.blocks.values() if b.kind in kinds and b.unit.startswith("model.layers.")]
        spilled = sum(block.nbytes - plan.placement.host_bytes.get(block.name, 0) for block in blocks)
        everything = sum(block.nbytes for block in blocks)
        assert spilled <= 0.02 * everything, f"{point.knee}: {spilled} of {everything} bytes are on NVMe"


def test_other_sweeps_show_what_changes() -> None:
    """P5: more drives take less time for the same bytes; tokens are whole micro-batches; a device that is too small
    says so.
    """
    ready = sized(question("smollm2-135m", 2432 * MiB, "(1.0,1.0)"))
    base = told(ready)
    drives = sweep(ready, base, parse_range("drives=1..3"))
    steps = [point.forecast.step_s for point in drives.points if point.forecast]
    assert steps == sorted(steps, reverse=True) and len(steps) == 3, steps
    tokens = sweep(ready, base, parse_range("tokens=1K..10K:3"))
    assert all(point.value % 1024 == 0 for point in tokens.points), [point.value for point in tokens.points]
    rates = replace(assumed_hardware(), h2d=base.hardware.read, d2h=base.hardware.read, update_beside_compute=True)
    gpu = replace(ready.question, hardware=rates, device_memory=8 * GiB, host_memory=4 * GiB)
    ready = sized(gpu.with_drives(gpu.drives))
    device = sweep(ready, told(ready), parse_range("device-memory=512MiB..8GiB:2"))
    assert [point.forecast is not None for point in device.points] == [False, True], device.as_json()


def test_what_would_help_is_what_helps() -> None:
    """P5: each line, asked as a question of its own, comes out at least as fast as it says; the best comes first."""
    asked = question("smollm2-135m", 2232 * MiB, "(0.5,0.5)", deferred=True)
    ready = sized(asked)
    base = told(ready)
    found = {change.what: change for change in helps(ready, base)}
    assert [c.gain for c in found.values()] == sorted((c.gain for c in found.values()), reverse=True), found
    assert {"twice the RAM", "twice the tokens a step", "no clipping (trains differently)"} <= set(found), found
    doubled = forecast(replace(asked, host_memory=2 * asked.host_memory))
    assert doubled.step_s <= found["twice the RAM"].step_s * 1.001, (doubled.step_s, found)
    drives = forecast(asked.with_drives((*asked.drives, asked.drives[0])))
    assert drives.step_s <= found["one more drive ((0.5, 0.5) GB/s)"].step_s * 1.001, (drives.step_s, found)


def test_the_picture_is_drawn_around_the_given_memory(invoke: Invoke, tmp_path: Path) -> None:
    """A file that is a picture; the points are in the JSON, the given memory and both knees among them."""
    pytest.importorskip("matplotlib")
    code, out, err = invoke(f"{SMALL} --plot {tmp_path / 'out.png'} --json")
    assert code == 0, err
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "out.png").stat().st_size > 20_000
    points = json.loads(out)["sweep"]["points"]
    assert 2560 * MiB in [point["value"] for point in points]
    assert sum(bool(point["knee"]) for point in points) == 2, points


def test_a_swept_range_starts_at_the_least_that_fits() -> None:
    """P2: the picture's left edge is the least memory, and a plan exists there."""
    ready = sized(question("smollm2-135m", 2432 * MiB))
    found = around(ready, told(ready))
    assert found.least is not None and found.points[0].forecast is not None
    assert found.points[0].value - found.least < MiB, (found.points[0].value, found.least)
    assert [point.knee for point in found.points if point.knee] == [
        "layers' weights in RAM",
        "layers' weights and moments in RAM",
    ]


def test_the_micro_batch_is_chosen_so_that_it_computes_in_a_quarter_of_the_memory() -> None:
    """The largest power of two that divides the rows; it is said."""
    asked = question("smollm2-135m", 16 * GiB, tokens=24 * 1024, micro_batch=None)
    ready = sized(asked)
    assert 24 % ready.micro_batch == 0 and any("was chosen" in note for note in ready.notes), ready.notes
    assert ready.compute[1].nbytes <= 4 * GiB
    double = sized(replace(asked, micro_batch=2 * ready.micro_batch)) if 24 % (2 * ready.micro_batch) == 0 else None
    assert double is None or double.compute[1].nbytes > 4 * GiB, (ready.compute, double and double.compute)


def test_a_model_is_not_asked_for_longer_sequences_than_it_takes(invoke: Invoke) -> None:
    """gpt2 has 1,024 positions: the default length is theirs, and it is said."""
    found = json.loads(invoke("--model gpt2 --host-memory 8GiB --nvme (7,6) --tokens 4096 --json")[1])
    assert found["seq_len"] == 1024 and any("1024" in note and "most" in note for note in found["notes"]), found[
        "notes"
    ]


def test_a_measured_machine_is_planned_with_what_was_measured(invoke: Invoke, tmp_path: Path) -> None:
    """P5: rates, drives and RAM of the file; `--nvme` wins over its drives."""
    rate = {"value": 1e9, "source": "measured", "how": "timed", "date": "2025-01-31", "unit": "B/s"}
    flops = {**rate, "value": 1e12, "unit": "FLOP/s"}
    drive = {
        "path": "/mnt",
        "model": "A drive",
        "queue_depth": 4,
        "request_bytes": 8 << 20,
        "read": rate,
        "write": rate,
    }
    host = {"memory_bytes": 4 * GiB, "limit": "cgroup", "cpu_cores": 2, "torch_version": "2", "torch_threads": 2}
    host |= {"compute": flops, "update": rate, "io_steals": 0.1}
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps({"version": 1, "host": host, "drives": [drive]}))
    options = f"--model smollm2-135m --tokens 4096 --seq 512 --hardware {path} --json"
    code, out, err = invoke(options)
    assert code == 0, err
    found = json.loads(out)
    assert found["host"]["given_bytes"] == 4 * GiB and found["hardware"]["read"]["source"] == "measured"
    assert [drive["name"] for drive in found["drives"]] == ["A drive"] and "read" not in found["assumed"]
    found = json.loads(invoke(f"{options} --nvme 2x(7,6)")[1])
    assert len(found["drives"]) == 2 and found["hardware"]["read"]["per_s"] == 14e9


def test_a_family_that_arithmetic_does_not_know_is_asked_of_transformers(invoke: Invoke, tmp_path: Path) -> None:
    """P5: the same report, and a note."""
    config = {"model_type": "stablelm", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = invoke(f"--model {path} --host-memory 2GiB --nvme (7,6) --tokens 256 --seq 64 --json")
    assert code == 0, err
    found = json.loads(out)
    assert found["parameters"] > 2 * 512 * 64 and any("transformers" in note for note in found["notes"]), found["notes"]


@pytest.mark.parametrize(("option", "word"), [("--list-models", "llama-3-70b"), ("--list-gpus", "rtx4090")])
def test_lists_show_what_there_is(invoke: Invoke, option: str, word: str) -> None:
    """Names that the options take, with the figures behind them."""
    code, out, _ = invoke(option)
    assert code == 0 and word in out, out
    assert "samsung" in invoke("--list-drives")[1]


def test_the_file_runs_from_anywhere_in_seconds_and_without_torch(tmp_path: Path) -> None:
    """The 70B question, with a picture, on a machine with no GPU."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(sorted({'torch', 'transformers', 'zarr'} & set(sys.modules)), file=sys.stderr)"
    )
    options = ["--host-memory", "128GiB", "--gpu", "rtx4090", "--nvme", "4x(7.0,6.0)", "--tokens", "32768", "--json"]
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "tools/tierplan"), "--model", "llama-3-70b", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    took_s = time.perf_counter() - begin_s
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 70_553_706_496
    assert done.stderr.strip().endswith("[]"), done.stderr
    assert took_s < 60, f"{took_s:.1f} s; 10 s are promised on an idle machine"


def test_the_file_finds_the_checkouts_own_python_or_says_how_to_get_one(tmp_path: Path) -> None:
    """A Python without the libraries is not the end: `.venv` of the checkout serves, or one line says what to do."""
    bare = [sys.executable, "-I", "-S"]  # no site-packages
    copy = tmp_path / "tools" / "tierplan"
    copy.parent.mkdir()
    copy.write_text((ROOT / "tools/tierplan").read_text())
    done = subprocess.run([*bare, str(copy), "--list-gpus"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Fix: make install" in done.stderr, done.stderr
    if (ROOT / ".venv/bin/python").exists():
        done = subprocess.run([*bare, str(ROOT / "tools/tierplan"), "--list-gpus"], capture_output=True, text=True)
        assert done.returncode == 0 and "rtx4090" in done.stdout, done.stderr


def test_a_picture_of_a_range_that_leaves_the_given_memory_out(invoke: Invoke, tmp_path: Path) -> None:
    """It is drawn without the star; a range in which nothing fits is refused."""
    pytest.importorskip("matplotlib")
    options = f"{SMALL} --plot {tmp_path / 'out.svg'} --sweep "
    code, out, err = invoke(f"{options} host-memory=3GiB..5GiB:2")
    assert code == 0 and "Picture: " in out and (tmp_path / "out.svg").stat().st_size > 10_000, err
    code, _, err = invoke(f"{options} host-memory=64MiB..128MiB:2")
    assert code == 2 and "a wider --sweep" in err, err


def test_an_upward_range_is_read_as_written() -> None:
    """`AXIS=LOW..HIGH:POINTS` with sizes and counts as people type them."""
    found = parse_range("host-memory=32GiB..512GiB:5")
    assert found.values() == [GiB * size for size in (32, 64, 128, 256, 512)], found.values()
    assert parse_range("drives=1..4").values() == [1, 2, 3, 4]
    assert parse_range("tokens = 8K .. 32K : 3").values() == [8000, 16_000, 32_000]
    with pytest.raises(UserError, match="POINTS"):
        parse_range("host-memory=32GiB")


def test_drives_that_cannot_hold_the_state_are_refused_and_the_count_named_is_enough(invoke: Invoke) -> None:
    """P2: two slots of 7B parameters take 168 GB; drives of known capacity are added up, and the advice works."""
    options = "--model dense-7b --host-memory 64GiB --tokens 4096 --nvme {}x(7,6,600TBW,0.1TB)"
    code, _, err = invoke(options.format(1))
    assert code == 2 and "NVMe needs" in err, err
    count = re.search(r"Fix: (\d+) drives", err)
    assert count is not None, err
    code, _, err = invoke(options.format(count[1]))
    assert code == 0, err
    assert invoke(options.format(int(count[1]) - 1))[0] == 2, "fewer drives than named were enough"
