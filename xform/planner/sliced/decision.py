"""Apply decisions to run regions of a program in slices."""

from __future__ import annotations

import functools
from typing import Any

from xform.errors import OtherProgram
from xform.planner.sliced.loss import loss_position, run_loss_in_slices
from xform.planner.sliced.slice_plan import recomputed_in_slices
from xform.program.dimensions import shape
from xform.program.ir import Mask, Program
from xform.program.source import frame
from xform.slices.decision import SlicedValue, Slices
from xform.slices.opened import opened
from xform.slices.region import Region, find_region
from xform.slices.rewrite import with_loop
from xform.terminal.text import human_bytes


def in_slices(prog: Program, slices: Slices, wanted: Mask | None = None) -> Program:
    """Return a program with some of its regions in slices, one decision after the other.

    `wanted` are the outputs whose derivatives are wanted; None: all.

    Raises:
      OtherProgram: a decision is not for this program.
    """
    if not slices:
        return prog
    key = "in slices", slices, wanted
    if key not in prog.cache:
        region = _region(in_slices(prog, slices[:-1], wanted), slices[-1])
        saved = slices[-1].saved_bytes
        run = functools.partial(run_loss_in_slices, wanted=wanted, saved_bytes=saved)
        prog.cache[key] = with_loop(region, run)
    return prog.cache[key]


def regions_of_slices(prog: Program, slices: Slices, wanted: Mask) -> list[Region]:
    """Return the region of each decision. `wanted` is as in `in_slices`.

    Raises:
      OtherProgram: a decision is not for this program.
    """
    return [_region(in_slices(prog, slices[:i], wanted), slices[i]) for i in range(len(slices))]


def flops_in_slices(prog: Program, slices: Slices, wanted: Mask) -> int:
    """Return the FLOPs that the slices of losses recompute for their own backward passes.

    A slice that saves what a minimum cut saves counts 0: XLA fuses all that it recomputes.
    """
    total = 0
    for region, decision in zip(regions_of_slices(prog, slices, wanted), slices, strict=True):
        if decision.saved_bytes is not None:
            loss = loss_position(region, wanted)
            assert loss is not None
            total += recomputed_in_slices(region, loss, decision.saved_bytes)
    return total


def _region(prog: Program, decision: SlicedValue) -> Region:
    """Return the region of a decision for a program."""
    calls_opened = opened(prog)
    equations = calls_opened.equations
    variables: Any = calls_opened.inputs if decision.equation < 0 else ()
    if 0 <= decision.equation < len(equations):
        variables = equations[decision.equation].outvars
    for v in variables[decision.result :][:1]:
        if decision.axis < len(shape(v)):
            region = find_region(calls_opened, v, decision.axis, decision.n)
            if region is not None:
                return region
    raise OtherProgram(
        f"a plan with {decision.n} slices of value {decision.equation}",
        "it was made for another program: this one has no such region",
        frame(equations[0]) if equations else "",
        "make a new plan with xform.plan for this function and these shapes",
    )


def describe(region: Region, wanted: Mask, saved_bytes: int | None) -> str:
    """Describe a region for users: how many slices, of what, where, and what each slice computes.

    `saved_bytes` is that of its `SlicedValue`.

    For example "16 slices of axis 0 of f32[4096,16384] (dot_general at train.py:12; value and
    gradient in one loop)".
    """
    operation = region.source.primitive.name
    aval: Any = region.start.aval
    how = "its body is recomputed in the backward pass"
    if loss_position(region, wanted) is not None:
        how = "value and gradient in one loop"
        if saved_bytes is not None:
            how += f", each slice saves at most {human_bytes(saved_bytes)}"
    return (
        f"{region.n} slices of axis {region.axis} of {aval.str_short(short_dtypes=True)} "
        f"({operation} at {region.where}; {how})"
    )
