"""The last commit of a run as a Hugging Face model folder.

Scope: `megatrain export`: which tensors under which names, their conversion, the order of writing.
Not here: the files beside the weights (`companions.py`), the safetensors format (`safetensors_out.py`), reading the
state (`committed.py`), the zarr form (`snapshot.py`).

Names and shapes are those of the files that transformers itself would write: where it holds the tensors of a file
otherwise in memory (fused experts), its own conversion is undone, parameter by parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers.core_model_loading import revert_weight_conversion

from megatrain.checkpoint import persistent_buffers
from megatrain.committed import LOOK_S, Committed, at_step, run_of
from megatrain.companions import write_companions
from megatrain.errors import UserError
from megatrain.model import Slice, Unit, Units
from megatrain.new_folder import appearing, folders_of, refuse_place
from megatrain.run_model import run_units
from megatrain.safetensors_out import ALIGN, CODES, Entry, write_shards
from megatrain.sizes import format_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPANION_BYTES = 64 << 20
"""Room for the files beside the weights; tokenizers take some MiB."""


def export(
    run_dir: Path,
    out: Path,
    *,
    dtype: str,
    max_shard_bytes: int,
    force: bool,
    step: int | None = None,
    console: Console,
) -> list[Path]:
    """Write the model of a commit to the folder `out`; returns the weight files. step: None for the last commit.

    Raises UserError or a TieringError; then `out` is what it was before.
    """
    run = run_of(run_dir)
    target = refuse_place(out, folders_of(run), force=force)
    run = at_step(run, step)
    units = run_units(run.model)
    with Committed(run, units) as state:
        tensors = ModelTensors(state, units, DTYPES[dtype])
        nbytes = sum(entry.nbytes for entry in tensors.entries)
        with appearing(target, nbytes=nbytes + COMPANION_BYTES) as folder, progress_bar(console) as progress:
            task = progress.add_task("export", total=nbytes)
            folder.mkdir()

            def data(entry: Entry) -> Iterator[torch.Tensor]:
                for part in tensors.data(entry):
                    yield part
                    progress.advance(task, part.nbytes)
                state.watch.check(every_s=LOOK_S)

            files = write_shards(folder, tensors.entries, max_shard_bytes, data)
            notes = write_companions(folder, run, run_dir, units, DTYPES[dtype], state)
            state.watch.check()
    console.print(
        f"{target}: step {state.step}, {len(tensors.entries)} tensors in {dtype}, {format_size(nbytes)} in "
        f"{len(files)} file{'s' if len(files) > 1 else ''}",
        highlight=False,
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    return [target / file.name for file in files]


def progress_bar(console: Console) -> Progress:
    """A bar that counts bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a tensor of the files comes from. same: the parameter itself, else a product of its conversion."""

    unit: Unit
    place: Slice
    same: bool


class ModelTensors:
    """The tensors of a model folder: every parameter once, tied ones under one name, and persistent buffers."""

    def __init__(self, state: Committed, units: Units, dtype: torch.dtype) -> None:
        self._state = state
        self._units = units
        self._sources: dict[str, _Source] = {}
        self._buffers = persistent_buffers(units)
        self._converted: tuple[Slice, dict[str, torch.Tensor]] | None = None
        shapes = self._name_all()
        self.entries = [Entry(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]
        for name, buffer in self._buffers.items():
            kept = dtype if buffer.is_floating_point() else buffer.dtype
            assert kept in CODES, f"{name} is {kept}"
            self.entries.append(Entry(name=name, shape=tuple(buffer.shape), dtype=kept))
        # One tensor of an odd size would move all that follow off the addresses that kernels prefer: those go last.
        self.entries.sort(key=lambda entry: entry.nbytes % ALIGN != 0)

    def data(self, entry: Entry) -> Iterator[torch.Tensor]:
        """The tensor's data in the entry's dtype, rounded to the nearest, ties to even."""
        source = self._sources.get(entry.name)
        if source is None:
            yield self._buffers[entry.name].to(entry.dtype)
        elif source.same:
            for piece in self._state.pieces(source.unit, source.place, "weight"):
                yield _rounded(entry, piece)
        else:
            yield _rounded(entry, self._product(source)[entry.name])

    def _product(self, source: _Source) -> dict[str, torch.Tensor]:
        """What the conversion makes of a parameter; kept until the next one, as its products follow one another."""
        if self._converted is None or self._converted[0] != source.place:
            self._converted = None  # before the next one is read: one at a time is in memory
            whole = self._state.tensor(source.unit, source.place, "weight")
            self._converted = source.place, revert_weight_conversion(self._units.model, {source.place.name: whole})
        return self._converted[1]

    def _name_all(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the files, found by converting tensors without memory."""
        model = self._units.model
        bare = {s.name: torch.empty(s.shape, device="meta") for _, s in self._units.slices()}
        shapes: dict[str, tuple[int, ...]] = {}
        for unit in self._units.stored:
            for place in unit.slices:
                made = revert_weight_conversion(model, {place.name: bare[place.name]})
                for name, tensor in made.items():
                    same = tensor is bare[place.name]
                    shapes[name] = tuple(tensor.shape)
                    self._sources[name] = _Source(unit=unit, place=place, same=same)
        whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, bare).items()}
        if whole != shapes:
            odd = sorted(whole.keys() ^ shapes.keys()) or sorted(n for n in whole if whole[n] != shapes[n])
            raise UserError(
                f"{type(model).__name__}: transformers makes {odd[0]} of several parameters when it saves this "
                "architecture, which cannot be exported part by part. Fix: export --format zarr has every parameter"
            )
        return shapes


def _rounded(entry: Entry, values: torch.Tensor) -> torch.Tensor:
    rounded = values.to(entry.dtype)
    if entry.dtype != torch.float32 and not torch.isfinite(rounded).all() and torch.isfinite(values).all():
        largest = values.abs().max().item()
        raise UserError(
            f"{entry.name} holds {largest:g}, which {str(entry.dtype).removeprefix('torch.')} cannot: at most "
            f"{torch.finfo(entry.dtype).max:g}. Fix: --dtype {'bfloat16 or ' * (largest < 3e38)}float32"
        )
    return rounded
