"""`jacfwd`, `jacrev`, `jacobian`, `hessian`, `hvp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.reference import close
from xform.errors import WrongDtype

X = np.array([0.3, -0.7, 1.1])
pytestmark = pytest.mark.usefixtures("x64")

FUNCTIONS = {
    "vector": lambda x, p: jnp.cumsum(jnp.sin(x)) * p["s"],
    "scalar": lambda x, p: jnp.sum(jnp.sin(x)) * jnp.sum(p["w"] ** 2) * p["s"],
    "tree": lambda x, p: {"a": (p["w"] @ x, x * p["s"]), "b": jnp.sum(x**3), "c": None},
    "constant": lambda x, p: (jnp.ones(2), x),
}


@pytest.mark.parametrize("argnums", [-1, (0, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobians_and_hessians_are_jaxs(name: str, argnums) -> None:
    f = FUNCTIONS[name]
    p = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "s": np.float64(0.7)}

    @jax.jit
    def all_of(x, p):
        return [
            [getattr(t, kind)(f, argnums)(x, p) for kind in ("jacfwd", "jacrev", "hessian")]
            for t in (xform, jax)
        ]

    close(*all_of(X, p))


def test_jacobian_is_jacrev_and_runs_eagerly() -> None:
    f = FUNCTIONS["tree"]
    p = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "s": np.float64(0.7)}
    want = jax.jacrev(f, (0, 1))(X, p)
    close(xform.jacobian(f, (0, 1))(X, p), want)
    close(xform.jacfwd(f, (0, 1))(X, p), want)


@pytest.mark.parametrize("kind", ["jacfwd", "jacrev", "hessian"])
def test_auxiliary_output(kind: str) -> None:
    f = lambda x: (jnp.sin(x) * x[0], {"x": x * 2, "n": 3})
    got, aux = getattr(xform, kind)(f, has_aux=True)(X)
    want, jax_aux = getattr(jax, kind)(f, has_aux=True)(X)
    close((got, aux), (want, jax_aux))


@pytest.mark.parametrize("kind", ["jacfwd", "jacrev", "hessian"])
def test_holomorphic(kind: str) -> None:
    f = lambda z: jnp.exp(z) * z[0] ** 2
    z = X + 1j * X[::-1]
    close(getattr(xform, kind)(f, holomorphic=True)(z), getattr(jax, kind)(f, holomorphic=True)(z))


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_integer_inputs(dtype: str) -> None:
    n = np.arange(3, dtype=dtype)
    f = lambda x, n: {"a": jnp.sum(x * n) ** 2, "b": x[:2] * 2}
    ways = [
        lambda t: t.jacrev(f, (0, 1), allow_int=True),
        lambda t: t.jacfwd(t.jacrev(f, (0, 1), allow_int=True), 0),
        lambda t: t.jacrev(t.jacrev(f, 0, allow_int=True), (0, 1), allow_int=True),
        lambda t: t.hessian(f, 0),
        lambda t: t.jacfwd(lambda x, n: (x * 2, n)),
    ]
    for way in ways:
        got, want = way(xform)(X, n), way(jax)(X, n)
        close(got, want)
        types = [jax.tree.map(lambda x: (x.dtype, x.weak_type), t) for t in (got, want)]
        assert types[0] == types[1]
    f = lambda x, n: x * n
    with pytest.raises(WrongDtype):
        xform.jacfwd(f, 1)(X, np.arange(3))
    with pytest.raises(TypeError):
        jax.jacfwd(f, 1)(X, np.arange(3))


def test_keyword_arguments() -> None:
    f = lambda x, *, s: jnp.sin(x) * s
    close(xform.jacfwd(f)(X, s=2.0), jax.jacfwd(f)(X, s=2.0))
    close(xform.hessian(f)(X, s=2.0), jax.hessian(f)(X, s=2.0))


def test_complex_input_of_a_real_function() -> None:
    f = lambda z: jnp.real(z * jnp.conj(z))
    z = X + 1j * X[::-1]
    close(xform.jacrev(f)(z), jax.jacrev(f)(z))
    for t in (xform, jax):
        with pytest.raises(TypeError):
            t.jacfwd(f)(z)


def test_jacobians_of_weak_and_scalar_inputs() -> None:
    for kind in ("jacfwd", "jacrev", "hessian"):
        got, want = (getattr(t, kind)(lambda x: x**3)(2.0) for t in (xform, jax))
        close(got, want)


def test_hvp_is_the_hessian_times_a_vector() -> None:
    f = lambda x: jnp.sum(jnp.sin(x) * jnp.roll(x, 1) ** 2)
    v = np.cos(X)
    want = jax.hessian(f)(X) @ v
    close(xform.hvp(f, (X,), (v,)), want)
    close(jax.jit(lambda x, v: xform.hvp(f, (x,), (v,)))(X, v), want)
    close(jax.vmap(lambda v: xform.hvp(f, (X,), (v,)))(jnp.eye(3)), jax.hessian(f)(X))


def test_hvp_of_several_trees_and_a_remat_region() -> None:
    def f(p, x):
        return jnp.sum(xform.remat(lambda x: jnp.tanh(p["w"] @ x) * p["b"])(x) ** 2)

    p = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.array([0.4, -2.0])}
    dp, v = jax.tree.map(np.cos, p), np.sin(X)
    want = jax.jvp(jax.grad(f, (0, 1)), (p, X), (dp, v))[1]
    close(xform.hvp(f, (p, X), (dp, v)), want)
    close(
        xform.hvp(lambda p: f(p, X), [p], [dp]),
        jax.jvp(jax.grad(lambda p: f(p, X)), (p,), (dp,))[1],
    )


def test_the_basis_is_computed_and_not_a_constant_of_the_program() -> None:
    x = jnp.linspace(0.1, 1, 500)
    for kind in ("jacfwd", "jacrev", "hessian"):
        ours, theirs = (
            len(jax.jit(getattr(t, kind)(jnp.sqrt)).lower(x).as_text()) for t in (xform, jax)
        )
        assert ours <= 1.1 * theirs


def test_the_hessian_of_a_pair_energy_takes_no_more_memory_than_jaxs() -> None:
    energy = lambda c: jnp.sum(jnp.sqrt(((c[:, None] - c[None]) ** 2).sum(-1) + 1e-6))
    c = jnp.cos(jnp.arange(90.0)).reshape(30, 3)
    ours, theirs = (jax.jit(t.hessian(energy)).lower(c).compile() for t in (xform, jax))
    close(ours(c), theirs(c))
    temporary = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    assert temporary(ours) <= 1.1 * temporary(theirs)


def test_the_jacobian_of_a_batch_of_pullbacks_takes_no_more_memory_than_jaxs() -> None:
    def energies(c):
        r = jnp.sqrt(((c[:, None] - c[None]) ** 2).sum(-1) + 1e-6)
        return jnp.stack([jnp.sum(r), jnp.sum(jnp.sin(r)), jnp.sum(r**2)])

    def temporary(t) -> int:
        pulled = lambda c: jax.vmap(t.vjp(energies, c)[1])(jnp.eye(3))
        compiled = jax.jit(t.jacfwd(pulled)).lower(c).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    c = jnp.cos(jnp.arange(90.0)).reshape(30, 3)
    assert temporary(xform) <= 1.1 * temporary(jax)
