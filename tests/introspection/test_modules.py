"""Equinox modules as arguments of the plain transforms, against Equinox's filtered ones."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import xform
from xform.errors import WrongArgument, WrongDtype

eqx = pytest.importorskip("equinox")

X = jnp.sin(jnp.arange(3.0))


class Model(eqx.Module):
    """Arrays, a function, a string, an integer array and a number among the leaves."""

    mlp: Any
    count: jax.Array
    name: str
    rate: float


def model() -> Model:
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    return Model(mlp, jnp.int32(2), "model", 0.5)


def loss(model: Model, x: jax.Array) -> jax.Array:
    assert model.name == "model"
    return jnp.sum(model.mlp(x) ** 2) * model.rate * model.count


def step(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
    value, g = xform.value_and_grad(loss)(model, x)
    return eqx.apply_updates(model, jax.tree.map(lambda a: -0.1 * a, g)), value


@pytest.mark.parametrize("policy", [None, xform.policies.save_everything])
def test_gradients_have_the_structure_of_equinox(policy: Any) -> None:
    wanted = eqx.filter_grad(loss)(model(), X)
    chex.assert_trees_all_close(xform.grad(loss, policy=policy)(model(), X), wanted)
    both = lambda pair: loss(*pair)  # inside another pytree
    got = xform.grad(both, policy=policy)((model(), X))
    chex.assert_trees_all_close(got[0], wanted)
    assert got[0].mlp.activation is None
    assert got[0].count is None


def test_every_transform_takes_a_module() -> None:
    m = model()
    wanted = eqx.filter_grad(loss)(m, X)
    slope = sum(jnp.vdot(a, a) for a in jax.tree.leaves(wanted))
    chex.assert_trees_all_close(xform.vjp(lambda m: loss(m, X), m)[1](1.0)[0], wanted)
    chex.assert_trees_all_close(xform.jacrev(loss)(m, X), wanted)
    chex.assert_trees_all_close(xform.jacfwd(loss)(m, X), wanted)
    chex.assert_trees_all_close(
        xform.fwd_and_bwd(loss, 0, jitted=False)[0](m, X)[1](1.0)[0], wanted
    )
    at = lambda m: loss(m, X)
    chex.assert_trees_all_close(xform.jvp(at, (m,), (wanted,))[1], slope)
    chex.assert_trees_all_close(xform.linearize(at, m)[1](wanted), slope)
    chex.assert_trees_all_close(
        xform.hvp(at, (m,), (wanted,)),
        eqx.filter_jvp(eqx.filter_grad(at), (m,), (wanted,))[1],
    )


def test_a_module_in_questions() -> None:
    m = model()
    kept = xform.residuals(loss, m, X, argnums=0)
    assert {"m.mlp.layers[1].weight", "model.mlp.layers[1].weight"} & {r.operation for r in kept}
    types = eqx.filter_eval_shape(model)
    made = xform.plan(loss, types, X, argnums=0)
    assert made.compiled_bytes == xform.plan(loss, m, X, argnums=0).compiled_bytes
    wanted = eqx.filter_grad(loss)(m, X)
    got = eqx.filter_jit(xform.grad(loss, policy=made))(m, X)
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


def test_memory_of_a_step_is_that_of_its_arrays() -> None:
    m = model()
    report = xform.memory_analysis(step, m, X)
    arrays, held = eqx.partition(m, eqx.is_array)

    def plain(arrays: Any, x: jax.Array) -> Any:
        new, value = step(eqx.combine(arrays, held), x)
        return eqx.filter(new, eqx.is_array), value

    compiled = jax.jit(plain).lower(arrays, X).compile().memory_analysis()
    assert report.argument_bytes == compiled.argument_size_in_bytes
    assert report.output_bytes == compiled.output_size_in_bytes
    assert report.temp_bytes == compiled.temp_size_in_bytes
    assert xform.memory_analysis(step, m, x=X, donate_argnums=0).alias_bytes > 0


def test_strings_outside_modules_and_filter_jit_functions_raise() -> None:
    with pytest.raises(WrongDtype, match="type str is not an array"):
        xform.grad(lambda pair: pair[1])(("a", 1.0))
    with pytest.raises(WrongDtype, match="type str is not an array"):
        xform.grad(lambda pair, x: loss(pair[0], x))((model(), "a"), X)
    with pytest.raises(WrongArgument, match="filter_jit"):
        xform.memory_analysis(eqx.filter_jit(step, donate="all"), model(), X)
