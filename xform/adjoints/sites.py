"""Where in a program values have names, and what reads them.

A call that holds a name that is asked for is opened, so that its value is one of the caller's. In a
loop, a branch, a remat region or a function with a derivative of its own it stays where it is.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, cond_p, jaxprs_of, jit_p, name_p, scan_p
from xform.arithmetic import differentiable
from xform.errors import NotDifferentiable, WrongArgument, WrongDtype
from xform.ir import Program, program
from xform.passes.inline import opened, small
from xform.passes.structured import body, called, placed
from xform.source import frame
from xform.table import traits
from xform.text import near

# Which equation of a program, and which of the programs in it; from the outermost inwards.
Path = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """A reader of a named value: an equation of its program, or what is returned from there.

    Attributes:
      index: the place of the equation; behind the last if the value is returned.
      label: what it is.
    """

    index: int
    label: str


@dataclasses.dataclass(frozen=True)
class Site:
    """A value with a name.

    Attributes:
      path: where its program is.
      index: the place of its equation there.
      trips: of the loops around it, the outermost first.
      aval: the type that the value has in one trip.
      where: the user's line.
      uses: what reads it, in program order.
    """

    name: str
    path: Path
    index: int
    trips: tuple[int, ...]
    aval: Any
    where: str
    uses: tuple[Use, ...]


def named(prog: Program) -> frozenset[str]:
    """All names in a program, and in the programs that its equations hold."""
    if "named" not in prog.cache:
        own = {e.params["name"] for e in prog.equations if e.primitive is name_p}
        inner = (named(program(j)) for e in prog.equations for j in jaxprs_of(e))
        prog.cache["named"] = frozenset(own.union(*inner))
    return prog.cache["named"]


def _holds(eqn: JaxprEqn, names: frozenset[str]) -> bool:
    return any(not names.isdisjoint(named(program(j))) for j in jaxprs_of(eqn))


def level(prog: Program, names: frozenset[str]) -> Program:
    """The program with the calls opened that hold one of the names."""
    key = "level", names
    if key not in prog.cache:
        prog.cache[key] = opened(prog, lambda eqn: _inlined(eqn) if _holds(eqn, names) else None)
    return prog.cache[key]


def _inlined(eqn: JaxprEqn) -> Program | None:
    return None if placed(eqn) else called(eqn) or small(eqn)


def kind(eqn: JaxprEqn) -> str:
    """How a program in an equation is reached: "" where it is not."""
    known = traits(eqn.primitive)
    if eqn.primitive is scan_p:
        return "scan"
    if eqn.primitive is cond_p:
        return "branch"
    if eqn.primitive is jit_p:
        return "call"
    if known.calls == "region":
        return "region"
    own = known.calls == "custom" and known.call and known.call in eqn.params
    return "custom" if own and len(body(eqn).inputs) == len(eqn.invars) else ""


def bodies(eqn: JaxprEqn) -> list[Program]:
    """The programs of an equation that has a `kind`."""
    if kind(eqn) == "branch":
        return [program(b) for b in eqn.params["branches"]]
    return [program(eqn.params["jaxpr"]) if kind(eqn) == "scan" else body(eqn)]


def sites(prog: Program, name: str, names: frozenset[str], asked: str) -> list[Site]:
    """The values of one name, in program order, in programs that are open for some `names`.

    Raises:
      WrongArgument: there is none; names like it are shown.
      WrongDtype: one has no derivative.
      NotDifferentiable: one is where no perturbation reaches it, as in a loop of unknown length.
    """
    found = list(_sites(prog, name, names, asked, (), ()))
    if not found:
        there = sorted(named(prog))
        like = difflib.get_close_matches(name, there, 3, 0.4) or there[:5]
        raise WrongArgument(
            asked,
            f"no value of the function is named {name!r}",
            "",
            f"use one of its names, such as {', '.join(map(repr, like))}"
            if like
            else f'name a value, h = xform.name(h, "{name}"), and use what is returned',
        )
    for site in found:
        if not differentiable(site.aval):
            raise WrongDtype(
                asked,
                f"the value named {name!r} is of type {site.aval.str_short()}, which has no "
                "derivative",
                site.where,
                "name a value of floats",
            )
    return found


def _sites(prog: Program, name: str, names: frozenset[str], asked: str, path: Path,
           trips: tuple[int, ...]) -> Iterator[Site]:  # fmt: skip
    prog = level(prog, names)
    for i, eqn in enumerate(prog.equations):
        if eqn.primitive is name_p and eqn.params["name"] == name:
            (v,) = eqn.outvars
            yield Site(name, path, i, trips, v.aval, frame(eqn), tuple(_uses(prog, v)))
        elif _holds(eqn, frozenset((name,))):
            if not kind(eqn):
                raise _refused(asked, name, eqn)
            more = (eqn.params["length"],) if kind(eqn) == "scan" else ()
            for k, inner in enumerate(bodies(eqn)):
                yield from _sites(inner, name, names, asked, (*path, (i, k)), (*trips, *more))


def _uses(prog: Program, v: Var) -> Iterator[Use]:
    for i, eqn in enumerate(prog.equations):
        if any(x is v for x in eqn.invars):
            called = eqn.params.get("name")
            label = eqn.primitive.name + (f" {called}" if isinstance(called, str) else "")
            where = near(frame(eqn))
            yield Use(i, f"{label}, {where}" if where else label)
    if any(x is v for x in prog.outputs):
        yield Use(len(prog.equations), "returned")


def _refused(asked: str, name: str, eqn: JaxprEqn) -> NotDifferentiable:
    loop = "cond_jaxpr" in eqn.params
    why = ", of which nobody knows how many trips it makes" if loop else ""
    return NotDifferentiable(
        asked,
        f"the value named {name!r} is made inside {eqn.primitive.name}{why}",
        frame(eqn),
        "write the loop as lax.scan, or name what it returns" if loop else "name a value outside",
    )


def listed(uses: Sequence[Use]) -> str:
    """The readers of a value as text, numbered."""
    return "; ".join(f"{i}: {use.label}" for i, use in enumerate(uses)) or "nothing reads it"
