"""The report of a diagnosis: its rows, printed as a table, plotted or saved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from typing import Any

from xform.diagnosis import health_page, health_plot
from xform.diagnosis.nonfinite import Origin
from xform.diagnosis.row import LayerHealth
from xform.storage.files import atomic_write
from xform.terminal.notebook import Result
from xform.terminal.text import columns, shorten_place

# With more rows than this, only the rows at fault, rows near them, and the first and last are
# printed.
_MAX_ROWS = 40
_HEAD = ["layer", "activation", "gradient", "grad/weight", "update/weight", "gain", "sigma",
         "dead", "saturated", "cosine", "verdict", "where"]  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Result):
    """The health of the layers of a loss. It prints as a table and iterates over rows.

    Attributes:
      function: name of the loss.
      losses: value of the loss before each step.
      rows: the layers in execution order, once for each iteration of a scan.
      origin: the operation that produced the first NaN or Inf, if there is one.
    """

    function: str
    losses: tuple[float, ...]
    rows: tuple[LayerHealth, ...]
    origin: Origin | None = None

    def __iter__(self) -> Iterator[LayerHealth]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def findings(self) -> list[LayerHealth]:
        """The layers at fault, in execution order."""
        return [row for row in self.rows if row.verdict != "fine"]

    @property
    def healthy(self) -> bool:
        """Whether every layer is fine and every value is finite."""
        return not self.findings and self.origin is None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON; numbers that are not finite become None."""
        return _finite({
            "function": self.function,
            "losses": list(self.losses),
            "healthy": self.healthy,
            "origin": self.origin and self.origin.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        })  # fmt: skip

    def save_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write one line of JSON for each row; numbers that are not finite become null.

        Raises:
          FileNotWritten: the file cannot be written.
        """
        with atomic_write(path) as partial:
            lines = map(json.dumps, self.to_dict()["rows"])
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw activations, gradients and ratios of all layers, and mark the layers at fault.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the file name does not end in a supported picture format.
          FileNotWritten: the file cannot be written.
        """
        reason = self.findings[0].reason if len(self.findings) == 1 else ""
        health_plot.draw(path, f"{self.summary()}: {reason}".removesuffix(": "), self.rows)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the table, the curves and each finding. It needs no network.

        Raises:
          FileNotWritten: the file cannot be written.
        """
        losses = str_of_losses(self.losses)
        health_page.write_page(path, self.function, losses, self.said(), self.rows)

    def summary(self) -> str:
        """Return one line that names the layers at fault."""
        if self.healthy:
            return f"{self.function}: all {len(self.rows)} layers are fine"
        names = [f"{row.title} is {row.verdict}" for row in self.findings]
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{self.function}: " + (", ".join(names[:3]) + more or "a value is not finite")

    def said(self) -> list[str]:
        """Return the origin of a NaN or Inf, and the reason and remedy of each finding, as lines.

        If there are more than six findings, only the first five are returned, and the number of the
        omitted ones.
        """
        lines = [f"{self.origin}"] if self.origin else []
        shown = self.findings if len(self.findings) <= 6 else self.findings[:5]
        for row in shown:
            lines.append(f"{row.title} is {row.verdict}: {row.reason}; {row.remedy}")
        if omitted := len(self.findings) - len(shown):
            lines.append(f"and {omitted} more layers at fault")
        return lines

    def __str__(self) -> str:
        lines = [_HEAD]
        printed, skipped = set(_rows_to_print(self.rows)), 0
        for i, row in enumerate(self.rows):
            if i in printed:
                lines += _skipped_rows(skipped)
                lines.append(_cells(row))
                skipped = 0
            elif row.kind == "layer":
                skipped += 1
        lines += _skipped_rows(skipped)
        empty = [j for j in range(len(_HEAD)) if all(not line[j] for line in lines[1:])]
        lines = [[cell for j, cell in enumerate(line) if j not in empty] for line in lines]
        right = [j for j, name in enumerate(lines[0]) if name not in ("layer", "verdict", "where")]
        table = columns(lines, right=right)
        losses = f"loss {str_of_losses(self.losses)}"
        return "\n".join([f"{self.summary()} ({losses})", table, *self.said()])


def str_of_losses(losses: tuple[float, ...]) -> str:
    """Format the loss, or the first and the last of several losses."""
    if len(losses) == 1:
        return f"{losses[0]:.4g}"
    return f"{losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps"


def _finite(x: Any) -> Any:
    """Replace floats that JSON cannot hold (NaN and infinities) by None, in plain data."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _rows_to_print(rows: tuple[LayerHealth, ...]) -> Iterator[int]:
    """Yield the indices of the rows to print. A sum is printed only if it is at fault."""
    last = len(rows) - 1
    few = len(rows) <= _MAX_ROWS
    for i, row in enumerate(rows):
        at_fault = row.verdict != "fine"
        near_fault = any(r.verdict != "fine" for r in rows[max(i - 2, 0) : i + 3])
        if at_fault or (row.kind == "layer" and (few or near_fault or i < 3 or i > last - 3)):
            yield i


def _skipped_rows(n: int) -> list[list[str]]:
    """Return the row of the table that stands for `n` skipped layers; nothing for none."""
    return [[f"... {n} fine", *[""] * (len(_HEAD) - 1)]] if n else []


def _cells(row: LayerHealth) -> list[str]:
    """Return the cells of a layer, in the order of `_HEAD`."""
    number = lambda x: "" if x is None else f"{x:.2g}"
    share = lambda x: "" if x is None else f"{x:.0%}"
    verdict = row.verdict
    if row.because:
        verdict = f"fine (affected by {row.because})"
    return [
        row.title,
        number(row.activation),
        number(row.gradient),
        number(row.gradient_to_weight),
        number(row.update_to_weight),
        number(row.gain),
        number(row.sigma),
        share(row.dead),
        share(row.saturated),
        number(row.correlation),
        verdict,
        shorten_place(row.where),
    ]
