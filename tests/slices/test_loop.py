"""A region in a loop gives the values of the whole: stacked bit for bit, sums up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.fuzz.generate import inputs, sample
from tests.fuzz.source import function
from xform.interpret.joint import analyze
from xform.program.fingerprint import fingerprint
from xform.program.ir import Program, evaluate, trace
from xform.slices.loop import run_in_slices
from xform.slices.opened import opened
from xform.slices.region import Region, find_region
from xform.slices.rewrite import with_loop


def regions(prog: Program, n: int) -> Iterator[Region]:
    """Yield all regions of a program."""
    seen = set[Any]()
    for v in (y for e in prog.equations for y in e.outvars):
        for axis in range(len(getattr(v.aval, "shape", ()))):
            region = find_region(prog, v, axis, n)
            if region and (key := tuple(region.members.items())) not in seen:
                seen.add(key)
                yield region


def flat_program(f: Callable[..., Any], args: Any) -> tuple[Program, list[Any]]:
    leaves, tree = jax.tree.flatten(args)
    run = lambda *xs: jax.tree.leaves(f(*jax.tree.unflatten(tree, xs)))
    return opened(trace(run, *leaves)), leaves


def largest(f: Callable[..., Any], *args: Any, axis: int = 0, n: int = 4) -> tuple[Any, ...]:
    """Return the region around the largest value, the function in slices, and flat arguments."""
    prog, leaves = flat_program(f, args)
    value = max((y for e in prog.equations for y in e.outvars), key=lambda v: v.aval.size)
    region = find_region(prog, value, axis, n)
    assert region is not None
    new = with_loop(region, run_in_slices)
    return region, lambda *xs: evaluate(new, xs), leaves


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_rows_are_equal_up_to_the_rounding_of_kernels() -> None:
    """XLA may choose another kernel for fewer rows: JAX 0.12 does so for this product."""
    f = lambda x, w: jnp.tanh(jax.nn.softmax(x) @ w)
    region, g, xs = largest(f, normal(16, 8), normal(8, 32, seed=1))
    assert {"dot_general", "exp", "tanh"} <= {e.primitive.name for e, _ in region.equations}
    np.testing.assert_allclose(jax.jit(g)(*xs)[0], jax.jit(f)(*xs), rtol=1e-6, atol=1e-7)


def test_a_while_loop_with_constants_runs_in_slices() -> None:
    def f(x: Any, w: Any, n: Any) -> Any:
        grown = lambda s: (s[0] + 1, jnp.sin(s[1] * w))
        return lax.while_loop(lambda s: s[0] < n, grown, (jnp.int32(0), x))[1]

    region, g, xs = largest(f, normal(16, 8), normal(8, seed=1), jnp.int32(3))
    assert "while" in {e.primitive.name for e, _ in region.equations}
    np.testing.assert_allclose(jax.jit(g)(*xs)[0], jax.jit(f)(*xs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_along_any_axis_are_stacked_back_along_that_axis(axis: int) -> None:
    f = lambda x: jnp.exp(jnp.sin(x))
    _, g, xs = largest(f, normal(4, 8, 12), axis=axis)
    np.testing.assert_array_equal(jax.jit(g)(*xs)[0], jax.jit(f)(*xs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["sum", "product", "scatter"])
def test_sums_are_added_in_float32(dtype: str, operation: str) -> None:
    """The error is that of one rounding at the end, not of one in each slice."""
    rows, x = 512, jnp.abs(normal(512, 4, dtype=dtype))
    f = {
        "sum": lambda x: lax.reduce_sum(x * 2, (0,)),
        "product": lambda x: (x * 2).T @ jnp.ones((rows, 3), x.dtype),
        "scatter": lambda x: jnp.ones((5, 4), x.dtype).at[jnp.arange(rows) % 5].add(x * 2),
    }[operation]
    _, g, xs = largest(f, x, n=128)
    with jax.enable_x64(True):
        exact = np.asarray(f(jnp.asarray(x, "float64")))
    got = np.asarray(jax.jit(g)(*xs)[0], "float64")
    # A sum in float32 has an error of its own: some bits for each power of two of the slices.
    error = 1.01 * max(float(jnp.finfo(dtype).eps), 8 * float(jnp.finfo("float32").eps))
    assert (np.abs(got - exact) <= error * np.abs(exact)).all()
    assert jax.jit(g)(*xs)[0].dtype == x.dtype


def test_numbers_of_an_iota_start_at_the_slice() -> None:
    f = lambda x: jnp.where(jnp.arange(600, dtype="bfloat16")[:, None] > x, jnp.sin(x), x)
    _, g, xs = largest(f, 300 + normal(600, 4, dtype="bfloat16"), n=3)
    np.testing.assert_array_equal(jax.jit(g)(*xs)[0], jax.jit(f)(*xs))


def test_side_effects_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("first", ordered=True)
        a = jnp.sin(x)
        jax.debug.print("{}", a.sum() > 0, ordered=True)
        jax.debug.print("third", ordered=True)
        return jnp.exp(a) + jnp.cos(x)

    _, g, xs = largest(f, jnp.ones((8, 4)))
    np.testing.assert_array_equal(jax.jit(g)(*xs)[0], jax.jit(f)(*xs))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "True", "third"] * 2


def test_dropout_masks_do_not_change() -> None:
    def f(key: Any, x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0)

    key = jax.random.key(3)
    prog, xs = flat_program(f, (key, normal(16, 4), normal(4, 32)))
    product = next(e.outvars[0] for e in prog.equations if e.primitive.name == "dot_general")
    region = find_region(prog, product, 0, 4)
    assert region is not None
    assert "select_n" in {e.primitive.name for e, _ in region.equations}
    g = jax.jit(lambda *xs: evaluate(with_loop(region, run_in_slices), xs))
    np.testing.assert_array_equal(g(*xs)[0], jax.jit(f)(key, *xs[1:]))


def test_random_keys_of_each_row() -> None:
    keys, x = jax.random.split(jax.random.key(0), 16), normal(16, 64)
    f = jax.vmap(lambda key, a: jnp.sin(a) * jax.random.uniform(key, a.shape))
    _, g, xs = largest(f, keys, x)
    np.testing.assert_array_equal(jax.jit(g)(*xs)[0], jax.jit(f)(keys, x))


def test_two_regions_one_after_the_other() -> None:
    f = lambda x, w: jax.nn.softmax(jnp.tanh(x @ w), 0) @ w.T
    prog, xs = flat_program(f, (normal(16, 4), normal(4, 32, seed=1)))
    for name in ("tanh", "exp"):
        v = next(e.outvars[0] for e in prog.equations if e.primitive.name == name)
        region = find_region(prog, v, 0, 4)
        assert region is not None
        prog = with_loop(region, run_in_slices)
    assert [e.primitive.name for e in prog.equations].count("scan") == 2
    np.testing.assert_allclose(evaluate(prog, xs)[0], f(*xs), rtol=1e-4, atol=1e-6)


def test_second_derivatives_and_vmap_of_a_custom_rule() -> None:
    f = lambda x, w: jnp.sum(jax.nn.silu(jax.nn.relu(x @ w)) ** 2)
    _, g, xs = largest(f, normal(8, 4), normal(4, 6, seed=1))
    loss = lambda *xs: g(*xs)[0]
    for lib in (jax, xform):
        np.testing.assert_allclose(
            lib.grad(loss, 1)(*xs), jax.grad(f, 1)(*xs), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            lib.hessian(loss, 1)(*xs), jax.hessian(f, 1)(*xs), rtol=1e-4, atol=1e-5
        )
    many = jnp.stack([xs[0], 2 * xs[0]])
    np.testing.assert_allclose(
        jax.vmap(loss, (0, None))(many, xs[1]), jax.vmap(f, (0, None))(many, xs[1]), rtol=1e-5
    )


@pytest.mark.usefixtures("x64", "quick_compilation")
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    check_random(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("x64", "quick_compilation")
@pytest.mark.parametrize("seed", range(1000, 1500, 10))
def test_more_random_programs(seed: int) -> None:
    """JAX itself cannot batch a few of the 500 programs."""
    compared = 0
    for s in range(seed, seed + 10):
        f, xs = batched_program(s)
        try:
            jax.eval_shape(f, *xs)
        except NotImplementedError:
            continue
        check_random(s)
        compared += 1
    assert compared > 7


def batched_program(seed: int) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Return a random program under vmap, and its arguments with a batch of 4."""
    s = sample(seed)
    xs = [jnp.stack([jnp.asarray(x)] * 4) for x in inputs(seed, s.types)]
    xs = [x + jnp.arange(4, dtype=x.dtype).reshape(4, *[1] * (x.ndim - 1)) / 8
          if jnp.issubdtype(x.dtype, np.floating) else x for x in xs]  # fmt: skip
    return jax.vmap(function(s.source, for_jax=True)), xs


def check_random(seed: int) -> None:
    """Compare all regions of a batch of a random program with the program itself."""
    f, xs = batched_program(seed)
    prog, leaves = flat_program(f, xs)
    want = evaluate(prog, leaves)
    for count, region in enumerate(regions(prog, 2)):
        if count % 5 and len(region.members) < 4:
            continue
        got = evaluate(with_loop(region, run_in_slices), leaves)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-8, atol=1e-8, err_msg=f"{sample(seed).source}\n{region.equations}"
            )


def test_two_traces_of_a_custom_rule_have_one_text() -> None:
    """Plans are found again by the text of their program."""

    def f(x: Any, w: Any) -> Any:
        return jnp.sum(jax.nn.relu(x @ w) ** 2)

    args = normal(64, 8), normal(8, 16)

    def text() -> str:
        (region, *_) = regions(flat_program(f, args)[0], 4)
        prog = with_loop(region, run_in_slices)
        return fingerprint(analyze(prog, (False, True), (True,)).program)

    assert text() == text()
