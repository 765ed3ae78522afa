"""Plots of a run: its losses, the memory of each policy, and the live memory of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from models.run.memory_table import MIB, Row
from models.train.log import Record

matplotlib.use("agg")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "font.size": 10.5,
    "axes.titlesize": 12.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "figure.dpi": 130,
}
BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#a0aec0"
# Categories of a memory report, in the colours of its own plots. Other categories are grey.
CATEGORIES = {
    "parameter": "#15407f",
    "optimizer state": "#6cc3ee",
    "gradient": "#b8470f",
    "activation": "#f5a142",
    "recompute": "#b368cc",
}


def plot_losses(records: list[Record], path: Path, title: str) -> None:
    """Plot the training loss of every step and the validation losses, in bits per byte."""
    steps = np.array([r["step"] for r in records if "loss" in r])
    losses = np.array([r["loss"] / math.log(2) for r in records if "loss" in r])
    validated = [r for r in records if "validation_bits_per_byte" in r]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
        axes.plot(steps, losses, color=GREY, linewidth=0.8, label="training, each step")
        validation = [r["validation_bits_per_byte"] for r in validated]
        validated_steps = [r["step"] for r in validated]
        axes.plot(
            validated_steps, validation, "o-", color=BLUE, linewidth=2, markersize=5,
            label="validation, held-out files",
        )  # fmt: skip
        for index, offset in ((0, (8, 2)), (-1, (-4, 10))):
            axes.annotate(
                f"{validation[index]:.2f}",
                (validated_steps[index], validation[index]),
                xytext=offset,
                textcoords="offset points",
                color=BLUE,
                fontweight="bold",
            )
        axes.set(xlabel="step", ylabel="loss (bits per byte)", title=title)
        axes.set_xlim(left=0)
        axes.set_ylim(0, max(*losses, *validation) * 1.06)
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def plot_memory(rows: list[Row], path: Path, title: str) -> None:
    """Plot the temporary memory of the compiled gradient, with a pair of bars for each policy."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 5), layout="constrained")
        height = 0.38
        places = np.arange(len(rows))
        for layout, color, shift in (("scanned", BLUE, -1), ("unrolled", ORANGE, 1)):
            sizes = [row.temp_bytes[layout] / MIB for row in rows]
            bars = axes.barh(places + shift * height / 2, sizes, height, color=color, label=layout)
            recomputed = [row.flops_recomputed[layout] / 1e9 for row in rows]
            labels = [
                f" {size:.0f}" + (f"  (+{extra:.1f} GFLOP)" if extra >= 0.05 else "")
                for size, extra in zip(sizes, recomputed, strict=True)
            ]
            axes.bar_label(bars, labels, fontsize=9)
        axes.set_yticks(places, [row.name.replace(", ", "\n").replace(":", ":\n") for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.grid(visible=False, axis="y")
        axes.set(
            xlabel="temporary memory in MiB (in brackets, recomputed in the backward pass)",
            title=title,
        )
        axes.xaxis.set_label_coords(1, -0.09)
        axes.xaxis.label.set_horizontalalignment("right")
        axes.legend(frameon=False, title="layers", loc="lower right")
        figure.savefig(path)
        plt.close(figure)


def plot_peaks(reports: Mapping[str, Any], path: Path, title: str) -> None:
    """Plot memory reports of a step: live bytes over time, and their categories at the peak."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.6, 4.4), width_ratios=(3, 2), sharey=True, layout="constrained"
        )
        for (name, report), color in zip(reports.items(), (GREY, BLUE), strict=True):
            live = np.array(report.live) / MIB
            at = np.linspace(0, 100, len(live))
            left.fill_between(at, live, color=color, alpha=0.3, linewidth=0)
            left.plot(at, live, color=color, linewidth=1, label=f"{name}: {live.max():.0f} MiB")
            floor = 0.0
            sizes = {group.name: group.bytes / MIB for group in report.group_by("category")}
            known = {category: sizes.get(category, 0.0) for category in CATEGORIES}
            for category, size in {**known, "other": live.max() - sum(known.values())}.items():
                fill = CATEGORIES.get(category, "#8b90a0")
                label = category if color == GREY else None
                right.bar(name, size, 0.6, floor, color=fill, label=label)
                floor += size
        figure.suptitle(title, x=0.01, ha="left")
        left.set(xlabel="progress of the step in %", ylabel="live MiB", xlim=(0, 100))
        left.legend(frameon=False)
        right.grid(visible=False, axis="x")
        right.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left", reverse=True)
        figure.savefig(path)
        plt.close(figure)
