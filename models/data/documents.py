"""Documents, as bytes, of text, of JSON lines and of tables."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from models.data.extras import needed
from models.data.files import PICTURES, files_of, readable
from models.data.tables import TABLES, no_column, reason, rows
from models.errors import InputError
from models.machine import machine_memory

LINES = (".jsonl", ".ndjson")
ARRAYS = (".npy", ".npz")
COLUMN = "text"
LONGEST_LINE = 2**28  # bytes of JSON
BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class Document:
    """Bytes of text, and what an error calls the place they are from."""

    content: bytes
    where: str


def documents(path: Path | None, column: str = COLUMN, without: Path | None = None
              ) -> Iterator[Document]:  # fmt: skip
    """Read the documents that a path names, one after another; empty ones are left out.

    A `.jsonl` file has one on each line, in the field `column`; a `.parquet` or `.arrow` file (as
    Hugging Face caches them) one in each row, in the column of that name; any other file is one.
    With `.gz` or `.zst` after its name, a file is compressed. A folder that holds tables or lines
    is read for those alone: what stands beside them describes them.

    Args:
      path: a file or folder, as for `files_of`.
      column: where the text is.
      without: as for `files_of`.

    Raises:
      InputError: a file cannot be read, is not what its name says, or has no such column.
    """
    files = text_files(path, without)
    structured = [file for file in files if _kind(file) != ""]
    for file in structured or files:
        with readable():
            yield from _of_file(file, column)


def is_plain(path: Path | None, without: Path | None = None) -> bool:
    """Whether a path names text alone: no tables, no lines of JSON, nothing compressed."""
    return all(_kind(f) == "" and f == _uncompressed(f) for f in text_files(path, without))


def text_files(path: Path | None, without: Path | None = None) -> list[Path]:
    """The files that a path names; pictures and arrays among them are refused.

    Raises:
      InputError: as of `files_of`, or a file is of another kind than text.
    """
    files = files_of(path, without)
    structured = any(_kind(file) for file in files)  # what stands beside tables is not read
    other = [f for f in files if f.suffix.lower() in (*PICTURES, *ARRAYS) and not structured]
    if other:
        raise InputError(
            f"{other[0]} is no text: give text; python -m models train has a --preset for each kind"
            " of data"
        )
    return files


def _kind(file: Path) -> str:
    """The suffix that says how a file is read; nothing for text."""
    suffix = _uncompressed(file).suffix.lower()
    return suffix if suffix in (*LINES, *TABLES) else ""


def _uncompressed(file: Path) -> Path:
    return file.with_suffix("") if file.suffix in (".gz", ".zst") else file


def _of_file(file: Path, column: str) -> Iterator[Document]:
    kind = _kind(file)
    if kind in TABLES:
        for value, where in rows(file, column):
            yield from _text(value, where)
    elif kind in LINES:
        yield from _lines(file, column)
    else:
        yield from _whole(file)


def _whole(file: Path) -> Iterator[Document]:
    most = machine_memory() // 4  # as much again is needed, and more, to make tokens of it
    content = bytearray()
    with _opened(file) as stream:
        while file.stat().st_size <= most >= len(content) and (block := stream.read(BLOCK)):
            content += block
    if max(file.stat().st_size, len(content)) > most:
        raise InputError(
            f"{file} is one document of more than {most} bytes: split it, or give it as JSON lines"
        )
    if content:
        yield Document(bytes(content), str(file))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """A file as a stream of bytes, decompressed; damage is one line."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as stream:
                yield stream  # type: ignore[misc]
        elif file.suffix == ".zst":
            arrow = needed("pyarrow", str(file))
            with file.open("rb") as raw, arrow.CompressedInputStream(raw, "zstd") as stream:
                yield stream
        else:
            with file.open("rb") as stream:
                yield stream
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise InputError(f"{file} is damaged, or not compressed: {reason(error)}") from None


def _lines(file: Path, column: str) -> Iterator[Document]:
    with _opened(file) as stream:
        for number, line in enumerate(_split(stream, file), start=1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
                raise InputError(f"{where} is no JSON: {reason(error)}") from None
            if not isinstance(row, dict):
                raise InputError(f"{where} is no JSON object with a field {column!r}")
            if column not in row:
                raise InputError(no_column(where, column, list(row)))
            yield from _text(row[column], where)


def _split(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    """The lines of a stream, none of which may be endless."""
    rest, number = b"", 1
    while block := stream.read(BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        number += len(lines)
        yield from lines
        if len(rest) > LONGEST_LINE:
            raise InputError(f"{file}:{number} is a line of more than {LONGEST_LINE} bytes")
    yield rest


def _text(value: Any, where: str) -> Iterator[Document]:
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:  # JSON may escape half of a pair
            raise InputError(f"{where} is not UTF-8: {reason(error)}") from None
    elif value is not None and not isinstance(value, bytes):
        raise InputError(f"{where} holds a {type(value).__name__} where text was expected")
    if value:
        yield Document(value, where)
