"""Cases of `xform.rules.random`: random numbers multiply the differentiated value.

Bits are made inside a jit, because outside of it the rule of an integer function is not used.
"""

import jax
import numpy as np
from jax import lax

from xform._jax import jax_primitives
from xform.testing import Case

X = np.linspace(-1.0, 1.5, 6).reshape(2, 3)
COUNTS = np.arange(X.size, dtype=np.uint32)
SHAPE = np.array([[0.4, 1.3, 2.7], [5.1, 0.9, 30.0]])


def unit(bits, x):
    """Return noise in [0, 1) with the dtype and shape of `x`."""
    top = lax.convert_element_type(lax.shift_right_logical(bits, np.uint32(16)), np.float32)
    return lax.convert_element_type(top / np.float32(2**16), x.dtype)


@jax.jit
def from_seed(x):
    return x * unit(jax.random.bits(jax.random.key(3), x.shape, np.uint32), x)


@jax.jit
def from_raw(x):
    return x * unit(jax.random.bits(jax.random.PRNGKey(3), x.shape, np.uint32), x)


@jax.jit
def from_split(x):
    keys = jax.random.split(jax.random.key(3))
    return x * unit(jax.random.bits(keys[1], x.shape, np.uint32), x)


@jax.jit
def from_fold(x):
    return x * unit(
        jax.random.bits(jax.random.fold_in(jax.random.key(3), 5), x.shape, np.uint32), x
    )


@jax.jit
def from_data(x):
    data = jax.random.key_data(jax.random.key(3))
    return x * unit(jax.random.bits(jax.random.wrap_key_data(data), x.shape, np.uint32), x)


@jax.jit
def from_threefry(x):
    key = jax.random.key_data(jax.random.key(3))
    bits, _ = jax_primitives.threefry2x32_p.bind(key[0], key[1], COUNTS, COUNTS)
    return x * unit(lax.reshape(bits, x.shape), x)


@jax.jit
def from_generator(x):
    _, bits = lax.rng_bit_generator(np.array([1, 2, 3, 4], np.uint32), x.shape)
    return x * unit(bits, x)


def gamma(a):
    return jax.random.gamma(jax.random.key(1), a, dtype=a.dtype)


def loggamma(a):
    return jax.random.loggamma(jax.random.key(1), a, dtype=a.dtype)


CASES = [
    Case("random_seed", from_seed, (X,)),
    Case("random_wrap", from_data, (X,)),
    Case("random_unwrap", from_raw, (X,)),
    Case("random_bits", from_seed, (X,)),
    Case("random_split", from_split, (X,)),
    Case("random_fold_in", from_fold, (X,)),
    Case("threefry2x32", from_threefry, (X,)),
    Case("rng_bit_generator", from_generator, (X,)),
    # A sample is accepted or rejected by comparing, so for a fixed key it is no smooth function of
    # the shape. The derivative by implicit reparameterization has no second order.
    Case("random_gamma", gamma, (SHAPE,), bfloat16=False, differences=False, second=False),
    Case(
        "random_gamma", loggamma, (SHAPE,), "log space",
        bfloat16=False, differences=False, second=False,
    ),
]  # fmt: skip
