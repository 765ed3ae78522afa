"""Python may inspect a differentiated value, but not turn it into a number."""

import array
import math
import pickle
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.special
from jax import lax

import xform
from tests.reference import close
from xform.errors import DerivativeLost

X = np.array([0.5, 1.5, 2.5], np.float32)
HERE = __file__

NUMBERS = {
    "float": lambda x: float(x[1]),
    "complex": lambda x: complex(x[1]).real,
    "item": lambda x: x[1].item(),
    "item of an index": lambda x: x.item(1),
    "tolist": lambda x: sum(x.tolist()),
    "tobytes": lambda x: len(x.tobytes()),
    "math.sin": lambda x: math.sin(x[0]),
    "math.floor": lambda x: math.floor(x[1]),
    "math.isfinite": lambda x: 1.0 if math.isfinite(x[1]) else 0.0,
    "math.fsum": lambda x: math.fsum(x),
    "percent format": lambda x: len("%.2f".__mod__(x[1])),
    "statistics": lambda x: statistics.fmean(x),
    "array.array": lambda x: sum(array.array("f", x)),
    "list of floats": lambda x: sum(float(e) for e in x),
    "np.asarray": lambda x: np.asarray(x),
    "np.array of a list": lambda x: np.array([x[0], x[1], x[2]]),
    "np.float32": lambda x: np.float32(x[1]),
    "np.sin": lambda x: np.sin(x),
    "np.add": lambda x: np.add(X, x),
    "np.dot": lambda x: np.dot(X, x),
    "np.where": lambda x: np.where(X > 1, x, 0),
    "np.stack": lambda x: np.stack([x, x])[0],
    "np.interp": lambda x: np.interp(x, X, X).astype(np.float32),
    "np.linalg.norm": lambda x: np.linalg.norm(x),
    "np.isnan": lambda x: 0.0 if np.isnan(x[0]) else 1.0,
    "np.vectorize": lambda x: np.vectorize(lambda e: e * e)(x),
    "np.from_dlpack": lambda x: np.from_dlpack(x),
    "in an array": lambda x: np.zeros(3, np.float32).__setitem__(slice(None), x) or 1.0,
    "scipy.special": lambda x: scipy.special.erf(x),
    "scipy.linalg": lambda x: scipy.linalg.norm(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}

DERIVATIVES = {
    "grad": xform.grad,
    "value_and_grad": xform.value_and_grad,
    "jvp": lambda f: lambda x: xform.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: xform.vjp(f, x)[1](jnp.float32(2)),
    "linearize": lambda f: lambda x: xform.linearize(f, x)[1](x),
    "fwd_and_bwd": lambda f: lambda x: xform.fwd_and_bwd(f, 0, jitted=False)[0](x)[0],
    "jacfwd": xform.jacfwd,
    "jacrev": xform.jacrev,
    "hessian": xform.hessian,
    "hvp": lambda f: lambda x: xform.hvp(f, (x,), (x,)),
    "grad of grad": lambda f: xform.grad(lambda x: jnp.sum(xform.grad(f)(x))),
    "jvp of grad": lambda f: lambda x: xform.jvp(xform.grad(f), (x,), (x,)),
    "vjp of linearize": lambda f: lambda x: xform.vjp(lambda x: xform.linearize(f, x)[1](x), x)[0],
    "third order": lambda f: xform.jacfwd(xform.hessian(f)),
    "in jax.grad": lambda f: jax.grad(lambda x: jnp.sum(xform.grad(f)(x))),
    "outside jax.grad": lambda f: xform.grad(lambda x: jnp.sum(jax.grad(f)(x))),
}


def times(number):
    return lambda x: jnp.sum(x * x * number(x))


def refused(derivative, number) -> None:
    """Check that a conversion raises, and that it works for a constant value."""
    # If jax.grad is inside, JAX's tracer raises first; NumPy raises where it fills an array.
    with pytest.raises((DerivativeLost, jax.errors.JAXTypeError)) as caught:
        derivative(times(number))(X)
    if isinstance(error := caught.value, DerivativeLost):
        assert HERE in error.where
        assert "lax.stop_gradient(x)" in error.remedy
    held = number(jnp.asarray(X))
    close(derivative(times(lambda x: number(lax.stop_gradient(x))))(X),
          derivative(times(lambda x: held))(X), 1e-6)  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_conversion_of_a_differentiated_value_to_a_number_raises(number: str) -> None:
    refused(xform.grad, NUMBERS[number])


@pytest.mark.parametrize("number", ["float", "np.sin", "item"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_in_every_transform(name: str, number: str) -> None:
    refused(DERIVATIVES[name], NUMBERS[number])


def test_a_number_of_each_of_several_examples_is_an_error() -> None:
    with pytest.raises(DerivativeLost):
        jax.vmap(xform.grad(lambda x: x * float(x)))(X)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        xform.grad(lambda x: jnp.sum(jax.vmap(lambda x: x * float(x))(x)))(X)


def test_looking_at_a_value() -> None:
    seen = []

    def f(x):
        seen.append((str(x), repr(x), f"{x[1]:.2f} {x[0]}", bool(x[0]), int(x[1])))
        assert x[0] < 1 < x[1]
        assert x.shape == (3,)
        return jnp.sum(x * x)

    close(xform.grad(f)(X), jnp.asarray(2 * X))
    shown = f"GradTracer(primal={X}, typeof(tangent)=f32[3])"
    assert seen == [(str(X), shown, "1.50 0.5", True, 1)]


def test_undifferentiated_values_convert_to_python_numbers() -> None:
    def f(x, n, held):
        assert float(held) == held.item() == complex(held).real
        return x * math.sin(held) * np.asarray(n).sum() * held.tolist(), (x > 1).tolist()

    held = jnp.float32(2.0)
    close(xform.grad(f, has_aux=True)(jnp.float32(3.0), 2, held),
          jax.grad(f, has_aux=True)(jnp.float32(3.0), 2, held), 1e-6)  # fmt: skip
    y, pull, _ = xform.vjp(lambda x, n: f(x, n, held), jnp.float32(3.0), 2, has_aux=True)
    assert float(y) == pytest.approx(12 * math.sin(2.0))
    assert np.isfinite(np.asarray(pull(y)[0]))


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


@sine.defjvp
def _(primals, tangents):
    return sine(*primals), math.cos(primals[0]) * tangents[0]


def test_custom_jvp_rules_may_use_python_numbers_for_one_derivative_only() -> None:
    for t in (xform, jax):
        assert float(t.grad(sine)(1.0)) == pytest.approx(math.cos(1.0))
        assert float(t.jvp(sine, (1.0,), (1.0,))[1]) == pytest.approx(math.cos(1.0))
    with pytest.raises(DerivativeLost):
        xform.grad(xform.grad(sine))(1.0)
    with pytest.raises(DerivativeLost):
        xform.jvp(xform.grad(sine), (1.0,), (1.0,))


# JAX converts these values to NumPy and loses the derivative in its own `grad`.
STEPS = {
    "arange": lambda x: jnp.arange(x, x + 3).sum(),
    "mgrid": lambda x: jnp.mgrid[x : x + 3 : 1].sum(),
}
PICKED = {
    "unique": lambda x: jnp.sum(jnp.unique(x) ** 2),
    "union1d": lambda x: jnp.sum(jnp.union1d(x, X + 0.1) ** 2),
    "setdiff1d": lambda x: jnp.sum(jnp.setdiff1d(x, X + 0.1) ** 2),
    "trim_zeros": lambda x: jnp.sum(jnp.trim_zeros(x) ** 2),
    "initial value of a sum": lambda x: lax.reduce(X * x[1], x[0] - 0.5, lax.add, (0,)),
    "initial value of a window": lambda x: jnp.sum(
        lax.reduce_window(X * x[1], x[0] - 0.5, lax.add, (2,), (1,), "VALID")
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_differentiated_bounds_of_arange_and_mgrid_raise(name: str) -> None:
    with pytest.raises(jax.errors.ConcretizationTypeError, match="pass stop_gradient of it"):
        xform.grad(STEPS[name])(1.5)
    close(xform.grad(lambda x: x * STEPS[name](lax.stop_gradient(x)))(1.5), STEPS[name](1.5), 1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PICKED)
def test_unique_setdiff1d_and_reduce_init_have_correct_gradients(name: str) -> None:
    f, x, d = PICKED[name], jnp.asarray(X, float), 1e-6
    slopes = [(f(x + d * e) - f(x - d * e)) / (2 * d) for e in jnp.eye(3)]
    close(xform.grad(f)(x), jnp.stack(slopes), 1e-6)


def test_gradients_are_on_the_device_of_their_primal() -> None:
    here, there = jax.devices()[:2]
    x = jax.device_put(X, here)
    g = xform.grad(lambda x: jnp.sum(jax.device_put(jnp.sin(x), there)))
    assert g(x).devices() == {here}
    assert xform.jacfwd(lambda x: jnp.sum(g(x)))(x).devices() == {here}
