"""Attention around a ring of devices has the values and gradients of attention on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import xform
from models.nets.attention import attend
from models.nets.ring import ring_attend
from models.zigzag import zigzag_order

B, T, H, K, E = 2, 64, 4, 2, 4
SEGMENTS = jnp.cumsum(jax.random.bernoulli(jax.random.key(9), 0.1, (B, T)), 1, jnp.int32)
# Options, and the number of devices along each axis of the mesh.
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "whole": ({"chunk": 64}, {"context": 8}),
    "chunks": ({"chunk": 3}, {"context": 4}),
    "packed": ({"chunk": 4, "segments": SEGMENTS}, {"data": 2, "context": 2, "tensor": 2}),
    "local": ({"chunk": 4, "window": 7}, {"context": 4, "tensor": 2}),
}


def inputs(dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    keys, shapes = jax.random.split(jax.random.key(0), 4), [(H,), (K,), (K,), (H,)]
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, (B, T, *heads, E), dtype) for key, heads in pairs)


def reordered(x: jax.Array, order: Any) -> jax.Array:
    blocks = x.reshape(B, len(order), -1, *x.shape[2:])
    return blocks[:, np.array(order)].reshape(x.shape)


def ring_loss(options: dict[str, Any], devices: int) -> Any:
    """Return the loss of sequences in their usual order."""
    order = zigzag_order(devices)
    given = {k: reordered(x, order) if k == "segments" else x for k, x in options.items()}

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, weights: jax.Array) -> jax.Array:
        out = ring_attend(*(reordered(x, order) for x in (query, key, value)), **given)
        return jnp.sum(weights * reordered(out, np.argsort(order)))

    return loss


def whole_loss(options: dict[str, Any]) -> Any:
    given = {k: x for k, x in options.items() if k != "chunk"}

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(weights * attend(query, key, value, causal=True, **given))

    return loss


def on_mesh(f: Any, sizes: dict[str, int], *args: Any) -> Any:
    count, automatic = int(np.prod([*sizes.values()])), (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:count]
    with jax.set_mesh(jax.make_mesh((*sizes.values(),), (*sizes,), automatic, devices=devices)):
        return jax.jit(f)(*args)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_one_device(case: str) -> None:
    options, sizes = CASES[case]
    loss = ring_loss(options, sizes["context"])
    found = on_mesh(xform.value_and_grad(loss, (0, 1, 2)), sizes, *inputs())
    wanted = jax.jit(jax.value_and_grad(whole_loss(options), (0, 1, 2)))(*inputs())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), found, wanted)


def test_bfloat16_is_as_near_as_on_one_device() -> None:
    options, sizes = CASES["chunks"]
    exact = jax.grad(whole_loss(options))(*inputs())
    ring = on_mesh(xform.grad(ring_loss(options, 4)), sizes, *inputs(jnp.bfloat16))
    whole = jax.jit(xform.grad(whole_loss(options)))(*inputs(jnp.bfloat16))
    error = lambda x: float(jnp.max(jnp.abs(x.astype(jnp.float32) - exact)))
    assert ring.dtype == jnp.bfloat16
    assert error(ring) < 2 * error(whole)


def test_scores_and_keys_of_all_devices_are_never_in_memory() -> None:
    """Twice the devices take half of the temporary bytes, forward and backward."""

    def temporary(devices: int) -> int:
        sizes, shape = {"context": devices}, (1, 4096, 2, 8)
        gradient = xform.grad(lambda q, k, v: jnp.sum(ring_attend(q, k, v, chunk=32)), (0, 1, 2))
        mesh = jax.make_mesh(
            (devices,), (*sizes,), (AxisType.Auto,), devices=jax.devices()[:devices]
        )
        with jax.set_mesh(mesh):
            where = jax.NamedSharding(mesh, jax.P(None, "context"))
            x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
            memory = jax.jit(gradient).lower(x, x, x).compile().memory_analysis()
            return memory.temp_size_in_bytes

    few, many = temporary(2), temporary(8)
    assert few < 4096 * 4096 * 4 / 8
    assert 0.2 < many / few < 0.35
