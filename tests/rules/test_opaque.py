"""Kernels and callbacks: an error with a remedy, but none inside user rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning

import xform
from tests.versions import attention
from xform.errors import NotDifferentiable
from xform.interpret.cost import program_flops

X = jnp.array([0.3, -1.2])
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def kernel(x_ref, y_ref):
    y_ref[...] = jnp.sin(x_ref[...])


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    lambda mesh, args, out: (mesh, jnp.sin, out.sharding, [a.sharding for a in args]),
    sharding_rule="i -> i",
)

OPAQUE = {
    "pallas_call": lambda x: pl.pallas_call(kernel, LIKE, interpret=True)(x),
    "ffi_call": lambda x: jax.ffi.ffi_call("some_target", LIKE)(x),
    "pure_callback": lambda x: jax.pure_callback(np.sin, LIKE, x),
    "io_callback": lambda x: jax.experimental.io_callback(np.sin, LIKE, x),
    "custom_partitioning": lambda x: partitioned(x),
}


@pytest.mark.parametrize("name", OPAQUE)
@pytest.mark.parametrize("mode", ["grad", "jvp", "linearize"])
def test_derivatives_of_opaque_kernels_and_callbacks_raise(name: str, mode: str) -> None:
    f = OPAQUE[name]
    ask = {
        "grad": xform.grad(lambda x: f(x).sum()),
        "jvp": lambda x: xform.jvp(f, (x,), (x,)),
        "linearize": lambda x: xform.linearize(f, x)[0],
    }[mode]
    with pytest.raises(NotDifferentiable) as caught:
        jax.jit(ask).trace(X)
    message = str(caught.value)
    assert name in message
    assert "test_opaque.py" in caught.value.where
    assert "jax.custom_vjp" in caught.value.remedy


def with_rule(f):
    """Return `f` with a rule that declares it to be sin."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    return g


RUNS = [name for name in OPAQUE if name != "ffi_call"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_opaque_calls_inside_a_custom_rule_differentiate(name: str, jit: bool, remat: bool) -> None:
    f = with_rule(OPAQUE[name])
    f = jax.checkpoint(f) if remat else f
    total = lambda x: jnp.sum(f(f(x)))
    gradient = jax.jit(xform.grad(total)) if jit else xform.grad(total)
    np.testing.assert_allclose(gradient(X), jnp.cos(jnp.sin(X)) * jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_opaque_calls_before_stop_gradient_are_allowed(name: str) -> None:
    f = lambda x: jnp.sum(jax.lax.stop_gradient(OPAQUE[name](x)) * x)
    np.testing.assert_allclose(jax.jit(xform.grad(f))(X), jnp.sin(X), rtol=1e-6)


def test_a_kernel_has_a_price() -> None:
    f = with_rule(OPAQUE["pallas_call"])
    assert program_flops(xform.grad(lambda x: f(x).sum()), X) >= X.size
    told = pl.pallas_call(kernel, LIKE, interpret=True, cost_estimate=pl.CostEstimate(
        flops=1000, transcendentals=0, bytes_accessed=0))  # fmt: skip
    assert program_flops(told, X) == 1000


SIZES = attention.BlockSizes(**{name: 16 for name in (
    "block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")})  # fmt: skip


@pytest.mark.parametrize("backward", ["xla", "triton"])
def test_flash_attention_in_pallas(backward: str) -> None:
    def loss(q, k, v):
        out = attention.mha(q, k, v, segment_ids=None, causal=True, interpret=True,
                            block_sizes=SIZES, backward_pass_impl=backward)  # fmt: skip
        return jnp.sum(jnp.square(out))

    args = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 16))
    found = jax.jit(xform.grad(loss, (0, 1, 2)))(*args)
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_dot_product_attention() -> None:
    def loss(q, k, v):
        return jnp.sum(jnp.square(jax.nn.dot_product_attention(q, k, v, is_causal=True)))

    args = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 4))
    found = jax.jit(xform.grad(loss, (0, 1, 2)))(*args)
    for a, b in zip(found, jax.grad(loss, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


AT = jnp.array([[0, 1], [1, 0]])


def product(a, b):
    left, right = (sparse.BCOO((x, AT), shape=(2, 2)) for x in (a, b))
    return (left @ right).todense()


@pytest.mark.slow
def test_a_product_of_sparse_arrays_has_forward_mode_only() -> None:
    dy = xform.jvp(product, (X, X), (X, 2 * X))[1]
    np.testing.assert_allclose(dy, jax.jvp(product, (X, X), (X, 2 * X))[1], rtol=1e-6)
    with pytest.raises(NotDifferentiable, match="product of two sparse arrays"):
        xform.grad(lambda x: product(x, X).sum())(X)
