"""How a Jacobian is evaluated: in one mode, or as a chain; all at once, or in chunks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from xform.arithmetic import Value
from xform.budgets import Budget
from xform.cost import size
from xform.jacobians.accumulate import Leaves, accumulate
from xform.jacobians.chain import Link, Order, Sweep, best, forward, reverse
from xform.jacobians.segments import Chain, chain
from xform.jacobians.work import links
from xform.passes.inline import Inline
from xform.planner.device import in_bytes
from xform.policies import check, save_nothing
from xform.transforms.function import Function
from xform.transforms.within import compiled_bytes, first_within

# A mode is taken without a count of FLOPs where it takes so many times fewer sweeps: those of the
# other mode are at most about three times as dear.
_CLEAR = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """How a Jacobian is evaluated.

    Attributes:
      chain: the program, cut.
      order: of the links.
      links: what each costs; none where nobody had to ask.
      chunk: how many tangents (cotangents) go through a sweep at once; None: all.
      policy: what reverse sweeps save.
    """

    chain: Chain
    order: Order
    links: tuple[Link, ...] = ()
    chunk: int | None = None
    policy: Any = None

    def run(self, args: Sequence[Value]) -> tuple[list[Value], Leaves]:
        """The program's outputs, and the Jacobian of each output leaf and input leaf."""
        return accumulate(self.chain, self.order, args, self.chunk, self.policy)


def choose(fun: Function, mode: str, holomorphic: bool, chunk: int | None, policy: Any,
           count: bool = False) -> Choice:  # fmt: skip
    """The choice for a traced function. `count`: also where it is clear without.

    Cost: two traces of the derivative of each segment; none where one mode is clearly best: one end
    is a scalar, or is at most half as wide as all that is between.
    """
    policy = in_bytes(check(policy)) if policy is not None else None
    prog = Inline().program(fun.program)
    whole = chain(prog, fun.active(), fun.differentiable(), holomorphic)
    mode = _only(fun, whole, mode, holomorphic, policy)
    mode = _clear(whole) if mode == "auto" else mode
    ways = _ways(whole, mode, count)
    fewest = dataclasses.replace(ways[0], chunk=chunk, policy=policy)
    if not isinstance(policy, Budget) or policy.of != "peak":
        return fewest
    run = lambda choice: lambda *args: choice.run(args)
    bytes_of = lambda choice: compiled_bytes(run(choice), prog.in_types)
    return first_within(
        policy,
        _ladders(ways, chunk),
        bytes_of,
        "raise the budget, or ask for products with the Jacobian (jvp, vjp) rather than for all of "
        "its elements",
    )


def _only(fun: Function, whole: Chain, mode: str, holomorphic: bool, policy: Any) -> str:
    """The mode, which is reverse mode where nothing else gives what `jacrev` does."""
    avals = fun.signature.primal_avals
    complex_input = any(getattr(a.dtype, "kind", "") == "c" for a in avals)
    integer = len(whole.segment(0, len(whole) - 1).active) < len(avals)
    saved = isinstance(policy, Budget) and policy.of != "peak"
    one = mode == "auto" and ((complex_input and not holomorphic) or integer or saved)
    return "reverse" if one else mode


def _clear(whole: Chain) -> str:
    """The mode that is best whatever its sweeps cost, if there is one; else "auto"."""
    ends = whole.segment(0, len(whole) - 1)
    rows, columns = ends.rows, ends.columns
    inside = [size(v) for _, v in whole.cuts]
    if rows <= 1 or columns == 0:
        return "reverse"
    wide = all(n >= 2 * min(rows, columns) for n in inside)
    return "reverse" if wide and _CLEAR * rows <= columns else "auto"


def _ways(whole: Chain, mode: str, count: bool) -> list[Choice]:
    """The ways to evaluate a chain, that of fewest FLOPs first."""
    single = Chain(whole.program, whole.active, whole.wanted, ())
    pure = lambda way: Choice(single, Sweep(way, 0, 0, None, math.nan))
    if mode != "auto" and not count:
        return [pure(mode)]
    counted = tuple(links(whole))
    both = [Choice(whole, way(counted), counted) for way in (reverse, forward)]
    if mode != "auto":
        return [c for c in both if isinstance(c.order, Sweep) and c.order.mode == mode]
    first = Choice(whole, best(counted), counted)
    if math.isinf(first.order.flops):  # reverse mode says why
        return [pure("reverse")]
    others = (c for c in both if c.order != first.order and c.order.flops < math.inf)
    return [first, *sorted(others, key=lambda c: c.order.flops)]


def _ladders(ways: Sequence[Choice], chunk: int | None) -> Iterator[list[Choice]]:
    """Each way with fewer and fewer vectors at once; then again with nothing saved."""
    for policy in (None, save_nothing):
        for way in ways:
            most = max(_seeds(way.order, way.chain))
            halves = [None, *(most >> i for i in range(1, most.bit_length()))]
            chunks = halves if chunk is None else [chunk]
            yield [dataclasses.replace(way, chunk=c, policy=policy) for c in chunks]


def _seeds(order: Order | None, whole: Chain) -> Iterator[int]:
    """How many vectors go through each sweep."""
    if order is None:
        return
    if isinstance(order, Sweep):
        ends = whole.segment(order.low, order.high)
        yield ends.columns if order.mode == "forward" else ends.rows
        yield from _seeds(order.of, whole)
    else:
        yield from _seeds(order.left, whole)
        yield from _seeds(order.right, whole)
