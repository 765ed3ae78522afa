"""Find the origin of a NaN or Inf: the first operation that produced one from finite values.

The program runs operation by operation. The search starts at an output that is not finite. It goes
back to the inputs of each operation, and into loops iteration by iteration, until it finds an
operation with only finite inputs. An intended infinity, such as the `-inf` of an attention mask,
does not make the output NaN or Inf, so the search does not reach it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var
from xform.interpret.emit import BACKWARD
from xform.passes.inline import inlined
from xform.passes.structured import bodies, is_remat_region, plain_call_body
from xform.program.arithmetic import Value
from xform.program.flow import Body, Flow
from xform.program.ir import Atom, Program, bind, environment, evaluate, read, write
from xform.program.source import frame, name_stack
from xform.registry.table import flow_of
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


def find_origin(prog: Program, args: Sequence[Value], outputs: Sequence[int]) -> Origin | None:
    """Find the origin of a NaN or Inf in one of some outputs; None if all are finite.

    Args:
      prog: the program.
      args: its inputs.
      outputs: indices of the outputs to examine.

    Returns:
      The origin. If an input is not finite, its operation is "argument" and `where` is the index of
      the input.

    Cost: one evaluation of the program, operation by operation, and one more of each loop, branch
    and remat region that the search enters.
    """
    result = _search(prog, args, outputs, ())
    if isinstance(result, int):
        return Origin("argument", str(result), value=_nan_or_inf(args[result]))
    return result


def _search(prog: Program, args: Sequence[Value], outputs: Sequence[int], trips: tuple[int, ...]
            ) -> Origin | int | None:  # fmt: skip
    """Return the origin; the index of an input if that is not finite; None if nothing is found.

    `trips` holds the iteration of each loop around the program, outermost first.
    """
    prog = inlined(prog, plain_call_body)
    env, outer = environment(prog, args), name_stack()
    producer: dict[Var, tuple[JaxprEqn, int]] = {}
    for eqn in prog.equations:
        write(env, eqn.outvars, bind(eqn, [read(env, v) for v in eqn.invars], outer))
        producer.update((v, (eqn, i)) for i, v in enumerate(eqn.outvars))

    def is_bad(v: Atom) -> bool:
        return isinstance(v, Var) and not finite(env[v])

    def has_no_nan(v: Atom) -> bool:  # a sort key: a NaN comes before an infinity
        return not (isinstance(v, Var) and bool(jnp.any(jnp.isnan(env[v]))))

    bad_outputs = filter(is_bad, [prog.outputs[i] for i in outputs])
    bad = min(bad_outputs, key=has_no_nan, default=None)
    while isinstance(bad, Var) and bad in producer:
        eqn, position = producer[bad]
        xs = [read(env, v) for v in eqn.invars]
        inside = _search_inside(eqn, xs, position, trips)
        if isinstance(inside, Origin):
            return inside
        causes = [v for v in eqn.invars if is_bad(v)]
        if isinstance(inside, int):
            causes = [eqn.invars[inside]] if is_bad(eqn.invars[inside]) else causes
        if not causes:
            return _origin_at(eqn, env[bad], trips)
        bad = min(causes, key=has_no_nan)
    return prog.inputs.index(bad) if isinstance(bad, Var) and bad in prog.inputs else None


def _nan_or_inf(x: Value) -> str:
    """Return "NaN" if an array has a NaN, else "Inf"."""
    return "NaN" if bool(jnp.any(jnp.isnan(x))) else "Inf"


def _origin_at(eqn: JaxprEqn, y: Value, trips: tuple[int, ...]) -> Origin:
    """Return the origin for an equation with finite inputs and the result `y`."""
    backward = BACKWARD in str(eqn.source_info.name_stack)
    return Origin(eqn.primitive.name, frame(eqn), trips, backward, _nan_or_inf(y))


def _search_inside(eqn: JaxprEqn, xs: Sequence[Value], position: int, trips: tuple[int, ...]
                   ) -> Origin | int | None:  # fmt: skip
    """Search a loop, branch or remat region for the origin of its output number `position`.

    Returns the origin, or the index of an input of the equation that is the cause, or None.
    """
    flow = flow_of(eqn)
    if flow is None:
        return None
    if flow.is_loop:
        return _in_loop(flow, xs, trips)
    if flow.is_call and not (is_remat_region(eqn) or bodies(eqn)):
        return None
    body = flow.bodies[0 if flow.index is None else int(xs[flow.index])]
    return _search_body(body, [xs[k] for k in body.operands], [position], trips)


def _search_body(body: Body, inputs: Sequence[Value], outputs: Sequence[int],
                 trips: tuple[int, ...]) -> Origin | int | None:  # fmt: skip
    """Search a body, as `_search` does; return an operand of the equation for an input."""
    result = _search(body.program, inputs, outputs, trips)
    return body.operands[result] if isinstance(result, int) else result


def _in_loop(flow: Flow, xs: Sequence[Value], trips: tuple[int, ...]) -> Origin | int | None:
    """Search the first iteration of a loop with an output that is not finite."""
    (body,), condition, values = flow.bodies, flow.condition, list(xs)
    for t in itertools.count() if flow.length is None else flow.iterations:
        if condition is not None:
            (runs,) = evaluate(condition.program, [values[k] for k in condition.operands])
            if not bool(runs):
                break
        inputs = flow.inputs(body, values, lambda x, t=t: x[t])
        ys = evaluate(body.program, inputs)
        bad_outputs = [i for i, y in enumerate(ys) if not finite(y)]
        if bad_outputs:
            return _search_body(body, inputs, bad_outputs, (*trips, t))
        values = flow.after(values, ys)
    return None
