"""The picture of a diagnosis: what each layer makes, what gradient it gets, and who is at fault."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from xform.diagnosis.row import LayerHealth
from xform.planner.report.picture import BLUE, GREY, ORANGE, plain, save, sheet

_ASKED = "health.plot"
# Of more layers than this the axis has numbers, not names.
_NAMED = 30
_TEAL, _RED = "#2c7a7b", "#c53030"
# Faults that are written out; of more, bands alone.
_WRITTEN = 4

Number = Callable[[LayerHealth], float | None]


def draw(path: str | os.PathLike[str], title: str, rows: Sequence[LayerHealth]) -> None:
    """Norms and ratios on logarithmic axes, shares below; bands mark layers at fault."""
    figure = sheet(_ASKED, 8.4, 6.6)
    top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.6))
    _line(top, rows, lambda r: r.activation, "activation", BLUE, "o")
    _line(top, rows, lambda r: r.gradient, "gradient in it", ORANGE, "s")
    _log(top, "root mean square")
    _line(middle, rows, lambda r: r.gradient_to_weight, "gradient to weight", ORANGE, "s")
    _line(middle, rows, lambda r: r.update_to_weight, "update to weight", _TEAL, "^")
    _line(middle, rows, lambda r: r.gain, "result to what is read", BLUE, "o")
    _line(middle, rows, lambda r: r.sigma, "largest singular value", GREY, "D")
    _log(middle, "ratio")
    _line(low, rows, lambda r: r.dead, "dead units", _RED, "o")
    _line(low, rows, lambda r: r.saturated, "flat elements", BLUE, "^")
    _line(low, rows, lambda r: r.correlation, "cosine of neighbours", GREY, "s")
    low.set_ylim(-0.05, 1.05)
    low.set_ylabel("share")
    _bands((top, middle, low), rows)
    for ax in (top, middle, low):
        plain(ax)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, fontsize=8, ncols=2, loc="best")
    _names(low, rows)
    figure.suptitle(textwrap.fill(title, 88), x=0.01, ha="left", fontsize=11, parse_math=False)
    save(figure, _ASKED, path)


def _line(ax: Any, rows: Sequence[LayerHealth], of: Number, label: str, color: str, marker: str
          ) -> None:  # fmt: skip
    """A number of all rows that have it; what is not finite is left out."""
    points = [(i, y) for i, row in enumerate(rows) if (y := of(row)) is not None]
    points = [(i, y) for i, y in points if math.isfinite(y)]
    if points:
        size = 4 if len(rows) <= 60 else 2
        ax.plot(*zip(*points, strict=True), marker=marker, markersize=size, linewidth=1,
                color=color, label=label)  # fmt: skip


def _log(ax: Any, label: str) -> None:
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel(label)


def _bands(all_axes: Sequence[Any], rows: Sequence[LayerHealth]) -> None:
    """Mark the layers at fault in each plot, and name the first in the uppermost."""
    faults = [(i, row) for i, row in enumerate(rows) if row.verdict != "fine"]
    for i, _ in faults:
        for ax in all_axes:
            ax.axvspan(i - 0.5, i + 0.5, color=_RED, alpha=0.15, linewidth=0)
    for i, row in faults[:_WRITTEN]:
        right = i > len(rows) / 2
        all_axes[0].annotate(
            f" {row.title}: {row.verdict} ", (i, 1), xycoords=("data", "axes fraction"),
            ha="right" if right else "left", va="bottom", color=_RED, fontsize=9,
            parse_math=False,
        )  # fmt: skip


def _names(ax: Any, rows: Sequence[LayerHealth]) -> None:
    if len(rows) <= _NAMED:
        ax.set_xticks(range(len(rows)), [row.title[-28:] for row in rows], rotation=60,
                      ha="right", fontsize=7)  # fmt: skip
    else:
        ax.set_xlabel("layers, in the order in which they run")
    ax.set_xlim(-0.7, len(rows) - 0.3)
