"""The run file: every setting of a run, its default and its range, checked before anything heavy is imported.

Scope: the sections as frozen models, `load_run` and `dump_run`, the files that a run needs (`check_files`), the items
that decide its numbers (`numerics`).
Not here: YAML syntax (`megatrain/runfile.py`), the wording of faults (`megatrain/faults.py`), reading the data
(`megatrain/data/`), how much memory `auto` is (`megatrain/trainer.py`).
"""

import json
import math
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from megatrain.data.chat_sources import HUB_PREFIX
from megatrain.data.files import check_data_files
from megatrain.errors import UserError
from megatrain.faults import describe
from megatrain.model_folder import local_folder, read_config
from megatrain.runfile import overlay, read_mapping, write_mapping
from megatrain.sizes import parse_size

BYTES: Final = "bytes"
MOST_DRIVES: Final = 36
TOKENIZER_FILE = "tokenizer.json"
RUN_FILE = "run.yaml"
"""In the run folder: the run with every default resolved."""
_KEYS_OF_KIND = {"chat": ("datasets", "split", "chat_template", "train_on", "packing"), "tokens": ("dtype",)}
_NUMERIC_OF_KIND = {"chat": ("train_on", "packing")}
_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|(?P<name>\w+)|\{(?P<braced>\w+)\})")


def expand_path(text: object) -> str:
    """An absolute path (or pattern) from what was typed: `~`, `$NAME` and `${NAME}` expand, `$$` is a dollar sign.

    `$PYTHON_STDLIB` is the folder of Python's standard library unless the environment says otherwise.
    """
    if isinstance(text, Path):
        return str(text.absolute())
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is not allowed: must be a path")

    def value_of(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["name"] or match["braced"]
        value = os.environ.get(name, sysconfig.get_path("stdlib") if name == "PYTHON_STDLIB" else None)
        if value is None:
            raise ValueError(f"{text!r} is not allowed: the environment variable {name} is not set")
        return value

    try:
        home = str(Path(text.strip()).expanduser())
    except RuntimeError:
        raise ValueError(f"{text!r} is not allowed: that user has no home folder") from None
    return str(Path(_VARIABLE.sub(value_of, home)).absolute())


def _number(value: object) -> object:
    """Numbers as people type them: text that is a number is one, true and false are none."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not allowed: must be a number")
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not allowed: must be a number") from None
    return value


def _size(value: object) -> int:
    nbytes = parse_size(value)
    if nbytes == 0:
        raise ValueError(f"{value!r} is not allowed: must be > 0")
    return nbytes


def _auto_or(convert: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None or value == "auto" else convert(value)


def _model_config(value: object) -> object:
    """An inline configuration as plain JSON, or the path of one."""
    if not isinstance(value, dict):
        return None if value is None else Path(expand_path(value))
    if not isinstance(value.get("model_type"), str):
        raise ValueError("has no `model_type`. Fix: name the architecture, for example model_type: llama")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds something that JSON cannot: {error}") from None


def _share(value: object) -> object:
    return "auto" if value is None or value == "auto" else _number(value)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def _escape(path: object) -> str:
    return str(path).replace("$", "$$")


def _data_path(value: object) -> str:
    return value if isinstance(value, str) and value.startswith(HUB_PREFIX) else expand_path(value)


def _validation(value: object) -> object:
    """A number of rows, a share of them, or the path of other data."""
    if value is None or isinstance(value, Path):
        return value
    try:
        number = _number(value)
    except ValueError:
        if isinstance(value, bool):
            raise
        return Path(expand_path(value))
    if isinstance(number, int) and number < 1:
        raise ValueError(f"{number!r} is not allowed: must be >= 1 rows, a share such as 0.05, or a path")
    if isinstance(number, float) and not 0 < number <= 1:
        raise ValueError(f"{number!r} is not allowed: a share must be > 0 and <= 1")
    return number


def _as_written(value: object) -> object:
    return _escape(value) if isinstance(value, Path) else value


# Typed text goes through `expand_path` once; `_escape` keeps a literal dollar sign when the run is written again.
_PathText = Annotated[str, BeforeValidator(expand_path), PlainSerializer(_escape)]
_Path = Annotated[Path, BeforeValidator(expand_path), PlainSerializer(_escape)]
_DataPath = Annotated[str, BeforeValidator(_data_path), PlainSerializer(_escape)]
_Int = Annotated[int, BeforeValidator(_number)]
_Float = Annotated[float, BeforeValidator(_number)]
_Unit = Annotated[_Float, Field(ge=0, lt=1)]
_Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Section):
    """What is trained: an architecture from scratch (`config`) or a model folder (`path`); exactly one of the two.
    Parameters whose names match a pattern of `freeze` stay as they are.
    """

    config: Annotated[
        dict[str, Any] | Path | None,
        BeforeValidator(_model_config),
        PlainSerializer(lambda value: _escape(value) if isinstance(value, Path) else value),
    ] = None
    path: _Path | None = None
    freeze: _Patterns = ()

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelConfig":
        if (self.config is None) == (self.path is None):
            found = "neither is set" if self.config is None else "both are set"
            raise ValueError(
                f"exactly one of `model.config` and `model.path` is needed, {found}. Fix: `config` starts "
                "from scratch, `path` continues from a model folder"
            )
        return self

    def json_config(self) -> dict[str, Any]:
        """The Hugging Face configuration as JSON, wherever it is kept. Raises UserError when it cannot be read."""
        if isinstance(self.config, dict):
            return self.config
        key, file = ("model.path", self.path) if self.path is not None else ("model.config", self.config)
        assert file is not None
        return read_config(key, file)


class DataConfig(_Section):
    """What it is trained on: windows of text or of ready token ids, or the answers of conversations."""

    kind: Literal["text", "chat", "tokens"] = "text"
    paths: Annotated[tuple[_DataPath, ...], BeforeValidator(_as_list), Field(min_length=1)]
    datasets: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    split: Annotated[str, Field(min_length=1)] = "train"
    dtype: Literal["uint16", "uint32", "int32"] | None = None
    tokenizer: Annotated[
        Literal["bytes"] | Path,
        BeforeValidator(lambda v: v if v == BYTES else Path(expand_path(v))),
        PlainSerializer(lambda value: BYTES if value == BYTES else _escape(value)),
    ] = BYTES
    chat_template: _Path | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    seq_len: Annotated[_Int, Field(ge=2)]
    packing: bool = False
    validation: Annotated[
        StrictInt | StrictFloat | Path | None,
        BeforeValidator(_validation),
        PlainSerializer(_as_written),
    ] = None
    validation_max: Annotated[_Int, Field(ge=1)] | None = None

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
    """

    steps: Annotated[_Int, Field(ge=1)]
    batch: Annotated[_Int, Field(ge=1)]
    micro_batch: Annotated[_Int, Field(ge=1, default_factory=lambda earlier: earlier["batch"])]
    loss_chunk: Annotated[_Int, Field(ge=1)] | None = None
    max_grad_norm: Annotated[_Float, Field(gt=0)] | None = None
    seed: Annotated[_Int, Field(ge=0, lt=2**63)] = 0
    commit_every: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_auto_or(_number))] = None
    eval_every: Annotated[_Int, Field(ge=0)] = 0

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
    match a pattern of `no_decay` have no weight decay.
    """

    lr: Annotated[_Float, Field(ge=0)] = 3e-4
    betas: tuple[_Unit, _Unit] = (0.9, 0.999)
    eps: Annotated[_Float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[_Float, Field(ge=0)] = 0.01
    no_decay: _Patterns = ()


class TiersConfig(_Section):
    """Where the training state lives; sizes are bytes, None is decided when the run starts."""

    host_memory: Annotated[int | None, BeforeValidator(_auto_or(_size))] = None
    device_memory: Annotated[int | None, BeforeValidator(_auto_or(_size))] = None
    nvme: Annotated[tuple[_Path, ...], BeforeValidator(_as_list), Field(min_length=1)]
    engine: Literal["auto", "posix", "kvikio"] = "auto"
    resident: Annotated[Literal["auto"] | float, BeforeValidator(_share)] = "auto"
    late_updates: Annotated[Literal["auto"] | float, BeforeValidator(_share)] = "auto"
    serial: bool = False
    hardware: _Path | None = None

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

    dir: _Path


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

    def check_files(self) -> None:
        """Raises UserError for a model, data or tokenizer file that is missing, or an output folder that is a file."""
        check_data_files(self.data, self.model.json_config()["model_type"])
        nearest = next(path for path in (self.output.dir, *self.output.dir.parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(f"output.dir: {self.output.dir}: {nearest} is a file, not a folder. Fix: another folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"output.dir: {self.output.dir}: no right to write in {nearest}. Fix: another folder")

    def numerics(self) -> dict[str, Any]:
        """The JSON-able items that decide the numbers of a run, apart from what the data holds.

        Placement, paths, `train.steps` and `train.commit_every` are not among them: a run may be moved or lengthened.
        What the data holds is for `StepBatches.fingerprint()`, which covers the files, their order and the tokenizer.
        """
        train = self.train.model_dump(mode="json", include={"batch", "micro_batch", "max_grad_norm", "seed"})
        extra = _NUMERIC_OF_KIND.get(self.data.kind, ())
        model: dict[str, Any] = {"config": self.model.json_config(), "from_scratch": self.model.path is None}
        optimizer = self.optimizer.model_dump(mode="json", exclude={"no_decay"})
        # What is not set is no item: stores that were made before there was such a key go on.
        train |= self.train.model_dump(mode="json", include={"loss_chunk"}, exclude_defaults=True)
        model |= self.model.model_dump(mode="json", include={"freeze"}, exclude_defaults=True)
        optimizer |= self.optimizer.model_dump(mode="json", include={"no_decay"}, exclude_defaults=True)
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
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(describe(error, RunConfig, str(path), overridden))) from None


def dump_run(run: RunConfig) -> str:
    """YAML of `run` with every default resolved; loading it gives an equal RunConfig."""
    return write_mapping(run.model_dump(mode="json"))
