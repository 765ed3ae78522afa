"""Whether the rule under test is the one that ran."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

from xform._jax import Primitive, closed
from xform.program.arithmetic import differentiable
from xform.registry.table import RULES, Rule, rule_of


@contextmanager
def watch(name: str, f: Callable[..., Any], xs: Any, fail: Callable[[str, str], None]
          ) -> Generator[None]:  # fmt: skip
    """See that a primitive is in a program, and that its rule is asked for the derivative.

    `fail` takes what was checked, and the problem. An empty name asks for nothing.
    """
    if not name:
        yield
        return
    program = closed(jax.make_jaxpr(f)(*xs))[0]
    held = _primitives(program)
    if name not in held:
        return fail("the program", f"it holds no primitive {name}: {sorted(held)}")
    rule = rule_of(held[name])
    if rule is None:
        return fail("the table", f"no rule is declared for {name}")
    seen: set[str] = set()
    RULES[held[name]] = _seen(rule, seen)
    try:
        yield
    finally:
        RULES[held[name]] = rule
    carries = lambda variables: any(differentiable(v.aval) for v in variables)
    # Only at the top level: what stands inside other programs may have been analyzed before.
    eqns = [eqn for eqn in program.eqns if eqn.primitive.name == name]
    derive = {"push", "pull", "call", "jvp", "vjp", "node"}
    asked = {"active"} if rule.word == "constant" else derive
    if not seen & asked and any(carries(eqn.invars) and carries(eqn.outvars) for eqn in eqns):
        fail("the rule that ran", f"the rule of {name} was not asked for a derivative")


def _seen(rule: Rule, seen: set[str]) -> Rule:
    """A copy of a rule, of a subclass of its class, that notes which attributes are read."""

    class Seen(type(rule)):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    copy = object.__new__(Seen)
    copy.__dict__.update(vars(rule))
    return copy


def _primitives(program: Any) -> dict[str, Primitive]:
    primitives: dict[str, Primitive] = {}
    for eqn in program.eqns:
        primitives[eqn.primitive.name] = eqn.primitive
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = closed(value)[0]
            primitives |= _primitives(inner) if hasattr(inner, "eqns") else {}
    return primitives
