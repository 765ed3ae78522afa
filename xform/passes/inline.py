"""Calls replaced by what they call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Literal, Var
from xform.ir import Atom, Program
from xform.passes.base import Pass
from xform.passes.structured import body, called, placed
from xform.source import within
from xform.table import rule_of, traits

# The program that stands for an equation; None if the equation stays.
Opens = Callable[[JaxprEqn], Program | None]


@dataclasses.dataclass(frozen=True)
class Inline(Pass):
    """Calls of jitted functions, opened.

    A call that places its values stays, and so do remat regions. Custom rules are kept, as a
    derivative of the program needs them.

    Attributes:
      most: of a body, how many equations at most; None: any number. A large function that is called
        often is compiled once as long as it is a call.
      custom: whether functions with custom rules are opened too, and lose them.

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
        return opened(prog, self._opens)

    def _opens(self, eqn: JaxprEqn) -> Program | None:
        inner = None if placed(eqn) else called(eqn)
        of = traits(eqn.primitive)
        if self.custom and of.call and of.calls == "custom":
            inner = body(eqn)
        fits = inner is None or self.most is None or len(inner.equations) <= self.most
        return inner if fits else None


def small(eqn: JaxprEqn, staged: bool = True) -> Program | None:
    """What a plan sees through: calls of no weight of their own, as the table of rules says.

    Where operations are `staged`, that is: where they run one by one, each call weighs.
    """
    rule = rule_of(eqn.primitive)
    return None if rule is None else rule.inlined(eqn, staged)


def opened(prog: Program, opens: Opens) -> Program:
    """The program with some of its calls opened, and those within them. Linear in equations."""
    if not any(opens(eqn) is not None for eqn in prog.equations):
        return prog
    names: dict[Any, Atom] = {}
    consts = dict(prog.consts)
    equations = tuple(_open(prog.equations, opens, names, consts, None))
    outputs = tuple(_renamed(prog.outputs, names))
    return Program(prog.inputs, tuple(consts.items()), equations, outputs)


def _open(equations: Sequence[JaxprEqn], opens: Opens, names: dict[Any, Atom],
          consts: dict[Var, Any], call: JaxprEqn | None) -> Iterator[JaxprEqn]:  # fmt: skip
    """The equations of a program, or of what a `call` calls: then with variables of its own."""
    for eqn in equations:
        inputs = _renamed(eqn.invars, names)
        scoped = eqn if call is None else within(eqn, call)
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
