"""Products with curvature matrices, and estimates from them, against dense matrices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import xform
from tests.reference import close
from xform.curvature import Fisher, GaussNewton, Hessian
from xform.errors import BudgetInfeasible, WrongArgument, WrongDtype, WrongTangent

pytestmark = pytest.mark.usefixtures("x64", "quick_compilation")
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(7, 4))
LABELS = DRAW.integers(0, 3, 7)
PARAMS = {"w": DRAW.normal(size=(4, 5)), "v": DRAW.normal(size=(5, 3)), "b": DRAW.normal(size=3)}
FLAT = np.concatenate([PARAMS[k].ravel() for k in sorted(PARAMS)])
N = FLAT.size


def unflatten(x: Any) -> Any:
    b, v, w = jnp.split(x, [3, 18])
    return {"w": w.reshape(4, 5), "v": v.reshape(5, 3), "b": b}


def model(p: Any) -> Any:
    return jnp.tanh(X @ p["w"]) @ p["v"] + p["b"]


def cross_entropy(z: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), LABELS[:, None], 1))


def loss(p: Any) -> Any:
    return cross_entropy(model(p))


@functools.cache
def jacobian() -> Any:
    """Return the model's Jacobian `[examples, outputs, n]`, by JAX."""
    return jax.jit(jax.jacobian(lambda x: model(unflatten(x))))(FLAT)


def dense(product: Any) -> Any:
    """Return the dense matrix of a product with pytrees, column by column."""
    column = lambda e: ravel_pytree(product(unflatten(e)))[0]
    return jax.jit(jax.vmap(column))(np.eye(N)).T


@functools.cache
def hessian() -> Any:
    return jax.jit(jax.hessian(lambda x: loss(unflatten(x))))(FLAT)


POLICIES = [None, xform.policies.save_nothing, xform.policies.budget("1 MiB")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gauss_newton_is_the_dense_one(policy: Any) -> None:
    j = jacobian().reshape(-1, N)
    inner = jax.jit(jax.hessian(lambda z: cross_entropy(z.reshape(7, 3))))(model(PARAMS).ravel())
    got = dense(
        lambda v: xform.curvature.ggnvp(model, cross_entropy, (PARAMS,), (v,), policy=policy)
    )
    close(got, j.T @ inner @ j)


def log_likelihoods(name: str) -> Any:
    """Return outcomes, and their log-likelihoods as a function of one example's output."""
    log_factorial = jnp.cumsum(jnp.log(jnp.maximum(jnp.arange(60.0), 1)))
    return {
        "categorical": lambda z: jax.nn.log_softmax(z)[None],
        "bernoulli": lambda z: jnp.stack([jax.nn.log_sigmoid(-z), jax.nn.log_sigmoid(z)], -1),
        "poisson": lambda z: jnp.arange(60.0) * z[:, None] - jnp.exp(z)[:, None] - log_factorial,
    }[name]


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "poisson"])
def test_fisher_vp_equals_the_expected_outer_product_of_scores(name: str) -> None:
    """It is the expected outer product of the gradients of log-likelihoods, outcome by outcome."""
    log_p = log_likelihoods(name)
    of_params = lambda x: jax.vmap(log_p)(model(unflatten(x)))  # [examples, units, outcomes]
    values, gradients = jax.jit(lambda x: (of_params(x), jax.jacobian(of_params)(x)))(FLAT)
    want = jnp.einsum("euo,euoi,euoj->ij", jnp.exp(values), gradients, gradients)
    got = dense(lambda v: xform.curvature.fisher_vp(model, name, (PARAMS,), (v,)))
    close(got, want)
    mean = dense(
        lambda v: xform.curvature.fisher_vp(model, name, (PARAMS,), (v,), reduction="mean")
    )
    close(mean, want / 7)


def test_fisher_of_normal_outcomes_and_of_a_softmax_is_gauss_newton() -> None:
    j = jacobian().reshape(-1, N)
    close(dense(lambda v: xform.curvature.fisher_vp(model, "normal", (PARAMS,), (v,))), j.T @ j)
    fisher = lambda v: xform.curvature.fisher_vp(
        model, "categorical", (PARAMS,), (v,), reduction="mean"
    )
    close(
        dense(fisher), dense(lambda v: xform.curvature.ggnvp(model, cross_entropy, (PARAMS,), (v,)))
    )


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_hvp_under_a_policy(policy: Any) -> None:
    close(dense(lambda v: xform.hvp(loss, (PARAMS,), (v,), policy=policy)), hessian())


def test_several_primals_come_as_a_tuple() -> None:
    f = lambda a, b: jnp.sin(a) * b
    a, b, sq = X[0], X[1], lambda z: jnp.sum(z**2)
    got = xform.curvature.ggnvp(f, sq, (a, b), (b, a))
    dz = jax.jvp(f, (a, b), (b, a))[1]
    close(got, jax.vjp(f, a, b)[1](2 * dz))
    assert isinstance(xform.curvature.fisher_vp(f, "normal", [a, b], [b, a]), tuple)


def test_hutchinson_and_its_error() -> None:
    h = hessian()
    keys = jax.random.split(jax.random.key(1), 40)
    estimate = jax.jit(lambda key: xform.curvature.hutchinson(loss, (PARAMS,), key, samples=64))
    found = [estimate(key) for key in keys]
    off = jnp.sqrt(2 * jnp.sum((h - jnp.diag(jnp.diag(h))) ** 2) / 64)
    errors = np.array([float(e.trace_error) for e in found])
    np.testing.assert_allclose(errors.mean(), off, rtol=0.1)
    distances = np.array([float(e.trace - jnp.trace(h)) for e in found]) / errors
    assert np.mean(np.abs(distances) < 2) > 0.85
    assert np.abs(distances.mean()) < 3 / np.sqrt(len(found))
    diagonals = np.array([ravel_pytree(e.diagonal)[0] for e in found])
    each = np.array([ravel_pytree(e.diagonal_error)[0] for e in found])
    scores = (diagonals.mean(0) - jnp.diag(h)) / (np.sqrt((each**2).mean(0)) / np.sqrt(len(found)))
    assert np.abs(scores).max() < 4.5


def test_hutchinson_of_other_matrices_and_of_low_precision() -> None:
    for matrix in (Hessian(loss), GaussNewton(model, cross_entropy), Fisher(model, "normal")):
        estimate = functools.partial(xform.curvature.hutchinson, matrix, (PARAMS,), samples=3)
        got = jax.jit(estimate)(jax.random.key(0))
        assert jax.tree.structure(got.diagonal) == jax.tree.structure(PARAMS)
    scale = jnp.arange(1, 5, dtype=jnp.bfloat16)
    f = lambda x: jnp.sum(scale * x * x)
    with jax.numpy_dtype_promotion("strict"):
        got = xform.curvature.hutchinson(f, (jnp.ones(4, jnp.bfloat16),), jax.random.key(0))
    assert got.diagonal.dtype == jnp.float32
    assert got.diagonal.tolist() == [2, 4, 6, 8]
    assert float(got.trace_error) == 0


def test_the_spectrum_has_the_moments_and_the_ends_of_the_hessian() -> None:
    h = hessian()
    values = jnp.linalg.eigvalsh(h)
    run = jax.jit(lambda key: xform.curvature.hessian_spectrum(loss, (PARAMS,), key, samples=100))
    found = run(jax.random.key(0))
    close(found.largest, values[-1], 1e-8)
    close(found.smallest, values[0], 1e-8)
    close(jnp.sum(found.weights, 1), np.ones(100))
    for k in (1, 2, 3):  # each quadrature is exact for the moments of its own vector
        powers = jnp.sum(found.weights * found.nodes**k, 1)
        error = float(jnp.std(powers)) / 10
        assert abs(float(found.moment(k)) - float(jnp.mean(values**k))) < 4 * error
    assert abs(float(found.trace) - float(jnp.trace(h))) < 0.2 * float(jnp.sum(jnp.abs(values)))
    grid = found.grid(4000)
    assert abs(np.trapezoid(found.density(grid), grid) - 1) < 1e-4
    below = float(np.mean(values < 1e-3))  # the share of small eigenvalues, from the quadrature
    got = float(jnp.mean(jnp.sum(jnp.where(found.nodes < 1e-3, found.weights, 0), 1)))
    assert abs(got - below) < 0.1


def test_lanczos_of_all_steps_finds_every_eigenvalue() -> None:
    a = DRAW.normal(size=(40, 40))
    a = a + a.T
    f = lambda x: x @ a @ x / 2
    found = xform.curvature.hessian_spectrum(
        f, (np.zeros(40),), jax.random.key(0), steps=99, samples=2
    )
    values = jnp.linalg.eigvalsh(a)
    close(found.nodes, jnp.stack([values, values]), 1e-8)


def test_a_spectrum_of_few_eigenvalues() -> None:
    f = lambda x: jnp.sum(x[:10] ** 2) - 2 * jnp.sum(x[10:] ** 2)
    found = xform.curvature.hessian_spectrum(f, (np.zeros(40),), jax.random.key(0), samples=3)
    close(found.trace, -100.0)
    close(found.frobenius_norm, np.sqrt(10 * 4 + 30 * 16.0))
    assert (float(found.smallest), float(found.largest)) == pytest.approx((-4, 2))
    assert str(found).startswith("40 eigenvalues from -4 to 2")
    same = xform.curvature.hessian_spectrum(
        lambda x: jnp.sum(x**2), (np.zeros(3),), jax.random.key(0)
    )
    assert np.trapezoid(same.density(same.grid()), same.grid()) == pytest.approx(1, abs=1e-3)
    nothing = xform.curvature.hessian_spectrum(
        lambda x: jnp.sum(x), (np.zeros(3),), jax.random.key(0)
    )
    assert (float(nothing.smallest), float(nothing.largest)) == (0, 0)


def test_the_picture(tmp_path) -> None:
    found = xform.curvature.hessian_spectrum(loss, (PARAMS,), jax.random.key(0), steps=5, samples=1)
    found.plot(tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").stat().st_size > 1000
    with pytest.raises(WrongArgument):
        found.plot(tmp_path / "spectrum")


def quadratic(seed: int, low: float) -> Any:
    """Return a quadratic function of 30 numbers whose eigenvalues are at least `low`."""
    draw = np.random.default_rng(seed)
    q = np.linalg.qr(draw.normal(size=(30, 30)))[0]
    a = q @ np.diag(np.linspace(low, 3, 30)) @ q.T
    b = draw.normal(size=30)
    return a, b, lambda x: x @ a @ x / 2 + b @ x


def test_a_newton_step_solves_the_equations() -> None:
    a, b, f = quadratic(0, 0.1)
    step = jax.jit(lambda x: xform.curvature.newton_step(f, (x,), tolerance=1e-12))(np.zeros(30))
    close(step.step, -np.linalg.solve(a, b), 1e-8)
    close(step.decrease, b @ np.linalg.solve(a, b) / 2, 1e-8)
    assert step.reason == "converged"
    damped = xform.curvature.newton_step(f, (np.zeros(30),), damping=2.0, tolerance=1e-12)
    close(damped.step, -np.linalg.solve(a + 2 * np.eye(30), b), 1e-8)
    by = lambda product, rhs: jax.scipy.sparse.linalg.cg(product, rhs, tol=1e-12)[0]
    close(xform.curvature.newton_step(f, (np.zeros(30),), solver=by).step, step.step, 1e-8)
    assert xform.curvature.newton_step(f, (np.zeros(30),), max_iterations=2).reason == "iterations"


def test_a_newton_step_by_a_solver_of_lineax() -> None:
    lineax = pytest.importorskip("lineax")  # installed by the extra `twins`
    a, b, f = quadratic(0, 0.1)

    def by(product: Any, rhs: Any) -> Any:
        like = jax.eval_shape(lambda: rhs)
        matrix = lineax.FunctionLinearOperator(product, like, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(matrix, rhs, lineax.CG(rtol=1e-12, atol=1e-12)).value

    step = jax.jit(lambda x: xform.curvature.newton_step(f, (x,), solver=by))(np.zeros(30))
    close(step.step, -np.linalg.solve(a, b), 1e-8)
    halves = lambda x, y: f(jnp.concatenate([x, y]))
    both = xform.curvature.newton_step(
        halves, (np.zeros(10), np.zeros(20)), damping=2.0, solver=by
    ).step
    close(np.concatenate(both), -np.linalg.solve(a + 2 * np.eye(30), b), 1e-8)


@pytest.mark.parametrize("radius", [1e-3, 0.5, 2.0, 1e3])
@pytest.mark.parametrize("low", [-1.0, 0.1])
def test_steps_in_a_trust_region(low: float, radius: float) -> None:
    a, b, f = quadratic(1, low)
    step = xform.curvature.newton_step(f, (np.zeros(30),), radius=radius, tolerance=1e-10)
    p = np.asarray(step.step)
    assert np.linalg.norm(p) <= radius * (1 + 1e-10)
    assert step.reason != "iterations"
    close(step.decrease, -(b @ p + p @ a @ p / 2), 1e-8 * radius**2)
    # At least the decrease of the best step along the gradient, the Cauchy point.
    g, curvature = np.linalg.norm(b), b @ a @ b / (b @ b)
    along = radius if curvature <= 0 else min(radius, g / curvature)
    assert float(step.decrease) >= along * g - along**2 * curvature / 2 - 1e-9
    if low < 0 or radius < 1:
        close(np.linalg.norm(p), radius, 1e-9)
        assert step.reason in ("negative curvature", "boundary")


def test_negative_curvature_without_a_trust_region() -> None:
    a = np.diag([-1.0, 2.0])
    f = lambda x: x @ a @ x / 2 + jnp.array([1.0, 0.1]) @ x
    step = xform.curvature.newton_step(f, (np.zeros(2),))
    close(step.step, -np.array([1.0, 0.1]))  # steepest descent
    assert step.reason == "negative curvature"
    still = xform.curvature.newton_step(lambda x: -jnp.sum(x**2), (np.zeros(2),))
    assert (still.step.tolist(), int(still.iterations)) == ([0, 0], 0)


def test_newton_steps_minimize_rosenbrocks_function() -> None:
    f = lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    @jax.jit
    def improved(x, radius):
        step = xform.curvature.newton_step(f, (x,), radius=radius)
        better = f(x + step.step) < f(x)
        return jnp.where(better, x + step.step, x), jnp.where(better, 1.5 * radius, radius / 4)

    x, radius = jnp.array([-1.2, 1.0]), 1.0
    for _ in range(60):
        x, radius = improved(x, radius)
    close(x, jnp.ones(2), 1e-6)


def test_natural_gradient() -> None:
    j = jacobian().reshape(-1, N)
    gradient = jax.grad(lambda x: loss(unflatten(x)))(FLAT)
    z = model(PARAMS)
    p = jax.nn.softmax(z)
    inner = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p)
    fisher = jnp.einsum("eki,ekl,elj->ij", j.reshape(7, 3, N), inner, j.reshape(7, 3, N)) / 7
    step = xform.curvature.natural_gradient_step(
        model, cross_entropy, (PARAMS,), damping=0.1, tolerance=1e-12, distribution="categorical"
    )
    want = -jnp.linalg.solve(fisher + 0.1 * jnp.eye(N), gradient)
    close(ravel_pytree(step.step)[0], want, 1e-8)


def test_a_budget_holds_as_compiled() -> None:
    w = jax.ShapeDtypeStruct((4, 32, 32), jnp.float64)
    x = jax.ShapeDtypeStruct((256, 32), jnp.float64)

    def deep(ws, x):
        return jax.lax.scan(lambda h, w: (jnp.sin(jnp.sin(h @ w)), None), x, ws)[0]

    f = lambda ws, x: jnp.mean(deep(ws, x) ** 2)
    ask = {
        "ggnvp": lambda ws, x, policy: xform.curvature.ggnvp(
            lambda w: deep(w, x), lambda z: jnp.mean(z**2), (ws,), (ws,), policy=policy),
        "newton_step": lambda ws, x, policy: xform.curvature.newton_step(
            lambda w: f(w, x), (ws,), policy=policy).step,
    }  # fmt: skip
    for name, asked in ask.items():
        run = lambda policy, asked=asked: lambda ws, x: asked(ws, x, policy)
        total = lambda policy, run=run: xform.memory_analysis(run(policy), w, x).total_bytes or 0
        least, most = total(xform.policies.save_nothing), total(None)
        assert least < 0.9 * most, name
        budget = xform.policies.budget((least + most) // 2)
        assert total(budget) <= budget.bytes, name
    with pytest.raises(BudgetInfeasible, match="lowest peak"):
        total(xform.policies.budget("100 kB"))


def test_within_other_transforms() -> None:
    f = lambda x: jnp.sum(jnp.sin(x) * x**2)
    xs = X[:3]
    diagonal = lambda x: xform.curvature.hutchinson(f, (x,), jax.random.key(0), samples=2).diagonal
    close(jax.vmap(diagonal)(xs), jnp.stack([diagonal(x) for x in xs]))
    step = lambda x: xform.curvature.newton_step(f, (x,), damping=20.0, tolerance=1e-12).step
    close(jax.vmap(step)(xs), jnp.stack([step(x) for x in xs]), 1e-8)
    product = lambda x: jnp.sum(xform.curvature.ggnvp(jnp.sin, lambda z: jnp.sum(z**3), (x,), (x,)))
    want = lambda x: jnp.sum(6 * jnp.sin(x) * jnp.cos(x) ** 2 * x)
    close(xform.grad(product)(X[0]), jax.grad(want)(X[0]))


def test_invalid_options_functions_tangents_and_dtypes_raise() -> None:
    key, x = jax.random.key(0), np.ones(3)
    f = lambda x: jnp.sum(x**2)
    wrong = {
        "samples": lambda: xform.curvature.hutchinson(f, (x,), key, samples=1),
        "no steps": lambda: xform.curvature.hessian_spectrum(f, (x,), key, steps=0),
        "no elements": lambda: xform.curvature.hessian_spectrum(f, (np.zeros(0),), key),
        "distribution": lambda: xform.curvature.fisher_vp(f, "cauchy", (x,), (x,)),
        "reduction": lambda: xform.curvature.fisher_vp(f, "normal", (x,), (x,), reduction="max"),
        "no axis": lambda: xform.curvature.fisher_vp(f, "normal", (x,), (x,), reduction="mean"),
        "no classes": lambda: xform.curvature.fisher_vp(f, "categorical", (x,), (x,)),
        "several": lambda: xform.curvature.fisher_vp(lambda x: (x, x), "normal", (x,), (x,)),
        "solver": lambda: xform.curvature.newton_step(f, (x,), radius=1.0, solver=lambda a, b: b),
        "no function": lambda: xform.curvature.hutchinson(3, (x,), key),
        "no model": lambda: xform.curvature.ggnvp(3, f, (x,), (x,)),
    }
    for call in wrong.values():
        with pytest.raises(WrongArgument):
            call()
    with pytest.raises(WrongArgument):
        xform.curvature.ggnvp(jnp.sin, f, x, (x,))
    with pytest.raises(WrongTangent):
        xform.curvature.ggnvp(jnp.sin, f, (x,), (x[:2],))
    with pytest.raises(WrongDtype):
        xform.curvature.hutchinson(f, (np.arange(3),), key)
    with pytest.raises(TypeError):
        xform.curvature.newton_step(jnp.sin, (x,))
