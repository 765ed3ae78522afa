"""Small calls in a traced program replaced by what they call, so that a plan sees through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, within
from xform.ir import Atom, Program
from xform.table import RULES


def inline(prog: Program) -> Program:
    """The program with its small calls opened, and those within them. Linear in equations."""
    if not any(map(_opened, prog.equations)):
        return prog
    names: dict[Any, Atom] = {}
    consts = dict(prog.consts)
    equations = tuple(_open(prog.equations, names, consts, None))
    outputs = tuple(_renamed(prog.outputs, names))
    return Program(prog.inputs, tuple(consts.items()), equations, outputs)


def _opened(eqn: JaxprEqn) -> Program | None:
    rule = RULES.get(eqn.primitive.name)
    return None if rule is None else rule.inlined(eqn, True)


def _open(equations: Sequence[JaxprEqn], names: dict[Any, Atom], consts: dict[Var, Any],
          call: JaxprEqn | None) -> Iterator[JaxprEqn]:  # fmt: skip
    """The equations of a program, or of what a `call` calls: then with variables of its own."""
    for eqn in equations:
        inputs = _renamed(eqn.invars, names)
        here = eqn if call is None else within(eqn, call)
        inner = _opened(eqn)
        if inner is not None:
            consts.update(inner.consts)
            own: dict[Any, Atom] = dict(zip(inner.inputs, inputs, strict=True))
            yield from _open(inner.equations, own, consts, here)
            names.update(zip(eqn.outvars, _renamed(inner.outputs, own), strict=True))
        elif call is None:
            yield eqn.replace(invars=inputs)
        else:
            outputs = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outputs, strict=True))
            yield here.replace(invars=inputs, outvars=outputs)


def _renamed(atoms: Sequence[Atom], names: dict[Any, Atom]) -> list[Atom]:
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]
