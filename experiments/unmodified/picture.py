"""Plot the bytes of each program on each target, relative to jax.grad's."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from experiments.unmodified.results import Results
from experiments.unmodified.ways import HALF, STOCK

MARKS = {"default": "o", "save_dots": "s", "save_nothing": "v", HALF: "*"}
# The bar for the default on each target, relative to jax.grad's temporary bytes.
BARS = {"cpu": 0.75, "tpu:v5e:1x1": 0.85, "gpu:h100": 0.85}


def draw(path: Path, results: Results) -> None:
    """Draw a panel for each target: a column for each program, a mark for each way."""
    figure, panels = plt.subplots(1, len(BARS), figsize=(12, 4.2), sharey=True,
                                  layout="constrained")  # fmt: skip
    for axes, (target, bar) in zip(panels, BARS.items(), strict=True):
        found = {name: parts[target] for name, parts in results.items() if target in parts}
        for way, mark in (MARKS | dict.fromkeys(STOCK, "_")).items():
            ratios = [
                (x, ways[way]["temp"] / ways["jax.grad"]["temp"])
                for x, ways in enumerate(found.values())
                if "temp" in ways.get(way, {})
            ]
            label = f"jax.checkpoint, {way}" if way in STOCK else way
            if way == HALF:
                label = "a budget with half the temporary bytes"
            size = 12 if mark in "*_" else 6
            axes.plot(*zip(*ratios, strict=True) if ratios else ([], []), mark, label=label,
                      markersize=size)  # fmt: skip
        axes.axhline(1, color="black", linewidth=0.8)
        axes.axhline(bar, color="gray", linestyle="--", linewidth=0.8)
        axes.axhline(0.5, color="gray", linestyle=":", linewidth=0.8)
        axes.set(title=target, ylim=(0, 1.3))
        axes.set_xticks(range(len(found)), list(found), rotation=40, ha="right")
    panels[0].set_ylabel("temporary bytes, of jax.grad's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130)
    plt.close(figure)
