"""The plan with the least recomputed work for a budget, as an integer program.

The program covers a Joint (a forward and a backward part) and all its nested Joints. Its 0-1
variables, called columns, are:

- for each value: whether the backward part needs it, whether it is saved, whether it is offloaded;
- for each forward equation: whether it is recomputed.

A needed value is saved, offloaded or recomputed, and a recomputed equation needs its inputs. One
row limits the saved bytes. Another limits the time of transfers to the host to the time of the
forward part. The values of a loop's body count once per iteration. A Joint that several calls share
is decided once. Without the two limits this is a minimum cut, whose relaxation has integer
solutions. So HiGHS needs few branch-and-bound nodes.

Source: Jain et al., "Checkmate", MLSys 2020, first gave a mixed-integer program for
rematerialization. Theirs also chooses the order of execution. Here the order is fixed, and only the
saved values are chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform._jax import Var, name_p, while_p
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.planner.costs.link import HOST, HostLink
from xform.planner.costs.recompute import fusible, price
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.costs.window import OffloadableValues, offloadable_values
from xform.planner.cuts.highs import BRANCHES, Model
from xform.planner.plan.decision import Decision

# The most forward equations for this method. Larger programs are solved by `fit.py` and
# `blocks.py`.
MOST = 3_000
# The cost of offloading a byte, where a FLOP costs 1. It is above the cost of a few passes over
# memory, so a value that fuses is recomputed instead. It is below the cost of any product.
_OFFLOAD_COST = 1 / 16


# Recomputed work: its column, its cost, and its FLOPs.
Term = tuple[int, float, float]


@dataclasses.dataclass
class _JointColumns:
    """One Joint: how often it runs, and its columns.

    Attributes:
      schedule: a Schedule of the Joint.
      times: how often it runs on each device. Bytes are counted by this number.
      runs: how often it runs on all devices together, outside branches. Work is counted by this
        number. Work in branches is counted by `_most_expensive`.
      outside: how often the loop around it starts.
      invariant: its loop-invariant values, which are the same in each iteration.
      saved, sent, needed: the columns of its values. A sent (offloaded) value may be the state of a
        loop, which is an input of the loop's body.
      work: the terms of one run.
      branches: its conds, each with the number of runs. One branch of each runs.
    """

    schedule: Schedule
    times: int = 0
    runs: int = 0
    outside: int = 0
    invariant: frozenset[Var] = frozenset()
    saved: dict[Var, int] = dataclasses.field(default_factory=dict)
    sent: dict[Var, int] = dataclasses.field(default_factory=dict)
    needed: dict[Var, int] = dataclasses.field(default_factory=dict)
    work: list[Term] = dataclasses.field(default_factory=list)
    branches: list[tuple[Node, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Solution:
    """A solution: its decision, its saved bytes, and the cost of the recomputed work."""

    decision: Decision
    bytes: int
    price: float


class IntegerProgram:
    """The integer program for a Schedule's Joint and its nested Joints, to solve for any budget.

    Remat regions and while loops are not part of it: `top` fixes what they save. With a link,
    values may be offloaded to the host.
    """

    def __init__(self, top: Schedule, link: HostLink | None = None):
        self.top, self.parts, self.model = top, _parts(top), Model()
        may = offloadable_values(top, link)
        self.seconds = may.seconds
        for part in self.parts.values():
            _values(self.model, part, may, link)
        self.fixed = sum(_equations(self.model, self.parts, p) for p in self.parts.values())
        for part in self.parts.values():
            for node, runs in part.branches:
                for column, cost, flops in _inner_work(self.model, self.parts, part, node, runs):
                    self.model.cost[column], self.model.flops[column] = cost, flops

    @property
    def has_branches(self) -> bool:
        """Whether there are branches. Their saved bytes are added up here, but share memory."""
        return any(part.branches for part in self.parts.values())

    def solve(
        self, budget: float, exact: bool = False, branches: int = BRANCHES
    ) -> Solution | None:
        """Return the solution of least recomputed work within a budget, or None if none is found.

        It is optimal up to a small gap, or the best within `branches` branch-and-bound nodes. With
        `exact` there is no such limit, and a solution that is not proven optimal raises
        `NotSolved`.
        """
        return self._solve(budget, self.model.cost, exact, branches)

    def solve_at_price(self, flop: float) -> Solution | None:
        """Return the solution that minimizes saved bytes + `flop` x recomputed work.

        `flop` is the price of a FLOP in bytes. With 0, it is the solution of the fewest bytes.
        """
        terms = zip(self.model.size, self.model.cost, strict=True)
        return self._solve(math.inf, [size + flop * cost for size, cost in terms])

    def bound(self, budget: float) -> float | None:
        """Return a lower bound on the recomputed FLOPs within a budget; None if nothing fits.

        It is the optimum of the relaxed program, which may save a value in part, for example in
        some iterations of a loop. Work that XLA fuses has no FLOPs here.
        """
        return self.model.bound(budget - self.fixed, self.seconds)

    def _solve(self, budget: float, cost: Sequence[float], exact: bool = False,
               branches: int = BRANCHES) -> Solution | None:  # fmt: skip
        x = self.model.solve(budget - self.fixed, cost, self.seconds, exact, branches)
        if x is None:
            return None
        on = np.where(self.model.integer, x > 0.5, x)
        chosen = lambda columns: frozenset(v for v, i in columns.items() if on[i] > 0)
        decided = {j: (chosen(part.saved), chosen(part.sent)) for j, part in self.parts.items()}
        size, price = (float(np.asarray(a) @ on) for a in (self.model.size, self.model.cost))
        return Solution(_tree(self.top, decided, {}), self.fixed + round(size), price)


def choose(top: Schedule, budget: int | None, exact: bool = False, link: HostLink | None = None
           ) -> Decision | None:  # fmt: skip
    """Return the decision with the least recomputed work within a budget.

    Args:
      top: a Schedule of the program.
      budget: the most saved bytes; None: return the decision that saves the fewest bytes.
      exact: solve a program of any size, and raise `NotSolved` if the solution is not proven
        optimal.
      link: the device's link to its host; with it, values may be offloaded.

    Returns:
      The decision; None if none was found, or if the program has more than `MOST` equations.
    """
    if size(top) > MOST and not exact:
        return None
    problem = IntegerProgram(top, link)
    point = problem.solve_at_price(0.0) if budget is None else problem.solve(budget, exact)
    return point and point.decision


def size(top: Schedule) -> int:
    """Return the number of forward equations to decide about, in nested Joints too."""
    return _count(_parts(top))


def _parts(top: Schedule) -> dict[Joint, _JointColumns]:
    parts: dict[Joint, _JointColumns] = {}
    _visit(top, None, 1, 1, 1, parts)
    return parts


def _count(parts: dict[Joint, _JointColumns]) -> int:
    return sum(len(joint.forward) for joint in parts)


def _tree(schedule: Schedule, decided: dict[Joint, tuple[frozenset[Var], frozenset[Var]]],
          decisions: dict[Joint, Decision]) -> Decision:  # fmt: skip
    """The Decision for a Schedule's Joint, from the saved and offloaded values of each Joint."""
    if schedule.joint not in decisions:
        inner = {
            node: tuple(_tree(p, decided, decisions) for p in schedules)
            for node, schedules in schedule.inner.items()
            if _is_included(node)
        }
        saved, sent = decided[schedule.joint]
        values = saved | sent.difference(schedule.joint.inputs)
        decisions[schedule.joint] = Decision(values, inner, dict.fromkeys(sent - saved, HOST))
    return decisions[schedule.joint]


def _is_included(node: Node) -> bool:
    """Whether the integer program decides for the Joints of a node."""
    return not node.region and node.eqn.primitive is not while_p


def _visit(schedule: Schedule, node: Node | None, times: int, runs: int, outside: int,
           parts: dict[Joint, _JointColumns]) -> None:  # fmt: skip
    """Count how often each Joint runs, and find its loop-invariant values."""
    part = parts.setdefault(schedule.joint, _JointColumns(schedule))
    part.times += times
    part.runs += runs
    part.outside += outside
    if node is not None:
        values = tuple(v for eqn in schedule.joint.forward for v in eqn.outvars)
        every = dataclasses.replace(schedule, saved=values)
        part.invariant = frozenset(gather(values, node.hoisted_values(every)))
    for inner, schedules in schedule.inner.items():
        within = runs * inner.iterations * inner.device_count
        if runs and len(schedules) > 1 and _is_included(inner):
            part.branches.append((inner, runs))
            within = 0
        for p in schedules if _is_included(inner) else ():
            _visit(p, inner, times * inner.iterations, within, times, parts)


def _values(
    model: Model, part: _JointColumns, may: OffloadableValues, link: HostLink | None
) -> None:
    """Add the columns of a Joint's values."""
    joint = part.schedule.joint
    part.needed = {v: model.column() for v in joint.inputs}
    for v in joint.inputs:
        if link and v in may.values:  # a state of a loop, which the loop stores if it is needed
            size, seconds = part.times * aval_bytes(v.aval), link.seconds(aval_bytes(v.aval))
            part.sent[v] = model.column(_OFFLOAD_COST * size, -size, seconds=part.times * seconds)
            model.row((part.needed[v], 1.0), (part.sent[v], -1.0))
    for eqn in joint.forward:
        decided = eqn.primitive is not fork_p
        for v in eqn.outvars:
            kept = v not in joint.always_recomputed and eqn.primitive is not name_p
            token = not decided and v is eqn.outvars[-1]
            times = part.outside if v in part.invariant else part.times
            size = 0 if token else times * aval_bytes(v.aval)
            part.saved[v] = model.column(size=size, upper=float(kept))
            part.needed[v] = model.column()
            if link and kept and not token and v in may.values:
                seconds = times * link.seconds(aval_bytes(v.aval))
                part.sent[v] = model.column(_OFFLOAD_COST * size, seconds=seconds)


def _equations(model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns) -> int:
    """Add the rows of a Joint. Return the bytes that are kept whatever is decided."""
    joint, schedule, needed, fixed = part.schedule.joint, part.schedule, part.needed, 0
    for eqn in joint.forward:
        cost = math.inf if eqn.primitive is fork_p else price(eqn, 1.0)
        never = cost == math.inf
        flops = 0 if never or fusible(eqn) else part.runs * equation_flops(eqn)
        run_cost = 0.0 if never else part.runs * cost
        recomputed = model.column(run_cost, 0.0, float(not never), 0.0, flops)
        if not never:
            work = 0.0 if fusible(eqn) else float(equation_flops(eqn))
            part.work.append((recomputed, cost, work))
        for v in eqn.outvars:
            sent = [(part.sent[v], 1.0)] if v in part.sent else []
            model.row((part.saved[v], 1.0), *sent, (recomputed, 1.0), (needed[v], -1.0))
        for v in eqn.invars:
            if isinstance(v, Var) and v in needed:
                model.row((needed[v], 1.0), (recomputed, -1.0))
    wanted = [v for v in joint.backward_outputs if isinstance(v, Var)]
    for eqn in joint.backward:
        if eqn.primitive is not join_p:
            wanted += reads_of(eqn, schedule.inner)
            continue
        node = eqn.params["node"]
        if _is_included(node):
            wanted += [v for v in eqn.invars[:1] if isinstance(v, Var)]
            wanted += _nested(model, parts, part, node, eqn.invars[1:])
        else:
            wanted += reads_of(eqn, schedule.inner)
            fixed += part.times * device_bytes(expand_token(node, schedule.inner[node]))
    for v in wanted:
        if v in needed:
            model.lower[needed[v]] = 1.0
    return fixed


def _inner_work(
    model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns, node: Node, runs: int
) -> list[Term]:
    """The work of a node inside a Joint that runs `runs` times.

    A cond counts its most expensive branch.
    """
    runs *= node.iterations * node.device_count
    programs: list[list[Term]] = []
    for p in part.schedule.inner[node]:
        inner = parts[p.joint]
        terms = [(column, runs * cost, runs * flops) for column, cost, flops in inner.work]
        for n in filter(_is_included, p.inner):
            terms += _inner_work(model, parts, inner, n, runs)
        programs.append(terms)
    return _most_expensive(model, programs) if len(programs) > 1 else programs[0]


def _most_expensive(model: Model, programs: list[list[Term]]) -> list[Term]:
    """The work of the most expensive of some programs, as new columns.

    Each new column is at least the work of every program: one counts cost, one counts FLOPs.
    """
    most_terms: list[Term] = []
    for which in (1, 2):
        most = max(sum(term[which] for term in terms) for terms in programs)
        if most:
            column = model.column(integer=False)
            most_terms.append((column, most, 0.0) if which == 1 else (column, 0.0, most))
            for terms in programs:
                model.row((column, 1.0), *((term[0], -term[which] / most) for term in terms))
    return most_terms


def _nested(
    model: Model, parts: dict[Joint, _JointColumns], part: _JointColumns, node: Node, atoms: Any
) -> list[Var]:
    """Connect the needed inputs of a nested program with the values outside.

    An input that the nested backward part needs is needed outside too, or a loop stores it in each
    iteration. Returns the values that the node reads from outside in any case.
    """
    schedules = part.schedule.inner[node]
    nothing = [dataclasses.replace(p, reads=(False,) * len(p.joint.inputs)) for p in schedules]
    always = node.reads(nothing)
    for k, p in enumerate(schedules):
        columns = parts[p.joint].needed
        for i, u in enumerate(p.joint.inputs):
            one = dataclasses.replace(p, reads=tuple(i == j for j in range(len(p.joint.inputs))))
            reading = [*nothing[:k], one, *nothing[k + 1 :]]
            if any(node.stacked_inputs(reading)):
                model.size[columns[u]] += part.times * node.iterations * aval_bytes(u.aval)
            for v, on, already in zip(atoms, node.reads(reading), always, strict=False):
                if on and not already and isinstance(v, Var) and v in part.needed:
                    model.row((part.needed[v], 1.0), (columns[u], -1.0))
    return [v for v, on in zip(atoms, always, strict=False) if on and isinstance(v, Var)]
