"""The bytes that a Plan saves, value by value, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.planner.cuts.test_integer_program import joint_of
from xform import policies
from xform.interpret import emit
from xform.interpret.joint import analyze
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.costs.saved_values import device_bytes, saved_values, state_reason
from xform.planner.decide import schedule
from xform.planner.problem import Problem
from xform.program.ir import trace

W, X = jnp.ones((4, 4)) / 5, jnp.ones((3, 4))
ONE = 3 * 4 * 4


def of(f, *args, policy=policies.save_everything):
    """Return the saved bytes by kind."""
    rows = saved_values(schedule(joint_of(f, *args), policy, "cpu"))
    made = lambda r: r.origin[0].primitive.name if r.origin else None
    return sorted((r.kind, made(r), r.loops, r.total_bytes) for r in rows)


def scan(step, x, length):
    return lax.scan(lambda x, _: (step(x), None), x, None, length=length)[0]


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_loop_holds_its_state_and_its_factors_in_each_trip(length: int) -> None:
    f = lambda x: jnp.sum(scan(lambda x: jnp.sin(jnp.exp(x)), x, length))
    want = [("kept", name, (length,), length * ONE) for name in ("cos", "exp")]
    assert of(f, X) == want


def test_a_state_that_is_read_is_held_in_each_trip() -> None:
    f = lambda x: jnp.sum(scan(lambda x: x * x, x, 5))
    assert of(f, X) == [("carry", "mul", (5,), 5 * ONE)]


def test_loops_in_a_loop_are_listed_outermost_first() -> None:
    f = lambda x: jnp.sum(scan(lambda x: scan(jnp.exp, x, 2) * 2, x, 7))
    assert of(f, X) == [("kept", "exp", (7, 2), 14 * ONE)]


def test_final_loop_state_is_saved_beside_the_residuals_per_iteration() -> None:
    f = lambda x: jnp.sum(scan(jnp.exp, x, 5) ** 2)
    assert of(f, X) == [("kept", "exp", (), ONE), ("kept", "exp", (5,), 5 * ONE)]


def test_result_of_a_call_that_is_also_its_residual_is_counted_once() -> None:
    @jax.jit
    def block(x):
        for _ in range(60):
            x = jnp.cos(x)  # long enough to stay a call
        return jnp.exp(x)

    rows = of(lambda x: jnp.sum(block(x) ** 2), X)
    assert rows.count(("kept", "exp", (), ONE)) == 1
    assert sum(n for *_, n in rows) == 61 * ONE


def test_branches_share_as_many_bytes_as_are_handed_over() -> None:
    """Only one branch runs, so values of one type from both branches share memory."""
    ways = lambda x: jnp.sin(jnp.exp(x)), lambda x: jnp.exp(x @ W)
    joint = joint_of(lambda x: jnp.sum(lax.cond(x[0, 0] > 0, *ways, x)), X)
    how = schedule(joint, policies.save_everything, "cpu")
    rows = [r for r in saved_values(how) if r.aval.shape == X.shape]
    assert sorted(r.kind for r in rows) == ["kept", "kept", "shared"]
    _, handed = jax.eval_shape(lambda x: emit.forward(how, [x]), X)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(handed))
    assert device_bytes(saved_values(how)) == size


def test_offloaded_values_are_listed_in_pinned_host_memory() -> None:
    policy = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    f = lambda x: jnp.sum(scan(lambda x: jnp.sin(x @ W), x, 5))
    (row,) = saved_values(schedule(joint_of(f, X), policy, "cpu"))
    assert (row.memory, row.total_bytes, device_bytes([row])) == ("pinned_host", 5 * ONE, 0)


@pytest.mark.parametrize(("x", "size"), [
    (jnp.float32(2), 4),
    (jnp.ones((0, 3)), 0),
    (jnp.ones((2, 3), jnp.bfloat16), 12),
])  # fmt: skip
def test_scalars_empty_and_narrow_values(x, size: int) -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(x))).astype(jnp.float32)
    assert of(f, x) == [("kept", "cos", (), size)] * 2


def test_linear_and_integer_operations_save_no_residuals() -> None:
    assert of(lambda x: jnp.sum(3 * x[::-1]), X) == []
    assert of(lambda x, n: jnp.sum(x) * jnp.sum(n * n), X, np.arange(3)) == [
        ("kept", "convert_element_type", (), 4)
    ]


def test_a_value_bears_the_name_that_the_user_gave_and_says_why() -> None:
    f = lambda x: jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "h")))
    (row,) = saved_values(schedule(joint_of(f, X), policies.save_only_these_names("h"), "cpu"))
    assert row.origin is not None
    eqn, name = row.origin
    assert (eqn.primitive.name, name) == ("sin", "h")
    assert row.why == "save_only_these_names:h saves h"


def test_states_that_are_stored_on_the_way_say_so() -> None:
    prog = trace(lambda x: [jnp.sum(scan(lambda x: jnp.sin(x @ W), x, 16))], X)
    ends = prog, (True,), (True,)
    first, *_, last = next(iter(snapshot_candidates(Problem(*ends))))
    for whole in (first, last):
        ((node, (inner,)),) = whole.schedule.inner.items()
        (row,) = saved_values(whole.schedule)
        assert row.loops == (inner.snapshots + 1,)  # and the state from which it runs backward
        assert (
            row.why
            == state_reason(node, inner, node.first_carry)
            == "a state of the loop, from which others are recomputed"
        )
    assert (
        "each iteration"
        in saved_values(schedule(analyze(*ends), policies.save_nothing, "cpu"))[0].why
    )
