"""The Zarr v3 metadata of a store.

Scope: `zarr_metadata`: the metadata documents by path; the names of chunks.
Not here: chunk data (`tiering/engine.py` moves it, outside zarr), slots (`tiering/store.py`), links
(`tiering/chunk_files.py`).

zarr writes one document for each size of array, in memory; blocks of that size differ only in their attributes, which
are put in here. 1,000 arrays made one by one take zarr 1.3 s in memory and 5-7 s on disk (zarr 3.1.6, 2 cores).
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from tiering.manifest import ITEM_NBYTES, StoredBlock

PROJECT = "megatrain"


def chunk_key(number: int) -> str:
    """A chunk of a flat array under the default chunk key encoding, from the array's folder."""
    return f"c/{number}"


def zarr_metadata(blocks: Iterable[StoredBlock], chunk_bytes: Mapping[str, int], version: int) -> dict[str, bytes]:
    """{"zarr.json": ..., "<unit>/zarr.json": ..., "<unit>/<kind>/zarr.json": ...} for all blocks but scratch ones.

    Arrays are flat little-endian float32 in uncompressed chunks of `chunk_bytes[block name]`. The fill value is NaN:
    zarr reads a lost chunk as the fill value, and a silent zero would pass for a fresh moment.
    """
    documents = {"zarr.json": _with_attributes(_group(), {"project": PROJECT, "format": version})}
    for block in blocks:
        if block.scratch:
            continue
        tensors = [{"name": t.name, "shape": list(t.shape), "offset": t.offset} for t in block.tensors]
        documents[f"{block.unit}/zarr.json"] = _with_attributes(_group(), {})
        documents[f"{block.unit}/{block.kind}/zarr.json"] = _with_attributes(
            _array(block.nbytes // ITEM_NBYTES, chunk_bytes[block.name] // ITEM_NBYTES), {"tensors": tensors}
        )
    return documents


def _with_attributes(document: bytes, attributes: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads(document), "attributes": attributes}, indent=2).encode()


@cache
def _group() -> bytes:
    import zarr  # after the fast refusals: importing it takes a good part of a second
    from zarr.storage import MemoryStore

    documents: dict[str, Any] = {}
    zarr.create_group(MemoryStore(documents), zarr_format=3)
    return bytes(documents["zarr.json"].to_bytes())


@cache
def _array(nitems: int, chunk_nitems: int) -> bytes:
    import zarr
    from zarr.codecs import BytesCodec
    from zarr.storage import MemoryStore

    documents: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(documents),
        shape=(nitems,),
        chunks=(chunk_nitems,),
        dtype="float32",
        fill_value=math.nan,
        compressors=None,
        filters=None,
        serializer=BytesCodec(endian="little"),
        zarr_format=3,
    )
    return bytes(documents["zarr.json"].to_bytes())
