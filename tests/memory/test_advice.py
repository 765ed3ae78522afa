"""The advice of a report: changes come first, then the largest buffer."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from tests.memory.test_changes import DENSE, dense, descent, stacked
from xform.terminal.text import human_bytes


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def energy(c: Any) -> Any:
    return jnp.sum(jnp.sqrt(((c[:, None] - c[None]) ** 2).sum(-1) + 1e-6))


def kernel(scale: Any, x: Any, y: Any) -> Any:
    return jnp.sum((jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / scale) @ y) ** 2)


def patches(w: Any, x: Any) -> Any:
    p = lax.conv_general_dilated_patches(x, (7, 7), (1, 1), "SAME")
    return jnp.sum(jnp.einsum("bchw,cd->bdhw", p, w) ** 2)


def pull(c: Any, strength: Any) -> Any:
    return strength * energy(c)


def recurrent(w: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(x.shape[1:]), x)[1] ** 2)


# The comment beside each program is its earlier advice.
ONE_BUFFER: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pairwise distances": (xform.grad(energy), (f32(200, 3),)),  # nothing
    "a kernel matrix": (xform.grad(kernel), (f32(), f32(500, 8), f32(500))),  # "250 for 500"
    "overlapping patches": (xform.grad(patches), (f32(147, 8), f32(4, 3, 64, 64))),
    "stacked weights": (stacked, (f32(16, 128, 128), f32(64, 128))),  # "8 for 16"
    "stacked layers": (xform.grad(stacked), (f32(12, 64, 64), f32(32, 64))),  # "6 for 12"
    "one product": (lambda w, x: x @ w, (f32(64, 64), f32(512, 64))),
}


@pytest.mark.parametrize("name", ONE_BUFFER)
def test_the_largest_buffer_is_always_named(name: str) -> None:
    f, args = ONE_BUFFER[name]
    report = xform.memory_analysis(f, *args)
    row = max(report.peak, key=lambda row: row.bytes)
    (text,) = (text for text in report.advice if text.startswith("the largest buffer"))
    assert f"takes {human_bytes(row.bytes)} of the {human_bytes(report.total_bytes)}: " in text
    assert f"{row.dtype}[{','.join(map(str, row.shape))}], {row.category}" in text
    assert row.where in text
    assert re.search(r"test_(advice|changes)\.py:\d+", text)


@pytest.mark.parametrize(
    ("f", "args", "wrong"),
    [
        (xform.grad(stacked), (f32(12, 64, 64), f32(32, 64)), "for 12"),
        (stacked, (f32(16, 128, 128), f32(64, 128)), "for 16"),
        (xform.grad(energy), (f32(60, 3),), "for 60"),
        (xform.grad(pull, 1), (f32(60, 3), f32()), "for 60"),
        (xform.grad(recurrent), (f32(64, 64), f32(128, 8, 64)), "for 128"),
        (xform.grad(kernel), (f32(), f32(500, 8), f32(500)), "for 500"),
    ],
)
def test_no_batch_without_a_proof(f: Any, args: Any, wrong: str) -> None:
    said = " ".join(xform.memory_analysis(f, *args).advice)
    assert wrong not in said
    assert "largest buffer" in said


def advised(f: Any, *args: Any, over: int | None = None, **options: Any) -> list[str]:
    """Return the advice for a device whose memory the program exceeds by `over` bytes."""
    free = xform.memory_analysis(f, *args, **options)
    capacity = None if over is None else free.device_bytes - over
    return xform.memory_analysis(f, *args, capacity=capacity, **options).advice


STEP = descent(dense), DENSE, DENSE, f32(512, 64), f32(512, 10)


def test_changes_come_first_then_the_largest_buffer_then_facts() -> None:
    half, largest, *facts = advised(*STEP)
    assert half.startswith("half the batch, 256 instead of 512")
    assert largest.startswith("the largest buffer")
    assert any("saved for the backward pass" in text for text in facts)
    sizes = [float(m[1]) * 1024 ** ("KM".index(m[2]) + 1) for text in facts
             if (m := re.search(r"([\d.]+) ([KM])iB", text))]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True)


def test_a_change_that_is_enough_says_so() -> None:
    assert not any("may be enough" in text for text in advised(*STEP))
    half, *_ = advised(*STEP, over=1000)
    assert half.endswith("This may be enough: the program is over by 1000 B")
    much = advised(*STEP, over=3 * 2**20)
    assert not any("may be enough" in text for text in much)
    assert any("several devices can share them" in text for text in much)


def test_a_refused_program_has_no_advice() -> None:
    report = xform.memory_analysis(lambda: 1.0)
    assert all(isinstance(text, str) for text in report.advice)
