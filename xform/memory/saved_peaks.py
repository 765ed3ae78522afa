"""Save the peaks of compiled programs, and tell later how much they grew.

Continuous integration compares the peak of a program with a saved one: `save_peaks` writes a file
for the repository, and `growth` compares new reports with it. The file holds the bytes of each
kind and the bytes at the peak by source line, and no line numbers, so that it does not change when
a file is edited above those lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from xform.errors import WrongArgument
from xform.memory.difference import KINDS, LINES, table_row
from xform.memory.report import MemoryReport
from xform.storage.files import atomic_write
from xform.terminal.text import byte_count, columns, human_bytes

_FORMAT = "xform peaks 1"
# The line and the column in `file.py:12:4 (function)`.
_NUMBERS = re.compile(r"(?::\d+)+(?= \(|$)")


@dataclasses.dataclass(frozen=True)
class Peak:
    """The bytes of a compiled function at its peak, on each device.

    Attributes:
      function: its name.
      target: the device that it was compiled for.
      policy: the policy of its derivatives; "" if none was given.
      arguments: its arguments as text; trees by their number of arrays and their bytes.
      jax: the version of JAX.
      sizes: bytes by kind, such as "temp"; None for kinds that the compiler did not report.
      lines: bytes at the peak by the operation and the place that made them.
    """

    function: str
    target: str
    policy: str
    arguments: str
    jax: str
    sizes: Mapping[str, int | None]
    lines: Mapping[str, int]

    @classmethod
    def of(cls, report: MemoryReport) -> Peak:
        """Return the peak of a report."""
        lines: dict[str, int] = {}
        for row in report.peak:
            lines[_place(row)] = lines.get(_place(row), 0) + row.bytes
        description = report.description
        return cls(report.function, report.target, description.policy, description.arguments,
                   jax.__version__, {kind: getattr(report, f"{kind}_bytes") for kind in KINDS},
                   lines)  # fmt: skip

    @property
    def key(self) -> str:
        """The function, target and policy as text. A file has at most one peak for each."""
        return f"{self.function} on {self.target}" + (f", {self.policy}" if self.policy else "")


@dataclasses.dataclass(frozen=True)
class PeakGrowth:
    """A saved peak beside the peak of today. Prints as tables.

    Attributes:
      before: the saved peak.
      after: the new one.
      allowed_bytes: how many bytes more than before are accepted.
      where: for each operation and place, its source line of today.
    """

    before: Peak
    after: Peak
    allowed_bytes: int
    where: Mapping[str, str]

    @property
    def bytes(self) -> int | None:
        """How many bytes the total grew; None if the compiler refused one of the programs."""
        old, new = self.before.sizes["total"], self.after.sizes["total"]
        return None if old is None or new is None else new - old

    @property
    def exceeds(self) -> bool:
        """Whether the total grew by more than is accepted, or the compiler refuses the program."""
        return self.bytes is None or self.bytes > self.allowed_bytes

    def __str__(self) -> str:
        if self.bytes is None:
            return f"{self.after.key}: not known, because the compiler refused the program"
        old, new = self.before.sizes["total"] or 0, self.after.sizes["total"] or 0
        change = "unchanged" if old == new else f"{'grew' if new > old else 'shrank'} by " + (
            f"{human_bytes(abs(new - old))}" + (f" ({abs(new - old) / old:.1%})" if old else "")
        )  # fmt: skip
        verdict = f"more than the accepted {human_bytes(self.allowed_bytes)}"
        lines = [f"{self.after.key}: the total {change}" + f", {verdict}" * self.exceeds]
        if self.before.arguments != self.after.arguments:
            lines.append(f"the arguments differ: it was saved for {self.before.arguments}; now "
                         f"they are {self.after.arguments}")  # fmt: skip
        if self.before.jax != self.after.jax:
            lines.append(f"saved with JAX {self.before.jax}, now {self.after.jax}: "
                         "the compiler may have changed")  # fmt: skip
        if old != new:
            lines.append(self._table())
        return "\n".join(lines)

    def _table(self) -> str:
        """Return the kinds of bytes and the lines that changed. What grew most comes first."""
        both = lambda name: {k: (getattr(self.before, name).get(k) or 0,
                                 getattr(self.after, name).get(k) or 0)
                             for k in {**getattr(self.before, name),
                                       **getattr(self.after, name)}}  # fmt: skip
        kinds = [(k, *pair) for k, pair in both("sizes").items() if pair[0] != pair[1]]
        changed = [(self.where.get(k, k), *pair) for k, pair in both("lines").items()
                   if pair[0] != pair[1]]  # fmt: skip
        changed.sort(key=lambda row: (row[1] - row[2], row[0]))
        head = ["", "before", "now", "change"]
        rows = [table_row(*row) for row in (*kinds, *changed[:LINES])]
        return columns([head, *rows], right=(1, 2, 3))


def save_peaks(path: str | os.PathLike[str], *reports: MemoryReport) -> None:
    """Write the peaks of reports to a JSON file, for `growth` to compare with later.

    It has the bytes of each kind, and of each operation at the peak. The file is written completely
    or not at all.

    Args:
      path: the file.
      *reports: reports of `memory_analysis`, each of another function, target or policy.

    Returns:
      None.

    Raises:
      FileNotWritten: the file cannot be written.

    >>> import tempfile
    >>> f = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/peaks.json"
    ...     xform.memory.save_peaks(path, xform.memory_analysis(jnp.matmul, f, f))
    ...     (same,) = xform.memory.growth(path, xform.memory_analysis(jnp.matmul, f, f))
    >>> print(same)
    matmul on cpu: the total unchanged
    """
    peaks = [dataclasses.asdict(Peak.of(report)) for report in reports]
    with atomic_write(path) as partial:
        data = {"format": _FORMAT, "peaks": peaks}
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def growth(path: str | os.PathLike[str], *reports: MemoryReport, tolerance: str | float = "2%"
           ) -> list[PeakGrowth]:  # fmt: skip
    """Compare reports with the peaks that `save_peaks` wrote.

    Args:
      path: the file.
      *reports: the reports of today.
      tolerance: how much more than before is accepted: a share such as "2%", or bytes such as
        "10MiB".

    Returns:
      A `PeakGrowth` for each report.

    Raises:
      WrongArgument: the file cannot be read or holds no peaks, or none of a report's function,
        target and policy; or the tolerance is neither a share nor bytes.

    >>> import tempfile
    >>> square = lambda x: x @ x
    >>> report = lambda n: xform.memory_analysis(square, jax.ShapeDtypeStruct((n, n), jnp.float32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     xform.memory.save_peaks(f"{folder}/peaks.json", report(64))
    ...     (found,) = xform.memory.growth(f"{folder}/peaks.json", report(128))
    >>> found.exceeds, found.bytes
    (True, 98304)
    """
    asked, saved = f"comparing with {path}", {p.key: p for p in _load(path)}
    found: list[PeakGrowth] = []
    for report in reports:
        after = Peak.of(report)
        if (before := saved.get(after.key)) is None:
            raise WrongArgument(
                asked, f"it has no peak of {after.key}", "",
                "compile it for a target and under a policy that the file has, or save it again: it"
                f" has the peaks of {'; '.join(saved) or 'nothing'}",
            )  # fmt: skip
        where = {_place(row): f"{row.operation} at {row.where}" for row in report.peak if row.where}
        allowed = _allowed(tolerance, before.sizes["total"] or 0)
        found.append(PeakGrowth(before, after, allowed, where))
    return found


def _load(path: str | os.PathLike[str]) -> Sequence[Peak]:
    """Return the peaks of a file."""
    remedy = "pass a file that save_peaks or `xform memory --save` of this version wrote"
    asked = f"comparing with {path}"
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"the format is {data['format']!r}, not {_FORMAT!r}")
        return [Peak(**peak) for peak in data["peaks"]]
    except OSError as error:
        raise WrongArgument(asked, f"the file cannot be read: {error.strerror}", "",
                            remedy) from error  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WrongArgument(asked, f"the file holds no peaks: {error}", "", remedy) from error


def _allowed(tolerance: str | float, total: int) -> int:
    """Return the accepted bytes of growth for a program of `total` bytes.

    A text needs a unit: "5" may mean 5%.
    """
    text = str(tolerance).strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if not 0 <= share < float("inf"):
                raise ValueError
            return int(total * share / 100)
        if isinstance(tolerance, str) and text.isdecimal() and text != "0":
            raise ValueError
        return byte_count(tolerance)
    except ValueError:
        problem = "it is neither a share nor a number of bytes with a unit"
        remedy = "give a share such as 2%, or bytes such as 10MiB"
        raise WrongArgument(f"tolerance {text}", problem, "", remedy) from None


def _place(row: Any) -> str:
    """Return the operation and the place of a buffer, without the number of the line."""
    return f"{row.operation} at {_NUMBERS.sub('', row.where)}" if row.where else row.name
