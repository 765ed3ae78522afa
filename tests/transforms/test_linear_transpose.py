"""`linear_transpose`, and the functions that it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform.errors import NotLinear

X = np.array([0.3, -0.7, 1.1], np.float32)
CONSTANT = jnp.arange(3.0)

# A linear function whose rule computes another derivative: a transpose does not use the rule.
triple = jax.custom_jvp(lambda x: 3.0 * x)
triple.defjvp(lambda xs, dxs: (3.0 * xs[0], 5.0 * dxs[0]))

LINEAR = {
    "scale": (lambda x: 3.0 * x, (X,)),
    "two arguments": (lambda x, y: (x + 2 * y, jnp.sum(x)), (X, X)),
    "dot": (lambda x: jnp.ones((2, 3)) @ x, (X,)),
    "scan": (
        lambda x: lax.scan(lambda c, t: (c * 2.0 + t, c), x, jnp.ones((4, 3))[:, :] * x),
        (X,),
    ),
    "cond": (lambda x: lax.cond(CONSTANT[1] > 0, lambda x: x * CONSTANT, jnp.negative, x), (X,)),
    "jit": (jax.jit(lambda x: jnp.fft.rfft(x).real), (X,)),
    "remat": (jax.checkpoint(lambda x: x * CONSTANT + x), (X,)),
    "slices": (lambda x: jnp.concatenate([x[1:], x[:2] * 2]).reshape(2, 2).T, (X,)),
    "complex": (lambda x: 1j * x + jnp.conj(2j) * x, (X + 1j,)),
    "custom_vjp free solve": (lambda x: jnp.linalg.solve(jnp.eye(3) * 2 + 0.1, x), (X,)),
    "custom_jvp": (triple, (X,)),
    "custom_jvp in a jitted function": (jax.jit(lambda x: triple(x) + x), (X,)),
    "custom_jvp in a scan": (
        lambda x: lax.scan(lambda c, _: (triple(c), c), x, None, length=2),
        (X,),
    ),
    "constant output": (lambda x: (x * 2, jnp.zeros(2)), (X,)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_transpose(name: str) -> None:
    f, args = LINEAR[name]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    ct = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), jax.eval_shape(f, *types))
    want = (
        jax.vjp(f, *args)[1](ct)
        if name in ("remat", "constant output")
        else jax.linear_transpose(f, *types)(ct)
    )
    close(xform.linear_transpose(f, *types)(ct), want, 1e-5)
    close(jax.jit(lambda ct: xform.linear_transpose(f, *args)(ct))(ct), want, 1e-5)


NONLINEAR = {
    "mul": lambda x: x * x,
    "sin": jnp.sin,
    "abs": jnp.abs,
    "max": lambda x: jnp.maximum(x, 0.0),
    "scan": lambda x: lax.scan(lambda c, _: (c * x, None), x, None, length=2)[0],
    "carry": lambda x: lax.scan(lambda c, _: (c * c, None), x, None, length=2)[0],
    "cond": lambda x: lax.cond(True, lambda x: x * x, lambda x: x, x),
    "predicate": lambda x: lax.cond(x[0] > 0, lambda x: x, lambda x: 2 * x, x),
    "jit": jax.jit(lambda x: jnp.exp(x)),
    "remat": jax.checkpoint(lambda x: x / (1 + x)),
    "where": lambda x: jnp.where(x > 0, x, 2 * x),
    "gather": lambda x: CONSTANT[jnp.int32(x[0])] * x,
    "round": jnp.round,
    "step": lambda x: x + jnp.float32(x > 0),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_linear_transpose_of_nonlinear_functions_raises(name: str) -> None:
    with pytest.raises(NotLinear):
        xform.linear_transpose(NONLINEAR[name], X)


def test_linear_transpose_drops_the_constant_of_an_affine_function_as_jax_does() -> None:
    f = lambda x: jnp.concatenate([x + 1.0, jnp.ones(2)])
    ct = np.arange(5, dtype=np.float32)
    close(xform.linear_transpose(f, X)(ct), jax.linear_transpose(f, X)(ct))
