"""Where the axes of operands end: reversed operands give the reversed result, or the same sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rules.test_rules import CASES, heavy, marks
from xform._jax import JaxprEqn
from xform.program.equation import bind, read
from xform.program.ir import environment, trace
from xform.registry.table import ends, rules_by_name
from xform.slices.opened import opened
from xform.testing import Case

pytestmark = pytest.mark.usefixtures("x64")
TRAITS = {name: rule.traits for name, rule in rules_by_name().items()}


def cases() -> Iterator[Any]:
    """Yield the case of each primitive with the most operands; the other cases are slow.

    The axes of an elementwise operation stay, and a barrier has a result for each operand.
    """
    seen: set[str] = set()
    for case in sorted(CASES, key=lambda case: -len(case.args)):
        if case.primitive == "optimization_barrier" or heavy(case):
            continue
        if TRAITS[case.primitive].fusion != "elementwise":
            late = case.primitive in seen
            seen.add(case.primitive)
            yield pytest.param(case, marks=marks[late], id=case.id)


def check(eqn: JaxprEqn, xs: list[Any], ys: list[Any]) -> None:
    """Reverse all axes of operands that end together."""
    found = ends(eqn)
    for group in {end for of in found for end in of if end is not None}:
        axes = [[a for a, end in enumerate(of) if end == group] for of in found]
        reversed_xs = [
            jnp.asarray(np.flip(np.asarray(x), at)) if at else x
            for x, at in zip(xs, axes, strict=True)
        ]
        for y, got in zip(ys, bind(eqn, reversed_xs), strict=True):
            want = np.flip(np.asarray(y), group) if group < np.ndim(y) else y
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=f"{eqn} {group}")


def test_an_axis_that_counts_from_the_end_is_mixed() -> None:
    for axis in (-1, 1):
        top = lambda x: [*jax.lax.approx_max_k(x, 4, reduction_dimension=axis)]  # noqa: B023
        (eqn,) = trace(top, jnp.ones((8, 8))).equations
        assert ends(eqn) == [(0, None)]


def test_indices_along_several_axes_are_summed_one_by_one() -> None:
    add = lambda x, i, y: [x.at[i].add(y)]
    x, i = jnp.zeros((4, 5)), jnp.array([[0, 1, 1], [3, 0, 1]])
    prog = opened(trace(add, x, i, jnp.ones((2, 3, 5))))
    (eqn,) = [eqn for eqn in prog.equations if eqn.primitive.name.startswith("scatter")]
    assert ends(eqn) == [(None, 1), (2, 3, None), (2, 3, 1)]


@pytest.mark.parametrize("case", list(cases()))
def test_reversed_operands(case: Case) -> None:
    prog = opened(trace(lambda *xs: jax.tree.leaves(case.fun(*xs)), *map(jnp.asarray, case.args)))
    env = environment(prog, [*map(jnp.asarray, case.args)])
    for eqn in prog.equations:
        xs = [read(env, v) for v in eqn.invars]
        ys = bind(eqn, xs)
        env.update(zip(eqn.outvars, ys, strict=True))
        check(eqn, xs, ys)
