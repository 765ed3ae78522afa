"""`sliced` keeps a function to a number of bytes, and changes no value but by rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.errors import BudgetInfeasible, WrongArgument

MIB = 2**20


def compiled(f: Callable[..., Any], *args: Any) -> int:
    """Return temporary, argument and output bytes of a compiled function."""
    figures: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return ends + figures.temp_size_in_bytes


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def pair(x: Any, y: Any) -> Any:
    return jnp.exp(-jnp.sum((x - y) ** 2))


def kernel(x: Any, y: Any, w: Any) -> Any:
    """Return a sum over pairs of rows, for each row of `x`."""
    return jax.vmap(lambda a: jax.vmap(lambda b: pair(a, b))(y))(x) @ w


def test_a_pairwise_kernel() -> None:
    args = normal(1024, 8), normal(1024, 8, seed=1), normal(1024, seed=2)
    assert compiled(kernel, *args) > 3.5 * MIB
    for budget in ("5 MiB", "1 MiB"):
        f = xform.sliced(kernel, budget)
        assert compiled(f, *args) <= (5 * MIB if budget == "5 MiB" else MIB)
        np.testing.assert_allclose(f(*args), kernel(*args), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_pair_energy() -> None:
    """Its sums over pairs are added in the same loop."""

    def energy(x: Any) -> Any:
        r2 = jnp.sum((x[:, None] - x[None]) ** 2, -1) + jnp.eye(len(x))
        return jnp.sum(1 / r2**3 - 1 / r2) / 2

    x = 3 * normal(800, 3)
    f = xform.grad(energy)
    assert compiled(f, x) > 2 * MIB
    small = xform.sliced(f, 1.5 * MIB)
    assert compiled(small, x) <= 1.5 * MIB
    with jax.enable_x64(True):
        exact = np.asarray(jax.grad(energy)(jnp.asarray(x, "float64")))
    scale = np.abs(exact).max()
    np.testing.assert_allclose(small(x) / scale, exact / scale, atol=1e-5)


def test_overlapping_patches() -> None:
    def patches(x: Any, w: Any) -> Any:
        windows = x[jnp.arange(8192)[:, None] + jnp.arange(64)]
        return jnp.tanh(windows @ w).sum(-1)

    args = normal(8192 + 63), normal(64, 64)
    whole = compiled(patches, *args)
    f = xform.sliced(patches, whole / 2)
    assert compiled(f, *args) <= whole / 2
    np.testing.assert_allclose(f(*args), patches(*args), rtol=1e-5, atol=1e-5)


def test_a_function_that_fits_is_not_sliced() -> None:
    f = xform.sliced(kernel, "64 MiB")
    args = normal(64, 8), normal(32, 8), normal(32)
    assert f.regions(*args) == []  # pyright: ignore[reportFunctionMemberAccess]
    np.testing.assert_array_equal(f(*args), jax.jit(kernel)(*args))


def test_pytrees_keywords_and_other_values() -> None:
    def f(tree: Any, *, scale: Any, name: str) -> Any:
        out = jnp.tanh(tree["a"][:, None] * tree["b"]).sum(1)
        return {name: out * scale, "index": tree["i"] + 1}

    tree = {"a": normal(512), "b": normal(2048), "i": jnp.arange(3)}
    small = xform.sliced(f, "600 KiB")
    want = f(tree, scale=2.0, name="out")
    got = small(tree, scale=2.0, name="out")
    assert got.keys() == want.keys()
    np.testing.assert_allclose(got["out"], want["out"], rtol=1e-5)
    np.testing.assert_array_equal(got["index"], want["index"])


def test_under_jit_vmap_and_derivatives_of_both() -> None:
    x, y, w = normal(256, 4), normal(512, 4, seed=1), normal(512, seed=2)
    small = xform.sliced(kernel, "200 KiB")
    assert small.regions(x, y, w)  # pyright: ignore[reportFunctionMemberAccess]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    close(jax.jit(small)(x, y, w), kernel(x, y, w))
    many = jnp.stack([x, x + 1])
    close(jax.vmap(small, (0, None, None))(many, y, w),
          jax.vmap(kernel, (0, None, None))(many, y, w))  # fmt: skip
    loss = lambda f: lambda *xs: jnp.sum(f(*xs) ** 2)
    want = jax.grad(loss(kernel), (0, 1, 2))(x, y, w)
    for lib in (jax, xform):
        for g in (lib.grad(loss(small), (0, 1, 2)), jax.jit(lib.grad(loss(small), (0, 1, 2)))):
            jax.tree.map(close, g(x, y, w), want)
        _, tangent = lib.jvp(lambda x: small(x, y, w), (x,), (jnp.ones_like(x),))
        close(tangent, jax.jvp(lambda x: kernel(x, y, w), (x,), (jnp.ones_like(x),))[1])


def test_the_error_names_the_smallest_program() -> None:
    args = normal(256, 8), normal(256, 8), normal(256)
    with pytest.raises(BudgetInfeasible, match="slices of axis") as caught:
        xform.sliced(kernel, 18_500)(*args)  # less than the arguments and the output
    floor = caught.value.floor_bytes
    assert compiled(xform.sliced(kernel, floor), *args) <= floor
    with pytest.raises(BudgetInfeasible, match="no region of it can be sliced"):
        xform.sliced(lambda x: jnp.sort(x), "1 KiB")(normal(4096))


def test_several_regions() -> None:
    def f(x: Any, w: Any) -> Any:
        medians = jnp.sort(jnp.tanh(x @ w), 1)[:, 512]
        return jnp.sort(jnp.sin((jnp.sort(medians)[:, None] * x) @ w), 1)[:, 512]

    args = normal(1024, 64), normal(64, 1024, seed=1)
    small = xform.sliced(f, "1.5 MiB")
    assert len(small.regions(*args)) == 2  # pyright: ignore[reportFunctionMemberAccess]
    assert compiled(small, *args) <= 1.5 * MIB
    np.testing.assert_allclose(small(*args), f(*args), rtol=1e-3, atol=1e-3)


def test_wrong_arguments() -> None:
    with pytest.raises(WrongArgument, match="budget="):
        xform.sliced(kernel, "many")
    with pytest.raises(WrongArgument):
        xform.sliced(3, "1 MiB")  # pyright: ignore[reportArgumentType]


def test_a_target_is_asked_for_its_bytes() -> None:
    args = normal(256, 8), normal(512, 8), normal(512)
    small = xform.sliced(kernel, "300 KiB", target="cpu")
    report = xform.memory_analysis(small, *args, target="cpu")
    assert report.total_bytes <= 300 * 1024
