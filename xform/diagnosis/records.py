"""The file of a stream of reports: one line of JSON for each report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.diagnosis.alerts import Alert
from xform.diagnosis.row import LayerHealth
from xform.errors import FileNotWritten, WrongArgument
from xform.storage.files import atomic_write

Record = dict[str, Any]
# The numbers of a layer in a record. A number that the layer does not have is left out.
NUMBERS = ("activation", "gradient", "weight", "gradient_to_weight", "update_to_weight", "gain",
           "sigma", "dead", "saturated", "least", "correlation")  # fmt: skip
_COUNTS = ("nonfinite", "gradient_nonfinite")


def record_of(step: int, loss: float, rows: Sequence[LayerHealth], alerts: Sequence[Alert]
              ) -> Record:  # fmt: skip
    """Return a report as plain data. Numbers that are not finite become None."""
    return {
        "step": step,
        "loss": _number(loss),
        "rows": [_row(row) for row in rows],
        "alerts": [dataclasses.asdict(alert) for alert in alerts],
    }


def _row(row: LayerHealth) -> Record:
    """Return a layer as plain data, without the numbers that it does not have."""
    record: Record = {"layer": row.title, "kind": row.kind, "place": row.place, "where": row.where}
    record |= {n: _number(x) for n in NUMBERS if (x := getattr(row, n)) is not None}
    record |= {n: x for n in _COUNTS if (x := getattr(row, n))}
    verdict = {} if row.verdict == "fine" else {"verdict": row.verdict, "reason": row.reason}
    return record | verdict | ({"because": row.because} if row.because else {})


def _number(x: float) -> float | None:
    """Round to six significant digits, enough to read; None if the number is not finite."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def append_record(path: Path, record: Record) -> None:
    """Append a record to a file.

    Raises:
      FileNotWritten: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
    except OSError as error:
        raise FileNotWritten(
            f"writing {path}", f"{type(error).__name__}: {error.strerror}", "",
            "choose a file in an existing folder that is writable",
        ) from None  # fmt: skip


def keep_records(path: Path, last_step: int | None) -> list[Record]:
    """Truncate a file to the records up to `last_step`, and return those.

    None empties the file.

    Raises:
      WrongArgument: the file is not one of a stream.
      FileNotWritten: the file cannot be written.
    """
    kept = [] if last_step is None or not path.exists() else read_records(path)
    kept = [record for record in kept if last_step is not None and record["step"] <= last_step]
    with atomic_write(path) as partial:
        lines = (json.dumps(record, allow_nan=False) + "\n" for record in kept)
        partial.write_text("".join(lines), encoding="utf-8")
    return kept


def read_records(path: Path) -> list[Record]:
    """Read the records of a file. An incomplete last line, of a process that died, is skipped.

    Raises:
      WrongArgument: the file cannot be read, or has a line that is not a record.
    """
    request, remedy = f"health reports in {path}", "pass the file that a HealthStream wrote"
    records: list[Record] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        problem = f"{type(error).__name__}: {error.strerror}"
        raise WrongArgument(request, problem, "", remedy) from None
    for i, line in enumerate(lines, 1):
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and {"step", "loss", "rows", "alerts"} <= record.keys():
            records.append(record)
        elif line.endswith("\n"):
            raise WrongArgument(request, f"line {i} is not a health report", "", remedy)
    return records
