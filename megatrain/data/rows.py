"""Rows of chat data from their files, one at a time, each with its line.

Scope: JSONL, JSON (an array, or objects one after another), Parquet, data sets of the `datasets` library.
Not here: which sources there are (`chat_sources.py`), what a row means (`conversation.py`).

Memory: one block of a file and one row, or one batch of Parquet rows; never a whole file.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatrain.data.chat_sources import ChatSource
from megatrain.data.conversation import RowFaultError
from megatrain.errors import UserError

BLOCK_BYTES = 1 << 20
LONGEST_ROW_BYTES = 64 << 20
BATCH_ROWS = 256
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """What one row holds, or why it could not be read. line: counted from 1; the row's number where there are none."""

    line: int
    done_bytes: int
    value: object = None
    fault: RowFaultError | None = None


def read_rows(source: ChatSource) -> Iterator[RawRow]:
    """The rows of a source. Raises UserError when it cannot be read on."""
    if source.place != "file":
        rows = _dataset_rows(source)
    elif source.path.lower().endswith(".parquet"):
        rows = _parquet_rows(source)
    elif source.path.lower().endswith(".jsonl"):
        rows = _file_rows(source, _lines)
    else:
        rows = _file_rows(source, _values)
    for number, row in enumerate(rows):
        if source.most_rows is not None and number >= source.most_rows:
            return
        yield row


def _file_rows(source: ChatSource, read: Any) -> Iterator[RawRow]:
    try:
        with open(source.path, "rb") as file:
            yield from read(file, source)
    except OSError as error:
        raise UserError(f"data.paths: {source.path} cannot be read: {error.strerror or error}") from None


def _lines(file: BinaryIO, source: ChatSource) -> Iterator[RawRow]:
    line = done_bytes = 0
    while text := file.readline(LONGEST_ROW_BYTES):
        line += 1
        done_bytes += len(text)
        fault, value = None, None
        if len(text) == LONGEST_ROW_BYTES and not text.endswith(b"\n"):
            while (rest := file.readline(BLOCK_BYTES)) and not rest.endswith(b"\n"):
                done_bytes += len(rest)
            fault = RowFaultError("longer than 64 MiB")
        else:
            try:
                value = _parsed(text.removeprefix(_BOM) if line == 1 else text)
            except RowFaultError as error:
                fault = error
        yield RawRow(line=line, done_bytes=done_bytes, value=value, fault=fault)


def _parsed(text: bytes) -> object:
    if not text.strip():
        raise RowFaultError("an empty line")
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowFaultError("not UTF-8", f"byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise RowFaultError("not JSON", str(error)) from None


def _values(file: BinaryIO, source: ChatSource) -> Iterator[RawRow]:
    stream = _JsonStream(file, source.path)
    while stream.seek_value():
        line = stream.line
        value = stream.take()
        yield RawRow(line=line, done_bytes=stream.done_bytes, value=value)


class _JsonStream:
    """JSON values one after another, or the items of one array, from a file that may be larger than memory."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.line = 1
        self.done_bytes = 0
        self._file = file
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._ended = False
        self._array = False
        self._values = 0
        self._wanted = BLOCK_BYTES

    def seek_value(self) -> bool:
        """Go to the next value; false when there is none."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n,":
                self._step(self._at + 1)
            if self._at == len(self._text):
                if not self._more():
                    if self._array:
                        raise self._fault("the array does not end")
                    return False
            elif self._text[self._at] == "[" and not self._array and self._values == 0:
                self._array = True
                self._step(self._at + 1)
            else:
                return not (self._array and self._text[self._at] == "]")

    def take(self) -> object:
        """The value at which `seek_value` stopped."""
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._more():
                    continue
                raise self._fault(str(error)) from None
            if end == len(self._text) and self._more():  # the value may go on
                continue
            self._step(end)
            self._values += 1
            self._wanted = BLOCK_BYTES
            return value

    def _more(self) -> bool:
        """Read on, twice as much each time that one value asks; false at the end of the file."""
        if self._ended:
            return False
        if len(self._text) - self._at > LONGEST_ROW_BYTES:
            raise self._fault("a row is longer than 64 MiB")
        block = self._file.read(self._wanted)
        self._wanted *= 2
        self.done_bytes += len(block)
        self._ended = not block
        try:
            text = self._decode.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._fault(f"not UTF-8 ({error.reason})") from None
        if self._ended:
            return False  # and every position in the text still holds
        self._text, self._at = self._text[self._at :] + text, 0
        return True

    def _step(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _fault(self, what: str) -> UserError:
        return UserError(
            f"data.paths: {self._path}: the row at line {self.line} is not JSON: {what}. Fix: mend it; in a file that "
            "is named .jsonl, with one row a line, a bad row is left out and counted"
        )


def _parquet_rows(source: ChatSource) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(source.path) as file:
            total, number = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(line=number, done_bytes=source.nbytes * number // total, value=value)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.paths: {source.path} cannot be read as Parquet: {reason}") from None


def _dataset_rows(source: ChatSource) -> Iterator[RawRow]:
    table = load_table(source)
    total = max(len(table), 1)
    for number, value in enumerate(table, start=1):
        yield RawRow(line=number, done_bytes=source.nbytes * number // total, value=value)


def load_table(source: ChatSource) -> Any:
    """A table of the `datasets` library, memory-mapped. Raises UserError when it cannot be had."""
    import datasets

    try:
        if source.place == "saved":
            table = datasets.load_from_disk(source.path)
        else:
            table = datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # the library and what it calls raise classes of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"data.paths: the data set {source.path} cannot be loaded: {reason}") from None
    if isinstance(table, datasets.DatasetDict):
        if source.split not in table:
            raise UserError(
                f"data.split: {source.path} has no split `{source.split}`. Fix: one of {', '.join(map(str, table))}"
            )
        table = table[source.split]
    return table
