"""Branches selected by an index, by a batched index, or by platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

import xform
from tests.reference import close, grads_agree
from tests.rules.programs import POLICIES, X, bend, bowl, named

pytestmark = pytest.mark.usefixtures("x64")

SWITCHES = {
    "a branch that is constant": lambda x, i: lax.switch(i, [bend, lambda x: jnp.ones(3)], x),
    "branches that use different operands": lambda x, i: lax.switch(
        i, [lambda a, b: a * 2, lambda a, b: bend(b)], x, x * x
    ),
    "an operand passed through": lambda x, i: lax.switch(i, [lambda x: x, bend], x),
    "integer results": lambda x, i: lax.switch(
        i, [lambda x: (x * x, 1), lambda x: (bend(x), 2)], x
    )[0],
    "one branch": lambda x, i: lax.switch(0 * i, [bend], x),
    "index out of range": lambda x, i: lax.switch(i + 5, [bend, bowl], x),
    "residuals of many types, float32 among them": lambda x, i: lax.switch(
        i,
        [
            lambda x: bend(bend(x).astype(jnp.float32)).astype(x.dtype) * jnp.sum(bowl(x)),
            lambda x: bowl(jnp.sum(x) ** 2) * jnp.where(x > 0, x, bend(x)),
        ],
        x,
    ),
    "a nan in the branch not taken": lambda x, i: (
        lax.switch(i, [lambda x: jnp.log(x * x), lambda x: jnp.log(-jnp.abs(x))], x) * (1 - i)
    ),
    "loops of different lengths": lambda x, i: lax.switch(
        i,
        [
            lambda x: lax.scan(lambda c, _: (bend(c) * x, None), x, None, length=2)[0],
            lambda x: lax.scan(lambda c, _: (bowl(c) * x, None), x, None, length=4)[0],
        ],
        x,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_branches(name: str) -> None:
    f = SWITCHES[name]
    indices = (0,) if "nan" in name else (0, 1)
    for i in indices:
        grads_agree(
            lambda x, i: jnp.sum(f(x, i) * x),
            X,
            np.int32(i),
            policies=POLICIES[::2],
            ways=("vmap",) if "nan" not in name else ("jit",),
            tolerance=1e-6 if "float32" in name else 1e-10,
        )


def test_a_switch_whose_index_is_batched() -> None:
    def f(x, i):
        return jnp.sum(lax.switch(i, [bend, lambda x: named(bowl(x)) * x, jnp.square], x))

    xs, at = jnp.stack([X, X + 1, X - 1]), jnp.arange(3)
    for policy in POLICIES:
        close(jax.vmap(xform.grad(f, policy=policy))(xs, at), jax.vmap(jax.grad(f))(xs, at))


def test_a_predicate_that_depends_on_the_input() -> None:
    grads_agree(lambda x: jnp.sum(lax.cond(jnp.sum(x) > 0, bend, jnp.square, x) * x), X)


def only_elsewhere(x):
    """A kernel of another platform, which cannot be lowered here."""
    return elsewhere_p.bind(x)


elsewhere_p = Primitive("test_elsewhere")
elsewhere_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[elsewhere_p] = lambda xs, axes: (elsewhere_p.bind(*xs), axes[0])


@pytest.mark.parametrize("jitted", [False, True])
def test_a_branch_of_another_platform_is_never_compiled(jitted: bool) -> None:
    xform.extend.linear(elsewhere_p, lambda ct, x: elsewhere_p.bind(ct))

    def f(x):
        branches = {"cpu": lambda x: jnp.sin(x) * x, "tpu": only_elsewhere}
        return lax.platform_dependent(x, default=only_elsewhere, **branches)

    how = jax.jit if jitted else lambda f: f
    g = lambda x: jnp.sin(x) * x
    ways = (
        lambda f: xform.grad(f)(2.0),
        lambda f: xform.jvp(f, (2.0,), (1.0,)),
        lambda f: xform.linearize(f, 2.0)[1](1.0),
        lambda f: jax.vmap(xform.grad(f))(jnp.arange(2.0)),
        lambda f: xform.grad(xform.grad(f))(2.0),
        lambda f: xform.grad(lambda x: xform.passes.Pipeline([xform.passes.Cse()])(f)(x))(2.0),
    )
    for way in ways:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            how(lambda: way(jax.jit(f)))(),  # noqa: B023
            way(g),
        )


def test_one_branch_offloads_a_value_that_the_other_does_not_have() -> None:
    policy = xform.policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    branches = lambda x: jnp.sin(jnp.outer(x, x) @ x), bowl
    f = lambda x: jnp.sum(lax.cond(x[0] > 0, *branches, x) * x)
    close(jax.jit(xform.grad(f, policy=policy))(X), jax.grad(f)(X))
