"""How fast FP32 matrix products are at the shapes of a model and a micro-batch.

Scope: `python -m benchmarks.matmul --model CONFIG --micro-batch B --seq S`: the linear maps of a layer and the head, by
arithmetic on `config.json`. Neither weights nor transformers are needed.
Not here: the timing (`tiering/measure_memory.py`), whole units with norms and attention (`megatrain/timing.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, stdout_kept
from megatrain.errors import UserError
from tiering.hardware import Rate
from tiering.hardware_file import FlopRate
from tiering.limits import memory_limit
from tiering.measure_memory import product_rate

SMALL_LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 32000,
}  # fmt: skip
MOST_FLOPS = {"cpu": 1e11, "cuda": 1e13}
"""Of one product: rows are halved until it has no more than this, so that a large model takes seconds, not minutes."""
HEAD = "head"
app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """[rows, inner] x [inner, columns], `count` times in a layer."""

    name: str
    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of one product: a multiply and an add for each element of the weight and each row."""
        return 2 * self.rows * self.inner * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A shape and its rate, from a product of `rows` rows."""

    shape: Shape
    rows: int
    rate: Rate


@app.command()
def matmul(
    model: Annotated[
        Path | None, typer.Option("--model", metavar="CONFIG", help="A config.json or its folder.")
    ] = None,
    micro_batch: Annotated[int, typer.Option("--micro-batch", min=1, help="Sequences.")] = 1,
    seq: Annotated[int, typer.Option("--seq", min=1, help="Tokens of a sequence.")] = 1024,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure FP32 matrix products at a model's shapes. Without --model: those of a small Llama."""
    with reported(debug):
        config = SMALL_LLAMA if model is None else read_config(model)
        shapes = linear_shapes(config, micro_batch * seq, str(model or "the built-in shapes"))
        with stdout_kept(as_json):
            place = _device(device)
            found = [_measured(shape, place) for shape in shapes]
        if as_json:
            print_json(_as_json(found, place))
        else:
            _render(found, place, Console())


def read_config(path: Path) -> dict[str, Any]:
    """The text part of a model's `config.json`. Raises UserError for what is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}. Fix: --model with a config.json or the folder of one") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}. Fix: --model with a model's config.json") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: not a model's config.json: one JSON object is wanted")
    text = tree.get("text_config", tree)
    return dict(text) if isinstance(text, dict) else tree


def linear_shapes(config: Mapping[str, Any], tokens: int, source: str) -> list[Shape]:
    """The products of one layer and the head for so many tokens. Of experts each gets its share of the tokens.

    >>> [(s.name, s.columns) for s in linear_shapes(SMALL_LLAMA, 8, "")][:3]
    [('query', 1024), ('key, value', 512), ('attention out', 1024)]
    """
    hidden = _number(config, source, "hidden_size", "n_embd")
    heads = _number(config, source, "num_attention_heads", "n_head")
    groups = _number(config, source, "num_key_value_heads", default=heads)
    width = _number(config, source, "head_dim", default=max(1, hidden // heads))
    vocabulary = _number(config, source, "vocab_size")
    inner = _number(config, source, "moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden)
    experts = _number(config, source, "num_local_experts", "num_experts", "n_routed_experts", default=1)
    chosen = _number(config, source, "num_experts_per_tok", default=1)
    rows = tokens if experts == 1 else max(1, tokens * chosen // experts)
    gated = "n_inner" not in config and "n_embd" not in config  # GPT-2 has two maps where later models have three
    return [
        Shape(name="query", rows=tokens, inner=hidden, columns=heads * width),
        Shape(name="key, value", rows=tokens, inner=hidden, columns=groups * width, count=2),
        Shape(name="attention out", rows=tokens, inner=heads * width, columns=hidden),
        Shape(name="gate, up" if gated else "up", rows=rows, inner=hidden, columns=inner, count=experts * (1 + gated)),
        Shape(name="down", rows=rows, inner=inner, columns=hidden, count=experts),
        Shape(name=HEAD, rows=tokens, inner=hidden, columns=vocabulary),
    ]


def _number(config: Mapping[str, Any], source: str, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{source}: `{name}` is {value!r}; a whole number of at least 1 is wanted")
        return value
    if default is None:
        raise UserError(f"{source}: `{names[0]}` is missing. Fix: the config.json of a decoder-only language model")
    return default


def _device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: not known. Fix: auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here. Fix: --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _measured(shape: Shape, device: str) -> Timed:
    """FLOP/s of the shape, with fewer rows where it would take too long or too much memory."""
    memory = (torch.cuda.mem_get_info()[0] if device == "cuda" else memory_limit()[0]) // 2
    weight_bytes = 4 * shape.inner * shape.columns
    if weight_bytes > memory:
        raise UserError(
            f"{shape.name}: a weight of {weight_bytes} bytes does not fit in {memory} bytes. Fix: a smaller one"
        )
    rows = shape.rows
    while rows > 1 and (
        2 * rows * shape.inner * shape.columns > MOST_FLOPS[device]
        or weight_bytes + 4 * rows * (shape.inner + shape.columns) > memory
    ):
        rows //= 2
    repeats = max(3, min(32, int(1e10 / shape.flops)))  # a short run is disturbed more easily
    rate = product_rate(rows, shape.inner, shape.columns, device=torch.device(device), repeats=repeats)
    return Timed(shape=shape, rows=rows, rate=rate)


def _layer(found: Sequence[Timed]) -> Rate:
    """All products of a layer together: their flops over their seconds."""
    inside = [one for one in found if one.shape.name != HEAD]
    flops = sum(one.shape.count * one.shape.flops for one in inside)
    seconds = sum(one.shape.count * one.shape.flops / one.rate.per_s for one in inside)
    how = "flops of a layer's products over the sum of their seconds"
    return Rate(per_s=flops / seconds, source="derived", how=how, date=inside[0].rate.date)


def _as_json(found: Sequence[Timed], device: str) -> dict[str, Any]:
    return {
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "rows": [
            asdict(one.shape)
            | {"flops": one.shape.flops, "timed_rows": one.rows, "rate": FlopRate.of(one.rate).model_dump()}
            for one in found
        ],
        "layer": FlopRate.of(_layer(found)).model_dump(),
    }


def _render(found: Sequence[Timed], device: str, console: Console) -> None:
    table = Table("map", "rows", "inner", "columns", "in a layer", "GFLOP/s", title_justify="left")
    table.title = f"FP32 matrix products on {device}, {torch.get_num_threads()} threads"
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found:
        shape, count = one.shape, "-" if one.shape.name == HEAD else str(one.shape.count)
        sizes = (str(shape.rows), str(shape.inner), str(shape.columns))
        table.add_row(shape.name, *sizes, count, f"{one.rate.per_s / 1e9:.1f}")
    console.print(table)
    for one in found:
        if one.rows != one.shape.rows:
            console.print(f"{one.shape.name}: timed with {one.rows} rows of {one.shape.rows}", highlight=False)
    console.print(f"A layer's products together: {_layer(found).per_s / 1e9:.1f} GFLOP/s", highlight=False)


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.matmul")
