"""A validation between two steps says what a forward says, and changes nothing that a later step sees.

Scope: `data.validation` and `train.eval_every` in whole runs: every bit of the state and of the log, what is logged,
where the figures of a step end.
Not here: what is held out (`test_data_batches.py`), `megatrain eval` (`test_evaluate.py`).
"""

import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import VOCAB_SIZE, save_tokenizer, turns, write_rows
from committed_runs import QUIET, TIGHT, parameters, run_in, same_bits, trained
from conftest import RunFile
from models import MODELS
from rich.console import Console
from transformers import AutoModelForCausalLM

import megatrain.goodbye
import megatrain.trainer
import megatrain.validation
from megatrain.config import load_run
from megatrain.data import batches_in_order, open_data
from megatrain.errors import UserError
from megatrain.evaluate import evaluate
from megatrain.inputs import tensors
from megatrain.model import model_config
from megatrain.steplog import KEYS
from tiering.trace import Trace

pytestmark = pytest.mark.usefixtures("known_machine")

STEPS = 5
KINDS = ("weight", "exp_avg", "exp_avg_sq")
DROPOUT = {**MODELS["gpt2"], "resid_pdrop": 0.1}


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def in_folder(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Places of a run of its own, and settings with `__` for dots."""
    where = {"output.dir": str(tmp_path / name), "tiers.nvme": str(tmp_path / name / "nvme")}
    held_out = {"data.validation": 7, "train.steps": STEPS, "optimizer.lr": 0.01}
    return {**where, **held_out, **{key.replace("__", "."): value for key, value in changes.items()}}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


@torch.no_grad()
def plain_loss(run_dir: Path) -> float:
    """The mean over all held-out tokens, by transformers, with the weights of the run's last commit."""
    run = run_in(run_dir)
    model = AutoModelForCausalLM.from_config(model_config(run.model.json_config())).eval()
    named = dict(model.named_parameters())
    for name, values in parameters(run.tiers.nvme[0]).items():
        named[name].copy_(values)
    vocabulary = run.model.json_config()["vocab_size"]
    data = open_data(run.data, vocabulary, run_dir / "tokens", run.train.seed)
    assert data.validation is not None
    batches = list(batches_in_order(data.validation, len(data.validation)))
    assert len(batches) == 1, len(batches)
    inputs = tensors(batches[0])
    return model(**inputs, use_cache=False, num_items_in_batch=batches[0].supervised).loss.item()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {}),
        ("llama-tied", {"train__max_grad_norm": 0.5}),
        pytest.param("llama", {"tiers__late_updates": 0.5}, marks=pytest.mark.slow),
        ("llama", {"tiers__serial": True, "tiers__resident": 0.5}),
        pytest.param("mixtral", {"train__loss_chunk": 7}, marks=pytest.mark.slow),
        ("gpt2-dropout", {"train__micro_batch": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "fused",
)
def test_validations_change_no_bit_of_a_run(
    run_file: RunFile, tmp_path: Path, model: str, changes: dict[str, Any]
) -> None:
    """MA-14, MA-16, P1: after every step, after every second, at the end alone; with dropout the same draws follow."""
    config = DROPOUT if model == "gpt2-dropout" else MODELS[model]
    seen = {}
    for every in (0, 1, 2):
        name = f"every-{every}"
        settings = in_folder(tmp_path, name, model__config=config, train__eval_every=every, **changes)
        run_dir = trained(run_file, settings)
        state = [parameters(run_dir / "nvme", kind) for kind in KINDS]
        steps = [(row["loss"], row["grad_norm"]) for row in rows_of(run_dir) if row["step"]]
        seen[every] = state, steps, rows_of(run_dir)[-1]["validation_loss"]
    for every in (1, 2):
        assert seen[every][1:] == seen[0][1:], f"{every}: {seen[every][1:]}, none: {seen[0][1:]}"
        for ours, theirs in zip(seen[every][0], seen[0][0], strict=True):
            differing = [name for name in theirs if not same_bits(ours[name], theirs[name])]
            assert not differing, f"every {every}: {differing}"


@pytest.mark.parametrize("changes", [{}, {"train__max_grad_norm": 0.5}], ids=["fused", "deferred"])
def test_a_validation_is_the_mean_of_the_plain_model_over_the_held_out_rows(
    run_file: RunFile, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """P1: after every update of the last step, late ones too; before the first step it is another number."""
    settings = in_folder(tmp_path, "run", train__eval_every=2, **changes)
    rows = rows_of(trained(run_file, settings))
    wanted = plain_loss(tmp_path / "run")
    assert rows[-1]["validation_loss"] == pytest.approx(wanted, rel=1e-6), f"{rows[-1]}, plain {wanted}"
    said = {row["step"]: row["validation_loss"] for row in rows}
    assert [step for step, loss in said.items() if loss is not None] == [0, 2, 4, 5], said
    assert said[0] > said[5], said


def test_a_validation_is_told_and_is_in_no_figure_of_a_step(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: bytes and seconds of a row are those of its step; row 0 has every key."""
    taken: set[str] = set()
    take, mean_loss = Trace.take, megatrain.validation.mean_loss
    pause_s = 0.2

    def noted(self: Trace) -> Any:
        spans, figures = take(self)
        taken.update(span.at.schedule.name for span in spans if span.at is not None)
        return spans, figures

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pause_s)
        return mean_loss(*args, **kwargs)

    monkeypatch.setattr(Trace, "take", noted)
    monkeypatch.setattr(megatrain.validation, "mean_loss", slow)
    told, begin_s = StringIO(), time.perf_counter()
    run = load_run(run_file({**TIGHT, **in_folder(tmp_path, "run", train__eval_every=1)}))
    assert megatrain.trainer.train(run, resume=False, console=Console(file=told, width=200)) == 0
    elapsed_s = time.perf_counter() - begin_s
    rows = rows_of(tmp_path / "run")
    assert list(rows[0]) == list(KEYS), rows[0]
    assert "before the first step" in told.getvalue() and "after step 5" in told.getvalue(), told.getvalue()
    assert "step" in taken and "forward" not in taken, taken
    inside_s = sum(row["wall_s"] for row in rows[1:])
    assert elapsed_s - inside_s >= len(rows) * pause_s, f"{elapsed_s} s in all, {inside_s} s in rows"


def test_a_resumed_run_validates_at_the_same_steps(run_file: RunFile, tmp_path: Path) -> None:
    """P3, DP-10: once before the first step, and as in a run that never stopped."""
    said = {}
    for name, stops in (("straight", (STEPS,)), ("stopped", (3, STEPS))):
        for number, steps in enumerate(stops):
            settings = in_folder(tmp_path, name, train__eval_every=2, train__steps=steps)
            trained(run_file, settings, resume=number > 0)
        said[name] = {row["step"]: row["validation_loss"] for row in rows_of(tmp_path / name)}
    assert said["stopped"].pop(3) is not None, "the last step of the first part"
    assert said["straight"].pop(3) is None
    assert said["straight"] == said["stopped"]


def chat(tmp_path: Path, **data: Any) -> dict[str, Any]:
    rows = [{"messages": turns(f"q{n}", f"a{n} " * (1 + n % 5))} for n in range(24)]
    fields = {
        "kind": "chat",
        "paths": str(write_rows(tmp_path / "rows.jsonl", rows)),
        "tokenizer": str(save_tokenizer(tmp_path / "tokenizer")),
        "seq_len": 48,
        **data,
    }
    model = {**MODELS["llama"], "vocab_size": VOCAB_SIZE}
    return {"model.config": model, **{f"data.{key}": value for key, value in fields.items()}}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_answers_of_any_length_count_by_their_tokens(run_file: RunFile, tmp_path: Path, packing: bool) -> None:
    """P1: seven conversations in batches of four; the last batch is filled up with rows that do not count."""
    settings = {**in_folder(tmp_path, "run", train__eval_every=3), **chat(tmp_path, packing=packing)}
    run_dir = trained(run_file, settings)
    wanted = plain_loss(run_dir)
    found = rows_of(run_dir)[-1]["validation_loss"]
    assert found == pytest.approx(wanted, rel=1e-6), f"{found}, plain {wanted}"


def test_a_run_and_its_model_are_evaluated_on_conversations(run_file: RunFile, tmp_path: Path) -> None:
    """`megatrain eval`: the kind of the run unless another is asked for; only answers count."""
    run_dir = trained(run_file, {**in_folder(tmp_path, "run"), **chat(tmp_path)})
    held = write_rows(tmp_path / "held.jsonl", [{"messages": turns("q", "abc")}, {"messages": turns("q", "a" * 9)}])
    found = evaluate(run_dir, [str(held)], console=QUIET)
    assert (found.windows, found.supervised_tokens) == (2, 3 + 1 + 9 + 1), found  # each with its end of turn
    as_text = evaluate(run_dir, [str(held)], kind="text", console=QUIET)
    assert as_text.supervised_tokens == as_text.windows * 47 != found.supervised_tokens, as_text
    with pytest.raises(UserError, match="--tokenizer: one token a byte"):
        evaluate(run_dir, [str(held)], tokenizer="bytes", console=QUIET)
