"""Every case of every family, in every dtype and mode. The costly products are slow."""

import importlib
from pathlib import Path

import jax
import pytest

from xform.testing import MODES, Case, check_rule

FAMILIES = [path.stem for path in sorted(Path(__file__).parent.glob("cases/[a-z]*.py"))]
CASES = [c for f in FAMILIES for c in importlib.import_module(f"tests.rules.cases.{f}").CASES]


def ids(case: Case) -> str:
    return case.id


def dtypes(case: Case, *names: str) -> list[str]:
    """Those of the dtypes in which a case has a meaning."""
    left_out = {"complex64", "complex128"} if not case.complex else set()
    return [n for n in names if n not in left_out and (case.bfloat16 or n != "bfloat16")]


def test_names_are_unique() -> None:
    names = [case.id for case in CASES]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rule(case: Case) -> None:
    check_rule(case, dtypes=["float64"], modes=MODES)
    others = dtypes(case, "float32", "complex128")
    check_rule(case, dtypes=others, modes=["jit"] if case.jax else ["first"])


@pytest.mark.slow
@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rule_in_every_dtype(case: Case) -> None:
    first = [m for m in MODES if m != "second"]
    check_rule(case, dtypes=dtypes(case, "float32", "bfloat16", "complex64"), modes=first)
    check_rule(case, dtypes=dtypes(case, "complex128"), modes=MODES)
    jax.clear_caches()  # thousands of small programs
