"""The solver: its answers are read, and Ctrl-C stops it."""

import _thread
import itertools
import signal
import threading
import time

import numpy as np
import pytest

from xform import errors
from xform.planner.cuts import highs
from xform.planner.cuts.highs import Model


def knapsack(n: int, seed: int) -> Model:
    """Return a knapsack: items left out cost, items taken have a size."""
    random = np.random.default_rng(seed)
    model = Model()
    for cost, size in random.integers(1, 50, (n, 2)):
        left = model.column(cost=float(cost), flops=float(cost))
        taken = model.column(size=float(size))
        one = model.column()
        model.lower[one] = 1.0
        model.row((left, 1.0), (taken, 1.0), (one, -1.0))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_exact_solution_has_the_least_cost_and_bound_is_below_it(seed: int) -> None:
    n, budget = 8, 60.0
    model = knapsack(n, seed)
    costs, sizes = model.cost[::3], model.size[1::3]
    ways = itertools.product((0, 1), repeat=n)
    least = min(np.dot(costs, 1 - np.array(w)) for w in ways if np.dot(sizes, w) <= budget)
    x = model.solve(budget, model.cost, np.inf, exact=True)
    assert x is not None
    assert np.dot(x, model.cost) == pytest.approx(least)
    bound = model.bound(budget, np.inf)
    assert bound is not None
    assert 0 < bound <= least + 1e-6


def test_infeasible_problems_return_none() -> None:
    model = knapsack(3, 0)
    model.upper = [0.0 if i % 3 == 0 else 1.0 for i in range(9)]  # all items are taken
    assert model.solve(1.0, model.cost, np.inf) is None
    assert model.solve(1.0, model.cost, np.inf, exact=True) is None
    assert model.bound(1.0, np.inf) is None


def test_to_be_sure_is_an_error_where_the_solver_stops_early(monkeypatch) -> None:
    milp = highs.scipy.optimize.milp
    hasty = lambda cost, options, **given: milp(cost, options={"time_limit": 0.0}, **given)
    monkeypatch.setattr(highs.scipy.optimize, "milp", hasty)
    model = knapsack(60, 1)
    with pytest.raises(errors.NotSolved, match=r"HiGHS stopped(.|\n)*solver='auto'"):
        model.solve(400.0, model.cost, np.inf, exact=True)


def test_ctrl_c_stops_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    begun = time.perf_counter()
    threading.Timer(0.3, _thread.interrupt_main).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            highs._interruptible(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - begun < 30


def test_an_error_in_the_solver_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        highs._interruptible(lambda: 1 / 0)
