"""The whole training state as a portable Zarr v3 snapshot, and a new store made from one.

Scope: `export --format zarr` and `megatrain import`: the layout, writing, checking, reading back.
Not here: the store of a run (`tiering/store.py`), reading it (`committed.py`), the model folder (`export.py`).

    DIR/zarr.json  DIR/weight/zarr.json  DIR/exp_avg/zarr.json  DIR/exp_avg_sq/zarr.json     groups
    DIR/<kind>/<parameter>/zarr.json, c/...                                                  float32, its own shape
    DIR/snapshot.json                                                                        step, run, identity

Every chunk is written, zeros too, and carries a checksum. The fill value is NaN, and reading never fills in: a lost
chunk is an error, a flipped bit as well.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from rich.console import Console

from megatrain import __version__
from megatrain.committed import LOOK_S, PIECE_BYTES, Committed, at_step, run_of
from megatrain.config import RUN_FILE, RunConfig, dump_run
from megatrain.errors import UserError
from megatrain.export import progress_bar
from megatrain.model import Slice, Unit, Units
from megatrain.new_folder import appearing, folders_of, refuse_place
from megatrain.optim import TiledAdamW
from megatrain.prepare import Prepared, prepare
from megatrain.programs import KINDS, block_name
from megatrain.run_model import run_units
from megatrain.sizes import format_size
from megatrain.trainer import identity, open_run_batches, tensor_specs
from tiering.errors import DamagedStateError
from tiering.manager import Manager
from tiering.manifest import difference, fsync_directory, plain
from tiering.spread import rate_of
from tiering.store import BlockStore

FILE_NAME = "snapshot.json"
FORMAT = 1
METADATA_BYTES = 16 << 20
LAYOUT = "parameter_layout"
"""The item of the identity that says how a store cuts the parameters; a snapshot knows only names and shapes."""


class Snapshot(BaseModel):
    """snapshot.json: what the arrays belong to."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int = Field(ge=FORMAT, le=FORMAT)
    megatrain: str
    created: str
    step: int = Field(ge=0)
    parameters: dict[str, tuple[int, ...]]
    run: dict[str, JsonValue]
    identity: dict[str, JsonValue]
    config: dict[str, JsonValue]


def export_snapshot(run_dir: Path, out: Path, *, force: bool, step: int | None = None, console: Console) -> Path:
    """Write weights and moments of a commit to the folder `out`; returns it. step: None for the last commit.

    Raises UserError or a TieringError; then `out` is what it was before.
    """
    run = run_of(run_dir)
    target = refuse_place(out, folders_of(run), force=force)
    run = at_step(run, step)
    units = run_units(run.model)
    nbytes = _snapshot_bytes(units)
    with (
        Committed(run, units) as state,
        appearing(target, nbytes=nbytes + METADATA_BYTES) as folder,
        progress_bar(console) as progress,
    ):
        task = progress.add_task("snapshot", total=nbytes)
        folder.mkdir()
        _write_group(folder)
        for kind in KINDS:
            _write_group(folder / kind)
            for unit, place in (pair for pair in units.slices() if kind in pair[0].kinds):
                for moved in _write_array(folder / kind, state, unit, place, kind):
                    progress.advance(task, moved)
                state.watch.check(every_s=LOOK_S)
        state.watch.check()
        snapshot = Snapshot(
            format=FORMAT,
            megatrain=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            step=state.step,
            parameters={place.name: place.shape for _, place in units.slices()},
            run=dict(state.store.run),
            identity=dict(state.store.identity),
            config=run.model.json_config(),
        )
        _write_durably(folder / FILE_NAME, json.dumps(snapshot.model_dump(mode="json"), indent=1) + "\n")
    console.print(
        f"{target}: step {state.step}, {len(snapshot.parameters)} parameters with both moments, {format_size(nbytes)}",
        highlight=False,
        soft_wrap=True,
    )
    return target


def _write_group(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    content = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    _write_durably(folder / "zarr.json", json.dumps(content, indent=1) + "\n")


def _write_durably(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(path.parent)


def chunk_shape(shape: tuple[int, ...], most_bytes: int = PIECE_BYTES) -> tuple[int, ...]:
    """Chunks of float32 of at most `most_bytes` that are each one stretch of the array in C order.

    >>> chunk_shape((100, 10), 400), chunk_shape((3, 100, 10), 400), chunk_shape(())
    ((10, 10), (1, 10, 10), ())
    """
    chunk = list(shape)
    for axis, length in enumerate(shape):
        rest = 4 * prod(shape[axis + 1 :])
        chunk[axis] = min(length, max(1, most_bytes // max(rest, 1)))
        if chunk[axis] > 1 or rest <= most_bytes:
            break
    return tuple(chunk)


def regions(shape: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """The chunks of an array in C order: (index, lo, hi), where [lo, hi) are its elements in the flat array."""
    chunk = chunk_shape(shape)
    counts = [-(-length // size) for length, size in zip(shape, chunk, strict=True)]
    lo = 0
    for at in np.ndindex(*counts):
        index = tuple(
            slice(i * size, min((i + 1) * size, length)) for i, size, length in zip(at, chunk, shape, strict=True)
        )
        hi = lo + prod(part.stop - part.start for part in index)
        yield index, lo, hi
        lo = hi


def _write_array(folder: Path, state: Committed, unit: Unit, place: Slice, kind: str) -> Iterator[int]:
    """One parameter, chunk by chunk; yields the bytes of each."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder / place.name}/"},
        "metadata": {
            "shape": list(place.shape),
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape(place.shape))}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "fill_value": "NaN",
        },
        "store_data_equal_to_fill_value": True,
    }
    array = tensorstore.open(spec, create=True).result()
    for index, lo, hi in regions(place.shape):
        values = state.read(unit, place, kind, lo, hi)
        shape = tuple(part.stop - part.start for part in index)
        array[index].write(values.view(shape).numpy()).result()  # durable: tensorstore flushes each file
        yield 4 * (hi - lo)


def import_snapshot(source: Path, run: RunConfig, console: Console) -> int:
    """Make the store of `run` from a snapshot, ready for a resume; returns its step.

    Raises UserError for a snapshot of another model or with other numbers, DamagedStateError for one that is not
    whole; then there is no store.
    """
    snapshot = read_snapshot(source)
    targets = [refuse_place(folder, [("the snapshot", source)], force=None) for folder in run.tiers.nvme]
    prepared = prepare(run)
    _refuse_shapes(source, snapshot, prepared.units)
    arrays = {
        (kind, place.name): _opened(source, kind, place)
        for unit, place in prepared.units.slices()
        for kind in unit.kinds
    }
    run.output.dir.mkdir(parents=True, exist_ok=True)
    batches = open_run_batches(prepared, run.output.dir, console)
    named = identity(prepared, batches)
    _refuse_other_run(source, snapshot, named)
    with ExitStack() as stack:
        # The root appears last: without it the other folders are no store.
        folders = [stack.enter_context(appearing(target)) for target in targets]
        with _created(prepared, folders, named) as manager:
            _fill(manager, prepared, arrays, console)
            manager.commit(snapshot.step, snapshot.run)
    root, *others = targets
    BlockStore.open(root, others=others).close()  # links between drives follow the folders to their final names
    (run.output.dir / RUN_FILE).write_text(dump_run(run))
    console.print(
        f"{root}: step {snapshot.step}, {prepared.units.parameters:,} parameters with both moments. "
        f"Next: megatrain train {run.output.dir / RUN_FILE} --resume",
        highlight=False,
        soft_wrap=True,
    )
    return snapshot.step


def _created(prepared: Prepared, folders: Sequence[Path], named: Mapping[str, JsonValue]) -> Manager:
    """A new, empty store of the run in `folders`."""
    root, *others = folders
    return Manager.create(
        prepared.plan,
        root,
        tensor_specs(prepared.units),
        named,
        TiledAdamW(prepared.units, prepared.run.optimizer),
        others=others,
        rates=[rate_of(drive) for drive in prepared.drives] if others else [],
        engine=prepared.run.tiers.engine,
        lanes=prepared.lanes(),
    )


def read_snapshot(source: Path) -> Snapshot:
    """Raises UserError where there is none, DamagedStateError where its description is not whole."""
    path = source / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{source} is not a snapshot: it has no {FILE_NAME}. Fix: a folder that `megatrain export --format zarr` "
            "wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedStateError(f"{path} cannot be read: {error}. Fix: copy the snapshot again") from error
    try:
        return Snapshot.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedStateError(f"{path} is damaged: {place}: {first['msg']}. Fix: copy the snapshot again") from None


def _snapshot_bytes(units: Units) -> int:
    """Weights, and both moments of what is trained."""
    return 4 * (units.parameters + (len(KINDS) - 1) * units.trainable)


def _refuse_shapes(source: Path, snapshot: Snapshot, units: Units) -> None:
    wanted = {place.name: place.shape for _, place in units.slices()}
    for name, shape in wanted.items():
        found = snapshot.parameters.get(name)
        if found != shape:
            has = "does not have it" if found is None else f"has it with shape {found}"
            raise UserError(f"model: {name} has shape {shape}, {source} {has}. Fix: the model that the snapshot is of")
    more = [name for name in snapshot.parameters if name not in wanted]
    if more:
        raise UserError(
            f"{source} has a parameter that the model does not know: {more[0]} ({len(more)} such). "
            "Fix: the model that the snapshot is of"
        )


def _refuse_other_run(source: Path, snapshot: Snapshot, named: Mapping[str, JsonValue]) -> None:
    items = {key: value for key, value in plain(named).items() if key != LAYOUT}
    unlike = difference(items, snapshot.identity)
    if unlike:
        raise UserError(
            f"{source} is the state of another run: {unlike[0]}: the run file says {unlike[1]!r}, the snapshot "
            f"{unlike[2]!r}. Fix: the settings and the data that it was made with"
        )


def _opened(source: Path, kind: str, place: Slice) -> Any:
    """An array of the snapshot, whose missing chunks are errors."""
    folder = source / kind / place.name
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "fill_missing_data_reads": False,
    }
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise DamagedStateError(f"{folder}: {kind} of {place.name} is missing or damaged: {_reason(error)}") from error
    if array.shape != place.shape or array.dtype != tensorstore.float32:
        raise DamagedStateError(
            f"{folder}: {kind} of {place.name} is {array.dtype.name} of shape {tuple(array.shape)}, wanted float32 of "
            f"shape {place.shape}. Fix: copy the snapshot again"
        )
    return array


def _fill(manager: Manager, prepared: Prepared, arrays: Mapping[tuple[str, str], Any], console: Console) -> None:
    """Every block from the arrays of its parameters, one block at a time."""
    with progress_bar(console) as progress:
        task = progress.add_task("import", total=_snapshot_bytes(prepared.units))
        for unit in prepared.units.stored:
            for kind in unit.kinds:

                def fill(block: torch.Tensor, unit: Unit = unit, kind: str = kind) -> None:
                    block.zero_()
                    for place in unit.slices:
                        for moved in _read_array(arrays[kind, place.name], kind, place, place.of(block).view(-1)):
                            progress.advance(task, moved)

                manager.put(block_name(unit.name, kind), fill)


def _read_array(array: Any, kind: str, place: Slice, into: torch.Tensor) -> Iterator[int]:
    """Fills `into`, flat, part by part; yields the bytes of each. Raises for what is lost, damaged or not finite."""
    for index, lo, hi in regions(place.shape):
        try:
            values = torch.from_numpy(np.ascontiguousarray(array[index].read().result()).reshape(-1))
        except ValueError as error:
            raise DamagedStateError(f"{kind} of {place.name}: {_reason(error)}") from error
        if not torch.isfinite(values).all():
            at = int((~torch.isfinite(values)).nonzero()[0])
            raise DamagedStateError(
                f"{kind} of {place.name}: element {lo + at} is {values[at].item()}, not a finite number. "
                "Fix: copy the snapshot again, or export an earlier commit"
            )
        into[lo:hi] = values
        yield 4 * (hi - lo)


def _reason(error: ValueError) -> str:
    """tensorstore's words, without the options it was called with."""
    words = " ".join(str(error).split()).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
    return f"{words}. Fix: copy the snapshot again"
