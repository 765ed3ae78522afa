"""`xform.equinox` against `equinox`: values, derivatives, structure, and constant leaves."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.errors import NotDifferentiable, WrongArgument, WrongTangent

eqx = pytest.importorskip("equinox")

X = jnp.sin(jnp.arange(3.0))
JITTED = pytest.mark.parametrize("jitted", [False, True])


class Model(eqx.Module):
    """Arrays, a function, a string, an integer array and a number among the leaves."""

    mlp: Any
    scale: jax.Array
    count: jax.Array
    name: str
    rate: float

    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.name == "model"
        return self.mlp(x) * self.scale * self.rate + self.count


def model() -> Model:
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    return Model(mlp, jnp.float32(1.5), jnp.int32(2), "model", 0.5)


def loss(model: Model, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x) ** 2)


def with_aux(model: Model, x: jax.Array) -> Any:
    return loss(model, x), (model(x), "aux")


WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda lib: lib.filter_grad(loss)(model(), X),
    "grad, auxiliary": lambda lib: lib.filter_grad(with_aux, has_aux=True)(model(), X),
    "value_and_grad": lambda lib: lib.filter_value_and_grad(loss)(model(), x=X),
    "decorator": lambda lib: lib.filter_value_and_grad(has_aux=True)(with_aux)(model(), X),
    "vjp": lambda lib: lib.filter_vjp(loss, model(), X)[1](jnp.float32(2.0)),
    "vjp, auxiliary": lambda lib: lib.filter_vjp(with_aux, model(), X, has_aux=True)[::2],
    "jvp": lambda lib: lib.filter_jvp(
        lambda x, y, s: (x * y, y, s, jnp.int32(1)), (2.0, X, "a"), (1.0, None, None)
    ),
    "jvp of a module": lambda lib: lib.filter_jvp(
        loss, (model(), X), (eqx.filter(model(), eqx.is_inexact_array), None)
    ),
    "jacfwd": lambda lib: lib.filter_jacfwd(Model.__call__)(model(), X),
    "jacrev": lambda lib: lib.filter_jacrev(Model.__call__)(model(), X),
    "hessian": lambda lib: lib.filter_hessian(loss)(model().mlp, X),
    "checkpoint": lambda lib: lib.filter_grad(
        lambda m, x: jnp.sum(lib.filter_checkpoint(lambda m, x: (m(x), "a"))(m, x)[0])
    )(model(), X),
    "checkpoint of a module": lambda lib: lib.filter_grad(
        lambda m, x: jnp.sum(lib.filter_checkpoint(m)(x))
    )(model(), X),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@JITTED
def test_results_and_tree_structure_equal_those_of_equinox(way: str, jitted: bool) -> None:
    how = eqx.filter_jit if jitted else lambda f: f
    got, want = (how(lambda: WAYS[way](lib))() for lib in (xform.equinox, eqx))  # noqa: B023
    assert jax.tree.structure(got) == jax.tree.structure(want)
    split = [eqx.partition(tree, eqx.is_array) for tree in (got, want)]
    chex.assert_trees_all_close(split[0][0], split[1][0], rtol=1e-5)
    assert jax.tree.leaves(split[0][1]) == jax.tree.leaves(split[1][1])


def test_a_door_decorates_a_method_and_is_a_pytree() -> None:
    class Owner(eqx.Module):
        w: jax.Array

        @xform.equinox.filter_grad
        def slope(self, x):
            return self.w * x

        @xform.equinox.filter_checkpoint
        def layer(self, x):
            return jnp.sin(self.w * x)

    owner = Owner(jnp.float32(3.0))
    assert float(owner.slope(2.0).w) == 2.0
    np.testing.assert_allclose(xform.grad(owner.layer)(2.0), 3 * np.cos(6.0), rtol=1e-6)
    arrays = eqx.filter(xform.equinox.filter_checkpoint(owner.layer), eqx.is_array)
    assert [float(x) for x in jax.tree.leaves(arrays)] == [3.0]


def test_filter_grad_policy_decides_which_values_are_recomputed() -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(x)))

    def sines(policy: Any) -> int:
        g = xform.equinox.filter_grad(f, policy=policy)
        return str(jax.make_jaxpr(g)(X)).count("sin ")

    assert sines(xform.policies.save_nothing) > sines(xform.policies.save_everything)


def test_model_by_keyword_and_missing_tangents_raise() -> None:
    with pytest.raises(WrongArgument, match="by position"):
        xform.equinox.filter_grad(loss)(model=model(), x=X)
    with pytest.raises(WrongTangent, match="None"):
        xform.equinox.filter_jvp(lambda x, y: x, (1.0, 2.0), (1.0,))


def test_a_dead_custom_vjp_never_makes_a_tangent_vanish() -> None:
    """Activity is found while pushing; if the function were traced first, nothing would move."""
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))

    def dead(x):
        f(x)
        return x * x

    for jvp in (xform.equinox.filter_jvp, lambda f, x, t: xform.jvp(f, x, t)):
        run = lambda x: jvp(dead, (x,), (1.0,))[1]  # noqa: B023
        try:
            assert float(jax.jit(run)(3.0)) == 6.0
        except NotDifferentiable:
            assert jvp is xform.equinox.filter_jvp
