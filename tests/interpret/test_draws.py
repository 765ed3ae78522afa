"""Random draws of a layer wait for the layer before, so their bits do not pile up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.interpret.draws import find_draw_waits
from xform.interpret.joint import analyze
from xform.program.ir import trace

ROWS, WIDTH, LAYERS = 1024, 256, 8


def loss(ws: Any, x: Any, key: Any) -> Any:
    for w, k in zip(ws, jax.random.split(key, len(ws)), strict=True):
        h = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(k, 0.5, h.shape), 2 * h, 0)
    return jnp.mean(x**2)


def arguments(rows: int) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    ws = [jnp.asarray(random.normal(size=(WIDTH, WIDTH)) / 16, "float32") for _ in range(LAYERS)]
    x = jnp.asarray(random.normal(size=(rows, WIDTH)), "float32")
    return ws, x, jax.random.key(0)


def test_the_bits_of_all_layers_are_not_in_memory_at_once() -> None:
    args = arguments(ROWS)
    compiled = jax.jit(xform.grad(loss)).lower(*args).compile()
    bits = 4 * ROWS * WIDTH
    saved = LAYERS * (bits + bits // 4)  # the result and the mask of each layer
    gradients = LAYERS * 4 * WIDTH**2
    stats: Any = compiled.memory_analysis()
    # Two arrays of bits for each layer would take 16 more. A draw itself takes four.
    assert stats.temp_size_in_bytes < saved + gradients + 5 * bits
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        compiled(*args),
        jax.jit(jax.grad(loss))(*args),
    )


def test_an_operation_without_results_is_passed_over() -> None:
    def f(x: jax.Array, key: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return jnp.sum(jnp.sin(x) * jax.random.uniform(key, x.shape))

    prog = trace(lambda *xs: [f(*xs)], jnp.ones((ROWS, WIDTH)), jax.random.key(0))
    assert not find_draw_waits(prog.equations)  # there is no work to wait for


@pytest.mark.parametrize(("rows", "waiting"), [(ROWS, LAYERS), (16, 0)])
def test_only_large_draws_wait(rows: int, waiting: int) -> None:
    prog = trace(lambda *xs: [loss(xs[:LAYERS], *xs[LAYERS:])], *jax.tree.leaves(arguments(rows)))
    joint = analyze(prog, (True,) * LAYERS + (False,) * 2, (True,))
    waits = find_draw_waits(joint.forward)
    assert len(waits) == waiting
    for i, (wait,) in waits.items():
        assert joint.forward[i].primitive.name == "random_bits"
        (last,) = wait.seeds
        assert joint.producer[last].primitive.name == "dot_general"
        assert [*joint.forward].index(joint.producer[last]) < i
