"""Make each change whose savings a report promises, and compare with the compiler's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import xform
from xform.memory.changes import changes


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def stacked(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])


def dense(ws: Any, x: Any, y: Any) -> Any:
    for w in ws[:-1]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean((x @ ws[-1] - y) ** 2)


def pictures(ws: Any, x: Any, y: Any) -> Any:
    for w in ws["kernels"]:
        dims = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x)
    logits = jax.nn.log_softmax(x.mean((1, 2)) @ ws["out"])
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))


def scaled(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def language(ws: Any, tokens: Any) -> Any:
    x = ws["embedding"][tokens[:, :-1]]
    batch, length, _ = x.shape
    for layer in ws["layers"]:
        q, k, v = jnp.split((scaled(x) @ layer["qkv"]).reshape(batch, length, 4, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        h = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(batch, length, -1)
        x = x + h @ layer["out"]
        x = x + jax.nn.gelu(scaled(x) @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(scaled(x) @ ws["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def series(w: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(x.shape[1:]), x)[1] ** 2)


def descent(loss: Any) -> Any:
    def step(ws: Any, momentum: Any, *batch: Any) -> Any:
        value, g = xform.value_and_grad(loss)(ws, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, g)
        return value, jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum

    return step


LAYER = {"qkv": f32(64, 192), "out": f32(64, 64), "up": f32(64, 256), "down": f32(256, 64)}
LANGUAGE = {"embedding": f32(512, 64), "head": f32(64, 512), "layers": [LAYER] * 2}
DENSE = [f32(64, 256), f32(256, 256), f32(256, 10)]
PICTURES = {"kernels": [f32(3, 3, 3, 8), f32(3, 3, 8, 8)], "out": f32(8, 10)}
# A function, its arguments, and the batch axis of its last ones.
Program = tuple[Callable[..., Any], tuple[Any, ...], int, int]
PROGRAMS: dict[str, Program] = {
    "stacked layers": (xform.grad(stacked), (f32(12, 64, 64), f32(32, 64)), 1, 0),
    "time steps": (xform.grad(series), (f32(64, 64), f32(128, 8, 64)), 1, 1),
    "dense": (xform.value_and_grad(dense), (DENSE, f32(512, 64), f32(512, 10)), 1, 0),
    "dense, a step": (descent(dense), (DENSE, DENSE, f32(512, 64), f32(512, 10)), 2, 0),
    "pictures": (xform.grad(pictures), (PICTURES, f32(16, 16, 16, 3), i32(16)), 1, 0),
    "language": (xform.grad(language), (LANGUAGE, i32(8, 65)), 1, 0),
    "language, a step": (descent(language), (LANGUAGE, LANGUAGE, i32(8, 65)), 2, 0),
}


def halved(args: tuple[Any, ...], first: int, axis: int) -> tuple[Any, ...]:
    def half(x: Any) -> Any:
        sizes = [n // 2 if i == axis else n for i, n in enumerate(x.shape)]
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    return *args[:first], *jax.tree.map(half, args[first:])


STEPS = [name for name, (_, _, first, _) in PROGRAMS.items() if first == 2]


@pytest.mark.parametrize(
    ("name", "donated"), [*((name, False) for name in PROGRAMS), *((name, True) for name in STEPS)]
)
def test_half_the_batch_saves_the_promised_bytes(name: str, donated: bool) -> None:
    """Without donation the new state has memory of its own, which temporary values can share."""
    f, args, first, axis = PROGRAMS[name]
    options: dict[str, Any] = {"donate_argnums": tuple(range(first))} if donated else {}
    report = xform.memory_analysis(f, *args, **options)
    (change,) = (c for c in changes(report) if c.text.startswith("half the batch"))
    n = jax.tree.leaves(args[first:])[0].shape[axis]
    assert change.text.startswith(f"half the batch, {n // 2} instead of {n}, ")
    half = xform.memory_analysis(f, *halved(args, first, axis), **options)
    less = report.total_bytes - half.total_bytes
    assert change.bytes <= less * 1.02
    assert change.bytes >= less * (0.8 if donated or first == 1 else 0.7)


SHARDED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a product": (lambda w, x: jnp.sin(x @ w), (f32(64, 64), f32(32, 64))),
    "a derivative": (xform.grad(stacked), (f32(4, 32, 32), f32(32, 32))),
}


@pytest.mark.parametrize("name", ["a product", "a derivative"])
@pytest.mark.parametrize("devices", [2, 4])
def test_sharding_an_argument_saves_the_promised_bytes(name: str, devices: int) -> None:
    f, args = SHARDED[name]
    on, off = PartitionSpec("data"), PartitionSpec()
    how: dict[str, Any] = {"target": f"cpu:{devices}", "mesh": {"data": devices}}
    whole = xform.memory_analysis(f, *args, in_specs=(off, on), **how)
    (change,) = (c for c in changes(whole) if "holds a full copy" in c.text)
    assert re.search(rf"over {devices} devices they take [\d.]+ .iB less", change.text)
    split = xform.memory_analysis(f, *args, in_specs=(on, on), **how)
    assert whole.argument_bytes - split.argument_bytes == change.bytes


@pytest.mark.parametrize("f", [stacked, lambda ws, x: jnp.sin(x @ ws[0])])
def test_no_advice_on_the_batch_without_a_proven_batch_axis(f: Any) -> None:
    report = xform.memory_analysis(f, f32(16, 128, 128), f32(64, 128))
    assert not report.batches
    assert not any("batch" in text for text in report.advice)
