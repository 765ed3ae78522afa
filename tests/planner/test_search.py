"""The search for the plans of several derivatives, with a compiler that answers from a table."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.errors import BudgetInfeasible
from xform.planner.choice import Choice, ChoiceFront
from xform.planner.front import front
from xform.planner.measure import Measure
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.search import search
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


class Compiler(Measure):
    """A compiler that answers with the simulated peak, times a factor for each choice."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(self._answer)
        self.compiled: list[Choice] = []
        self._random = None if seed is None else np.random.default_rng(seed)

    def _answer(self, choice: Choice) -> float:
        assert choice.key not in [one.key for one in self.compiled], "compiled twice"
        self.compiled.append(choice)
        return size(choice) * (1.0 if self._random is None else self._random.uniform(0.98, 1.02))


def size(choice: Choice) -> int:
    return choice.peak + OUTSIDE


def find(budget: int, compiler: Compiler | None = None) -> Choice:
    found = search(PROBLEMS, Budget(budget), DEFAULT, compiler or Compiler())
    return Choice(PROBLEMS, found)


START = Choice(PROBLEMS, DEFAULT)


@pytest.mark.parametrize("share", [1.0, 0.95, 0.9, 0.87])
def test_at_most_eight_choices_are_compiled_and_each_once(share: float) -> None:
    compiler, budget = Compiler(), int(share * size(START))
    found = find(budget, compiler)
    assert size(found) <= budget
    assert (found.candidates == DEFAULT) == (share == 1.0)
    assert len(compiler.compiled) <= 8


@pytest.mark.parametrize(("factor", "share"), [(0.8, 0.8), (0.7, 0.85), (0.6, 0.8)])
def test_plans_that_compile_smaller_than_simulated_are_found(factor: float, share: float) -> None:
    def compiled(choice: Choice) -> float:
        return size(choice) * (factor if choice.work[0] else 1.0)

    measure, budget = Measure(compiled), int(share * size(START))
    found = Choice(PROBLEMS, search(PROBLEMS, Budget(budget), DEFAULT, measure))
    fitting = [choice.work for choice in ChoiceFront(PROBLEMS) if compiled(choice) <= budget]
    assert found.work == min(fitting)
    assert measure.compiles <= 4


def test_a_refusal_names_the_least_bytes_of_all_that_were_compiled() -> None:
    compiler = Compiler()
    with pytest.raises(BudgetInfeasible, match="the largest of 2 derivatives") as refused:
        find(OUTSIDE, compiler)
    whole = [one for one in compiler.compiled if not one.in_slices]
    assert refused.value.floor_bytes == min(map(size, whole))
    assert len(whole) <= 8
    assert len(compiler.compiled) <= len(whole) + 1  # one in slices, for the remedy


@pytest.mark.parametrize("seed", range(4))
def test_smaller_budgets_take_more_work_and_are_kept(seed: int) -> None:
    smallest = ChoiceFront(PROBLEMS).smallest()[0]
    work = (0, 0)
    for budget in np.linspace(size(START), 1.05 * size(smallest), 8):
        compiler = Compiler(seed)
        found = find(int(budget), compiler)
        assert compiler.bytes(found) <= budget
        assert found.work[0] >= 0.98 * work[0]  # the compiler differs by two percent
        work = found.work


def test_choices_rise_in_work_and_fall_in_bytes() -> None:
    choices = list(ChoiceFront(PROBLEMS))
    assert len(choices) > 3
    for one, other in itertools.pairwise(choices):
        # Two plans may recompute equal FLOPs and hold other values.
        assert (one.work, -one.peak) <= (other.work, -other.peak)
        assert one.peak >= other.peak
        changed = [k for k in PROBLEMS if one.candidates[k] is not other.candidates[k]]
        assert changed == [one.largest]


def test_a_plan_is_as_good_as_every_pair_of_plans_on_the_fronts() -> None:
    """By brute force: no pair of plans that fits recomputes less."""
    plans = {k: list(front(problem)._plans) for k, problem in PROBLEMS.items()}  # pyright: ignore
    pairs = [Choice(PROBLEMS, dict(zip(plans, pair, strict=True)))
             for pair in itertools.product(*plans.values())]  # fmt: skip
    for choice in ChoiceFront(PROBLEMS):
        best = min(pair.work for pair in pairs if pair.peak <= choice.peak)
        assert choice.work == best


def test_the_simulation_decides_without_a_compiler() -> None:
    budget = int(0.8 * START.peak)
    found = Choice(PROBLEMS, search(PROBLEMS, Budget(budget), DEFAULT))
    assert found.peak <= budget
    assert found.work > START.work
