"""The errors of budgets that no plan fits: their numbers, counted by hand."""

import inspect

import jax.numpy as jnp
import pytest
from jax import lax

from tests.planner.cuts.test_integer_program import joint_of
from xform import policies
from xform.errors import BudgetInfeasible
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule
from xform.planner.infeasible import infeasible, largest_values, over_budget
from xform.terminal.text import human_bytes

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def loss(w, x):
    x = jnp.exp(jnp.sin(x @ w))  # LINE
    return jnp.sum(lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=7)[0])


def how(f=loss, *args, policy=policies.save_everything):
    return schedule(joint_of(f, *(args or (W, X))), policy, "cpu")


def line() -> int:
    lines, start = inspect.getsourcelines(loss)
    return start + next(i for i, text in enumerate(lines) if "LINE" in text)


def test_the_largest_values_are_named_with_their_trips_and_lines() -> None:
    rows = largest_values(how())
    assert len(rows) == 3
    stacked, single = rows[:2], rows[2]
    assert all(row.startswith("float32[4,8] x 7 of ") for row in stacked)
    assert single.startswith("float32[4,8] of ")
    assert f"test_infeasible.py:{line()}" in single


def test_too_much_is_saved() -> None:
    floor = how()
    error = over_budget(floor, policies.budget(100, of="saved"), saved_bytes(floor))
    assert isinstance(error, BudgetInfeasible)
    assert error.floor_bytes == saved_bytes(floor)
    assert f"the smallest plan saves {human_bytes(saved_bytes(floor))}: float32[4,8] x 7" in str(
        error
    )
    assert "policy=budget('100 B', of='saved')" in str(error)
    assert "test_infeasible.py" in error.where
    assert " x 7" not in error.where


def test_the_peak_is_too_high() -> None:
    floor = how()
    error = infeasible(policies.budget(100), floor, 5 * 1024, "simulated", 2048)
    said = str(error)
    assert error.floor_bytes == 5 * 1024
    assert "is 5.0 KiB (simulated)" in said
    # Arguments with the cotangent of the loss; the loss with both gradients.
    assert ", 2.0 KiB outside the derivative, the rest temporary" in said
    size = human_bytes(W.nbytes + X.nbytes + 4)
    assert (
        f"arguments {size}, outputs {size}, saved values {human_bytes(saved_bytes(floor))} ("
        in said
    )


@pytest.mark.parametrize("args", [(jnp.ones((0, 8)),), (jnp.float32(1),)])
def test_where_nothing_is_saved_no_line_is_named(args) -> None:
    floor = how(lambda x: jnp.sum(2 * x), *args)
    assert largest_values(floor) == []
    error = infeasible(policies.budget(1), floor, 7, "compiled", -8)
    assert "saved values 0 B, the rest temporary" in str(error)
    assert error.where == ""
    assert over_budget(floor, policies.budget(0, of="saved"), 7).where == ""
