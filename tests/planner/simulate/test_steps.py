"""Values and steps compare by identity, even if they look equal."""

import jax.numpy as jnp
import pytest

from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue, repeat_p, wait_p
from xform.program.ir import trace
from xform.registry.table import RULES, traits


def step() -> FlatStep:
    (eqn,) = trace(lambda x: [jnp.sin(x)], jnp.ones(3)).equations
    return FlatStep(
        eqn.primitive,
        traits(eqn.primitive),
        eqn,
        [FlatValue(12, "input", (3,))],
        [FlatValue(12, "computed")],
    )


def test_two_values_of_one_type_are_two() -> None:
    """They are keys of dictionaries."""
    one, other = FlatValue(4, "computed", (1,)), FlatValue(4, "computed", (1,))
    assert one != other
    assert len({one, other, one}) == 2
    first, second = step(), step()
    assert len({first, second, first}) == 2


def test_readers_are_each_cells_own() -> None:
    one, other = FlatValue(4, "computed"), FlatValue(4, "computed")
    one.readers.append(step())
    assert other.readers == []
    assert (one.maker, one.shape, step().left_sums_last_axis, step().initial_values) == (
        None,
        (),
        False,
        (),
    )


def test_steps_reject_new_attributes_and_programs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        step().note = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        FlatProgram((), (), ()).steps = (step(),)  # pyright: ignore[reportAttributeAccessIssue]


def test_repeat_and_wait_primitives_have_no_registered_rules() -> None:
    assert repeat_p is not wait_p
    assert not {repeat_p, wait_p} & set(RULES)
    assert not traits(repeat_p).fusible
