"""Count the FLOPs of a program that XLA does not fuse, such as those of matrix products."""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.interpret.cost import equation_flops, flops
from xform.passes.dce import live
from xform.passes.structured import nested_programs
from xform.planner.costs.recompute import fusible
from xform.program.ir import Program
from xform.registry.table import flow_of


def unfused_flops(prog: Program) -> int:
    """Return the FLOPs of the operations of a program that XLA does not fuse, with trip counts.

    A cond counts its most expensive branch. The count is cached on the program.
    """
    if "unfused flops" not in prog.cache:
        equations = live(prog.equations, prog.outputs)
        prog.cache["unfused flops"] = sum(map(_unfused_flops, equations))
    return prog.cache["unfused flops"]


def _unfused_flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of one equation that XLA does not fuse, in nested programs too."""
    inner = nested_programs(eqn)
    if not inner:
        return 0 if fusible(eqn) else equation_flops(eqn)
    flow = flow_of(eqn)
    if flow is not None and flow.index is not None:  # one of the branches runs
        return max(map(unfused_flops, inner))
    # `equation_flops` counts the bodies times the iterations, or times the devices.
    total = sum(map(flops, inner))
    return sum(map(unfused_flops, inner)) * equation_flops(eqn) // total if total else 0
