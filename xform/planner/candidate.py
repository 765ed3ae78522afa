"""A whole program under a schedule, as a candidate for a budget."""

from __future__ import annotations

import dataclasses

from xform.budgets import Regions
from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import recompute_flops, sent_bytes
from xform.planner.loops import Shapes


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A whole program under a Schedule.

    Attributes:
      schedule: its Schedule.
      shapes: the shapes of the program's loops that are taken apart, by their place.
      regions: whether remat regions are open in the program, or as they are marked.
    """

    schedule: Schedule
    shapes: Shapes
    regions: Regions = "marked"

    @property
    def work(self) -> tuple[int, int]:
        """FLOPs that are run again, then bytes that are sent: candidates are compared by this."""
        return recompute_flops(self.schedule), sent_bytes(self.schedule)
