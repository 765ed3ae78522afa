"""Curvature products and estimates against dense matrices, and bytes under budgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

import xform
from experiments.report import write_table
from xform.curvature import Fisher, GaussNewton, Spectrum

HERE = Path(__file__).parent
EXAMPLES, INPUTS, HIDDEN, CLASSES = 64, 8, 13, 5
SAMPLES, KEY = 24, 0


def dense(product: Callable[[Any], Any], unflatten: Any, n: int) -> jax.Array:
    """Return a matrix from its products with the unit vectors."""
    column = lambda e: ravel_pytree(product(unflatten(e)))[0]
    return jax.jit(jax.vmap(column))(jnp.eye(n)).T


def off(got: Any, want: Any) -> str:
    """Return the largest difference relative to the largest element, as text."""
    return f"{float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))):.1e}"


def against_dense() -> None:
    """Write the table of values."""
    draw = np.random.default_rng(0)
    x, labels = draw.normal(size=(EXAMPLES, INPUTS)), draw.integers(0, CLASSES, EXAMPLES)
    params = {"w": draw.normal(size=(INPUTS, HIDDEN)), "b": draw.normal(size=HIDDEN),
              "v": draw.normal(size=(HIDDEN, CLASSES)), "c": draw.normal(size=CLASSES)}  # fmt: skip
    flat, unflatten = ravel_pytree(params)
    n = flat.size
    model = lambda p: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    loss = lambda z: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], 1))
    f = lambda p: loss(model(p))

    hessian = jax.jit(jax.hessian(lambda p: f(unflatten(p))))(flat)
    logits = lambda p: model(unflatten(p)).reshape(-1)
    jacobian = jax.jit(jax.jacobian(logits))(flat)
    inner = jax.hessian(lambda z: loss(z.reshape(EXAMPLES, CLASSES)))(logits(flat))
    gauss_newton = jacobian.T @ inner @ jacobian
    log_p = lambda p: jax.nn.log_softmax(model(unflatten(p)))
    gradients = jax.jit(jax.jacobian(log_p))(flat)
    fisher = jnp.einsum("ek,eki,ekj->ij", jnp.exp(log_p(flat)), gradients, gradients)
    point = (params,)
    kind = "categorical"
    products = {
        "hvp, each column": (lambda v: xform.hvp(f, point, (v,)), hessian),
        "ggnvp, each column": (
            lambda v: xform.curvature.ggnvp(model, loss, point, (v,)),
            gauss_newton,
        ),
        "fisher_vp, each column": (
            lambda v: xform.curvature.fisher_vp(model, kind, point, (v,)),
            fisher,
        ),
    }
    rows = [[name, "relative difference", off(dense(product, unflatten, n), want)]
            for name, (product, want) in products.items()]  # fmt: skip

    for name, matrix, of in (("Hessian", hessian, f),
                             ("Gauss-Newton", gauss_newton, GaussNewton(model, loss)),
                             ("Fisher", fisher, Fisher(model, kind))):  # fmt: skip
        key = jax.random.key(KEY)
        estimate = jax.jit(
            lambda key, of=of: xform.curvature.hutchinson(of, point, key, samples=SAMPLES)
        )(key)
        z = float((estimate.trace - jnp.trace(matrix)) / estimate.trace_error)
        scores = (ravel_pytree(estimate.diagonal)[0] - jnp.diag(matrix)) / ravel_pytree(
            estimate.diagonal_error)[0]  # fmt: skip
        inside = float(jnp.mean(jnp.abs(scores) < 2))
        rows += [
            [f"hutchinson, {name}", "trace, in standard errors off", f"{z:+.2f}"],
            ["", "diagonal within two standard errors", f"{inside:.0%}"],
        ]
        spectrum = jax.jit(
            lambda key, of=of: xform.curvature.hessian_spectrum(
                of, point, key, steps=n, samples=SAMPLES
            )
        )(key)
        values = jnp.linalg.eigvalsh(matrix)
        grid = spectrum.grid(4000)
        rows += [
            [f"spectrum, {name}", "integral of the density",
             f"{float(jnp.trapezoid(spectrum.density(grid), grid)):.6f}"],
            ["", "largest eigenvalue, relative difference", off(spectrum.largest, values[-1])],
            ["", "trace, in standard errors off", errors(spectrum, 1, values)],
            ["", "squared Frobenius norm, in standard errors off", errors(spectrum, 2, values)],
        ]  # fmt: skip
        if name == "Hessian":
            picture(spectrum, values)
    damped = lambda m: m + 0.1 * jnp.eye(n)
    gradient = ravel_pytree(jax.grad(f)(params))[0]
    step = xform.curvature.newton_step(f, point, curvature=GaussNewton(model, loss), damping=0.1,
                             tolerance=1e-12, max_iterations=1000)  # fmt: skip
    want = -jnp.linalg.solve(damped(gauss_newton), gradient)
    rows.append(["newton_step, Gauss-Newton", "relative difference",
                 off(ravel_pytree(step.step)[0], want)])  # fmt: skip
    step = xform.curvature.natural_gradient_step(model, loss, point, distribution=kind, damping=0.1,
                                       tolerance=1e-12, max_iterations=1000)  # fmt: skip
    want = -jnp.linalg.solve(damped(fisher / EXAMPLES), gradient)
    rows.append(["natural_gradient_step", "relative difference",
                 off(ravel_pytree(step.step)[0], want)])  # fmt: skip
    write_table(HERE, ["", f"of {n} parameters", ""], rows)


def errors(spectrum: Spectrum, k: int, values: jax.Array) -> str:
    """Return the error of a moment, in standard errors over samples."""
    each = jnp.sum(spectrum.weights * spectrum.nodes**k, axis=1)
    error = jnp.std(each, ddof=1) / len(each) ** 0.5
    return f"{float((jnp.mean(each) - jnp.mean(values**k)) / error):+.2f}"


def picture(spectrum: Spectrum, values: jax.Array) -> None:
    """Draw the density over a histogram of the eigenvalues."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    at = spectrum.grid(2000)
    axes.hist(np.asarray(values), bins=60, density=True, color="0.8", label="dense, eigenvalues")
    axes.plot(at, spectrum.density(at), label="xform.curvature.hessian_spectrum")
    axes.set(yscale="log", ylim=(1e-4, None), xlabel="eigenvalue", ylabel="density")
    axes.legend()
    figure.savefig(HERE / "spectrum.png", dpi=150)


def budgets() -> None:
    """Write the table of bytes."""
    ws = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    deep = lambda ws, x: lax.scan(lambda h, w: (jnp.tanh(jnp.sin(h @ w)), None), x, ws)[0]
    square = lambda z: jnp.mean(z**2)
    asked: dict[str, Callable[..., Any]] = {
        "hvp": lambda ws, x, p: xform.hvp(lambda w: square(deep(w, x)), (ws,), (ws,), policy=p),
        "ggnvp": lambda ws, x, p: xform.curvature.ggnvp(
            lambda w: deep(w, x), square, (ws,), (ws,), policy=p),
        "fisher_vp": lambda ws, x, p: xform.curvature.fisher_vp(
            lambda w: deep(w, x), "normal", (ws,), (ws,), policy=p),
        "hutchinson": lambda ws, x, p: xform.curvature.hutchinson(
            lambda w: square(deep(w, x)), (ws,), jax.random.key(0), policy=p).trace,
        "hessian_spectrum": lambda ws, x, p: xform.curvature.hessian_spectrum(
            lambda w: square(deep(w, x)), (ws,), jax.random.key(0), steps=10, policy=p).nodes,
        "newton_step": lambda ws, x, p: xform.curvature.newton_step(
            lambda w: square(deep(w, x)), (ws,), policy=p).step,
        "natural_gradient_step": lambda ws, x, p: xform.curvature.natural_gradient_step(
            lambda w: deep(w, x), square, (ws,), distribution="normal", policy=p).step,
    }  # fmt: skip
    rows: list[list[str]] = []
    for name, ask in asked.items():
        run = lambda policy, ask=ask: lambda ws, x: ask(ws, x, policy)
        total = lambda policy, run=run: xform.memory_analysis(run(policy), ws, x).total_bytes or 0
        most, least = total(None), total(xform.policies.save_nothing)
        budget = xform.policies.budget((most + least) // 2)
        held = total(budget)
        cells = [f"{n / 1e6:.2f}" for n in (most, least, budget.bytes, held)]
        rows.append([name, *cells, "yes" if held <= budget.bytes else "NO"])
        print(rows[-1], flush=True)
    head = ["", "default, MB", "nothing saved", "budget", "under the budget", "held"]
    write_table(HERE, head, rows, "budgets")


if __name__ == "__main__":
    budgets()
    with jax.enable_x64(True):
        against_dense()
