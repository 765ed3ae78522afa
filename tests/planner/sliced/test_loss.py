"""A loss in slices: value and gradient in one loop, without a second product."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform._jax import jaxprs_of
from xform.planner.sliced.loss import loss_position, run_loss_in_slices
from xform.program.fingerprint import fingerprint
from xform.program.ir import Program, evaluate, trace
from xform.slices.loop import run_in_slices
from xform.slices.opened import opened
from xform.slices.region import Region, find_region
from xform.slices.rewrite import with_loop

ROWS, WIDTH, WORDS, SLICES = 256, 16, 2048, 16


def cross_entropy(h: Any, w: Any, y: Any) -> Any:
    logits = (h @ w).astype("float32")
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def data(dtype: Any = "float32") -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    h = jnp.asarray(random.normal(size=(ROWS, WIDTH)), dtype)
    w = jnp.asarray(random.normal(size=(WIDTH, WORDS)) / 4, dtype)
    return h, w, jnp.asarray(random.integers(0, WORDS, ROWS), "int32")


def region_of(f: Callable[..., Any], *args: Any, n: int = SLICES) -> Region:
    """Return the region around the largest value of a function, along its first axis."""
    leaves, tree = jax.tree.flatten(args)
    run = lambda *xs: jax.tree.leaves(f(*jax.tree.unflatten(tree, xs)))
    prog = opened(trace(run, *leaves))
    v: Any = max((y for e in prog.equations for y in e.outvars), key=lambda v: v.aval.size)
    region = find_region(prog, v, 0, n)
    assert region is not None
    return region


def in_slices(f: Callable[..., Any], *args: Any, run: Any = run_loss_in_slices) -> Any:
    """Return a function of one output with the region around its largest value in slices."""
    prog: Program = with_loop(region_of(f, *args), run)
    return lambda *xs: evaluate(prog, jax.tree.leaves(xs))[0]


def products(f: Callable[..., Any], *args: Any) -> int:
    """Return the number of matrix products of a function, loops counted once."""
    found: collections.Counter[str] = collections.Counter()

    def count(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += 1
            for inner in jaxprs_of(eqn):
                count(getattr(inner, "jaxpr", inner))

    count(jax.make_jaxpr(f)(*args).jaxpr)
    return found["dot_general"]


def temporary(f: Callable[..., Any], *args: Any) -> int:
    figures: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    return figures.temp_size_in_bytes


@pytest.mark.parametrize("lib", [jax, xform])
def test_a_gradient_has_three_products_and_little_memory(lib: Any) -> None:
    args = data()
    small, whole = (lib.value_and_grad(f, (0, 1)) for f in (
        in_slices(cross_entropy, *args), cross_entropy))  # fmt: skip
    assert products(small, *args) == 3
    assert temporary(whole, *args) > 2 * ROWS * WORDS * 4
    assert temporary(small, *args) < ROWS * WORDS * 4 / 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8),
        jax.jit(small)(*args), jax.jit(whole)(*args),
    )  # fmt: skip


def test_slices_without_the_rule_recompute_a_product() -> None:
    """So the test above can fail."""
    args = data()
    rematerialized = xform.grad(in_slices(cross_entropy, *args, run=run_in_slices), (0, 1))
    assert products(rematerialized, *args) == 4


@pytest.mark.parametrize("policy", [None, "save_everything", "save_nothing", "budget:1MiB"])
def test_under_policies(policy: Any) -> None:
    args = data()

    def loss(f: Any) -> Any:
        return lambda v, w, y: f(jnp.tanh(args[0] @ v), w, y)

    v = jnp.eye(WIDTH)
    small = in_slices(cross_entropy, *args)
    got = jax.jit(xform.grad(loss(small), (0, 1), policy=policy))(v, *args[1:])
    want = jax.grad(loss(cross_entropy), (0, 1))(v, *args[1:])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_gradients_of_some_inputs(argnums: Any) -> None:
    args = data()
    small = in_slices(cross_entropy, *args)
    for lib in (jax, xform):
        got = jax.jit(lib.grad(small, argnums))(*args)
        want = jax.grad(cross_entropy, argnums)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8), got, want)
    if argnums == 1:  # the gradient of the rows is not computed
        assert products(xform.grad(small, 1), *args) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_is_no_more_than_without_slices(dtype: str) -> None:
    args = data(dtype)
    small, whole = (xform.grad(f, (0, 1)) for f in (in_slices(cross_entropy, *args), cross_entropy))
    with jax.enable_x64(True):
        wide = [np.asarray(x, "float64" if x.dtype == args[0].dtype else x.dtype) for x in args]

        def exact(h: Any, w: Any, y: Any) -> Any:
            logits = h @ w
            picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

        want = [np.asarray(g) for g in jax.grad(exact, (0, 1))(*wide)]
    for a, b, c in zip(jax.jit(small)(*args), jax.jit(whole)(*args), want, strict=True):
        assert a.dtype == b.dtype
        error = lambda g, c=c: np.linalg.norm(np.asarray(g, "float64") - c) / np.linalg.norm(c)
        assert error(a) <= 1.5 * error(b)


def test_tangents_and_second_derivatives() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.softplus(x @ w) ** 2)

    w, x = jnp.eye(3, 64) / 3, data()[0][:, :3]
    small = in_slices(loss, w, x)
    for lib in (jax, xform):
        _, got = lib.jvp(small, (w, x), (w, x))
        np.testing.assert_allclose(got, jax.jvp(loss, (w, x), (w, x))[1], rtol=1e-4)
        product = lambda f, lib=lib: lib.jvp(lambda w: lib.grad(f)(w, x), (w,), (w,))[1]
        np.testing.assert_allclose(product(small), product(loss), rtol=1e-3, atol=1e-4)
        reverse = lambda f, lib=lib: lib.grad(lambda w: jnp.vdot(lib.grad(f)(w, x), w))(w)
        np.testing.assert_allclose(reverse(small), reverse(loss), rtol=1e-3, atol=1e-4)
    many = jnp.stack([w, 2 * w])
    for a, b in ((jax.grad(small), jax.grad(loss)), (small, loss)):
        got, want = (jax.vmap(f, (0, None))(many, x) for f in (a, b))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_count_beside_the_loss() -> None:
    def f(w: Any, x: Any, y: Any) -> Any:
        logits = x @ w
        picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
        right = jnp.sum(jnp.argmax(logits, -1) == y)
        mask = (y > 3).astype("float32")
        loss = jnp.sum(mask * (jax.nn.logsumexp(logits, -1) - picked))
        return loss / mask.sum(), right

    h, w, y = data()
    region = region_of(f, w, h, y)
    assert loss_position(region) is not None
    prog = with_loop(region, run_loss_in_slices)
    small = lambda *xs: tuple(evaluate(prog, xs))
    got = jax.jit(xform.value_and_grad(small, has_aux=True))(w, h, y)
    want = jax.value_and_grad(f, has_aux=True)(w, h, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), got, want)


def two_losses(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return jnp.sin(jnp.mean(h)) * jnp.mean(h**2)


def row_losses(w: Any, x: Any) -> Any:
    return jnp.sin(jnp.sum(jnp.tanh(x @ w), 1))


def vector(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w), 0)


def histogram(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return jnp.sum(h) + jnp.zeros(4).at[jnp.argmax(h, 1) % 4].add(1.0)[0]


@pytest.mark.parametrize("f", [two_losses, row_losses, vector, histogram])
def test_other_regions_are_recomputed(f: Any) -> None:
    w, x = jnp.eye(8, 64) / 3, data()[0][:, :8]
    assert loss_position(region_of(f, w, x)) is None
    small = in_slices(f, w, x)
    total = lambda f: lambda *xs: jnp.sum(f(*xs) ** 2)
    for lib in (jax, xform):
        got, want = (jax.jit(lib.grad(total(g), (0, 1)))(w, x) for g in (small, f))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_sliced_uses_it() -> None:
    args = data()
    small = xform.sliced(cross_entropy, "1 MiB")
    assert products(xform.grad(small, (0, 1)), *args) == 3
    both = xform.sliced(xform.value_and_grad(cross_entropy, (0, 1)), "1 MiB")
    assert products(both, *args) == 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8),
        both(*args), jax.value_and_grad(cross_entropy, (0, 1))(*args),
    )  # fmt: skip


def test_two_traces_have_one_text() -> None:
    """Plans are found again by the text of their program."""

    def text(n: int) -> str:
        return fingerprint(with_loop(region_of(cross_entropy, *data(), n=n), run_loss_in_slices))

    assert text(4) == text(4)
    assert text(4) != text(8)
