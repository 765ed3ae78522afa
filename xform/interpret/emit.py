"""Run the parts of a Joint under a Schedule, in the current trace.

A Joint is the forward and the backward pass of a function as one program of two parts. A Schedule
says which forward values are saved and which the backward part recomputes. A seed is an input of
the backward part: a cotangent, or for `linearize` a tangent. A node is a loop, branch or call with
a derivative. Its forward part returns a token, a pytree of residuals.

Both parts carry the name scopes of the user's equations. The backward part is also in one of the
scopes below, so that profiles and `xform.memory` can tell the parts of a compiled program apart.
An equation that computes a saved value is in a scope that says why the value is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from xform._jax import JaxprEqn, Var, staging
from xform.interpret import walk
from xform.interpret.absent import reduced_schedule
from xform.interpret.joint import Schedule
from xform.interpret.keys import unused_keys
from xform.interpret.node import fork_p, gather, present_mask, spread
from xform.program.arithmetic import Value
from xform.program.dimensions import at_sample
from xform.program.equation import bind_at_default_precision, takes_default_precision
from xform.program.ir import Atom, Mask, Program, bind, context, read
from xform.program.source import name_stack, source
from xform.registry.table import traits
from xform.steering.barrier import Where, barrier
from xform.steering.materialize import materialize
from xform.steering.wait import Wait

BACKWARD, TANGENT, RECOMPUTE = "xform(backward)", "xform(tangent)", "xform(recompute)"
SAVED = "xform(saved: {})"


def pass_name(op_name: str) -> str:
    """Return the pass that an operation belongs to: "backward", "recompute" or "".

    "" means the forward pass, or an operation outside any derivative.

    >>> from xform.interpret.emit import pass_name
    >>> pass_name("jit(f)/jvp(mlp)/mul"), pass_name("jit(f)/transpose(jvp(mlp))/mul")
    ('', 'backward')
    """
    for piece in reversed(op_name.split("/")):
        if piece in (RECOMPUTE, "rematted_computation"):
            return "recompute"
        if piece == BACKWARD or piece.startswith("transpose("):
            return "backward"
    return ""


def forward(
    schedule: Schedule, args: Sequence[Value], used: Mask | None = None
) -> tuple[list[Value], list[Value]]:
    """Run the forward part; return its outputs (None where not `used`) and the saved values."""
    with at_sample(schedule.sample):
        return walk.forward(schedule, _Emit(_forward_scopes(schedule)), args, used)


def values(
    schedule: Schedule, wanted: Sequence[Atom], env: dict[Var, Value], effects: bool = True
) -> list[Value]:
    """Compute the `wanted` forward values of a Joint from the values in `env`.

    `env` has the inputs of the Joint, and may have other forward values, which are then not
    computed again. With `effects`, equations with side effects run too.
    """
    with at_sample(schedule.sample):
        return walk.values(schedule, _Emit(_forward_scopes(schedule)), wanted, env, effects)


def values_by_variable(
    schedule: Schedule, wanted: Sequence[Var], env: dict[Var, Value]
) -> dict[Var, Value]:
    """Compute the `wanted` forward values from those in `env`; return them by variable.

    Equations with side effects do not run, unless a wanted value depends on them.
    """
    return dict(zip(wanted, values(schedule, wanted, env, effects=False), strict=True))


def recompute_scope() -> AbstractContextManager[Any]:
    """Return the scope of forward equations that are recomputed for the backward part."""
    return jax.named_scope(RECOMPUTE)


def backward(schedule: Schedule, kept: Sequence[Value], args: Sequence[Value],
             seeds: Sequence[Value], together: bool, whole: bool = False
             ) -> list[Value]:  # fmt: skip
    """Run the backward part; return its results.

    Args:
      schedule: the Schedule.
      kept: the values of `schedule.saved`, as `forward` returned them.
      args: the values of the Joint's inputs; None for those that the backward part does not read.
      seeds: cotangents, or tangents. A seed that is None is absent: no derivative arrives there. A
        result that depends on absent seeds alone is None.
      together: whether the forward part is in the same XLA program, so that XLA may merge a
        recompute with it. Barriers prevent that.
      whole: whether the Joint belongs to a whole function or to a loop's body, not to a remat
        region. Then each recompute waits for the cotangent that needs it, not only for the first
        cotangent, so it runs late.
    """
    given = present_mask(seeds)
    if not all(given):
        reduced, present = reduced_schedule(schedule, given)
        results = backward(reduced, kept, args, gather(seeds, given), together, whole)
        return spread(results, present)
    scope = jax.named_scope(TANGENT if schedule.joint.push else BACKWARD)
    with at_sample(schedule.sample), scope:
        back_end = _Emit(_backward_scopes(schedule), _derived(schedule))
        kept, args = unused_keys(kept), unused_keys(args)
        return walk.backward(schedule, back_end, kept, args, seeds, together, whole)


def transfer(schedule: Schedule, v: Var, x: Value, back: bool = False) -> Value:
    """Return `x`, the value of `v`; if `v` is offloaded, moved to the host or `back` from it."""
    if v not in schedule.offloaded:
        return x
    move = schedule.offloaded[v]
    kind = move.src if back else move.dst
    space = jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host
    return jax.device_put(x, space)


def fork(
    eqn: JaxprEqn, schedules: Sequence[Schedule], xs: Sequence[Value], used: Mask
) -> list[Any]:
    """Run a node's forward part; return its outputs and then its token, None where not `used`."""
    node, outputs = eqn.params["node"], used[:-1]
    with context(eqn):
        if not used[-1]:
            return [*node.outputs(schedules, xs, outputs), None]
        results, token = node.forward(schedules, xs, outputs)
    return [*results, token]


def join(eqn: JaxprEqn, schedules: Sequence[Schedule], token: Any, xs: Sequence[Value],
         seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
    """Run a node's backward part; return the results that are present.

    `xs` has None for the inputs that it does not read. `seeds` has only the seeds that are present.
    """
    node, given = eqn.params["node"], eqn.params["given"]
    with context(eqn):
        results = node.backward(schedules, token, xs, spread(seeds, given), together)
    return gather(results, node.present_results(given))


class _Emit(walk.BackEnd):
    """Binds equations in the current trace, each in the name scope that `scope_of` returns.

    `derived` has the `id`s of equations that a rule made for a pullback. As in JAX, their products
    have the precision that `jax.default_matmul_precision` sets where the pullback is called, unless
    the function's own products have a precision.
    """

    def __init__(self, scope_of: Callable[[JaxprEqn], Any], derived: frozenset[int] = frozenset()):
        self.staged, self.scope_of, self.derived = staging(), scope_of, derived

    def read(self, env: walk.Environment, v: Any) -> Value:
        return read(env, v)

    def constants(self, prog: Program) -> Mapping[Var, Value]:
        return dict(prog.consts)

    def results(self, eqn: JaxprEqn, xs: list[Value]) -> list[Value]:
        if id(eqn) in self.derived and takes_default_precision(eqn):
            return bind_at_default_precision(eqn, xs, self.scope_of(eqn))
        return bind(eqn, xs, self.scope_of(eqn))

    def fork(
        self, eqn: JaxprEqn, schedules: Sequence[Schedule], xs: list[Value], used: Mask
    ) -> list[Any]:
        with source(eqn, self.scope_of(eqn)):
            return fork(eqn, schedules, xs, used)

    def join(self, eqn: JaxprEqn, schedules: Sequence[Schedule], token: Any, xs: list[Value],
             seeds: list[Value], together: bool) -> list[Value]:  # fmt: skip
        with source(eqn, self.scope_of(eqn)):
            return join(eqn, schedules, token, xs, seeds, together)

    def delay(self, wait: Wait, saved: list[Value], seeds: list[Value]) -> Sequence[Value]:
        return barrier(saved, seeds, wait.where)

    def materialize(self, eqn: JaxprEqn, x: Value, where: Where) -> Value:
        with source(eqn, self.scope_of(eqn)):
            return materialize(x, where)

    def transfer(self, schedule: Schedule, v: Var, x: Value, back: bool) -> Value:
        return transfer(schedule, v, x, back)


def _forward_scopes(schedule: Schedule) -> Callable[[JaxprEqn], Any]:
    """Return a function from a forward equation to its name scope.

    If the equation computes a saved value, the scope contains the reason for saving it.
    """
    scope, reasons = name_stack(), _reasons(schedule)

    def scope_of(eqn: JaxprEqn) -> Any:
        reason = next((reasons[v] for v in eqn.outvars if v in reasons), "")
        if not reason or eqn.primitive is fork_p:
            return scope
        with jax.named_scope(SAVED.format(reason)):
            return name_stack()

    return scope_of


def _derived(schedule: Schedule) -> frozenset[int]:
    """Return the `id`s of the equations of a pullback, if a default precision of products is set.

    A pushforward has the precision that was set where the function was linearized.
    """
    config: Any = jax.config
    is_set = config.jax_default_matmul_precision is not None and not schedule.joint.push
    return schedule.joint.backward_ids if is_set else frozenset()


def _backward_scopes(schedule: Schedule) -> Callable[[JaxprEqn], Any]:
    """Return a function from an equation that the backward part runs to its name scope."""
    scope = name_stack()
    with recompute_scope():
        recomputed = name_stack()
    return lambda eqn: scope if id(eqn) in schedule.joint.backward_ids else recomputed


def _reasons(schedule: Schedule) -> dict[Var, str]:
    """Return why each value is saved. A value whose named copy is saved counts as saved itself."""
    reasons: dict[Var, str] = {}
    for saved in schedule.saved:
        v, reason = saved, schedule.why.get(saved, "")
        while isinstance(v, Var) and v not in reasons:
            reasons[v] = reason
            eqn = schedule.joint.producer.get(v)
            if eqn is not None and traits(eqn.primitive).label:
                (v,) = eqn.invars
    return reasons
