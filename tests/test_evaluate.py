"""An evaluation says what training would say of the same batch, and changes nothing.

Scope: `megatrain eval` on runs and model folders, `StreamedModel.losses`.
Not here: the forward itself (`test_stream.py`), tokens (`test_data.py`).
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, parameters, run_in, same_bits, trained, untrained
from conftest import TEXT, RunFile
from models import MODELS
from transformers import AutoModelForCausalLM

import megatrain.goodbye
import megatrain.trainer
from megatrain import cli
from megatrain.config import load_run
from megatrain.engine import StepEngine
from megatrain.errors import UserError
from megatrain.evaluate import FolderWeights, evaluate
from megatrain.export import export
from megatrain.generate import generate
from megatrain.inputs import tensors
from megatrain.model import build, find_units, model_config
from megatrain.prepare import prepare
from megatrain.stream import StreamedModel
from megatrain.trainer import open_run_batches, open_state

pytestmark = pytest.mark.usefixtures("known_machine")

SEQ_LEN = 16


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    """10 windows of 16 tokens and 5 tokens more."""
    path = tmp_path / "held-out.txt"
    path.write_text(TEXT[::-1][: 10 * SEQ_LEN + 5])
    return str(path)


def windows(path: str) -> torch.Tensor:
    ids = list(Path(path).read_bytes())
    count = len(ids) // SEQ_LEN
    return torch.tensor(ids[: count * SEQ_LEN]).view(count, SEQ_LEN)


@torch.no_grad()
def plain_loss(config: dict[str, Any], root: Path, ids: torch.Tensor) -> float:
    """The same weights in a plain model of transformers, all windows at once."""
    model = AutoModelForCausalLM.from_config(model_config(config)).eval()
    named = dict(model.named_parameters())
    for name, values in parameters(root).items():
        named[name].copy_(values)
    return model(input_ids=ids, labels=ids, use_cache=False).loss.item()


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral", "llama-tied"])
def test_the_loss_of_a_batch_is_the_training_loss_bit_for_bit(run_file: RunFile, model: str, chunk: int | None) -> None:
    """MA-14: forward alone against a step, the same micro-batches; whole logits and chunks of them."""
    changes = {"model.config": MODELS[model], "train.loss_chunk": chunk, "tiers.host_memory": "8MiB"}
    run = load_run(run_file(changes))
    prepared = prepare(run)
    batches = open_run_batches(prepared, run.output.dir, QUIET)
    ids = tensors(batches.batch_at(0))
    with open_state(prepared, batches, run.tiers.nvme[0], resume=False, console=QUIET) as manager:
        weights = parameters(run.tiers.nvme[0])
        engine = StepEngine(run, prepared.units, manager, 0)
        trained_loss = engine.step(ids, last=True).loss
        engine.close()

    class Bytes:
        def fill(self, unit: Any, block: torch.Tensor) -> None:
            for place in unit.slices:
                place.of(block).copy_(weights[place.name])

    units = find_units(build(model_config(MODELS[model])))
    with FolderWeights(units, Bytes()).opened() as passes:  # type: ignore[arg-type]
        streamed = StreamedModel(units, passes.lend, lambda unit, gradients: None)
        losses = streamed.losses(ids, run.train.micro_batch, chunk)
        streamed.close()
    assert sum(losses) == trained_loss, f"forward alone {losses}, step {trained_loss}"


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_run_is_evaluated_on_all_windows(run_file: RunFile, tmp_path: Path, held_out: str, batch: int) -> None:
    """Loss and perplexity of the last commit against transformers' own, however the windows are cut into passes."""
    run_dir = trained(run_file, {"model.config": MODELS["llama"], "train.steps": 3, "optimizer.lr": 0.01})
    found = evaluate(run_dir, [held_out], batch=batch, console=QUIET)
    wanted = plain_loss(MODELS["llama"], run_in(run_dir).tiers.nvme[0], windows(held_out))
    assert found.loss == pytest.approx(wanted, rel=1e-6), f"streamed {found.loss}, plain {wanted}"
    assert found.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
    assert (found.step, found.windows, found.left_out, found.supervised_tokens) == (3, 10, 5, 150)


@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_a_model_folder_gives_the_loss_of_its_run(run_file: RunFile, tmp_path: Path, held_out: str, model: str) -> None:
    """P1: the same bits from the exported files as from the tiers, with the exported tokenizer."""
    run_dir = untrained(run_file, {"model.config": MODELS[model], "tiers.resident": 0.5})
    export(run_dir, tmp_path / "model", dtype="float32", max_shard_bytes=20_000, force=False, console=QUIET)
    ours = evaluate(run_dir, [held_out], console=QUIET)
    theirs = evaluate(tmp_path / "model", [held_out], seq_len=SEQ_LEN, batch=4, console=QUIET)
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-6) and theirs.step is None
    again = evaluate(tmp_path / "model", [held_out], seq_len=SEQ_LEN, batch=4, tokenizer="bytes", console=QUIET)
    assert again.loss == theirs.loss


def test_an_evaluation_between_two_steps_changes_nothing(run_file: RunFile, tmp_path: Path, held_out: str) -> None:
    """MA-14, MA-16: the state on the drive is untouched, random numbers too, and the run goes on to the same bits."""
    dropout = {"model.config": {**MODELS["gpt2"], "resid_pdrop": 0.1}}

    def at(name: str, steps: int) -> dict[str, Any]:
        where = {"output.dir": str(tmp_path / name), "tiers.nvme": str(tmp_path / name / "nvme")}
        return {**dropout, **where, "train.steps": steps}

    straight = trained(run_file, at("straight", 4))
    parts = trained(run_file, at("parts", 2))
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in parts.rglob("*") if p.is_file()}
    state = torch.get_rng_state()
    first = evaluate(parts, [held_out], console=QUIET)
    second = evaluate(parts, [held_out], console=QUIET)
    assert torch.equal(state, torch.get_rng_state())
    assert first.loss == second.loss, "dropout is off"
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in parts.rglob("*") if p.is_file()}
    trained(run_file, at("parts", 4), resume=True)
    ours, theirs = parameters(straight / "nvme"), parameters(parts / "nvme")
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


def test_a_training_that_commits_meanwhile_is_noticed(
    run_file: RunFile, held_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9: weights of two steps are no model; the result is not printed."""
    changes = {"model.config": MODELS["llama"], "train.steps": 1}
    run_dir = trained(run_file, changes)
    losses, seen = StreamedModel.losses, []

    def overtaken(self: Any, *args: Any) -> list[float]:
        if not seen:
            seen.append(trained(run_file, {**changes, "train.steps": 2}, resume=True))
        return losses(self, *args)

    monkeypatch.setattr(StreamedModel, "losses", overtaken)
    with pytest.raises(UserError, match="committed step 2 while step 1"):
        evaluate(run_dir, [held_out], console=QUIET)


def test_text_of_a_run_that_commits_meanwhile_is_not_given(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: weights are read anew for every token; the bytes of two commits never make one text."""
    changes = {"train.steps": 1}
    run_dir = trained(run_file, changes)
    logits, seen = StreamedModel.logits, []

    def overtaken(self: Any, *args: Any) -> torch.Tensor:
        if not seen:
            seen.append(trained(run_file, {**changes, "train.steps": 2}, resume=True))
        return logits(self, *args)

    monkeypatch.setattr(StreamedModel, "logits", overtaken)
    with pytest.raises(UserError, match="committed step 2 while step 1"):
        generate(run_dir, "line", max_new_tokens=3, temperature=0, seed=0, console=QUIET)


def test_what_cannot_be_evaluated_is_refused_in_the_words_of_the_options(
    run_file: RunFile, tmp_path: Path, held_out: str
) -> None:
    """Too little text, a missing file, too long a window, a tokenizer that is none."""
    run_dir = untrained(run_file, {"model.config": MODELS["gpt2"]})
    (tmp_path / "short.txt").write_text("short")
    for data, options, words in (
        (str(tmp_path / "short.txt"), {}, r"--data: .*--seq-len"),
        (str(tmp_path / "none.txt"), {}, r"--data: .*none\.txt does not exist"),
        (held_out, {"seq_len": 65}, r"--seq-len 65: the model knows 64 positions"),
        (held_out, {"tokenizer": str(tmp_path)}, r"--tokenizer: .*tokenizer\.json is not a file"),
        ("$NO_SUCH_NAME/x", {}, r"--data: .*NO_SUCH_NAME"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate(run_dir, [data], console=QUIET, **options)


def test_the_command_prints_one_object(
    run_file: RunFile,
    tmp_path: Path,
    held_out: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`megatrain eval RUN_DIR --data FILE --data PATTERN --json`: the result alone on stdout; else a line to read."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    for more in (["--json"], []):
        args = ["eval", str(run_dir), "--data", held_out, "--data", str(tmp_path / "te*t.txt"), *more]
        monkeypatch.setattr(sys, "argv", ["megatrain", *args])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        assert not stopped.value.code, err
        if more:
            found = json.loads(out)
            assert found["windows"] == (10 * SEQ_LEN + 5 + len(TEXT)) // SEQ_LEN and found["perplexity"] > 1, found
            assert "through the tiers" in err, err
        else:
            assert "perplexity" in out, out
