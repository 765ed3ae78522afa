"""FLOPs against closed forms and, where it can count them, against the compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform._jax import tangent_aval
from xform.interpret.cost import aval_bytes, equation_flops, program_flops


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 4), jnp.float32, 48),
        ((3, 4), jnp.bfloat16, 24),
        ((5,), jnp.complex64, 40),
        ((), jnp.int8, 1),
        ((7,), jnp.bool_, 7),
        ((0, 4), jnp.float32, 0),
        ((3,), jax.dtypes.float0, 0),
    ],
)
def test_bytes_of_arrays(shape: tuple[int, ...], dtype: Any, expected: int) -> None:
    assert aval_bytes(jax.ShapeDtypeStruct(shape, dtype)) == expected


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bytes_of_keys_are_those_of_their_data(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert aval_bytes(jax.typeof(keys)) == jax.random.key_data(keys).nbytes


def test_no_bytes_for_tangents_of_integers_and_for_tokens() -> None:
    assert aval_bytes(tangent_aval(jax.typeof(jnp.arange(3)))) == 0
    assert aval_bytes(jax.typeof(lax.create_token())) == 0


CASES = [
    ("elementwise", lambda x: jnp.exp(x) + x, [f32(3, 4)], 24),
    ("scalar operand", lambda x: 2 * x, [f32(3, 4)], 12),
    ("moves data", lambda x: x.T.reshape(-1)[2:], [f32(3, 4)], 0),
    ("dot", jnp.dot, [f32(3, 4), f32(4, 5)], 2 * 3 * 4 * 5),
    ("batched dot", jnp.matmul, [f32(7, 3, 4), f32(7, 4, 5)], 7 * 2 * 3 * 4 * 5),
    ("dot of vectors", jnp.vdot, [f32(6), f32(6)], 12),
    ("reduction", lambda x: x.sum(axis=1), [f32(3, 4)], 12),
    ("cumulative sum", lambda x: lax.cumsum(x), [f32(3, 4)], 12),
    ("sort", lambda x: lax.sort(x), [f32(3, 16)], 3 * 16 * 4),
    ("scatter-add", lambda x, u: x.at[jnp.arange(2)].add(u), [f32(9, 4), f32(2, 4)], None),
    ("fft", lambda x: lax.fft(x, "FFT", (8,)), [jax.ShapeDtypeStruct((3, 8), jnp.complex64)],
     3 * 5 * 8 * 3),
    ("fft of real data", lambda x: lax.fft(x, "RFFT", (8,)), [f32(3, 8)], 3 * 2.5 * 8 * 3),
    ("scan", lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=9)[0], [f32(4)], 36),
    ("scan in scan", lambda x: lax.fori_loop(
        0, 3, lambda _, c: lax.scan(lambda c, _: (jnp.sin(c), None), c, length=9)[0], x),
     [f32(4)], 3 * (9 * 4 + 1)),
    ("while, once", lambda x: lax.while_loop(lambda c: c[0] < 9, jnp.sin, x), [f32(4)], 5),
    ("cond, the dearest", lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.sin(jnp.cos(x)), x),
     [f32(4)], 8 + 1),
    ("jit", lambda x: jax.jit(jnp.sin)(jax.jit(jnp.sin)(x)), [f32(4)], 8),
    ("remat", jax.checkpoint(jnp.sin), [f32(4)], 4),
    ("custom rule", jax.nn.relu, [f32(4)], 4),
    ("nothing depends on it", lambda x: (jnp.sin(x), x)[1], [f32(4)], 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("f", "args", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_closed_form(f: Any, args: list[Any], expected: float | None) -> None:
    if expected is None:  # one for each updated element, and the arithmetic on indices
        assert 8 <= program_flops(f, *args) <= 8 + 3 * 2
    else:
        assert program_flops(f, *args) == expected


CONVOLUTIONS = {
    "plain": ((2, 8, 9, 9), (6, 8, 3, 3), {}),
    "strided": ((2, 8, 9, 9), (6, 8, 3, 3), {"window_strides": (2, 3)}),
    "valid": ((2, 8, 9, 9), (6, 8, 3, 3), {"padding": "VALID"}),
    "grouped": ((2, 8, 9, 9), (6, 4, 3, 3), {"feature_group_count": 2}),
    "depthwise": ((2, 8, 9, 9), (16, 1, 3, 3), {"feature_group_count": 8}),
    "batch groups": ((4, 8, 9, 9), (6, 8, 3, 3), {"batch_group_count": 2}),
    "dilated window": ((2, 8, 9, 9), (6, 8, 3, 3), {"rhs_dilation": (2, 2)}),
    "dilated input": (
        (2, 8, 5, 5),
        (6, 8, 3, 3),
        {"lhs_dilation": (2, 3), "padding": [(1, 2), (2, 0)]},
    ),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_flops_of_convolutions_equal_the_compilers(case: str) -> None:
    x, w, options = CONVOLUTIONS[case]

    def f(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, **{"window_strides": (1, 1), "padding": "SAME", **options}
        )

    said = jax.jit(f).lower(f32(*x), f32(*w)).cost_analysis()["flops"]
    assert program_flops(f, f32(*x), f32(*w)) == said


def test_flops_of_dots_in_a_gradient_agree_with_the_compiler() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w[0]) @ w[1])

    args = [f32(64, 64), f32(64, 64)], f32(32, 64)
    said = jax.jit(xform.grad(loss)).lower(*args).cost_analysis()["flops"]
    assert program_flops(xform.grad(loss), *args) == pytest.approx(said, rel=0.02)


@pytest.mark.parametrize(
    ("f", "shape", "expected"),
    [
        (lax.linalg.cholesky, (2, 6, 6), 2 * 6**3 / 3),
        (lax.linalg.lu, (6, 6), 2 * 6**3 / 3),
        (lax.linalg.qr, (8, 4), 2 * (2 * 8 * 4**2 - 2 * 4**3 / 3)),
        (lax.linalg.svd, (8, 4), 6 * 8 * 4**2 + 20 * 4**3),
    ],
)
def test_factorizations(f: Any, shape: tuple[int, ...], expected: float) -> None:
    equations = jax.make_jaxpr(f)(f32(*shape)).eqns
    costs = {e.primitive.name: equation_flops(e) for e in equations}
    assert costs[f.__name__] == int(expected)


def test_shard_map_counts_every_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert program_flops(f, f32(16, 4)) == 64


def test_bytes_on_each_device_of_partial_sums() -> None:
    """Each device holds a term of its own, with the full shape."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    for at, n in ((spec("i"), 32), (spec("i", unreduced={"j"}), 32), (spec(reduced={"i"}), 128)):
        x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=jax.NamedSharding(mesh, at))
        assert aval_bytes(jax.make_jaxpr(jnp.copy)(x).in_avals[0]) == n


def test_ragged_dot_counts_each_row_once() -> None:
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert program_flops(lax.ragged_dot, f32(10, 4), f32(3, 4, 5), sizes) == 2 * 10 * 4 * 5


def test_nothing_is_allocated() -> None:
    huge = f32(2**20, 2**20)
    assert program_flops(jnp.dot, huge, huge) == 2**61
    assert np.iinfo(np.int64).max < program_flops(lambda x: (x @ x) @ (x @ (x @ x)), huge) * 8
