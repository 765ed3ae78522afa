"""An axis is called a batch only if the program proves it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform.memory.batch_axes import batch_axes
from xform.program.ir import program


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def found(f: Any, *args: Any) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Return sizes and places of the batches of a function."""
    return [batch[:2] for batch in batch_axes(program(jax.make_jaxpr(f)(*args)))]


def stacked(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])


def dense(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


def through(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss of a matrix and rows that applies `f` to hidden rows."""
    return lambda w, x: jnp.mean(f(jnp.tanh(x @ w)) ** 2)


def attention(h: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h), -1)
    return jnp.einsum("bts,bsd->btd", scores, h)


def classified(w: Any, x: Any, y: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))


def pooled(w: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    return jnp.mean(
        lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2
    )


def recurrent(w: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(x.shape[1:]), x)[1] ** 2)


def until(w: Any, x: Any) -> Any:
    return jnp.sum(lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ w), x))


def chosen(w: Any, x: Any) -> Any:
    return jnp.sum(lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x @ w))


def microbatches(w: Any, x: Any) -> Any:
    add = lambda total, few: (total + jnp.mean(jnp.sin(few @ w)), None)
    return lax.scan(add, 0.0, x)[0]


def energy(c: Any) -> Any:
    return jnp.sum(jnp.sqrt(((c[:, None] - c[None]) ** 2).sum(-1) + 1e-6))


def kernel(s: Any, x: Any, y: Any) -> Any:
    return jnp.sum((jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / s) @ y) ** 2)


def adam(loss: Any) -> Any:
    def step(w: Any, nu: Any, *batch: Any) -> Any:
        value, g = xform.value_and_grad(loss)(w, *batch)
        nu = jax.tree.map(lambda n, g: 0.9 * n + g * g, nu, g)
        return value, jax.tree.map(lambda w, n, g: w - g / jnp.sqrt(n), w, nu, g), nu

    return step


W, X = f32(6, 6), f32(8, 6)
TWO = {"a": f32(6, 5), "b": f32(5, 3)}
grad = xform.grad
CASES: dict[str, tuple[Any, tuple[Any, ...], list[Any]]] = {
    # Programs with a batch axis.
    "stacked layers": (grad(stacked), (f32(12, 6, 6), X), [(8, ((1, 0),))]),
    "two inputs": (grad(dense), (TWO, X, f32(8, 3)), [(8, ((2, 0), (3, 0)))]),
    "by JAX": (jax.grad(dense), (TWO, X, f32(8, 3)), [(8, ((2, 0), (3, 0)))]),
    "adam": (adam(dense), (TWO, TWO, X, f32(8, 3)), [(8, ((4, 0), (5, 0)))]),
    "classes": (grad(classified), (f32(6, 10), X, i32(8)), [(8, ((1, 0), (2, 0)))]),
    "attention": (grad(through(attention)), (W, f32(4, 8, 6)), [(4, ((1, 0),))]),
    "merged and split": (
        grad(through(lambda h: jnp.sin(h.reshape(-1, 6)).reshape(4, 8, 6).sum(1))),
        (W, f32(4, 8, 6)), [(4, ((1, 0),))]),
    "pictures": (grad(pooled), (f32(3, 3, 2, 5), f32(4, 8, 8, 2)), [(4, ((1, 0),))]),
    "recurrent": (grad(recurrent), (W, f32(16, 8, 6)), [(8, ((1, 1),))]),
    "a loop": (grad(until), (W, X), [(8, ((1, 0),))]),
    "a branch": (grad(chosen), (W, X), [(8, ((1, 0),))]),
    "microbatches": (grad(microbatches), (W, f32(4, 8, 6)), [(8, ((1, 1),))]),
    "remat": (grad(through(xform.remat(jnp.sin))), (W, X), [(8, ((1, 0),))]),
    "an average, and a penalty": (
        grad(lambda w, x: jnp.mean(jnp.sin(x @ w)) + jnp.sum(w**2)), (W, X), [(8, ((1, 0),))]),
    "vmap": (grad(lambda w, x: jnp.sum(jax.vmap(lambda r: jnp.sin(r @ w))(x))), (W, X),
             [(8, ((1, 0),))]),
    "looked up": (grad(lambda e, t: jnp.sum(jnp.sin(e[t]) ** 2)), (f32(9, 6), i32(8)),
                  [(8, ((1, 0),))]),
    "a mean of no data beside it": (
        grad(lambda w, x: jnp.sum(jnp.sin(x @ w) * w.mean())), (W, X), [(8, ((1, 0),))]),
    # Programs without a batch axis.
    "no derivative": (stacked, (f32(16, 6, 6), X), []),
    "particles": (grad(energy), (f32(60, 3),), []),
    "particles, by a scale": (grad(lambda p, c: p * energy(c)), (f32(), f32(60, 3)), []),
    "a kernel matrix": (grad(kernel), (f32(), f32(9, 2), f32(9)), []),
    "normalized over it": (grad(through(lambda h: h - h.mean(0))), (W, X), []),
    "divided by its norm": (grad(through(lambda h: h / jnp.linalg.norm(h))), (W, X), []),
    "its largest": (grad(through(lambda h: h.max(0))), (W, X), []),
    "sorted": (grad(through(lambda h: jnp.sort(h, 0))), (W, X), []),
    "added up along it": (grad(through(lambda h: jnp.cumsum(h, 0))), (W, X), []),
    "shifted along it": (grad(through(lambda h: h[1:] - h[:-1])), (W, X), []),
    "rolled": (grad(through(lambda h: h + jnp.roll(h, 1, 0))), (W, X), []),
    "turned round": (grad(through(lambda h: h + h[::-1])), (W, X), []),
    "times itself": (grad(through(lambda h: h @ h.T)), (W, X), []),
    "a root of the sum": (grad(lambda w, x: jnp.sqrt(jnp.sum(jnp.sin(x @ w)))), (W, X), []),
    "a product of sums": (
        grad(lambda w, x: jnp.sum(x @ w) * jnp.sum(jnp.sin(x @ w))), (W, X), []),
    "a share of the sum": (grad(through(lambda h: jax.nn.softmax(h, 0))), (W, X), []),
    "a branch on the sum": (
        grad(lambda w, x: lax.cond(jnp.sum(x) > 0, jnp.sum, lambda h: 2 * jnp.sum(h), x @ w)),
        (W, X), []),
    "its own derivative": (grad(lambda x: jnp.sum(jnp.sin(x))), (X,), []),
    "an ensemble": (
        grad(lambda ws, x: jnp.sum(jnp.sin(jnp.einsum("ebi,eij->ebj", x, ws)))),
        (f32(7, 6, 5), f32(7, 8, 6)), [(8, ((1, 1),))]),
    "features of a frozen layer": (
        grad(lambda v, w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v))), (f32(5, 3), f32(6, 5), X),
        [(8, ((2, 0),))]),
    "unknown to it": (
        grad(through(lambda h: jax.pure_callback(np.sin, f32(8, 6), lax.stop_gradient(h)) * h)),
        (W, X), []),
    "cut apart unevenly": (grad(through(lambda h: h.reshape(6, 8))), (W, X), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_batches(name: str) -> None:
    f, args, expected = CASES[name]
    assert found(f, *args) == expected


def values(key: int, args: Any) -> Any:
    rng = np.random.default_rng(key)
    draw = lambda x: (rng.integers(0, 6, x.shape) if x.dtype == jnp.int32
                      else rng.uniform(0.2, 1, x.shape)).astype(x.dtype)  # fmt: skip
    return jax.tree.map(draw, args)


def exchanged(f: Any, args: Any, places: Any) -> tuple[Any, Any]:
    """Return the sum of `f` of two batches, before and after exchanging their first halves."""
    one, other = (jax.tree.leaves(values(key, args)) for key in (0, 1))
    both, parts = [*zip(one, other, strict=True)], jax.tree.structure(args)
    data = {k for k, _ in places}
    batches = [[a for a, _ in both], [b if k in data else a for k, (a, b) in enumerate(both)]]
    mixed = [[*batch] for batch in batches]
    for k, axis in places:
        halves = [np.split(batch[k], 2, axis) for batch in batches]
        mixed[0][k] = np.concatenate([halves[0][0], halves[1][1]], axis)
        mixed[1][k] = np.concatenate([halves[1][0], halves[0][1]], axis)
    total = lambda pair: jax.tree.map(
        np.add, *(f(*jax.tree.unflatten(parts, batch)) for batch in pair)
    )
    return total(batches), total(mixed)


@pytest.mark.parametrize("name", [n for n, (_, _, b) in CASES.items() if b and n != "adam"])
def test_the_parts_of_a_batch_are_independent(name: str) -> None:
    """The sum of independent parts does not depend on the grouping of the parts."""
    f, args, expected = CASES[name]
    for _, places in expected:
        plain, mixed = exchanged(f, args, places)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
                     plain, mixed)  # fmt: skip


STEPS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda h, w: jnp.tanh(h @ w),
    lambda h, w: h * h,
    lambda h, w: h + w[0],
    lambda h, w: h - h.mean(0),
    lambda h, w: h - h.mean(1, keepdims=True),
    lambda h, w: h * jnp.sum(w),
    lambda h, w: h + jnp.sum(h),
    lambda h, w: jax.nn.softmax(h, 1),
    lambda h, w: jnp.cumsum(h, 1),
    lambda h, w: jnp.sort(h, 1),
    lambda h, w: h[:, ::-1],
    lambda h, w: jnp.roll(h, 1, 0),
    lambda h, w: h.reshape(2, 3, 6).sum(0)[None].repeat(2, 0).reshape(6, 6),
    lambda h, w: jnp.sin(h.reshape(36)).reshape(6, 6),
    lambda h, w: jnp.sin(h.T).T,
    lambda h, w: h.T,
    lambda h, w: jnp.where(h > w, h, 0.1),
    lambda h, w: lax.scan(lambda c, r: (c * 0.5 + r, c), h[0], h)[1],
    lambda h, w: lax.scan(lambda c, r: (jnp.sin(c @ r), None), h, w[None])[0],
    lambda h, w: lax.dynamic_update_slice(h, w[:1], (2, 0)),
    lambda h, w: lax.map(jnp.sin, h),
    lambda h, w: jnp.linalg.solve(w + 9 * jnp.eye(6), h),
    lambda h, w: h[jnp.array([0, 2, 4, 1, 3, 5])],
)
ENDS: tuple[Callable[[Any], Any], ...] = (
    jnp.sum, jnp.mean, lambda h: jnp.sqrt(jnp.sum(h * h)), lambda h: jnp.sum(h[:3]),
    lambda h: jnp.sum(jnp.sum(h, 0) ** 2), lambda h: jnp.max(h), lambda h: jnp.sum(h @ h.T),
)  # fmt: skip


def test_random_programs_prove_nothing_wrong() -> None:
    """All sizes are 6, so no axis can be recognized by its length."""
    rng, proven = random.Random(0), 0
    for _ in range(120):
        steps = [*rng.choices(STEPS, k=rng.randint(1, 4))]
        end = rng.choice(ENDS[:2] if rng.random() < 0.7 else ENDS)

        def loss(w: Any, x: Any, steps: Any = steps, end: Any = end) -> Any:
            for step in steps:
                x = step(x, w)
            return end(x)

        f, args = xform.grad(loss), (f32(6, 6), f32(6, 6))
        for _, places in found(f, *args):
            proven += 1
            plain, mixed = exchanged(f, args, places)
            np.testing.assert_allclose(plain, mixed, rtol=1e-3, atol=1e-4)
    assert proven >= 15
