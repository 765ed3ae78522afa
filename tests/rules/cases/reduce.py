"""Cases of `xform.rules.reduce`."""

import jax
import numpy as np
from jax import lax

from xform.testing import Case

RNG = np.random.default_rng(7)
X = RNG.permutation(np.linspace(-2.0, 2.2, 24)).reshape(2, 3, 4)
Y = RNG.permutation(np.linspace(0.3, 1.9, 24)).reshape(2, 3, 4)
V = np.array([0.7, -1.3, 0.4, 2.1, -0.6])
ZERO_IN = np.array([0.7, 0.0, 1.2, -0.4])
ENDLESS = np.array([-np.inf, 1.5, np.inf, 0.5, np.inf])
TIED = np.array([[1.0, 3.0, 3.0, 2.0], [0.5, -1.0, 0.5, 0.25]])
EMPTY = np.zeros((0, 3))
INDEX = np.arange(24, dtype=np.int32).reshape(2, 3, 4)


def add_mul(a, b):
    """Sum and product at once: a reducer for which lax has no other primitive."""
    return a[0] + b[0], a[1] * b[1]


def largest_with_index(a, b):
    first = lax.ge(a[0], b[0])
    return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])


def generic(reducer, inits, *axes):
    def fun(*xs):
        start = tuple(np.asarray(c, x.dtype) for c, x in zip(inits, xs, strict=True))
        return lax.reduce(xs, start, reducer, axes)

    return fun


def start_from(x, init):
    return lax.reduce((x, x), (init, init), add_mul, (0, 2))[1]


def ignore_index(values, index):
    return generic(largest_with_index, (-np.inf, 0), 1)(values, index)[0]


def chosen_by(reducer):
    """Inside a jit, because outside of it the rule of a function of bools is not used."""
    return jax.jit(lambda x: lax.select(reducer(x > 0, (1,)), x[:, 0], x[:, 1]))


def pairs_of(x, y):
    return lax.sort((x, y), dimension=1, num_keys=1)


CASES = [
    Case("reduce_sum", lambda x: lax.reduce_sum(x, (0, 2)), (X,), complex=True),
    Case("reduce_sum", lambda x: lax.reduce_sum(x, ()), (X,), label="no axes"),
    Case("reduce_sum", lambda x: lax.reduce_sum(x, (0,)), (EMPTY,), label="empty"),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (0, 2)), (X,), complex=True),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (0,)), (V,), label="odd length"),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (0,)), (ZERO_IN,), label="a zero"),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (0,)), (EMPTY,), label="empty"),
    Case("reduce_max", lambda x: lax.reduce_max(x, (0, 2)), (X,)),
    Case("reduce_min", lambda x: lax.reduce_min(x, (1,)), (X,)),
    # At a tie, central differences give the mean over the tied locations of each side, not the
    # share that each location gets.
    Case("reduce_max", lambda x: lax.reduce_max(x, (1,)), (TIED,), "ties", differences=False),
    Case("reduce_min", lambda x: lax.reduce_min(-x, (1,)), (TIED,), "ties", differences=False),
    Case("reduce_max", lambda x: lax.reduce_max(x, (1,)), (EMPTY,), label="empty"),
    Case("argmax", lambda x: x * lax.argmax(x, 2, np.int32)[..., None].astype(x.dtype), (X,)),
    Case("argmin", lambda x: x * lax.argmin(x, 2, np.int32)[..., None].astype(x.dtype), (X,)),
    Case("reduce_and", chosen_by(lax.reduce_and), (X,)),
    Case("reduce_or", chosen_by(lax.reduce_or), (X,)),
    Case("reduce_xor", chosen_by(lax.reduce_xor), (X,)),
    # JAX's rule fails if one of two operands is inactive.
    Case("reduce", generic(add_mul, (0, 1), 0, 2), (X, Y), "two", complex=True, jax=False),
    # JAX cannot batch the initial value.
    Case("reduce", start_from, (X, np.array(1.5)), "active start", jax=False, vmap=False),
    Case("reduce", ignore_index, (X, INDEX), "largest with its index", jax=False),
    Case("cumsum", lambda x: lax.cumsum(x, 1), (X,), complex=True),
    Case("cumsum", lambda x: lax.cumsum(x, 2, reverse=True), (X,), label="reverse"),
    Case("cumsum", lambda x: lax.cumsum(x, 0), (EMPTY,), label="empty"),
    Case("cumprod", lambda x: lax.cumprod(x, 2), (X,), complex=True),
    Case("cumprod", lambda x: lax.cumprod(x, 0, reverse=True), (V,), label="reverse"),
    Case("cumprod", lambda x: lax.cumprod(x, 0), (ZERO_IN,), label="a zero"),
    Case("cummax", lambda x: lax.cummax(x, 2), (X,)),
    Case("cummax", lambda x: lax.cummax(x, 0, reverse=True), (V,), label="reverse"),
    # At a tie the two sides of a difference disagree.
    Case("cummax", lambda x: lax.cummax(x, 1), (TIED,), label="ties", differences=False),
    Case("cummin", lambda x: lax.cummin(x, 2), (X,)),
    Case("cummin", lambda x: lax.cummin(x, 1), (TIED,), label="ties", differences=False),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 2), (X,), complex=True),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0, reverse=True), (V,), label="reverse"),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (TIED,), label="ties"),
    Case(
        "cumlogsumexp",
        lambda x: lax.cumlogsumexp(x),
        (ENDLESS,),
        label="infinite",
        differences=False,
        second=False,
    ),
    Case("sort", lambda x: lax.sort(x, dimension=1), (X,)),
    Case("sort", pairs_of, (X, Y), label="taken along"),
    Case("sort", lambda x, i: lax.sort((x, i), dimension=0)[0], (X, INDEX), label="integers along"),
    Case("sort", lambda x: lax.sort((x, -x * x), num_keys=2), (V,), label="two keys"),
    # A stable sort keeps tied locations in order; a difference would exchange them.
    Case("sort", lambda x: lax.sort(x), (TIED,), label="ties", differences=False),
    Case("sort", lambda x: lax.sort(x, dimension=0), (EMPTY,), label="empty"),
    Case("top_k", lambda x: lax.top_k(x, 2)[0], (X,)),
    Case("top_k", lambda x: lax.top_k(x, 0)[0], (X,), label="none"),
    Case("approx_top_k", lambda x: lax.approx_max_k(x, 2)[0], (X,)),
    Case("approx_top_k", lambda x: lax.approx_min_k(x, 2, 1)[0], (X,), label="smallest"),
]
