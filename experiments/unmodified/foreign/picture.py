"""The plot of all programs: bytes, compile time and step time, as parts of jax.grad's."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from experiments.unmodified.foreign.tables import Results, compiling, counted, share, stepping

PANELS = {"temporary bytes": (share, 0.72, 1.02), "compile time": (compiling, 1.3, 1.5),
          "step time": (stepping, 1.0, None)}  # fmt: skip


def draw(path: Path, results: Results) -> None:
    """A row for each program, by its share of bytes; a panel for each ratio, with its bars."""
    found = dict(sorted(counted(results).items(), key=lambda item: share(item[1])))
    size = (11, 1.2 + 0.17 * len(found))
    figure, panels = plt.subplots(1, len(PANELS), figsize=size, sharey=True, layout="constrained")
    for axes, (title, (of, middle, most)) in zip(panels, PANELS.items(), strict=True):
        values = [of(one) for one in found.values()]
        above = most or middle
        colours = ["#b5543a" if value > above else "#3b6ea5" for value in values]
        axes.scatter(values, range(len(values)), c=colours, s=14)
        axes.axvline(1, color="black", linewidth=0.8)
        for bar, style in ((middle, ":"), (most, "--")):
            if bar:
                axes.axvline(bar, color="gray", linestyle=style, linewidth=0.8)
        axes.set(title=f"{title}, of jax.grad's", xlim=(0, None))
        axes.grid(axis="y", linewidth=0.3)
    panels[0].set_yticks(range(len(found)), list(found), fontsize=7)
    panels[0].margins(y=0.01)
    figure.savefig(path, dpi=120)
    plt.close(figure)
