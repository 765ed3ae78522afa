"""Apply a policy to a derivative: decide which values are saved and which are recomputed.

A *Joint* is the forward and the backward pass of a program as one program. Loops, branches and
calls in it are *nodes* (`fork_p` in the forward pass), with Joints of their own. The result is a
*Schedule*: the saved values, and the backward pass with the recomputed equations.

The Joints inside nodes are planned first. In the Joint around a node, one value (the node's token)
stands for all values that the node saves. Then the policy decides for the Joint itself. A minimum
cut decides about all values at once, and so does a `Decision`, which simply lists the saved values.
A budget takes the best of the decisions that `cuts/fit.py` proposes. Any other policy decides about
one value at a time. `schedule.py` turns the decisions into a Schedule.

If a loop or call saves values inside, its outputs that the backward pass reads are saved too, and
so is the carry of a loop. A loop or call that saves nothing is recomputed as a whole, unless a
second run could give other values. The loops at the top level of a function are never recomputed:
their carries are saved, and the policy decides inside their bodies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xform._jax import JaxprEqn, Var
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
from xform.policies.sample import sample_for
from xform.program.dimensions import SampledCache, at_sample
from xform.program.ir import Mask, gather, seldom_collected
from xform.program.source import frame
from xform.registry.repeatable import repeatable


@dataclasses.dataclass(frozen=True)
class _Context:
    """The place of a Joint in the program.

    Attributes:
      backend: the backend that the plan is for if the Joint is a whole function; None if it is
        inside another Joint.
      available: which inputs, and then which outputs, the backward pass can read without saving
        them; None means all inputs and no outputs.
    """

    backend: str | None
    available: Mask | None

    @property
    def is_top(self) -> bool:
        """Whether the Joint is a whole function, whose loops are not recomputed."""
        return self.backend is not None

    def plan_like_this(self, policy: Any) -> Callable[[Joint], Schedule]:
        """Return a function that plans other Joints in this place under `policy`."""
        return functools.partial(
            schedule, policy=policy, backend=self.backend, available=self.available
        )


def schedule(joint: Joint, policy: Any = None, backend: str | None = None,
             available: Mask | None = None) -> Schedule:  # fmt: skip
    """Return the Schedule of a Joint under a policy.

    Args:
      joint: the forward and the backward pass.
      policy: a policy of `xform.policies`, a Plan, a Decision, or a policy in JAX's protocol. A
        budget bounds the saved bytes here; `plan_program.py` plans for a budget of the peak. None:
        everything that the backward pass reads is saved.
      backend: the backend, such as "cpu", if the Joint is a whole function, whose loops are not
        recomputed; None if it is inside another Joint.
      available: which inputs, and then which outputs, the backward pass can read without saving
        them; None: all inputs and no outputs.

    Raises:
      BudgetInfeasible: no plan fits a budget.
      OtherProgram: a Plan was made for another program.

    Cost: linear in the number of equations, near linear under `min_cut`.
    """
    context = _Context(backend, available)
    return _improve_if_empty(_plan(joint, policy, context), context)


def _plan(joint: Joint, policy: Any, context: _Context) -> Schedule:
    """Return the Schedule under any policy. The Joint caches the most recent ones."""
    if not isinstance(policy, Decision):
        policy = save_everything if policy is None else parse(policy)
    key: Any = policy, context
    if key not in joint.schedules:
        with seldom_collected():
            joint.schedules[key] = _plan_uncached(joint, policy, context)
    return joint.schedules[key]


def _plan_uncached(joint: Joint, policy: Any, context: _Context) -> Schedule:
    """Return the same as `_plan`, without a cache."""
    decided = _decided(joint, policy, context)
    if context.backend != "gpu" or joint.push or decided.gradients_first:
        return decided
    return dataclasses.replace(decided, gradients_first=True, cache=SampledCache())


def _decided(joint: Joint, policy: Any, context: _Context) -> Schedule:
    """Return the Schedule under any policy, without its barriers between layers."""
    if isinstance(policy, Budget):
        region_policy(policy)  # raises WrongArgument for a budget of the peak
        with at_sample(sample_for(policy, joint.program.in_avals)):
            return _best_of_proposals(joint, propose_within(policy), context)
    if isinstance(policy, Plan):
        policy = policy.decide(joint)
    if isinstance(policy, MinCut):
        inner = _inner_schedules(joint, policy, context.backend)
        return _by_cut(joint, policy, inner, context)
    if isinstance(policy, Decision):
        inner = _inner_schedules(joint, policy, context.backend)
        return _by_decision(joint, policy, inner, context)
    return _by_value(joint, policy, context)


def best_of_proposals(joint: Joint, proposals: Proposals, backend: str) -> Schedule:
    """Run the generator `proposals` for a whole function, and return the Schedule it returns.

    The generator yields policies or Decisions, and is sent the Schedule of each.
    """
    return _best_of_proposals(joint, proposals, _Context(backend, None))


def _best_of_proposals(joint: Joint, proposals: Proposals, context: _Context) -> Schedule:
    """Do the same as `best_of_proposals` for a Joint in any place."""
    try:
        proposal = next(proposals)
        while True:
            proposed = _plan_uncached(joint, proposal, context)
            proposal = proposals.send(_improve_if_empty(proposed, context))
    except StopIteration as end:
        return end.value


def _by_value(joint: Joint, policy: Policy, context: _Context) -> Schedule:
    """Return the Schedule under a policy that decides about one value at a time."""
    inner, recomputed = _inner_schedules(joint, policy, context.backend), set[Node]()
    for eqn, node in _nodes(joint):
        if repeatable(eqn) and not _is_saved(node, inner[node], policy, context.is_top):
            recomputed.add(node)
            if not node.region:
                inner[node] = _save_all_reads(node)
    return schedule_by_policy(joint, policy, recomputed, inner, context.plan_like_this(policy))


def _is_saved(node: Node, schedules: tuple[Schedule, ...], policy: Policy, is_top: bool) -> bool:
    """Return whether a repeatable loop or call is saved, rather than recomputed as a whole.

    `schedules` are the Schedules of the programs inside it. `is_top` says whether it is at the top
    level of a function.
    """
    top_loop = node.loop and is_top and not node.region
    return policy == save_everything or top_loop or _saves_values(schedules)


def _saves_values(schedules: tuple[Schedule, ...]) -> bool:
    """Return whether any of the Schedules saves a value; the states of loops do not count."""
    return any(
        _saves_values(p.inner[p.joint.producer[v].params["node"]])
        if p.joint.producer[v].primitive is fork_p
        else True
        for p in schedules
        for v in p.saved
    )


def _by_cut(joint: Joint, policy: MinCut, inner: Inner, context: _Context) -> Schedule:
    """Return the Schedule of a minimum cut.

    `inner` has the Schedules inside the nodes. The cut may recompute a loop or call as a whole,
    just before its own backward pass. The recomputed forward pass then saves everything that this
    backward pass reads.
    """
    graph, prices = _graph(joint, inner), _recompute_prices(joint, policy, context.is_top)
    sizes = _save_prices(joint, policy, inner, context.available)
    saved = graph.cheapest(prices[graph.places], sizes, policy.fused_save_price)
    for i, eqn in joint.forks.items():
        if eqn.outvars[-1] not in saved and prices[i] < math.inf:
            inner[eqn.params["node"]] = _save_all_reads(eqn.params["node"])
    return _by_decision(joint, Decision(saved, {}), inner, context)


def _improve_if_empty(schedule: Schedule, context: _Context) -> Schedule:
    """Reduce the peak of a whole function's Schedule that saves nothing; return others unchanged.

    Such a Schedule recomputes the whole forward pass before the backward pass. Then all values that
    the backward pass reads are live at once, as if nothing were recomputed. The improved Schedule
    holds only the values that `min_cut` saves after this second run of the forward pass. It
    recomputes all others from these, so operations that XLA fuses run a third time. The improved
    Schedule is returned if its simulated peak is lower.

    A Schedule with nodes is returned unchanged: there a `Decision` would need two sets of saved
    values for each node, one for each of the two runs.
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
    """Recompute the values that `min_cut` saves first, then everything else from them.

    Return `schedule` itself unless the simulated peak of the new Schedule is lower.
    """
    joint = schedule.joint
    cut = _by_cut(joint, min_cut, {}, context)  # {}: the Joint has no nodes
    recomputed = live(joint.forward, cut.saved, effects=False)
    if not all(map(repeatable, recomputed)):
        return schedule
    ids = {id(e) for e in recomputed if not joint.always_recomputed.issuperset(e.outvars)}
    reads = {v for e in (*recomputed, *cut.order) for v in reads_of(e, cut.inner)}
    two_steps = dataclasses.replace(
        cut,
        saved=(),
        why={},
        order=(*recomputed, *cut.order),
        recomputed=cut.recomputed | ids,
        reads=tuple(
            is_read or v in reads for is_read, v in zip(cut.reads, joint.inputs, strict=True)
        ),
        decided_per_value=schedule.decided_per_value,
        cache=SampledCache(),
    )
    lower = liveness(two_steps, backend).total_bytes < liveness(schedule, backend).total_bytes
    return two_steps if lower else schedule


def _by_decision(joint: Joint, decision: Decision, inner: Inner, context: _Context) -> Schedule:
    """Return the Schedule of a Decision for a whole Joint. Equal decisions share one Schedule.

    `inner` has the Schedules inside the nodes.
    """
    cache, offloaded = joint.program.cache, frozenset(decision.offloaded.items())
    options = decision.snapshots, decision.decided_per_value
    key = "schedule", decision.saved, offloaded, *options, *inner.items(), context
    if key not in cache:
        cache[key] = schedule_by_decision(joint, decision, inner, context.plan_like_this(min_cut))
    return cache[key]


def _inner_schedules(joint: Joint, policy: Any, backend: str | None) -> Inner:
    """Return the Schedules of the programs inside a Joint's nodes."""
    return {node: _node_schedules(node, policy, backend) for _, node in _nodes(joint)}


def _node_schedules(node: Node, policy: Any, backend: str | None) -> tuple[Schedule, ...]:
    """Return the Schedules of a node's programs.

    If `policy` is a Decision with an entry for the node, they follow that entry. Otherwise a remat
    region (a part of a function that `jax.checkpoint` marks) follows its own policy, and other
    nodes follow `policy`.
    """
    if isinstance(policy, Decision) and node in policy.inner:
        decisions = zip(node.joints, policy.inner[node], strict=True)
        return tuple(schedule(j, decision) for j, decision in decisions)
    cuts_inside = isinstance(policy, MinCut) and policy.in_regions
    if node.region and not (cuts_inside and is_region_without_policy(node.eqn)):
        policy = region_policy(parse(node.policy), frame(node.eqn))
    if isinstance(policy, MinCut) and policy.rounds_operands and node.loop:
        # A loop writes its saved values to memory in any case, and does not round them.
        policy = dataclasses.replace(policy, fused_save_price=0.0, rounds_operands=False)
    if isinstance(policy, MinCut | Decision):
        if node.unknown_length:
            return _save_all_reads(node)  # its steps run backward one by one, and free their values
        available = available_values(node) if isinstance(policy, MinCut) else None
        return tuple(schedule(j, policy, available=available) for j in node.joints)
    context = _Context(None if node.region else backend, None)
    return tuple(_plan(j, policy, context) for j in node.joints)


def _save_all_reads(node: Node) -> tuple[Schedule, ...]:
    """Return Schedules of a node's programs that save everything the backward pass reads."""
    return tuple(schedule(j) for j in node.joints)


def available_values(node: Node) -> Mask | None:
    """Return which values of a loop's body can be read without storing them in each iteration.

    These are the scanned inputs, the constants, and a carry that only moves between devices. Other
    carries must be stored. The mask has the inputs and then the outputs of the body. None: the node
    is not a loop.
    """
    if not node.loop:
        return None
    (joint,) = node.joints
    all_inputs = (True,) * len(joint.inputs)
    reads_all = Schedule(joint, (), {}, (), frozenset(), all_inputs, {}, {}, schedule)
    stored = node.stacked_inputs([reads_all])
    return (*(not on for on in stored), *node.moved_outputs())


def _nodes(joint: Joint) -> Iterator[tuple[JaxprEqn, Node]]:
    """Yield (equation, node) for each node of a Joint, in the forward pass."""
    return ((e, e.params["node"]) for e in joint.forks.values())


def _save_prices(joint: Joint, policy: MinCut, inner: Inner, available: Mask | None
                 ) -> dict[Var, int]:  # fmt: skip
    """Return the price, in bytes, of saving each value whose price is not the bytes of its type.

    Available inputs and values at bottlenecks (`cuts/bottleneck.py`) cost nothing. Values that a
    TPU rounds to 16 bits cost half their bytes. Tokens cost the bytes of the values that they stand
    for.
    """
    available = available or (True,) * len(joint.inputs) + (False,) * len(joint.outputs)
    inputs, outputs = available[: len(joint.inputs)], available[len(joint.inputs) :]
    sizes = {v: aval_bytes(v.aval) * (not on) for v, on in zip(joint.inputs, inputs, strict=True)}
    sizes |= dict.fromkeys(gather(joint.outputs, outputs), 0)
    if policy.bottleneck_stride:
        narrow = bottlenecks(joint)[policy.bottleneck_stride - 1 :: policy.bottleneck_stride]
        sizes |= dict.fromkeys(frozenset[Var]().union(*narrow), 0)
    if policy.rounds_operands:
        sizes |= {
            v: n // 2 for v in product_operands(joint) if (n := sizes.get(v, aval_bytes(v.aval)))
        }
    tokens = {eqn.outvars[-1]: expand_token(node, inner[node]) for eqn, node in _nodes(joint)}
    return sizes | {v: device_bytes(values) for v, values in tokens.items()}


def _recompute_prices(joint: Joint, policy: MinCut, is_top: bool) -> np.ndarray:
    """Return the price of recomputing each equation of the forward pass, in bytes.

    Remat regions are never recomputed by the Joint around them, nor are the loops of a whole
    function (`is_top`).
    """
    cached = _cached_prices(joint)
    flop_prices = np.where(cached.is_early(policy.switch_at), policy.early_price, policy.late_price)
    prices = cached.at(flop_prices, policy.slow_price)
    nodes = ((i, eqn.params["node"]) for i, eqn in joint.forks.items())
    prices[[i for i, node in nodes if node.region or (node.loop and is_top)]] = math.inf
    return prices


def _graph(joint: Joint, inner: Inner) -> CutGraph:
    """Return the graph of a Joint, cached by the inputs that its nodes read."""
    key = "graph", *(node.reads(schedules) for node, schedules in inner.items())
    if key not in joint.program.cache:
        joint.program.cache[key] = CutGraph(joint, inner)
    return joint.program.cache[key]


def _cached_prices(joint: Joint) -> Prices:
    """Return the Prices of recomputing a Joint's forward equations, cached."""
    if "prices" not in joint.program.cache:
        joint.program.cache["prices"] = Prices(joint.forward)
    return joint.program.cache["prices"]
