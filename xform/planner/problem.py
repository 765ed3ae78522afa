"""`Problem`: a derivative for which the planner chooses which values to save or recompute.

A plan depends only on its Problem and its policy. The methods of a Problem return the derivative's
*Joint* (its forward and backward pass as one program), a *Schedule* under any policy (the saved
values and the recomputed equations), and the simulated peak memory of a Schedule.

A remat region is a part of a function that `jax.checkpoint` or `xform.remat` marks. A plan may keep
the regions, or dissolve them first.
"""

from __future__ import annotations

import dataclasses
import functools
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
from xform.planner.sliced.decision import flops_in_slices, in_slices
from xform.policies.budgets import Regions
from xform.program.ir import Mask, Program
from xform.slices.decision import Slices

_AS_WRITTEN: Shapes = MappingProxyType[int, Any]({})


@dataclasses.dataclass(frozen=True)
class Problem:
    """A derivative to plan.

    Attributes:
      marked: the program to differentiate, with its remat regions as its author marked them.
      active: which of its inputs are differentiated.
      wanted: which of its outputs are differentiated.
      device: the device that the plan is for.
      regions: "open" to dissolve remat regions, "marked" to keep them.
      slices: the regions of the program that run in slices, after `regions`.
      offload: whether values may be offloaded to the host's memory.
      outside_bytes: bytes that a training step holds outside its derivative, such as an optimizer's
        state; negative if outputs reuse the memory of donated arguments.
      outside_argument_bytes: the part of these bytes that are arguments.
    """

    marked: Program
    active: Mask
    wanted: Mask
    device: Device = dataclasses.field(default_factory=current_device)
    regions: Regions = "marked"
    slices: Slices = ()
    offload: bool = True
    outside_bytes: int = 0
    outside_argument_bytes: int = 0

    @property
    def program(self) -> Program:
        """The program whose derivative is planned.

        Its remat regions are dissolved if they are "open", and some regions run in slices.
        """
        return in_slices(self.unsliced, self.slices, self.wanted)

    @property
    def unsliced(self) -> Program:
        """The same program without slices."""
        return OpenRegions().program(self.marked) if self.regions == "open" else self.marked

    @functools.cached_property
    def flops_in_slices(self) -> int:
        """FLOPs that slices of losses recompute for their own backward passes."""
        return flops_in_slices(self.unsliced, self.slices, self.wanted)

    @property
    def link(self) -> HostLink | None:
        """The link to the host; None if it is unknown or values may not be offloaded."""
        return link_of(self.device) if self.offload else None

    def joint(self, shapes: Shapes = _AS_WRITTEN) -> Joint:
        """Return the Joint of the program.

        `shapes` says which loops are first split or nested, and how (`planner/shape.py`).
        """
        return analyze(reshape_loops(self.program, shapes), self.active, self.wanted)

    def schedule(self, policy: Any, shapes: Shapes = _AS_WRITTEN) -> Schedule:
        """Return the Schedule of the program under a policy, or under a Decision for its Joint.

        `shapes` is as in `joint`.
        """
        return schedule(self.joint(shapes), policy, self.device.backend)

    def candidate(self, policy: Any, shapes: Shapes = _AS_WRITTEN) -> Candidate:
        """Return a Candidate: the Schedule under a policy, and how the program was changed."""
        schedule = self.schedule(policy, shapes)
        return Candidate(schedule, dict(shapes), self.regions, self.slices, self.flops_in_slices)

    def peak(self, schedule: Schedule) -> int:
        """Return the simulated peak bytes of a Schedule: arguments, outputs, temporary values."""
        return liveness(schedule, self.device.backend).total_bytes
