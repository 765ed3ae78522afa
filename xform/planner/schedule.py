"""Turn decisions into a Schedule: the order of the backward part, with the recomputed equations.

The backward part is walked in order. Each value that it reads is an input of the program, a saved
value, or is recomputed from its operands. Recomputed equations are placed just before their first
use. Constants (such as a causal mask) and views are never saved; their sources are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xform._jax import JaxprEqn, Offloadable, Var, has_effects, name_p
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p
from xform.planner.plan.decision import Decision
from xform.policies import Policy, answer_for, policy_name, save_everything

# Takes a value and its chain of equations: the one that names it, if any, and the one that computes
# it. Returns whether the value is saved, or the memories it is offloaded between, and the reason.
Answers = Callable[[Var, Sequence[JaxprEqn]], tuple[bool | Offloadable, str]]
# The Schedules of the programs of a Joint's nodes.
Inner = dict[Node, tuple[Schedule, ...]]
_NESTED = "its loop or call is saved"
_EFFECTS = "has effects: never recomputed"


def schedule_by_policy(
    joint: Joint,
    policy: Policy,
    recomputed_nodes: Collection[Node],
    inner: Inner,
    plan_other: Callable[[Joint], Schedule],
) -> Schedule:
    """Return the Schedule of a Joint under a policy in JAX's protocol.

    The loops and calls in `recomputed_nodes` save nothing inside and are recomputed as a whole.
    `inner` has the Schedules of the nodes' programs. `plan_other` plans programs that appear only
    after planning.

    Cost: linear in the number of equations.
    """
    per_value = Decision(frozenset(), {}, decided_per_value=True)
    return _build_schedule(
        joint, _answers_of_policy(policy, recomputed_nodes), per_value, inner, plan_other
    )


def schedule_by_decision(
    joint: Joint, decision: Decision, inner: Inner, plan_other: Callable[[Joint], Schedule]
) -> Schedule:
    """Return the Schedule of a Joint under a Decision; see `schedule_by_policy`."""
    return _build_schedule(joint, _answers_of_decision(decision), decision, inner, plan_other)


def _build_schedule(joint: Joint, answer: Answers, decision: Decision, inner: Inner,
                    plan_other: Callable[[Joint], Schedule]) -> Schedule:  # fmt: skip
    """Return the Schedule in which `answer` decides which values are saved.

    `decision` says which inputs are offloaded and how many states a loop stores.
    """
    builder = _ScheduleBuilder(joint, answer, inner)
    builder.provide_all()
    sent = decision.offloaded
    return Schedule(
        joint,
        tuple(builder.saved),
        builder.offloaded | {v: sent[v] for v in joint.inputs if v in sent},
        tuple(builder.order),
        frozenset(builder.recomputed),
        tuple(v in builder.reads for v in joint.inputs),
        inner,
        builder.saved,
        plan_other,
        decision.snapshots,
        decision.decided_per_value,
    )


def _answers_of_policy(policy: Policy, recomputed_nodes: Collection[Node]) -> Answers:
    """The answers of a policy in JAX's protocol, which decides about one value at a time."""

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        if chain[0].primitive is fork_p:
            return chain[0].params["node"] not in recomputed_nodes, _NESTED
        if has_effects(chain[0]):
            return True, _EFFECTS
        if policy == save_everything:
            return True, "the backward pass reads it"
        for eqn in chain:
            answered = answer_for(policy, eqn) if eqn.primitive is not fork_p else False
            if answered:
                name = eqn.params.get("name", eqn.primitive.name)
                return answered, f"{policy_name(policy)} saves {name}"
        return False, ""

    return answer


def _answers_of_decision(decision: Decision) -> Answers:
    """The answers of a Decision for a whole Joint."""

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        eqn = chain[0]
        if has_effects(eqn):
            return True, _EFFECTS
        nested = eqn.primitive is fork_p
        # A loop offloads its saved values itself, in each iteration; its token is never offloaded.
        token = nested and v is eqn.outvars[-1]
        saved = [u for e in chain for u in e.outvars if u in decision.saved]
        memories = (decision.offloaded[u] for u in saved if u in decision.offloaded)
        memory = None if token else next(memories, None)
        if memory is not None:
            return memory, f"idle for longer than the transfer to {memory.dst} and back"
        return bool(saved), _NESTED if nested else "on the cheapest cut"

    return answer


class _ScheduleBuilder:
    """Builds a Schedule in one walk over the backward part of a Joint.

    Attributes:
      saved: the saved values, each with its reason.
      order: the equations of the backward part so far, recomputed equations included.
      placed: `id`s of the forward equations in `order`.
      recomputed: `id`s of the forward equations in `order` that are neither constants nor views.
      reads: the inputs of the program that are read.
    """

    def __init__(self, joint: Joint, answer: Answers, inner: Inner):
        self.joint, self.answer, self.inner = joint, answer, inner
        self.inputs = set(joint.inputs)
        self.saved: dict[Var, str] = {}
        self.offloaded: dict[Var, Offloadable] = {}
        self.order: list[JaxprEqn] = []
        self.placed: set[int] = set()
        self.recomputed: set[int] = set()
        self.reads: set[Var] = set()

    def provide_all(self) -> None:
        """Walk over the backward part and provide all values that it reads or returns."""
        for eqn in self.joint.backward:
            for v in reads_of(eqn, self.inner):
                self._provide(v)
            self.order.append(eqn)
        for v in self.joint.backward_outputs:
            if isinstance(v, Var):
                self._provide(v)

    def _provide(self, wanted: Var) -> None:
        """Make a value available to the backward part: as an input, saved, or recomputed.

        `todo` is a stack of values to provide and of equations to place. When an equation is
        popped, all its operands have been provided.
        """
        todo: list[Var | JaxprEqn] = [wanted]
        while todo:
            item = todo.pop()
            if isinstance(item, Var):
                todo += self._recompute(item)
            else:
                self.order.append(item)

    def _recompute(self, v: Var) -> list[Var | JaxprEqn]:
        """The equations that recompute a value, each followed by its operands, for the stack.

        Empty if the value is an input, saved, or already recomputed.
        """
        while v in self.joint.named_copy:
            v = self.joint.named_copy[v]
        if v in self.inputs:
            self.reads.add(v)
        eqn = self.joint.producer.get(v)
        if eqn is None or v in self.saved or id(eqn) in self.placed:
            return []
        always_recomputed, chain = v in self.joint.always_recomputed, self._chain(eqn)
        if not always_recomputed and self._decide_to_save(v, chain):
            return []
        internal = {u for e in chain[1:] for u in e.outvars}
        todo: list[Var | JaxprEqn] = []
        for e in chain:
            self.placed.add(id(e))
            if not always_recomputed:
                self.recomputed.add(id(e))
            todo += [e, *(u for u in reads_of(e, self.inner) if u not in internal)]
        return todo

    def _chain(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equation and, if it only names a value, the equations that compute that value."""
        chain = [eqn]
        while chain[-1].primitive is name_p:
            (named,) = chain[-1].invars
            if not isinstance(named, Var) or named not in self.joint.producer:
                break
            chain.append(self.joint.producer[named])
        return chain

    def _decide_to_save(self, v: Var, chain: Sequence[JaxprEqn]) -> bool:
        """Whether a value is saved; if so, record the reason and the memory."""
        memory, reason = self.answer(v, chain)
        if memory:
            self.saved[v] = reason
            if isinstance(memory, Offloadable):
                self.offloaded[v] = memory
        return bool(memory)
