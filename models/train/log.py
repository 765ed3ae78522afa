"""What a run leaves to read: a line of JSON for every step."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from models.errors import InputError
from models.train.folder import set_aside, write_whole

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records of a log, oldest first; a last line that was cut off is left out.

    Raises:
      InputError: the file cannot be read, or has a line that is no record.
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
        raise InputError(f"line {number} of {path} is no record of a run: move the file away")
    return record


class Sink(Protocol):
    """Where records go besides a log."""

    def write(self, record: Record, /) -> None: ...

    def close(self) -> None: ...


class Log:
    """A JSON-lines file with `step` in each record, cut back to the step from which a run goes on.

    Floats are written so that reading them gives the same bits; what is not finite is null. A log
    that a new run finds is set aside. Without a path nothing is written: another process does.
    """

    def __init__(self, path: Path | None, *, after: int | None) -> None:
        self.path, self._file, self._others = path, None, list[Sink]()
        if path is None:
            return
        with self._writing():
            if after is None and path.exists():
                set_aside(path)
            kept = [] if after is None else [r for r in read_records(path) if r["step"] <= after]
            write_whole(path, "".join(map(_line, kept)))
            self._file = path.open("a")

    def also(self, other: Sink) -> None:
        """Give each record to another writer too."""
        self._others.append(other)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None

    def write(self, **record: Any) -> None:
        """Append one record; it is in the file when this returns."""
        if self._file is not None:
            with self._writing():
                self._file.write(_line(record))
                self._file.flush()
                for other in self._others:
                    other.write(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with self._writing():
                self._file.close()
                for other in self._others:
                    other.close()


def _line(record: Record) -> str:
    finite = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x
    return json.dumps({name: finite(value) for name, value in record.items()}) + "\n"
