"""Reads and writes at computed starts; some are negative or beyond the end."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import xform
from tests.parameters import slow

V = np.sin(np.arange(5.0) + 0.3)
M = np.cos(np.arange(20.0)).reshape(5, 4)
PART = np.cos(np.arange(2.0))
STARTS = (-7, -4, -1, 0, 4, 6)
STEP = 1e-6


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def clamped_slice(x, i, size=2):
    return lax.dynamic_slice(x, (i,), (size,), allow_negative_indices=False)


def clamped_update(x, part, i):
    return lax.dynamic_update_slice(x, part, (i,), allow_negative_indices=False)


def windows(x, i):
    return lax.map(lambda k: clamped_slice(x, i + k), jnp.arange(3))


def updates_in_scan(x, i):
    def body(x, k):
        y = clamped_slice(x, i + k)
        return clamped_update(x, jnp.sin(y) * 2, i - k), y

    return lax.scan(body, x, jnp.arange(3))


def sum_of_squares(x, i):
    return lax.fori_loop(0, 3, lambda k, total: total + x[i + k] ** 2, 0.0)


def bound(x, part, i):
    """Bind the primitives themselves, with one literal start."""
    start = i, np.int32(-3)
    y = lax.dynamic_update_slice_p.bind(x, part[None], *start)
    return y, lax.dynamic_slice_p.bind(x, *start, slice_sizes=(2, 3))


def of_reference(use: Callable[..., Any]) -> Callable[..., Any]:
    def f(x, *rest):
        ref = jax.new_ref(x)
        y = use(ref, *rest)
        return ref[...] if y is None else (y, ref[...])

    return f


def add(ref, part, i):
    ref[i] += part[0]


def put_slice(ref, part, i):
    ref[pl.ds(i, 2)] = part


def swap(ref, part, i):
    return jax.ref.swap(ref, i, part[0])


def scan(ref, i):
    def body(c, k):
        ref[i - k] = ref[i - k] * c + jnp.sin(ref[i])
        return c * 1.1, ref[i + k]

    return lax.scan(body, 1.0, jnp.arange(3))


VALUES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "element": (lambda x, i: x[i], (V,)),
    "column": (lambda x, i: x[1:, i], (M,)),
    "get": (lambda x, i: (x.at[i].get(mode="clip"), x.at[i].get(mode="fill", fill_value=3)), (V,)),
    "elements": (lambda x, i: x.at[jnp.stack([i, i + 1])].get(mode="clip"), (V,)),
    "set": (lambda x, p, i: x.at[i].set(p[0], mode="clip"), (V, PART)),
    "slice": (clamped_slice, (V,)),
    "update": (clamped_update, (V, PART)),
    "update of itself": (lambda x, i: clamped_update(x, x[:2] ** 2, i), (V,)),
    "bound": (bound, (M, M[0, :3])),
    "row": (lambda x, i: lax.dynamic_index_in_dim(x, i, 0, allow_negative_indices=False), (M,)),
    "windows": (windows, (V,)),
    "updates in a scan": (updates_in_scan, (V,)),
    "loop": (sum_of_squares, (V,)),
}
REFERENCES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "reference": (of_reference(lambda r, i: (r[i], r[pl.ds(i, 2)])), (V,)),
    "reference +=": (of_reference(add), (V, PART)),
    "part of a reference": (of_reference(put_slice), (V, PART)),
    "swap": (of_reference(swap), (V, PART)),
    "reference in a scan": (of_reference(scan), (V,)),
}
PROGRAMS = VALUES | REFERENCES


def weights(y: Any) -> Any:
    """Return a cotangent without symmetries."""
    return jax.tree.map(lambda y: jnp.sin(1.0 + jnp.arange(y.size)).reshape(y.shape), y)


def slopes(f: Callable[..., Any], args: tuple[Any, ...], i: Any, cts: Any) -> list[np.ndarray]:
    """Return central differences of the weighted outputs; for a linear function they are exact."""

    def total(*args: Any) -> float:
        pairs = zip(*map(jax.tree.leaves, (f(*args, i), cts)), strict=True)
        return sum(float(np.sum(y * ct)) for y, ct in pairs)

    found: list[np.ndarray] = []
    for k, x in enumerate(args):
        ends = [
            [total(*args[:k], x + s * STEP * e.reshape(x.shape), *args[k + 1 :]) for s in (1, -1)]
            for e in np.eye(x.size)
        ]
        found.append((np.array(ends) @ [0.5, -0.5] / STEP).reshape(x.shape))
    return found


def pulled(f: Callable[..., Any], cts: Any, *args: Any) -> Any:
    *xs, i = args
    return xform.vjp(lambda *xs: f(*xs, i), *xs)[1](cts)


def close(found: Any, expected: Any, rtol: float = 1e-7) -> None:
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol, 1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_at_starts_of_every_sign(name: str) -> None:
    f, args = PROGRAMS[name]
    value, compiled = jax.jit(f), jax.jit(lambda *args: pulled(f, *args))
    for start in STARTS:
        i = jnp.int32(start)
        cts = weights(value(*args, i))
        expected = slopes(value, args, i, cts)
        close(compiled(cts, *args, i), expected)
        if name in VALUES and start in (-7, 6):  # outside of jit JAX refuses such an index of a Ref
            close(pulled(f, cts, *args, i), expected)


@pytest.mark.parametrize("name", slow(VALUES, "column", "get", "elements", "set", "bound", "loop"))
def test_jacobians_and_batches_at_starts_of_every_sign(name: str) -> None:
    f, args = VALUES[name]
    which = tuple(range(len(args)))
    starts = jnp.array(STARTS, np.int32)

    def jacobians(t: Any, i: Any) -> Any:
        return t.jacrev(lambda *xs: f(*xs, i), which)(*args)

    expected = jax.jit(lambda: lax.map(lambda i: jacobians(jax, i), starts))()
    close(jax.jit(lambda: lax.map(lambda i: jacobians(xform, i), starts))(), expected)
    close(jax.jit(lambda: jax.vmap(lambda i: jacobians(xform, i))(starts))(), expected)


@pytest.mark.parametrize("dtype", slow(["int8", "uint8", "uint32", "int64"], "uint8", "int64"))
def test_dtypes_of_a_start(dtype: str) -> None:
    ends = np.iinfo(dtype)
    starts = {ends.min, ends.max, 4, *([-1] if ends.min else [])}
    for name in ("element", "slice", "update", "row"):
        f, args = PROGRAMS[name]
        value, compiled = jax.jit(f), jax.jit(lambda *args, f=f: pulled(f, *args))
        for i in [np.asarray(start, dtype) for start in starts]:
            cts = weights(value(*args, i))
            close(compiled(cts, *args, i), slopes(value, args, i, cts))


@pytest.mark.parametrize("start", [-7, -1, 6])
def test_transposes_at_a_start(start: int) -> None:
    """The transpose of a linear function: of a slice, and of an update in both operands."""
    i = jnp.int32(start)
    rows = lax.map(lambda e: clamped_slice(e, i), np.eye(5))
    x, part = (jax.ShapeDtypeStruct(np.shape(a), "float64") for a in (V, PART))
    found = xform.linear_transpose(lambda x: clamped_slice(x, i), x)(PART)[0]
    np.testing.assert_allclose(found, rows @ PART)
    found = xform.linear_transpose(lambda x, p: clamped_update(x, p, i), x, part)(V)
    np.testing.assert_allclose(found[1], rows.T @ V)
    np.testing.assert_allclose(found[0], V * (rows.sum(1) == 0))
