"""Functions with loops, branches, calls and custom rules, cheap to compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform

X = np.array([0.3, -0.7, 1.1])
KEY = jax.random.key(7)
POLICIES = (
    xform.policies.save_everything,
    xform.policies.save_only_these_names("h"),
    xform.policies.save_nothing,
)


# Cheap to compile, unlike sines in 64 bits.
def bend(x):
    return x / (1.0 + x * x)


def bowl(x):
    return 1.0 / (2.0 + x * x)


def named(x):
    return checkpoint_name(x, "h")


@jax.custom_jvp
def softened(x, y):
    return x * x * y


@softened.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return softened(x, y), 2 * x * y * dx + x * x * dy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def powered(n, x, y):
    return x**n * y


def _powered_bwd(n, res, ct):
    x, y = res
    return n * x ** (n - 1) * y * ct, x**n * ct


powered.defvjp(lambda n, x, y: (powered(n, x, y), (x, y)), _powered_bwd)


@jax.custom_vjp
def two_results(x, y):
    return x * y, x + y


def _two_fwd(x, y):
    return (x.value * y.value, x.value + y.value), (x.value, y.value)


def _two_bwd(res, cts):
    zero = jax.custom_derivatives.SymbolicZero
    a, b = (jnp.zeros_like(res[0]) if isinstance(ct, zero) else ct for ct in cts)
    return a * res[1] + b, a * res[0] + b


two_results.defvjp(_two_fwd, _two_bwd, symbolic_zeros=True)


@jax.custom_vjp
def optimized(x):
    return x * x


optimized.defvjp(lambda x: (x * x, 2 * x), lambda r, ct: (r * ct,), optimize_remat=True)

small = jax.jit(lambda c, x: bend(c) * x)


@jax.jit
def large(c, x):
    for _ in range(25):
        c = c * x + c
    return named(c) * x


def loop(step, init, xs=None, length=3, **options):
    """Return the sum of a scan's last carry and of all its outputs."""
    carry, ys = lax.scan(step, init, xs, length=length, **options)
    floats = [y for y in jax.tree.leaves((carry, ys)) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sum(y * y) for y in floats)
