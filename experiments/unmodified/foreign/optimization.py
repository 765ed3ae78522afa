"""Losses whose value is found by an optimizer, a solver, or a fixed point."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.unmodified.foreign.parts import Made, Program, cross_entropy, labels, normal
from experiments.unmodified.programs import KEY
from experiments.unmodified.sources import definitions, package


def halves(rows: int, columns: int) -> tuple[jax.Array, ...]:
    """Inputs and targets of a regression, two of each: to train, and to validate."""
    x, y = normal(2, rows, columns), normal(2, rows, seed=2)
    return x[0], x[1], y[0], y[1]


def lasso(folder: Path) -> Made:
    """JAXopt's lasso, differentiated implicitly: 60,000 rows of 50 columns."""
    package(folder / "jaxopt", "jaxopt")
    example = definitions(folder / "jaxopt/examples/implicit_diff/lasso_implicit_diff.py",
                          "outer_objective")  # fmt: skip
    settings = SimpleNamespace(solver="bcd", unrolling=False)
    example.outer_objective.__globals__["FLAGS"] = settings

    def loss(theta: jax.Array, start: jax.Array, data: Any) -> jax.Array:
        return example.outer_objective(theta, start, data)[0]

    return loss, (jnp.array(-6.0), jnp.zeros(50), halves(60000, 50))


def ridge(folder: Path) -> Made:
    """JAXopt's ridge regression, differentiated through its root: 60,000 rows of 100 columns."""
    package(folder / "jaxopt", "jaxopt")
    names = "ridge_objective", "ridge_solver", "outer_objective"
    path = folder / "jaxopt/examples/implicit_diff/ridge_reg_implicit_diff.py"
    example = definitions(path, *names)

    def loss(theta: jax.Array, start: jax.Array, data: Any) -> jax.Array:
        return example.outer_objective(theta, start, data)[0]

    return loss, (jnp.array(1.0), jnp.zeros(100), halves(60000, 100))


def equilibrium(folder: Path) -> Made:
    """JAXopt's deep equilibrium model, on eight pictures of 28 by 28."""
    jaxopt = package(folder / "jaxopt", "jaxopt")
    solve = package(folder / "jaxopt", "jaxopt.linear_solve").solve_normal_cg
    names = "ResNetBlock", "DEQFixedPoint", "FullDEQ"
    path = folder / "jaxopt/examples/fixed_point/deep_equilibrium_model.py"
    example = definitions(path, *names)

    def solver(**options: Any) -> Any:
        inner = lambda *args, **kwargs: solve(*args, tol=1e-2, maxiter=20, **kwargs)
        return jaxopt.AndersonAcceleration(history_size=5, ridge=1e-4, maxiter=20, tol=1e-2,
                                           implicit_diff=True, implicit_diff_solve=inner,
                                           **options)  # fmt: skip

    model = example.FullDEQ(10, 24, 32, solver)
    pictures = normal(8, 28, 28, 1)
    made = model.init(KEY, pictures, train=True)

    def loss(params: Any, pictures: jax.Array, targets: jax.Array, stats: Any) -> jax.Array:
        variables = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(variables, pictures, train=True, mutable=["batch_stats"])
        return cross_entropy(logits, targets)

    return loss, (made["params"], pictures, labels(8, 10), made["batch_stats"])


def transport(folder: Path) -> Made:
    """The Sinkhorn divergence of two clouds of 256 points, one of which a network moves."""
    clouds = package(folder / "ott/src", "ott.geometry.pointcloud")
    tools = package(folder / "ott/src", "ott.tools.sinkhorn_divergence")

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        moved = x + jnp.tanh(x @ params[0]) @ params[1]
        return tools.sinkhorn_divergence(clouds.PointCloud, moved, y, epsilon=0.1)[0]

    return loss, ((normal(3, 64), normal(64, 3) / 8), normal(256, 3), normal(256, 3, seed=2))


PROGRAMS = {
    "JAXopt lasso": Program("google/jaxopt", "examples/implicit_diff/lasso_implicit_diff.py",
                            lasso),
    "JAXopt ridge": Program("google/jaxopt", "examples/implicit_diff/ridge_reg_implicit_diff.py",
                            ridge),
    "deep equilibrium": Program("google/jaxopt", "examples/fixed_point/deep_equilibrium_model.py",
                                equilibrium),
    "optimal transport": Program("ott-jax/ott", "src/ott/tools/sinkhorn_divergence.py", transport),
}  # fmt: skip
