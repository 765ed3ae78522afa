"""Find the origin of a NaN or Inf: the first operation that produced one from finite values.

The program runs operation by operation. The search starts at an output that is not finite. It goes
back to the inputs of each operation, and into loops iteration by iteration, until it finds an
operation with only finite inputs. An intended infinity, such as the `-inf` of an attention mask,
does not make the output NaN or Inf, so the search does not reach it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


def find_origin(prog: Program, args: Sequence[Value], names: Sequence[str]) -> Origin | None:
    """Find the origin of a NaN or Inf in the outputs of a program; None if all are finite.

    Args:
      prog: the program.
      args: its inputs.
      names: what the report calls each input.

    Cost: one evaluation of the program, operation by operation, and one more of each loop, branch
    and remat region that the search enters. A loop holds the carries of all its iterations.
    """
    result = _search(prog, args, range(len(prog.outputs)), ())
    if isinstance(result, int):
        return Origin("argument", names[result], value=_KINDS[_kind(args[result])])
    return result


_KINDS = ("finite", "Inf", "NaN")  # the search prefers a later kind


def _kind(x: Value) -> int:
    """Return the position in `_KINDS` of an array: "Inf" if it has an infinity and no NaN."""
    return 0 if finite(x) else 2 if bool(jnp.any(jnp.isnan(x))) else 1


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

    def kind(v: Atom) -> int:
        return _kind(env[v]) if isinstance(v, Var) else 0

    bad = max(filter(kind, [prog.outputs[i] for i in outputs]), key=kind, default=None)
    while isinstance(bad, Var) and bad in producer:
        eqn, position = producer[bad]
        xs = [read(env, v) for v in eqn.invars]
        inside = _search_inside(eqn, xs, position, trips)
        if isinstance(inside, Origin):
            return inside
        causes = [v for v in eqn.invars if kind(v)]
        if isinstance(inside, int) and kind(eqn.invars[inside]):
            causes = [eqn.invars[inside]]
        if not causes:
            return _origin_at(eqn, env[bad], trips)
        bad = max(causes, key=kind)
    return prog.inputs.index(bad) if isinstance(bad, Var) and bad in prog.inputs else None


def _origin_at(eqn: JaxprEqn, y: Value, trips: tuple[int, ...]) -> Origin:
    """Return the origin for an equation with finite inputs and the result `y`."""
    backward = BACKWARD in str(eqn.source_info.name_stack)
    return Origin(eqn.primitive.name, frame(eqn), trips, backward, _KINDS[_kind(y)])


def _search_inside(eqn: JaxprEqn, xs: Sequence[Value], position: int, trips: tuple[int, ...]
                   ) -> Origin | int | None:  # fmt: skip
    """Search a loop, branch or remat region for the origin of its output number `position`.

    Returns the origin, or the index of an input of the equation that is the cause, or None.
    """
    flow = flow_of(eqn)
    if flow is None:
        return None
    if flow.is_loop:
        return _search_loop(flow, xs, position, trips)
    if flow.is_call and not (is_remat_region(eqn) or bodies(eqn)):
        return None  # a call with a derivative or a mark of its own is one operation
    body = flow.bodies[0 if flow.index is None else int(xs[flow.index])]
    return _search_body(body, [xs[k] for k in body.operands], position, trips)


def _search_body(body: Body, inputs: Sequence[Value], position: int, trips: tuple[int, ...]
                 ) -> Origin | int | None:  # fmt: skip
    """Search a body for the origin of its output number `position`, as `_search` does.

    The index of a bad input is translated to that of the equation's operand.
    """
    result = _search(body.program, inputs, [position], trips)
    return body.operands[result] if isinstance(result, int) else result


def _search_loop(flow: Flow, xs: Sequence[Value], position: int, trips: tuple[int, ...]
                 ) -> Origin | int | None:  # fmt: skip
    """Search a loop for the origin of its output number `position`.

    The search starts at the last value of a carry, or at the first bad slice of a stacked output.
    It goes back to earlier iterations through the carries.
    """
    runs, body = list(_run_loop(flow, xs)), flow.bodies[0]
    kind = lambda i, position: _kind(runs[i].outputs[position])
    result, i = None, len(runs) - 1
    if position in flow.stacked:
        i = max(range(len(runs)), key=lambda i: kind(i, position))
    while i >= 0:
        while i and kind(i - 1, position) == kind(i, position):
            i -= 1  # a carry that was as bad before this iteration
        result = _search_body(body, runs[i].inputs, position, (*trips, runs[i].number))
        if not isinstance(result, int) or result not in flow.carried:
            return result
        position, i = flow.carried[result], i - 1
    return result


class _Iteration(NamedTuple):
    """An iteration of a loop, with the inputs and outputs of the body."""

    number: int
    inputs: list[Value]
    outputs: list[Value]


def _run_loop(flow: Flow, xs: Sequence[Value]) -> Iterator[_Iteration]:
    """Run a loop, and yield each iteration."""
    (body,), condition, values = flow.bodies, flow.condition, list(xs)
    for t in itertools.count() if flow.length is None else flow.iterations:
        if condition is not None:
            (goes_on,) = evaluate(condition.program, [values[k] for k in condition.operands])
            if not bool(goes_on):
                break
        inputs = flow.inputs(body, values, lambda x, t=t: x[t])
        outputs = evaluate(body.program, inputs)
        yield _Iteration(t, inputs, outputs)
        values = flow.after(values, outputs)
