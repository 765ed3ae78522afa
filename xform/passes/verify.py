"""The verifier that runs between passes: is this a program, and of the same types and effects?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, has_effects
from xform.errors import BrokenPass
from xform.ir import Program, bind, trace
from xform.passes.listing import Names, line
from xform.passes.structured import bodies
from xform.source import frame


def verify(before: Program, after: Program, name: str = "") -> None:
    """Check that a pass made a program of the same types and effects.

    Inputs and outputs have the types they had. Every variable is defined once, and before it is
    read. Equations that the pass made or changed have the types that their primitives say. The
    equations with effects are those that there were, in their order. Nested programs are checked
    in the same way, but for the types.

    Args:
      before: the program that a pass was given.
      after: what it made.
      name: of the pass, for the message.

    Raises:
      BrokenPass: it did not, with the first equation that is wrong.

    Cost: linear in equations; each changed one is traced once.

    >>> from xform import ir, passes
    >>> prog = ir.trace(lambda x: [jnp.sin(x)], jnp.ones(3))
    >>> passes.verify(prog, passes.Dce()(prog))
    """
    asked = f"pass {name!r}" if name else "a pass"
    asked += f" on a program of {len(before.equations)} equations"
    for what, old, new in (("inputs", before.in_avals, after.in_avals),
                           ("outputs", before.out_avals, after.out_avals)):  # fmt: skip
        if old != new:
            raise _broken(asked, f"its {what} became {_types(new)}, and were {_types(old)}")
    _defined(asked, after)
    known = {_signature(e) for e in before.equations}
    for i, eqn in enumerate(after.equations):
        if _signature(eqn) not in known:
            _typed(asked, i, eqn)
    old, new = list(_effects(before)), list(_effects(after))
    if [e.primitive for e in old] != [e.primitive for e in new]:
        other = (e for e, f in zip(old, [*new, *[None] * len(old)], strict=False)
                 if f is None or e.primitive is not f.primitive)  # fmt: skip
        lost = next(other, new[-1] if new else None)
        what = "" if lost is None else f", at {lost.primitive.name}"
        raise _broken(
            asked, f"the effects are not the {len(old)} that there were, in their order{what}",
            "" if lost is None else frame(lost),
        )  # fmt: skip


def _defined(asked: str, prog: Program) -> None:
    """Every variable is defined once, and before it is read."""
    known: set[Any] = set()
    for v in (*prog.inputs, *(v for v, _ in prog.consts)):
        if v in known:
            raise _broken(asked, "an input or constant is there twice")
        known.add(v)
    for i, eqn in enumerate(prog.equations):
        if any(isinstance(v, Var) and v not in known for v in eqn.invars):
            raise _wrong(asked, i, eqn, "reads a value that nothing before it makes")
        for v in eqn.outvars:
            if v in known:
                raise _wrong(asked, i, eqn, "makes a value that is there already")
            known.add(v)
        for inner in bodies(eqn):
            if "defined" not in inner.cache:
                _defined(asked, inner)
                inner.cache["defined"] = True
    for i, v in enumerate(prog.outputs):
        if not isinstance(v, Literal) and v not in known:
            raise _broken(asked, f"nothing makes output {i}")


def _signature(eqn: JaxprEqn) -> Any:
    """What the types of an equation depend on; equations keep the object of their parameters."""
    avals = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive, id(eqn.params), avals


def _typed(asked: str, i: int, eqn: JaxprEqn) -> None:
    declared = [v.aval for v in eqn.outvars]
    try:
        actual = trace(lambda *xs: bind(eqn, xs), *[v.aval for v in eqn.invars]).out_avals
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise _wrong(asked, i, eqn, f"is not well typed: {reason}") from error
    if actual != declared:
        raise _wrong(asked, i, eqn, f"makes {_types(actual)}")


def _effects(prog: Program) -> Iterator[JaxprEqn]:
    """The equations with effects in their order, those of loops, branches and calls one by one."""
    for eqn in prog.equations:
        if has_effects(eqn):
            inner = bodies(eqn)
            yield from (e for b in inner for e in _effects(b)) if inner else (eqn,)


def _wrong(asked: str, i: int, eqn: JaxprEqn, problem: str) -> BrokenPass:
    text = line(eqn, Names())
    return _broken(asked, f"equation {i}, `{text}`, {problem}", frame(eqn))


def _broken(asked: str, problem: str, where: str = "") -> BrokenPass:
    remedy = "mend the pass, or leave it out; see what it makes by its `rewrite`"
    return BrokenPass(asked, problem, where, remedy)


def _types(avals: list[Any]) -> str:
    return ", ".join(f"{a.str_short(True)}{' (weak)' * getattr(a, 'weak_type', False)}"
                     for a in avals) or "none"  # fmt: skip
