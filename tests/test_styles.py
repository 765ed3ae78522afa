"""A model of each style of the ecosystem, trained by xform: ordinary code with `jax.` replaced."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import xform
from tests.reference import close

X = np.sin(np.arange(48.0, dtype=np.float32)).reshape(8, 6)
Y = np.cos(np.arange(8.0, dtype=np.float32))


# SGD, not Adam: the bias before a BatchNorm has gradient 0, and Adam turns its rounding into steps.


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    close(jax.tree.leaves(got), jax.tree.leaves(want), tolerance)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(nnx.gelu(self.norm(self.linear(x))))


class Deep(nnx.Module):
    """Blocks stacked by nnx.vmap, scanned by nnx.scan, each a region of nnx.remat."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs), axis_size=3))
        self.blocks = make(rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def layers(block: Block, x: Any) -> Any:
            return nnx.remat(lambda block, x: block(x))(block, x)

        return self.head(layers(self.blocks, x))[:, 0]


def nnx_run(value_and_grad: Any, steps: int = 6) -> Any:
    model = Deep(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model: Deep, optimizer: nnx.Optimizer) -> Any:
        value, grads = value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    losses = [step(model, optimizer) for _ in range(steps)]
    return losses, nnx.state(model, (nnx.Param, nnx.BatchStat))


def test_nnx_with_scan_remat_dropout_and_batch_statistics() -> None:
    losses, state = nnx_run(xform.flax.value_and_grad)
    same((losses, state), nnx_run(nnx.value_and_grad), 1e-4)
    assert losses[-1] < losses[0]
    start = nnx.state(Deep(nnx.Rngs(0, dropout=1)), nnx.BatchStat)
    for path, moved in nnx.to_flat_state(start):
        now = dict(nnx.to_flat_state(state))[path]
        assert np.any(np.asarray(now[...]) != np.asarray(moved[...]))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))
        return x + nn.Dropout(0.25, deterministic=False)(nn.gelu(y)), None


class LinenDeep(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            nn.remat(LinenBlock),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return nn.Dense(1)(layers()(x, None)[0])[:, 0]


def linen_run(value_and_grad: Any, steps: int = 6) -> Any:
    model, optimizer = LinenDeep(), optax.sgd(1e-2, momentum=0.9)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, X)
    params, stats = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(params: Any, stats: Any, state: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            y, new = model.apply(
                {"params": params, "batch_stats": stats},
                X,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return jnp.mean((y - Y) ** 2), new["batch_stats"]

        (value, stats_), grads = value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats_, state, value

    state, losses = optimizer.init(params), []
    for key in jax.random.split(jax.random.key(2), steps):
        params, stats, state, value = step(params, stats, state, key)
        losses.append(value)
    return losses, params, stats


@pytest.mark.slow
def test_linen_with_scan_remat_dropout_and_batch_statistics() -> None:
    got = linen_run(xform.value_and_grad)
    same(got, linen_run(jax.value_and_grad), 1e-4)
    assert got[0][-1] < got[0][0]


def quartic(x: Any) -> Any:
    """A narrow valley with its minimum 0 at 1, 1, ..."""
    return jnp.sum(10.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_lbfgs_with_its_line_search() -> None:
    def run(value_and_grad: Any) -> Any:
        optimizer = optax.lbfgs()

        @jax.jit
        def step(x: Any, state: Any) -> Any:
            value, g = value_and_grad(quartic)(x)
            updates, state = optimizer.update(g, state, x, value=value, grad=g, value_fn=quartic)
            return optax.apply_updates(x, updates), state

        x = jnp.zeros(4)
        state = optimizer.init(x)
        for _ in range(25):
            x, state = step(x, state)
        return x

    got = run(xform.value_and_grad)
    close(got, run(jax.value_and_grad), 1e-8)
    assert quartic(got) < 1e-8


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_newton_with_a_dense_hessian_and_with_products() -> None:
    x = jnp.full(4, 0.9)
    for _ in itertools.repeat(None, 8):
        x = x - jnp.linalg.solve(xform.hessian(quartic)(x), xform.grad(quartic)(x))
    close(x, jnp.ones(4), 1e-12)

    @jax.jit
    def step(x: Any) -> Any:
        product = lambda dx: xform.hvp(quartic, (x,), (dx,))
        return x - jax.scipy.sparse.linalg.cg(product, xform.grad(quartic)(x), tol=1e-14)[0]

    x = jnp.full(4, 0.9)
    for _ in itertools.repeat(None, 8):
        x = step(x)
    close(x, jnp.ones(4), 1e-10)
    close(xform.hessian(quartic)(x), jax.hessian(quartic)(x), 1e-10)
