"""Apply a policy to a Joint and to all Joints inside it; the result is a Schedule.

Loops and calls are planned first. To the Joint around them, the saved values of a loop or call are
one value (its token) with a size. Then the policy decides for the Joint itself. A minimum cut and a
`Decision` decide for all values at once. A budget takes the best of the decisions that
`cuts/fit.py` proposes. Any other policy decides about one value at a time. `schedule.py` turns the
decisions into a Schedule.

If a loop or call saves values inside, its outputs that the backward pass reads are saved too, and
so is the carry of a loop. A loop or call that saves nothing is recomputed as a whole, unless it has
effects. The loops at the top level of a function are never recomputed: their carries are saved, and
the policy decides inside their bodies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xform._jax import Var, has_effects, while_p
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p
from xform.passes.dce import live
from xform.planner.costs.product_operands import product_operands
from xform.planner.costs.recompute import Prices, fusible
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.cuts.bottleneck import bottlenecks
from xform.planner.cuts.fit import Proposals, propose_within
from xform.planner.cuts.graph import CutGraph
from xform.planner.loops import is_region_without_policy
from xform.planner.plan.decision import Decision
from xform.planner.plan.plan import Plan
from xform.planner.schedule import Inner, schedule_by_decision, schedule_by_policy
from xform.planner.simulate.liveness import liveness
from xform.policies import Budget, MinCut, Policy, min_cut, parse, save_everything
from xform.policies.regions import region_policy
from xform.program.ir import Mask, seldom_collected
from xform.program.source import frame
from xform.storage.bounded_cache import BoundedCache


@dataclasses.dataclass(frozen=True)
class _Context:
    """Where a Joint is in the program.

    Attributes:
      backend: the backend that the plan is for if the Joint is a whole function; None if it is
        inside another Joint.
      available: which inputs the backward part can read in any case; None means all.
    """

    backend: str | None
    available: Mask | None

    @property
    def top(self) -> bool:
        """Whether the Joint is a whole function, whose loops are not recomputed."""
        return self.backend is not None

    def plan_like_this(self, policy: Any) -> Callable[[Joint], Schedule]:
        """A function that plans other Joints in this context under `policy`."""
        return functools.partial(
            schedule, policy=policy, backend=self.backend, available=self.available
        )


def schedule(joint: Joint, policy: Any = None, backend: str | None = None,
             available: Mask | None = None) -> Schedule:  # fmt: skip
    """Return the Schedule of a Joint under a policy; None saves everything the backward part reads.

    `backend` is given for a whole function, whose loops are not recomputed. `available` says which
    inputs the backward part can read in any case (None: all). A budget bounds the saved
    bytes here; `plan_program.py` plans for a budget of the peak.

    Cost: linear in the number of equations, near linear under `min_cut`.
    """
    context = _Context(backend, available)
    return _improve_if_empty(_plan(joint, policy, context), context)


def _plan(joint: Joint, policy: Any, context: _Context) -> Schedule:
    if not isinstance(policy, Decision):
        policy = save_everything if policy is None else parse(policy)
    key: Any = policy, context
    if key not in joint.schedules:
        with seldom_collected():
            joint.schedules[key] = _plan_uncached(joint, policy, context)
    return joint.schedules[key]


def _plan_uncached(joint: Joint, policy: Any, context: _Context) -> Schedule:
    if isinstance(policy, Budget):
        region_policy(policy)
        return _best_of_proposals(joint, propose_within(policy), context)
    return _dispatch(joint, policy, context)


def _dispatch(joint: Joint, policy: Any, context: _Context) -> Schedule:
    if isinstance(policy, Plan):
        policy = policy.decide(joint)
    if isinstance(policy, MinCut):
        return _by_cut(joint, policy, context)
    if isinstance(policy, Decision):
        inner = _inner(joint, policy, context.backend)
        return _cut(joint, policy, inner, context)
    return _by_answers(joint, policy, context)


def best_of_proposals(joint: Joint, proposals: Proposals, backend: str) -> Schedule:
    """Run the generator `proposals`: send it the Schedule of each proposal, return its result."""
    return _best_of_proposals(joint, proposals, _Context(backend, None))


def _best_of_proposals(joint: Joint, proposals: Proposals, context: _Context) -> Schedule:
    try:
        decisions = next(proposals)
        while True:
            proposed = _plan_uncached(joint, decisions, context)
            decisions = proposals.send(_improve_if_empty(proposed, context))
    except StopIteration as end:
        return end.value


def _by_answers(joint: Joint, policy: Policy, context: _Context) -> Schedule:
    """The Schedule under a policy that decides about one value at a time."""
    inner, recomputed = _inner(joint, policy, context.backend), set[Node]()
    for node, schedules in inner.items():
        if not _is_saved(node, schedules, policy, context.top):
            recomputed.add(node)
            if not node.region:
                inner[node] = _save_all_reads(node)
    return schedule_by_policy(joint, policy, recomputed, inner, context.plan_like_this(policy))


def _is_saved(node: Node, schedules: tuple[Schedule, ...], policy: Policy, top: bool) -> bool:
    """Whether a loop or call is saved, rather than recomputed as a whole."""
    loop = node.loop and top and not node.region
    return policy == save_everything or has_effects(node.eqn) or loop or _saves_values(schedules)


def _saves_values(schedules: tuple[Schedule, ...]) -> bool:
    """Whether any of the Schedules saves a computed value; the states of loops do not count."""
    return any(
        _saves_values(p.inner[p.joint.producer[v].params["node"]])
        if p.joint.producer[v].primitive is fork_p
        else True
        for p in schedules
        for v in p.saved
    )


def _by_cut(joint: Joint, policy: MinCut, context: _Context) -> Schedule:
    """The Schedule of a minimum cut. Loops and calls that it recomputes save nothing inside."""
    return _cheapest(joint, policy, _inner(joint, policy, context.backend), context)


def _cheapest(joint: Joint, policy: MinCut, inner: Inner, context: _Context) -> Schedule:
    graph, prices = _graph(joint, inner), _prices(joint, policy, context.top)
    sizes = _sizes(joint, policy, inner, context.available)
    saved = graph.cheapest(prices[graph.places], sizes, policy.fused_save_price)
    for i, eqn in joint.forks.items():
        if eqn.outvars[-1] not in saved and prices[i] < math.inf:
            inner[eqn.params["node"]] = _save_all_reads(eqn.params["node"])
    return _cut(joint, Decision(saved, {}), inner, context)


def _improve_if_empty(schedule: Schedule, context: _Context) -> Schedule:
    """Reduce the peak of a whole function's Schedule that saves nothing; return others unchanged.

    Such a Schedule recomputes the whole forward part before the backward part. Then all values that
    the backward part reads are live at once, as if nothing were recomputed. The improved Schedule
    holds only the values of `min_cut` after this second forward run, and runs fused operations a
    third time. It is used if its simulated peak is lower.

    A Schedule with loops or calls that carry a derivative is returned unchanged: a `Decision` can
    say only once what each of them saves.
    """
    expensive = (e for e in schedule.order if id(e) in schedule.recomputed and not fusible(e))
    backend = context.backend
    if backend is None or schedule.saved or schedule.joint.forks or not any(expensive):
        return schedule
    key = "two steps", backend
    if key not in schedule.cache:
        schedule.cache[key] = _recompute_in_two_steps(schedule, context, backend)
    return schedule.cache[key]


def _recompute_in_two_steps(schedule: Schedule, context: _Context, backend: str) -> Schedule:
    """The Schedule that recomputes the values of `min_cut` first, then everything else from them.

    Returns `schedule` itself unless the simulated peak of the new one is lower.
    """
    joint = schedule.joint
    cut = _cheapest(joint, min_cut, {}, context)  # {}: the Joint has no loops or calls
    recomputed = live(joint.forward, cut.saved, effects=False)
    if any(map(has_effects, recomputed)):
        return schedule
    ids = {id(e) for e in recomputed if not joint.always_recomputed.issuperset(e.outvars)}
    reads = {v for e in (*recomputed, *cut.order) for v in reads_of(e, cut.inner)}
    two_steps = dataclasses.replace(
        cut,
        saved=(),
        why={},
        order=(*recomputed, *cut.order),
        recomputed=cut.recomputed | ids,
        reads=tuple(on or v in reads for on, v in zip(cut.reads, joint.inputs, strict=True)),
        decided_per_value=schedule.decided_per_value,
        cache=BoundedCache(),
    )
    lower = liveness(two_steps, backend).total_bytes < liveness(schedule, backend).total_bytes
    return two_steps if lower else schedule


def _cut(joint: Joint, cut: Decision, inner: Inner, context: _Context) -> Schedule:
    """The Schedule of a Decision for a whole Joint. Equal decisions share one Schedule."""
    sent, cache = frozenset(cut.offloaded.items()), joint.program.cache
    key = "schedule", cut.saved, sent, cut.snapshots, cut.decided_per_value, *inner.items(), context
    if key not in cache:
        cache[key] = schedule_by_decision(joint, cut, inner, context.plan_like_this(min_cut))
    return cache[key]


def _inner(joint: Joint, policy: Any, backend: str | None) -> Inner:
    """The Schedules of the programs of a Joint's loops, branches, calls and regions."""
    return {node: _node_schedules(node, policy, backend) for _, node in _nodes(joint)}


def _node_schedules(node: Node, policy: Any, backend: str | None) -> tuple[Schedule, ...]:
    """The Schedules of a node's programs.

    They follow a Decision that names the node, else the node's own region policy, else `policy`.
    """
    if isinstance(policy, Decision) and node in policy.inner:
        decisions = zip(node.joints, policy.inner[node], strict=True)
        return tuple(schedule(j, decision) for j, decision in decisions)
    opened = isinstance(policy, MinCut) and policy.in_regions and is_region_without_policy(node.eqn)
    if node.region and not opened:
        policy = region_policy(parse(node.policy), frame(node.eqn))
    if isinstance(policy, MinCut) and policy.rounds_operands and node.loop:
        # A loop stacks its saved values: they are in memory, unrounded, in any case.
        policy = dataclasses.replace(policy, fused_save_price=0.0, rounds_operands=False)
    if isinstance(policy, MinCut | Decision):
        if node.eqn.primitive is while_p:
            return _save_all_reads(node)  # values saved in a step are freed after that step
        available = available_inputs(node) if isinstance(policy, MinCut) else None
        return tuple(schedule(j, policy, available=available) for j in node.joints)
    context = _Context(None if node.region else backend, None)
    return tuple(_plan(j, policy, context) for j in node.joints)


def _save_all_reads(node: Node) -> tuple[Schedule, ...]:
    """The Schedules of a node's programs that save everything the backward part reads."""
    return tuple(schedule(j) for j in node.joints)


def available_inputs(node: Node) -> Mask | None:
    """Which inputs of a loop's body are never stored in each iteration; None if not a loop."""
    if not node.loop:
        return None
    (joint,) = node.joints
    every = (True,) * len(joint.inputs)
    reads_all = Schedule(joint, (), {}, (), frozenset(), every, {}, {}, schedule)
    return tuple(not on for on in node.stacked_inputs([reads_all]))


def _nodes(joint: Joint) -> Iterator[tuple[Any, Node]]:
    """Yield (fork equation, node) for each node of a Joint."""
    return ((e, e.params["node"]) for e in joint.forks.values())


def _sizes(joint: Joint, policy: MinCut, inner: Inner, available: Mask | None) -> dict[Var, int]:
    """The prices, in bytes, of saving inputs, values at bottlenecks, rounded values and tokens.

    All other values cost the bytes of their type.
    """
    inputs = zip(joint.inputs, available or (True,) * len(joint.inputs), strict=True)
    sizes = {v: 0 if there else aval_bytes(v.aval) for v, there in inputs}
    if policy.bottleneck_stride:
        narrow = bottlenecks(joint)[policy.bottleneck_stride - 1 :: policy.bottleneck_stride]
        sizes |= dict.fromkeys(frozenset[Var]().union(*narrow), 0)
    if policy.rounds_operands:
        sizes |= {
            v: n // 2 for v in product_operands(joint) if (n := sizes.get(v, aval_bytes(v.aval)))
        }
    tokens = {eqn.outvars[-1]: expand_token(node, inner[node]) for eqn, node in _nodes(joint)}
    return sizes | {v: device_bytes(values) for v, values in tokens.items()}


def _prices(joint: Joint, policy: MinCut, top: bool) -> np.ndarray:
    """The price of recomputing each equation of the forward part."""
    early_price = np.arange(len(joint.forward)) < policy.switch_at * len(joint.forward)
    flops = np.where(early_price, policy.early_price, policy.late_price)
    prices = _recompute_prices(joint).at(flops, policy.slow_price)
    nodes = ((i, eqn.params["node"]) for i, eqn in joint.forks.items())
    prices[[i for i, node in nodes if node.region or (node.loop and top)]] = math.inf
    return prices


def _graph(joint: Joint, inner: Inner) -> CutGraph:
    """The graph of a Joint, cached by the inputs that its nodes read."""
    key = "graph", *(node.reads(schedules) for node, schedules in inner.items())
    if key not in joint.program.cache:
        joint.program.cache[key] = CutGraph(joint, inner)
    return joint.program.cache[key]


def _recompute_prices(joint: Joint) -> Prices:
    """The recompute prices of a Joint's forward equations, cached."""
    if "prices" not in joint.program.cache:
        joint.program.cache["prices"] = Prices(joint.forward)
    return joint.program.cache["prices"]
