"""The table is complete: every rule has a case, every primitive of JAX has a rule or a reason."""

import gc
import importlib
from pathlib import Path

import pytest
from jax import lax
from jax.experimental import hijax, multihost_utils, pallas, sparse

import xform
from tests.rules.elsewhere import ELSEWHERE
from xform._jax import Primitive, registered
from xform.rules.without import ONE_WAY, WITHOUT
from xform.table import RULES

FAMILIES = [path.stem for path in Path(__file__).parent.glob("cases/[a-z]*.py")]
MODULES = [importlib.import_module(f"tests.rules.cases.{family}") for family in FAMILIES]
TRIED = {case.primitive for module in MODULES for case in module.CASES}
ROOT = Path(xform.__file__).parent.parent

# Kernels and calls that this machine cannot make; the rule is that of others which it can.
UNMADE = {
    *(name for name, rule in RULES.items() if rule.word == "opaque"),
    "stage", "broadcast_to", "with_memory_space_constraint",
}  # fmt: skip


# They register primitives of their own.
IMPORTED = (hijax, multihost_utils, pallas, sparse)

# Read before any test runs: other tests declare rules of their own.
LIBRARY = tuple(RULES)


def has_a_case(name: str) -> bool:
    new = name in {"log2", "one_minus_square", "polynomial"} and not hasattr(lax, name)
    known = new or name in TRIED or name in ELSEWHERE or name in UNMADE
    return known or RULES[name].word == "constant"


def test_every_rule_has_a_case() -> None:
    assert not [name for name in LIBRARY if not has_a_case(name)]


def test_every_case_has_a_rule() -> None:
    assert not TRIED - RULES.keys()


@pytest.mark.parametrize("path", sorted(set(ELSEWHERE.values())))
def test_what_is_tested_elsewhere_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    """Those that are public, and those for which JAX has a derivative."""
    assert not registered() - RULES.keys() - WITHOUT.keys()


def test_what_is_without_a_rule_is_still_without() -> None:
    assert not WITHOUT.keys() & RULES.keys()


def test_what_is_without_a_rule_exists() -> None:
    existing = {p.name for p in gc.get_objects() if isinstance(p, Primitive)}
    assert not WITHOUT.keys() - existing


def test_reasons_are_short() -> None:
    assert len(set(WITHOUT.values())) <= 12
    assert ONE_WAY.keys() <= RULES.keys()
