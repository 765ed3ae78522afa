"""`Candidate`: one possible plan of a whole derivative.

For a budget, the planner makes many candidates and chooses one. A *Schedule* says which values of
the forward pass are saved for the backward pass and which equations are recomputed. A candidate may
also change the program first: it may split or nest loops, dissolve remat regions (the parts of a
function that `jax.checkpoint` marks), or run regions in slices.
"""

from __future__ import annotations

import dataclasses

from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops
from xform.planner.loops import Shapes
from xform.policies.budgets import Regions
from xform.slices.decision import Slices


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Schedule of a whole program, with the changes to the program's loops and remat regions.

    Attributes:
      schedule: the saved values and the recomputed equations of the changed program.
      shapes: the new shape of each loop that is split or nested, by the loop's index in the
        program (`loops.py`).
      regions: "open" if remat regions are dissolved, "marked" if they are left as marked.
      slices: the regions of the program that run in slices.
      flops_in_slices: FLOPs that slices of losses recompute for their own backward passes.
    """

    schedule: Schedule
    shapes: Shapes
    regions: Regions = "marked"
    slices: Slices = ()
    flops_in_slices: int = 0

    @property
    def work(self) -> tuple[int, int]:
        """Recomputed FLOPs, then bytes sent to the host. Candidates are ordered by this pair."""
        flops = recompute_flops(self.schedule) + self.flops_in_slices
        return flops, offloaded_bytes(self.schedule)
