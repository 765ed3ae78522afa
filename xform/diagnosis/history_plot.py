"""The plot of a stream of health reports: the numbers of each layer over the steps."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from xform.planner.report.picture import new_figure, save_figure, style_axes

_CALLER = "HealthHistory.plot"
_RED = "#c53030"
_MAX_LABELS = 4  # number of alerts with a label; further ones only have a line
_TITLES = {
    "activation": "activation (RMS)",
    "gradient": "gradient (RMS)",
    "gradient_to_weight": "gradient / weight",
    "update_to_weight": "update / weight",
}


def draw(path: str | os.PathLike[str], title: str, steps: Sequence[int], losses: Sequence[float],
         curves: Mapping[str, Sequence[Sequence[float]]], alerts: Sequence[tuple[int, str]]
         ) -> None:  # fmt: skip
    """Draw the loss, and for each number a curve for each layer. Lines mark the alerts.

    Args:
      path: the file to write.
      title: the title of the plot.
      steps: number of the step of each report.
      losses: the loss at each.
      curves: for each number, its values at the steps, for each layer in execution order.
      alerts: step and text of each alert.
    """
    drawn = {name: layers for name, layers in curves.items() if layers}
    figure = new_figure(_CALLER, 8.4, 1.6 + 1.7 * len(drawn))
    colors: Any = importlib.import_module("matplotlib").colormaps["viridis"]
    all_axes = figure.subplots(1 + len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, layers) in zip(all_axes, [("loss", [losses]), *drawn.items()], strict=True):
        for i, values in enumerate(layers):
            color = colors(0.95 * i / max(len(layers) - 1, 1))
            ax.plot(steps, values, color=color, linewidth=1, marker="o", markersize=2)
        ax.set_ylabel(_TITLES.get(name, name), fontsize=8)
        if not any(x <= 0 for x in losses) or name != "loss":
            ax.set_yscale("log", nonpositive="mask")
        style_axes(ax)
        for step, _ in alerts:
            ax.axvline(step, color=_RED, linewidth=0.8, alpha=0.6)
    for i, (step, text) in enumerate(alerts[:_MAX_LABELS]):
        all_axes[0].annotate(
            f" {text} ", (step, 1 - 0.18 * i), xycoords=("data", "axes fraction"), va="top",
            ha="right" if step > (steps[0] + steps[-1]) / 2 else "left", color=_RED, fontsize=8,
            parse_math=False, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},
        )  # fmt: skip
    scale = importlib.import_module("matplotlib.cm").ScalarMappable(cmap=colors)
    bar = figure.colorbar(scale, ax=list(all_axes), fraction=0.02, pad=0.01, ticks=[0, 1])
    bar.ax.set_yticklabels(["first\nlayer", "last\nlayer"], fontsize=8)
    all_axes[-1].set_xlabel("step")
    if len(steps) > 1:  # also where no number is finite
        margin = 0.02 * (steps[-1] - steps[0])
        all_axes[-1].set_xlim(steps[0] - margin, steps[-1] + margin)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    save_figure(figure, _CALLER, path)
