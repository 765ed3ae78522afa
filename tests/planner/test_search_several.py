"""The search for the plans of several derivatives, with a compiler that answers from a table."""

import jax
import jax.numpy as jnp
import pytest

from xform.errors import BudgetInfeasible
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.search_several import Candidates, search_several
from xform.policies import Budget, min_cut
from xform.program.ir import trace


def problem(layers: int) -> Problem:
    def loss(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        for _ in range(layers):
            x = jnp.tanh(jnp.sin(x @ w) @ w)
        return [jnp.sum(x)]

    types = (
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
    )
    return Problem(trace(loss, *types), (True, False), (True,))


PROBLEMS = {"first": problem(6), "second": problem(3)}
DEFAULT = {key: plan_program(one, min_cut) for key, one in PROBLEMS.items()}
OUTSIDE = 2**20  # bytes that the step takes besides its derivatives


def peak(candidates: Candidates) -> int:
    return max(PROBLEMS[key].peak(c.schedule) for key, c in candidates.items()) + OUTSIDE


class Compiler:
    """A compiler that answers with the simulated peak."""

    def __init__(self) -> None:
        self.compiled: list[Candidates] = []

    def measure(self, candidates: Candidates) -> float:
        self.compiled.append(candidates)
        schedules = [tuple(c.schedule for c in one.values()) for one in self.compiled]
        assert len({*schedules}) == len(schedules), "compiled twice"
        return peak(candidates)


@pytest.mark.parametrize("share", [1.0, 0.95, 0.9, 0.87])
def test_at_most_eight_sets_of_plans_are_compiled_and_each_once(share: float) -> None:
    compiler, budget = Compiler(), Budget(int(share * peak(DEFAULT)))
    found = search_several(PROBLEMS, budget, DEFAULT, compiler.measure)
    assert peak(found) <= budget.bytes
    assert (found is DEFAULT) == (share == 1.0)
    assert len(compiler.compiled) <= 8


def test_a_refusal_names_the_least_bytes_of_all_that_were_compiled() -> None:
    compiler = Compiler()
    with pytest.raises(BudgetInfeasible) as refused:
        search_several(PROBLEMS, Budget(OUTSIDE), DEFAULT, compiler.measure)
    assert refused.value.floor_bytes == min(map(peak, compiler.compiled))
    assert len(compiler.compiled) <= 8
