"""Loss and perplexity of a run or of a model folder on data: forwards alone, unit by unit.

Scope: `megatrain eval`: the rows, the passes, where the weights come from.
Not here: the mean over batches and validation during training (`validation.py`), the forward and the loss
(`stream.py`, `loss.py`), tokens (`megatrain/data/`), reading a model folder (`checkpoint.py`).

A run's weights stream through its tiers, as in training. Those of a model folder are read from its files, once for
each pass: nothing is written but the tokens, and the units of one operation are in memory at a time.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from megatrain.accelerator import forwards_note
from megatrain.checkpoint import Checkpoint
from megatrain.committed import LOOK_S, CommitWatch, at_step, forward_tiers, run_of
from megatrain.config import BYTES, RUN_FILE, TOKENIZER_FILE, DataConfig, ModelConfig, RunConfig
from megatrain.data import batches_in_order, open_data
from megatrain.data.batch import Rows
from megatrain.errors import UserError
from megatrain.model import Units
from megatrain.programs import FORWARD, HEAD, block_name
from megatrain.run_model import build_units, run_units
from megatrain.sizes import format_seconds, format_size
from megatrain.stream import Lend, StreamedModel
from megatrain.validation import mean_loss
from megatrain.values import expand_path
from tiering.arena import Arena

SEQ_LEN = 512
BATCH = 8
"""What a model folder is evaluated with unless a person says otherwise: it has no settings of its own."""
Kind = Literal["text", "chat", "tokens"]
_KEPT = ("chat_template", "train_on", "packing", "dtype")
"""What of a run's own settings holds for other data of the same kind."""
_NEW = {name: DataConfig.model_fields[name].default for name in (*_KEPT, "datasets", "split", "validation")}
_NEW |= {"validation_max": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """loss: mean over all supervised tokens, in nats. perplexity: None where it is more than a float holds. step: of a
    run's commit. windows: rows of `seq_len` tokens; of chat data a conversation each, or several that are packed.
    left_out: tokens after the last window of text.
    """

    source: str
    step: int | None
    loss: float
    perplexity: float | None
    windows: int
    seq_len: int
    batch: int
    micro_batch: int
    supervised_tokens: int
    left_out: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Where weights come from. begin: opens a pass; check: after a pass."""

    lend: Lend
    begin: Callable[[], None]
    check: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated, how its data is read, and with which sizes. told: how its weights are read, for people."""

    name: str
    told: str
    step: int | None
    units: Units
    data: DataConfig
    batch: int
    micro_batch: int
    loss_chunk: int | None
    passes: Callable[[], AbstractContextManager[Passes]]


def evaluate(
    source: Path,
    data: Sequence[str],
    *,
    kind: Kind | None = None,
    seq_len: int | None = None,
    batch: int | None = None,
    tokenizer: str | None = None,
    step: int | None = None,
    console: Console,
) -> Evaluation:
    """Evaluate a run folder or a model folder on files, folders or patterns. None: the run's own setting; step: of a
    run's commit, None for the last one.

    Raises UserError or a TieringError. Weights, state and random numbers are as before.
    """
    subject = _subject(source, step)
    settings = _settings(subject.data, data, kind, seq_len, tokenizer)
    longest = getattr(subject.units.model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.seq_len > longest:
        raise UserError(f"--seq-len {settings.seq_len}: the model knows {longest} positions. Fix: --seq-len {longest}")
    subject = replace(subject, data=settings, batch=batch or subject.batch)
    console.print(subject.told, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="megatrain-eval-") as folder:
        rows, left_out = _rows(subject, Path(folder), console)
        return _measured(subject, rows, left_out, console)


def _settings(
    own: DataConfig, data: Sequence[str], kind: Kind | None, seq_len: int | None, tokenizer: str | None
) -> DataConfig:
    """How the data is read: as `own` says, where nothing else was asked for."""
    try:
        paths = tuple(expand_path(entry) for entry in data)
    except ValueError as error:
        raise UserError(f"--data: {error}") from None
    kept = {name: getattr(own, name) for name in _KEPT} if kind in (None, own.kind) else {}
    asked = {
        "kind": kind or own.kind,
        "paths": paths,
        "tokenizer": own.tokenizer if tokenizer is None else _tokenizer(tokenizer),
        "seq_len": seq_len or own.seq_len,
    }
    if asked["kind"] == "chat" and asked["tokenizer"] == BYTES:
        raise UserError(
            "--tokenizer: one token a byte has no chat template. Fix: the folder of a chat model's tokenizer"
        )
    return own.model_copy(update={**_NEW, **kept, **asked})


def _rows(subject: Subject, folder: Path, console: Console) -> tuple[Rows, int]:
    """All rows of the data in its order, and the tokens of a text that are in none."""
    vocabulary = subject.units.model.config.get_text_config().vocab_size
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        try:
            found = open_data(
                subject.data,
                vocabulary,
                folder,
                0,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
        except UserError as error:
            text = str(error).replace("data.paths", "--data").replace("data.tokenizer", "--tokenizer")
            raise UserError(text.replace("data.seq_len", "--seq-len")) from None
    for notice in found.notices:
        console.print(notice.replace("data.paths", "--data").replace("data.seq_len", "--seq-len"), highlight=False)
    return found.train, found.tokens_left_out


def _measured(subject: Subject, rows: Rows, left_out: int, console: Console) -> Evaluation:
    """All rows in their order."""
    begun_s = time.monotonic()
    subject.units.model.eval()
    with subject.passes() as passes, Progress(console=console, transient=True) as progress:
        task = progress.add_task("windows", total=len(rows))

        def done(count: int) -> None:
            passes.check()
            progress.advance(task, count)

        model = StreamedModel(subject.units, passes.lend, lambda unit, gradients: None)
        try:
            loss, supervised = mean_loss(
                model,
                batches_in_order(rows, min(subject.batch, len(rows))),
                micro_batch=subject.micro_batch,
                loss_chunk=subject.loss_chunk,
                begin=passes.begin,
                done=done,
            )
        finally:
            model.close()
    if not math.isfinite(loss):
        raise UserError(f"{subject.name}: the loss is {loss}: the weights are not finite, or overflow in a forward")
    return Evaluation(
        source=subject.name,
        step=subject.step,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else None,
        windows=len(rows),
        seq_len=subject.data.seq_len,
        batch=subject.batch,
        micro_batch=subject.micro_batch,
        supervised_tokens=supervised,
        left_out=left_out,
        seconds=time.monotonic() - begun_s,
    )


def render(found: Evaluation, console: Console) -> None:
    """The result for people."""
    perplexity = "too large to say" if found.perplexity is None else f"{found.perplexity:.4f}"
    console.print(
        f"loss {found.loss:.6f}  perplexity {perplexity}  over {found.supervised_tokens:,} tokens in "
        f"{found.windows:,} windows of {found.seq_len} ({found.left_out} tokens left out), "
        f"{format_seconds(found.seconds)}",
        highlight=False,
        soft_wrap=True,
    )


def _subject(source: Path, step: int | None) -> Subject:
    if (source / RUN_FILE).is_file():
        return _run_subject(source, step)
    if step is not None:
        raise UserError(f"--step {step}: {source} is no run folder, so it has no commits. Fix: leave it out")
    if (source / "config.json").is_file():
        return _folder_subject(source)
    raise UserError(
        f"{source} is neither a run folder (no {RUN_FILE}) nor a model folder (no config.json). "
        "Fix: give the output.dir of a run, or a folder with config.json and safetensors"
    )


def _run_subject(run_dir: Path, step: int | None) -> Subject:
    run = at_step(run_of(run_dir), step)
    units = run_units(run.model)
    watch = CommitWatch(run)
    if watch.step is None:
        raise UserError(f"{run_dir}: nothing is committed yet. Fix: wait for the first commit, or train")
    note = forwards_note(run)
    told = f"{run_dir}: step {watch.step}, weights stream through the tiers of the run"
    return Subject(
        name=str(run_dir),
        told=f"{told}; {note}" if note else told,
        step=watch.step,
        units=units,
        data=run.data,
        batch=run.train.batch,
        micro_batch=run.train.micro_batch,
        loss_chunk=run.train.loss_chunk,
        passes=lambda: _through_tiers(run, units, watch),
    )


@contextmanager
def _through_tiers(run: RunConfig, units: Units, watch: CommitWatch) -> Iterator[Passes]:
    with forward_tiers(run, units, watch) as manager:
        yield Passes(
            lend=manager.op,
            begin=lambda: manager.begin(FORWARD),
            check=lambda: watch.check(every_s=LOOK_S),
        )


def _folder_subject(folder: Path) -> Subject:
    units = build_units(ModelConfig(path=folder))
    checkpoint = Checkpoint(folder, units)
    weights = FolderWeights(units, checkpoint)
    longest = getattr(units.model.config.get_text_config(), "max_position_embeddings", None) or SEQ_LEN
    return Subject(
        name=str(folder),
        told=f"{folder}: weights are read from its files, once for each pass, {format_size(weights.nbytes)} at a time",
        step=None,
        units=units,
        data=DataConfig(
            paths=(str(folder),),
            tokenizer=folder if (folder / TOKENIZER_FILE).is_file() else BYTES,
            seq_len=min(SEQ_LEN, longest),
        ),
        batch=BATCH,
        micro_batch=1,
        loss_chunk=None,
        passes=weights.opened,
    )


class FolderWeights:
    """Lends the weights of a model folder straight from its files, those of one operation at a time."""

    def __init__(self, units: Units, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        by_name = {unit.name: unit for unit in units.stored}
        self._used = {
            HEAD if unit is units.head else f"fwd.{unit.name}": [
                by_name[name] for name in (unit.name, *unit.borrows) if by_name[name].nbytes
            ]
            for unit in units
        }
        self.nbytes = max(sum(unit.nbytes for unit in used) for used in self._used.values())

    @contextmanager
    def opened(self) -> Iterator[Passes]:
        with Arena(self.nbytes) as arena:
            yield Passes(lend=lambda name: self._lend(arena, name), begin=lambda: None, check=lambda: None)

    @contextmanager
    def _lend(self, arena: Arena, name: str) -> Iterator[Mapping[str, torch.Tensor]]:
        views, at = {}, 0
        for unit in self._used[name]:
            block = arena.tensor(at, at + unit.nbytes)
            self._checkpoint.fill(unit, block)
            views[block_name(unit.name, "weight")] = block
            at += unit.nbytes
        yield views


def _tokenizer(text: str) -> Literal["bytes"] | Path:
    """`--tokenizer`: `bytes`, a tokenizer.json, or a folder that holds one."""
    if text == BYTES:
        return BYTES
    path = Path(expand_path(text))
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--tokenizer: {file} is not a file. Fix: `bytes`, a tokenizer.json, or a folder that holds one"
        )
    return path
