"""The cost of each segment's Jacobian: FLOPs to push a tangent and to pull a cotangent through it.

A program is cut into segments, and its Jacobian is the product (the chain) of their Jacobians (the
links). Only the linear part of a derivative counts: the operations that depend on the tangent or
the cotangent. All other operations run once, however many vectors are pushed or pulled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from xform._jax import Var, cotangent_aval, tangent_aval
from xform.errors import XformError
from xform.interpret.cost import equation_flops
from xform.jacobians.chain import ChainLink
from xform.jacobians.segments import CutProgram, Segment
from xform.jacobians.units import LinearMap, images_of_rows, side_of_units
from xform.passes.dce import live
from xform.passes.inline import Inline
from xform.program.arithmetic import Value
from xform.program.arrays import stacked
from xform.program.fingerprint import fingerprint
from xform.program.ir import evaluate, trace
from xform.steering.barrier import barrier_p
from xform.transforms.forward import linearize
from xform.transforms.reverse import immediate_vjp


def links(cut_program: CutProgram) -> list[ChainLink]:
    """Return the link of each segment of a program. FLOPs of equal segments are counted once.

    Cost: two traces of the derivative of each segment.
    """
    counted: dict[Any, ChainLink] = {}
    chain: list[ChainLink] = []
    for i in range(len(cut_program)):
        segment = cut_program.segment(i, i)
        key = fingerprint(segment.program), len(segment.active), len(segment.wanted)
        if key not in counted:
            counted[key] = link(segment)
        chain.append(counted[key])
    return chain


def link(segment: Segment) -> ChainLink:
    """Return the link of one segment."""
    push, free_push = _flops(segment, "forward")
    pull, free_pull = _flops(segment, "reverse")
    return ChainLink(segment.columns, segment.rows, push, pull, free_push, free_pull)


def linear_map(
    segment: Segment, mode: str, args: Sequence[Value], policy: Any = None
) -> tuple[list[Value], LinearMap]:
    """Return the outputs of a segment at `args`, and its derivative there.

    The derivative maps tangents of the active inputs (forward mode), or cotangents of the wanted
    outputs (reverse mode). `policy` says which values reverse mode saves. In the list of outputs,
    the wanted outputs come first.
    """
    n, k = len(segment.active), len(segment.wanted)
    inactive = args[n:]

    def run(*xs: Value) -> tuple[list[Value], list[Value]]:
        ys = evaluate(segment.program, [*xs, *inactive])
        return ys[:k], ys[k:]

    if mode == "forward":
        ys, push, others = linearize(run, *args[:n], has_aux=True)
        return [*ys, *others], lambda dxs: push(*dxs)
    ys, pull, others = immediate_vjp(run, *args[:n], has_aux=True, policy=policy)
    return [*ys, *others], lambda cts: pull(list(cts))


def _flops(segment: Segment, mode: str) -> tuple[float, float]:
    """Return the FLOPs to push a tangent or pull a cotangent through a segment, by `mode`.

    Also returns how many of them are free for a unit vector: a product of a matrix with the unit
    vector itself is a row or column of the matrix. The FLOPs are infinite if the segment has no
    derivative in this mode.
    """
    if mode == "forward":
        avals = [tangent_aval(v.aval) for v in segment.active]
    else:
        avals = [cotangent_aval(v.aval) for v in segment.wanted]
    # A batch of one: an operation without a batching rule raises an error here.
    vectors = [stacked(1, aval) for aval in avals]
    args = segment.program.in_types
    n = len(args)
    batch = lambda *xs: images_of_rows(linear_map(segment, mode, xs[:n])[1], xs[n:])
    try:
        prog = Inline().program(trace(batch, *args, *vectors))
    except (XformError, TypeError, ValueError):  # no derivative in this mode
        return math.inf, 0.0
    dependent, units = set(prog.inputs[n:]), frozenset(prog.inputs[n:])
    total, free = 0, 0
    for eqn in live(prog.equations, prog.outputs, effects=False):
        depends = [isinstance(v, Var) and v in dependent for v in eqn.invars]
        if any(depends):
            # xform's barrier makes values wait for a cotangent on which they do not depend.
            is_barrier = eqn.primitive is barrier_p
            dependent.update(
                itertools.compress(eqn.outvars, depends) if is_barrier else eqn.outvars
            )
            flops = equation_flops(eqn)
            total += flops
            free += flops if side_of_units(eqn, units) is not None else 0
    return float(total), float(free)
