"""Where products with the Hessian are used, and how many passes each method takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.sparse.linalg
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from experiments.claims.programs import normal
from xform.curvature import fisher_vp, natural_gradient_step
from xform.interpret.cost import program_flops

ROWS, INPUTS, HIDDEN = 128, 8, 12
SIZE = INPUTS * HIDDEN + HIDDEN
DAMPING, TOLERANCE, EXTREMES = 1e-2, 1e-3, 3


def split(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights of both layers."""
    return flat[: INPUTS * HIDDEN].reshape(INPUTS, HIDDEN), flat[INPUTS * HIDDEN :]


X = normal(ROWS, INPUTS) * ROWS**0.5
LABELS = (X[:, 0] * X[:, 1] > 0).astype(jnp.float32)


def model(flat: jax.Array) -> jax.Array:
    """Return the logits of a small classifier."""
    first, second = split(flat)
    return jnp.tanh(X @ first) @ second


def loss(flat: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy, with a penalty of the weights."""
    z = model(flat)
    entropy = jnp.mean(jax.nn.softplus(z) - LABELS * z)
    return entropy + DAMPING / 2 * jnp.sum(flat**2)


def product(flat: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply the Hessian with a vector."""
    return xform.hvp(loss, (flat,), (v,))


def counted(counts: Counter[str], name: str, f: Any) -> Callable[..., np.ndarray]:
    """Return a compiled function that counts its calls."""
    run = jax.jit(f)

    def call(*args: Any) -> np.ndarray:
        counts[name] += 1
        return np.asarray(run(*(jnp.asarray(a, jnp.float64) for a in args)), np.float64)

    return call


def minimized(method: str) -> tuple[Counter[str], Any]:
    """Minimize the loss by a method of SciPy, and return its passes and its result."""
    counts: Counter[str] = Counter()
    options: dict[str, Any] = {}
    if method != "L-BFGS-B":
        options["hessp"] = counted(counts, "products", product)
    found = scipy.optimize.minimize(
        counted(counts, "values", loss), np.asarray(start()),
        jac=counted(counts, "gradients", xform.grad(loss)), method=method, tol=1e-6, **options,
    )  # fmt: skip
    return counts, found


def start() -> jax.Array:
    """Return the first weights."""
    return jnp.asarray(normal(SIZE, seed=5), jnp.float64) * 0.5


def extremes() -> tuple[Counter[str], float]:
    """Return the products for the largest eigenvalues by Lanczos, and their error."""
    counts: Counter[str] = Counter()
    at = start()
    run = counted(counts, "products", lambda v: product(at, v))
    matrix = scipy.sparse.linalg.LinearOperator((SIZE, SIZE), matvec=run, dtype=np.float64)  # pyright: ignore
    found = scipy.sparse.linalg.eigsh(matrix, EXTREMES, which="LA", return_eigenvectors=False,
                                      tol=1e-8, v0=np.ones(SIZE))  # fmt: skip
    dense = np.linalg.eigvalsh(np.asarray(jax.hessian(loss)(at)))
    return counts, float(np.max(np.abs(np.sort(found) - dense[-EXTREMES:])) / dense[-1])


def natural() -> tuple[int, float, float]:
    """Return the products of a step of natural gradient, their FLOPs over a gradient's, the error.

    The reference solves the dense system, with JAX's Jacobian.
    """
    at, data = start(), lambda z: jnp.mean(jax.nn.softplus(z) - LABELS * z)
    step = natural_gradient_step(
        model, data, (at,), distribution="bernoulli", damping=DAMPING, tolerance=1e-6
    )
    jacobian, p = jax.jacobian(model)(at), jax.nn.sigmoid(model(at))
    fisher = jacobian.T @ (jacobian * (p * (1 - p) / ROWS)[:, None])
    dense = jnp.linalg.solve(
        fisher + DAMPING * jnp.eye(SIZE), -jax.grad(lambda w: data(model(w)))(at)
    )
    times = lambda at, v: fisher_vp(model, "bernoulli", (at,), (v,), reduction="mean")
    unit = program_flops(times, at, at) / program_flops(xform.grad(loss), at)
    off = float(jnp.linalg.norm(step.step - dense) / jnp.linalg.norm(dense))
    return int(step.iterations), unit, off


def measure(quick: bool) -> Finding:
    """Count the passes of each method on one small classifier, in float64."""
    with jax.enable_x64():
        unit = program_flops(product, start(), start()) / program_flops(xform.grad(loss), start())
        lbfgs, first = minimized("L-BFGS-B")
        newton, second = minimized("Newton-CG")
        lanczos, off = extremes()
        products, fisher, natural_off = natural()
    iterations = newton["products"] / second.nit
    total = {
        "L-BFGS": (lbfgs["gradients"], lbfgs["products"]),
        "Newton with CG": (newton["gradients"], newton["products"]),
        "natural gradient, a step": (1, products),
        f"{EXTREMES} eigenvalues": (0, lanczos["products"]),
    }
    same = abs(first.fun - second.fun) < 1e-4 * abs(first.fun)
    minima = f"minima {first.fun:.4f} and {second.fun:.4f}"
    return Finding(
        [
            Claim(
                "L-BFGS needs no product with the Hessian: about one gradient in an iteration",
                "Nocedal and Wright, Numerical optimization, section 7.2",
                "0 products; gradients for each iteration 1, more in its line search",
                f"{SIZE} weights, {first.nit} iterations: {lbfgs['gradients']} gradients,"
                f" {lbfgs['products']} products; {lbfgs['gradients'] / first.nit:.2f} gradients an"
                " iteration",
                verdict(
                    not lbfgs["products"] and lbfgs["gradients"] <= 1.5 * first.nit,
                    f"holds if {lbfgs['gradients'] / first.nit:.1f} gradients an iteration are"
                    " allowed",
                ),
            ),
            Claim(
                "Newton's method by conjugate gradients takes fewer products than the Hessian has"
                " rows, in each step",
                "Nocedal and Wright, Numerical optimization, section 7.1",
                f"at most {SIZE}, and few far from the minimum; each costs two to three gradients",
                f"{second.nit} steps: {newton['gradients']} gradients, {newton['products']}"
                f" products, {iterations:.1f} a step, of {unit:.2f} gradients each in FLOPs;"
                f" {minima}, L-BFGS first",
                verdict(
                    iterations < SIZE / 2 and second.success,
                    f"wrong: {iterations:.0f} a step of {SIZE}",
                )
                + (
                    f"; in gradients it takes "
                    f"{(newton['gradients'] + unit * newton['products']) / lbfgs['gradients']:.1f}"
                    " times as many as L-BFGS here"
                    if same
                    else ""
                ),
            ),
            Claim(
                "A step of natural gradient takes a gradient, and a product with the Fisher matrix"
                " for each iteration of CG",
                "Martens, New insights on the natural gradient method, arXiv:1412.1193",
                "a product: a forward pass of tangents and a backward pass, up to two gradients",
                f"{products} products for {SIZE} weights, of {fisher:.2f} gradients each in FLOPs;"
                f" the step is {natural_off:.0e} from that of the dense matrix, relative",
                verdict(
                    products < SIZE and fisher <= 2.2 and natural_off < 1e-4,
                    f"wrong: {products} products of {fisher:.1f} gradients each",
                ),
            ),
            Claim(
                "The largest eigenvalues of a Hessian take tens of products, not all of its rows",
                "Lanczos, 1950; Ghorbani et al., arXiv:1901.10159",
                f"fewer than the {SIZE} products that all rows take",
                f"the largest {EXTREMES} to 1e-8: {lanczos['products']} products; {off:.0e} from"
                " those of jax.hessian, relative",
                verdict(
                    lanczos["products"] < SIZE and off < 1e-6,
                    f"wrong: {lanczos['products']} products of {SIZE}",
                ),
            ),
        ],
        lambda figure: draw(figure, total),
    )


def draw(figure: Figure, total: dict[str, tuple[int, int]]) -> None:
    """Draw the passes of each method."""
    axes = figure.subplots()
    names = [*total]
    for i, what in enumerate(("gradients", "products")):
        axes.barh([y + 0.38 * i for y in range(len(names))], [total[n][i] for n in names], 0.36,
                  label=what)  # fmt: skip
    axes.set_yticks([y + 0.19 for y in range(len(names))], names, fontsize=8)
    axes.set(xlabel="passes")
    axes.legend(frameon=False)
