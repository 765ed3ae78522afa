"""Which layers are found in programs of any structure, and their names."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.diagnosis.networks import WIDTH, batch, plain, scanned, weights
from xform.diagnosis.diagnosis import Diagnosis
from xform.errors import NotDifferentiable, NotScalar, WrongArgument


def found(
    loss: Callable[[Any, Any], Any], params: Any, x: Any
) -> list[tuple[str, str, tuple[int, ...]]]:
    of = Diagnosis(loss, params, x)
    return [(of._name(row.layer), row.layer.kind, row.lengths) for row in of.rows]


def branching(ws: list[Any], x: Any) -> Any:
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ ws[0]), lambda: x @ ws[1]))


def looping(ws: list[Any], x: Any) -> Any:
    return jnp.sum(jax.lax.fori_loop(0, x.shape[0], lambda i, h: jnp.tanh(h @ ws[0]), x))


def unknown(ws: list[Any], x: Any) -> Any:
    going = lambda h: jnp.sum(h**2) > 1
    return jnp.sum(jax.lax.while_loop(going, lambda h: h @ (0.1 * ws[0]), x @ ws[1]))


def looked_up(params: Any, tokens: Any) -> Any:
    return jnp.sum((params["table"][tokens] + params["places"]) @ params["head"])


def calling(ws: list[Any], x: Any) -> Any:
    return jnp.sum(jax.jit(lambda h: jax.nn.gelu(jnp.einsum("bi,io->bo", h, ws[0])))(x) @ ws[1])


def convolved(params: Any, x: Any) -> Any:
    return jnp.sum(jax.nn.silu(jax.lax.conv(x, params["kernel"], (1, 1), "SAME")))


@pytest.mark.parametrize(
    ("loss", "params", "x", "expected"),
    [
        (plain, weights(2), batch(), [("ws.0", "layer", ()), ("ws.1", "layer", ())]),
        (scanned, jnp.stack(weights(3)), batch(), [("ws", "layer", (3,)), ("", "sum", (3,))]),
        (branching, weights(2), batch(), [("ws.0", "layer", ()), ("ws.1", "layer", ())]),
        (looping, weights(1), batch(), [("ws", "layer", (8,))]),
        (unknown, weights(2), batch(), [("ws.1", "layer", ()), ("ws.0", "layer", ())]),
        (calling, weights(2), batch(), [("ws.0", "layer", ()), ("ws.1", "layer", ())]),
        (
            looked_up,
            {"table": jnp.ones((9, 4)), "places": jnp.ones((5, 4)), "head": jnp.ones((4, 2))},
            jnp.zeros((3, 5), int),
            [("table", "layer", ()), ("head", "layer", ())],
        ),
        (
            convolved,
            {"kernel": jnp.ones((4, 2, 3, 3))},
            jnp.ones((2, 2, 6, 6)),
            [("kernel", "layer", ())],
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_layers_of_plain_functions(loss: Any, params: Any, x: Any, expected: Any) -> None:
    names = found(loss, params, x)
    if loss is branching:
        names.sort()
    assert names == expected


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.LayerNorm()(nn.Dense(8)(x)))
        return nn.Dense(4)(x)


def test_modules_of_flax_linen() -> None:
    params = Linen().init(jax.random.key(0), batch())
    module: Any = Linen()
    of = Diagnosis(lambda p, x: jnp.mean(module.apply(p, x) ** 2), params, batch())
    first, last = of.rows
    assert of._name(first.layer) == "params.Dense_0.kernel"
    assert (first.layer.scope, last.layer.scope) == ("Linen/Dense_0", "Linen/Dense_1")
    owned = {of.paths[i] for i, _ in first.layer.weights}
    assert owned == {"params.Dense_0.kernel", "params.Dense_0.bias", "params.LayerNorm_0.scale",
                     "params.LayerNorm_0.bias"}  # fmt: skip
    assert first.layer.activation is not None


def test_modules_of_flax_nnx() -> None:
    graph, params = nnx.split(nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))] * 1))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(nnx.merge(graph, params)[0](x) ** 2)

    of = Diagnosis(loss, params, batch())
    assert sorted(of.paths) == ["params.0.bias", "params.0.kernel"]
    assert [of._name(row.layer) for row in of.rows] == ["params.0"]


def test_modules_of_equinox() -> None:
    model = eqx.nn.MLP(WIDTH, 4, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda p, x: jnp.mean(jax.vmap(eqx.combine(p, static))(x) ** 2)
    assert [name for name, _, _ in found(loss, params, batch())] == [
        "layers.0", "layers.1", "layers.2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "bends"),
    [(jax.nn.relu, True), (jax.nn.gelu, True), (jax.nn.silu, True), (jnp.tanh, True),
     (lambda x: jnp.where(x > 0, x, 0.1 * x), True), (jax.nn.selu, True), (lambda x: 2 * x, False),
     (lambda x: x - x.mean(-1, keepdims=True), False),
     (lambda x: x / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), False),
     (lambda x: jax.nn.softmax(x), False)],
)  # fmt: skip
def test_only_nonlinear_elementwise_functions_are_activations(activation: Any, bends: bool) -> None:
    loss = lambda ws, x: jnp.mean(activation(x @ ws[0]) @ ws[1])
    first = Diagnosis(loss, weights(2), batch()).rows[0].layer
    assert (first.activation is not None) == bends


def test_a_path_around_a_layer() -> None:
    def loss(ws: Any, x: Any) -> Any:
        h = x @ ws[0]
        h = h + jax.nn.relu(h @ ws[1])
        h = jax.nn.relu(h @ ws[2])
        return jnp.mean(h + jax.nn.relu(h @ ws[3]))

    layers = [row.layer for row in Diagnosis(loss, weights(4), batch()).rows]
    around = [layer.bypassed for layer in layers if layer.kind == "layer"]
    assert around == [False, True, False, True]


def test_skip_of_the_batch_bypasses_layer_one_but_use_in_the_loss_does_not() -> None:
    def loss(ws: Any, x: Any) -> Any:
        h = x + jnp.tanh(x @ ws[0])
        h = jnp.tanh(h @ ws[1])
        h = h + jnp.tanh(h @ ws[2])
        return jnp.mean((h @ ws[3] - x) ** 2)

    layers = [row.layer for row in Diagnosis(loss, weights(4), batch()).rows]
    around = [layer.bypassed for layer in layers if layer.kind == "layer"]
    assert around == [True, False, True, False]


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda ws, x: x @ ws[0], NotScalar, "shape"),
        (lambda ws, x: jnp.sum(ws[0]) + jnp.sum(x), WrongArgument, "no layer was found"),
        (
            lambda ws, x: jnp.sum(ws[0] @ ws[1]),
            WrongArgument,
            "pass the trained parameters as params",
        ),
    ],
)
def test_nonscalar_losses_and_losses_without_layers_raise(
    loss: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Diagnosis(loss, weights(2), batch())


def test_effects_are_refused_with_their_line() -> None:
    def loss(ws: Any, x: Any) -> Any:
        jax.debug.print("{x}", x=x)
        return plain(ws, x)

    with pytest.raises(NotDifferentiable, match=r"has a side effect(.|\n)*test_layers.py"):
        Diagnosis(loss, weights(1), batch())
