"""Run the parts of a Joint under a Plan, in the current trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from xform._jax import JaxprEqn, Var, name_stack
from xform.interpret.joint import Plan, reads_of
from xform.interpret.node import fork_p, gather, join_p, spread
from xform.interpret.tie import tie
from xform.interpret.wait import Waits, waits
from xform.ir import Atom, Mask, bind, read, write
from xform.passes.dce import live
from xform.table import Value


def values(
    plan: Plan, wanted: Sequence[Atom], env: dict[Var, Value], effects: bool = True
) -> list[Value]:
    """Forward values of a Joint, from those in `env` (its inputs, and any others known)."""
    equations = live(plan.joint.first, wanted, env, effects)
    env = {**dict(plan.joint.program.consts), **env}
    _run(equations, env, plan, wanted)
    return [read(env, v) for v in wanted]


def forward(plan: Plan, args: Sequence[Value], used: Mask | None = None):
    """Outputs of the forward part (None where not `used`), and the kept values of the plan."""
    joint = plan.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    out = values(plan, [*outputs, *plan.kept], dict(zip(joint.inputs, args, strict=True)))
    kept = [send(plan, v, x) for v, x in zip(plan.kept, out[len(outputs) :], strict=True)]
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
    env = dict(joint.program.consts)
    write(env, joint.inputs, args)
    write(env, joint.second_inputs, seconds)
    for v, x in zip(plan.kept, kept, strict=True):
        env[v] = send(plan, v, x, back=True)
    for x, y in joint.named.items():
        if y in env:
            env[x] = env[y]
    here = frozenset(plan.inner) if tied else frozenset()
    places = waits(plan, whole) if tied or whole else {}
    _run(plan.order, env, plan, joint.second_outputs, here, places)
    return [read(env, v) for v in joint.second_outputs]


def send(plan: Plan, v: Var, x: Value, back: bool = False) -> Value:
    """A kept value, moved to the memory where it waits (or `back`), if the plan offloads it."""
    if v not in plan.offloaded:
        return x
    move = plan.offloaded[v]
    kind = move.src if back else move.dst
    space = jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host
    return jax.device_put(x, space)


def _run(equations: Sequence[JaxprEqn], env: dict[Var, Value], plan: Plan, outputs: Iterable[Value],
         tied: frozenset[object] = frozenset(), places: Waits | None = None) -> None:  # fmt: skip
    """Run equations; `tied` are the nodes of which the forward part is in this computation."""
    need = {v for v in outputs if isinstance(v, Var)}
    for eqn in equations:
        need.update(reads_of(eqn, plan.inner))
    outer = name_stack()
    here: set[object] = set(tied)
    for i, eqn in enumerate(equations):
        if places and i in places:
            at = places[i]
            cts = [env[v] for v in at.seconds]
            write(env, at.saved, tie([env[v] for v in at.saved], cts, at.light))
        node = eqn.params.get("node") if eqn.primitive in (fork_p, join_p) else None
        if node is None:
            ys = bind(eqn, [read(env, v) for v in eqn.invars], outer)
        elif eqn.primitive is fork_p:
            here.add(node)
            xs = [read(env, v) for v in eqn.invars]
            used = tuple(v in need for v in eqn.outvars)
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
            ys = node.second(plan.inner[node], token, xs, seconds, node in here)
        write(env, eqn.outvars, ys)


def once(plan: Plan, wanted: Sequence[Var], env: dict[Var, Value]) -> dict[Var, Value]:
    """Some forward values by variable, moved to where they wait."""
    made = zip(wanted, values(plan, wanted, env, effects=False), strict=True)
    return {v: send(plan, v, x) for v, x in made}
