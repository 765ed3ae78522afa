"""Every case of every family: first derivatives in float64; the rest among the slow tests."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from xform.testing import CHECKS, Case, check_rule

FAMILIES = [path.stem for path in sorted(Path(__file__).parent.glob("cases/[a-z]*.py"))]
CASES = [c for f in FAMILIES for c in importlib.import_module(f"tests.rules.cases.{f}").CASES]


def ids(case: Case) -> str:
    return case.id


def dtypes(case: Case, *names: str) -> list[str]:
    """Return the dtypes that a case supports."""
    left_out = {"complex64", "complex128"} if not case.complex else set()
    return [n for n in names if n not in left_out and (case.bfloat16 or n != "bfloat16")]


# Factorizations and the gamma sampler are large programs: about a minute for each case.
HEAVY = {"lu", "qr", "svd", "eigh", "eig", "cholesky", "random_gamma"}
# These take seconds, and resemble other cases: a minimum is a maximum with the sign changed.
LONG = ("scatter-min-", "igammac-shape", "ormqr-right", "householder_product-batch")
marks = {True: [pytest.mark.slow], False: []}


def heavy(case: Case) -> bool:
    return case.primitive in HEAVY or case.id.startswith(LONG)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("case", [pytest.param(c, marks=marks[heavy(c)], id=c.id) for c in CASES])
def test_rule(case: Case) -> None:
    check_rule(case, dtypes=["float64"], checks=["first"])


@pytest.mark.slow
@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rule_in_every_dtype(case: Case) -> None:
    check_rule(case, dtypes=["float64"], checks=CHECKS)
    first = [name for name in CHECKS if name != "second"]
    check_rule(case, dtypes=dtypes(case, "float32", "bfloat16", "complex64"), checks=first)
    if case.complex:
        check_rule(case, dtypes=["complex128"], checks=CHECKS)
    jax.clear_caches()  # the tests above compile thousands of small programs


TINY = ["float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TINY)
def test_tiny_floats_have_the_derivatives_that_jax_gives_them(dtype: str) -> None:
    """Types alone: the largest error of a value is about as large as the value."""

    def narrow(x: np.ndarray) -> jax.Array:
        x = np.asarray(x)
        return jnp.asarray(x, jnp.float32).astype(dtype) if x.dtype.kind == "f" else jnp.asarray(x)

    def types(t: Any, f: Any, xs: Any) -> Any:
        def every(*xs: Any) -> Any:
            y, pull = t.vjp(f, *xs)
            return pull(y), t.jvp(f, xs, xs)[1], t.linearize(f, *xs)[1](*xs)

        return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(every, *xs))]

    compared = 0
    for case in [c for c in CASES if not heavy(c)]:
        args = list(map(narrow, case.args))
        on = [i for i, x in enumerate(args) if x.dtype == dtype]
        f = lambda *xs, args=args, on=on, fun=case.fun: fun(
            *[xs[on.index(i)] if i in on else x for i, x in enumerate(args)]
        )
        xs = [args[i] for i in on]
        try:
            want = types(jax, f, xs) if on else None
        except Exception:  # JAX has no such operation in this dtype, or no derivative of it
            continue
        if on:
            assert types(xform, f, xs) == want, case.id
            compared += 1
    assert compared > 200


# Explicit meshes: a cotangent has the sharding of its primal.

SHARDED = {
    "reshard": lambda x: jax.sharding.reshard(x, P(None, "x")),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (3, 4, 2), (1, 2)),
    "reshape": lambda x: lax.reshape(x, (4, 1, 2)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "tile": lambda x: lax.tile(x, (1, 3)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "slice": lambda x: lax.slice(x, (0, 1), (4, 2)),
    "pad": lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 1))),
    "select_n": lambda x: lax.select(lax.gt(x, np.float32(3)), x, lax.neg(x)),
    "max": lambda x: lax.max(x, np.float32(3)),
    "reduce_max": lambda x: lax.reduce_max(x, (1,)),
    "reduce_min": lambda x: lax.reduce_min(x, (0,)),
    "sin": lax.sin,
}
# JAX's own derivative fails on such a mesh in 0.12. This function is equal, including ties.
THEIRS = {"max": lambda x: (x + 3) / 2 + (lax.abs(x - 3) + lax.abs(3 - x)) / 4}


@pytest.mark.parametrize("name", SHARDED)
def test_sharding(name: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), P("x", None))
        y, pull = xform.vjp(SHARDED[name], x)
        (ct_x,) = pull(y)
        (expected,) = jax.vjp(THEIRS.get(name, SHARDED[name]), x)[1](y)
        assert jax.typeof(ct_x).sharding == jax.typeof(x).sharding
        np.testing.assert_allclose(ct_x, expected, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"feature_group_count": 2}], ids=["plain", "groups"])
def test_sharding_of_kernels(options: dict[str, int]) -> None:
    """The cotangent of a kernel is summed over images that are sharded over devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    axes = ("NHWC", "HWIO", "NHWC")
    images, kernel = jnp.sin(jnp.arange(160.0)), jnp.cos(jnp.arange(72.0))
    features = 2 // options.get("feature_group_count", 1)

    def loss(x, w):
        y = lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=axes, **options)
        return jnp.sum(lax.reduce_window(y**2, -np.inf, lax.max, (1, 2, 2, 1), (1,) * 4, "SAME"))

    with jax.set_mesh(mesh):
        x = jax.device_put(images.reshape(4, 4, 5, 2), P("x"))
        w = jax.device_put(kernel[: 36 * features].reshape(3, 3, features, 4), P())
        expected = jax.grad(loss, (0, 1))(x, w)
        for transform in (jax.jit, lambda g: g):
            found = transform(xform.grad(loss, (0, 1)))(x, w)
            for a, b, like in zip(found, expected, (x, w), strict=True):
                assert jax.typeof(a).sharding == jax.typeof(like).sharding
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert xform.plan(loss, x, w).compiled_bytes > 0


@pytest.mark.parametrize("way", ["host_local_array_to_global_array",
                                 "global_array_to_host_local_array"])  # fmt: skip
def test_arrays_of_several_hosts(way: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def f(x):
        return jnp.sin(getattr(multihost_utils, way)(x, mesh, P("x"))).sum()

    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("x")))
    for grad in (xform.grad(f), jax.jit(xform.grad(f))):
        np.testing.assert_allclose(grad(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(xform.linearize(f, x)[1](x), jnp.sum(jnp.cos(x) * x), rtol=1e-6)
