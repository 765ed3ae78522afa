"""The picture of the experiment: temporary bytes and time beside those of the plain trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLORS = {"scanned": "#2b6cb0", "unrolled": "#dd6b20"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of bytes, and dots of times with their quartiles; a line at each bar to be met."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.2), layout="constrained", sharey=True
    )
    for i, (layout, found) in enumerate(results.items()):
        (plain, usual), *_ = found.items()
        places = [place + 0.4 * i for place in range(len(found))]
        color = COLORS[layout]
        parts = [one["temp"] / usual["temp"] for one in found.values()]
        left.barh(places, parts, 0.38, color=color, label=layout)
        times = [one["times"][plain] for one in found.values()]
        lows, middles, highs = zip(*times, strict=True)
        right.hlines(places, lows, highs, color=color, linewidth=5, alpha=0.35)
        right.plot(middles, places, "o", color=color)
    names = list(max(results.values(), key=len))
    left.set_yticks([place + 0.2 for place in range(len(names))], names)
    left.invert_yaxis()
    left.axvline(0.5, color="#718096", linewidth=1)
    left.set_xlabel("temporary bytes / those of the plain trainer")
    left.legend(frameon=False, title="layers")
    right.axvline(1, color="#718096", linewidth=1)
    right.set_xlabel("time of a step / that of the plain trainer")
    figure.savefig(path, dpi=130)
    plt.close(figure)
