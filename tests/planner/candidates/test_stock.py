"""JAX's stock policies, names and the author's marks are candidates of every budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform import policies
from xform.planner.candidates.stock import stock_candidates
from xform.planner.problem import Problem
from xform.program.ir import trace

SAVE = jax.checkpoint_policies
MARKS = {
    "everything": SAVE.everything_saveable,
    "nothing": SAVE.nothing_saveable,
    "products": SAVE.dots_with_no_batch_dims_saveable,
    "one name": SAVE.save_only_these_names("o"),
    "two names": SAVE.save_only_these_names("h", "o"),
}
W, X = jnp.ones((3, 6, 64, 64)) / 50, jnp.ones((128, 64))


def layer(x, w):
    q, k, v = (checkpoint_name(x @ w[i], name) for i, name in enumerate("qkv"))
    x = x + checkpoint_name((jax.nn.softmax(q @ k.T / 8) @ v) @ w[3], "o")
    h = checkpoint_name(jnp.tanh(x) @ w[4], "h")
    return x + jax.nn.gelu(h) @ w[5]


def model(mark: str, scanned: bool = False):
    marked = jax.checkpoint(layer, policy=MARKS[mark])

    def f(ws, x):
        if scanned:
            return jnp.sum(lax.scan(lambda x, w: (marked(x, w), None), x, ws)[0] ** 2)
        for w in ws:
            x = marked(x, w)
        return jnp.sum(x**2)

    return f


def problem(f, regions="open") -> Problem:
    return Problem(trace(lambda *xs: [f(*xs)], W, X), (True, True), (True,), regions=regions)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("mark", MARKS)
def test_at_the_bytes_of_the_author_no_more_is_run_again(mark: str, scanned: bool) -> None:
    f = model(mark, scanned)
    author = xform.plan(f, W, X, policy=policies.save_everything)
    budget = policies.budget(author.compiled_bytes)
    opened = xform.plan(f, W, X, policy=policies.open_regions(budget))
    assert opened.compiled_bytes <= budget.bytes
    assert opened.recompute_flops <= author.recompute_flops
    assert opened.compiles <= 8


def test_a_plan_of_the_author_s_own_is_one_of_marked_regions() -> None:
    """It is replayed on the marked program, and gives JAX's gradient."""
    f = model("one name")
    least = xform.plan(f, W, X, policy=policies.save_everything)
    policy = policies.open_regions(policies.budget(least.compiled_bytes))
    made = xform.plan(f, W, X, policy=policy)
    assert made.regions in ("marked", "open")
    got, want = jax.jit(xform.grad(f, policy=made))(W, X), jax.jit(jax.grad(f))(W, X)
    assert jnp.allclose(got, want, rtol=1e-4, atol=1e-6)


def test_each_stock_policy_and_each_name_is_there() -> None:
    of = problem(model("nothing"))
    made = stock_candidates(of)
    assert stock_candidates(of) is made
    plans = {id(c.schedule) for c in made}
    for policy in (policies.save_nothing, policies.save_dots, policies.save_only_these_names("q")):
        assert id(of.schedule(policy)) in plans
    assert {c.regions for c in made} == {"open", "marked"}
    marked = stock_candidates(dataclasses.replace(of, regions="marked"))
    assert {c.regions for c in marked} == {"marked"}


def test_no_stock_policy_calls_back_again() -> None:
    def f(w, x):
        for i in range(2):
            scale = jax.pure_callback(np.float32, jax.ShapeDtypeStruct((), jnp.float32), i)
            x = jnp.sin(x @ w[0, i] * scale)
        return jnp.sum(x)

    of = problem(f, "marked")
    assert of.schedule(policies.save_nothing).saved == ()
    assert all(c.schedule.saved for c in stock_candidates(of))


def test_names_of_closed_regions_are_left_out() -> None:
    """A region saves what its author decided, so a budget does not try its names."""
    closed = stock_candidates(problem(model("one name"), "marked"))
    unnamed = stock_candidates(problem(lambda w, x: jnp.sum(jnp.sin(x @ w[0, 0]) ** 2), "marked"))
    assert len(closed) == len(unnamed)
