"""The cost of each link of a chain: FLOPs of the linear part of its derivative, in both modes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from xform._jax import Var, cotangent_aval, tangent_aval
from xform.errors import XformError
from xform.interpret.barrier import barrier_p
from xform.interpret.cost import equation_flops
from xform.jacobians.chain import ChainLink
from xform.jacobians.segments import CutProgram, Segment
from xform.jacobians.units import meets_first, of_rows, stacked, vary
from xform.passes.dce import live
from xform.passes.inline import Inline
from xform.program.arithmetic import Value
from xform.program.fingerprint import fingerprint
from xform.program.ir import evaluate, trace
from xform.transforms.forward import linearize
from xform.transforms.reverse import vjp


def links(cut_program: CutProgram) -> list[ChainLink]:
    """A link for each segment of a program; equal segments are counted once.

    Cost: two traces of the derivative of each segment.
    """
    known: dict[Any, ChainLink] = {}
    found: list[ChainLink] = []
    for i in range(len(cut_program)):
        segment = cut_program.segment(i, i)
        key = fingerprint(segment.program), len(segment.active), len(segment.wanted)
        if key not in known:
            known[key] = link(segment)
        found.append(known[key])
    return found


def link(segment: Segment) -> ChainLink:
    """The link of one segment."""
    push, first = _counted(segment, "forward")
    pull, last = _counted(segment, "reverse")
    return ChainLink(segment.columns, segment.rows, push, pull, first, last)


def linear(segment: Segment, mode: str, args: Sequence[Value], policy: Any = None):
    """The outputs of a segment, and its pushforward or pullback, on flat values.

    The wanted outputs come first.
    """
    n, k = len(segment.active), len(segment.wanted)
    inactive = args[n:]
    ins, outs = ([v.aval for v in ends] for ends in (segment.active, segment.wanted))

    def run(*xs: Value) -> tuple[list[Value], list[Value]]:
        ys = evaluate(segment.program, [*xs, *inactive])
        return ys[:k], ys[k:]

    if mode == "forward":
        ys, push, others = linearize(run, *args[:n], has_aux=True)
        return [*ys, *others], lambda dxs: push(*vary(dxs, ins))
    ys, pull, others = vjp(run, *args[:n], has_aux=True, policy=policy)
    return [*ys, *others], lambda cts: pull(vary(cts, outs))


def _counted(segment: Segment, mode: str) -> tuple[float, float]:
    """FLOPs of the equations that depend on a seed, and of products applied to the seeds first.

    Seeds are the tangents or cotangents.
    """
    ends = segment.active if mode == "forward" else segment.wanted
    kind = tangent_aval if mode == "forward" else cotangent_aval
    # A batch of one: an operation without a batching rule raises an error here.
    seeds = [stacked(1, kind(v.aval)) for v in ends]
    args = segment.program.in_types
    n = len(args)
    batch = lambda *xs: of_rows(linear(segment, mode, xs[:n])[1], xs[n:])
    try:
        prog = Inline().program(trace(batch, *args, *seeds))
    except (XformError, TypeError, ValueError):  # no derivative in this mode
        return math.inf, 0.0
    moving, units = set(prog.inputs[n:]), frozenset(prog.inputs[n:])
    total, first = 0, 0
    for eqn in live(prog.equations, prog.outputs, effects=False):
        moves = [isinstance(v, Var) and v in moving for v in eqn.invars]
        if any(moves):
            # A barrier makes other values wait for a seed; these do not depend on it.
            is_barrier = eqn.primitive is barrier_p
            moving.update(itertools.compress(eqn.outvars, moves) if is_barrier else eqn.outvars)
            flops = equation_flops(eqn)
            total += flops
            first += flops if meets_first(eqn, units) is not None else 0
    return float(total), float(first)
