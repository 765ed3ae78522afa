"""What a diagnosis found: rows, and the table of them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from typing import Any

from xform.diagnosis import page, plot
from xform.diagnosis.nonfinite import Origin
from xform.diagnosis.row import LayerHealth
from xform.files import whole
from xform.text import columns, near

# Rows that are printed: of more, those at fault, those beside them, the first and the last.
SHOWN = 40
_HEAD = ["layer", "activation", "gradient", "grad/weight", "update/weight", "gain", "sigma",
         "dead", "saturated", "cosine", "verdict", "where"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """The health of a loss's layers. Prints as a table, and iterates over rows.

    Attributes:
      function: the loss.
      losses: its value before each step.
      rows: in the order in which layers run; those of a scan once for each trip.
      origin: where the first NaN or Inf was made, if there is one.
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
        """The layers that are at fault, in the order in which they run."""
        return [row for row in self.rows if row.verdict != "fine"]

    @property
    def healthy(self) -> bool:
        """Whether every layer is fine, and all is finite."""
        return not self.findings and self.origin is None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; what is not finite is None."""
        return _finite({
            "function": self.function,
            "losses": list(self.losses),
            "healthy": self.healthy,
            "origin": self.origin and self.origin.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        })  # fmt: skip

    def save_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write a line of JSON for each row; what is not finite is null.

        Raises:
          FileNotWritten: the file cannot be written.
        """
        with whole(path) as partial:
            lines = map(json.dumps, self.to_dict()["rows"])
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw activations, gradients and ratios of all layers, those at fault marked.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the name of the file ends in no format of pictures.
          FileNotWritten: the file cannot be written.
        """
        reason = self.findings[0].reason if len(self.findings) == 1 else ""
        plot.draw(path, f"{self.summary()}: {reason}".removesuffix(": "), self.rows)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with the table, the curves, and each finding; it needs no network.

        Raises:
          FileNotWritten: the file cannot be written.
        """
        page.write(path, self.function, str_of_losses(self.losses), self.said(), self.rows)

    def summary(self) -> str:
        """One line: what is at fault."""
        if self.healthy:
            return f"{self.function}: all {len(self.rows)} layers are fine"
        names = [f"{row.title} is {row.verdict}" for row in self.findings]
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{self.function}: " + (", ".join(names[:3]) + more or "something is not finite")

    def said(self) -> list[str]:
        """Each finding in words."""
        lines = [f"{self.origin}"] if self.origin else []
        shown = self.findings if len(self.findings) <= 6 else self.findings[:5]
        for row in shown:
            lines.append(f"{row.title} is {row.verdict}: {row.reason}; {row.remedy}")
        if rest := len(self.findings) - len(shown):
            lines.append(f"and {rest} more layers")
        return lines

    def __str__(self) -> str:
        lines = [_HEAD]
        kept, skipped = set(_chosen(self.rows)), 0
        for i, row in enumerate(self.rows):
            if i in kept:
                lines += _skip(skipped)
                lines.append(_line(row))
                skipped = 0
            elif row.kind == "layer":
                skipped += 1
        lines += _skip(skipped)
        empty = [j for j in range(len(_HEAD)) if all(not line[j] for line in lines[1:])]
        lines = [[c for j, c in enumerate(line) if j not in empty] for line in lines]
        right = [j for j, name in enumerate(lines[0]) if name not in ("layer", "verdict", "where")]
        table = columns(lines, right=right)
        losses = f"loss {str_of_losses(self.losses)}"
        return "\n".join([f"{self.summary()} ({losses})", table, *self.said()])


def str_of_losses(losses: tuple[float, ...]) -> str:
    """The loss, or the first and the last of several."""
    if len(losses) == 1:
        return f"{losses[0]:.4g}"
    return f"{losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps"


def _finite(x: Any) -> Any:
    """Plain data in which None stands for what JSON has no number for."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _chosen(rows: tuple[LayerHealth, ...]) -> Iterator[int]:
    """The rows to print: sums only where they are at fault."""
    last = len(rows) - 1
    many = len(rows) > SHOWN
    for i, row in enumerate(rows):
        fault = row.verdict != "fine"
        beside = any(r.verdict != "fine" for r in rows[max(i - 2, 0) : i + 3])
        if fault or (row.kind == "layer" and (not many or beside or i < 3 or i > last - 3)):
            yield i


def _skip(n: int) -> list[list[str]]:
    return [[f"... {n} fine", *[""] * (len(_HEAD) - 1)]] if n else []


def _line(row: LayerHealth) -> list[str]:
    number = lambda x: "" if x is None else f"{x:.2g}"
    share = lambda x: "" if x is None else f"{x:.0%}"
    verdict = row.verdict
    if row.because:
        verdict = f"fine, but for {row.because}"
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
        near(row.where),
    ]
