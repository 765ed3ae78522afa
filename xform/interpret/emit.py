"""Run the parts of a Joint under a Plan, in the current trace.

Both parts carry the name scopes of the user's equations; what the second part does is in one of
the scopes below besides, so that profiles and `xform.memory` can tell the parts of a compiled
program apart. What makes a value that is saved is in a scope that says why it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from xform._jax import JaxprEqn, Var, name_p, staging
from xform.arithmetic import Value
from xform.interpret.joint import Plan, reads_of
from xform.interpret.node import fork_p, gather, join_p, spread
from xform.interpret.tie import tie
from xform.interpret.wait import Waits, waits
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
) -> list[Value]:
    """Forward values of a Joint, from those in `env` (its inputs, and any others known).

    What the plan offloads is put into `sent`, moved as soon as it is made.
    """
    equations = live(plan.joint.first, wanted, env, effects)
    env = {**dict(plan.joint.program.consts), **env}
    _run(equations, env, plan, wanted, sent=sent)
    return [read(env, v) for v in wanted]


def again() -> AbstractContextManager[Any]:
    """The scope of forward equations that run once more, for the second part."""
    return jax.named_scope(RECOMPUTE)


def forward(plan: Plan, args: Sequence[Value], used: Mask | None = None):
    """Outputs of the forward part (None where not `used`), and the kept values of the plan."""
    joint = plan.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    sent: dict[Var, Value] = {}
    inputs = dict(zip(joint.inputs, args, strict=True))
    out = values(plan, [*outputs, *plan.kept], inputs, sent=sent)
    kept = [sent.get(v, x) for v, x in zip(plan.kept, out[len(outputs) :], strict=True)]
    return spread(out[: len(outputs)], used), kept


def second(plan: Plan, kept: Sequence[Value], args: Sequence[Value], seconds: Sequence[Value],
           tied: bool, whole: bool = False) -> list[Value]:  # fmt: skip
    """Results of the second part, from kept values, inputs (those it reads) and seconds.

    `tied` says that the forward part is in the same computation as this one, so that a compiler
    might merge a recompute with it; `whole`, that this is a whole function, or the body of a loop,
    and not a region of one: then each recompute waits for the cotangent that needs it, not just for
    the first, and so it is late in a loop's body as well.
    """
    joint = plan.joint
    env = _Kept(plan, kept)
    env.update(joint.program.consts)
    write(env, joint.inputs, args)
    write(env, joint.second_inputs, seconds)
    here = frozenset(plan.inner) if tied else frozenset()
    places = waits(plan, whole) if tied or whole else {}
    with jax.named_scope(TANGENT if joint.push else BACKWARD):
        _run(plan.order, env, plan, joint.second_outputs, here, places)
    return [read(env, v) for v in joint.second_outputs]


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


def _run(equations: Sequence[JaxprEqn], env: dict[Var, Value], plan: Plan, outputs: Iterable[Value],
         tied: frozenset[object] = frozenset(), places: Waits | None = None,
         sent: dict[Var, Value] | None = None) -> None:  # fmt: skip
    """Run equations; `tied` are the nodes of which the forward part is in this computation.

    `places` is given to a second part only: its forward equations are then recomputes.
    """
    need = {v for v in outputs if isinstance(v, Var)}
    for eqn in equations:
        need.update(reads_of(eqn, plan.inner))
    outer = name_stack()
    with again():
        inner = name_stack()
    part = plan.joint.second_ids if places is not None else None
    saved = _reasons(plan) if part is None else {}
    here: set[object] = set(tied)
    drop = {} if staging() else _last_reads(equations, plan, outputs, places or {})
    for i, eqn in enumerate(equations):
        if places and i in places:
            at = places[i]
            cts = [env[v] for v in at.seconds]
            write(env, at.saved, tie([env[v] for v in at.saved], cts, at.light))
        node = eqn.params.get("node") if eqn.primitive in (fork_p, join_p) else None
        scope = outer if part is None or id(eqn) in part else inner
        if node is None:
            if reason := next((saved[v] for v in eqn.outvars if v in saved), ""):
                with jax.named_scope(SAVED.format(reason)):
                    scope = name_stack()
            ys = bind(eqn, [read(env, v) for v in eqn.invars], scope)
        elif eqn.primitive is fork_p:
            here.add(node)
            xs = [read(env, v) for v in eqn.invars]
            used = tuple(v in need for v in eqn.outvars)
            with source(eqn, scope), eqn.ctx.manager:
                if used[-1]:
                    ys, token = node.forward(plan.inner[node], xs, used[:-1])
                else:
                    ys, token = node.outputs(plan.inner[node], xs, used[:-1]), None
            ys = [*ys, token]
        else:
            n = len(node.eqn.invars)
            reads = node.reads(plan.inner[node])
            xs = [
                read(env, v) if on else None for v, on in zip(eqn.invars[1:], reads, strict=False)
            ]
            seconds = [read(env, v) for v in eqn.invars[1 + n :]]
            token = read(env, eqn.invars[0])
            with source(eqn, scope), eqn.ctx.manager:
                ys = node.second(plan.inner[node], token, xs, seconds, node in here)
        write(env, eqn.outvars, ys)
        if sent is not None:
            sent.update((v, send(plan, v, env[v])) for v in eqn.outvars if v in plan.offloaded)
        for v in drop.get(i, ()):
            env.pop(v, None)


def _last_reads(equations: Sequence[JaxprEqn], plan: Plan, outputs: Iterable[Value], places: Waits
                ) -> dict[int, list[Var]]:  # fmt: skip
    """For each place, what nothing reads after it: where operations run one by one, it is freed."""
    named = plan.joint.named
    seen = {v for v in outputs if isinstance(v, Var)}
    seen.update(named[v] for v in seen & named.keys())
    drop: dict[int, list[Var]] = {}
    for i, eqn in reversed([*enumerate(equations)]):
        at = places.get(i)
        waiting = () if at is None else (*at.seconds, *at.saved)
        for v in (*eqn.outvars, *reads_of(eqn, plan.inner), *waiting):
            for x in (v, named.get(v, v)):
                if x not in seen:
                    seen.add(x)
                    drop.setdefault(i, []).append(x)
    return drop


def _reasons(plan: Plan) -> dict[Var, str]:
    """Why each value is saved that is; one that is saved under a name is the value it names."""
    found: dict[Var, str] = {}
    for kept in plan.kept:
        v, reason = kept, plan.why.get(kept, "")
        while isinstance(v, Var) and v not in found:
            found[v] = reason
            eqn = plan.joint.producer.get(v)
            if eqn is not None and eqn.primitive is name_p:
                (v,) = eqn.invars
    return found


def once(plan: Plan, wanted: Sequence[Var], env: dict[Var, Value]) -> dict[Var, Value]:
    """Some forward values by variable, moved to where they wait."""
    made = zip(wanted, values(plan, wanted, env, effects=False), strict=True)
    return {v: send(plan, v, x) for v, x in made}
