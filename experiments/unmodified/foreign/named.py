"""Programs that users reported, in a few lines each: none of them needs a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.planner.inside import scans, selective_scan
from experiments.unmodified.foreign.parts import Made, Program, normal
from experiments.unmodified.programs import KEY

OURS = "none"


def constant_data(folder: Path) -> Made:
    """A loss that closes over 40,000 rows of NumPy data."""
    data = np.random.default_rng(0).normal(size=(40000, 512)).astype("float32")
    return lambda w: jnp.mean(jnp.tanh(jnp.array(data) @ w) ** 2), (normal(512, 64) / 20,)


def selective_scans(folder: Path) -> Made:
    """Two selective-scan layers of width 64 and state 16, over 256 steps."""
    names, keys = ("step", "decay", "put", "get"), jax.random.split(KEY, 8)
    shapes = {"step": (64, 64), "decay": (64, 16), "put": (64, 16), "get": (64, 16)}
    layers = [{name: jax.random.normal(keys[4 * n + i], shapes[name]) / 8
               for i, name in enumerate(names)} for n in range(2)]  # fmt: skip
    return selective_scan, (layers, normal(4, 256, 64))


def associative_scan(folder: Path) -> Made:
    """One layer of gates and inputs, combined along 512 steps."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        decay = jax.nn.sigmoid(x @ w)
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        return jnp.mean(lax.associative_scan(merge, (decay, x @ w.T), axis=0)[1] ** 2)

    return loss, (normal(64, 64) / 8, normal(512, 64))


def associative_scans(folder: Path) -> Made:
    """Three associative scans of exponentials and tanh, along 512 steps."""
    return scans, (normal(3, 64, 64) / 8, normal(512, 64))


def implicit(folder: Path) -> Made:
    """A least-squares problem, solved by conjugate gradients, with a derivative of its own."""

    @jax.custom_vjp
    def solve(w: jax.Array, a: jax.Array, y: jax.Array) -> jax.Array:
        return solver(w, a, a.T @ y)

    def solver(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        apply = lambda v: a.T @ (a @ v) + jnp.exp(w) * v
        return jax.scipy.sparse.linalg.cg(apply, b, maxiter=50)[0]

    def forward(w: jax.Array, a: jax.Array, y: jax.Array) -> Any:
        x = solve(w, a, y)
        return x, (w, a, y, x)

    def backward(kept: Any, ct: jax.Array) -> Any:
        w, a, y, x = kept
        v = solver(w, a, ct)
        rest = y - a @ x
        return -jnp.exp(w) * x * v, jnp.outer(rest, v) - jnp.outer(a @ v, x), a @ v

    solve.defvjp(forward, backward)

    def loss(params: Any, inputs: jax.Array, y: jax.Array) -> jax.Array:
        w, weights = params
        a = jnp.tanh(inputs @ weights)
        return jnp.sum(jnp.tanh(a @ solve(w, a, y) - y) ** 2)

    return loss, ((normal(256), normal(64, 256) / 8), normal(1024, 64), normal(1024, seed=2))


def third_derivative(folder: Path) -> Made:
    """The residual of the Korteweg-de Vries equation of a network, at 2048 points."""

    def u(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        first, second, last = params
        return jnp.tanh(jnp.tanh(jnp.stack([t, x]) @ first) @ second) @ last

    def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        along = jax.grad(u, 2)
        third = jax.grad(jax.grad(along, 2), 2)(params, t, x)
        return jax.grad(u, 1)(params, t, x) + 6 * u(params, t, x) * along(params, t, x) + third

    def loss(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(residual, (None, 0, 0))(params, t, x) ** 2)

    params = normal(2, 64), normal(64, 64, seed=2) / 8, normal(64, seed=3) / 8
    return loss, (params, normal(2048), normal(2048, seed=4))


PROGRAMS = {
    "data in the program": Program(OURS, "", constant_data),
    "selective scan, two layers": Program(OURS, "", selective_scans),
    "associative scan": Program(OURS, "", associative_scan),
    "exp and tanh scans": Program(OURS, "", associative_scans),
    "implicit derivative": Program(OURS, "", implicit),
    "third derivative": Program(OURS, "", third_derivative),
}
