"""Which values of a compiled program are scaled or clipped copies of another one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import xform
from tests.memory.test_capacity import f32
from xform.memory.scaled import ScaledCopies


def root_source(f: Callable[..., Any], *args: Any) -> str:
    """Return the opcode of the source of a function's result."""
    module = xform.memory_analysis(f, *args).assignment.module
    source, _ = ScaledCopies(module).source(module.root(module.entry).id)
    return module.instructions[source].opcode


@pytest.mark.parametrize(
    "f",
    [
        lambda g, s: g / s * 3,
        lambda g, s: jnp.where(s < 1, g, g / s),
        lambda g, s: jnp.clip(g, -1, 1),
        lambda g, s: -jnp.minimum(g, s).T,
    ],
)
def test_copies_that_a_number_scales_or_clips(f: Callable[..., Any]) -> None:
    assert root_source(f, f32(64, 32), f32()) == "parameter"


@pytest.mark.parametrize(
    "f",
    [
        lambda g, s: g * g,
        lambda g, s: s / g,
        lambda g, s: g + s,
        lambda g, s: g * g[:1],
        lambda g, s: jnp.where(g > 0, g, 0 * s),
        lambda g, s: jnp.sin(g) * s,
        lambda g, s: 0.9 * g + 0.1 * g.T,
    ],
)
def test_other_values(f: Callable[..., Any]) -> None:
    assert root_source(f, f32(32, 32), f32()) != "parameter"


def loss(ws: Any, x: Any) -> Any:
    for w in ws["unrolled"]:
        x = jnp.tanh(x @ w)
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws["scanned"])[0] ** 2)


def test_clipped_gradients_at_the_peak_are_gradients() -> None:
    """Adam's moments wait for the clipped gradients, so both are live at the peak."""
    ws = {"unrolled": [f32(256, 256)] * 3, "scanned": f32(3, 256, 256)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(ws: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(xform.grad(loss)(ws, x), state, ws)
        return optax.apply_updates(ws, updates), state

    report = xform.memory_analysis(
        step, ws, jax.eval_shape(optimizer.init, ws), f32(16, 256), donate_argnums=(0, 1)
    )
    large = [row for row in report.peak if row.bytes >= 256 * 256 * 4]
    assert "temporary" not in {row.category for row in large}
    clipped = [row for row in large if row.category == "gradient" and row.operation == "div"]
    assert len(clipped) >= 3


def test_a_scaled_gradient_that_a_backward_pass_reads_is_no_gradient() -> None:
    """The gradient of a gradient's norm: the inner one is an intermediate value of the outer."""

    def norm(w: Any, x: Any) -> Any:
        g = xform.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return jnp.sum(jnp.sin(3.0 * g))

    report = xform.memory_analysis(xform.grad(norm), f32(256, 256), f32(16, 256))
    assert not [r for r in report if r.category == "gradient" and r.operation in ("mul", "sin")
                and not r.output]  # fmt: skip
