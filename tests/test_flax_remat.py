"""`xform.flax.remat` and `nnx.remat` under xform: values, state, and recomputed operations."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from tests.nnx import GRAPH, TREE, Plain, X, loss, same

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Stack(nnx.Module):
    """Layers that are scanned or unrolled, marked by `mark`."""

    def __init__(self, mark: Callable[..., Any], *, scan: bool):
        keys = jax.random.split(jax.random.key(0), 2)
        build = lambda key: Layer(nnx.Rngs(key))
        self.layers = nnx.vmap(build)(keys) if scan else nnx.List([build(k) for k in keys])
        self.mark, self.scan = mark, scan

    def __call__(self, x: jax.Array) -> jax.Array:
        run = self.mark(Layer.__call__)
        if self.scan:
            scan = nnx.scan(lambda x, layer: run(layer, x), in_axes=(nnx.Carry, 0),
                            out_axes=nnx.Carry)  # fmt: skip
            return scan(x, self.layers)
        for layer in self.layers:
            x = run(layer, x)
        return x


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(jnp.sin(jax.ad_checkpoint.checkpoint_name(self.dense(x), "dense")))


POLICY = xform.policies.save_only_these_names("dense")
MARKS = {
    "nnx": functools.partial(nnx.remat, policy=POLICY),
    "xform": functools.partial(xform.flax.remat, policy=POLICY),
    "xform graph": functools.partial(xform.flax.remat, **GRAPH),
    "xform tree": functools.partial(xform.flax.remat, **TREE),
}


@pytest.fixture(scope="module")
def expected() -> dict[bool, Any]:
    """Return value, gradient and final state, for scanned and for unrolled layers."""
    out = {}
    for scan in (False, True):
        model = Stack(lambda f: f, scan=scan)
        out[scan] = nnx.jit(nnx.value_and_grad(loss))(model, X), nnx.state(model)
    return out


@pytest.mark.parametrize(
    ("mark", "scan"),
    [("nnx", False), ("xform", False), *((mark, True) for mark in MARKS)],
)
def test_remat(mark: str, scan: bool, expected: dict[bool, Any]) -> None:
    model = Stack(MARKS[mark], scan=scan)
    actual = nnx.jit(xform.flax.value_and_grad(loss))(model, X)
    same((actual, nnx.state(model)), expected[scan])


def test_remat_in_pure_code(expected: dict[bool, Any]) -> None:
    graphdef, params, rest = nnx.split(Stack(MARKS["xform"], scan=True), nnx.Param, ...)

    @jax.jit
    @xform.value_and_grad
    def f(params: nnx.State, rest: nnx.State, x: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest, copy=True), x)

    same(f(params, rest, X), expected[True][0])


@pytest.mark.parametrize("remat", [nnx.remat, xform.flax.remat], ids=["nnx", "xform"])
def test_remat_policy_is_honoured(remat: Callable[..., Any]) -> None:
    """Recomputes of the backward pass are equations of the program."""

    def sines(**options: Any) -> int:
        graphdef, state = nnx.split(Plain())
        run = remat(lambda m, x: jnp.sin(jnp.sin(m(x))), **options) if options else (
            lambda m, x: jnp.sin(jnp.sin(m(x))))  # fmt: skip
        f = lambda state, x: xform.flax.grad(lambda m, x: run(m, x).sum())(
            nnx.merge(graphdef, state), x
        )
        return str(jax.make_jaxpr(f)(state, X)).count("tanh")

    kept = sines()
    assert sines(policy=xform.policies.save_everything) == kept
    assert sines(policy=jax.checkpoint_policies.nothing_saveable) > kept


def test_remat_in_a_lax_scan_and_as_method() -> None:
    class Block(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        @xform.flax.remat(policy=xform.policies.save_dots, static_argnums=2)
        def __call__(self, x: jax.Array, power: int = 1) -> jax.Array:
            return jnp.sin(self.dense(x)) ** power

    def f(model: Block, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        body = lambda x, _: (nnx.merge(graphdef, state)(x, 2), None)
        return jnp.sum(jax.lax.scan(body, x, length=3)[0])

    def g(model: Block, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.sin(model.dense(x)) ** 2
        return jnp.sum(x)

    chex.assert_trees_all_close(
        xform.flax.grad(f)(Block(), X), nnx.grad(g)(Block(), X), rtol=1e-5, atol=1e-6
    )
