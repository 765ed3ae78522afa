"""Derivatives where formulas divide by zero, tie or overflow: JAX's, if JAX's are numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

import xform

INF, NAN = np.inf, np.nan
ROWS = np.array([
    [1, 1, 0], [0, 0, 0], [0, 2, 0], [NAN, 1, 1], [INF, INF, 1], [-INF, -INF, -INF], [-INF, 1, 2],
    [INF, -INF, 0], [3, 3, 3], [-0.0, 0.0, -1], [-1, -2, 0.5], [1, NAN, NAN],
], np.float32)  # fmt: skip
AT, SEGMENT = np.array([0, 0, 1]), np.array([0, 1, 0])


def known(x: Any) -> Any:
    """Return `x` without NaN. NaN keeps its derivative (0 in JAX) if nothing is scattered to it."""
    return jnp.nan_to_num(x, posinf=INF, neginf=-INF)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (jnp.sqrt, jnp.log1p, jnp.expm1, jnp.sinc, jnp.sign, jnp.abs)},
    "integer power": lambda x: x**2 + x**0 + x**-1,
    "power": lambda x: x ** jnp.roll(x, 1, -1),
    "arctan2": lambda x: jnp.arctan2(x, jnp.roll(x, 1, -1)),
    "maximum": lambda x: jnp.maximum(x, jnp.roll(x, 1, -1)) + jnp.minimum(x, 0),
    "logaddexp": lambda x: jnp.logaddexp(x, jnp.roll(x, 1, -1)),
    "clamp": lambda x: lax.clamp(np.float32(-1), x, np.float32(1)),
    "xlogy": lambda x: special.xlogy(x, jnp.roll(x, 1, -1)),
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (jnp.prod, jnp.max, jnp.min, jnp.sort, special.logsumexp)},
    "norm": jnp.linalg.norm,
    "cumulative": lambda x: (lax.cumlogsumexp(x), lax.cummax(x), lax.cummin(x), lax.cumprod(x)),
    "segments": lambda x: jax.ops.segment_max(x, SEGMENT, 3),
    "places": lambda x: (known(x).at[AT].max(known(x)[::-1]), known(x).at[AT].min(known(x)[::-1])),
}
EVERY = {**ELEMENTWISE, **{n: jax.vmap(f) for n, f in REDUCTIONS.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_derivatives_at_the_edges_are_those_of_jax(name: str) -> None:
    def both(t: Any) -> list[Any]:
        y, pull = t.vjp(EVERY[name], ROWS)
        return jax.tree.leaves((pull(jax.tree.map(jnp.ones_like, y)),
                                t.jvp(EVERY[name], (ROWS,), (np.ones_like(ROWS),))[1]))  # fmt: skip

    for ours, theirs in zip(both(xform), both(jax), strict=True):
        finite = np.isfinite(theirs)
        np.testing.assert_allclose(np.asarray(ours)[finite], np.asarray(theirs)[finite], 2e-6)
