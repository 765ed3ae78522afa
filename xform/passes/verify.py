"""Verify the result of a pass: a valid program with the same types and effects as before.

A *pass* rewrites a program without changing its values. *Nested* programs are the bodies of loops,
branches and calls. An *effect* is a print, a callback or a use of a mutable value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, has_effects
from xform.errors import BrokenPass
from xform.passes.listing import VariableNames, line
from xform.passes.structured import bodies
from xform.program.ir import Program, bind, trace
from xform.program.source import frame


def verify(before: Program, after: Program, name: str = "") -> None:
    """Check that a pass returned a valid program with the same types and effects as before.

    The check does not compare values. It requires that

    - inputs and outputs have the same types as before;
    - every variable is defined once, before it is read, also in nested programs;
    - the results of each new or changed equation have the types that its primitive gives them. In
      nested programs, only the types of the equation around them are checked;
    - the equations with effects have the same primitives as before, in the same order, also in
      nested programs. Their parameters and operands may differ.

    Args:
      before: the program before the pass.
      after: the program after the pass.
      name: the name of the pass, for the error message.

    Raises:
      BrokenPass: a check failed. If an equation is wrong, the message shows the first such equation
        and its source line.

    Cost: linear in the number of equations. Each new or changed equation is traced once.

    >>> from xform import passes
    >>> from xform.program import ir
    >>> prog = ir.trace(lambda x: [jnp.sin(x)], jnp.ones(3))
    >>> passes.verify(prog, passes.Dce()(prog))
    """
    request = f"pass {name!r}" if name else "a pass"
    request += f" on a program of {len(before.equations)} equations"
    for what, old, new in (("inputs", before.in_avals, after.in_avals),
                           ("outputs", before.out_avals, after.out_avals)):  # fmt: skip
        if old != new:
            raise _broken(request, f"its {what} were {_types(old)} and are now {_types(new)}")
    _check_definitions(request, after)
    unchanged = {_signature(e) for e in before.equations}
    for i, eqn in enumerate(after.equations):
        if _signature(eqn) not in unchanged:
            _check_types(request, i, eqn)
    old, new = list(_effects(before)), list(_effects(after))
    if [e.primitive for e in old] != [e.primitive for e in new]:
        changed = (e for e, f in zip(old, [*new, *[None] * len(old)], strict=False)
                   if f is None or e.primitive is not f.primitive)  # fmt: skip
        first = next(changed, new[-1] if new else None)
        at = "" if first is None else f", at {first.primitive.name}"
        raise _broken(
            request, f"the effects changed ({len(old)} before, {len(new)} now), or their order{at}",
            "" if first is None else frame(first),
        )  # fmt: skip


def _check_definitions(request: str, prog: Program) -> None:
    """Check that every variable is defined once, before it is read, also in nested programs.

    `request` names the pass and its program in the error message. A nested program that passed the
    check is not checked again: it may occur in many equations.
    """
    defined: set[Any] = set()
    for v in (*prog.inputs, *(v for v, _ in prog.consts)):
        if v in defined:
            raise _broken(request, "an input or constant appears twice")
        defined.add(v)
    for i, eqn in enumerate(prog.equations):
        if any(isinstance(v, Var) and v not in defined for v in eqn.invars):
            raise _wrong(request, i, eqn, "reads a value that no earlier equation makes")
        for v in eqn.outvars:
            if v in defined:
                raise _wrong(request, i, eqn, "makes a value that already exists")
            defined.add(v)
        for inner in bodies(eqn):
            if "defined" not in inner.cache:
                _check_definitions(request, inner)
                inner.cache["defined"] = True
    for i, v in enumerate(prog.outputs):
        if not isinstance(v, Literal) and v not in defined:
            raise _broken(request, f"nothing computes output {i}")


def _signature(eqn: JaxprEqn) -> Any:
    """Return the data that determine whether an equation's types are right.

    If an equation before the pass has the same signature, `verify` does not trace the equation. An
    equation that a pass leaves unchanged keeps its dict of parameters. So the dict's `id` stands
    for the parameters.
    """
    avals = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive, id(eqn.params), avals


def _check_types(request: str, i: int, eqn: JaxprEqn) -> None:
    """Check that the outputs of equation number `i` have the types that its primitive gives."""
    declared = [v.aval for v in eqn.outvars]
    try:
        actual = trace(lambda *xs: bind(eqn, xs), *[v.aval for v in eqn.invars]).out_avals
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise _wrong(request, i, eqn, f"is not well typed: {reason}") from error
    if actual != declared:
        raise _wrong(request, i, eqn, f"makes {_types(actual)}")


def _effects(prog: Program) -> Iterator[JaxprEqn]:
    """Yield the equations with effects in program order, also those in nested programs.

    For an equation with nested programs, the equations inside it are yielded, not the equation
    itself. So a pass may rebuild a loop around a print.
    """
    for eqn in prog.equations:
        if has_effects(eqn):
            inner = bodies(eqn)
            yield from (e for b in inner for e in _effects(b)) if inner else (eqn,)


def _wrong(request: str, i: int, eqn: JaxprEqn, problem: str) -> BrokenPass:
    """Return the error for equation number `i`."""
    text = line(eqn, VariableNames())
    return _broken(request, f"equation {i}, `{text}`, {problem}", frame(eqn))


def _broken(request: str, problem: str, where: str = "") -> BrokenPass:
    """Return the error for a program."""
    remedy = "fix the pass or leave it out; its method `rewrite` returns the wrong program"
    return BrokenPass(request, problem, where, remedy)


def _types(avals: list[Any]) -> str:
    return ", ".join(f"{a.str_short(True)}{' (weak)' * getattr(a, 'weak_type', False)}"
                     for a in avals) or "none"  # fmt: skip
