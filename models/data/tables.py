"""Read Parquet files, and Arrow files such as Hugging Face's cached data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.data.extras import optional_module
from models.errors import InputError
from models.settings import nearest

TABLES = (".parquet", ".arrow")
_ROWS = 1024  # rows that are read at once


def rows(file: Path, column: str) -> Iterator[tuple[Any, str]]:
    """Iterate over the values of a text column, each with its file and row for error messages.

    Raises:
      InputError: the file does not have the format of its suffix, or has no such text column.
    """
    arrow: Any = optional_module("pyarrow", str(file))
    number = 0
    try:
        for values in _parquet(file, column) if file.suffix == ".parquet" else _arrow(file, column):
            if not _is_text(values.type, arrow.types):
                raise InputError(
                    f"column {column!r} of {file} holds {values.type}, not text: choose another"
                    " with --column"
                )
            for value in values.to_pylist():
                number += 1
                yield value, f"{file} row {number}"
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        kind = file.suffix[1:].title()
        raise InputError(f"{file} is not a valid {kind} file: {reason(error)}") from None


def no_column(where: str, column: str, names: list[str]) -> str:
    """Return the message for a column that does not exist, with similar or available columns."""
    near = nearest(column, names) or f", which has {', '.join(map(repr, names[:8]))}"
    return f"there is no column {column!r} in {where}{near}; choose another with --column"


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _is_text(kind: Any, types: Any) -> bool:
    """Return whether a column type of Arrow is text or bytes. `types` is `pyarrow.types`."""
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _parquet(file: Path, column: str) -> Iterator[Any]:
    """Iterate over pieces of a column of a Parquet file, as Arrow arrays."""
    with optional_module("pyarrow.parquet", str(file)).ParquetFile(file) as table:
        if column not in (names := table.schema_arrow.names):
            raise InputError(no_column(str(file), column, names))
        for batch in table.iter_batches(batch_size=_ROWS, columns=[column]):
            yield batch.column(0)


def _arrow(file: Path, column: str) -> Iterator[Any]:
    """Iterate over pieces of a column of an Arrow file, as Arrow arrays."""
    ipc: Any = optional_module("pyarrow.ipc", str(file))
    with optional_module("pyarrow", str(file)).memory_map(str(file)) as memory:
        # Hugging Face caches streams; others write files, which have an index at the end.
        if memory.read(6) == b"ARROW1":
            reader = ipc.open_file(memory)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            memory.seek(0)
            reader = batches = ipc.open_stream(memory)
        if column not in (names := reader.schema.names):
            raise InputError(no_column(str(file), column, names))
        for batch in batches:
            for start in range(0, len(batch), _ROWS):
                yield batch.column(column).slice(start, _ROWS)
