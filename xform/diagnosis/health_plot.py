"""The plot of a diagnosis: activations, gradients and ratios of all layers, and the faults."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from xform.diagnosis.row import LayerHealth
from xform.planner.report.picture import BLUE, GREY, ORANGE, new_figure, save_figure, style_axes

_CALLER = "health.plot"
_MAX_NAMES = 30  # with more layers than this, the axis has numbers instead of names
_LABEL_WIDTH = 0.33  # of a label of a fault, as a share of the axis
_TEAL, _RED = "#2c7a7b", "#c53030"

# Returns a measurement of a layer; None if the layer has no such number.
Measurement = Callable[[LayerHealth], float | None]


def draw(path: str | os.PathLike[str], title: str, rows: Sequence[LayerHealth]) -> None:
    """Draw root mean squares and ratios on logarithmic axes, and shares below.

    Bands mark the layers at fault.
    """
    figure = new_figure(_CALLER, 9.6, 6.6)
    top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.6))
    _line(top, rows, lambda r: r.activation, "activation", BLUE, "o")
    _line(top, rows, lambda r: r.gradient, "gradient", ORANGE, "s")
    _log_axis(top, "root mean square")
    _line(middle, rows, lambda r: r.gradient_to_weight, "gradient / weight", ORANGE, "s")
    _line(middle, rows, lambda r: r.update_to_weight, "update / weight", _TEAL, "^")
    _line(middle, rows, lambda r: r.gain, "gain", BLUE, "o")
    _line(middle, rows, lambda r: r.sigma, "largest singular value", GREY, "D")
    _log_axis(middle, "ratio")
    _line(low, rows, lambda r: r.dead, "dead units", _RED, "o")
    _line(low, rows, lambda r: r.saturated, "saturated elements", BLUE, "^")
    _line(low, rows, lambda r: r.correlation, "cosine of neighbouring gradients", GREY, "s")
    low.set_ylim(-0.05, 1.05)
    low.set_ylabel("share")
    _bands((top, middle, low), rows)
    for ax in (top, middle, low):
        style_axes(ax)
        if ax.get_legend_handles_labels()[1]:
            # Beside the axes, where no curve is.
            ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    _layer_axis(low, rows)
    figure.suptitle(textwrap.fill(title, 88), x=0.01, ha="left", fontsize=11, parse_math=False)
    save_figure(figure, _CALLER, path)


def _line(ax: Any, rows: Sequence[LayerHealth], measurement: Measurement, label: str, color: str,
          marker: str) -> None:  # fmt: skip
    """Plot one number of all rows that have it. Values that are not finite are left out."""
    points = [(i, y) for i, row in enumerate(rows) if (y := measurement(row)) is not None]
    points = [(i, y) for i, y in points if math.isfinite(y)]
    if points:
        size = 4 if len(rows) <= 60 else 2
        ax.plot(*zip(*points, strict=True), marker=marker, markersize=size, linewidth=1,
                color=color, label=label)  # fmt: skip


def _log_axis(ax: Any, label: str) -> None:
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel(label)


def _bands(all_axes: Sequence[Any], rows: Sequence[LayerHealth]) -> None:
    """Mark the layers at fault in each plot, and label those with room in the uppermost."""
    faults = [(i, row) for i, row in enumerate(rows) if row.verdict != "fine"]
    for i, _ in faults:
        for ax in all_axes:
            ax.axvspan(i - 0.5, i + 0.5, color=_RED, alpha=0.15, linewidth=0)
    width, free_from = _LABEL_WIDTH * len(rows), -math.inf
    for i, row in faults:
        right = i > len(rows) / 2
        start = i - width if right else i
        if start < free_from:  # it would cover the label before it
            continue
        free_from = start + width
        all_axes[0].annotate(
            f" {row.title}: {row.verdict} ", (i, 1), xycoords=("data", "axes fraction"),
            ha="right" if right else "left", va="bottom", color=_RED, fontsize=9,
            parse_math=False,
        )  # fmt: skip


def _layer_axis(ax: Any, rows: Sequence[LayerHealth]) -> None:
    """Label the axis of layers by their names, if there are not too many."""
    if len(rows) <= _MAX_NAMES:
        ax.set_xticks(range(len(rows)), [row.title[-28:] for row in rows], rotation=60,
                      ha="right", fontsize=7)  # fmt: skip
    else:
        ax.set_xlabel("layers, in execution order")
    ax.set_xlim(-0.7, len(rows) - 0.3)
