"""The log of a run: a file with a line of JSON for each record.

A checkpoint stores the seal of the log, its length and checksum. So a resumed run can detect that
the log was changed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from models.errors import InputError
from models.train.folder import set_aside, write_whole

Record = dict[str, Any]
# The length of a log in bytes, and their CRC-32.
Seal = list[int]


def read_records(path: Path) -> list[Record]:
    """Read the records of a log, oldest first. An incomplete last line is skipped.

    Raises:
      InputError: the file cannot be read, or has a line that is not a record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return [_record(line, i, path) for i, line in enumerate(lines, 1) if line.endswith(b"\n")]


def _record(line: bytes, number: int, path: Path) -> Record:
    record: Any = None
    with contextlib.suppress(ValueError):
        record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise InputError(f"line {number} of {path} is not a record of a run: move the file away")
    return record


class Sink(Protocol):
    """An additional writer of records."""

    def write(self, record: Record, /) -> None: ...

    def close(self) -> None: ...


class Log:
    """A JSON-lines file. Each record has a `step`.

    Reading a float gives the same bits as the one written. Numbers that are not finite become null.
    In a resumed run, records of steps later than `after` are removed. In a new run (`after` is
    None), an existing file is renamed. Without a path nothing is written, since only the first
    process writes.

    Raises:
      InputError: the file cannot be written, or its beginning does not match `sealed`, the seal of
        the checkpoint.
    """

    def __init__(self, path: Path | None, *, after: int | None, sealed: Seal | None = None) -> None:
        self.path, self._file, self._others = path, None, list[Sink]()
        self._size = self._crc = 0
        if path is None:
            return
        with self._writing():
            if after is None and path.exists():
                set_aside(path)
            if sealed is not None and path.exists() and _seal_of(path, sealed[0]) != sealed:
                raise InputError(
                    f"{path} has changed since step {after} was saved: move it away, and resume the"
                    " run without it"
                )
            kept = [] if after is None else [r for r in read_records(path) if r["step"] <= after]
            text = "".join(map(_line, kept))
            write_whole(path, text)
            self._count(text)
            self._file = path.open("a")

    def seal(self) -> Seal:
        """Write the log to disk, and return its length and checksum."""
        if self._file is not None:
            with self._writing():
                os.fsync(self._file.fileno())
        return [self._size, self._crc]

    def _count(self, text: str) -> None:
        data = text.encode()
        self._size, self._crc = self._size + len(data), zlib.crc32(data, self._crc)

    def add_writer(self, other: Sink) -> None:
        """Pass each record to another writer as well."""
        self._others.append(other)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None

    def write(self, **record: Any) -> None:
        """Append one record. It is in the file when this returns."""
        if self._file is not None:
            with self._writing():
                line = _line(record)
                self._file.write(line)
                self._file.flush()
                self._count(line)
                for other in self._others:
                    other.write(record)

    def close(self) -> None:
        """Close the file and the other writers."""
        if self._file is not None:
            with self._writing():
                self._file.close()
                for other in self._others:
                    other.close()


def _seal_of(path: Path, size: int) -> Seal:
    """Return the seal of the first `size` bytes of a file."""
    data = path.read_bytes()[:size]
    return [len(data), zlib.crc32(data)]


def _line(record: Record) -> str:
    """Format a record as a line of JSON, with null for numbers that are not finite."""
    finite = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x
    return json.dumps({name: finite(value) for name, value in record.items()}) + "\n"
