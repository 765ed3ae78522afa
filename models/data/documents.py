"""Read documents from text files, JSON lines and tables.

A document is an independent piece of text, such as a web page, as bytes. A file of JSON lines or a
table holds many documents, and any other file is one document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from models.data.extras import optional_module
from models.data.files import PICTURES, files_of, readable
from models.data.tables import TABLES, no_column, reason, rows
from models.errors import InputError
from models.machine import machine_memory

LINES = (".jsonl", ".ndjson")
ARRAYS = (".npy", ".npz")
COLUMN = "text"  # the default name of the column or field with the text
LONGEST_LINE = 2**28  # bytes of JSON
BLOCK = 2**20  # bytes that are read at once


@dataclasses.dataclass(frozen=True)
class Document:
    """The bytes of a document, and its file and line or row for error messages."""

    content: bytes
    where: str


def documents(path: Path | None, column: str = COLUMN, without: Path | None = None
              ) -> Iterator[Document]:  # fmt: skip
    """Iterate over the documents of a file or folder. Empty documents are skipped.

    A `.jsonl` or `.ndjson` file has a document on each line, in the field `column`. A `.parquet` or
    `.arrow` file (as Hugging Face caches them) has one in each row, in the column `column`. Any
    other file is one document. The suffixes `.gz` and `.zst` mean that a file is compressed. If a
    folder holds tables or JSON lines, its other files are skipped.

    Args:
      path: a file, or a folder whose files are read recursively; None for the source files of
        Python's standard library.
      column: the field or column that holds the text.
      without: a folder whose files are skipped, such as the folder of the run.

    Raises:
      InputError: a file cannot be read, does not have the format of its suffix, or lacks the
        column.
    """
    files = text_files(path, without)
    structured = [file for file in files if _kind(file) != ""]
    for file in structured or files:
        with readable():
            yield from _read_file(file, column)


def is_plain(path: Path | None, without: Path | None = None) -> bool:
    """Return whether all files of a path are plain text.

    That is, there are no tables, no JSON lines and no compressed files. The arguments are the same
    as for `text_files`.
    """
    return all(_kind(f) == "" and f == _uncompressed(f) for f in text_files(path, without))


def text_files(path: Path | None, without: Path | None = None) -> list[Path]:
    """List the files of a path, and refuse pictures and arrays.

    Args:
      path: a file or folder; None for the source files of Python's standard library.
      without: a folder whose files are skipped.

    Raises:
      InputError: the path cannot be read, or a file is a picture or an array.
    """
    files = files_of(path, without)
    structured = any(_kind(file) for file in files)  # files beside tables are skipped
    other = [f for f in files if f.suffix.lower() in (*PICTURES, *ARRAYS) and not structured]
    if other:
        raise InputError(
            f"{other[0]} is not text: name text files, or train another kind of model: python -m"
            " models train has a --preset for each kind of data"
        )
    return files


def _kind(file: Path) -> str:
    """Return the suffix of a table or of JSON lines, and "" for text."""
    suffix = _uncompressed(file).suffix.lower()
    return suffix if suffix in (*LINES, *TABLES) else ""


def _uncompressed(file: Path) -> Path:
    """Return the name of a file without `.gz` or `.zst`."""
    return file.with_suffix("") if file.suffix in (".gz", ".zst") else file


def _read_file(file: Path, column: str) -> Iterator[Document]:
    """Iterate over the documents of one file."""
    kind = _kind(file)
    if kind in TABLES:
        for value, where in rows(file, column):
            yield from _document_of(value, where)
    elif kind in LINES:
        yield from _json_lines(file, column)
    else:
        yield from _one_document(file)


def _one_document(file: Path) -> Iterator[Document]:
    """Read a file as one document, unless it is empty."""
    most = machine_memory() // 4  # tokenizing needs at least as much again
    content = bytearray()
    with _opened(file) as stream:
        while file.stat().st_size <= most >= len(content) and (block := stream.read(BLOCK)):
            content += block
    if max(file.stat().st_size, len(content)) > most:
        raise InputError(
            f"{file} is one document of more than {most} bytes: split it, or convert it to JSON"
            " lines"
        )
    if content:
        yield Document(bytes(content), str(file))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file as a stream of decompressed bytes. Damage raises an `InputError`."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as stream:
                yield stream  # type: ignore[misc]
        elif file.suffix == ".zst":
            arrow = optional_module("pyarrow", str(file))
            with file.open("rb") as raw, arrow.CompressedInputStream(raw, "zstd") as stream:
                yield stream
        else:
            with file.open("rb") as stream:
                yield stream
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise InputError(f"{file} is damaged or not compressed: {reason(error)}") from None


def _json_lines(file: Path, column: str) -> Iterator[Document]:
    """Iterate over the documents of a file of JSON lines."""
    with _opened(file) as stream:
        for number, line in enumerate(_split(stream, file), start=1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
                raise InputError(f"{where} is not valid JSON: {reason(error)}") from None
            if not isinstance(row, dict):
                raise InputError(f"{where} is not a JSON object with a field {column!r}")
            if column not in row:
                raise InputError(no_column(where, column, list(row)))
            yield from _document_of(row[column], where)


def _split(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    """Iterate over the lines of a stream; `InputError` for one longer than `LONGEST_LINE`."""
    rest, number = b"", 1
    while block := stream.read(BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        number += len(lines)
        yield from lines
        if len(rest) > LONGEST_LINE:
            raise InputError(
                f"{file}:{number}: the line has more than {LONGEST_LINE} bytes: split its text"
            )
    yield rest


def _document_of(value: Any, where: str) -> Iterator[Document]:
    """Yield the document in a cell or field; nothing if it is empty or None."""
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:  # JSON may hold a lone surrogate as an escape
            raise InputError(f"{where} is not UTF-8: {reason(error)}") from None
    elif value is not None and not isinstance(value, bytes):
        raise InputError(
            f"{where} holds a {type(value).__name__} where text was expected: choose another column"
            " with --column"
        )
    if value:
        yield Document(value, where)
