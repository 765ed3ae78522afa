"""Find the values to save for the least recomputed work in a budget, by integer programming.

A *Joint* is the forward and the backward pass of a program as one program. A *node* is a loop,
branch or call in it, with Joints of its own. Its equation is `fork_p` in the forward pass, `join_p`
in the backward pass. A *Schedule* says which forward values of a Joint are saved. The integer
program decides for a Joint and its nested Joints at once. Its 0-1 variables, called columns, are:

- for each forward value: whether the backward pass needs it, whether it is saved, and whether it
  is offloaded to the host's memory;
- for each forward equation: whether it is recomputed.

A needed value is saved, offloaded or recomputed, and a recomputed equation needs its inputs. One
row limits the saved bytes. Another row limits the transfers to the host: they take no longer than
the forward pass. The values of a loop's body count once per iteration. A Joint that several calls
share is decided once. Without the two limits this is a minimum cut, whose relaxation has integer
solutions. So HiGHS needs few branch-and-bound nodes.

Source: Jain et al., "Checkmate", MLSys 2020, first gave a mixed-integer program for
rematerialization. Their program also chooses the order of execution. Here the order is fixed, and
only the saved values are chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform._jax import Var
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.planner.costs.link import HOST, HostLink
from xform.planner.costs.recompute import fusible, price
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.costs.window import OffloadableValues, offloadable_values
from xform.planner.cuts.highs import NODE_LIMIT, Model
from xform.planner.plan.decision import Decision
from xform.registry.table import traits

# The most forward equations for this method. Larger programs are solved by `fit.py` and
# `blocks.py`.
MAX_EQUATIONS = 3_000
# The cost of offloading a byte, where a FLOP costs 1. It is above the cost of a few passes over
# memory, so a value that XLA fuses is recomputed instead. It is below the cost of any product.
_OFFLOAD_COST = 1 / 16

# How much more the last equation costs than the first. Of equal choices the one is made that saves
# late values: the backward pass reads them early, and then they are freed.
_LATER = 1e-6
# A column, and the work that it adds if it is 1: its cost and its FLOPs.
Term = tuple[int, float, float]


@dataclasses.dataclass
class _JointColumns:
    """One Joint: how often it runs, and its columns.

    Attributes:
      schedule: a Schedule of the Joint.
      times: how often it runs on each device. The bytes of its values are multiplied by it.
      runs: how often it runs on all devices together, outside branches. Its work is multiplied by
        it. The work in branches is counted by `_most_expensive`.
      outside: how often the loop around it starts. The bytes of loop-invariant values are
        multiplied by it.
      invariant: its loop-invariant values, which are the same in each iteration.
      saved, offloaded, needed: the columns that say whether a value is saved, offloaded, needed. An
        offloaded value may be the state of a loop, which is an input of the loop's body.
      work: the terms of one run.
      branches: its conds, each with the number of runs. One branch of each runs.
    """

    schedule: Schedule
    times: int = 0
    runs: int = 0
    outside: int = 0
    invariant: frozenset[Var] = frozenset()
    saved: dict[Var, int] = dataclasses.field(default_factory=dict)
    offloaded: dict[Var, int] = dataclasses.field(default_factory=dict)
    needed: dict[Var, int] = dataclasses.field(default_factory=dict)
    work: list[Term] = dataclasses.field(default_factory=list)
    branches: list[tuple[Node, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Solution:
    """A solution of the integer program.

    Attributes:
      decision: the saved and offloaded values.
      bytes: the saved bytes.
      price: the cost of the recomputed and offloaded values, in FLOPs.
    """

    decision: Decision
    bytes: int
    price: float


class IntegerProgram:
    """The integer program of a whole derivative. It can be solved for any budget.

    It does not decide inside remat regions (`jax.checkpoint`) and while loops: these save the
    values that they save in the Schedule `top`.

    Args:
      top: a Schedule of the derivative.
      link: the device's link to its host; with it, values may be offloaded.
    """

    def __init__(self, top: Schedule, link: HostLink | None = None):
        self.top, self.parts, self.model = top, _parts(top), Model()
        offloadable = offloadable_values(top, link)
        self.seconds = offloadable.seconds
        for part in self.parts.values():
            _add_values(self.model, part, offloadable, link)
        self.fixed_bytes = sum(_add_equations(self.model, self.parts, p)
                               for p in self.parts.values())  # fmt: skip
        for part in self.parts.values():
            for node, runs in part.branches:
                for column, cost, flops in _work_inside(self.model, self.parts, part, node, runs):
                    self.model.cost[column], self.model.flops[column] = cost, flops

    @property
    def has_branches(self) -> bool:
        """Whether there are branches.

        The integer program adds up the saved bytes of all branches of a `cond`, although they share
        memory.
        """
        return any(part.branches for part in self.parts.values())

    def solve(
        self, budget: float, exact: bool = False, node_limit: int = NODE_LIMIT
    ) -> Solution | None:
        """Return the solution of least recomputed work within a budget, or None if none is found.

        It is optimal up to a small gap, or the best within `node_limit` branch-and-bound nodes.
        With `exact` there is no such limit, and a solution that is not proven optimal raises
        `NotSolved`.
        """
        return self._solve(budget, self.model.cost, exact, node_limit)

    def solve_at_price(self, flop_price: float) -> Solution | None:
        """Return the solution that minimizes saved bytes + `flop_price` x recomputed work.

        `flop_price` is the price of a FLOP in bytes. With 0, it is the solution of the fewest
        bytes. None: no solution was found.
        """
        terms = zip(self.model.size, self.model.cost, strict=True)
        return self._solve(math.inf, [size + flop_price * cost for size, cost in terms])

    def bound(self, budget: float) -> float | None:
        """Return a lower bound on the recomputed FLOPs within a budget; None if nothing fits.

        It is the optimum of the relaxed program, which may save a value in part, for example in
        some iterations of a loop. Equations that XLA fuses count as 0 FLOPs.
        """
        return self.model.bound(budget - self.fixed_bytes, self.seconds)

    def _solve(self, budget: float, cost: Sequence[float], exact: bool = False,
               node_limit: int = NODE_LIMIT) -> Solution | None:  # fmt: skip
        """Return the solution of least `cost`, which has one number for each column."""
        x = self.model.solve(budget - self.fixed_bytes, cost, self.seconds, exact, node_limit)
        if x is None:
            return None
        on = np.where(self.model.integer, x > 0.5, x)
        chosen = lambda columns: frozenset(v for v, i in columns.items() if on[i] > 0)
        values = {j: (chosen(p.saved), chosen(p.offloaded)) for j, p in self.parts.items()}
        size, price = (float(np.asarray(a) @ on) for a in (self.model.size, self.model.cost))
        decision = _decision_tree(self.top, values, {})
        return Solution(decision, self.fixed_bytes + round(size), price)


def decide_by_integer_program(top: Schedule, budget: int | None, exact: bool = False,
                              link: HostLink | None = None) -> Decision | None:  # fmt: skip
    """Return the decision with the least recomputed work within a budget.

    Args:
      top: a Schedule of the derivative.
      budget: the most saved bytes; None to return the decision that saves the fewest bytes.
      exact: solve a program of any size, and raise `NotSolved` if the solution is not proven
        optimal.
      link: the device's link to its host; with it, values may be offloaded.

    Returns:
      The decision; None if none was found, or if the program has more than `MAX_EQUATIONS`
      equations and `exact` is False.
    """
    if equation_count(top) > MAX_EQUATIONS and not exact:
        return None
    program = IntegerProgram(top, link)
    solution = program.solve_at_price(0.0) if budget is None else program.solve(budget, exact)
    return solution and solution.decision


def equation_count(top: Schedule) -> int:
    """Return the number of forward equations to decide about, in nested Joints too."""
    return sum(len(joint.forward) for joint in _parts(top))


def _parts(top: Schedule) -> dict[Joint, _JointColumns]:
    """Return the Joints that the integer program decides for, still without columns."""
    parts: dict[Joint, _JointColumns] = {}
    _visit(top, None, 1, 1, 1, parts)
    return parts


def _decision_tree(schedule: Schedule, values: dict[Joint, tuple[frozenset[Var], frozenset[Var]]],
                   decisions: dict[Joint, Decision]) -> Decision:  # fmt: skip
    """Return the Decision for a Schedule's Joint, with the Decisions for its nested Joints.

    `values` has the saved and the offloaded values of each Joint. `decisions` is filled.
    """
    if schedule.joint not in decisions:
        inner = {
            node: tuple(_decision_tree(p, values, decisions) for p in schedules)
            for node, schedules in schedule.inner.items()
            if _is_included(node)
        }
        saved, offloaded = values[schedule.joint]
        kept = saved | offloaded.difference(schedule.joint.inputs)
        decisions[schedule.joint] = Decision(kept, inner, dict.fromkeys(offloaded - saved, HOST))
    return decisions[schedule.joint]


def _is_included(node: Node) -> bool:
    """Return whether the integer program decides for the Joints of a node."""
    return not node.region and not node.unknown_length


def _visit(schedule: Schedule, node: Node | None, times: int, runs: int, outside: int,
           parts: dict[Joint, _JointColumns]) -> None:  # fmt: skip
    """Count how often a Joint and its nested Joints run, and find their loop-invariant values.

    The Joint belongs to `node`; None: it is the whole derivative. `times`, `runs` and `outside` are
    those of this visit. `_JointColumns` explains them. Visits of one Joint add up.
    """
    part = parts.setdefault(schedule.joint, _JointColumns(schedule))
    part.times += times
    part.runs += runs
    part.outside += outside
    if node is not None:
        values = tuple(v for eqn in schedule.joint.forward for v in eqn.outvars)
        save_all = dataclasses.replace(schedule, saved=values)
        part.invariant = frozenset(gather(values, node.hoisted_values(save_all)))
    for inner, schedules in schedule.inner.items():
        inner_runs = runs * inner.iterations * inner.device_count
        if runs and len(schedules) > 1 and _is_included(inner):
            part.branches.append((inner, runs))
            inner_runs = 0
        for p in schedules if _is_included(inner) else ():
            _visit(p, inner, times * inner.iterations, inner_runs, times, parts)


def _add_values(
    model: Model, part: _JointColumns, offloadable: OffloadableValues, link: HostLink | None
) -> None:
    """Add the columns of a Joint's values."""
    joint = part.schedule.joint
    part.needed = {v: model.column() for v in joint.inputs}
    for v in joint.inputs:
        if link and v in offloadable.values:  # a loop's state: stored if it is needed
            # If it is needed, `_connect_inputs` counts its bytes. Offloading subtracts them.
            size, seconds = part.times * aval_bytes(v.aval), part.times * _seconds(v, link)
            part.offloaded[v] = model.column(_OFFLOAD_COST * size, -size, seconds=seconds)
            model.row((part.needed[v], 1.0), (part.offloaded[v], -1.0))
    for eqn in joint.forward:
        is_node = eqn.primitive is fork_p
        for v in eqn.outvars:
            can_be_saved = v not in joint.always_recomputed and not traits(eqn.primitive).label
            is_token = is_node and v is eqn.outvars[-1]
            times = part.outside if v in part.invariant else part.times
            size = 0 if is_token else times * aval_bytes(v.aval)
            part.saved[v] = model.column(size=size, upper=float(can_be_saved))
            part.needed[v] = model.column()
            if link and can_be_saved and not is_token and v in offloadable.values:
                seconds = times * _seconds(v, link)
                part.offloaded[v] = model.column(_OFFLOAD_COST * size, seconds=seconds)


def _seconds(v: Var, link: HostLink) -> float:
    """Return the time to copy a value to the host once."""
    return link.seconds(aval_bytes(v.aval))


def _add_equations(model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns) -> int:
    """Add the columns of a Joint's equations, and its rows.

    Return the bytes that remat regions and while loops save, which are not decided here.
    """
    joint, schedule, needed, fixed_bytes = part.schedule.joint, part.schedule, part.needed, 0
    for i, eqn in enumerate(joint.forward):
        cost = math.inf if eqn.primitive is fork_p else price(eqn, 1.0)
        never = cost == math.inf
        flops = 0 if never or fusible(eqn) else part.runs * equation_flops(eqn)
        run_cost = 0.0 if never else part.runs * cost * (1 + _LATER * i / len(joint.forward))
        recomputed = model.column(run_cost, 0.0, float(not never), 0.0, flops)
        if not never:
            work = 0.0 if fusible(eqn) else float(equation_flops(eqn))
            part.work.append((recomputed, cost, work))
        for v in eqn.outvars:
            offloaded = [(part.offloaded[v], 1.0)] if v in part.offloaded else []
            model.row((part.saved[v], 1.0), *offloaded, (recomputed, 1.0), (needed[v], -1.0))
        for v in eqn.invars:
            if isinstance(v, Var) and v in needed:
                model.row((needed[v], 1.0), (recomputed, -1.0))
    reads = [v for v in joint.backward_outputs if isinstance(v, Var)]
    for eqn in joint.backward:
        if eqn.primitive is not join_p:
            reads += reads_of(eqn, schedule.inner)
            continue
        node = eqn.params["node"]
        if _is_included(node):
            reads += [v for v in eqn.invars[:1] if isinstance(v, Var)]
            reads += _connect_inputs(model, parts, part, node, eqn.invars[1:])
        else:
            reads += reads_of(eqn, schedule.inner)
            fixed_bytes += part.times * device_bytes(expand_token(node, schedule.inner[node]))
    for v in reads:
        if v in needed:
            model.lower[needed[v]] = 1.0
    return fixed_bytes


def _work_inside(
    model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns, node: Node, runs: int
) -> list[Term]:
    """Return the work inside a node of a Joint that runs `runs` times.

    A cond counts its most expensive branch.
    """
    runs *= node.iterations * node.device_count
    branches: list[list[Term]] = []
    for p in part.schedule.inner[node]:
        inner = parts[p.joint]
        terms = [(column, runs * cost, runs * flops) for column, cost, flops in inner.work]
        for inner_node in filter(_is_included, p.inner):
            terms += _work_inside(model, parts, inner, inner_node, runs)
        branches.append(terms)
    return _most_expensive(model, branches) if len(branches) > 1 else branches[0]


def _most_expensive(model: Model, branches: list[list[Term]]) -> list[Term]:
    """Return the work of the most expensive branch, as at most two new columns.

    One new column counts cost, the other FLOPs. Rows make each of them at least the work of every
    branch.
    """
    terms_of_most: list[Term] = []
    for k in (1, 2):  # the cost, then the FLOPs of a term
        most = max(sum(term[k] for term in terms) for terms in branches)
        if most:
            column = model.column(integer=False)
            terms_of_most.append((column, most, 0.0) if k == 1 else (column, 0.0, most))
            for terms in branches:
                model.row((column, 1.0), *((term[0], -term[k] / most) for term in terms))
    return terms_of_most


def _connect_inputs(
    model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns, node: Node, atoms: Any
) -> list[Var]:
    """Connect the needed inputs of a node's programs with the values around the node.

    If the backward pass inside needs an input, the value around the node is needed too, or a loop
    stores the input in each iteration. `atoms` are the node's operands, then its cotangents.

    Return the values that the backward pass of the node reads in any case.
    """
    schedules = part.schedule.inner[node]
    nothing = [dataclasses.replace(p, reads=(False,) * len(p.joint.inputs)) for p in schedules]
    always = node.reads(nothing)
    for k, p in enumerate(schedules):
        columns = parts[p.joint].needed
        for i, u in enumerate(p.joint.inputs):
            one = dataclasses.replace(p, reads=tuple(i == j for j in range(len(p.joint.inputs))))
            only_u = [*nothing[:k], one, *nothing[k + 1 :]]  # Schedules that read `u` alone
            if any(node.stacked_inputs(only_u)):
                model.size[columns[u]] += part.times * node.iterations * aval_bytes(u.aval)
            for v, on, already in zip(atoms, node.reads(only_u), always, strict=False):
                if on and not already and isinstance(v, Var) and v in part.needed:
                    model.row((part.needed[v], 1.0), (columns[u], -1.0))
    return [v for v, on in zip(atoms, always, strict=False) if on and isinstance(v, Var)]
