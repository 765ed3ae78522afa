"""Random draws of a layer wait for the layer before, so their bits do not pile up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.interpret.joint import analyze
from xform.program.ir import trace
from xform.steering.draws import find_draw_waits

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


def test_a_draw_waits_for_a_result_of_a_loop_that_is_read() -> None:
    """The first result of this loop, its carry, is not computed, since nothing reads it."""

    def f(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        def body(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w + x)
            return h * 0.5, jnp.sin(h)

        _, ys = jax.lax.scan(body, x[0], x)
        ys = jnp.where(jax.random.bernoulli(key, 0.5, ys.shape), ys, 0.0)
        return jnp.sum(jnp.tanh(jnp.exp(jnp.sin(ys) * 2) @ w) ** 2)

    args = jnp.eye(128) / 2, jnp.ones((8, 64, 128)), jax.random.key(0)
    gradient = jax.jit(xform.grad(f))
    np.testing.assert_allclose(gradient(*args), jax.grad(f)(*args), rtol=1e-4)
    held = [e.params["where"] for e in jax.make_jaxpr(gradient)(*args).eqns[0].params["jaxpr"].eqns
            if e.primitive.name == "xform_barrier"]  # fmt: skip
    assert "cpu" in held


def test_a_draw_by_a_key_of_raw_numbers_does_not_wait_for_the_key() -> None:
    def f(x: jax.Array, key: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ x.T)
        return jnp.sum(y * jax.random.uniform(key, y.shape))

    prog = trace(lambda *xs: [f(*xs)], jnp.ones((ROWS, WIDTH)), jax.random.PRNGKey(0))
    joint = analyze(prog, (True, False), (True,))
    ((wait,),) = find_draw_waits(joint.forward).values()
    assert joint.producer[wait.seeds[0]].primitive.name in ("dot_general", "transpose")
    assert wait.seeds != wait.saved


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
