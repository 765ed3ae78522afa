"""On several GPUs the cotangent between two layers waits for the gradients that are complete."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import xform
from xform.memory.targets import parse_target
from xform.steering.barrier import barrier_p

LAYERS, N = 4, 8
MESH = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
W = [(np.cos(np.arange(64.0) + i).reshape(N, N), np.sin(np.arange(64.0) * i).reshape(N, N))
     for i in range(LAYERS)]  # fmt: skip
W = jax.tree.map(lambda w: w.astype(np.float32), W)
X = np.sin(np.arange(2.0 * N)).reshape(2, N).astype(np.float32)


def layer(ws, x):
    up, down = ws
    return x + jnp.tanh(x @ up) @ down


def sharded(f):
    """Return a loss whose batch is shared by two devices."""
    shard = NamedSharding(MESH, PartitionSpec("fsdp"))
    return lambda ws, x: f(ws, lax.with_sharding_constraint(x, shard))


def unrolled(ws, x):
    for each in ws:
        x = layer(each, x)
    return jnp.sum(x**2)


def regions(ws, x):
    for each in ws:
        x = jax.checkpoint(layer)(each, x)
    return jnp.sum(x**2)


def scanned(ws, x):
    stack = jax.tree.map(lambda *w: jnp.stack(w), *ws)
    return jnp.sum(lax.scan(lambda x, w: (layer(w, x), None), x, stack)[0] ** 2)


def rounded(ws, x):
    """The weights are converted first, so the gradients are converted at the end."""
    return unrolled(jax.tree.map(lambda w: w.astype(jnp.bfloat16), ws), x.astype(jnp.bfloat16))


def emitted(f, target):
    with parse_target(target).planned_for():
        return jax.jit(xform.grad(f, (0, 1))).trace(W, X).jaxpr.jaxpr


def waits(jaxpr):
    """Return the cotangents that wait, each with the number of gradients."""
    found = [e for e in jaxpr.eqns if e.primitive is barrier_p and e.params["where"] == "gpu"]
    makers = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    return [[makers[v] for v in e.invars[1:]] for e in found if e.invars[0].aval.shape == X.shape]


@pytest.mark.parametrize("f", [unrolled, regions, rounded])
def test_the_cotangent_between_layers_waits_for_the_products_of_the_layer_after_it(f) -> None:
    found = waits(emitted(sharded(f), "gpu:h100:2"))[: LAYERS - 1]
    last = "transpose" if f is regions else "dot_general"  # a region returns complete gradients
    assert found == [[last, last]] * (LAYERS - 1)


@pytest.mark.parametrize("target", ["cpu:2", "tpu:v5e:2x2"])
def test_only_on_gpus(target) -> None:
    assert not waits(emitted(sharded(unrolled), target))


def test_not_on_one_device() -> None:
    assert not waits(emitted(unrolled, "gpu:h100"))


def test_not_for_the_gradients_of_a_loop_which_are_complete_together() -> None:
    assert not waits(emitted(sharded(scanned), "gpu:h100:2"))


@pytest.mark.parametrize("policy", [None, xform.policies.save_dots])
@pytest.mark.parametrize("f", [unrolled, regions])
def test_values_do_not_change(f, policy) -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    shard = NamedSharding(mesh, PartitionSpec("fsdp"))
    loss = lambda ws, x: f(ws, lax.with_sharding_constraint(x, shard))
    with parse_target("gpu:h100:2").planned_for():
        traced = jax.jit(xform.grad(loss, (0, 1), policy=policy)).trace(W, X)
    assert waits(traced.jaxpr.jaxpr)
    got = traced.lower().compile()(W, X)
    expected = jax.jit(jax.grad(loss, (0, 1)))(W, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_cotangent_that_nothing_reads_is_never_waited_for() -> None:
    """The derivative of `sign` is zero, so the cotangent of the second output is not read."""
    f = lambda ws, x: (sharded(unrolled)(ws, x), jnp.sign(ws[0][0]))
    pull = lambda ws, x, cts: xform.vjp(f, ws, x)[1](cts)
    with parse_target("gpu:h100:2").planned_for():
        traced = jax.jit(pull).trace(W, X, (np.float32(1), W[0][0]))
    assert waits(traced.jaxpr.jaxpr)[: LAYERS - 1] == [["dot_general"] * 2] * (LAYERS - 1)
