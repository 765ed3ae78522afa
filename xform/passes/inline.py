"""Inline calls: replace them by the equations of the called program, its *body*.

`Inline` is the pass for users. `inline_bodies` inlines the calls that a given function selects, and
`inlined` caches the result. `jitted_body`, `region_body`, `underived_body` and, for the planner,
`inlinable_body` are such functions, and `bodies_called_once` returns one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Literal, Var
from xform.passes.base import Pass
from xform.passes.structured import called_body, has_shardings, is_remat_region, plain_call_body
from xform.program.ir import Atom, Program
from xform.program.source import nest_in_call
from xform.registry.table import rule_of, traits

# A function that returns the program to inline in place of an equation; None keeps the equation.
BodyToInline = Callable[[JaxprEqn], Program | None]


@dataclasses.dataclass(frozen=True)
class Inline(Pass):
    """Inline calls of jitted functions.

    It keeps calls with shardings, and remat regions (`jax.checkpoint`). It also keeps functions
    with custom derivative rules, because a derivative of the program needs the rules.

    Attributes:
      max_equations: the largest body to inline, in equations; None: no limit. A large function that
        is called often is compiled only once if it stays a call.
      custom: whether to inline functions with custom rules too. The rules are then lost.

    >>> from xform import passes
    >>> f = jax.jit(lambda x: jnp.sin(x))
    >>> opened = passes.Inline()(lambda x: f(x) + 1)
    >>> [e.primitive.name for e in jax.make_jaxpr(opened)(1.0).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "inline"
    max_equations: int | None = None
    custom: bool = False

    def rewrite(self, prog: Program) -> Program:
        return inline_bodies(prog, self._body_to_inline)

    def _body_to_inline(self, eqn: JaxprEqn) -> Program | None:
        body = jitted_body(eqn)
        call_traits = traits(eqn.primitive)
        if self.custom and call_traits.call and call_traits.calls == "custom":
            body = called_body(eqn)
        fits = (
            body is None or self.max_equations is None or len(body.equations) <= self.max_equations
        )
        return body if fits else None


def inlinable_body(eqn: JaxprEqn, staged: bool = True) -> Program | None:
    """Return the body of a call that the planner inlines; None for other equations.

    The rule of the primitive decides; the rule of `jit` decides by the size of the body. With
    `staged` False, operations run one by one. Then jitted calls are kept, because they are
    compiled.
    """
    rule = rule_of(eqn.primitive)
    return None if rule is None else rule.inlined(eqn, staged)


def bodies_called_once(prog: Program) -> BodyToInline:
    """Return a function that selects the bodies of jitted functions that `prog` calls only once.

    If such a call stays a call, the compiler has no less work, and the planner cannot decide about
    single values in its body.
    """
    calls: collections.Counter[Program] = collections.Counter()

    def count(equations: Sequence[JaxprEqn]) -> None:
        for body in filter(None, map(jitted_body, equations)):
            calls[body] += 1
            if calls[body] == 1:
                count(body.equations)

    count(prog.equations)

    def body_if_called_once(eqn: JaxprEqn) -> Program | None:
        body = jitted_body(eqn)
        return body if body is not None and calls[body] == 1 else None

    return body_if_called_once


def jitted_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call of a jitted function without shardings; else None."""
    return None if has_shardings(eqn) else plain_call_body(eqn)


def region_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a remat region that JAX has not yet differentiated; else None."""
    return called_body(eqn) if is_remat_region(eqn) else None


def underived_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call without a derivative of its own; None for other equations."""
    known = traits(eqn.primitive)
    return called_body(eqn) if known.call and known.calls != "custom" else None


def inlined(prog: Program, body_to_inline: BodyToInline) -> Program:
    """Return `inline_bodies(prog, body_to_inline)`, cached on the program.

    `body_to_inline` must be a function that lives as long as Python does.
    """
    key = "inlined", body_to_inline
    if key not in prog.cache:
        prog.cache[key] = inline_bodies(prog, body_to_inline)
    return prog.cache[key]


def inline_bodies(prog: Program, body_to_inline: BodyToInline) -> Program:
    """Inline some calls of a program, also calls inside inlined calls.

    `body_to_inline` returns the program to inline for an equation, or None to keep the equation.
    The time is linear in the number of equations.
    """
    if not any(body_to_inline(eqn) is not None for eqn in prog.equations):
        return prog
    names: dict[Any, Atom] = {}
    consts = dict(prog.consts)
    equations = tuple(_inlined(prog.equations, body_to_inline, names, consts, None))
    outputs = tuple(_rename(prog.outputs, names))
    return Program(prog.inputs, tuple(consts.items()), equations, outputs)


def _inlined(equations: Sequence[JaxprEqn], body_to_inline: BodyToInline, names: dict[Any, Atom],
             consts: dict[Var, Any], call: JaxprEqn | None) -> Iterator[JaxprEqn]:  # fmt: skip
    """Yield the equations of a program after inlining.

    If the program is the body of a call, `call` is that call, and the equations get fresh
    variables. `names` maps variables to their new names. New names and constants are added to
    `names` and `consts`.
    """
    for eqn in equations:
        inputs = _rename(eqn.invars, names)
        scoped = eqn if call is None else nest_in_call(eqn, call)
        body = body_to_inline(eqn)
        if body is not None:
            consts.update(body.consts)
            inner_names: dict[Any, Atom] = dict(zip(body.inputs, inputs, strict=True))
            yield from _inlined(body.equations, body_to_inline, inner_names, consts, scoped)
            names.update(zip(eqn.outvars, _rename(body.outputs, inner_names), strict=True))
        elif call is None:
            yield eqn.replace(invars=inputs)
        else:
            outputs = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outputs, strict=True))
            yield scoped.replace(invars=inputs, outvars=outputs)


def _rename(atoms: Sequence[Atom], names: dict[Any, Atom]) -> list[Atom]:
    """Replace the variables among `atoms` that have a new name in `names`."""
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]
