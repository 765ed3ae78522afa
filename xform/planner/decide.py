"""From a policy to the Schedule of a Joint, and of all Joints within it.

Loops and calls come first: what they keep inside is one value outside, of so many bytes. Then the
policy decides for the Joint itself. A minimum cut, and a `Decision`, decide for all of it at once.
A budget takes the best of the decisions that `cuts/fit.py` proposes. Any other policy is asked for
one value after the other. `schedule.py` makes a Schedule of what is decided.

A loop or call that keeps something inside keeps the outputs that are needed too, and a loop its
carry; one that keeps nothing is run again as a whole, unless it has effects. Only at the top of a
function is a loop never run again: its carries are kept, and the policy decides inside its body.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xform._jax import Var, has_effects, while_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p
from xform.ir import Mask, seldom_collected
from xform.passes.dce import live
from xform.planner.costs.held import held_bytes, token
from xform.planner.costs.recompute import Prices, fusible
from xform.planner.costs.rounded import rounded
from xform.planner.cuts.bottleneck import bottlenecks
from xform.planner.cuts.fit import Proposals, fit
from xform.planner.cuts.graph import Graph
from xform.planner.loops import free_region
from xform.planner.plan.decision import Decision
from xform.planner.plan.plan import Plan
from xform.planner.schedule import by_decision, by_policy, scheduled
from xform.planner.simulate.liveness import liveness
from xform.policies import Budget, MinCut, Policy, check, min_cut, save_everything
from xform.recent import Recent
from xform.regions import of_region
from xform.source import frame

Inner = dict[Node, tuple[Schedule, ...]]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a Joint stands.

    Attributes:
      backend: of a whole function, the backend that is planned for; None within one.
      at_hand: the inputs that are there in the backward part, whatever is saved; None: all.
    """

    backend: str | None
    at_hand: Mask | None

    @property
    def top(self) -> bool:
        """Whether it is a whole function, whose loops are not run again."""
        return self.backend is not None

    def alike(self, policy: Any) -> Callable[[Joint], Schedule]:
        """What plans other Joints that stand here under a policy."""
        return functools.partial(
            schedule, policy=policy, backend=self.backend, at_hand=self.at_hand
        )


def schedule(joint: Joint, policy: Any = None, backend: str | None = None,
         at_hand: Mask | None = None) -> Schedule:  # fmt: skip
    """The Schedule of a Joint under a policy (None: what the backward part reads is kept as it is).

    A `backend` marks a whole function: its loops are not run again. `at_hand` are the inputs that
    are there in the backward part in any case (None: all). A budget bounds the saved bytes here;
    `planned.py` plans for a budget of the peak. Linear in equations, near linear under `min_cut`.
    """
    place = _Place(backend, at_hand)
    return _whole(_plan(joint, policy, place), place)


def _plan(joint: Joint, policy: Any, place: _Place) -> Schedule:
    policy = policy if isinstance(policy, Decision) else check(policy)
    key: Any = policy, place
    if key not in joint.schedules:
        with seldom_collected():
            joint.schedules[key] = _planned(joint, policy, place)
    return joint.schedules[key]


def _planned(joint: Joint, policy: Any, place: _Place) -> Schedule:
    if isinstance(policy, Budget):
        of_region(policy)
        return _best(joint, fit(policy), place)
    return _decided(joint, policy, place)


def _decided(joint: Joint, policy: Any, place: _Place) -> Schedule:
    if isinstance(policy, Plan):
        policy = policy.decide(joint)
    if isinstance(policy, MinCut):
        return _of_cut(joint, policy, place)
    if isinstance(policy, Decision):
        inner = _inner(joint, policy, place.backend)
        return _cut(joint, policy, inner, place)
    return _of_answers(joint, policy, place)


def best(joint: Joint, proposals: Proposals, backend: str) -> Schedule:
    """The Schedule that proposals return, after they were sent the Schedule of each proposal."""
    return _best(joint, proposals, _Place(backend, None))


def _best(joint: Joint, proposals: Proposals, place: _Place) -> Schedule:
    try:
        decisions = next(proposals)
        while True:
            decisions = proposals.send(_whole(_planned(joint, decisions, place), place))
    except StopIteration as end:
        return end.value


def _of_answers(joint: Joint, policy: Policy, place: _Place) -> Schedule:
    """The Schedule under a policy that is asked for one value after the other."""
    inner, again = _inner(joint, policy, place.backend), set[Node]()
    for node, schedules in inner.items():
        if not _stays(node, schedules, policy, place.top):
            again.add(node)
            if not node.region:
                inner[node] = _as_it_is(node)
    return scheduled(joint, by_policy(policy, again), inner, place.alike(policy))


def _stays(node: Node, schedules: tuple[Schedule, ...], policy: Policy, top: bool) -> bool:
    """Whether a loop or call is kept, rather than run again as a whole."""
    loop = node.loop and top and not node.region
    return policy == save_everything or has_effects(node.eqn) or loop or _keeps(schedules)


def _keeps(schedules: tuple[Schedule, ...]) -> bool:
    """Whether plans keep a computed value, other than the state of loops."""
    return any(
        _keeps(p.inner[p.joint.producer[v].params["node"]])
        if p.joint.producer[v].primitive is fork_p
        else True
        for p in schedules
        for v in p.kept
    )


def _of_cut(joint: Joint, policy: MinCut, place: _Place) -> Schedule:
    """The Schedule of a minimum cut; a loop or call that it runs again keeps nothing of its own."""
    return _cheapest(joint, policy, _inner(joint, policy, place.backend), place)


def _cheapest(joint: Joint, policy: MinCut, inner: Inner, place: _Place) -> Schedule:
    graph, prices = _graph(joint, inner), _prices(joint, policy, place.top)
    sizes = _sizes(joint, policy, inner, place.at_hand)
    saved = graph.cheapest(prices[graph.places], sizes, policy.written)
    for i, eqn in joint.forks.items():
        if eqn.outvars[-1] not in saved and prices[i] < math.inf:
            inner[eqn.params["node"]] = _as_it_is(eqn.params["node"])
    return _cut(joint, Decision(saved, {}), inner, place)


def _whole(schedule: Schedule, place: _Place) -> Schedule:
    """The Schedule of a whole function, improved if it keeps nothing.

    A Schedule that keeps nothing runs the whole forward part again before the backward part. All
    that the backward part reads would then be live at once, as if nothing were run again. So of the
    second run only the values of `min_cut` are kept, and operations that XLA fuses run a third
    time, if the simulated peak is lower. Loops and calls that keep values are left as they are: a
    `Decision` says only once what each of them keeps.
    """
    heavy = (e for e in schedule.order if id(e) in schedule.recomputed and not fusible(e))
    backend = place.backend
    if backend is None or schedule.kept or schedule.joint.forks or not any(heavy):
        return schedule
    key = "thinned", backend
    if key not in schedule.cache:
        schedule.cache[key] = _thinned(schedule, place, backend)
    return schedule.cache[key]


def _thinned(schedule: Schedule, place: _Place, backend: str) -> Schedule:
    """The Schedule that also keeps values on the second forward run, if its peak is lower."""
    joint = schedule.joint
    cut = _cheapest(joint, min_cut, {}, place)  # it holds no other programs
    again = live(joint.forward, cut.kept, effects=False)
    if any(map(has_effects, again)):
        return schedule
    ids = {id(e) for e in again if not joint.free.issuperset(e.outvars)}
    reads = {v for e in (*again, *cut.order) for v in reads_of(e, cut.inner)}
    thinned = dataclasses.replace(
        cut,
        kept=(),
        why={},
        order=(*again, *cut.order),
        recomputed=cut.recomputed | ids,
        reads=tuple(on or v in reads for on, v in zip(cut.reads, joint.inputs, strict=True)),
        asked=schedule.asked,
        cache=Recent(),
    )
    fewer = liveness(thinned, backend).total_bytes < liveness(schedule, backend).total_bytes
    return thinned if fewer else schedule


def _cut(joint: Joint, cut: Decision, inner: Inner, place: _Place) -> Schedule:
    """The Schedule of what is decided for a whole Joint, made once for equal decisions."""
    sent, cache = frozenset(cut.offloaded.items()), joint.program.cache
    key = "decided", cut.saved, sent, cut.snapshots, cut.asked, *inner.items(), place
    if key not in cache:
        cache[key] = scheduled(joint, by_decision(cut), inner, place.alike(min_cut), cut)
    return cache[key]


def _inner(joint: Joint, policy: Any, backend: str | None) -> Inner:
    """The Schedules of the programs of a Joint's loops, branches, calls and regions."""
    return {node: _of_node(node, policy, backend) for _, node in _nodes(joint)}


def _of_node(node: Node, policy: Any, backend: str | None) -> tuple[Schedule, ...]:
    """The Schedules of a node's programs: by a decision, its region's policy, or that around it."""
    if isinstance(policy, Decision) and node in policy.inner:
        decisions = zip(node.joints, policy.inner[node], strict=True)
        return tuple(schedule(j, decision) for j, decision in decisions)
    opened = isinstance(policy, MinCut) and policy.free and free_region(node.eqn)
    if node.region and not opened:
        policy = of_region(check(node.policy), frame(node.eqn))
    if isinstance(policy, MinCut) and policy.rounds and node.loop:
        policy = dataclasses.replace(policy, written=0.0, rounds=False)  # it stacks what is saved
    if isinstance(policy, MinCut | Decision):
        if node.eqn.primitive is while_p:
            return _as_it_is(node)  # what a step of it keeps lasts one step
        at_hand = inputs_at_hand(node) if isinstance(policy, MinCut) else None
        return tuple(schedule(j, policy, at_hand=at_hand) for j in node.joints)
    place = _Place(None if node.region else backend, None)
    return tuple(_plan(j, policy, place) for j in node.joints)


def _as_it_is(node: Node) -> tuple[Schedule, ...]:
    """The Schedules of a node's programs, of which all is kept that is read."""
    return tuple(schedule(j) for j in node.joints)


def inputs_at_hand(node: Node) -> Mask | None:
    """Which inputs of a loop's program are not stored in each trip, whatever reads them."""
    if not node.loop:
        return None
    (joint,) = node.joints
    every = (True,) * len(joint.inputs)
    reads_all = Schedule(joint, (), {}, (), frozenset(), every, {}, {}, schedule)
    return tuple(not on for on in node.stacked([reads_all]))


def _nodes(joint: Joint) -> Iterator[tuple[Any, Node]]:
    """The nodes of a Joint, with their forks."""
    return ((e, e.params["node"]) for e in joint.forks.values())


def _sizes(joint: Joint, policy: MinCut, inner: Inner, at_hand: Mask | None) -> dict[Var, int]:
    """Bytes of values where they are not those of their type: inputs, bottlenecks and tokens."""
    inputs = zip(joint.inputs, at_hand or (True,) * len(joint.inputs), strict=True)
    sizes = {v: 0 if there else aval_bytes(v.aval) for v, there in inputs}
    if policy.apart:
        narrow = bottlenecks(joint)[policy.apart - 1 :: policy.apart]
        sizes |= dict.fromkeys(frozenset[Var]().union(*narrow), 0)
    if policy.rounds:
        sizes |= {v: n // 2 for v in rounded(joint) if (n := sizes.get(v, aval_bytes(v.aval)))}
    tokens = {eqn.outvars[-1]: token(node, inner[node]) for eqn, node in _nodes(joint)}
    return sizes | {v: held_bytes(values) for v, values in tokens.items()}


def _prices(joint: Joint, policy: MinCut, top: bool) -> np.ndarray:
    """What running each equation of the forward part again costs."""
    early = np.arange(len(joint.forward)) < policy.at * len(joint.forward)
    prices = _priced(joint).at(np.where(early, policy.price, policy.then))
    nodes = ((i, eqn.params["node"]) for i, eqn in joint.forks.items())
    prices[[i for i, node in nodes if node.region or (node.loop and top)]] = math.inf
    return prices


def _graph(joint: Joint, inner: Inner) -> Graph:
    """The graph of a Joint, made once for what its nodes read."""
    key = "graph", *(node.reads(schedules) for node, schedules in inner.items())
    if key not in joint.program.cache:
        joint.program.cache[key] = Graph(joint, inner)
    return joint.program.cache[key]


def _priced(joint: Joint) -> Prices:
    """The prices of a Joint's forward part."""
    if "prices" not in joint.program.cache:
        joint.program.cache["prices"] = Prices(joint.forward)
    return joint.program.cache["prices"]
