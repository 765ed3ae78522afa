"""Where a NaN or an Inf comes from: the first operation that made one of finite values.

The gradient's program is run operation by operation, and from a result that is not finite the
search goes back along what each operation read, into loops, trip by trip, to one that read nothing
but finite values. What is infinite on purpose, such as a mask, leads nowhere and is not found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.arithmetic import Value
from xform.diagnosis.flow import calls_opened
from xform.interpret.emit import BACKWARD
from xform.ir import Atom, Program, bind, environment, evaluate, program, read, write
from xform.passes.structured import bodies, body, region
from xform.source import frame, name_stack
from xform.text import near


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that first made a value that is not finite.

    Attributes:
      operation: its primitive; "argument" if an argument of the loss is not finite already.
      where: the user's line.
      trips: of the loops around it, outermost first.
      backward: whether it is of the backward pass.
      value: "NaN" or "Inf".
    """

    operation: str
    where: str
    trips: tuple[int, ...] = ()
    backward: bool = False
    value: str = "NaN"

    def __str__(self) -> str:
        trip = f" in trip {', '.join(map(str, self.trips))}" if self.trips else ""
        way = " of the backward pass" if self.backward else ""
        return f"{self.value} first made by {self.operation}{way}{trip}, {near(self.where)}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def finite(x: Value) -> bool:
    """Whether all of a value is finite; what has no floats is."""
    inexact = jnp.issubdtype(getattr(x, "dtype", np.int32), np.inexact)
    return not inexact or bool(jnp.all(jnp.isfinite(x)))


def origin(prog: Program, args: Sequence[Value], outputs: Sequence[int]) -> Origin | None:
    """The operation from which one of some outputs has its NaN or Inf; None if all are finite.

    An input that is not finite itself is an origin, of operation "argument" and its place.
    """
    found = _search(prog, args, outputs, ())
    if isinstance(found, int):
        return Origin("argument", str(found), value=_kind(args[found]))
    return found


def _search(prog: Program, args: Sequence[Value], outputs: Sequence[int], trips: tuple[int, ...]
            ) -> Origin | int | None:  # fmt: skip
    """The origin; of an input that is not finite, its place."""
    prog = calls_opened(prog)
    env, outer = environment(prog, args), name_stack()
    producer: dict[Var, tuple[JaxprEqn, int]] = {}
    for eqn in prog.equations:
        write(env, eqn.outvars, bind(eqn, [read(env, v) for v in eqn.invars], outer))
        producer.update((v, (eqn, i)) for i, v in enumerate(eqn.outvars))

    def bad(v: Atom) -> bool:
        return isinstance(v, Var) and not finite(env[v])

    ends = [prog.outputs[i] for i in outputs]
    at = next((v for v in sorted(filter(bad, ends), key=lambda v: not _nan(env, v))), None)
    while isinstance(at, Var) and at in producer:
        eqn, place = producer[at]
        xs = [read(env, v) for v in eqn.invars]
        found = _within(eqn, xs, place, trips)
        if isinstance(found, Origin):
            return found
        ahead = [v for v in eqn.invars if bad(v)]
        if isinstance(found, int):
            ahead = [eqn.invars[found]] if bad(eqn.invars[found]) else ahead
        if not ahead:
            return _origin(eqn, env[at], trips)
        at = min(ahead, key=lambda v: not _nan(env, v))
    return prog.inputs.index(at) if isinstance(at, Var) and at in prog.inputs else None


def _nan(env: dict[Var, Value], v: Atom) -> bool:
    return isinstance(v, Var) and bool(jnp.any(jnp.isnan(env[v])))


def _kind(x: Value) -> str:
    return "NaN" if bool(jnp.any(jnp.isnan(x))) else "Inf"


def _origin(eqn: JaxprEqn, y: Value, trips: tuple[int, ...]) -> Origin:
    backward = BACKWARD in str(eqn.source_info.name_stack)
    return Origin(eqn.primitive.name, frame(eqn), trips, backward, _kind(y))


def _within(eqn: JaxprEqn, xs: Sequence[Value], place: int, trips: tuple[int, ...]
            ) -> Origin | int | None:  # fmt: skip
    """The origin inside a loop, a branch or a region, or which of its inputs is one."""
    params = eqn.params
    if eqn.primitive is scan_p:
        return _in_scan(eqn, xs, trips)
    if eqn.primitive is cond_p:
        chosen = program(params["branches"][int(xs[0])])
        found = _search(chosen, xs[1:], [place], trips)
        return found + 1 if isinstance(found, int) else found
    if eqn.primitive is while_p:
        return _in_while(eqn, xs, trips)
    inner = (body(eqn),) if region(eqn) else bodies(eqn)
    return _search(inner[0], xs, [place], trips) if inner else None


def _in_scan(eqn: JaxprEqn, xs: Sequence[Value], trips: tuple[int, ...]) -> Origin | int | None:
    step, (nc, nk) = program(eqn.params["jaxpr"]), scan_counts(eqn.params)
    carry, length = list(xs[nc : nc + nk]), eqn.params["length"]
    order = reversed(range(length)) if eqn.params["reverse"] else range(length)
    for t in order:
        args = [*xs[:nc], *carry, *(x[t] for x in xs[nc + nk :])]
        ys = evaluate(step, args)
        ends = [i for i, y in enumerate(ys) if not finite(y)]
        if ends:
            return _search(step, args, ends, (*trips, t))
        carry = ys[:nk]
    return None


def _in_while(eqn: JaxprEqn, xs: Sequence[Value], trips: tuple[int, ...]) -> Origin | int | None:
    until, step = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    state, t = list(xs[b:]), 0
    while bool(evaluate(until, [*xs[:a], *state])[0]):
        args = [*xs[a:b], *state]
        state = evaluate(step, args)
        ends = [i for i, y in enumerate(state) if not finite(y)]
        if ends:
            found = _search(step, args, ends, (*trips, t))
            return found + a if isinstance(found, int) else found
        t += 1
    return None
