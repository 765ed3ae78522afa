"""The picture of the experiment: temporary bytes and time relative to the plain trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLORS = {"gpt2-scanned": "#2b6cb0", "gpt2-unrolled": "#dd6b20", "resnet20": "#2f855a"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw bars of bytes, and dots of times with their quartiles; a line marks each bar to meet."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.8), layout="constrained", sharey=True
    )
    names = list(max(results.values(), key=len))
    for i, (model, found) in enumerate(results.items()):
        (plain, usual), *_ = found.items()
        places = [names.index(name) + 0.27 * i for name in found]
        color = COLORS[model]
        parts = [one["temp"] / usual["temp"] for one in found.values()]
        left.barh(places, parts, 0.25, color=color, label=model)
        times = [one["times"][plain] for one in found.values()]
        lows, middles, highs = zip(*times, strict=True)
        right.hlines(places, lows, highs, color=color, linewidth=5, alpha=0.35)
        right.plot(middles, places, "o", color=color)
    left.set_yticks([place + 0.27 for place in range(len(names))], names)
    left.invert_yaxis()
    left.axvline(0.5, color="#718096", linewidth=1)
    left.set_xlabel("temporary bytes / those of the plain trainer")
    left.legend(frameon=False)
    right.axvline(1, color="#718096", linewidth=1)
    right.set_xlabel("time of a step / that of the plain trainer")
    figure.savefig(path, dpi=130)
    plt.close(figure)
