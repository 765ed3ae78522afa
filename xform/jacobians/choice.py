"""Decide how to evaluate a Jacobian: by one mode or as a chain, and in how many chunks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from xform.interpret.cost import size
from xform.jacobians.accumulate import Leaves, accumulate
from xform.jacobians.chain import Link, Order, Sweep, best, forward, reverse
from xform.jacobians.segments import Chain, chain
from xform.jacobians.work import links
from xform.passes.inline import Inline
from xform.planner.device import in_bytes
from xform.policies import check, save_nothing
from xform.policies.budgets import Budget
from xform.program.arithmetic import Value
from xform.transforms.function import Function
from xform.transforms.within import compiled_bytes, first_within

# Reverse mode is chosen without counting FLOPs if forward mode takes this many times more vectors:
# pulling one vector takes at most about three times the work of pushing one.
_CLEAR = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """How to evaluate a Jacobian.

    Attributes:
      chain: the program, cut into segments.
      order: how the links are combined.
      links: the costs of the links; empty if they were not counted.
      chunk: how many tangents (cotangents) a sweep computes at once; None: all.
      policy: what reverse sweeps save.
    """

    chain: Chain
    order: Order
    links: tuple[Link, ...] = ()
    chunk: int | None = None
    policy: Any = None

    def run(self, args: Sequence[Value]) -> tuple[list[Value], Leaves]:
        """The outputs of the program, and its Jacobian by output leaf and input leaf."""
        return accumulate(self.chain, self.order, args, self.chunk, self.policy)


def choose(fun: Function, mode: str, holomorphic: bool, chunk: int | None, policy: Any,
           count: bool = False) -> Choice:  # fmt: skip
    """Choose how to evaluate the Jacobian of a traced function.

    `count`: count FLOPs even if they are not needed for the choice.

    Cost: two traces of the derivative of each segment. No trace if reverse mode is clearly best:
    the output is a scalar, or has at most a quarter of the elements of the input and half of those
    of each cut.
    """
    policy = in_bytes(check(policy)) if policy is not None else None
    prog = Inline().program(fun.program)
    full = chain(prog, fun.active(), fun.differentiable(), holomorphic)
    mode = _required_mode(fun, full, mode, holomorphic, policy)
    mode = _clear(full) if mode == "auto" else mode
    ways = _ways(full, mode, count)
    fewest = dataclasses.replace(ways[0], chunk=chunk, policy=policy)
    if not isinstance(policy, Budget) or policy.of != "peak":
        return fewest
    run = lambda choice: lambda *args: choice.run(args)
    bytes_of = lambda choice: compiled_bytes(run(choice), prog.in_types)
    return first_within(
        policy,
        _ladders(ways, chunk),
        bytes_of,
        "raise the budget, or compute products with the Jacobian (jvp, vjp) instead of all its "
        "elements",
    )


def _required_mode(fun: Function, full: Chain, mode: str, holomorphic: bool, policy: Any) -> str:
    """The mode; reverse mode instead of "auto" if no other mode has the semantics of `jacrev`.

    That is the case for complex inputs of a function that is not holomorphic, for integer inputs,
    and for a budget of the saved bytes.
    """
    avals = fun.signature.primal_avals
    complex_input = any(getattr(a.dtype, "kind", "") == "c" for a in avals)
    integer = len(full.segment(0, len(full) - 1).active) < len(avals)
    saved = isinstance(policy, Budget) and policy.of != "peak"
    one = mode == "auto" and ((complex_input and not holomorphic) or integer or saved)
    return "reverse" if one else mode


def _clear(full: Chain) -> str:
    """Return "reverse" if it is best by the numbers of elements alone; else "auto"."""
    ends = full.segment(0, len(full) - 1)
    rows, columns = ends.rows, ends.columns
    inside = [size(v) for _, v in full.cuts]
    if rows <= 1 or columns == 0:
        return "reverse"
    wide = all(n >= 2 * min(rows, columns) for n in inside)
    return "reverse" if wide and _CLEAR * rows <= columns else "auto"


def _ways(full: Chain, mode: str, count: bool) -> list[Choice]:
    """The ways to evaluate a chain, in order of increasing FLOPs."""
    single = Chain(full.program, full.active, full.wanted, ())
    pure = lambda way: Choice(single, Sweep(way, 0, 0, None, math.nan))
    if mode != "auto" and not count:
        return [pure(mode)]
    counted = tuple(links(full))
    both = [Choice(full, way(counted), counted) for way in (reverse, forward)]
    if mode != "auto":
        return [c for c in both if isinstance(c.order, Sweep) and c.order.mode == mode]
    first = Choice(full, best(counted), counted)
    if math.isinf(first.order.flops):  # a link has neither mode: reverse mode raises the error
        return [pure("reverse")]
    others = (c for c in both if c.order != first.order and c.order.flops < math.inf)
    return [first, *sorted(others, key=lambda c: c.order.flops)]


def _ladders(ways: Sequence[Choice], chunk: int | None) -> Iterator[list[Choice]]:
    """Each way with smaller and smaller chunks, then the same with a policy that saves nothing."""
    for policy in (None, save_nothing):
        for way in ways:
            most = max(_seeds(way.order, way.chain))
            halves = [None, *(most >> i for i in range(1, most.bit_length()))]
            chunks = halves if chunk is None else [chunk]
            yield [dataclasses.replace(way, chunk=c, policy=policy) for c in chunks]


def _seeds(order: Order | None, full: Chain) -> Iterator[int]:
    """The number of vectors of each sweep."""
    if order is None:
        return
    if isinstance(order, Sweep):
        ends = full.segment(order.low, order.high)
        yield ends.columns if order.mode == "forward" else ends.rows
        yield from _seeds(order.of, full)
    else:
        yield from _seeds(order.left, full)
        yield from _seeds(order.right, full)
