"""Check that a derivative used the rule of the primitive under test.

Within `watch` the rule is replaced by a copy that records which of its attributes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from xform._jax import Primitive, jaxpr_and_consts
from xform.program.arithmetic import differentiable
from xform.registry.table import RULES, Rule, rule_of


@contextmanager
def watch(name: str, f: Callable[..., Any], xs: Any, fail: Callable[[str, str], NoReturn]
          ) -> Generator[None]:  # fmt: skip
    """Return a context that checks that a derivative uses the rule of a primitive.

    It also checks that the differentiated function uses the primitive.

    Args:
      name: the primitive's name; an empty name checks nothing.
      f: the function, which is differentiated inside the context.
      xs: its arguments.
      fail: called with the check and the problem if a check fails; it raises an error.
    """
    if not name:
        yield
        return
    program = jaxpr_and_consts(jax.make_jaxpr(f)(*xs))[0]
    primitives = _primitives(program)
    if name not in primitives:
        fail("the program", f"it has no primitive {name}: {sorted(primitives)}")
    rule = rule_of(primitives[name])
    if rule is None:
        fail("the table", f"no rule is declared for {name}")
    read: set[str] = set()
    RULES[primitives[name]] = _recording(rule, read)
    try:
        yield
    finally:
        RULES[primitives[name]] = rule
    has_float = lambda variables: any(differentiable(v.aval) for v in variables)
    # Only equations at the top level count. The analysis of an inner program may be cached, so that
    # a use of the rule there would not be seen.
    eqns = [eqn for eqn in program.eqns if eqn.primitive.name == name]
    # A derivative reads one of these attributes of the rule.
    derive = {"push", "pull", "call", "jvp", "vjp", "node"}
    expected = {"active"} if rule.word == "constant" else derive
    needs_rule = any(has_float(eqn.invars) and has_float(eqn.outvars) for eqn in eqns)
    if needs_rule and not read & expected:
        fail("the rule that ran", f"the rule of {name} was not used for the derivative")


def _recording(rule: Rule, read: set[str]) -> Rule:
    """Return a copy of a rule that adds the name of each attribute that is read to `read`."""

    class Recording(type(rule)):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    copy = object.__new__(Recording)
    copy.__dict__.update(vars(rule))
    return copy


def _primitives(program: Any) -> dict[str, Primitive]:
    """Return all primitives of a jaxpr and of the programs nested in it, by name."""
    primitives: dict[str, Primitive] = {}
    for eqn in program.eqns:
        primitives[eqn.primitive.name] = eqn.primitive
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = jaxpr_and_consts(value)[0]
            primitives |= _primitives(inner) if hasattr(inner, "eqns") else {}
    return primitives
