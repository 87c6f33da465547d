"""Chat data tokenised into samples, as a stream, once for each set of sources, tokenizer, template and settings.

Scope: `prepare_samples`; every row becomes a sample or is left out with its reason and line.
Not here: sources and rows (`chat_sources.py`, `rows.py`), template and truncation (`template.py`), the files
(`sample_file.py`).

The template decides every token, the end of a turn and of the text included; no special token is added to its text.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.batch import sample_room
from megatrain.data.chat_sources import ChatSource, list_chat_sources
from megatrain.data.conversation import RowFaultError, conversation_of
from megatrain.data.rows import RawRow, load_table, read_rows
from megatrain.data.sample_file import Rejected, SampleFile, SampleWriter
from megatrain.data.seen import SeenRows
from megatrain.data.sources import describe_left_out
from megatrain.data.template import ChatTemplate, encode_within, load_template
from megatrain.errors import UserError
from tiering.errors import DiskFullError

if TYPE_CHECKING:
    from megatrain.config import DataConfig

Progress = Callable[[int, int], None]

PROGRESS_ROWS = 64
FORMAT = 1
"""Raised when the same rows would give other samples."""


def prepare_samples(
    data: "DataConfig", vocab_size: int, cache_dir: Path, progress: Progress | None = None
) -> SampleFile:
    """The samples of `data` in `cache_dir`: those already there when they were made from the same, else new ones.

    `progress` is called with (bytes done, bytes in all). Raises UserError for data, tokenizer or template that cannot
    be used, and for an id that the model's table of `vocab_size` rows does not have; DiskFullError when the cache does
    not fit.
    """
    assert isinstance(data.tokenizer, Path), data.tokenizer
    listed = list_chat_sources(data.paths, data.datasets, data.split)
    template = load_template(data.tokenizer, data.chat_template)
    origin = _origin(data, vocab_size, listed.found, template)
    found = SampleFile.load(cache_dir)
    if found is None or found.origin != origin:
        if data.train_on == "assistant":
            template.check()
        left_out = describe_left_out(listed.left_out)
        notices = (f"data.paths: {left_out}, {len(listed.found)} files listed",) if left_out else ()
        try:
            found = _write(data, vocab_size, cache_dir, listed.found, template, origin, notices, progress)
        except OSError as error:
            raise _cannot_write(cache_dir, error) from None
    if found.samples == 0:
        first = next(iter(found.rejections()), None)
        why = f"; the first one, line {first.line} of {first.source}: {_reason(first)}" if first else ""
        raise UserError(f"data.paths: no row can be used, {sum(found.rejected.values())} were read{why}")
    return found


def _reason(rejected: Rejected) -> str:
    return f"{rejected.reason}: {rejected.detail}" if rejected.detail else rejected.reason


def _origin(
    data: "DataConfig", vocab_size: int, sources: tuple[ChatSource, ...], template: ChatTemplate
) -> Mapping[str, Any]:
    """Everything that decides the samples, as JSON."""
    seen = [{**asdict(source), "fingerprint": _table_fingerprint(source)} for source in sources]
    for source in seen:
        source["fmt"]["roles"] = [list(pair) for pair in source["fmt"]["roles"]]
    return {
        "format": FORMAT,
        "sources": seen,
        "template": template.checksum(),
        "vocab_size": vocab_size,
        "room": sample_room(data.seq_len, packed=data.packing),
        "train_on": data.train_on,
    }


def _table_fingerprint(source: ChatSource) -> str | None:
    """What tells two versions of a named data set apart: no file of it can be looked at."""
    return str(load_table(source)._fingerprint) if source.place == "hub" else None


def _write(
    data: "DataConfig",
    vocab_size: int,
    cache_dir: Path,
    sources: tuple[ChatSource, ...],
    template: ChatTemplate,
    origin: Mapping[str, Any],
    notices: tuple[str, ...],
    progress: Progress | None,
) -> SampleFile:
    total_bytes, done_bytes = sum(source.nbytes for source in sources), 0
    with SampleWriter(cache_dir, vocab_size) as writer:
        tokeniser = _Tokeniser(data, vocab_size, sources, template, writer)
        for number, source in enumerate(sources):
            for count, row in enumerate(read_rows(source)):
                tokeniser.take(number, row)
                if progress is not None and count % PROGRESS_ROWS == 0:
                    progress(min(done_bytes + row.done_bytes, total_bytes), total_bytes)
            done_bytes += source.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        return writer.finish(
            origin=origin,
            sources=tuple(source.path for source in sources),
            vocab_size=vocab_size,
            padding_id=template.padding_id(vocab_size),
            notices=notices,
        )


class _Tokeniser:
    """Rows into samples of one writer."""

    def __init__(
        self,
        data: "DataConfig",
        vocab_size: int,
        sources: tuple[ChatSource, ...],
        template: ChatTemplate,
        writer: SampleWriter,
    ) -> None:
        self._train_on = data.train_on
        self._room = sample_room(data.seq_len, packed=data.packing)
        self._vocab_size = vocab_size
        self._sources = sources
        self._template = template
        self._writer = writer
        self._seen = SeenRows()

    def take(self, source: int, row: RawRow) -> None:
        try:
            self._add(source, row)
        except RowFaultError as fault:
            detail = str(fault).removeprefix(fault.reason).removeprefix(": ")
            path = self._sources[source].path
            self._writer.reject(Rejected(source=path, line=row.line, reason=fault.reason, detail=detail))

    def _add(self, source: int, row: RawRow) -> None:
        if row.fault is not None:
            raise row.fault
        conversation = conversation_of(row.value, self._sources[source].fmt)
        encoded = encode_within(self._template, conversation, self._room, self._train_on)
        self._check_ids(encoded.ids, source, row.line)
        earlier = self._seen.first(conversation.digest(), (source << 40 | row.line))
        if earlier is not None:
            where = "" if earlier >> 40 == source else f" of {self._sources[earlier >> 40].path}"
            raise RowFaultError("the same as an earlier row", f"line {earlier & (1 << 40) - 1}{where}")
        self._writer.changes[encoded.change] += 1
        self._writer.add(encoded.ids, encoded.supervised, encoded.targets, source, row.line)

    def _check_ids(self, ids: "np.ndarray[Any, np.dtype[np.int64]]", source: int, line: int) -> None:
        if len(ids) == 0 or int(ids.max()) < self._vocab_size:
            return
        position = int(np.argmax(ids >= self._vocab_size))
        raise UserError(
            f"{self._sources[source].path}: row {line}: token {position} has the id {int(ids[position])}, but the "
            f"model's table has {self._vocab_size} rows (ids 0 to {self._vocab_size - 1}). Fix: the tokenizer that "
            "belongs to the model, or a larger vocab_size (with model.path: model.resize_vocabulary: auto)"
        )


def _cannot_write(cache_dir: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free_bytes = shutil.disk_usage(cache_dir).free
        return DiskFullError(
            f"{cache_dir}: no room for the tokens, {free_bytes} bytes free. Fix: free space, or another output.dir"
        )
    return UserError(f"{cache_dir}: the tokens cannot be written: {error.strerror or error}. Fix: another output.dir")
