"""FLOPs of the operations that XLA does not fuse."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xform.planner.costs.unfused import unfused_flops
from xform.program.ir import program

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
PRODUCT = 2 * 4 * 8 * 8


def times(f, n):
    return lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, None, length=n)[0]


def layer(x, w):
    return jnp.sin(x @ w) + 1.0


CASES = {
    "elementwise": (lambda x, w: jnp.sin(x) + 1.0, 0),
    "a product": (layer, PRODUCT),
    "a loop": (times(layer, 5), 5 * PRODUCT),
    "nested loops": (times(times(layer, 5), 3), 15 * PRODUCT),
    "a loop without products": (times(lambda x, w: jnp.sin(x), 5), 0),
    "a call in a loop": (times(jax.jit(layer), 5), 5 * PRODUCT),
    "a region": (jax.checkpoint(layer), PRODUCT),
    "the most expensive branch": (
        lambda x, w: lax.cond(x.sum() > 0, layer, lambda x, w: layer(layer(x, w), w), x, w),
        2 * PRODUCT,
    ),
    "dead code": (lambda x, w: (layer(x, w), x)[1], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_only_products_count(name: str) -> None:
    f, flops = CASES[name]
    assert unfused_flops(program(jax.make_jaxpr(f)(X, W))) == flops
