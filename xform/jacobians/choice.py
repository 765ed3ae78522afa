"""Decide how to evaluate a Jacobian: by one mode or as a chain, and how many vectors at once.

Words:

- a *cut* is a value that every path from the differentiated inputs to the outputs goes through. The
  cuts divide a program into *segments*. Their Jacobians form a *chain* of factors;
- a *link* is the Jacobian of one segment. A `ChainLink` object has its shape and the FLOPs to push
  or pull a vector through it. The Jacobian of the program is the product of all links;
- a *sweep* pushes tangents (forward mode) or pulls cotangents (reverse mode) through some
  neighbouring links. These tangents or cotangents are its vectors: one for each column or row of
  the matrix that it computes;
- an *order* is a tree of sweeps and matrix products that multiplies the links.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xform import memory
from xform.errors import BudgetInfeasible
from xform.interpret.cost import size
from xform.jacobians.accumulate import Blocks, accumulate
from xform.jacobians.chain import (
    ChainLink,
    Order,
    Sweep,
    cheapest_order,
    forward_order,
    reverse_order,
)
from xform.jacobians.segments import CutProgram, crosses_devices, cut_into_segments
from xform.jacobians.work import links
from xform.passes.inline import Inline
from xform.planner.device import current_device, resolve_fit
from xform.planner.infeasible import nothing_fits
from xform.planner.measure import Measure
from xform.planner.search_front import search_compiled
from xform.planner.simulate.liveness import simulate
from xform.policies import save_nothing
from xform.policies.budgets import Budget
from xform.program.arithmetic import Value
from xform.program.ir import Program, trace
from xform.terminal import progress_line
from xform.transforms.function import Function

# Reverse mode is chosen without counting FLOPs if forward mode takes this many times more vectors.
# Pulling one cotangent takes at most about three times the work of pushing one tangent, so reverse
# mode is then cheaper.
_CLEARLY_MORE = 4

Fits = Callable[["_RankedWay"], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """How to evaluate a Jacobian.

    Attributes:
      cut_program: the program, cut into segments.
      order: the sweeps and matrix products that multiply the links.
      links: the costs of the links; empty if they were not counted.
      chunk: how many vectors a sweep computes at once, for example 8; None means all of them.
      policy: which values reverse sweeps save, a policy of `xform.policies`. None is the default
        of `vjp`.
    """

    cut_program: CutProgram
    order: Order
    links: tuple[ChainLink, ...] = ()
    chunk: int | None = None
    policy: Any = None

    def run(self, *args: Value) -> tuple[list[Value], Blocks]:
        """Return the outputs of the program at `args`, and its Jacobian.

        The Jacobian has a list for each output leaf. This list has, for each input leaf, an array
        of the shape of the output leaf followed by the shape of the input leaf.
        """
        return accumulate(self.cut_program, self.order, args, self.chunk, self.policy)


def choose(fun: Function, mode: str, holomorphic: bool, chunk: int | None, policy: Any,
           count_flops: bool = False) -> Evaluation:  # fmt: skip
    """Choose how to evaluate the Jacobian of a traced function.

    Args:
      fun: the function.
      mode: "forward", "reverse", or "auto" for the order with the fewest FLOPs.
      holomorphic: whether the function is complex-differentiable.
      chunk: how many vectors a sweep computes at once; None means all, or fewer if a budget of the
        peak requires it.
      policy: which values reverse sweeps save, or a budget: of the peak memory of the compiled
        Jacobian, or of the bytes that reverse mode saves.
      count_flops: whether to count the FLOPs of the links even if the choice does not depend on
        them, to explain the choice.

    Raises:
      BudgetInfeasible: `policy` is a budget of the peak, and the compiled peak memory of every way
        that was tried exceeds it.

    Cost: two traces of the derivative of each segment, and under a budget of the peak, a few
    compilations. With `count_flops=False`, the traces are not needed if `mode` is not "auto", or if
    reverse mode is clearly best. Reverse mode is clearly best if the output has at most one
    element, or at most a quarter of the elements of the input and at most half of the elements of
    each cut.
    """
    policy = resolve_fit(policy)
    prog = Inline().program(fun.program)
    full = cut_into_segments(prog, fun.active(), fun.differentiable(), holomorphic)
    mode = _required_mode(fun, full, mode, holomorphic, policy)
    mode = _reverse_if_clearly_best(full) if mode == "auto" else mode
    ways = _ways(full, mode, count_flops)
    if not isinstance(policy, Budget) or policy.of != "peak":
        return dataclasses.replace(ways[0], chunk=chunk, policy=policy)
    front = _FrontOfWays(_ranked_ways(ways, chunk, prog))
    bytes_of = lambda each: memory.compiled_bytes(each.way.run, prog.in_types)
    with progress_line.show("choosing how to evaluate a Jacobian"):
        chosen = search_compiled(front.ladders[0][0], policy, Measure(bytes_of), front)
    return chosen.way


@dataclasses.dataclass(frozen=True, eq=False)
class _RankedWay:
    """A way to evaluate the Jacobian of a program, as `planner/search_front.py` chooses among them.

    Attributes:
      way: the way.
      prog: the program.
      work: its place in the order of work: the number of its list, and its place in the list.
    """

    way: Evaluation
    prog: Program
    work: tuple[int, int]

    @property
    def key(self) -> tuple[int, int]:
        """What identifies the way."""
        return self.work

    @functools.cached_property
    def peak(self) -> int:
        """The simulated peak."""
        traced = trace(self.way.run, *self.prog.in_types)
        return simulate(traced, current_device().backend).total_bytes

    lower_bound = 0
    offloads = may_save_in_regions = False
    has_asked_regions = True


class _FrontOfWays:
    """Ways to evaluate a Jacobian, in the order of their work; a front for `search_compiled`.

    Args:
      ladders: lists of ways. In each list, a way takes fewer bytes than the one before.
    """

    def __init__(self, ladders: Iterable[Sequence[_RankedWay]]):
        self.ladders = list(ladders)

    def least_recompute(self, fits: Fits) -> _RankedWay | None:
        """Return the first way that fits, of the first list whose last way fits."""
        for ladder in self.ladders:
            if fits(ladder[-1]):
                return ladder[bisect.bisect_left(ladder[:-1], True, key=fits)]
        return None

    def cheaper(self, last: _RankedWay, fits: Fits) -> list[_RankedWay]:
        """Return the way before `last` in its list, if it fits."""
        i, j = last.work
        return [way for way in self.ladders[i][max(0, j - 1) : j] if fits(way)]

    def smallest(self) -> list[_RankedWay]:
        """Return the last way of each list."""
        return [ladder[-1] for ladder in self.ladders]

    def references(self) -> list[_RankedWay]:
        """Return no further ways."""
        return []

    def without_offload(self) -> _FrontOfWays:
        """Return the same ways: they offload nothing."""
        return self

    def refusal(self, budget: Budget, lowest: _RankedWay, size: int, by: str) -> BudgetInfeasible:
        """Return the error for a budget; see `ChoiceFront.refusal`."""
        remedy = (
            "raise the budget, or compute products with the Jacobian (jvp, vjp) instead of all its "
            "elements"
        )
        return nothing_fits(budget, size, by, remedy)


def _required_mode(
    fun: Function, full: CutProgram, mode: str, holomorphic: bool, policy: Any
) -> str:
    """Return "reverse" if `mode` is "auto" and only reverse mode is possible; else `mode`.

    Complex inputs of a function that is not holomorphic, and integer inputs, have a Jacobian only
    by the conventions of `jax.jacrev`. A budget of the saved bytes bounds what reverse mode saves,
    so it has no meaning for other modes. A derivative that goes to other devices of a `shard_map`
    differs between the modes, and `jax.jacobian` computes it by reverse mode.
    """
    avals = fun.signature.primal_avals
    complex_input = any(getattr(a.dtype, "kind", "") == "c" for a in avals)
    integer = len(full.segment(0, len(full) - 1).active) < len(avals)
    saved = isinstance(policy, Budget) and policy.of != "peak"
    crosses = crosses_devices(full.program, full.active, full.wanted) is not None
    only_reverse = (complex_input and not holomorphic) or integer or saved or crosses
    return "reverse" if mode == "auto" and only_reverse else mode


def _reverse_if_clearly_best(full: CutProgram) -> str:
    """Return "reverse" if the numbers of elements alone show that it is best; else "auto"."""
    whole = full.segment(0, len(full) - 1)
    rows, columns = whole.rows, whole.columns
    if rows <= 1 or columns == 0:
        return "reverse"
    cuts_are_wide = all(size(v) >= 2 * min(rows, columns) for _, v in full.cuts)
    return "reverse" if cuts_are_wide and _CLEARLY_MORE * rows <= columns else "auto"


def _ways(full: CutProgram, mode: str, count_flops: bool) -> list[Evaluation]:
    """Return the ways to evaluate the Jacobian: one for a given mode, up to three for "auto".

    For "auto", the first way has the fewest FLOPs. Then follow reverse mode alone and forward mode
    alone, in order of increasing FLOPs. Each of them is left out if it equals the first way, or if
    the function does not have that mode. Without `count_flops`, a given mode is one sweep through
    the uncut program, and FLOPs are not counted.
    """
    uncut = CutProgram(full.program, full.active, full.wanted, ())
    one_sweep = lambda mode: Evaluation(uncut, Sweep(mode, 0, 0, None, math.nan))
    if mode != "auto" and not count_flops:
        return [one_sweep(mode)]
    chain = tuple(links(full))
    both = [Evaluation(full, order_of(chain), chain) for order_of in (reverse_order, forward_order)]
    if mode != "auto":
        return [c for c in both if isinstance(c.order, Sweep) and c.order.mode == mode]
    cheapest = Evaluation(full, cheapest_order(chain), chain)
    if math.isinf(cheapest.order.flops):  # a link has neither mode: reverse mode raises the error
        return [one_sweep("reverse")]
    others = (c for c in both if c.order != cheapest.order and c.order.flops < math.inf)
    return [cheapest, *sorted(others, key=lambda c: c.order.flops)]


def _ranked_ways(
    ways: Sequence[Evaluation], chunk: int | None, prog: Program
) -> Iterator[list[_RankedWay]]:
    """Yield one list of candidates for each way.

    A list has one way with smaller and smaller chunks, which take fewer bytes: all vectors at once,
    then half of them, down to one. A given `chunk` is not changed. All ways follow a second time
    with a policy that saves nothing, which takes fewer bytes and more work.
    """
    for i, (policy, way) in enumerate(itertools.product((None, save_nothing), ways)):
        most = max(_vector_counts(way.order, way.cut_program))
        all_then_halves = [None, *(most >> k for k in range(1, most.bit_length()))]
        chunks = all_then_halves if chunk is None else [chunk]
        evaluations = [dataclasses.replace(way, chunk=c, policy=policy) for c in chunks]
        yield [_RankedWay(each, prog, (i, j)) for j, each in enumerate(evaluations)]


def _vector_counts(order: Order | None, full: CutProgram) -> Iterator[int]:
    """Yield the number of vectors of each sweep in an order."""
    if order is None:
        return
    if isinstance(order, Sweep):
        covered = full.segment(order.low, order.high)
        yield covered.columns if order.mode == "forward" else covered.rows
        yield from _vector_counts(order.operand, full)
    else:
        yield from _vector_counts(order.left, full)
        yield from _vector_counts(order.right, full)
