"""A plan of a whole program, whose loops may have been taken apart for it."""

from __future__ import annotations

import dataclasses

from xform.interpret.joint import Plan
from xform.planner.costs.outcome import recompute_flops, sent_bytes
from xform.planner.shape import Shape

Shapes = dict[int, Shape]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A Plan of a program whose loops have some `shapes`."""

    plan: Plan
    shapes: Shapes

    @property
    def work(self) -> tuple[int, int]:
        """What is run again, and then what is sent: by this plans are compared."""
        return recompute_flops(self.plan), sent_bytes(self.plan)
