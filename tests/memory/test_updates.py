"""Gradients that wait for each other, according to the compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import xform
from xform.memory.updates import waiting_gradients


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def clipped(norm: Any) -> Any:
    """A training step that divides gradients by a `norm` of all of them."""

    def step(ws: Any, x: Any) -> Any:
        grads = xform.grad(layers)(ws, x)
        return [w - 0.1 * g / n for w, g, n in zip(ws, grads, norm(grads), strict=True)]

    return step


def each(grads: Any) -> Any:
    return [jnp.sqrt(jnp.sum(g**2)) for g in grads]


def of_all(grads: Any) -> Any:
    return [jnp.sqrt(sum(jnp.sum(g**2) for g in grads))] * len(grads)


def test_gradients_that_wait_for_their_norm() -> None:
    args = [f32(256, 256)] * 12, f32(64, 256)
    alone, together = (
        xform.memory_analysis(clipped(norm), *args, donate_argnums=0) for norm in (each, of_all)
    )
    found = waiting_gradients(together)
    assert len(found.rows) >= 11
    assert "test_updates.py" in found.where
    assert "of_all" in found.where
    assert 0.5 * found.peak_reduction <= together.temp_bytes - alone.temp_bytes
    assert found.peak_reduction > 0.5 * together.temp_bytes
    assert waiting_gradients(alone) is None
    (text,) = (text for text in together.advice if "gradients wait" in text)
    assert found.where in text


def test_gradients_that_a_loop_stacks_come_together() -> None:
    """They exist at the same time whatever their norm."""

    def deep(params: Any, x: Any) -> Any:
        layer = lambda h, wv: (jnp.tanh(jnp.tanh(h @ wv[0]) @ wv[1]), None)
        return jnp.sum(jax.lax.scan(layer, x, params)[0])

    def step(params: Any, x: Any) -> Any:
        grads = xform.grad(deep)(params, x)
        n = of_all(grads)[0]
        return [w - g / n for w, g in zip(params, grads, strict=True)]

    args = [f32(8, 128, 128)] * 2, f32(16, 128)
    report = xform.memory_analysis(step, *args, donate_argnums=0)
    assert sum(r.category == "gradient" for r in report.peak) == 2
    assert waiting_gradients(report) is None
    assert not any("gradients wait" in text for text in report.advice)


def test_there_is_nothing_to_wait_where_nothing_is_derived() -> None:
    assert waiting_gradients(xform.memory_analysis(layers, [f32(8, 8)] * 2, f32(4, 8))) is None
