"""The facts of a report about a program's bytes are true, and its remedies work."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.memory.test_changes import DENSE, dense, descent, stacked
from xform.terminal.text import human_bytes


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    for _ in range(4):
        x = jnp.tanh(jnp.sin(x @ w) @ w)
    return jnp.sum(x**2)


def said(report: Any, words: str) -> str:
    (text,) = (text for text in report.advice if words in text)
    return text


LOSSES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "one matrix": (loss, (f32(64, 64), f32(512, 64))),
    "dense": (dense, (DENSE, f32(512, 64), f32(512, 10))),
    "stacked layers": (stacked, (f32(12, 64, 64), f32(256, 64))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_budgets_at_the_peaks_that_pareto_lists_are_kept(name: str) -> None:
    f, args = LOSSES[name]
    text = said(xform.memory_analysis(xform.grad(f), *args), "saved for the backward pass")
    assert "that xform.pareto lists for the loss" in text
    assert not re.search(r"budget\('?\d", text)
    for point in xform.pareto(f, *args, points=3):
        if not point.stock:
            policy = xform.policies.budget(point.peak_bytes)
            assert xform.plan(f, *args, policy=policy).compiled_bytes <= point.peak_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_activations_and_their_type(name: str) -> None:
    f, args = LOSSES[name]
    report = xform.memory_analysis(xform.grad(f), *args)
    rows = [row for row in report.peak if row.category == "activation"]
    size = human_bytes(sum(row.bytes for row in rows))
    assert said(report, "saved for the backward pass").startswith(size)
    most = said(report, "are float32")
    assert most.startswith(f"activations of {size} are float32, most at ")
    assert rows[0].where in most


@pytest.mark.parametrize("name", LOSSES)
def test_arguments_that_outputs_can_lie_in(name: str) -> None:
    f, args = LOSSES[name]
    step = descent(f)
    args = args[0], args[0], *args[1:]
    report = xform.memory_analysis(step, *args)
    text = said(report, "donate_argnums")
    donated = xform.memory_analysis(step, *args, donate_argnums=(0, 1))
    assert f"({human_bytes(donated.alias_bytes)}) have the same types as outputs" in text
    assert not any("donate_argnums" in text for text in donated.advice)


W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
CLOSED: dict[str, tuple[Any, Any]] = {
    "a function": (lambda x: x @ W, lambda x, w: x @ w),
    "a jit": (lambda x: jax.jit(lambda x: x @ jnp.asarray(W))(x) + 1, lambda x, w: x @ w + 1),
    "a loss": (xform.grad(lambda x: jnp.sum(jnp.sin(x @ W))),
               xform.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)))),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_arrays_that_a_function_closes_over(name: str) -> None:
    closed, given = CLOSED[name]
    report = xform.memory_analysis(closed, f32(64, 64))
    text = said(report, "closes over")
    assert text.startswith("16.0 KiB are constants of the program")
    assert xform.memory_analysis(given, f32(64, 64), f32(64, 64)).constant_bytes < 1000
    assert report.constant_bytes >= 2**14


def test_constants_of_the_compiler_are_not_the_functions() -> None:
    """The compiler adds constants of its own; the function closes over nothing."""
    report = xform.memory_analysis(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32))
    assert not any("closes over" in text for text in report.advice)


def test_copies_in_another_dtype() -> None:
    """A product of float32 reads the copy, so it is in memory."""
    half = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    squared = lambda x: x @ x
    report = xform.memory_analysis(lambda x: squared(x.astype(jnp.float32)), half)
    (row,) = [row for row in report.peak if row.operation == "convert_element_type"]
    assert said(report, "copies in another dtype").startswith(human_bytes(row.bytes))
