"""No barrier copies an argument that reaches a product through operations that XLA removes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform

X = jax.ShapeDtypeStruct((400, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128, 16), jnp.float32)

REMOVED = {
    "nothing": lambda x: x,
    "array": jnp.array,
    "copy": jnp.copy,
    "transposed twice": lambda x: x.T.T,
    "axes exchanged twice": lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 1), 0, 1),
    "x * 1": lambda x: x * 1.0,
    "x * ones": lambda x: x * jnp.ones_like(x),
    "x / 1": lambda x: x / 1.0,
    "x + 0": lambda x: x + 0,
    "0 + x": lambda x: 0.0 + x,
    "x + zeros": lambda x: x + jnp.zeros_like(x),
    "x - 0": lambda x: x - 0.0,
    "negated twice": lambda x: jnp.negative(jnp.negative(x)),
    "x ** 1": lambda x: x**1,
    "max(x, -inf)": lambda x: jnp.maximum(x, -jnp.inf),
    "where(True, x, 0)": lambda x: jnp.where(True, x, 0.0),
    "an empty pad": lambda x: jnp.pad(x, ((0, 0), (0, 0))),
    "a whole slice": lambda x: x[:],
    "an empty roll": lambda x: jnp.roll(x, 0, 0),
    "to its own type": lambda x: x.astype(jnp.float32),
    "read as integers and back": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    ),
    "reversed twice": lambda x: x[::-1][::-1],
    "reshaped twice": lambda x: x.reshape(-1).reshape(x.shape),
    "an axis more and less": lambda x: x[None][0],
    "sum over an axis of one": lambda x: x[None].sum(0),
    "mean over an axis of one": lambda x: x[None].mean(0),
    "split and put together": lambda x: jnp.concatenate(jnp.split(x, 2)),
    "one thing put together": lambda x: jnp.concatenate([x]),
    "real": jnp.real,
    "without a gradient": lax.stop_gradient,
}


def temp_bytes(grad: Any, f: Any) -> int:
    compiled = jax.jit(grad(f, argnums=1)).lower(X, W).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("name", REMOVED)
def test_operations_that_xla_removes_cause_no_copy_of_an_argument(name: str) -> None:
    f = lambda x, w: jnp.mean(jnp.tanh(REMOVED[name](x) @ w) ** 2)
    assert temp_bytes(xform.grad, f) <= 1.02 * temp_bytes(jax.grad, f)


def test_a_matrix_is_not_copied_that_a_product_reads_transposed() -> None:
    f = lambda x, w: jnp.mean(jnp.tanh(w.T @ x.T) ** 2)
    assert temp_bytes(xform.grad, f) <= 1.02 * temp_bytes(jax.grad, f)
