"""Check that the rule under test is the rule that ran."""

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
    """Context that checks that a program has a primitive, and that the primitive's rule is used.

    Args:
      name: the primitive's name; an empty name checks nothing.
      f: the function.
      xs: its arguments.
      fail: called with the check and the problem.
    """
    if not name:
        yield
        return
    program = closed(jax.make_jaxpr(f)(*xs))[0]
    primitives = _primitives(program)
    if name not in primitives:
        return fail("the program", f"it has no primitive {name}: {sorted(primitives)}")
    rule = rule_of(primitives[name])
    if rule is None:
        return fail("the table", f"no rule is declared for {name}")
    seen: set[str] = set()
    RULES[primitives[name]] = _recording(rule, seen)
    try:
        yield
    finally:
        RULES[primitives[name]] = rule
    carries = lambda variables: any(differentiable(v.aval) for v in variables)
    # Only at the top level, since inner programs may have been analyzed before.
    eqns = [eqn for eqn in program.eqns if eqn.primitive.name == name]
    derive = {"push", "pull", "call", "jvp", "vjp", "node"}
    expected = {"active"} if rule.word == "constant" else derive
    if not seen & expected and any(carries(eqn.invars) and carries(eqn.outvars) for eqn in eqns):
        fail("the rule that ran", f"the rule of {name} was not used for the derivative")


def _recording(rule: Rule, seen: set[str]) -> Rule:
    """A copy of a rule that records the names of the attributes that are read."""

    class Recording(type(rule)):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    copy = object.__new__(Recording)
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
