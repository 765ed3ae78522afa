"""The table is complete: every rule has a case, every primitive of JAX has a rule or a reason."""

import importlib
from pathlib import Path

from jax import lax

from xform._jax import primitives
from xform.interpret.node import Structured
from xform.table import RULES

FAMILIES = [path.stem for path in Path(__file__).parent.glob("cases/[a-z]*.py")]
MODULES = [importlib.import_module(f"tests.rules.cases.{family}") for family in FAMILIES]
TRIED = {case.primitive for module in MODULES for case in module.CASES}

# Primitives of JAX that have no rule.
WITHOUT = {
    **dict.fromkeys(("eig", "hessenberg", "schur"), "linear algebra: next release"),
    **dict.fromkeys(("householder_product", "tridiagonal"), "linear algebra: next release"),
    **dict.fromkeys(("get", "swap"), "mutable references: next release"),
    **dict.fromkeys(("after_all", "create_token"), "tokens: there is nothing to differentiate"),
    **dict.fromkeys(
        ("call", "custom_lin"), "JAX's own AD makes it, and it is in no traced program"
    ),
    "eval_jaxpr": "made and consumed inside JAX's own transforms",
    "ragged_all_to_all": "collectives over ragged arrays: next release",
    "select_and_scatter": "takes programs, and no function of JAX binds it",
}

# Rules that need more than a function and its arguments.
ELSEWHERE = {
    "reshard": "a mesh of explicit axes: test_rules",
    "tie": "the engine's own: tests/interpret",
}


# Read before any test runs: other tests declare rules of their own.
LIBRARY = tuple(RULES)


def has_a_case(name: str) -> bool:
    rule = RULES[name]
    new = name in {"log2", "one_minus_square", "polynomial"} and not hasattr(lax, name)
    collective = any(f.__module__ == "xform.rules.collective" for f in rule.formulas)
    known = new or collective or name in TRIED or name in ELSEWHERE
    return known or rule.word == "constant" or isinstance(rule, Structured)


def test_every_rule_has_a_case() -> None:
    assert not [name for name in LIBRARY if not has_a_case(name)]


def test_every_case_has_a_rule() -> None:
    assert not TRIED - RULES.keys()


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    assert not primitives().keys() - RULES.keys() - WITHOUT.keys()


def test_what_is_without_a_rule_is_still_without() -> None:
    assert not WITHOUT.keys() & RULES.keys()
