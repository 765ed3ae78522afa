"""A candidate for a budget: one Schedule of the whole program."""

from __future__ import annotations

import dataclasses

from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops
from xform.planner.loops import Shapes
from xform.policies.budgets import Regions


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Schedule of the whole program, with the changes to its loops and remat regions.

    Attributes:
      schedule: the values that are saved and the equations that are recomputed.
      shapes: for each loop that is split or nested, its index in `loops` and its new shape.
      regions: "open" if remat regions are dissolved, "marked" if they are as their author wrote.
    """

    schedule: Schedule
    shapes: Shapes
    regions: Regions = "marked"

    @property
    def work(self) -> tuple[int, int]:
        """Recomputed FLOPs, then bytes sent to the host. Candidates are ordered by this pair."""
        return recompute_flops(self.schedule), offloaded_bytes(self.schedule)
