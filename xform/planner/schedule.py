"""From decisions to a Plan: the order of the backward part, with what it runs again.

The backward part is walked in order. A value that it reads is taken from the program's inputs, kept
if that was decided, or made again from what it was made from; equations that are run again are
placed just before their first use. Constants (a causal mask) and views are never kept: what they
are made from is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from xform._jax import JaxprEqn, Offloadable, Var, has_effects, name_p
from xform.interpret.joint import Joint, Plan, reads_of
from xform.interpret.node import Node, fork_p
from xform.planner.plan.decision import Decision
from xform.policies import Policy, ask, said, save_everything

# Whether a value is kept, in which memory, and why.
Answer = tuple[bool | Offloadable, str]
_NESTED = "of a loop or call that is kept"
_EFFECTS = "has effects: never run again"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A policy that is asked for one value after the other.

    Attributes:
      policy: what is asked.
      again: the loops and calls that keep nothing inside, and are run again as a whole.
    """

    policy: Policy
    again: frozenset[Node]
    offloaded: ClassVar[Mapping[Var, Offloadable]] = {}
    snapshots: ClassVar[int | None] = None
    asked: ClassVar[bool] = True

    def answer(self, v: Var, chain: Sequence[JaxprEqn]) -> Answer:
        """Whether a value is kept that a chain of equations makes and names."""
        if chain[0].primitive is fork_p:
            return chain[0].params["node"] not in self.again, _NESTED
        if has_effects(chain[0]):
            return True, _EFFECTS
        if self.policy == save_everything:
            return True, "the backward pass reads it"
        for eqn in chain:
            kept = ask(self.policy, eqn) if eqn.primitive is not fork_p else False
            if kept:
                name = eqn.params.get("name", eqn.primitive.name)
                return kept, f"{said(self.policy)} saves {name}"
        return False, ""


def _answer(decided: Decision, v: Var, chain: Sequence[JaxprEqn]) -> Answer:
    """Whether a value is kept that a chain of equations makes and names, as was decided."""
    eqn = chain[0]
    if has_effects(eqn):
        return True, _EFFECTS
    nested = eqn.primitive is fork_p
    # A loop sends its saved values itself, trip by trip: never its token.
    token = nested and v is eqn.outvars[-1]
    saved = [u for e in chain for u in e.outvars if u in decided.saved]
    sent = (decided.offloaded[u] for u in saved if u in decided.offloaded)
    where = None if token else next(sent, None)
    if where is not None:
        return where, f"idle for longer than its way to {where.dst} and back"
    return bool(saved), _NESTED if nested else "on the cheapest cut"


def scheduled(joint: Joint, decided: Decision | Asked, inner: dict[Node, tuple[Plan, ...]],
              alike: Callable[[Joint], Plan]) -> Plan:  # fmt: skip
    """The Plan of a Joint under what was decided for it, with the Plans of its nodes' programs.

    `alike` makes the Plan of a program that is met after planning. Linear in equations.
    """
    return _Walk(joint, decided, inner).plan(alike)


class _Walk:
    """One walk over the backward part of a Joint.

    Attributes:
      kept: the values that are kept, each with its reason.
      order: the backward part so far, with what is run again.
      placed: `id`s of the forward equations in that order.
      recomputed: those of them that make a value which could have been kept.
      reads: the program's inputs that are read.
    """

    def __init__(
        self, joint: Joint, decided: Decision | Asked, inner: dict[Node, tuple[Plan, ...]]
    ):
        self.joint, self.decided, self.inner = joint, decided, inner
        self.inputs = set(joint.inputs)
        self.kept: dict[Var, str] = {}
        self.offloaded: dict[Var, Offloadable] = {}
        self.order: list[JaxprEqn] = []
        self.placed: set[int] = set()
        self.recomputed: set[int] = set()
        self.reads: set[Var] = set()

    def plan(self, alike: Callable[[Joint], Plan]) -> Plan:
        joint = self.joint
        for eqn in joint.backward:
            for v in reads_of(eqn, self.inner):
                self._provide(v)
            self.order.append(eqn)
        for v in joint.backward_outputs:
            if isinstance(v, Var):
                self._provide(v)
        sent = self.decided.offloaded
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
            alike,
            self.decided.snapshots,
            self.decided.asked,
        )

    def _provide(self, wanted: Var) -> None:
        """Make a value available to the backward part: read, kept or run again.

        What is still to do is a stack: values to provide, and equations of which all that they
        read has been provided by the time they are met.
        """
        todo: list[Var | JaxprEqn] = [wanted]
        while todo:
            item = todo.pop()
            if isinstance(item, Var):
                todo += self._to_run(item)
            else:
                self.order.append(item)

    def _to_run(self, v: Var) -> list[Var | JaxprEqn]:
        """The equations that make a value again, each before what it reads; none if it is there."""
        while v in self.joint.named:
            v = self.joint.named[v]
        if v in self.inputs:
            self.reads.add(v)
        eqn = self.joint.producer.get(v)
        if eqn is None or v in self.kept or id(eqn) in self.placed:
            return []
        free, chain = v in self.joint.free, self._chain(eqn)
        if not free and self._keeps(v, chain):
            return []
        between = {u for e in chain[1:] for u in e.outvars}
        todo: list[Var | JaxprEqn] = []
        for e in chain:
            self.placed.add(id(e))
            if not free:
                self.recomputed.add(id(e))
            todo += [e, *(u for u in reads_of(e, self.inner) if u not in between)]
        return todo

    def _chain(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """An equation, and, if all it does is name a value, those that make the value."""
        chain = [eqn]
        while chain[-1].primitive is name_p:
            (named,) = chain[-1].invars
            if not isinstance(named, Var) or named not in self.joint.producer:
                break
            chain.append(self.joint.producer[named])
        return chain

    def _keeps(self, v: Var, chain: Sequence[JaxprEqn]) -> bool:
        """Whether a value is kept, which is noted with its reason and its memory."""
        decided = self.decided
        where, reason = (
            decided.answer(v, chain) if isinstance(decided, Asked) else _answer(decided, v, chain)
        )
        if where:
            self.kept[v] = reason
            if isinstance(where, Offloadable):
                self.offloaded[v] = where
        return bool(where)
