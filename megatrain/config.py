"""The run file: every setting of a run, its default and its range, checked before anything heavy is imported.

Scope: the sections as frozen models, `load_run` and `dump_run`, the files that a run needs (`check_files`), the items
that decide its numbers (`numerics`).
Not here: how one value is read (`megatrain/values.py`), YAML syntax (`megatrain/runfile.py`), the wording of faults
(`megatrain/faults.py`), reading the data (`megatrain/data/`), how much memory `auto` is (`megatrain/trainer.py`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from megatrain.errors import UserError
from megatrain.faults import describe
from megatrain.model_folder import local_folder, read_config
from megatrain.programs import Precision
from megatrain.runfile import overlay, read_mapping, write_mapping
from megatrain.values import (
    AutoSize,
    AutoSteps,
    DataPath,
    FilePath,
    Float,
    HeldOut,
    Int,
    ModelSource,
    Patterns,
    Rows,
    Share,
    Warmup,
    as_list,
    escape,
    expand_path,
)
from megatrain.vocabulary import rows_wanted, with_rows

BYTES: Final = "bytes"
MOST_DRIVES: Final = 36
TOKENIZER_FILE = "tokenizer.json"
RUN_FILE = "run.yaml"
"""In the run folder: the run with every default resolved."""
_KEYS_OF_KIND = {"chat": ("datasets", "split", "chat_template", "train_on", "packing"), "tokens": ("dtype",)}
_LATER_KEYS = {"no_decay", "schedule", "warmup_steps", "schedule_steps", "min_lr"}
_NUMERIC_OF_KIND = {"chat": ("train_on", "packing")}
_Unit = Annotated[Float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Section):
    """What is trained: an architecture from scratch (`config`) or a model folder (`path`); exactly one of the two.
    Parameters whose names match a pattern of `freeze` stay as they are. `resize_vocabulary` and `pad_to_multiple_of`
    count rows of the tables of tokens.
    """

    config: ModelSource = None
    path: FilePath | None = None
    freeze: Patterns = ()
    resize_vocabulary: Rows = None
    pad_to_multiple_of: Annotated[Int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelConfig":
        if (self.config is None) == (self.path is None):
            found = "neither is set" if self.config is None else "both are set"
            raise ValueError(
                f"exactly one of `model.config` and `model.path` is needed, {found}. Fix: `config` starts "
                "from scratch, `path` continues from a model folder"
            )
        for key in ("resize_vocabulary", "pad_to_multiple_of"):
            if self.path is None and getattr(self, key) is not None:
                raise ValueError(f"`{key}` is for `path`. Fix: leave it out, and set `vocab_size` in `config`")
        return self

    def json_config(self) -> dict[str, Any]:
        """The Hugging Face configuration of what is trained, as JSON. Raises UserError when it cannot be read."""
        if isinstance(self.config, dict):
            return self.config
        key, file = ("model.path", self.path) if self.path is not None else ("model.config", self.config)
        assert file is not None
        content = read_config(key, file)
        return content if self.rows is None else with_rows(content, self.rows)

    @property
    def rows(self) -> int | None:
        """Rows of the token tables, once `load_run` has resolved them; None: as many as the folder has."""
        return self.resize_vocabulary if isinstance(self.resize_vocabulary, int) else None


class DataConfig(_Section):
    """What it is trained on: windows of text or of ready token ids, or the answers of conversations."""

    kind: Literal["text", "chat", "tokens"] = "text"
    paths: Annotated[tuple[DataPath, ...], BeforeValidator(as_list), Field(min_length=1)]
    datasets: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    split: Annotated[str, Field(min_length=1)] = "train"
    dtype: Literal["uint16", "uint32", "int32"] | None = None
    tokenizer: Annotated[
        Literal["bytes"] | Path,
        BeforeValidator(lambda v: v if v == BYTES else Path(expand_path(v))),
        PlainSerializer(lambda value: BYTES if value == BYTES else escape(value)),
    ] = BYTES
    chat_template: FilePath | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    seq_len: Annotated[Int, Field(ge=2)]
    packing: bool = False
    validation: HeldOut = None
    validation_max: Annotated[Int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "DataConfig":
        for kind, keys in _KEYS_OF_KIND.items():
            for key in keys:
                if kind != self.kind and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"`{key}` is for `kind: {kind}`, this is `{self.kind}`. Fix: leave it out")
        if self.kind == "chat" and self.tokenizer == BYTES:
            raise ValueError(
                "`tokenizer` is `bytes`, which has no chat template. Fix: the folder of a chat model's tokenizer"
            )
        if self.validation_max is not None and not isinstance(self.validation, float):
            raise ValueError("`validation_max` bounds a share, and `validation` is none. Fix: leave it out")
        return self

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json in use; None when tokens are the bytes of the text."""
        if not isinstance(self.tokenizer, Path):
            return None
        return self.tokenizer / TOKENIZER_FILE if self.tokenizer.is_dir() else self.tokenizer


class TrainConfig(_Section):
    """How long and in what portions; `batch` and `micro_batch` count sequences, `loss_chunk` counts tokens,
    `commit_every` steps (None: as the run finds it cheap) and `eval_every` steps too (0: after the last one alone).
    `keep` is a number of commits, `keep_every` steps. compile: layers run as `torch.compile` makes them. `update_on`:
    where AdamW runs beside a GPU.
    """

    steps: Annotated[Int, Field(ge=1, lt=2**63)]
    batch: Annotated[Int, Field(ge=1)]
    micro_batch: Annotated[Int, Field(ge=1, default_factory=lambda earlier: earlier["batch"])]
    loss_chunk: Annotated[Int, Field(ge=1)] | None = None
    compile: bool = False
    max_grad_norm: Annotated[Float, Field(gt=0)] | None = None
    precision: Precision = "fp32"
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    commit_every: AutoSteps = None
    eval_every: Annotated[Int, Field(ge=0)] = 0
    keep: Annotated[Int, Field(ge=0)] = 0
    keep_every: Annotated[Int, Field(ge=1)] | None = None
    update_on: Literal["auto", "host", "device"] = "auto"

    @model_validator(mode="after")
    def _keep_says_when(self) -> "TrainConfig":
        if self.keep and self.keep_every is None:
            raise ValueError(f"keep: {self.keep} commits are to be kept, and nothing says which. Fix: keep_every: 1000")
        if self.keep_every is not None and not self.keep:
            raise ValueError(f"keep_every: {self.keep_every}, and keep is 0. Fix: keep: 1, or leave keep_every out")
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> "TrainConfig":
        if self.batch % self.micro_batch:
            fits = max(n for n in range(1, min(self.batch, self.micro_batch) + 1) if self.batch % n == 0)
            raise ValueError(
                f"batch {self.batch} is not a multiple of micro_batch {self.micro_batch}. "
                f"Fix: for example micro_batch: {fits}"
            )
        return self


class OptimizerConfig(_Section):
    """AdamW as `torch.optim.AdamW` defines it, with its defaults except for the learning rate. Parameters whose names
    match a pattern of `no_decay` have no weight decay. `schedule` is one of `transformers.get_scheduler`; `load_run`
    makes a share in `warmup_steps` a number, and sets `schedule_steps` where the rate decays.
    """

    lr: Annotated[Float, Field(ge=0)] = 3e-4
    betas: tuple[_Unit, _Unit] = (0.9, 0.999)
    eps: Annotated[Float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[Float, Field(ge=0)] = 0.01
    no_decay: Patterns = ()
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "constant"
    warmup_steps: Warmup = 0
    schedule_steps: Annotated[Int, Field(ge=1, lt=2**63)] | None = None
    min_lr: Annotated[Float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _fits_its_schedule(self) -> "OptimizerConfig":
        has_floor = self.schedule == "cosine_with_min_lr"
        if self.min_lr and not has_floor:
            raise ValueError(
                f"`min_lr` is for `schedule: cosine_with_min_lr`, this is `{self.schedule}`. Fix: leave it out"
            )
        if has_floor and not 0 < self.lr >= self.min_lr:
            raise ValueError(
                f"`min_lr` is {self.min_lr:g}, `lr` {self.lr:g}: `cosine_with_min_lr` falls from an lr > 0 to a "
                "min_lr that is not above it. Fix: a lower min_lr"
            )
        if self.schedule_steps is not None and self.schedule == "constant" and isinstance(self.warmup_steps, int):
            raise ValueError("`schedule_steps` is how long a schedule is, and nothing asks for it. Fix: leave it out")
        return self


class TiersConfig(_Section):
    """Where the training state lives; sizes are bytes, None is decided when the run starts. `direct_reads` go past RAM
    into memory of the device; `auto`: where the engine can and it is faster.
    """

    host_memory: AutoSize = None
    device_memory: AutoSize = None
    nvme: Annotated[tuple[FilePath, ...], BeforeValidator(as_list), Field(min_length=1)]
    engine: Literal["auto", "posix", "kvikio"] = "auto"
    direct_reads: Literal["auto", "off"] = "auto"
    resident: Share = "auto"
    late_updates: Share = "auto"
    serial: bool = False
    hardware: FilePath | None = None

    @field_validator("resident", "late_updates")
    @classmethod
    def _share_of_all(cls, value: Literal["auto"] | float) -> Literal["auto"] | float:
        if isinstance(value, float) and not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"{value!r} is not allowed: must be `auto` or a share between 0 and 1")
        return value

    @field_validator("nvme")
    @classmethod
    def _nvme(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        twice = next((path for path in value if value.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is listed twice. Fix: one folder a drive")
        inside = next(((a, b) for a in value for b in value if a != b and a.is_relative_to(b)), None)
        if inside is not None:
            raise ValueError(f"{inside[0]} lies in {inside[1]}. Fix: one folder of its own a drive")
        if len(value) > MOST_DRIVES:
            raise ValueError(f"{len(value)} folders; at most {MOST_DRIVES} can be used. Fix: one folder a drive")
        return value


class OutputConfig(_Section):
    """Where the run's own files go: log, trace, run file, token cache."""

    dir: FilePath


class RunConfig(_Section):
    """One run, complete: what `load_run` returns and everything else reads."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tiers: TiersConfig
    output: OutputConfig

    @model_validator(mode="after")
    def _across_sections(self) -> "RunConfig":
        for root in self.tiers.nvme:
            if self.output.dir.is_relative_to(root):
                raise ValueError(
                    f"output.dir: {self.output.dir} lies in the NVMe tier {root}, which holds nothing "
                    "else. Fix: put tiers.nvme into a folder of its own"
                )
        if self.train.eval_every and self.data.validation is None:
            raise ValueError("train.eval_every: no data is held out. Fix: data.validation: 0.05, or leave it out")
        if self.train.max_grad_norm is not None and self.tiers.late_updates not in ("auto", 1):
            raise ValueError(
                f"tiers.late_updates: {self.tiers.late_updates:g} does not go with train.max_grad_norm, which has to "
                "know all gradients before the first update. Fix: leave it out"
            )
        return self

    def numerics(self) -> dict[str, Any]:
        """The JSON-able items that decide the numbers of a run, apart from what the data holds.

        Placement, paths, `train.steps`, when it commits and what it keeps are not among them: a run may be moved or
        lengthened.
        What the data holds is for `StepBatches.fingerprint()`, which covers the files, their order and the tokenizer.
        """
        train = self.train.model_dump(mode="json", include={"batch", "micro_batch", "max_grad_norm", "seed"})
        extra = _NUMERIC_OF_KIND.get(self.data.kind, ())
        model: dict[str, Any] = {"config": self.model.json_config(), "from_scratch": self.model.path is None}
        optimizer = self.optimizer.model_dump(mode="json", exclude=_LATER_KEYS)
        # What is not set is no item: stores that were made before there was such a key go on.
        said = {"loss_chunk", "compile", "precision"}
        train |= self.train.model_dump(mode="json", include=said, exclude_defaults=True)
        model |= self.model.model_dump(mode="json", include={"freeze"}, exclude_defaults=True)
        optimizer |= self.optimizer.model_dump(mode="json", include=_LATER_KEYS, exclude_defaults=True)
        return {
            "model": model,
            "data": self.data.model_dump(mode="json", include={"kind", "seq_len", *extra}),
            "train": train,
            "optimizer": optimizer,
        }


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run file at `path` with the `a.b=value` items of `overrides` laid over it.

    Relative paths in it are taken from the current folder. Raises UserError with one line a fault.
    """
    tree = read_mapping(path)
    overridden = overlay(tree, overrides)
    for name in RunConfig.model_fields:
        if name != "device" and tree.get(name) is None:
            tree[name] = {}  # so that a fault names the key that is missing in it, not just the section
    model, data = tree["model"], tree["data"]
    if isinstance(model, dict) and isinstance(data, dict) and model.get("path") is not None:
        model["path"] = local_folder(model["path"])
        data.setdefault("tokenizer", model["path"])  # a trained model is of use only with the tokenizer beside it
    try:
        run = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(describe(error, RunConfig, str(path), overridden))) from None
    return _with_schedule(_with_vocabulary(run))


def _with_vocabulary(run: RunConfig) -> RunConfig:
    """`model.resize_vocabulary` as the number of rows that it comes to."""
    asked, multiple = run.model.resize_vocabulary, run.model.pad_to_multiple_of
    if asked is None and multiple is None:
        return run
    content = run.model.json_config()
    rows = rows_wanted(asked, multiple, content, run.data.tokenizer_file)
    return run.model_copy(update={"model": run.model.model_copy(update={"resize_vocabulary": rows})})


def _with_schedule(run: RunConfig) -> RunConfig:
    """Without a share in `optimizer.warmup_steps`, rounded as transformers does; with the length of a decay."""
    optimizer = run.optimizer
    length, warmup = optimizer.schedule_steps or run.train.steps, optimizer.warmup_steps
    resolved = {
        "warmup_steps": warmup if isinstance(warmup, int) else math.ceil(length * warmup),
        "schedule_steps": None if optimizer.schedule == "constant" else length,
    }
    return run.model_copy(update={"optimizer": optimizer.model_copy(update=resolved)})


def dump_run(run: RunConfig) -> str:
    """YAML of `run` with every default resolved; loading it gives an equal RunConfig."""
    return write_mapping(run.model_dump(mode="json"))
