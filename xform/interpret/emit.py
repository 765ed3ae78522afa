"""Run the parts of a Joint under a Plan, in the current trace.

Both parts carry the name scopes of the user's equations; what the backward part does is in one of
the scopes below besides, so that profiles and `xform.memory` can tell the parts of a compiled
program apart. What makes a value that is saved is in a scope that says why it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from xform._jax import JaxprEqn, Var, name_p, staging
from xform.arithmetic import Value
from xform.interpret.absent import narrowed
from xform.interpret.barrier import Where, barrier
from xform.interpret.joint import Plan, reads_of
from xform.interpret.materialize import materialize
from xform.interpret.node import Node, fork_p, gather, join_p, spread, there
from xform.interpret.shared import shared
from xform.interpret.wait import Waits, waits
from xform.interpret.written import written
from xform.ir import Atom, Mask, bind, read, write
from xform.passes.dce import live
from xform.source import name_stack, source

BACKWARD, TANGENT, RECOMPUTE = "xform(backward)", "xform(tangent)", "xform(recompute)"
SAVED = "xform(saved: {})"


def values(
    plan: Plan,
    wanted: Sequence[Atom],
    env: dict[Var, Value],
    effects: bool = True,
    sent: dict[Var, Value] | None = None,
    materialized: Mapping[Var, Where] | None = None,
) -> list[Value]:
    """Forward values of a Joint, from those in `env` (its inputs, and any others known).

    What the plan offloads is put into `sent`, moved as soon as it is made; what is `materialized`
    is written to memory, on the backends that are said.
    """
    equations = live(plan.joint.forward, wanted, env, effects)
    env = {**dict(plan.joint.program.consts), **env}
    _Run(plan, env, sent, materialized).all(equations, wanted)
    return [read(env, v) for v in wanted]


def recompute() -> AbstractContextManager[Any]:
    """The scope of forward equations that run once more, for the backward part."""
    return jax.named_scope(RECOMPUTE)


def forward(plan: Plan, args: Sequence[Value], used: Mask | None = None):
    """Outputs of the forward part (None where not `used`), and the kept values of the plan."""
    joint = plan.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    sent: dict[Var, Value] = {}
    inputs = dict(zip(joint.inputs, args, strict=True))
    materialized = written(plan) if staging() else {}
    out = values(plan, [*outputs, *plan.kept], inputs, sent=sent, materialized=materialized)
    kept = [sent.get(v, x) for v, x in zip(plan.kept, out[len(outputs) :], strict=True)]
    return spread(out[: len(outputs)], used), kept


def backward(plan: Plan, kept: Sequence[Value], args: Sequence[Value], seeds: Sequence[Value],
             together: bool, whole: bool = False) -> list[Value]:  # fmt: skip
    """Results of the backward part, from kept values, inputs (those it reads) and seeds.

    `together` says that the forward part is in the same computation as this one, so that a compiler
    might merge a recompute with it; `whole`, that this is a whole function, or the body of a loop,
    and not a region of one: then each recompute waits for the cotangent that needs it, not just for
    the first, and so it is late in a loop's body as well. A seed that is None is absent, and so is
    a result that depends on absent seeds alone.
    """
    given = there(seeds)
    if not all(given):
        small, moved = narrowed(plan, given)
        results = backward(small, kept, args, gather(seeds, given), together, whole)
        return spread(results, moved)
    joint = plan.joint
    env = _Kept(plan, kept)
    env.update(joint.program.consts)
    write(env, joint.inputs, args)
    write(env, joint.seeds, seeds)
    places = waits(plan, whole, together) if together or whole else {}
    with jax.named_scope(TANGENT if joint.push else BACKWARD):
        materialized = written(plan) if places and staging() else {}
        if together and whole and staging():
            materialized = shared(plan) | materialized
        run = _BackwardRun(plan, env, plan.inner if together else (), materialized)
        run.all(plan.order, joint.backward_outputs, places)
    return [read(env, v) for v in joint.backward_outputs]


class _Kept(dict[Var, Value]):
    """An environment with the kept values; what is offloaded comes back where it is first read."""

    def __init__(self, plan: Plan, kept: Sequence[Value]):
        self.plan, self.kept = plan, dict(zip(plan.kept, kept, strict=True))

    def __missing__(self, v: Var) -> Value:
        if v in self.kept:
            self[v] = send(self.plan, v, self.kept[v], back=True)
        else:
            self[v] = self[self.plan.joint.named[v]]
        return self[v]


def send(plan: Plan, v: Var, x: Value, back: bool = False) -> Value:
    """A kept value, moved to the memory where it waits (or `back`), if the plan offloads it."""
    if v not in plan.offloaded:
        return x
    move = plan.offloaded[v]
    kind = move.src if back else move.dst
    space = jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host
    return jax.device_put(x, space)


class _Run:
    """Equations of the forward part, run in order in the current trace; what they make is in `env`.

    `sent` gets what the plan offloads, moved as soon as it is made; what is `materialized` is
    written to memory.
    """

    def __init__(
        self,
        plan: Plan,
        env: dict[Var, Value],
        sent: dict[Var, Value] | None = None,
        materialized: Mapping[Var, Where] | None = None,
    ) -> None:
        self.plan, self.env, self.sent = plan, env, sent
        self.materialized = materialized or {}
        self.scope = name_stack()
        self.forked: set[Node] = set()  # the nodes whose forward part is in this computation
        self.needed: set[Var] = set()
        self.saved = _reasons(plan)

    def all(
        self, equations: Sequence[JaxprEqn], outputs: Iterable[Value], places: Waits | None = None
    ) -> None:
        """Run equations; at each of `places` values are held back until cotangents are there."""
        places = places or {}
        self.needed.update(v for v in outputs if isinstance(v, Var))
        self.needed.update(v for eqn in equations for v in reads_of(eqn, self.plan.inner))
        drop = {} if staging() else _last_reads(equations, self.plan, outputs, places)
        for i, eqn in enumerate(equations):
            for wait in places.get(i, ()):
                held = barrier(self.read(wait.saved), self.read(wait.seeds), wait.where)
                write(self.env, wait.saved, held)
            write(self.env, eqn.outvars, self.one(eqn))
            for v in eqn.outvars:
                if v in self.materialized:
                    with source(eqn, self.scope_of(eqn)):
                        self.env[v] = materialize(self.env[v], self.materialized[v])
            if self.sent is not None:
                moved = [v for v in eqn.outvars if v in self.plan.offloaded]
                self.sent.update((v, send(self.plan, v, self.env[v])) for v in moved)
            for v in drop.get(i, ()):
                self.env.pop(v, None)

    def one(self, eqn: JaxprEqn) -> list[Value]:
        """What an equation makes."""
        if eqn.primitive is fork_p:
            return self.fork(eqn)
        if eqn.primitive is join_p:
            return self.join(eqn)
        return bind(eqn, self.read(eqn.invars), self.scope_of(eqn))

    def fork(self, eqn: JaxprEqn) -> list[Value]:
        """The outputs of a node's forward part that are needed, and its token."""
        node = eqn.params["node"]
        self.forked.add(node)
        plans, xs = self.plan.inner[node], self.read(eqn.invars)
        *used, token = (v in self.needed for v in eqn.outvars)
        with source(eqn, self.scope_of(eqn)), eqn.ctx.manager:
            if not token:
                return [*node.outputs(plans, xs, tuple(used)), None]
            outs, value = node.forward(plans, xs, tuple(used))
        return [*outs, value]

    def join(self, eqn: JaxprEqn) -> list[Value]:
        """The results of a node's backward part, of the inputs that it reads."""
        node = eqn.params["node"]
        plans, n = self.plan.inner[node], len(node.eqn.invars)
        token, inputs, seeds = eqn.invars[0], eqn.invars[1 : 1 + n], eqn.invars[1 + n :]
        pairs = zip(inputs, node.reads(plans), strict=True)
        xs = [read(self.env, v) if on else None for v, on in pairs]
        given = eqn.params["given"]
        token, seeds = read(self.env, token), spread(self.read(seeds), given)
        with source(eqn, self.scope_of(eqn)), eqn.ctx.manager:
            results = node.backward(plans, token, xs, seeds, node in self.forked)
        return gather(results, node.gives(given))

    def read(self, atoms: Iterable[Atom]) -> list[Value]:
        """The values of variables and literals."""
        return [read(self.env, v) for v in atoms]

    def scope_of(self, eqn: JaxprEqn) -> Any:
        """The scope to run an equation in: one that says why what it makes is saved."""
        reason = next((self.saved[v] for v in eqn.outvars if v in self.saved), "")
        if not reason or eqn.primitive is fork_p:
            return self.scope
        with jax.named_scope(SAVED.format(reason)):
            return name_stack()


class _BackwardRun(_Run):
    """The same for the backward part, in which forward equations are recomputes.

    `forked` are the nodes of which the forward part is in this computation.
    """

    def __init__(self, plan: Plan, env: dict[Var, Value], forked: Iterable[Node],
                 materialized: Mapping[Var, Where]) -> None:  # fmt: skip
        super().__init__(plan, env, materialized=materialized)
        self.forked.update(forked)
        with recompute():
            self.recompute_scope = name_stack()

    def scope_of(self, eqn: JaxprEqn) -> Any:
        return self.scope if id(eqn) in self.plan.joint.backward_ids else self.recompute_scope


def _last_reads(equations: Sequence[JaxprEqn], plan: Plan, outputs: Iterable[Value], places: Waits
                ) -> dict[int, list[Var]]:  # fmt: skip
    """For each place, what nothing reads after it: where operations run one by one, it is freed."""
    named = plan.joint.named
    seen = {v for v in outputs if isinstance(v, Var)}
    seen.update(named[v] for v in seen & named.keys())
    drop: dict[int, list[Var]] = {}
    for i, eqn in reversed([*enumerate(equations)]):
        waiting = [v for wait in places.get(i, ()) for v in (*wait.seeds, *wait.saved)]
        for v in (*eqn.outvars, *reads_of(eqn, plan.inner), *waiting):
            for x in (v, named.get(v, v)):
                if x not in seen:
                    seen.add(x)
                    drop.setdefault(i, []).append(x)
    return drop


def _reasons(plan: Plan) -> dict[Var, str]:
    """Why each value is saved that is; one that is saved under a name is the value it names."""
    reasons: dict[Var, str] = {}
    for kept in plan.kept:
        v, reason = kept, plan.why.get(kept, "")
        while isinstance(v, Var) and v not in reasons:
            reasons[v] = reason
            eqn = plan.joint.producer.get(v)
            if eqn is not None and eqn.primitive is name_p:
                (v,) = eqn.invars
    return reasons


def once(plan: Plan, wanted: Sequence[Var], env: dict[Var, Value]) -> dict[Var, Value]:
    """Some forward values by variable, where they were made."""
    return dict(zip(wanted, values(plan, wanted, env, effects=False), strict=True))
