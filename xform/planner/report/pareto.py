"""`Pareto`: bytes against work that is run again, of many plans; prints and draws itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from xform.planner.report.picture import BLUE, ORANGE, axes, save
from xform.terminal.text import columns, human_bytes, human_flops, human_seconds

# Labels of points that are nearer than this part of an axis would cover each other.
_NEAR = 0.03


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to differentiate a function.

    Attributes:
      name: the policy.
      stock: whether it is one of `jax.checkpoint_policies`.
      peak_bytes: arguments, outputs and the peak of temporary bytes: compiled, or simulated.
      recompute_flops: FLOPs of products, convolutions, loops and calls that are run again.
      least_flops: how little any plan in so many bytes could run again; None where it is not known.
      seconds: how long planning took, without what was compiled for it.
      time: a step's estimated time, in units of one that runs nothing again: by FLOPs alone.
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
    """The curve of bytes against work, with the stock policies beside.

    Attributes:
      function: what was differentiated.
      target: the backend.
      compiled: whether bytes are the compiler's.
      points: budgets by falling bytes, then stock policies.
    """

    function: str
    target: str
    compiled: bool
    points: tuple[Point, ...]

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dataclasses.asdict(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve, with a mark for each stock policy; PNG, SVG or PDF."""
        figure, ax = axes("Pareto.plot")
        kinds = ((False, BLUE, "o-", "budgets"), (True, ORANGE, "x", "stock policies"))
        for stock, color, style, label in kinds:
            points = [p for p in self.points if p.stock == stock]
            mib = [p.peak_bytes / 2**20 for p in points]
            ax.plot(mib, [p.recompute_flops / 1e9 for p in points], style, color=color, label=label)
        for together in self._stock_by_place():
            at = (together[0].peak_bytes / 2**20, together[0].recompute_flops / 1e9)
            ax.annotate("\n".join(p.name for p in together), at, xytext=(5, 5),
                        textcoords="offset points", fontsize=8, color=ORANGE)  # fmt: skip
        kind = "compiled" if self.compiled else "simulated"
        ax.set_title(f"{self.function} on {self.target}", loc="left")
        ax.set_xlabel(f"peak, MiB ({kind})")
        ax.set_ylabel("GFLOP run again")
        ax.set_xlim(left=0)
        ax.legend(frameon=False)
        save(figure, "Pareto.plot", path)

    def _stock_by_place(self) -> list[list[Point]]:
        """The stock policies; those that are drawn too near for two labels together."""
        bytes_ = max((p.peak_bytes for p in self.points), default=0) or 1
        flops = max((p.recompute_flops for p in self.points), default=0) or 1
        places: dict[tuple[int, int], list[Point]] = {}
        for p in self.points:
            near = (round(p.peak_bytes / bytes_ / _NEAR), round(p.recompute_flops / flops / _NEAR))
            if p.stock:
                places.setdefault(near, []).append(p)
        return list(places.values())

    def __str__(self) -> str:
        head = ["policy", "peak", "run again", "at least", "estimated time", "planned in"]
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
        return f"{self.function} on {self.target}\n{columns([head, *rows], right=range(1, 6))}"
