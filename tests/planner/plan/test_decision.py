"""A Plan's decisions, and plans from decisions, for all possible plans of a small program."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.emitted import emitted
from tests.planner.cuts.test_integer_program import joint_of
from xform.interpret.node import fork_p
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule
from xform.planner.plan.decision import Decision, decision_of
from xform.policies import MinCut, min_cut, save_everything
from xform.program.ir import evaluate

W = jnp.asarray(np.cos(np.arange(16.0)).reshape(4, 4) / 2)
X = jnp.asarray(np.sin(np.arange(12.0)).reshape(3, 4))


def small(w, x):
    return jnp.sum(jnp.exp(jnp.sin(x @ w) @ w) * x)


def loop(w, x):
    return jnp.sum(lax.scan(lambda x, _: (jnp.sin(jnp.sin(x @ w) @ w), None), x, None, length=4)[0])


def subsets(values):
    return itertools.chain(*(itertools.combinations(values, n) for n in range(len(values) + 1)))


def right(f, how) -> None:
    got = evaluate(emitted(how), [W, X, jnp.ones(())])[1:]
    for a, b in zip(got, jax.grad(f, (0, 1))(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_schedules_save_no_more_than_decided_and_keep_gradients() -> None:
    joint = joint_of(small, W, X)
    values = [v for e in joint.forward for v in e.outvars]
    sets = [frozenset(s) for s in subsets(values)]
    schedules = {saved: schedule(joint, Decision(saved, {}), "cpu") for saved in sets}
    for saved, how in schedules.items():
        assert saved.issuperset(how.saved)
    distinct = {frozenset(how.saved): how for how in schedules.values()}
    assert 8 < len(distinct) < len(sets)
    for how in list(distinct.values())[::5]:
        right(small, how)


def test_gradients_hold_for_any_saved_values_in_a_loop() -> None:
    joint = joint_of(loop, W, X)
    (eqn,) = (e for e in joint.forward if e.primitive is fork_p)
    node = eqn.params["node"]
    (inner,) = node.joints
    values = [v for e in inner.forward for v in e.outvars]
    sizes = set()
    for saved in subsets(values):
        made = Decision(frozenset(eqn.outvars), {node: (Decision(frozenset(saved), {}),)})
        how = schedule(joint, made, "cpu")
        sizes.add(saved_bytes(how))
        if len(saved) in (0, len(values)):
            right(loop, how)
    # The state in each iteration, and the same number of values in each.
    assert {n % (4 * X.nbytes) for n in sizes} == {0}
    assert min(sizes) == 4 * X.nbytes < max(sizes)


@pytest.mark.parametrize("policy", [min_cut, MinCut(0.0, 0.0), save_everything])
@pytest.mark.parametrize("f", [small, loop, lambda w, x: jnp.float32(1)])
def test_the_decisions_of_a_plan_give_the_plan(f, policy) -> None:
    joint = joint_of(f, W, X)
    how = schedule(joint, policy, "cpu")
    again = schedule(joint, decision_of(how), "cpu")
    assert set(again.saved) == set(how.saved)
    assert again.order == how.order
    assert (again.recomputed, again.reads) == (how.recomputed, how.reads)


def test_calls_of_one_function_share_one_decision() -> None:
    @jax.jit
    def block(x, w):
        for _ in range(60):  # long enough to stay a call
            x = jnp.sin(x)
        return x @ w

    how = schedule(joint_of(lambda w, x: jnp.sum(block(block(x, w), w) ** 2), W, X), min_cut, "cpu")
    first, second = decision_of(how).inner.values()
    assert first[0] is second[0]
    assert decision_of(how) is decision_of(how)


def test_a_loop_that_is_not_kept_is_run_again() -> None:
    joint = joint_of(loop, W, X)
    (eqn,) = (e for e in joint.forward if e.primitive is fork_p)
    again = schedule(joint, Decision(frozenset(), {}), "cpu")
    assert (saved_bytes(again), id(eqn) in again.recomputed) == (0, True)
    right(loop, again)


def test_a_region_that_is_not_named_decides_for_itself() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    inner = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), policy=policy)
    joint = joint_of(lambda w, x: jnp.sum(inner(x, w)), W, X)
    tokens = frozenset(e.outvars[-1] for e in joint.forward if e.primitive is fork_p)
    assert saved_bytes(schedule(joint, Decision(tokens, {}), "cpu")) == 2 * X.nbytes


def test_decision_sets_the_number_of_stored_loop_states() -> None:
    how = schedule(joint_of(loop, W, X), min_cut, "cpu")
    (node,) = how.inner
    (inner,) = decision_of(how).inner[node]
    stored = dataclasses.replace(inner, snapshots=2)
    made = schedule(
        how.joint, dataclasses.replace(decision_of(how), inner={node: (stored,)}), "cpu"
    )
    (found,) = decision_of(made).inner[node]
    assert (found.snapshots, made.inner[node][0].snapshots) == (2, 2)
    right(loop, made)
