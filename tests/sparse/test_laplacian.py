"""Forward Laplacians against traces of JAX's Hessians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform.errors import WrongDtype

A = jnp.sin(jnp.arange(1.0, 26)).reshape(5, 5)
X = jnp.cos(jnp.arange(1.0, 6)) + 1.2

FUNCTIONS = {
    "cube": lambda x: jnp.sum(x**3),
    "elementwise": lambda x: jnp.sin(x) * x / (1 + x**2),
    "two operands": lambda x: jnp.arctan2(x, x[::-1] * x) + x ** x[::-1],
    "products": lambda x: (A @ x) @ jnp.outer(x, x) @ x,
    "net": lambda x: jax.nn.gelu(A @ jnp.tanh(A @ x)).sum(),
    "determinant": lambda x: jnp.linalg.slogdet(jnp.outer(x, x) + 0.1 * A + 2 * jnp.eye(5))[1],
    "scan": lambda x: lax.scan(lambda c, _: (jnp.tanh(A @ c), c.sum()), x, None, length=3),
    "branch": lambda x: lax.cond(x[0] > 0, lambda x: x**2, lambda x: x**3, x),
    "loop": lambda x: lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.sin(s[0]), s[1] + 1),
                                     (x, 0))[0],
    "softmax": lambda x: jax.nn.softmax(x) @ x,
    "largest": lambda x: jnp.max(A @ x**2),
    "bounds that move": lambda x: jnp.clip(x**2, x[3], x[1]),
    "movement": jax.jit(lambda x: jnp.cumsum(x**2)[::2].at[1].mul(x[0])),
    "region": jax.checkpoint(lambda x: jnp.prod(jnp.exp(x))),
    "custom jvp": lambda x: jax.nn.relu(A @ x**2) + jax.nn.logsumexp(x),
    "linear": lambda x: A @ x,
    "constant": lambda x: jnp.ones(3),
}  # fmt: skip


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_laplacian_is_the_trace_of_jaxs_hessian(name: str) -> None:
    f, x = FUNCTIONS[name], X.astype(float)
    y, dy, lap = jax.jit(xform.sparse.laplacian(f, return_jacobian=True))(x)
    hessians = jax.jit(jax.jacfwd(jax.jacfwd(f)))(x)
    expected = jax.tree.map(lambda h: jnp.trace(h, axis1=-2, axis2=-1), hessians)
    for a, b in zip(jax.tree.leaves(lap), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    for a, b in zip(jax.tree.leaves(dy), jax.tree.leaves(jax.jacfwd(f)(x)), strict=True):
        np.testing.assert_allclose(a, np.moveaxis(b, -1, 0), rtol=1e-10, atol=1e-12)
    for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(f(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_several_arguments_trees_and_batches() -> None:
    f = lambda t, s: {"y": t["a"] * s**2, "z": jnp.sum(t["a"] ** 2)}
    lap = xform.sparse.laplacian(f, argnums=(0, 1))({"a": X}, 3.0)
    np.testing.assert_allclose(lap["y"], 2 * X, rtol=1e-6)
    np.testing.assert_allclose(lap["z"], 10.0, rtol=1e-6)
    batch = jax.vmap(xform.sparse.laplacian(lambda x: x[0] * (x @ x)))(A)
    np.testing.assert_allclose(batch, 14 * A[:, 0], rtol=1e-5)
    twice = xform.sparse.laplacian(xform.sparse.laplacian(lambda x: jnp.sum(x**4)))(X)
    np.testing.assert_allclose(twice, 24.0 * 5, rtol=1e-5)
    np.testing.assert_allclose(xform.grad(xform.sparse.laplacian(lambda x: jnp.sum(x**3)))(X), 6.0)
    assert xform.sparse.laplacian(lambda x: x.sum() * 2)(jnp.zeros(0)) == 0
    assert xform.sparse.laplacian(lambda x: x**2)(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_laplacian_of_integer_inputs_or_complex_outputs_raises() -> None:
    with pytest.raises(WrongDtype, match="an input has dtype int32"):
        xform.sparse.laplacian(lambda x: x**2)(jnp.arange(3))
    with pytest.raises(WrongDtype, match="an output has dtype complex64"):
        xform.sparse.laplacian(lambda x: x * 1j)(X)
