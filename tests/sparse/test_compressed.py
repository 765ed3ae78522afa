"""Sparse Jacobians and Hessians against JAX's dense ones, in every way to compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse as jax_sparse
from scipy import sparse

import xform
from xform.errors import NotDifferentiable, NotScalar, WrongArgument, WrongDtype

pytestmark = pytest.mark.usefixtures("x64")


def heat(u):
    """The right side of the heat equation on a line."""
    v = jnp.pad(u, 1)
    return v[2:] - 2 * u**3 + v[:-2]


def brusselator(uv):
    """Two substances that react and diffuse on a torus."""
    u, v = uv
    spread = lambda a: sum(jnp.roll(a, s, i) for i in (0, 1) for s in (1, -1)) - 4 * a
    return jnp.stack([1 + u * u * v - 4.4 * u + spread(u), 3.4 * u - u * u * v + spread(v)])


def arrow(x):
    return x**2 + x[0] * x + jnp.zeros_like(x).at[0].set(jnp.sum(x**2))


def rosenbrock(x):
    return jnp.sum((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2)


def membrane(u):
    """The energy of a membrane over a grid."""
    return jnp.sum(jnp.cosh(u[1:] - u[:-1])) + jnp.sum(jnp.sqrt(1 + (u[:, 1:] - u[:, :-1]) ** 2))


def point(*shape):
    return jnp.asarray(np.cos(np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)) + 1.5)


def dense_jacobian(f, x):
    flat = lambda v: jnp.ravel(f(v.reshape(x.shape)))
    return jax.jit(jax.jacrev(flat))(x.ravel())


JACOBIANS = {"heat": (heat, point(9)), "brusselator": (brusselator, point(2, 3, 5)),
             "arrow": (arrow, point(8)), "wide": (lambda x: x[::2] * x[1::2], point(8)),
             "steps": (lambda x: lax.scan(lambda c, _: (heat(c), None), x, None, 2)[0], point(8)),
             "nothing": (lambda x: jnp.zeros(3) * x[0], point(4))}  # fmt: skip


@pytest.mark.parametrize("name", JACOBIANS)
@pytest.mark.parametrize("coloring", ["auto", "column", "row", "bidirectional"])
def test_a_jacobian_is_jaxs(name: str, coloring) -> None:
    f, x = JACOBIANS[name][0], JACOBIANS[name][1].astype(float)
    jacobian = xform.sparse.jacobian(f, coloring=coloring, chunk=None if coloring == "auto" else 2)
    found = jacobian(x)
    assert isinstance(found, jax_sparse.BCOO)
    np.testing.assert_allclose(found.todense(), dense_jacobian(f, x), rtol=1e-12, atol=1e-12)


HESSIANS = {"rosenbrock": (rosenbrock, point(9)), "membrane": (membrane, point(4, 5)),
            "hub": (lambda x: jnp.sum(x[0] * x**2), point(7)),
            "linear": (jnp.sum, point(5))}  # fmt: skip


@pytest.mark.parametrize("name", HESSIANS)
@pytest.mark.parametrize("coloring", ["auto", "acyclic", "column"])
def test_a_hessian_is_jaxs(name: str, coloring) -> None:
    f, x = HESSIANS[name][0], HESSIANS[name][1].astype(float)
    expected = jax.jit(jax.hessian(lambda v: f(v.reshape(x.shape))))(x.ravel())
    found = xform.sparse.hessian(f, coloring=coloring, chunk=2)(x).todense()
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


def test_under_jit_vmap_and_loops() -> None:
    x = jnp.stack([point(6), 2 * point(6)])
    expected = jax.vmap(lambda x: dense_jacobian(heat, x))(x)
    jacobian = xform.sparse.jacobian(heat)
    np.testing.assert_allclose(jax.vmap(jacobian)(x).todense(), expected)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda x: jacobian(x).todense()))(x), expected)
    np.testing.assert_allclose(lax.map(lambda x: jacobian(x).todense(), x), expected)
    product = lambda x: jacobian(x) @ x
    np.testing.assert_allclose(jax.jit(product)(x[0]), expected[0] @ x[0])


def test_prepared_once_from_types() -> None:
    traces = []

    def f(x, scale):
        traces.append(x)
        return scale * heat(x)

    jacobian = xform.sparse.jacobian(f)
    prepared = jacobian.prepare(jax.ShapeDtypeStruct((7,), "float64"), 2.0)
    assert "3 pushes, 0 pulls" in str(prepared)
    jacobian(point(7), 2.0)
    n = len(traces)
    np.testing.assert_allclose(jacobian(point(7) + 1, 3.0).todense(),
                               3 * dense_jacobian(heat, point(7) + 1))  # fmt: skip
    assert len(traces) == n
    assert jacobian(point(8), 2.0).shape == (8, 8)


def test_jacobian_takes_argnums_pytrees_keywords_and_static_arguments() -> None:
    def f(p, how, x, *, shift):
        y = getattr(jnp, how)(x["a"]) * p[:, None]
        return {"y": y, "z": x["b"] + shift}

    p, x = point(2), {"a": point(2, 3), "b": point(2).astype("float32")}
    jacobian = xform.sparse.jacobian(f, argnums=(0, 2))(p, "sin", x, shift=np.float32(1))
    assert jacobian.shape == (8, 10)
    expected = np.zeros((8, 10))
    expected[np.arange(6), np.repeat([0, 1], 3)] = np.sin(x["a"]).ravel()
    expected[np.arange(6), 2 + np.arange(6)] = (np.cos(x["a"]) * p[:, None]).ravel()
    expected[[6, 7], [8, 9]] = 1
    np.testing.assert_allclose(jacobian.todense(), expected)


def test_keywords_count_as_any_values() -> None:
    jacobian = xform.sparse.jacobian(lambda x, *, m: x * m)
    assert not jacobian(point(3), m=jnp.zeros(3)).todense().any()
    np.testing.assert_array_equal(jacobian(point(3), m=jnp.ones(3)).todense(), np.eye(3))


def test_jacobian_of_custom_vjp_is_computed_by_rows_in_reverse_mode() -> None:
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
    jacobian = xform.sparse.jacobian(lambda x: double(x)[1:] * x[:-1])
    assert jacobian.prepare(point(5)).coloring.kind == "row"
    expected = jax.jacrev(lambda x: 2 * x[1:] * x[:-1])(point(5))
    np.testing.assert_allclose(jacobian(point(5)).todense(), expected)


def test_a_pattern_of_the_user_s() -> None:
    f, x = lambda x: jnp.tanh(x) + (jnp.sum(x) - jnp.sum(x)), point(5)
    with pytest.raises(WrongArgument, match=r"all of its 5 x 5(.|\n)*pass pattern="):
        xform.sparse.jacobian(f)(x)
    for pattern in (
        np.eye(5),
        sparse.eye_array(5),
        jax_sparse.eye(5),
        xform.sparse.sparsity(jnp.tanh, x),
    ):
        jacobian = xform.sparse.jacobian(f, pattern=pattern)
        assert jacobian.prepare(x).coloring.evaluations == 1
        np.testing.assert_allclose(jacobian(x).todense(), dense_jacobian(f, x))
    every = xform.sparse.jacobian(f, pattern=np.ones((5, 5)))
    np.testing.assert_allclose(every(x).todense(), dense_jacobian(f, x))


def test_scipy_on_request() -> None:
    jacobian = xform.sparse.jacobian(heat, format="scipy")
    found = jacobian(point(6))
    assert isinstance(found, sparse.csr_array)
    np.testing.assert_allclose(found.todense(), dense_jacobian(heat, point(6)))
    with pytest.raises(WrongArgument, match="tracers"):
        jax.jit(jacobian)(point(6))


def test_other_dtypes() -> None:
    found = xform.sparse.jacobian(heat)(point(6).astype("bfloat16"))
    assert found.dtype == jnp.bfloat16
    for x in (jnp.arange(3), jnp.ones(3, complex)):
        with pytest.raises(WrongDtype, match="an input has dtype"):
            xform.sparse.jacobian(heat)(x)
    with pytest.raises(WrongDtype, match="an output has dtype"):
        xform.sparse.jacobian(lambda x: jnp.argsort(x))(point(3))


def test_invalid_functions_patterns_and_options_raise() -> None:
    with pytest.raises(NotScalar):
        xform.sparse.hessian(heat)(point(3))
    with pytest.raises(NotDifferentiable, match="has side effects"):
        xform.sparse.jacobian(lambda x: (jax.debug.print("{}", x), x)[1])(point(3))
    with pytest.raises(WrongArgument, match="shape \\(2, 2\\)"):
        xform.sparse.jacobian(heat, pattern=np.eye(2))(point(3))
    with pytest.raises(WrongArgument, match="not symmetric"):
        xform.sparse.hessian(rosenbrock, pattern=np.tri(3))(point(3))
    with pytest.raises(WrongArgument, match="'star'"):
        xform.sparse.jacobian(heat, coloring="star")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WrongArgument, match="chunk=0"):
        xform.sparse.jacobian(heat, chunk=0)
    with pytest.raises(WrongArgument, match="cannot be hashed"):
        xform.sparse.jacobian(lambda x, s: x)(point(3), {1, 2})
