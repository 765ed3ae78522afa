"""The origin of a NaN or Inf: the first operation that produced one from finite values.

A program runs operation by operation. The search starts at an output that is not finite. It goes
back to the inputs of each operation, and into loops iteration by iteration, until it finds an
operation with only finite inputs. An intended infinity, such as that of a mask, does not make the
output NaN or Inf, so the search does not reach it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.diagnosis.dependence import inline_calls
from xform.interpret.emit import BACKWARD
from xform.passes.structured import bodies, called_body, is_remat_region
from xform.program.arithmetic import Value
from xform.program.ir import Atom, Program, bind, environment, evaluate, program, read, write
from xform.program.source import frame, name_stack
from xform.terminal.text import shorten_place


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that produced the first value that is not finite.

    Attributes:
      operation: its primitive; "argument" if an argument of the loss is already not finite.
      where: the line of the user's code; for an argument, its name.
      trips: iteration of each loop around it, outermost first.
      backward: whether it belongs to the backward pass.
      value: "NaN" or "Inf".
    """

    operation: str
    where: str
    trips: tuple[int, ...] = ()
    backward: bool = False
    value: str = "NaN"

    def __str__(self) -> str:
        if self.operation == "argument":
            return f"{self.value} in an argument of the loss: {self.where}"
        iteration = f" in iteration {', '.join(map(str, self.trips))}" if self.trips else ""
        backward = " of the backward pass" if self.backward else ""
        operation = f"{self.operation}{backward}{iteration}"
        return f"{self.value} first produced by {operation}, {shorten_place(self.where)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the origin as plain data for JSON."""
        return dataclasses.asdict(self)


def finite(x: Value) -> bool:
    """Return whether all elements are finite; a value that is not floating-point is finite."""
    inexact = jnp.issubdtype(getattr(x, "dtype", np.int32), np.inexact)
    return not inexact or bool(jnp.all(jnp.isfinite(x)))


def origin(prog: Program, args: Sequence[Value], outputs: Sequence[int]) -> Origin | None:
    """Find the origin of a NaN or Inf in one of some outputs; None if all are finite.

    Args:
      prog: the program.
      args: its inputs.
      outputs: indices of the outputs to examine.

    Returns:
      The origin. If an input is not finite, its operation is "argument" and `where` is the index of
      the input.
    """
    result = _search(prog, args, outputs, ())
    if isinstance(result, int):
        return Origin("argument", str(result), value=_kind(args[result]))
    return result


def _search(prog: Program, args: Sequence[Value], outputs: Sequence[int], trips: tuple[int, ...]
            ) -> Origin | int | None:  # fmt: skip
    """Return the origin, or the index of an input that is not finite, or None."""
    prog = inline_calls(prog)
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
        inner = _within(eqn, xs, place, trips)
        if isinstance(inner, Origin):
            return inner
        causes = [v for v in eqn.invars if bad(v)]
        if isinstance(inner, int):
            causes = [eqn.invars[inner]] if bad(eqn.invars[inner]) else causes
        if not causes:
            return _origin(eqn, env[at], trips)
        at = min(causes, key=lambda v: not _nan(env, v))
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
    """Search a loop, branch or region for the origin of its output number `place`.

    Returns the origin, or the index of an input of the equation that is the cause, or None.
    """
    params = eqn.params
    if eqn.primitive is scan_p:
        return _in_scan(eqn, xs, trips)
    if eqn.primitive is cond_p:
        branch = program(params["branches"][int(xs[0])])
        result = _search(branch, xs[1:], [place], trips)
        return result + 1 if isinstance(result, int) else result
    if eqn.primitive is while_p:
        return _in_while(eqn, xs, trips)
    inner = (called_body(eqn),) if is_remat_region(eqn) else bodies(eqn)
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
    condition, step = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    state, t = list(xs[b:]), 0
    while bool(evaluate(condition, [*xs[:a], *state])[0]):
        args = [*xs[a:b], *state]
        state = evaluate(step, args)
        ends = [i for i, y in enumerate(state) if not finite(y)]
        if ends:
            result = _search(step, args, ends, (*trips, t))
            return result + a if isinstance(result, int) else result
        t += 1
    return None
