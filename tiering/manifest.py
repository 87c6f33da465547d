"""What a commit says: the step, the slot of every block, and the run that it belongs to.

Scope: the records `TensorSpec` and `StoredBlock`, the manifest file: its checked form, reading, and replacing it so
that a crash leaves either the old or the new one, whole.
Not here: which bytes are written where, and when a commit happens (`tiering/store.py`).

Nothing in a manifest can name a path that is used: files are found from checked unit and kind names, the letter of a
slot and the number of a chunk, in folders that the caller gives. The paths of drives are there to be told to a person.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from tiering.errors import DamagedStateError, WrongStateError
from tiering.spread import DIGITS, Spread, whole
from tiering.workload import PAGE

JSON: TypeAlias = JsonValue
Slot: TypeAlias = Literal["a", "b"]
OTHER: Mapping[Slot, Slot] = {"a": "b", "b": "a"}

ITEM_NBYTES = 4  # float32
Format: TypeAlias = Literal[1, 2]
ONE_DRIVE: Format = 1
SEVERAL_DRIVES: Format = 2
"""Formats: the second one has drives, and a spread for every block; a program that knows the first alone refuses it."""
FILE_NAME = "manifest.json"
SEAL = "seal"
UNIT_PATTERN = re.compile(r"[A-Za-z0-9_]+([.\-][A-Za-z0-9_]+)*")
KIND_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
RESERVED = frozenset({FILE_NAME, "zarr.json"})
MAX_NAME = 200
LOST = "Fix: restore that file from a copy; the run must be restarted otherwise."


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


class SpreadEntry(_Strict):
    """A letter of `drives` is the drive of a chunk."""

    chunk_bytes: Annotated[int, Field(gt=0, multiple_of=PAGE)]
    drives: Annotated[str, Field(pattern=r"^[0-9a-z]+$")]


class BlockEntry(_Strict):
    unit: str
    kind: str
    nbytes: int
    slot: Slot
    tensors: tuple[TensorEntry, ...]
    spread: SpreadEntry | None = None

    @classmethod
    def of(cls, block: StoredBlock, slot: Slot, spread: Spread | None) -> "BlockEntry":
        tensors = tuple(TensorEntry(name=t.name, shape=t.shape, offset=t.offset) for t in block.tensors)
        entry = SpreadEntry(chunk_bytes=spread.chunk_bytes, drives=spread.text) if spread else None
        return cls(unit=block.unit, kind=block.kind, nbytes=block.nbytes, slot=slot, tensors=tensors, spread=entry)

    def block(self) -> StoredBlock:
        tensors = tuple(TensorSpec(name=t.name, shape=t.shape, offset=t.offset) for t in self.tensors)
        return StoredBlock(
            name=f"{self.unit}/{self.kind}", unit=self.unit, kind=self.kind, nbytes=self.nbytes, tensors=tensors
        )

    def chunks(self) -> Spread:
        """Where its chunks are; in a store of one drive all of it is one chunk."""
        if self.spread is None:
            return whole(self.nbytes)
        return Spread(
            chunk_bytes=self.spread.chunk_bytes, drives=tuple(DIGITS.index(letter) for letter in self.spread.drives)
        )


class ChecksumsEntry(_Strict):
    """Where the checksums of the blocks are; `checksum` is that of their file."""

    slot: Slot
    algorithm: Literal["xxh3_64"]
    grain_bytes: Annotated[int, Field(gt=0, multiple_of=PAGE)]
    checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class DrivePlace(_Strict):
    """A drive when the store was made. path: its folder, which may have moved since. bytes_per_s: how fast it was."""

    path: str
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Manifest(_Strict):
    """One commit. `step` is None between the creation of a store and its first commit. store: a name that the markers
    on its drives repeat; drives: the root's first. A store of one drive has neither. checksums: None in a store that an
    earlier version made.
    """

    format: Format = ONE_DRIVE
    step: Annotated[int, Field(ge=0)] | None
    created: str
    updated: str
    identity: dict[str, JsonValue]
    run: dict[str, JsonValue]
    blocks: tuple[BlockEntry, ...]
    store: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    drives: Annotated[tuple[DrivePlace, ...], Field(max_length=len(DIGITS))] = ()
    checksums: ChecksumsEntry | None = None

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

    @model_validator(mode="after")
    def _drives_are_sound(self) -> Self:
        several = self.format == SEVERAL_DRIVES
        if bool(self.store) != several or (len(self.drives) > 1) != several or (self.drives and not several):
            raise ValueError(f"format {self.format} with {len(self.drives)} drives and the name {self.store!r}")
        for entry in self.blocks:
            if (entry.spread is not None) != several:
                raise ValueError(f"format {self.format}, and block {entry.unit}/{entry.kind} has {entry.spread}")
            chunks = entry.chunks()
            count = -(-entry.nbytes // chunks.chunk_bytes)
            if chunks.chunk_bytes > entry.nbytes or count != len(chunks.drives):
                raise ValueError(
                    f"block {entry.unit}/{entry.kind} of {entry.nbytes} bytes has {len(chunks.drives)} chunks of "
                    f"{chunks.chunk_bytes}"
                )
            if several and max(chunks.drives) >= len(self.drives):
                raise ValueError(
                    f"block {entry.unit}/{entry.kind} is on drive {max(chunks.drives)} of {len(self.drives)}"
                )
        return self

    def as_json(self) -> dict[str, JSON]:
        """What is written; what a store of one drive, or of an earlier version, has not is left out."""
        left_out: dict[str, Any] = {} if self.checksums else {"checksums": True}
        if self.format == ONE_DRIVE:
            left_out |= {"store": True, "drives": True, "blocks": {"__all__": {"spread"}}}
        return self.model_dump(mode="json", exclude=left_out)


def seal_of(items: Mapping[str, JSON]) -> str:
    """The checksum of a manifest but for its seal; spaces and the order of keys do not matter."""
    rest = {key: value for key, value in items.items() if key != SEAL}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


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
        seal = found.pop(SEAL, None)
        text, wanted = json.dumps(found).encode(), seal_of(found)
    except (ValueError, RecursionError, AttributeError) as error:
        raise DamagedStateError(
            f"{path} is damaged: {len(text)} bytes that are not a JSON object ({error}). {LOST}"
        ) from error
    if isinstance(version, int) and version not in (ONE_DRIVE, SEVERAL_DRIVES):
        raise WrongStateError(
            f"{path} has format {version}, this version reads formats {ONE_DRIVE} and {SEVERAL_DRIVES}. "
            f"Fix: use the version that wrote it."
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedStateError(
            f"{path} is damaged: {place or 'the whole'}: {first['msg']} ({error.error_count()} faults). {LOST}"
        ) from error
    if seal != wanted and (seal is not None or manifest.checksums is not None):
        raise DamagedStateError(f"{path} is damaged: its seal is {seal!r}, its content has {wanted!r}. {LOST}")
    return manifest


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Puts `manifest` in place of the old one, durably. A crash or an error leaves the one or the other, whole."""
    put_manifest(root, manifest)
    fsync_directory(root)


def put_manifest(root: Path, manifest: Manifest) -> None:
    """The same, but for the last sync: it is in place, and until `fsync_directory(root)` a power cut may bring back the
    old one. So nothing that the old one names may be overwritten before that.
    """
    items = manifest.as_json()
    text = json.dumps({**items, SEAL: seal_of(items)}, indent=1, allow_nan=False).encode() + b"\n"
    temporary = root / ".manifest.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        done = 0
        while done < len(text):
            done += os.pwrite(fd, memoryview(text)[done:], done)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, root / FILE_NAME)


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
