"""The plan of the default policy: a minimum cut, or everything saved if that has a lower peak."""

from __future__ import annotations

import dataclasses

from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import residual_bytes
from xform.planner.problem import Problem
from xform.planner.simulate.profiles import backend_profile
from xform.policies import min_cut, save_everything

# The recomputed values that are live at once are assumed to take at most the bytes of the largest
# forward value, times this number.
_N_LIVE_VALUES = 32


def default_plan(problem: Problem) -> Candidate:
    """Return the plan of the default policy: a minimum cut, unless it raises the peak.

    A minimum cut lowers the bytes of the saved values. If the saved values are not live at the peak
    anyway, the recomputed values can raise the peak. Then saving everything takes less memory, and
    less time. The same holds on a TPU if all saved values fit into the memory on the chip.
    """
    backend = backend_profile(problem.device.backend)
    policy = dataclasses.replace(
        min_cut,
        regions=problem.regions,
        fused_save_price=backend.fused_save_price,
        rounds_operands=backend.rounds_operands,
        slow_price=backend.slow_price,
    )
    cut = problem.candidate(policy)
    if not cut.schedule.recomputed:
        return cut
    everything = problem.candidate(save_everything)
    saved = residual_bytes(everything.schedule)
    fits_on_chip = saved <= backend.on_chip_bytes
    if not (fits_on_chip or _may_raise_the_peak(cut.schedule, saved)):
        return cut
    cut_peak, other_peak = (problem.peak(c.schedule) for c in (cut, everything))
    if fits_on_chip:  # saved values take no memory, so recomputing must lower the peak
        return everything if other_peak <= cut_peak else cut
    return everything if other_peak < (1 - backend.doubt) * cut_peak else cut


def _may_raise_the_peak(cut: Schedule, saved_bytes: int) -> bool:
    """Return whether a minimum cut may have a higher peak than a plan that saves everything.

    `saved_bytes` are the saved bytes of that plan.

    Each recomputed value is live for a few operations only. Suppose that the cut saves fewer bytes
    than that plan, and that the difference is larger than the recomputed values that are live at
    once. Then the cut lowers the peak, and nothing has to be simulated. This is usual in a deep
    network.
    """
    types = (v.aval for eqn in cut.joint.forward for v in eqn.outvars)
    recomputed_bytes = _N_LIVE_VALUES * max(map(aval_bytes, types), default=0)
    return saved_bytes <= residual_bytes(cut) + recomputed_bytes
