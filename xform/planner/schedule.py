"""From decisions to a Schedule: the order of the backward part, with what it runs again.

The backward part is walked in order. A value that it reads is taken from the program's inputs, kept
if that was decided, or made again from what it was made from; equations that are run again are
placed just before their first use. Constants (a causal mask) and views are never kept: what they
are made from is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xform._jax import JaxprEqn, Offloadable, Var, has_effects, name_p
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p
from xform.planner.plan.decision import Decision
from xform.policies import Policy, ask, said, save_everything

# Says whether a value is kept that a chain of equations makes and names, or in which memory it
# waits, and why.
Answers = Callable[[Var, Sequence[JaxprEqn]], tuple[bool | Offloadable, str]]
_NESTED = "of a loop or call that is kept"
_EFFECTS = "has effects: never run again"


def by_policy(policy: Policy, again: Collection[Node]) -> Answers:
    """The answers of a policy in JAX's protocol, which is asked for one value after the other.

    The loops and calls in `again` keep nothing inside, and are run again as a whole.
    """

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        if chain[0].primitive is fork_p:
            return chain[0].params["node"] not in again, _NESTED
        if has_effects(chain[0]):
            return True, _EFFECTS
        if policy == save_everything:
            return True, "the backward pass reads it"
        for eqn in chain:
            kept = ask(policy, eqn) if eqn.primitive is not fork_p else False
            if kept:
                name = eqn.params.get("name", eqn.primitive.name)
                return kept, f"{said(policy)} saves {name}"
        return False, ""

    return answer


def by_decision(decision: Decision) -> Answers:
    """The answers of a decision for a whole Joint."""

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        eqn = chain[0]
        if has_effects(eqn):
            return True, _EFFECTS
        nested = eqn.primitive is fork_p
        # A loop sends its saved values itself, trip by trip: never its token.
        token = nested and v is eqn.outvars[-1]
        saved = [u for e in chain for u in e.outvars if u in decision.saved]
        sent = (decision.offloaded[u] for u in saved if u in decision.offloaded)
        where = None if token else next(sent, None)
        if where is not None:
            return where, f"idle for longer than its way to {where.dst} and back"
        return bool(saved), _NESTED if nested else "on the cheapest cut"

    return answer


def scheduled(joint: Joint, keeps: Answers, inner: dict[Node, tuple[Schedule, ...]],
              alike: Callable[[Joint], Schedule], decision: Decision | None = None
              ) -> Schedule:  # fmt: skip
    """The Schedule of a Joint, with the Schedules of its nodes' programs. Linear in equations.

    `keeps` says which values are kept. The `decision`, if there is one, says which inputs wait in
    another memory and how often a loop's state is stored. `alike` makes the Schedule of a program
    that is met after planning.
    """
    walk = _Walk(joint, keeps, inner)
    walk.provide_all()
    sent = decision.offloaded if decision else {}
    return Schedule(
        joint,
        tuple(walk.kept),
        walk.offloaded | {v: sent[v] for v in joint.inputs if v in sent},
        tuple(walk.order),
        frozenset(walk.recomputed),
        tuple(v in walk.reads for v in joint.inputs),
        inner,
        walk.kept,
        alike,
        decision.snapshots if decision else None,
        decision.asked if decision else True,
    )


class _Walk:
    """One walk over the backward part of a Joint.

    Attributes:
      kept: the values that are kept, each with its reason.
      order: the backward part so far, with what is run again.
      placed: `id`s of the forward equations in that order.
      recomputed: those of them that make a value which could have been kept.
      reads: the program's inputs that are read.
    """

    def __init__(self, joint: Joint, keeps: Answers, inner: dict[Node, tuple[Schedule, ...]]):
        self.joint, self.keeps, self.inner = joint, keeps, inner
        self.inputs = set(joint.inputs)
        self.kept: dict[Var, str] = {}
        self.offloaded: dict[Var, Offloadable] = {}
        self.order: list[JaxprEqn] = []
        self.placed: set[int] = set()
        self.recomputed: set[int] = set()
        self.reads: set[Var] = set()

    def provide_all(self) -> None:
        """Walk over the backward part: provide all that it reads, and all that it returns."""
        for eqn in self.joint.backward:
            for v in reads_of(eqn, self.inner):
                self._provide(v)
            self.order.append(eqn)
        for v in self.joint.backward_outputs:
            if isinstance(v, Var):
                self._provide(v)

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
        where, reason = self.keeps(v, chain)
        if where:
            self.kept[v] = reason
            if isinstance(where, Offloadable):
                self.offloaded[v] = where
        return bool(where)
