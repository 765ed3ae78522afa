"""`Pareto`: the curve of peak memory against recomputed FLOPs, as a table and as a plot.

Each point is the plan of one policy: a budget, or a stock policy of `jax.checkpoint_policies`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from xform.planner.report.picture import BLUE, GREY, ORANGE, PURPLE, new_axes, save_figure
from xform.terminal.notebook import Result
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
      slices: the number of slices of each region of the program that runs in slices.
      offloaded_bytes: bytes of the values that wait in the memory of the host.
      compile_seconds: the time of the compilations.
    """

    name: str
    stock: bool
    peak_bytes: int
    recompute_flops: int
    least_flops: int | None
    seconds: float
    time: float
    slices: tuple[int, ...] = ()
    offloaded_bytes: int = 0
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", tuple(self.slices))  # JSON has lists


@dataclasses.dataclass(frozen=True, repr=False)
class Pareto(Result):
    """The curve of peak bytes against recomputed FLOPs, and the stock policies for comparison.

    It prints as a table and iterates over its points.

    Attributes:
      function: the function that was differentiated.
      target: the backend that the plans are for, for example "cpu".
      compiled: whether the bytes are compiled; otherwise they are simulated.
      points: first budgets, by falling bytes, then budgets whose plans have slices, then stock
        policies.
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
        """Draw the curve as a picture. The suffix of `path` chooses the format: PNG, SVG or PDF."""
        figure, ax = new_axes("Pareto.plot")
        self.draw(ax)
        save_figure(figure, "Pareto.plot", path)

    def draw(self, ax: Any) -> None:
        """Draw the curve on `ax`, the Axes of a matplotlib figure.

        Plans with slices have a curve of their own, and each stock policy is a cross. A plan that
        offloads values to the host has a ring.
        """
        kinds = {"budgets": (BLUE, "o-"), "in slices": (PURPLE, "s-"),
                 "stock policies": (ORANGE, "x")}  # fmt: skip
        for label, (color, style) in kinds.items():
            points = [p for p in self.points if _kind(p) == label]
            mib = [p.peak_bytes / 2**20 for p in points]
            if points:
                flops = [p.recompute_flops / 1e9 for p in points]
                ax.plot(mib, flops, style, color=color, label=label)
        offloads = [p for p in self.points if p.offloaded_bytes]
        if offloads:
            x, y = zip(*((p.peak_bytes / 2**20, p.recompute_flops / 1e9) for p in offloads),
                       strict=True)  # fmt: skip
            ax.plot(x, y, "o", markersize=12, fillstyle="none", color=GREY, label="offloads")
        for overlapping in self._stock_labels():
            place = (overlapping[0].peak_bytes / 2**20, overlapping[0].recompute_flops / 1e9)
            ax.annotate("\n".join(p.name for p in overlapping), place, xytext=(5, 5),
                        textcoords="offset points", fontsize=8, color=ORANGE)  # fmt: skip
        kind = "compiled" if self.compiled else "simulated"
        ax.set_title(f"{self.function} on {self.target}", loc="left")
        ax.set_xlabel(f"peak, MiB ({kind})")
        ax.set_ylabel("GFLOP recomputed (unfused)")
        ax.set_xlim(left=0)
        if self.points:
            ax.legend(frameon=False)

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

    def heading(self) -> str:
        """Return the function, the target, and the smallest and the largest peak."""
        peaks = [p.peak_bytes for p in self.points]
        span = f", peaks {human_bytes(min(peaks))} to {human_bytes(max(peaks))}" if peaks else ""
        return f"{self.function} on {self.target}{span}"

    def __str__(self) -> str:
        texts = {
            "policy": lambda p: p.name,
            "peak": lambda p: human_bytes(p.peak_bytes),
            "recomputed (unfused)": lambda p: human_flops(p.recompute_flops),
            "lower bound": lambda p: (
                "not known" if p.least_flops is None else human_flops(p.least_flops)
            ),
            "estimated time": lambda p: f"{p.time:.2f}",
            "planned in": lambda p: human_seconds(p.seconds),
        }
        if self.compiled:
            # Empty if the program of this point was compiled for another point before.
            texts["compiled in"] = lambda p: (
                human_seconds(p.compile_seconds) if p.compile_seconds else ""
            )
        if any(p.slices for p in self.points):
            texts["slices"] = lambda p: ", ".join(map(str, p.slices))
        if any(p.offloaded_bytes for p in self.points):
            texts["offloaded"] = lambda p: human_bytes(p.offloaded_bytes)
        rows = [[text(p) for text in texts.values()] for p in self.points]
        table = columns([list(texts), *rows], right=range(1, len(texts)))
        return f"{self.function} on {self.target}\n{table}"


def _kind(point: ParetoPoint) -> str:
    """Return the kind of a point, as the legend of the plot names it."""
    if point.stock:
        return "stock policies"
    return "in slices" if point.slices else "budgets"
