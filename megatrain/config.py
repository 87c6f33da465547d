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
    ValidationError,
    field_validator,
    model_validator,
)

from megatrain.data.sources import list_sources
from megatrain.errors import UserError
from megatrain.faults import describe
from megatrain.runfile import overlay, read_mapping, write_mapping
from megatrain.sizes import parse_size

BYTES: Final = "bytes"
TOKENIZER_FILE = "tokenizer.json"
RUN_FILE = "run.yaml"
"""In the run folder: the run with every default resolved."""
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


# Typed text goes through `expand_path` once; `_escape` keeps a literal dollar sign when the run is written again.
_PathText = Annotated[str, BeforeValidator(expand_path), PlainSerializer(_escape)]
_Path = Annotated[Path, BeforeValidator(expand_path), PlainSerializer(_escape)]
_Int = Annotated[int, BeforeValidator(_number)]
_Float = Annotated[float, BeforeValidator(_number)]
_Unit = Annotated[_Float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Section):
    """What is trained: an architecture from scratch (`config`) or a model folder (`path`); exactly one of the two."""

    config: Annotated[
        dict[str, Any] | Path | None,
        BeforeValidator(_model_config),
        PlainSerializer(lambda value: _escape(value) if isinstance(value, Path) else value),
    ] = None
    path: _Path | None = None

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
        if self.path is not None and not file.is_dir():
            raise UserError(f"model.path: {file} is not a folder. Fix: give the folder that holds config.json")
        if file.is_dir():
            file = file / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{key}: {file} cannot be read: {error.strerror}. Fix: give the path of a model's config.json"
            ) from None
        except ValueError as error:
            raise UserError(f"{key}: {file} is not JSON: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise UserError(f"{key}: {file} has no `model_type`; it is not the configuration of a model")
        return content


class DataConfig(_Section):
    """What it is trained on: text files, cut into windows of `seq_len` tokens."""

    kind: str = "text"
    paths: Annotated[tuple[_PathText, ...], BeforeValidator(_as_list), Field(min_length=1)]
    tokenizer: Annotated[
        Literal["bytes"] | Path,
        BeforeValidator(lambda v: v if v == BYTES else Path(expand_path(v))),
        PlainSerializer(lambda value: BYTES if value == BYTES else _escape(value)),
    ] = BYTES
    seq_len: Annotated[_Int, Field(ge=2)]

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"{value!r} is not supported: the only kind of data is `text`")
        return value

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json in use; None when tokens are the bytes of the text."""
        if not isinstance(self.tokenizer, Path):
            return None
        return self.tokenizer / TOKENIZER_FILE if self.tokenizer.is_dir() else self.tokenizer


class TrainConfig(_Section):
    """How long and in what portions; `batch` and `micro_batch` count sequences."""

    steps: Annotated[_Int, Field(ge=1)]
    batch: Annotated[_Int, Field(ge=1)]
    micro_batch: Annotated[_Int, Field(ge=1, default_factory=lambda earlier: earlier["batch"])]
    max_grad_norm: Annotated[_Float, Field(gt=0)] | None = None
    seed: Annotated[_Int, Field(ge=0, lt=2**63)] = 0
    commit_every: Annotated[_Int, Field(ge=1)] = 50

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
    """AdamW as `torch.optim.AdamW` defines it, with its defaults except for the learning rate."""

    lr: Annotated[_Float, Field(ge=0)] = 3e-4
    betas: tuple[_Unit, _Unit] = (0.9, 0.999)
    eps: Annotated[_Float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[_Float, Field(ge=0)] = 0.01


class TiersConfig(_Section):
    """Where the training state lives; sizes are bytes, None is decided when the run starts."""

    host_memory: Annotated[int | None, BeforeValidator(_auto_or(_size))] = None
    device_memory: Annotated[int | None, BeforeValidator(_auto_or(_size))] = None
    nvme: Annotated[tuple[_Path, ...], BeforeValidator(_as_list), Field(min_length=1)]
    engine: Literal["auto", "posix", "kvikio"] = "auto"
    resident: Annotated[Literal["auto"] | float, BeforeValidator(_share)] = "auto"
    serial: bool = False
    hardware: _Path | None = None

    @field_validator("resident")
    @classmethod
    def _resident(cls, value: Literal["auto"] | float) -> Literal["auto"] | float:
        if isinstance(value, float) and not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"{value!r} is not allowed: must be `auto` or a share between 0 and 1")
        return value

    @field_validator("nvme")
    @classmethod
    def _nvme(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        twice = next((path for path in value if value.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is listed twice. Fix: one folder a drive")
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
        return self

    def check_files(self) -> None:
        """Raises UserError for a model, data or tokenizer file that is missing, or an output folder that is a file."""
        self.model.json_config()
        list_sources(self.data.paths)
        tokenizer = self.data.tokenizer_file
        if tokenizer is not None and not tokenizer.is_file():
            raise UserError(
                f"data.tokenizer: {tokenizer} is not a file. Fix: `bytes`, a tokenizer.json, or a folder that holds one"
            )
        nearest = next(path for path in (self.output.dir, *self.output.dir.parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(f"output.dir: {self.output.dir}: {nearest} is a file, not a folder. Fix: another folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"output.dir: {self.output.dir}: no right to write in {nearest}. Fix: another folder")

    def numerics(self) -> dict[str, Any]:
        """The JSON-able items that decide the numbers of a run, apart from what the data holds.

        Placement, paths, `train.steps` and `train.commit_every` are not among them: a run may be moved or lengthened.
        What the data holds is for `Batches.fingerprint()`, which covers the files, their order and the tokenizer.
        """
        train = self.train.model_dump(mode="json", include={"batch", "micro_batch", "max_grad_norm", "seed"})
        return {
            "model": {"config": self.model.json_config(), "from_scratch": self.model.path is None},
            "data": {"kind": self.data.kind, "seq_len": self.data.seq_len},
            "train": train,
            "optimizer": self.optimizer.model_dump(mode="json"),
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
        data.setdefault("tokenizer", model["path"])  # a trained model is of use only with the tokenizer beside it
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(describe(error, RunConfig, str(path), overridden))) from None


def dump_run(run: RunConfig) -> str:
    """YAML of `run` with every default resolved; loading it gives an equal RunConfig."""
    return write_mapping(run.model_dump(mode="json"))
