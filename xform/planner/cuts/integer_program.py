"""The least work for a number of bytes, as an integer program over a Joint and all that it holds.

For each value: is it needed by the backward part, is it saved, is it sent to the host; for each
equation: is it run again. What is needed is saved, sent or made again, and what is run again needs
its inputs. All that is sent shares the link to the host for the time of the forward part. Values
of a loop's body weigh as often as the loop runs, and a Joint that several calls share is decided
once. But for the rows of the budget and the link this is a minimum cut, whose relaxation is
integral: HiGHS needs few branches.

Source: a mixed-integer form of rematerialization was first given by Jain et al., "Checkmate", MLSys
2020, with a schedule; here the schedule is given, and only what is saved is chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform._jax import Var, name_p, while_p
from xform.cost import aval_bytes, equation_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.planner.costs.held import held_bytes
from xform.planner.costs.held import token as held_by
from xform.planner.costs.link import HOST, Link
from xform.planner.costs.recompute import fusible, price
from xform.planner.costs.window import Room, room
from xform.planner.cuts.highs import BRANCHES, Model
from xform.planner.plan.decision import Decision

# More equations than this are left to blocks and to prices.
MOST = 3_000
# The price of sending a byte to the host and back, beside that of a FLOP: above that of a few
# passes over memory, so that what fuses is rather run again, and below that of any product.
_SENT = 1 / 16


# Of work that is run again: its column, its price, and its FLOPs.
Term = tuple[int, float, float]


@dataclasses.dataclass
class _Part:
    """One Joint: how often it runs, what is the same in each trip, and its columns.

    It runs so many `times` on each device, `runs` over all: bytes are counted by the one, work by
    the other. `outside` is how often the loop around it starts. `saved`, `sent` and `needed` are
    columns of values; those that are sent may be states of a loop, which are inputs of its body.
    `work` are the terms of one run. What runs in branches is counted there (`_dearest`), not in
    `runs`: `branches` are the nodes of which one runs, with how often.
    """

    schedule: Schedule
    times: int = 0
    runs: int = 0
    outside: int = 0
    once: frozenset[Var] = frozenset()
    saved: dict[Var, int] = dataclasses.field(default_factory=dict)
    sent: dict[Var, int] = dataclasses.field(default_factory=dict)
    needed: dict[Var, int] = dataclasses.field(default_factory=dict)
    work: list[Term] = dataclasses.field(default_factory=list)
    branches: list[tuple[Node, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Point:
    """What a solution saves, its bytes, and the price of what is then run again."""

    decision: Decision
    bytes: int
    price: float


class IntegerProgram:
    """What each Joint within a Schedule saves, to be solved for budgets.

    The plan says what is inside nodes that decide for themselves: remat regions and while loops.
    With a link, values may be sent to the host.
    """

    def __init__(self, top: Schedule, link: Link | None = None):
        self.top, self.parts, self.model = top, _parts(top), Model()
        may = room(top, link)
        self.seconds = may.seconds
        for part in self.parts.values():
            _values(self.model, part, may, link)
        self.fixed = sum(_equations(self.model, self.parts, p) for p in self.parts.values())
        for part in self.parts.values():
            for node, runs in part.branches:
                for column, cost, flops in _inner_work(self.model, self.parts, part, node, runs):
                    self.model.cost[column], self.model.flops[column] = cost, flops

    @property
    def branched(self) -> bool:
        """Whether there are branches: what those save is added up here, but shares memory."""
        return any(part.branches for part in self.parts.values())

    def at(self, budget: float, sure: bool = False, branches: int = BRANCHES) -> Point | None:
        """The least work within a budget, near enough or the best of so many branches, or None.

        `sure`: it is the least, or `NotSolved`.
        """
        return self._solved(budget, self.model.cost, sure, branches)

    def at_price(self, flop: float) -> Point | None:
        """The fewest bytes, where a FLOP run again has a price in bytes: 0 for the least of all."""
        terms = zip(self.model.size, self.model.cost, strict=True)
        return self._solved(math.inf, [size + flop * cost for size, cost in terms])

    def bound(self, budget: float) -> float | None:
        """FLOPs of real work that any solution runs again; None if nothing is within the budget.

        The optimum of the relaxed program, in which a value may be saved in part: in some trips of
        a loop, say.
        """
        return self.model.bound(budget - self.fixed, self.seconds)

    def _solved(self, budget: float, cost: Sequence[float], sure: bool = False,
                branches: int = BRANCHES) -> Point | None:  # fmt: skip
        x = self.model.solve(budget - self.fixed, cost, self.seconds, sure, branches)
        if x is None:
            return None
        on = np.where(self.model.whole, x > 0.5, x)
        chosen = lambda columns: frozenset(v for v, i in columns.items() if on[i] > 0)
        decided = {j: (chosen(part.saved), chosen(part.sent)) for j, part in self.parts.items()}
        size, price = (float(np.asarray(a) @ on) for a in (self.model.size, self.model.cost))
        return Point(_tree(self.top, decided, {}), self.fixed + round(size), price)


def choose(top: Schedule, budget: int | None, sure: bool = False, link: Link | None = None
           ) -> Decision | None:  # fmt: skip
    """What saves for the least work run again; None if none was found, or it is too large.

    Without a budget, what saves the fewest bytes. With a link, values may be sent to the host.
    `sure`: however large it is, the least, or `NotSolved`.
    """
    if size(top) > MOST and not sure:
        return None
    problem = IntegerProgram(top, link)
    point = problem.at_price(0.0) if budget is None else problem.at(budget, sure)
    return point and point.decision


def size(top: Schedule) -> int:
    """How many forward equations a Schedule decides about, those of its nodes included."""
    return _count(_parts(top))


def _parts(top: Schedule) -> dict[Joint, _Part]:
    parts: dict[Joint, _Part] = {}
    _visit(top, None, 1, 1, 1, parts)
    return parts


def _count(parts: dict[Joint, _Part]) -> int:
    return sum(len(joint.forward) for joint in parts)


def _tree(schedule: Schedule, decided: dict[Joint, tuple[frozenset[Var], frozenset[Var]]],
          decisions: dict[Joint, Decision]) -> Decision:  # fmt: skip
    """The decisions, from what each Joint saves and what it sends."""
    if schedule.joint not in decisions:
        inner = {
            node: tuple(_tree(p, decided, decisions) for p in schedules)
            for node, schedules in schedule.inner.items()
            if _opened(node)
        }
        saved, sent = decided[schedule.joint]
        values = saved | sent.difference(schedule.joint.inputs)
        decisions[schedule.joint] = Decision(values, inner, dict.fromkeys(sent - saved, HOST))
    return decisions[schedule.joint]


def _opened(node: Node) -> bool:
    """Whether what a node keeps is decided with the rest."""
    return not node.region and node.eqn.primitive is not while_p


def _visit(schedule: Schedule, node: Node | None, times: int, runs: int, outside: int,
           parts: dict[Joint, _Part]) -> None:  # fmt: skip
    """Count how often each Joint runs."""
    part = parts.setdefault(schedule.joint, _Part(schedule))
    part.times += times
    part.runs += runs
    part.outside += outside
    if node is not None:
        values = tuple(v for eqn in schedule.joint.forward for v in eqn.outvars)
        every = dataclasses.replace(schedule, kept=values)
        part.once = frozenset(gather(values, node.hoisted(every)))
    for inner, schedules in schedule.inner.items():
        within = runs * inner.trips * inner.device_count
        if runs and len(schedules) > 1 and _opened(inner):
            part.branches.append((inner, runs))
            within = 0
        for p in schedules if _opened(inner) else ():
            _visit(p, inner, times * inner.trips, within, times, parts)


def _values(model: Model, part: _Part, may: Room, link: Link | None) -> None:
    """The columns of a Joint's values."""
    joint = part.schedule.joint
    part.needed = {v: model.column() for v in joint.inputs}
    for v in joint.inputs:
        if link and v in may.values:  # a state of a loop, which is stored if it is needed
            size, seconds = part.times * aval_bytes(v.aval), link.seconds(aval_bytes(v.aval))
            part.sent[v] = model.column(_SENT * size, -size, seconds=part.times * seconds)
            model.row((part.needed[v], 1.0), (part.sent[v], -1.0))
    for eqn in joint.forward:
        decided = eqn.primitive is not fork_p
        for v in eqn.outvars:
            kept = v not in joint.free and eqn.primitive is not name_p
            token = not decided and v is eqn.outvars[-1]
            times = part.outside if v in part.once else part.times
            size = 0 if token else times * aval_bytes(v.aval)
            part.saved[v] = model.column(size=size, upper=float(kept))
            part.needed[v] = model.column()
            if link and kept and not token and v in may.values:
                seconds = times * link.seconds(aval_bytes(v.aval))
                part.sent[v] = model.column(_SENT * size, seconds=seconds)


def _equations(model: Model, parts: dict[Joint, _Part], part: _Part) -> int:
    """The rows of a Joint; returns the bytes that are kept whatever is decided."""
    joint, schedule, needed, fixed = part.schedule.joint, part.schedule, part.needed, 0
    for eqn in joint.forward:
        cost = math.inf if eqn.primitive is fork_p else price(eqn, 1.0)
        once = cost == math.inf
        flops = 0 if once or fusible(eqn) else part.runs * equation_flops(eqn)
        again = model.column(0.0 if once else part.runs * cost, 0.0, float(not once), 0.0, flops)
        if not once:
            work = 0.0 if fusible(eqn) else float(equation_flops(eqn))
            part.work.append((again, cost, work))
        for v in eqn.outvars:
            sent = [(part.sent[v], 1.0)] if v in part.sent else []
            model.row((part.saved[v], 1.0), *sent, (again, 1.0), (needed[v], -1.0))
        for v in eqn.invars:
            if isinstance(v, Var) and v in needed:
                model.row((needed[v], 1.0), (again, -1.0))
    wanted = [v for v in joint.backward_outputs if isinstance(v, Var)]
    for eqn in joint.backward:
        if eqn.primitive is not join_p:
            wanted += reads_of(eqn, schedule.inner)
            continue
        node = eqn.params["node"]
        if _opened(node):
            wanted += [v for v in eqn.invars[:1] if isinstance(v, Var)]
            wanted += _nested(model, parts, part, node, eqn.invars[1:])
        else:
            wanted += reads_of(eqn, schedule.inner)
            fixed += part.times * held_bytes(held_by(node, schedule.inner[node]))
    for v in wanted:
        if v in needed:
            model.lower[needed[v]] = 1.0
    return fixed


def _inner_work(model: Model, parts: dict[Joint, _Part], part: _Part, node: Node, runs: int
                ) -> list[Term]:  # fmt: skip
    """The work of a node within a Joint that runs so often; of branches, of the dearest."""
    runs *= node.trips * node.device_count
    programs: list[list[Term]] = []
    for p in part.schedule.inner[node]:
        inner = parts[p.joint]
        terms = [(column, runs * cost, runs * flops) for column, cost, flops in inner.work]
        for n in filter(_opened, p.inner):
            terms += _inner_work(model, parts, inner, n, runs)
        programs.append(terms)
    return _dearest(model, programs) if len(programs) > 1 else programs[0]


def _dearest(model: Model, programs: list[list[Term]]) -> list[Term]:
    """The work of the dearest of some programs: columns that are at least that of each."""
    terms_of_dearest: list[Term] = []
    for which in (1, 2):
        most = max(sum(term[which] for term in terms) for terms in programs)
        if most:
            column = model.column(whole=False)
            terms_of_dearest.append((column, most, 0.0) if which == 1 else (column, 0.0, most))
            for terms in programs:
                model.row((column, 1.0), *((term[0], -term[which] / most) for term in terms))
    return terms_of_dearest


def _nested(model: Model, parts: dict[Joint, _Part], part: _Part, node: Node, atoms: Any
            ) -> list[Var]:  # fmt: skip
    """What a nested program needs of its inputs is needed outside, or stored in each trip.

    Returns what is read from outside in any case.
    """
    schedules = part.schedule.inner[node]
    nothing = [dataclasses.replace(p, reads=(False,) * len(p.joint.inputs)) for p in schedules]
    always = node.reads(nothing)
    for k, p in enumerate(schedules):
        columns = parts[p.joint].needed
        for i, u in enumerate(p.joint.inputs):
            one = dataclasses.replace(p, reads=tuple(i == j for j in range(len(p.joint.inputs))))
            reading = [*nothing[:k], one, *nothing[k + 1 :]]
            if any(node.stacked(reading)):
                model.size[columns[u]] += part.times * node.trips * aval_bytes(u.aval)
            for v, on, already in zip(atoms, node.reads(reading), always, strict=False):
                if on and not already and isinstance(v, Var) and v in part.needed:
                    model.row((part.needed[v], 1.0), (columns[u], -1.0))
    return [v for v, on in zip(atoms, always, strict=False) if on and isinstance(v, Var)]
