"""From a policy to a Plan: which forward values are kept for the backward part of a Joint.

The backward part is walked in order. A value that it reads is taken from the program's inputs, kept
if the policy saves it, or made again from what it was made from; equations that are run again are
placed just before their first use. Constants (a causal mask) and views are never kept: what they
are made from is.

A loop or call that keeps something inside keeps the outputs that are needed too, and a loop its
carry; one that keeps nothing is run again as a whole, unless it has effects. Only at the top of a
function is a loop never run again: its carries are kept, and the policy decides inside its body.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xform._jax import JaxprEqn, Offloadable, Var, has_effects, name_p, while_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Plan, reads_of
from xform.interpret.node import Node, fork_p
from xform.ir import Mask, seldom_collected
from xform.planner.costs.held import held_bytes, token
from xform.planner.costs.recompute import Prices
from xform.planner.cuts.bottleneck import bottlenecks
from xform.planner.cuts.fit import fit
from xform.planner.cuts.graph import Graph
from xform.planner.loops import free_region
from xform.planner.plan.choice import Choice
from xform.planner.plan.plan import Plan as Decided
from xform.policies import (
    Budget,
    MinCut,
    Policy,
    ask,
    check,
    min_cut,
    said,
    save_everything,
)
from xform.regions import of_region
from xform.source import frame


def plan(joint: Joint, policy: Any = None, top: bool = False, given: Mask | None = None) -> Plan:
    """The Plan of a Joint under a policy (None: what the backward part reads is kept as it is).

    `top` marks a whole function, of which the loops are not to be run again. `given` are the inputs
    that are at hand in the backward part, whatever is saved (None: all). A budget of the peak is
    that of a whole program, see `planned.py`. Linear in equations, near linear under `min_cut`.
    """
    policy = policy if isinstance(policy, Choice) else check(policy)
    key: Any = policy, top, given
    if key not in joint.plans:
        make = lambda how: _Walk(joint, how, top, given).plan()
        with seldom_collected():
            joint.plans[key] = _made(joint, policy, make)
    return joint.plans[key]


def _made(joint: Joint, policy: Any, make: Callable[[Any], Plan]) -> Plan:
    if isinstance(policy, Decided):
        return make(policy.decide(joint))
    if not isinstance(policy, Budget):
        return make(policy)
    of_region(policy)
    return fit(joint, policy, make)


class _Walk:
    def __init__(self, joint: Joint, policy: Policy, top: bool, given: Mask | None):
        self.joint, self.policy, self.top, self.given = joint, policy, top, given
        self.kept: dict[Var, str] = {}
        self.offloaded: dict[Var, Offloadable] = {}
        self.order: list[JaxprEqn] = []
        self.placed: set[int] = set()
        self.recomputed: set[int] = set()
        self.reads: set[Var] = set()
        self.inputs = set(joint.inputs)
        self.inner: dict[Node, tuple[Plan, ...]] = {}
        self.rerun: set[Node] = set()
        self.whole = isinstance(policy, MinCut | Choice)
        for eqn in joint.forward:
            if eqn.primitive is fork_p:
                self._nested(eqn.params["node"], top)
        self.cut = frozenset[Var]()
        if isinstance(policy, MinCut):
            self.cut = self._cheapest(policy)
        elif isinstance(policy, Choice):
            self.cut = policy.saved

    def _cheapest(self, policy: MinCut) -> frozenset[Var]:
        """What a minimum cut saves; the loops and calls that it runs again are noted."""
        joint = self.joint
        given = self.given or (True,) * len(joint.inputs)
        inputs = zip(joint.inputs, given, strict=True)
        sizes = {v: 0 if at_hand else aval_bytes(v.aval) for v, at_hand in inputs}
        if policy.apart:
            narrow = bottlenecks(joint)[policy.apart - 1 :: policy.apart]
            sizes |= dict.fromkeys(frozenset[Var]().union(*narrow), 0)
        forks: dict[Var, Node] = {}
        for eqn in joint.forward:
            if eqn.primitive is fork_p:
                node = forks[eqn.outvars[-1]] = eqn.params["node"]
                sizes[eqn.outvars[-1]] = held_bytes(token(node, self.inner[node]))
        prices = self._prices(policy)
        graph = _graph(joint, self.inner)
        saved = graph.cheapest([prices[id(e)] for e in graph.equations], sizes, policy.written)
        for v, node in forks.items():
            if v not in saved and prices[id(joint.producer[v])] < math.inf:
                self.rerun.add(node)
                self.inner[node] = tuple(plan(j) for j in node.joints)
        return saved

    def _prices(self, policy: MinCut) -> dict[int, float]:
        """What running each equation of the forward part again costs, by its `id`."""
        equations = self.joint.forward
        early = np.arange(len(equations)) < policy.at * len(equations)
        prices = _priced(self.joint).at(np.where(early, policy.price, policy.then))
        found = {id(eqn): float(n) for eqn, n in zip(equations, prices, strict=True)}
        for eqn in equations:
            node = eqn.params["node"] if eqn.primitive is fork_p else None
            if node is not None and (node.region or (node.loop and self.top)):
                found[id(eqn)] = math.inf
        return found

    def _nested(self, node: Node, top: bool) -> None:
        if isinstance(self.policy, Choice) and node in self.policy.inner:
            chosen = zip(node.joints, self.policy.inner[node], strict=True)
            self.inner[node] = tuple(plan(j, c) for j, c in chosen)
            return
        inside = self.policy
        opened = isinstance(inside, MinCut) and inside.free and free_region(node.eqn)
        if node.region and not opened:
            inside = of_region(check(node.policy), frame(node.eqn))
        whole = isinstance(inside, MinCut | Choice)
        if whole and node.eqn.primitive is while_p:
            inside = None  # what a step of it keeps lasts one step
        given = given_inputs(node) if isinstance(inside, MinCut) else None
        top = top and not node.region and not whole
        plans = tuple(plan(j, inside, top, given) for j in node.joints)
        stays = (
            self.policy == save_everything
            or self.whole
            or has_effects(node.eqn)
            or (node.loop and top)
            or _keeps(plans)
        )
        if not stays:
            self.rerun.add(node)
            if not node.region:
                plans = tuple(plan(j) for j in node.joints)
        self.inner[node] = plans

    def plan(self) -> Plan:
        """The Plan; what a whole program's decisions alone say is made once for equal ones."""
        if not self.whole:
            return self._walked(self.policy)
        sent, snapshots = frozenset[Any](), None
        if isinstance(self.policy, Choice):
            sent, snapshots = frozenset(self.policy.offloaded.items()), self.policy.snapshots
        key = "decided", self.cut, sent, snapshots, *self.inner.items(), self.top, self.given
        cache = self.joint.program.cache
        if key not in cache:
            cache[key] = self._walked(min_cut)
        return cache[key]

    def _walked(self, alike: Policy) -> Plan:
        joint = self.joint
        for eqn in joint.backward:
            for v in reads_of(eqn, self.inner):
                self._place(v)
            self.order.append(eqn)
        for v in joint.backward_outputs:
            if isinstance(v, Var):
                self._place(v)
        sent = self.policy.offloaded if isinstance(self.policy, Choice) else {}
        self.offloaded |= {v: sent[v] for v in joint.inputs if v in sent}
        return Plan(
            joint,
            tuple(self.kept),
            self.offloaded,
            tuple(self.order),
            frozenset(self.recomputed),
            tuple(v in self.reads for v in joint.inputs),
            self.inner,
            self.kept,
            functools.partial(plan, policy=alike, top=self.top, given=self.given),
            self.policy.snapshots if isinstance(self.policy, Choice) else None,
        )

    def _place(self, wanted: Var) -> None:
        """Make `wanted` available to the backward part: read, kept or run again."""
        todo: list[tuple[Any, bool]] = [(wanted, False)]
        while todo:
            item, ready = todo.pop()
            if ready:
                self.order.append(item)
                continue
            v: Var = item
            while v in self.joint.named:
                v = self.joint.named[v]
            if v in self.inputs:
                self.reads.add(v)
            eqn = self.joint.producer.get(v)
            if eqn is None or v in self.kept or id(eqn) in self.placed:
                continue
            if v not in self.joint.free and self._saved(v, eqn):
                continue
            chain = self._chain(eqn)
            between = {u for e in chain[1:] for u in e.outvars}
            for e in chain:
                self.placed.add(id(e))
                if v not in self.joint.free:
                    self.recomputed.add(id(e))
                todo.append((e, True))
                todo.extend((u, False) for u in reads_of(e, self.inner) if u not in between)

    def _chain(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """An equation, and, if all it does is name a value, those that make the value."""
        chain = [eqn]
        while chain[-1].primitive is name_p:
            (named,) = chain[-1].invars
            if not isinstance(named, Var) or named not in self.joint.producer:
                break
            chain.append(self.joint.producer[named])
        return chain

    def _saved(self, v: Var, eqn: JaxprEqn) -> bool:
        answer: bool | Offloadable = False
        reason = ""
        if eqn.primitive is fork_p and not self.whole:
            answer, reason = eqn.params["node"] not in self.rerun, "of a loop or call that is kept"
        elif has_effects(eqn):
            answer, reason = True, "has effects: never run again"
        elif self.policy == save_everything:
            answer, reason = True, "the backward pass reads it"
        elif self.whole:
            cut = [u for e in self._chain(eqn) for u in e.outvars if u in self.cut]
            sent = self.policy.offloaded if isinstance(self.policy, Choice) else {}
            nested = eqn.primitive is fork_p
            # What a loop keeps is sent by the loop, trip by trip: never as a whole.
            token = nested and v is eqn.outvars[-1]
            answer = next((sent[u] for u in cut if u in sent and not token), bool(cut))
            reason = "of a loop or call that is kept" if nested else "on the cheapest cut"
            if isinstance(answer, Offloadable):
                reason = f"idle for longer than its way to {answer.dst} and back"
        else:
            for e in self._chain(eqn):
                answer = ask(self.policy, e) if e.primitive is not fork_p else False
                if answer:
                    reason = f"{said(self.policy)} saves {e.params.get('name', e.primitive.name)}"
                    break
        if answer:
            self.kept[v] = reason
            if isinstance(answer, Offloadable):
                self.offloaded[v] = answer
        return bool(answer)


def _graph(joint: Joint, inner: dict[Node, tuple[Plan, ...]]) -> Graph:
    """The graph of a Joint, made once for what its nodes read."""
    key = "graph", *(node.reads(plans) for node, plans in inner.items())
    if key not in joint.program.cache:
        joint.program.cache[key] = Graph(joint, inner)
    return joint.program.cache[key]


def _priced(joint: Joint) -> Prices:
    """The prices of a Joint's forward part."""
    if "prices" not in joint.program.cache:
        joint.program.cache["prices"] = Prices(joint.forward)
    return joint.program.cache["prices"]


def given_inputs(node: Node) -> Mask | None:
    """Which inputs of a loop's program are not stored in each trip, whatever reads them."""
    if not node.loop:
        return None
    (joint,) = node.joints
    every = (True,) * len(joint.inputs)
    reads_all = Plan(joint, (), {}, (), frozenset(), every, {}, {}, plan)
    return tuple(not on for on in node.stacked([reads_all]))


def _keeps(plans: tuple[Plan, ...]) -> bool:
    """Whether plans keep a computed value, other than the state of loops."""
    return any(
        _keeps(p.inner[p.joint.producer[v].params["node"]])
        if p.joint.producer[v].primitive is fork_p
        else True
        for p in plans
        for v in p.kept
    )
