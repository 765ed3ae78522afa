"""Inline calls: replace them by the equations of the called program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Literal, Var
from xform.passes.base import Pass
from xform.passes.structured import called_body, has_shardings, plain_call_body
from xform.program.ir import Atom, Program
from xform.program.source import nest_in_call
from xform.registry.table import rule_of, traits

# Returns the program that replaces an equation; None keeps the equation.
BodyToInline = Callable[[JaxprEqn], Program | None]


@dataclasses.dataclass(frozen=True)
class Inline(Pass):
    """Inline calls of jitted functions.

    It keeps calls with shardings, and remat regions. It also keeps functions with custom derivative
    rules, because a derivative of the program needs the rules.

    Attributes:
      most: the largest body to inline, in equations; None: no limit. A large function that is
        called often is compiled only once if it stays a call.
      custom: whether to inline functions with custom rules too. The rules are then lost.

    >>> from xform import passes
    >>> f = jax.jit(lambda x: jnp.sin(x))
    >>> opened = passes.Inline()(lambda x: f(x) + 1)
    >>> [e.primitive.name for e in jax.make_jaxpr(opened)(1.0).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "inline"
    most: int | None = None
    custom: bool = False

    def rewrite(self, prog: Program) -> Program:
        return inline_bodies(prog, self._opens)

    def _opens(self, eqn: JaxprEqn) -> Program | None:
        inner = _jitted(eqn)
        of = traits(eqn.primitive)
        if self.custom and of.call and of.calls == "custom":
            inner = called_body(eqn)
        fits = inner is None or self.most is None or len(inner.equations) <= self.most
        return inner if fits else None


def inlinable_body(eqn: JaxprEqn, staged: bool = True) -> Program | None:
    """Return the body of a call that the planner inlines; None for other equations.

    The rule of the primitive decides, for a jit by its size. With `staged` False, operations run
    one by one. Then jitted calls are kept, because they are compiled.
    """
    rule = rule_of(eqn.primitive)
    return None if rule is None else rule.inlined(eqn, staged)


def bodies_called_once(prog: Program) -> BodyToInline:
    """Return a function that returns the body of a jitted function if the program calls it once.

    Such a call saves the compiler no work, and its borders would hide the body from the planner.
    """
    calls: collections.Counter[Program] = collections.Counter()

    def count(equations: Sequence[JaxprEqn]) -> None:
        for inner in filter(None, map(_jitted, equations)):
            calls[inner] += 1
            if calls[inner] == 1:
                count(inner.equations)

    count(prog.equations)

    def opens(eqn: JaxprEqn) -> Program | None:
        inner = _jitted(eqn)
        return inner if inner is not None and calls[inner] == 1 else None

    return opens


def _jitted(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call of a jitted function without shardings."""
    return None if has_shardings(eqn) else plain_call_body(eqn)


def inline_bodies(prog: Program, opens: BodyToInline) -> Program:
    """Inline some calls of a program, also calls inside inlined calls. Linear in equations.

    `opens` returns the program to inline for an equation, or None to keep it.
    """
    if not any(opens(eqn) is not None for eqn in prog.equations):
        return prog
    names: dict[Any, Atom] = {}
    consts = dict(prog.consts)
    equations = tuple(_open(prog.equations, opens, names, consts, None))
    outputs = tuple(_renamed(prog.outputs, names))
    return Program(prog.inputs, tuple(consts.items()), equations, outputs)


def _open(equations: Sequence[JaxprEqn], opens: BodyToInline, names: dict[Any, Atom],
          consts: dict[Var, Any], call: JaxprEqn | None) -> Iterator[JaxprEqn]:  # fmt: skip
    """The equations of a program after inlining.

    With `call`, they are the body of this call, and get fresh variables.
    """
    for eqn in equations:
        inputs = _renamed(eqn.invars, names)
        scoped = eqn if call is None else nest_in_call(eqn, call)
        inner = opens(eqn)
        if inner is not None:
            consts.update(inner.consts)
            own: dict[Any, Atom] = dict(zip(inner.inputs, inputs, strict=True))
            yield from _open(inner.equations, opens, own, consts, scoped)
            names.update(zip(eqn.outvars, _renamed(inner.outputs, own), strict=True))
        elif call is None:
            yield eqn.replace(invars=inputs)
        else:
            outputs = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outputs, strict=True))
            yield scoped.replace(invars=inputs, outvars=outputs)


def _renamed(atoms: Sequence[Atom], names: dict[Any, Atom]) -> list[Atom]:
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]
