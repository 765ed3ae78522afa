"""Derivatives are as accurate as their functions: few points here, all in `experiments`."""

import json

import mpmath
import numpy as np
import pytest

from experiments.accuracy.functions import FUNCTIONS
from experiments.accuracy.measure import BAR, Row, rows
from experiments.accuracy.points import points
from experiments.accuracy.reasons import REASONS, reason
from experiments.accuracy.run import FEW, RESULTS, read
from xform.registry.table import RULES
from xform.registry.words import Bilinear, Pointwise

# Their derivatives are constants, or their argument is not a number of one type.
EXACT = {"add_any", "clamp", "nextafter", "name"}
# No formula is known for a random number that depends on its parameter.
RANDOM = {"random_gamma"}
MANY = {"dot_general", "ragged_dot_general", "conv_general_dilated"}  # sums of products


# At the root of a second derivative both errors are noise; xform's is twice JAX's.
NOISE = {"betainc 2.0, 3.0 da da"}
KEPT = read(json.loads(RESULTS.read_text()))
BY_NAME = {(row.name, row.dtype): row for row in KEPT}


def held(row: Row) -> None:
    # Few points, under jit alone, do not find the worst errors of JAX and of the function.
    kept = BY_NAME.get((row.name, row.dtype), row)
    assert row.name in NOISE or max(row.xform) <= max(*row.jax, *kept.jax) + 1, row
    missed = max(row.xform) > max(BAR, 2 * max(*row.own, *kept.own))
    assert not missed or row.name in REASONS or row.function in REASONS, row


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in FEW])
def test_derivatives_are_as_accurate_as_their_functions(name: str) -> None:
    for dtype in ("float32", "float64"):
        for row in rows(FUNCTIONS[name], dtype, 200, ways=["jit"]):
            held(row)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_accurate_in_every_type(name: str) -> None:
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for row in rows(FUNCTIONS[name], dtype, 100 if name in FEW else 2000):
            held(row)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_references_are_the_derivatives_of_their_functions(name: str) -> None:
    function = FUNCTIONS[name]
    xs = points(function, "float16", 40)
    usual = np.all([(np.abs(x) > 0.05) & (np.abs(x) < 8) for x in xs], axis=0)
    compared = 0
    with mpmath.workprec(200):
        for x in list(zip(*(x[usual].astype(float) for x in xs), strict=True))[:3]:
            for order, formula in function.derivatives.items():
                times = tuple(order.count(i) for i in range(len(x)))
                point = tuple(map(mpmath.mpf, x))
                want = mpmath.diff(function.value, point, times)
                assert mpmath.almosteq(formula(*point), want, 1e-12, 1e-12), (x, order)
                compared += 1
    assert compared


def test_every_elementwise_rule_is_measured() -> None:
    measured = {f.primitive for f in FUNCTIONS.values()}
    kinds = (Pointwise, Bilinear)
    own = {rule.name for rule in RULES.values() if rule.own and isinstance(rule, kinds)}
    assert own - measured == EXACT | RANDOM | MANY


def test_every_row_that_misses_the_bar_has_a_reason() -> None:
    for row in KEPT:
        assert not row.missed or reason(row) != "UNKNOWN", row
    assert {row.name for row in KEPT if row.worse} <= NOISE
