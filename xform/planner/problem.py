"""A planning problem: a program, its differentiated inputs and outputs, and the device.

A plan depends on its problem and its policy only.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from xform.interpret.joint import Joint, Schedule, analyze
from xform.passes.open_regions import OpenRegions
from xform.planner.candidate import Candidate
from xform.planner.costs.link import HostLink, link_of
from xform.planner.decide import schedule
from xform.planner.device import Device, current_device
from xform.planner.loops import Shapes, reshape_loops
from xform.planner.simulate.liveness import liveness
from xform.policies.budgets import Regions
from xform.program.ir import Mask, Program

_AS_WRITTEN: Shapes = MappingProxyType[int, Any]({})


@dataclasses.dataclass(frozen=True)
class Problem:
    """A derivative to plan.

    Attributes:
      marked: the program, with its remat regions as its author marked them.
      active: which of its inputs are differentiated.
      wanted: which of its outputs have a cotangent.
      device: the device that the plan is for.
      regions: "open" to dissolve remat regions, "marked" to keep them.
      offload: whether values may be offloaded to the host's memory.
      outside_bytes: bytes that a training step holds outside its derivative, such as an optimizer's
        state; negative if outputs reuse the memory of donated arguments.
    """

    marked: Program
    active: Mask
    wanted: Mask
    device: Device = dataclasses.field(default_factory=current_device)
    regions: Regions = "marked"
    offload: bool = True
    outside_bytes: int = 0

    @property
    def program(self) -> Program:
        """The program that is differentiated: without its remat regions if they are "open"."""
        return OpenRegions().program(self.marked) if self.regions == "open" else self.marked

    @property
    def link(self) -> HostLink | None:
        """The link to the host; None if it is unknown or values may not be offloaded."""
        return link_of(self.device) if self.offload else None

    def joint(self, shapes: Shapes = _AS_WRITTEN) -> Joint:
        """The Joint of the program, with new `shapes` for some of its loops."""
        return analyze(reshape_loops(self.program, shapes), self.active, self.wanted)

    def schedule(self, policy: Any, shapes: Shapes = _AS_WRITTEN) -> Schedule:
        """The Schedule of the program under a policy, or under a Decision for its Joint."""
        return schedule(self.joint(shapes), policy, self.device.backend)

    def candidate(self, policy: Any, shapes: Shapes = _AS_WRITTEN) -> Candidate:
        """The Schedule of the program under a policy, as a Candidate."""
        return Candidate(self.schedule(policy, shapes), dict(shapes), self.regions)

    def peak(self, schedule: Schedule) -> int:
        """Simulated peak bytes of a Schedule: arguments, outputs and live temporary values."""
        return liveness(schedule, self.device.backend).total_bytes
