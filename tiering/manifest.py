"""What a commit says: the step, the slot of every block, and the run that it belongs to.

Scope: the records `TensorSpec` and `StoredBlock`, the manifest file: its checked form, reading, and replacing it so
that a crash leaves either the old or the new one, whole.
Not here: which bytes are written where, and when a commit happens (`tiering/store.py`).

Nothing in a manifest can name a path: files are found from checked unit and kind names and the letter of a slot.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from tiering.errors import DamagedStateError, WrongStateError
from tiering.workload import PAGE

JSON: TypeAlias = JsonValue
Slot: TypeAlias = Literal["a", "b"]

ITEM_NBYTES = 4  # float32
FORMAT = 1
FILE_NAME = "manifest.json"
UNIT_PATTERN = re.compile(r"[A-Za-z0-9_]+([.\-][A-Za-z0-9_]+)*")
KIND_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
RESERVED = frozenset({FILE_NAME, "zarr.json"})
MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a block; `offset` counts elements from the start of the block."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A block on disk. `name` is "unit/kind"; `nbytes` is a multiple of 4096. A scratch block is in no commit."""

    name: str
    unit: str
    kind: str
    nbytes: int
    tensors: tuple[TensorSpec, ...] = ()
    scratch: bool = False


def check_block(block: StoredBlock) -> None:
    """Raises `ValueError` for a name that is not one path component, a size off the grid, a tensor that sticks out."""
    if not UNIT_PATTERN.fullmatch(block.unit) or block.unit in RESERVED or len(block.unit) > MAX_NAME:
        raise ValueError(
            f"unit {block.unit!r} cannot name a folder of the store: "
            f"words of letters, digits and _ joined by single . or -, at most {MAX_NAME} characters"
        )
    if not KIND_PATTERN.fullmatch(block.kind) or len(block.kind) > MAX_NAME:
        raise ValueError(f"kind {block.kind!r} of unit {block.unit!r} cannot name a folder of the store")
    if block.name != f"{block.unit}/{block.kind}":
        raise ValueError(f"block {block.name!r} must be named {block.unit}/{block.kind}")
    if block.nbytes <= 0 or block.nbytes % PAGE:
        raise ValueError(f"block {block.name}: {block.nbytes} bytes is not a positive multiple of {PAGE}")
    for spec in block.tensors:
        end = (spec.offset + math.prod(spec.shape)) * ITEM_NBYTES
        if spec.offset < 0 or min(spec.shape, default=0) < 0 or end > block.nbytes:
            raise ValueError(f"block {block.name}: tensor {spec.name} ends at byte {end} of {block.nbytes}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TensorEntry(_Strict):
    name: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    offset: Annotated[int, Field(ge=0)]


class BlockEntry(_Strict):
    unit: str
    kind: str
    nbytes: int
    slot: Slot
    tensors: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, block: StoredBlock, slot: Slot) -> "BlockEntry":
        tensors = tuple(TensorEntry(name=t.name, shape=t.shape, offset=t.offset) for t in block.tensors)
        return cls(unit=block.unit, kind=block.kind, nbytes=block.nbytes, slot=slot, tensors=tensors)

    def block(self) -> StoredBlock:
        tensors = tuple(TensorSpec(name=t.name, shape=t.shape, offset=t.offset) for t in self.tensors)
        return StoredBlock(
            name=f"{self.unit}/{self.kind}", unit=self.unit, kind=self.kind, nbytes=self.nbytes, tensors=tensors
        )


class Manifest(_Strict):
    """One commit. `step` is None between the creation of a store and its first commit."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0)] | None
    created: str
    updated: str
    identity: dict[str, JsonValue]
    run: dict[str, JsonValue]
    blocks: tuple[BlockEntry, ...]

    @field_validator("blocks")
    @classmethod
    def _blocks_are_sound(cls, entries: tuple[BlockEntry, ...]) -> tuple[BlockEntry, ...]:
        seen: set[str] = set()
        for entry in entries:
            block = entry.block()
            check_block(block)
            if block.name in seen:
                raise ValueError(f"block {block.name} is named twice")
            seen.add(block.name)
        return entries


def plain(items: Mapping[str, JSON]) -> dict[str, JSON]:
    """A deep copy as a manifest gives it back (tuples become lists); `ValueError` or `TypeError` if JSON cannot."""
    copy: dict[str, JSON] = json.loads(json.dumps(dict(items), allow_nan=False))
    return copy


def read_manifest(root: Path) -> Manifest:
    """Raises `WrongStateError` where there is no store, `DamagedStateError` where the manifest is not whole."""
    path = root / FILE_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (root / ".slots").is_dir():
            raise WrongStateError(
                f"{root} holds a store without {FILE_NAME}: its creation was interrupted, or that "
                f"file was lost. Fix: remove the folder and start the run anew."
            ) from None
        raise WrongStateError(
            f"{root} is not a store: it has no {FILE_NAME}. Fix: name the folder of an earlier run, or start a new run."
        ) from None
    except OSError as error:
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}. Fix: check the disk (dmesg).") from error
    try:
        found = json.loads(text)
        version = found.get("format")
    except (ValueError, RecursionError, AttributeError) as error:
        raise DamagedStateError(
            f"{path} is damaged: {len(text)} bytes that are not a JSON object ({error}). "
            f"Fix: restore that file from a copy; the run must be restarted otherwise."
        ) from error
    if isinstance(version, int) and version != FORMAT:
        raise WrongStateError(
            f"{path} has format {version}, this version reads format {FORMAT}. Fix: use the version that wrote it."
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedStateError(
            f"{path} is damaged: {place}: {first['msg']} ({error.error_count()} faults). "
            f"Fix: restore that file from a copy; the run must be restarted otherwise."
        ) from error


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Puts `manifest` in place of the old one, durably. A crash or an error leaves the old one or the new one, whole.

    An error after the rename leaves it open which of the two a power loss would leave: the caller must stop there.
    """
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, allow_nan=False).encode() + b"\n"
    temporary = root / ".manifest.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)
    os.rename(temporary, root / FILE_NAME)
    fsync_directory(root)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def difference(wanted: JSON, found: JSON, at: str = "") -> tuple[str, JSON, JSON] | None:
    """The first item of `wanted` that `found` has not equal: (dotted name, wanted, found); None if all are.

    Only at the top may `found` have more items.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys()):
            name = f"{at}.{key}" if at else key
            if key not in found:
                return name, wanted[key], "nothing"
            deeper = difference(wanted[key], found[key], name)
            if deeper:
                return deeper
        more = sorted(found.keys() - wanted.keys()) if at else []
        return (f"{at}.{more[0]}", "nothing", found[more[0]]) if more else None
    same = wanted == found and isinstance(wanted, bool) is isinstance(found, bool)
    return None if same else (at, wanted, found)
