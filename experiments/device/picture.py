"""The plot: time of a step against the peak of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

GIB = 2**30


def draw(path: Path, models: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Plot the steps that ran, of models with several; xform's in another colour."""
    ran = {
        model: {way: found for way, found in ways.items() if found.get("peak")}
        for model, ways in models.items()
    }
    several = {model: ways for model, ways in ran.items() if len(ways) > 1}
    size = (6.4 * max(len(several), 1), 4)
    figure, panels = plt.subplots(
        1, len(several), figsize=size, layout="constrained", squeeze=False
    )
    for panel, (model, ways) in zip(panels[0], several.items(), strict=True):
        for way, found in ways.items():
            x, y = found["peak"] / GIB, 1000 * found["step"]
            ours = way.startswith("xform")
            panel.plot(x, y, "o", color="#c05621" if ours else "#2b6cb0")
            below = way.startswith("xform.grad, ")  # beside it is the step with a budget
            panel.annotate(
                way, (x, y), (5, -10 if below else 3), textcoords="offset points", fontsize=8
            )
        panel.set(title=model, xlabel="peak of the device, GiB", ylabel="ms a step")
        panel.margins(0.2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
