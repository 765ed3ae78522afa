"""Run the parts of a Joint under a Plan, in the current trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from xform._jax import JaxprEqn, Var, name_stack
from xform.interpret.joint import Plan, live, reads_of
from xform.interpret.node import fork_p, gather, join_p, spread
from xform.interpret.tie import tie
from xform.ir import Atom, Mask, bind, read, write
from xform.table import Value


def values(plan: Plan, wanted: Sequence[Atom], env: dict[Var, Value]) -> list[Value]:
    """Forward values of a Joint, from those in `env` (its inputs, and any others known)."""
    equations = live(plan.joint.first, wanted, env)
    env = {**dict(plan.joint.program.consts), **env}
    _run(equations, env, plan, wanted, frozenset())
    return [read(env, v) for v in wanted]


def forward(plan: Plan, args: Sequence[Value], used: Mask | None = None):
    """Outputs of the forward part (None where not `used`), and the kept values of the plan."""
    joint = plan.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    out = values(plan, [*outputs, *plan.kept], dict(zip(joint.inputs, args, strict=True)))
    kept = [send(plan, v, x) for v, x in zip(plan.kept, out[len(outputs) :], strict=True)]
    return spread(out[: len(outputs)], used), kept


def second(plan: Plan, kept: Sequence[Value], args: Sequence[Value], seconds: Sequence[Value], tied: bool):
    """Results of the second part, from kept values, inputs (those it reads) and seconds.

    `tied` says that the forward part is in the same computation as this one, so that a compiler
    might merge a recompute with it.
    """
    joint = plan.joint
    env = dict(joint.program.consts)
    write(env, joint.inputs, args)
    write(env, joint.second_inputs, seconds)
    for v, x in zip(plan.kept, kept, strict=True):
        env[v] = send(plan, v, x, back=True)
    if tied:
        leaves = cover(plan)
        write(env, leaves, tie([env[v] for v in leaves], seconds))
    for x, y in joint.named.items():
        if y in env:
            env[x] = env[y]
    _run(plan.order, env, plan, joint.second_outputs, frozenset(plan.inner) if tied else frozenset())
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
         tied: frozenset[object]) -> None:  # fmt: skip
    """Run equations; `tied` are the nodes of which the forward part is in this computation."""
    need = {v for v in outputs if isinstance(v, Var)}
    for eqn in equations:
        need.update(reads_of(eqn, plan.inner))
    outer = name_stack()
    here: set[object] = set(tied)
    for eqn in equations:
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
                ys, token = node.primal(xs), None
            ys = [*ys, token]
        else:
            n = len(node.eqn.invars)
            reads = node.reads(plan.inner[node])
            xs = [read(env, v) if on else None for v, on in zip(eqn.invars[1:], reads, strict=False)]
            seconds = [read(env, v) for v in eqn.invars[1 + n :]]
            token = env[eqn.invars[0]]
            ys = node.second(plan.inner[node], token, xs, seconds, node in here)
        write(env, eqn.outvars, ys)


def cover(plan: Plan) -> tuple[Var, ...]:
    """The saved values to tie, so that every recomputed equation depends on one of them.

    The fewest, greedily, and the smallest where it makes no difference: what is tied may be copied.
    """
    if "cover" not in plan.cache:
        plan.cache["cover"] = _cover(plan)
    return plan.cache["cover"]


def _cover(plan: Plan) -> tuple[Var, ...]:
    second_inputs = set(plan.joint.second_inputs)
    leaves: dict[Var, int] = {}
    depends: dict[Var, int] = {v: 0 for v in second_inputs}
    reached: dict[int, int] = {}
    bit = 1
    for eqn in plan.order:
        over = 0
        for v in reads_of(eqn, plan.inner):
            if v not in depends:
                depends[v] = leaves[v] = bit
                bit <<= 1
            over |= depends[v]
        for v in eqn.outvars:
            depends[v] = over
        if id(eqn) in plan.again:
            reached[id(eqn)] = over
    # Transposed: for each leaf, the set of recomputed equations that depend on it.
    gain = {v: 0 for v in leaves if jax.dtypes.issubdtype(v.aval.dtype, np.number)}
    for i, over in enumerate(reached.values()):
        for v in gain:
            if over & leaves[v]:
                gain[v] |= 1 << i
    open_ = (1 << len(reached)) - 1
    chosen: list[Var] = []
    while True:
        best = max(gain, key=lambda v: ((gain[v] & open_).bit_count(), -_bytes(v)), default=None)
        if best is None or not gain[best] & open_:
            return tuple(chosen)
        chosen.append(best)
        open_ &= ~gain[best]


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def once(plan: Plan, wanted: Sequence[Var], env: dict[Var, Value]) -> dict[Var, Value]:
    """Some forward values by variable, moved to where they wait."""
    made = zip(wanted, values(plan, wanted, env), strict=True)
    return {v: send(plan, v, x) for v, x in made}
