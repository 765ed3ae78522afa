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
        assert "that xform.pareto lists for the loss" in text
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


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def advised(f: Any, *args: Any, over: int | None = None, **options: Any) -> list[str]:
    """The advice for a device that the program is over by so many bytes."""
    free = xform.memory_analysis(f, *args, **options)
    capacity = None if over is None else free.compilation.device_bytes - over
    return xform.memory_analysis(f, *args, capacity=capacity, **options).advice


def train(w: Any, m: Any, x: Any) -> Any:
    value, g = xform.value_and_grad(loss)(w, x)
    return value, w - g, m + g


STATE = f32(256, 256), f32(256, 256)


def test_the_cheapest_step_that_is_enough_comes_first() -> None:
    args = *STATE, f32(512, 256)
    free = advised(train, *args)
    assert not any("may be enough" in text for text in free)
    spared = [re.search(r"([\d.]+) MiB (?:less|wait)", text) for text in free]
    assert [float(m[1]) for m in spared if m] == sorted(float(m[1]) for m in spared if m)[::-1]
    assert "wait for the backward pass" in free[1]  # only a batch in slices spares more
    over = advised(train, *args, over=1000)
    assert over[0].startswith("donate w, m")
    assert "that may be enough, it is over by 1000 B" in over[0]
    much = advised(train, *args, over=600_000)  # more than donation spares
    assert next(text for text in much if "may be enough" in text).startswith("half")
    assert any(text.startswith("donate") for text in much)
    nothing = advised(train, *args, over=10**9 // 300)
    assert 'policy="auto"' in " ".join(nothing)


def test_half_a_batch_spares_what_it_says() -> None:
    sizes = [xform.memory_analysis(train, *STATE, f32(n, 256)).total_bytes for n in (1024, 512)]
    (text,) = (text for text in advised(train, *STATE, f32(1024, 256)) if "half the batch" in text)
    said = float(re.search(r"takes ([\d.]+) MiB less", text)[1]) * 2**20
    assert abs(said - (sizes[0] - sizes[1])) < 0.1 * said
    assert "512 for 1024" in text


def test_a_batch_in_slices_spares_what_it_says() -> None:
    def summed(w: Any, m: Any, x: Any) -> Any:
        def add(total: Any, few: Any) -> Any:
            value, g = xform.value_and_grad(loss)(w, few)
            return (total[0] + value, total[1] + g), None

        zero = jnp.zeros(()), jnp.zeros_like(w)
        (value, g), _ = jax.lax.scan(add, zero, x.reshape(4, -1, x.shape[1]))
        return value / 4, w - g / 4, m + g / 4

    args = *STATE, f32(1024, 256)
    whole, parts = (xform.memory_analysis(f, *args) for f in (train, summed))
    (text,) = (text for text in whole.advice if "in 4 slices" in text)
    said = float(re.search(r"takes ([\d.]+) MiB less", text)[1]) * 2**20
    assert abs(said - (whole.total_bytes - parts.total_bytes)) < 0.15 * said
    assert "256 of 1024 at a time" in text
    inference = xform.memory_analysis(loss, f32(256, 256), args[-1])
    assert not any("slices" in text for text in inference.advice)


def test_a_batch_is_none_of_what_is_differentiated() -> None:
    """Else half of twelve layers would be half a batch."""

    def deep(ws: Any, x: Any) -> Any:
        step = lambda h, w: (jnp.tanh(h @ w), None)
        return jnp.sum(jax.lax.scan(step, x, ws)[0])

    said = advised(xform.grad(deep), f32(12, 64, 64), f32(512, 64))
    assert any("256 for 512" in text for text in said)
    assert not any("6 for 12" in text for text in said)


def test_wide_layers_are_no_classes() -> None:
    def wide(ws: Any, x: Any) -> Any:
        for up, down in ws:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.sum(x**2)

    layers = [(f32(128, 512), f32(512, 128))] * 4
    assert not any("classes" in text for text in advised(xform.grad(wide), layers, f32(256, 128)))


def test_donation_spares_what_it_says() -> None:
    args = *STATE, f32(64, 256)
    (text,) = (text for text in advised(train, *args) if text.startswith("donate"))
    said = float(re.search(r"up to ([\d.]+) KiB less", text)[1]) * 2**10
    sizes = [xform.memory_analysis(train, *args, donate_argnums=d).total_bytes
             for d in ((), (0, 1))]  # fmt: skip
    assert 0.5 * said < sizes[0] - sizes[1] <= said  # the compiler keeps some of it for later


def test_sharding_spares_what_it_says() -> None:
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    run = lambda w, x: jnp.sin(x @ w)
    how: dict[str, Any] = {"target": "cpu:2", "mesh": {"data": 2}}
    whole = xform.memory_analysis(run, f32(64, 64), f32(32, 64), in_specs=specs, **how)
    (text,) = (text for text in whole.advice if "whole on every device" in text)
    assert text.endswith("w are whole on every device: sharded over 2 they take 8.0 KiB less")
    split = xform.memory_analysis(run, f32(64, 64), f32(32, 64), **how,
                                  in_specs=(specs[1], specs[1]))  # fmt: skip
    assert whole.argument_bytes - split.argument_bytes == 8 * 2**10


def test_one_device_is_told_of_more() -> None:
    (text,) = (text for text in advised(train, *STATE, f32(8, 256), over=300_000)
               if "devices" in text)  # fmt: skip
    assert "sharded over" in text
    assert "may be enough" in text


def test_activations_in_float32() -> None:
    args = f32(64, 64), f32(512, 64)
    report = xform.memory_analysis(xform.grad(loss), *args)
    waits = sum(r.bytes for r in report.peak if r.category == "activation")
    (text,) = (text for text in report.advice if "are float32" in text)
    assert f"in bfloat16 they take {waits // 2 / 2**10:.1f} KiB less" in text


def test_a_loss_over_a_vocabulary_is_taken_in_parts() -> None:
    def logits(kernel: Any, hidden: Any) -> Any:
        return jnp.sum(jax.nn.logsumexp(jnp.tanh(hidden @ kernel), -1))

    def in_parts(kernel: Any, hidden: Any) -> Any:
        some = xform.remat(logits)
        step = lambda total, few: (total + some(kernel, few), None)
        return jax.lax.scan(step, 0.0, hidden.reshape(8, -1, 32))[0]

    kernel, hidden = f32(32, 2048), f32(1024, 32)
    whole, parts = (
        xform.memory_analysis(xform.value_and_grad(f), kernel, hidden) for f in (logits, in_parts)
    )
    (text,) = (text for text in whole.advice if "classes" in text)
    size = sum(r.bytes for r in whole.peak if r.shape == (1024, 2048))
    assert size >= 8 * 2**20
    assert text.startswith(f"{size // 2**20}.0 MiB have a number for each of 2048 classes (logits)")
    assert "test_advice.py" in text
    # What it says is spared is.
    assert whole.temp_bytes - parts.temp_bytes >= 0.8 * (size - size // 8)
    assert not any("classes" in text for text in advised(loss, W, X))
