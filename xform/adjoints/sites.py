"""The positions of named values in a program, and the equations that read them.

A call that holds a requested name is inlined, so that the named value belongs to the caller's
program. Loops, branches, remat regions and functions with a custom derivative are not inlined.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, jaxprs_of
from xform.errors import NotDifferentiable, WrongArgument, WrongDtype
from xform.passes.inline import inlinable_body, inline_bodies
from xform.passes.structured import has_shardings, plain_call_body
from xform.program.arithmetic import differentiable
from xform.program.flow import Flow
from xform.program.ir import Program, program
from xform.program.source import frame
from xform.registry.table import flow_of, label, traits
from xform.terminal.text import shorten_place

# The path to a nested program, from the outermost program inwards: at each level, the position of
# the equation, and the number of the program among the programs that the equation holds.
Path = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a named value: an equation of the same program, or the program's output.

    Attributes:
      index: position of the equation; the number of equations if the value is an output.
      label: primitive and line of the equation, or "returned".
    """

    index: int
    label: str


@dataclasses.dataclass(frozen=True)
class Site:
    """A named value and its position.

    Attributes:
      name: the name.
      path: the nested program that computes it.
      index: position of the equation in that program.
      trips: numbers of iterations of the loops around it, outermost first.
      aval: type of the value in one iteration.
      where: the line of the user's code.
      uses: the equations that read it, and the program's output, in program order.
    """

    name: str
    path: Path
    index: int
    trips: tuple[int, ...]
    aval: Any
    where: str
    uses: tuple[Use, ...]


def names_in(prog: Program) -> frozenset[str]:
    """Return all names in a program, including its nested programs."""
    if "named" not in prog.cache:
        own = {name for e in prog.equations if (name := label(e.primitive, e.params))}
        inner = (names_in(program(j)) for e in prog.equations for j in jaxprs_of(e))
        prog.cache["named"] = frozenset(own.union(*inner))
    return prog.cache["named"]


def _holds_name(eqn: JaxprEqn, names: frozenset[str]) -> bool:
    """Return whether a program inside an equation has a value with one of the names."""
    return any(not names.isdisjoint(names_in(program(j))) for j in jaxprs_of(eqn))


def inline_named_calls(prog: Program, names: frozenset[str]) -> Program:
    """Return the program with all calls inlined that hold one of the names."""
    key = "named calls", names
    if key not in prog.cache:
        prog.cache[key] = inline_bodies(
            prog, lambda eqn: _body_to_inline(eqn) if _holds_name(eqn, names) else None
        )
    return prog.cache[key]


def _body_to_inline(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call; None if the equation is no call, or a call with shardings."""
    return None if has_shardings(eqn) else plain_call_body(eqn) or inlinable_body(eqn)


def flow_to_enter(eqn: JaxprEqn) -> Flow | None:
    """Return the flow of an equation if `partials` can enter the programs that it runs, or None.

    It enters loops of known length, branches, jitted functions, remat regions and functions with a
    custom derivative.
    """
    flow, calls = flow_of(eqn), traits(eqn.primitive).calls
    known = flow is not None and flow.condition is None and not flow.is_local and calls != "mark"
    return flow if known else None


def sites(prog: Program, name: str, names: frozenset[str], caller: str) -> list[Site]:
    """Return all values with one name, in program order.

    `names` are all requested names. The calls that hold them are inlined (`inline_named_calls`), so
    paths and positions refer to the inlined program. `caller` begins the messages of errors.

    Raises:
      WrongArgument: no value has this name. The message lists similar names.
      WrongDtype: a value with this name has no derivative.
      NotDifferentiable: a value with this name is where it cannot be perturbed, for example in a
        loop of unknown length.
    """
    result = list(_sites(prog, name, names, caller, (), ()))
    if not result:
        existing = sorted(names_in(prog))
        similar = difflib.get_close_matches(name, existing, 3, 0.4) or existing[:5]
        raise WrongArgument(
            caller,
            f"no value of the function is named {name!r}",
            "",
            f"use an existing name, such as {', '.join(map(repr, similar))}"
            if similar
            else f'name a value, h = xform.adjoints.name(h, "{name}"), and use the value that it '
            "returns",
        )
    for site in result:
        if not differentiable(site.aval):
            raise WrongDtype(
                caller,
                f"the value named {name!r} is of type {site.aval.str_short()}, which has no "
                "derivative",
                site.where,
                "name a floating-point value",
            )
    return result


def _sites(prog: Program, name: str, names: frozenset[str], caller: str, path: Path,
           trips: tuple[int, ...]) -> Iterator[Site]:  # fmt: skip
    """Yield the sites in a nested program, which has this path and these loops around it."""
    prog = inline_named_calls(prog, names)
    for i, eqn in enumerate(prog.equations):
        if label(eqn.primitive, eqn.params) == name:
            (v,) = eqn.outvars
            yield Site(name, path, i, trips, v.aval, frame(eqn), tuple(_uses(prog, v)))
        elif _holds_name(eqn, frozenset((name,))):
            flow = flow_to_enter(eqn)
            if flow is None:
                raise _unreachable(caller, name, eqn)
            inner_trips = (*trips, flow.length) if flow.is_loop else trips
            for k, body in enumerate(flow.programs):
                yield from _sites(body, name, names, caller, (*path, (i, k)), inner_trips)


def _uses(prog: Program, v: Var) -> Iterator[Use]:
    """Yield the uses of a variable, in program order."""
    for i, eqn in enumerate(prog.equations):
        if any(x is v for x in eqn.invars):
            name = eqn.params.get("name")
            text = eqn.primitive.name + (f" {name}" if isinstance(name, str) else "")
            where = shorten_place(frame(eqn))
            yield Use(i, f"{text}, {where}" if where else text)
    if any(x is v for x in prog.outputs):
        yield Use(len(prog.equations), "returned")


def _unreachable(caller: str, name: str, eqn: JaxprEqn) -> NotDifferentiable:
    """Return the error for a named value in a program that `partials` cannot enter."""
    flow = flow_of(eqn)
    loop = flow is not None and flow.condition is not None
    why = ", a loop whose trip count is not known" if loop else ", which partials cannot enter"
    return NotDifferentiable(
        caller,
        f"the value named {name!r} is computed inside {eqn.primitive.name}{why}",
        frame(eqn),
        "write the loop as lax.scan, or name a value that the loop returns"
        if loop
        else f"name a value outside {eqn.primitive.name}",
    )


def list_uses(uses: Sequence[Use]) -> str:
    """Format the uses of a value as a numbered list."""
    return "; ".join(f"{i}: {use.label}" for i, use in enumerate(uses)) or "nothing reads it"
