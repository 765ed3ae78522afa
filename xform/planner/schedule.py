"""Turn decisions into a Schedule: the saved values, and the backward pass in order.

A *Joint* is the forward and the backward pass of a program as one program. Each forward value that
the backward pass reads is an input of the program, or saved, or recomputed from its operands. The
*Schedule* holds the equations of the backward pass, with each recomputed equation just before its
first use. Constants (such as a causal mask) and views are recomputed, never saved. A view is
recomputed from the value that it is a view of, which may be saved.

Loops, branches and calls in a Joint are *nodes* (`fork_p` in the forward pass). The programs inside
them have Schedules of their own, which are made first. All values that are saved inside a node form
one value of the Joint, the node's token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xform._jax import JaxprEqn, Offloadable, Var
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p
from xform.planner.plan.decision import Decision
from xform.policies import Policy, answer_for, policy_name, save_everything
from xform.registry.repeatable import repeatable
from xform.registry.table import traits

# Decides about one value. Takes the value and its chain of equations: first each equation that
# names it (`checkpoint_name`), last the one that computes it. Returns whether the value is saved
# (or the memories that it is offloaded between), and the reason.
Answer = Callable[[Var, Sequence[JaxprEqn]], tuple[bool | Offloadable, str]]
# The Schedules of the programs inside each node of a Joint.
Inner = dict[Node, tuple[Schedule, ...]]
# Reasons for saving a value, as users see them.
_NESTED = "its loop or call is saved"
_RUNS_ONCE = "a second run could give another value"


def schedule_by_policy(
    joint: Joint,
    policy: Policy,
    recomputed_nodes: Collection[Node],
    inner: Inner,
    plan_other: Callable[[Joint], Schedule],
) -> Schedule:
    """Return the Schedule of a Joint under a policy in JAX's protocol.

    Args:
      joint: the forward and the backward pass.
      policy: decides about one value at a time.
      recomputed_nodes: loops and calls that are recomputed as a whole.
      inner: the Schedules of the programs inside the Joint's nodes.
      plan_other: plans the Joint of a program that is traced only after this Joint was planned.

    Cost: linear in the number of equations.
    """
    per_value = Decision(frozenset(), {}, decided_per_value=True)
    answer = _answer_of_policy(policy, recomputed_nodes)
    return _build_schedule(joint, answer, per_value, inner, plan_other)


def schedule_by_decision(
    joint: Joint, decision: Decision, inner: Inner, plan_other: Callable[[Joint], Schedule]
) -> Schedule:
    """Return the Schedule of a Joint that saves and offloads the values of a Decision.

    Args:
      joint: the forward and the backward pass.
      decision: the saved and offloaded values.
      inner: the Schedules of the programs inside the Joint's nodes.
      plan_other: plans the Joint of a program that is traced only after this Joint was planned.

    Cost: linear in the number of equations.
    """
    return _build_schedule(joint, _answer_of_decision(decision), decision, inner, plan_other)


def _build_schedule(joint: Joint, answer: Answer, decision: Decision, inner: Inner,
                    plan_other: Callable[[Joint], Schedule]) -> Schedule:  # fmt: skip
    """Return the Schedule that saves the values that `answer` chooses.

    `decision` says which inputs are offloaded and how many states a loop stores.
    """
    builder = _ScheduleBuilder(joint, answer, inner)
    builder.provide_all()
    offloaded = decision.offloaded
    return Schedule(
        joint,
        tuple(builder.saved),
        builder.offloaded | {v: offloaded[v] for v in joint.inputs if v in offloaded},
        tuple(builder.order),
        frozenset(builder.recomputed),
        tuple(v in builder.reads for v in joint.inputs),
        inner,
        builder.saved,
        plan_other,
        decision.snapshots,
        decision.decided_per_value,
    )


def _answer_of_policy(policy: Policy, recomputed_nodes: Collection[Node]) -> Answer:
    """Return a function that asks a policy in JAX's protocol about one value."""

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        if chain[0].primitive is fork_p:
            return chain[0].params["node"] not in recomputed_nodes, _NESTED
        if not all(map(repeatable, chain)):
            return True, _RUNS_ONCE
        if policy == save_everything:
            return True, "the backward pass reads it"
        for eqn in chain:
            answered = answer_for(policy, eqn) if eqn.primitive is not fork_p else False
            if answered:
                name = eqn.params.get("name", eqn.primitive.name)
                return answered, f"{policy_name(policy)} saves {name}"
        return False, ""

    return answer


def _answer_of_decision(decision: Decision) -> Answer:
    """Return a function that looks a value up in a Decision for a whole Joint."""

    def answer(v: Var, chain: Sequence[JaxprEqn]) -> tuple[bool | Offloadable, str]:
        eqn = chain[0]
        is_node = eqn.primitive is fork_p
        if not all(map(repeatable, chain)):
            return True, _NESTED if is_node else _RUNS_ONCE
        # A loop offloads its saved values itself, in each iteration; its token is never offloaded.
        is_token = is_node and v is eqn.outvars[-1]
        saved = [u for e in chain for u in e.outvars if u in decision.saved]
        memories = (decision.offloaded[u] for u in saved if u in decision.offloaded)
        memory = None if is_token else next(memories, None)
        if memory is not None:
            return memory, f"idle for longer than the transfer to {memory.dst} and back"
        reason = "the policy saves it" if decision.decided_per_value else "on the cheapest cut"
        return bool(saved), _NESTED if is_node else reason

    return answer


class _ScheduleBuilder:
    """Builds a Schedule in one walk over the backward pass of a Joint.

    Attributes:
      saved: the saved values, each with its reason.
      offloaded: the saved values that are offloaded, with the memories.
      order: the equations of the backward pass so far, recomputed equations included.
      placed: `id`s of the forward equations in `order`.
      recomputed: `id`s of the forward equations in `order` that are neither constants nor views.
      reads: the inputs of the program that are read.
    """

    def __init__(self, joint: Joint, answer: Answer, inner: Inner):
        self.joint, self.answer, self.inner = joint, answer, inner
        self.inputs = set(joint.inputs)
        self.saved: dict[Var, str] = {}
        self.offloaded: dict[Var, Offloadable] = {}
        self.order: list[JaxprEqn] = []
        self.placed: set[int] = set()
        self.recomputed: set[int] = set()
        self.reads: set[Var] = set()

    def provide_all(self) -> None:
        """Walk over the backward pass and provide all values that it reads or returns."""
        for eqn in self.joint.backward:
            for v in reads_of(eqn, self.inner):
                self._provide(v)
            self.order.append(eqn)
        for v in self.joint.backward_outputs:
            if isinstance(v, Var):
                self._provide(v)

    def _provide(self, value: Var) -> None:
        """Make a value available to the backward pass: as an input, saved, or recomputed."""
        # A stack of values to provide and of equations to place. When an equation is popped, all
        # its operands have been provided.
        todo: list[Var | JaxprEqn] = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, Var):
                todo += self._steps_to_provide(item)
            else:
                self.order.append(item)

    def _steps_to_provide(self, v: Var) -> list[Var | JaxprEqn]:
        """Return the equations that recompute a value, each followed by its operands.

        The result goes on the stack of `_provide`. It is empty if the value is an input, saved, or
        already recomputed.
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
        within_chain = {u for e in chain[1:] for u in e.outvars}
        steps: list[Var | JaxprEqn] = []
        for e in chain:
            self.placed.add(id(e))
            if not always_recomputed:
                self.recomputed.add(id(e))
            steps += [e, *(u for u in reads_of(e, self.inner) if u not in within_chain)]
        return steps

    def _chain(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Return the equation. If it only names a value, add the equation that makes that value.

        That equation may only name a value too. The last equation of the chain computes the value.
        """
        chain = [eqn]
        while traits(chain[-1].primitive).label:
            (named,) = chain[-1].invars
            if not isinstance(named, Var) or named not in self.joint.producer:
                break
            chain.append(self.joint.producer[named])
        return chain

    def _decide_to_save(self, v: Var, chain: Sequence[JaxprEqn]) -> bool:
        """Return whether a value is saved; if so, record the reason and the memory."""
        memory, reason = self.answer(v, chain)
        if memory:
            self.saved[v] = reason
            if isinstance(memory, Offloadable):
                self.offloaded[v] = memory
        return bool(memory)
