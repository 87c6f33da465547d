"""Text files tokenised into a token file, as a stream, once for each set of files and tokenizer.

Scope: `prepare_tokens`; reading, tokenising and checking ids; the cache is replaced as a whole or not at all.
Not here: which files (`sources.py`), what a token file is and how batches are cut from it (`tokens.py`).

Files follow one another without a separator, and no special token is added: text in, text out.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.data.sources import Source, Sources, describe_left_out, list_sources
from megatrain.data.tokens import DATA_NAME, HEADER_NAME, TokenFile, TokenOrigin, token_dtype
from megatrain.errors import UserError
from tiering.errors import DiskFullError

if TYPE_CHECKING:
    from megatrain.config import DataConfig

Progress = Callable[[int, int], None]

BLOCK_BYTES = 1 << 20  # text held at once; a tokenizer needs some 50 bytes for each byte of it
LONGEST_LINE_BLOCKS = 4  # a line longer than this is cut between two characters
NOT_UTF8 = "not UTF-8"


class _Encode(Protocol):
    def __call__(self, source: Source) -> "Iterator[tuple[int, NDArray[np.unsignedinteger[Any]]]]":
        """Blocks of ids with the bytes of text that each stands for."""


def prepare_tokens(data: "DataConfig", vocab_size: int, cache_dir: Path, progress: Progress | None = None) -> TokenFile:
    """The tokens of `data` in `cache_dir`: those already there when they were made from the same files, else new ones.

    `progress` is called with (bytes of text done, bytes of text in all). Raises UserError for a file that cannot be
    used, for an id that the model's table of `vocab_size` rows does not have, and for too few tokens;
    DiskFullError when the cache does not fit.
    """
    assert data.kind == "text", f"data of kind {data.kind} is opened with `open_data`"
    sources = list_sources(data.paths)
    file = data.tokenizer_file
    if file is None and vocab_size < 256:
        raise UserError(
            f"data.tokenizer: `bytes` needs a model with vocab_size >= 256, this one has {vocab_size}. "
            "Fix: model.config.vocab_size: 256, or a tokenizer.json"
        )
    checksum = "bytes" if file is None else f"sha256:{hashlib.sha256(_read_tokenizer(file)).hexdigest()}"
    origin = TokenOrigin(
        kind=data.kind,
        tokenizer=checksum,
        vocab_size=vocab_size,
        sources=tuple((s.path, s.nbytes, s.mtime_ns) for s in sources.files),
    )
    tokens = TokenFile.load(cache_dir)
    if tokens is None or tokens.origin != origin:
        encode = _encode_bytes if file is None else _text_encoder(file)
        tokens = _write(cache_dir, origin, sources, encode, progress or (lambda done, total: None))
    if tokens.count < data.seq_len:
        raise UserError(
            f"data.paths: {len(sources.files)} file(s) give {tokens.count} tokens, one window of "
            f"data.seq_len needs {data.seq_len}. Fix: more text, or data.seq_len <= {tokens.count}"
        )
    return tokens


def _write(cache_dir: Path, origin: TokenOrigin, sources: Sources, encode: _Encode, progress: Progress) -> TokenFile:
    """Fills a temporary file, then puts it in place; header last, so that a header always belongs to whole data."""
    data_path, header_path = cache_dir / DATA_NAME, cache_dir / HEADER_NAME
    temporary = cache_dir / f"{DATA_NAME}.{os.getpid()}.tmp"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w+b") as out:
            count, sha256, left_out = _fill(out, sources, encode, origin.vocab_size, progress)
            out.flush()
            os.fsync(out.fileno())
        notice = describe_left_out(left_out)
        tokens = TokenFile(
            folder=cache_dir,
            origin=origin,
            count=count,
            sha256=sha256,
            notices=(f"data.paths: {notice}, {len(sources.files)} files listed",) if notice else (),
        )
        header_path.unlink(missing_ok=True)
        os.replace(temporary, data_path)
        temporary.write_text(tokens.header(), encoding="utf-8")
        os.replace(temporary, header_path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted = sum(s.nbytes for s in sources.files) * token_dtype(origin.vocab_size).itemsize
            raise DiskFullError(
                f"{cache_dir}: no room for the tokens: up to {wanted} bytes wanted, "
                f"{shutil.disk_usage(cache_dir).free} free. "
                "Fix: free space, or another output.dir"
            ) from None
        raise UserError(
            f"{cache_dir}: the tokens cannot be written: {error.strerror or error}. Fix: another output.dir"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # the error that led here is the one to report
            temporary.unlink(missing_ok=True)
    return tokens


def _fill(
    out: BinaryIO, sources: Sources, encode: _Encode, vocab_size: int, progress: Progress
) -> tuple[int, str, Counter[str]]:
    """Writes the ids of all files to `out`; returns their number, their checksum and what was left out."""
    dtype, checksum, left_out = token_dtype(vocab_size), hashlib.sha256(), Counter(sources.left_out)
    total_bytes, done_bytes, count = sum(s.nbytes for s in sources.files), 0, 0
    for source in sources.files:
        start, position = checksum.copy(), 0
        try:
            for text_bytes, ids in encode(source):
                _check_ids(ids, source, position, vocab_size)
                chunk = ids.astype(dtype).tobytes()
                out.write(chunk)
                checksum.update(chunk)
                position += len(ids)
                progress(min(done_bytes + text_bytes, total_bytes), total_bytes)
        except _UnusableFileError as fault:
            if source.named:
                raise UserError(f"data.paths: {source.path} is {fault}. Fix: remove it, or convert it") from None
            out.seek(count * dtype.itemsize)  # what the file gave so far goes: a file is used whole or not at all
            out.truncate()
            checksum, position = start, 0
            left_out[fault.reason] += 1
        count += position
        done_bytes += source.nbytes
        progress(min(done_bytes, total_bytes), total_bytes)
    return count, checksum.hexdigest(), left_out


class _UnusableFileError(Exception):
    """A file whose content cannot be used; `reason` is counted when the file was not named by the run file."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def _check_ids(ids: NDArray[np.unsignedinteger[Any]], source: Source, position: int, vocab_size: int) -> None:
    if len(ids) == 0 or int(ids.max()) < vocab_size:
        return
    first = int(np.argmax(ids >= vocab_size))
    raise UserError(
        f"{source.path}: token {position + first} has the id {int(ids[first])}, but the model's table has "
        f"{vocab_size} rows (ids 0 to {vocab_size - 1}). Fix: the tokenizer that belongs to the model, "
        "or a larger vocab_size (with model.path: model.resize_vocabulary: auto)"
    )


def _encode_bytes(source: Source) -> Iterator[tuple[int, NDArray[np.unsignedinteger[Any]]]]:
    done_bytes = 0
    for block in _blocks(source):
        done_bytes += len(block)
        yield done_bytes, np.frombuffer(block, dtype=np.uint8)


def _text_encoder(tokenizer_file: Path) -> _Encode:
    from tokenizers import Tokenizer  # here, so that a run file is refused without loading it

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"data.tokenizer: {tokenizer_file} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(source: Source) -> Iterator[tuple[int, NDArray[np.unsignedinteger[Any]]]]:
        for done_bytes, text in _text_blocks(source):
            yield done_bytes, np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    return encode


def _text_blocks(source: Source) -> Iterator[tuple[int, str]]:
    """The text in blocks that end at a line's end, so that the cut rarely falls where a token would lie."""
    rest, done_bytes = b"", 0
    for block in _blocks(source):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        text = whole + newline
        if not newline:
            if len(rest) < LONGEST_LINE_BLOCKS * BLOCK_BYTES:
                continue
            cut = _character_start(rest)
            text, rest = rest[:cut], rest[cut:]
        done_bytes += len(text)
        yield done_bytes, _decode(text, done_bytes - len(text))
    if rest:
        yield done_bytes + len(rest), _decode(rest, done_bytes)


def _character_start(text: bytes) -> int:
    """Where the last character of UTF-8 `text` begins."""
    cut = len(text) - 1
    while cut > 0 and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _decode(text: bytes, offset: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _UnusableFileError(NOT_UTF8, f"byte {offset + error.start}") from None


def _blocks(source: Source) -> Iterator[bytes]:
    try:
        with open(source.path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise _UnusableFileError("unreadable", str(error.strerror)) from None


def _read_tokenizer(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"data.tokenizer: {file} cannot be read: {error.strerror}. Fix: `bytes`, a tokenizer.json, "
            "or a folder that holds one"
        ) from None
