"""What a report advises is so."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

import xform


def loss(w: Any, x: Any) -> Any:
    for _ in range(4):
        x = jnp.tanh(jnp.sin(x @ w) @ w)
    return jnp.sum(x**2)


W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)


def test_no_policy_that_was_not_planned() -> None:
    """Half of a report's bytes is a budget that this program has no plan for."""
    for capacity in (None, "64 KiB"):
        report = xform.memory_analysis(xform.value_and_grad(loss), W, X, capacity=capacity)
        (text,) = (text for text in report.advice if "wait for the backward pass" in text)
        assert "ask xform.pareto of the loss" in text
        assert not re.search(r"budget\('?\d", text)


def test_the_peaks_that_it_sends_to_can_be_had() -> None:
    curve = xform.pareto(loss, W, X, points=3)
    for point in curve:
        if not point.stock:
            policy = xform.policies.budget(point.peak_bytes)
            assert xform.plan(loss, W, X, policy=policy).compiled_bytes <= point.peak_bytes


def test_constants_of_the_compiler_are_not_the_functions() -> None:
    """Of two numbers on a device both are a constant of the program; nothing is closed over."""
    report = xform.memory_analysis(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32))
    assert not any("closes over" in text for text in report.advice)
    w = jax.random.normal(jax.random.key(0), (64, 64))
    inner = jax.jit(lambda x: x @ w)
    report = xform.memory_analysis(lambda x: inner(x) + 1, W)
    assert any(text.startswith("16.0 KiB are part of the program") for text in report.advice)
