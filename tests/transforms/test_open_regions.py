"""Opening the remat regions of others: gradients, plans and bytes."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform import policies

D, WIDE, LAYERS = 32, 128, 4
X = np.sin(np.arange(64.0 * D, dtype=np.float32)).reshape(64, D)
WS = {
    "up": np.cos(np.arange(float(LAYERS * D * WIDE), dtype=np.float32)).reshape(LAYERS, D, WIDE),
    "down": np.sin(np.arange(float(LAYERS * D * WIDE), dtype=np.float32)).reshape(LAYERS, WIDE, D),
}
WS = jax.tree.map(lambda w: w / 16, WS)


def layer(x, w):
    scores = jax.nn.softmax(x @ x.T)
    return x + jax.nn.gelu(jnp.tanh(scores @ x) @ w["up"]) @ w["down"]


def unrolled(mark, ws, x):
    for i in range(LAYERS):
        x = mark(layer)(x, jax.tree.map(operator.itemgetter(i), ws))
    return jnp.mean(x**2)


def scanned(mark, ws, x):
    return jnp.mean(lax.scan(lambda x, w: (mark(layer)(x, w), None), x, ws)[0] ** 2)


def branched(mark, ws, x):
    first = jax.tree.map(lambda w: w[0], ws)
    return jnp.mean(lax.cond(x[0, 0] > 0, mark(layer), lambda x, w: x, x, first) ** 2)


def called(mark, ws, x):
    return jax.jit(lambda ws, x: unrolled(mark, ws, x))(ws, x)


def twice(mark, ws, x):
    return unrolled(lambda f: mark(mark(f)), ws, x)


PROGRAMS = [unrolled, scanned, branched, called, twice]
MARKS = {
    "jax": jax.checkpoint,
    "jax, dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "xform": lambda f: xform.remat(f, policy=policies.save_nothing),
    "xform, min_cut": lambda f: xform.remat(f, policy=policies.min_cut),
}
plain = lambda f: f


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("f", PROGRAMS)
def test_opened_remat_regions_save_as_much_as_unmarked_code(f, mark) -> None:
    marked = lambda ws, x: f(MARKS[mark], ws, x)
    opened = xform.residuals(marked, WS, X, policy=policies.open_regions())
    bare = xform.residuals(lambda ws, x: f(plain, ws, x), WS, X)
    assert opened.total_bytes == bare.total_bytes
    assert len(opened) == len(bare)


@pytest.mark.parametrize("f", PROGRAMS)
def test_gradients_are_those_with_marks(f) -> None:
    marked = lambda ws, x: f(jax.checkpoint, ws, x)
    policy = policies.open_regions()
    close(jax.jit(xform.grad(marked, policy=policy))(WS, X), jax.grad(marked)(WS, X), 1e-5)
    close(xform.grad(marked, policy=policy)(WS, X), jax.grad(marked)(WS, X), 1e-5)


@pytest.mark.parametrize("f", [unrolled, scanned])
def test_as_few_bytes_as_the_author_for_less_work(f, tmp_path) -> None:
    marked = lambda ws, x: f(jax.checkpoint, ws, x)
    author = xform.plan(marked, WS, X)
    assert author.compiled_bytes is not None
    budget = policies.open_regions(policies.budget(author.compiled_bytes))
    plan = xform.plan(marked, WS, X, policy=budget)
    assert plan.compiled_bytes is not None
    assert plan.compiled_bytes <= author.compiled_bytes
    assert plan.recompute_flops < author.recompute_flops
    # A plan knows that its regions are opened, also when it is loaded from a file.
    plan.save(tmp_path / "plan.json")
    for policy in (plan, xform.Plan.load(tmp_path / "plan.json")):
        close(jax.jit(xform.grad(marked, policy=policy))(WS, X), jax.grad(marked)(WS, X), 1e-5)


def test_marks_in_custom_rules_stay() -> None:
    @jax.custom_vjp
    def doubled(x):
        return jax.checkpoint(jnp.sin)(x)

    doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))
    f = lambda x: jnp.sum(doubled(x))
    close(jax.jit(xform.grad(f, policy=policies.open_regions()))(X), 2 * np.cos(X), 1e-6)
