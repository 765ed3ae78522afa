"""The plot of `experiments/resume`: the processes of a run, and losses on other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

COLORS = {"starting": "#a0aec0", "training": "#2b6cb0", "saving": "#c53030"}
BOUND = 1e-5


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the measurements."""
    figure, (above, below) = plt.subplots(2, figsize=(7.6, 6.4), layout="constrained")
    lives = results["kills"]["lives"]
    for life in lives:
        x, y = [life["began"] / 60, life["ended"] / 60], [life["resumed"], life["reached"]]
        above.plot(x, y, color=COLORS[life["moment"]], linewidth=1)
    for moment, color in COLORS.items():
        ends = [(x["ended"] / 60, x["reached"]) for x in lives if x["moment"] == moment]
        label = f"killed while {moment}: {len(ends)}"
        above.plot(*np.reshape(ends, (-1, 2)).T, "x", color=color, label=label)
    above.set(xlabel="minutes", ylabel="step", title=f"{len(lives)} processes of one run")
    above.legend(frameon=False, fontsize=8)
    moved = results["meshes"]
    apart = np.abs(np.subtract(moved["moved"], moved["one"])).clip(1e-8)
    below.semilogy(np.arange(1, len(apart) + 1), apart, color="#2b6cb0", linewidth=1)
    below.axhline(BOUND, color="#a0aec0", linestyle="--", linewidth=0.8)
    for first, devices in zip(moved["from"], moved["devices"], strict=True):
        below.axvline(first + 0.5, color="#c53030", linewidth=0.8)
        below.text(first + 1, 4e-6, f"{devices} devices", fontsize=8)
    below.set(xlabel="step", ylabel="difference of losses", title="8, then 4, then 1: against 1")
    figure.savefig(path, dpi=130)
    plt.close(figure)
