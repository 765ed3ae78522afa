"""The part of a peak that can run in slices: a program in slices takes that much less."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from tests.memory.test_advice_facts import f32, said
from xform.memory import sliceable
from xform.memory.sliceable import largest_sliceable
from xform.program.ir import evaluate, trace
from xform.slices.candidates import numbers_of_slices
from xform.slices.loop import run_in_slices
from xform.slices.region import find_region
from xform.slices.rewrite import with_loop
from xform.terminal.text import human_bytes

CONVOLVED = ("NHWC", "HWIO", "NHWC")


def perceptron(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def cross_entropy(w: Any, h: Any, y: Any) -> Any:
    logits = h @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def attention(w: Any, x: Any) -> Any:
    q, k, v = jnp.split(x @ w, 3, -1)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1)
    return jnp.mean(jnp.einsum("bts,bsd->btd", weights, v) ** 2)


def convolutions(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=CONVOLVED))
    return jnp.mean(x**2)


def kernel(x: Any, y: Any, w: Any) -> Any:
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ w


LABELS = jax.ShapeDtypeStruct((1024,), "int32")
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "perceptron": (xform.grad(perceptron), ([f32(256, 256)] * 4, f32(2048, 256))),
    "cross-entropy": (xform.grad(cross_entropy), (f32(64, 8192), f32(1024, 64), LABELS)),
    "attention": (xform.grad(attention), (f32(64, 192), f32(16, 256, 64))),
    "convolutions": (xform.grad(convolutions), ([f32(3, 3, 16, 16)] * 3, f32(16, 32, 32, 16))),
    "kernel": (kernel, (f32(2048, 8), f32(1024, 8), f32(1024))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_slices_takes_less_by_these_bytes(name: str) -> None:
    """With the most slices, one slice, its temporaries and sums are left: at most a fifth."""
    f, args = PROGRAMS[name]
    report = xform.memory_analysis(f, *args)
    found = largest_sliceable(report)
    assert found is not None
    assert found.bytes > 0.5 * report.total_bytes
    region, most = found.region, numbers_of_slices(found.region.size)[-1]
    region = find_region(region.program, region.start, region.axis, most)
    assert region is not None
    prog = with_loop(region, run_in_slices)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in prog.in_avals]
    sliced = xform.memory_analysis(lambda *xs: evaluate(prog, xs), *types)
    assert report.total_bytes - sliced.total_bytes >= 0.8 * found.bytes
    text = said(report, "can run in slices")
    assert text.startswith(f"{human_bytes(found.bytes)} are in a part of ")
    assert f"at {__file__}" in text


def test_no_part_that_mixes_every_axis() -> None:
    f = lambda x: jnp.sum(jnp.sort(jnp.sort(jnp.sort(jnp.sin(x), 0), 1), 0))
    report = xform.memory_analysis(f, f32(1024, 1024))
    found = largest_sliceable(report)
    assert found is None or found.bytes < 0.1 * report.total_bytes
    assert not any("slices" in text for text in report.advice)


def test_regions_around_the_first_four_of_the_largest_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(sliceable, "find_region", lambda prog, v, axis, n: tried.append((v, axis)))

    def chain(x: Any) -> Any:
        for _ in range(6):
            x = jnp.sin(x)
        return [jnp.sum(x)]

    prog = trace(chain, f32(64, 32))
    row = SimpleNamespace(category="temporary", output=False, shape=(64, 32), bytes=64 * 32 * 4)
    assert largest_sliceable(SimpleNamespace(program=prog, devices=1, peak=[row])) is None
    values = [eqn.outvars[0] for eqn in prog.equations[:4]]
    assert tried == [(v, axis) for v in values for axis in (0, 1)]
