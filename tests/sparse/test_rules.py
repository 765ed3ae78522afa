"""Every rule: each case's pattern contains all nonzeros of JAX's dense Jacobian."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.rules.test_rules import CASES, heavy, marks
from xform.program.arithmetic import differentiable
from xform.registry.table import Rule, rules_by_name
from xform.testing import Case, cast


def dense(case: Case, args: tuple, on: list[int]) -> np.ndarray:
    """Return where JAX's Jacobian is not zero, column by column.

    Rows are the elements of the outputs, columns those of the inputs at `on`; a complex input is
    moved along both axes.
    """
    active = [args[i] for i in on]
    sizes = [x.size for x in active]
    ad = jax if case.jax else xform

    def f(*active):
        full = list(args)
        for i, x in zip(on, active, strict=True):
            full[i] = x
        leaves = jax.tree.leaves(case.fun(*full))
        return [y if differentiable(jax.typeof(y)) else jnp.zeros(jnp.shape(y)) for y in leaves]

    def nonzero(active, v, unit):
        parts = jnp.split(v, np.cumsum(sizes)[:-1])
        dxs = [(unit if jnp.iscomplexobj(x) else 1) * p.reshape(x.shape).astype(x.dtype)
               for p, x in zip(parts, active, strict=True)]  # fmt: skip
        dys = ad.jvp(f, tuple(active), tuple(dxs))[1]
        return jnp.concatenate([jnp.ravel(dy != 0) for dy in dys] or [jnp.zeros(0, bool)])

    def column(active, v):
        real = nonzero(active, v, 1)
        moves = any(map(jnp.iscomplexobj, active))
        return real | nonzero(active, v, 1j) if moves else real

    # The point is an argument, because XLA aborts on some of these programs if it folds constants.
    columns = jax.jit(lambda active, basis: lax.map(lambda v: column(active, v), basis))
    return np.asarray(columns(active, np.eye(sum(sizes)))).T


def exact(rule: Rule) -> bool:
    """Return whether an operation is elementwise or moves data, by a formula or linearly."""
    moves = rule.traits.fusion in ("elementwise", "movement") and rule.word != "composite"
    return rule.word == "pointwise" or moves


def cases() -> Iterator[Any]:
    """Yield two cases of each primitive; the others, and large programs, are slow."""
    seen = collections.Counter()
    for case in CASES:
        seen[case.primitive] += 1
        late = heavy(case) or seen[case.primitive] > 2
        yield pytest.param(case, marks=marks[late], id=case.id)


@pytest.mark.usefixtures("x64", "quick_compilation")
@pytest.mark.parametrize("case", list(cases()))
def test_the_pattern_holds_the_truth(case: Case) -> None:
    args = tuple(cast(x, "float64", i) for i, x in enumerate(case.args))
    on = [i for i, x in enumerate(args) if differentiable(jax.typeof(x))]
    truth = dense(case, args, on)
    everywhere = xform.sparse.sparsity(case.fun, *args, argnums=on).todense()
    here = xform.sparse.sparsity(case.fun, *args, argnums=on, at_point=True).todense()
    assert everywhere.shape == here.shape == truth.shape
    assert not (truth & ~here).any()
    assert not (here & ~everywhere).any()
    if exact(rules_by_name()[case.primitive]):
        np.testing.assert_array_equal(here, truth)
