"""Describe a chosen plan as plain data: a `Plan`, which prints itself and can be stored."""

from __future__ import annotations

import dataclasses

from xform.interpret.cost import flops
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import residual_bytes
from xform.planner.plan.decision import decision_of
from xform.planner.plan.plan import Plan
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.planner.report.collectives import repeated_collectives
from xform.planner.report.rows import rows_of
from xform.planner.search_slices import sliced_regions
from xform.planner.simulate.liveness import liveness
from xform.program.dimensions import sample_of, symbolic_dimensions
from xform.program.ir import has_auto_axes


def plan_of_candidate(
    function: str,
    derivative: str,
    problem: Problem,
    policy: str,
    candidate: Candidate,
    target: str,
) -> Plan:
    """Return the `Plan` of a candidate, with simulated bytes; its compiled bytes are not set.

    Args:
      function: the name of the function that is differentiated.
      derivative: describes what is compiled.
      problem: the derivative, and the device.
      policy: the name of the policy that chose the candidate.
      candidate: the chosen plan.
      target: the name of the devices that the plan is for.
    """
    chosen = candidate.schedule
    changes = {"regions": candidate.regions, "slices": candidate.slices}
    simulated = liveness(chosen, problem.device.backend)
    return Plan(
        function=function,
        derivative=derivative,
        policy=policy,
        target=target,
        rows=tuple(rows_of(chosen)),
        saved_bytes=residual_bytes(chosen),
        forward_flops=flops(problem.program),
        recompute_flops=candidate.work[0],
        predicted_bytes=simulated.total_bytes + problem.outside_bytes,
        sharded=has_auto_axes(problem.program),
        symbolic=sample_of(symbolic_dimensions(problem.program.in_avals)),
        compiled_bytes=None,
        compiles=0,
        live=simulated.live,
        saved=simulated.saved,
        record=record(
            decision_of(chosen), chosen.joint, candidate.shapes, candidate.regions, candidate.slices
        ),
        sliced_regions=sliced_regions(dataclasses.replace(problem, **changes)),
        repeated_collectives=repeated_collectives(chosen),
    )
