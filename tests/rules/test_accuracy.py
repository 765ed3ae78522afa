"""Derivatives are as accurate as their functions: few points here, all of them in `experiments`."""

import json

import mpmath
import numpy as np
import pytest

from experiments.accuracy.functions import FUNCTIONS
from experiments.accuracy.measure import Row, rows
from experiments.accuracy.points import points
from experiments.accuracy.reasons import REASONS
from experiments.accuracy.run import RESULTS, read
from xform.table import RULES
from xform.words import Bilinear, Pointwise

# Their derivatives are constants, or what they are of is not a number of one type.
EXACT = {"add_any", "clamp", "nextafter", "name"}
# A random number that depends on its parameter is known by no formula.
RANDOM = {"random_gamma"}
MANY = {"dot_general", "ragged_dot_general", "conv_general_dilated"}  # sums of products
SLOW = {"igamma", "igammac", "igamma_grad_a", "zeta"}


def held(row: Row) -> None:
    assert not row.worse, row
    assert not row.missed or row.name in REASONS or row.function in REASONS, row


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in SLOW])
def test_derivatives_are_as_accurate_as_their_functions(name: str) -> None:
    for dtype in ("float32", "float64"):
        for row in rows(FUNCTIONS[name], dtype, 200):
            held(row)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_accurate_in_every_type(name: str) -> None:
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for row in rows(FUNCTIONS[name], dtype, 100 if name in SLOW else 2000):
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


def test_at_most_a_tenth_of_the_rows_misses_the_bar() -> None:
    found = read(json.loads(RESULTS.read_text()))
    for row in found:
        held(row)
    assert sum(row.missed for row in found) <= 0.1 * len(found)
