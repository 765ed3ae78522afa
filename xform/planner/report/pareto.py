"""`Pareto`: the curve of peak memory against recomputed FLOPs, as a table and as a plot.

Each point is the plan of one policy: a budget, or a stock policy of `jax.checkpoint_policies`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from xform.planner.report.picture import BLUE, ORANGE, new_axes, save_figure
from xform.terminal.text import columns, human_bytes, human_flops, human_seconds

# In the plot, the labels of points that are closer than this fraction of both axes would overlap.
_NEAR = 0.03


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """One point of the curve: the plan of one policy.

    Attributes:
      name: the name of the policy.
      stock: whether the policy is one of `jax.checkpoint_policies`.
      peak_bytes: compiled or simulated peak: arguments, outputs and temporary memory.
      recompute_flops: FLOPs of the recomputed products, convolutions, loops and calls.
      least_flops: a lower bound on the FLOPs that any plan within these bytes recomputes; None if
        no bound is known.
      seconds: the time of planning, without compilations.
      time: the estimated time of a step, by FLOPs alone, relative to a step without recomputation.
    """

    name: str
    stock: bool
    peak_bytes: int
    recompute_flops: int
    least_flops: int | None
    seconds: float
    time: float


@dataclasses.dataclass(frozen=True)
class Pareto:
    """The curve of peak bytes against recomputed FLOPs, and the stock policies for comparison.

    It prints as a table and iterates over its points.

    Attributes:
      function: the function that was differentiated.
      target: the backend that the plans are for, for example "cpu".
      compiled: whether the bytes are compiled; otherwise they are simulated.
      points: first budgets, by falling bytes, then stock policies.
    """

    function: str
    target: str
    compiled: bool
    points: tuple[ParetoPoint, ...]

    def __iter__(self) -> Iterator[ParetoPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def to_dict(self) -> dict[str, Any]:
        """Return the points and the other fields as plain data."""
        return dataclasses.asdict(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve, and a cross for each stock policy.

        The suffix of `path` chooses the format: PNG, SVG or PDF.
        """
        figure, ax = new_axes("Pareto.plot")
        kinds = ((False, BLUE, "o-", "budgets"), (True, ORANGE, "x", "stock policies"))
        for stock, color, style, label in kinds:
            points = [p for p in self.points if p.stock == stock]
            mib = [p.peak_bytes / 2**20 for p in points]
            ax.plot(mib, [p.recompute_flops / 1e9 for p in points], style, color=color, label=label)
        for overlapping in self._stock_labels():
            place = (overlapping[0].peak_bytes / 2**20, overlapping[0].recompute_flops / 1e9)
            ax.annotate("\n".join(p.name for p in overlapping), place, xytext=(5, 5),
                        textcoords="offset points", fontsize=8, color=ORANGE)  # fmt: skip
        kind = "compiled" if self.compiled else "simulated"
        ax.set_title(f"{self.function} on {self.target}", loc="left")
        ax.set_xlabel(f"peak, MiB ({kind})")
        ax.set_ylabel("GFLOP recomputed")
        ax.set_xlim(left=0)
        ax.legend(frameon=False)
        save_figure(figure, "Pareto.plot", path)

    def _stock_labels(self) -> list[list[ParetoPoint]]:
        """Return the stock policies in groups; those whose labels would overlap share a group."""
        max_bytes = max((p.peak_bytes for p in self.points), default=0) or 1
        max_flops = max((p.recompute_flops for p in self.points), default=0) or 1
        groups: dict[tuple[int, int], list[ParetoPoint]] = {}
        for p in self.points:
            column = round(p.peak_bytes / max_bytes / _NEAR)
            row = round(p.recompute_flops / max_flops / _NEAR)
            if p.stock:
                groups.setdefault((column, row), []).append(p)
        return list(groups.values())

    def __str__(self) -> str:
        header = ["policy", "peak", "recomputed", "lower bound", "estimated time", "planned in"]
        rows = [
            [
                p.name,
                human_bytes(p.peak_bytes),
                human_flops(p.recompute_flops),
                human_flops(p.least_flops) if p.least_flops is not None else "not known",
                f"{p.time:.2f}",
                human_seconds(p.seconds),
            ]
            for p in self.points
        ]
        return f"{self.function} on {self.target}\n{columns([header, *rows], right=range(1, 6))}"
