"""Plans with unchanged loops, compared with all possible plans of a small program."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xform.planner.candidates.as_written import _at_prices, cut_schedules
from xform.planner.costs.link import HostLink
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops, saved_bytes
from xform.planner.plan.decision import Decision
from xform.planner.problem import Problem
from xform.policies import MinCut, min_cut
from xform.program.ir import trace

W, X = jnp.ones((8, 8)) / 9, jnp.ones((16, 8))


def problem_of(f, *args) -> Problem:
    return Problem(trace(lambda *xs: [f(*xs)], *args), (True,) * len(args), (True,))


def small(w, x):
    return jnp.sum(jnp.tanh(jnp.sin(x @ w) @ w[:, :4]))


def unrolled(w, x):
    for _ in range(4):
        x = jnp.tanh(jnp.sin(x @ w) @ w)
    return jnp.sum(x)


def scanned(w, x):
    return jnp.sum(
        lax.scan(lambda x, _: (jnp.tanh(jnp.sin(x @ w) @ w), None), x, None, length=4)[0]
    )


def ends(plans) -> list[tuple[int, int]]:
    return [(saved_bytes(p), recompute_flops(p)) for p in plans]


def test_candidates_include_the_least_work_for_each_size() -> None:
    problem = problem_of(small, W, X)
    joint = problem.joint()
    values = [v for e in joint.forward for v in e.outvars if v not in joint.always_recomputed]
    sets = itertools.chain(*(itertools.combinations(values, n) for n in range(len(values) + 1)))
    every = ends(problem.schedule(Decision(frozenset(s), {})) for s in sets)
    found = ends(cut_schedules(problem))
    for size, _ in every:
        least = min(work for n, work in every if n <= size)
        assert min(work for n, work in found if n <= size) == least


@pytest.mark.parametrize("f", [small, unrolled, scanned])
def test_work_rises_and_no_plan_is_there_twice(f) -> None:
    problem = problem_of(f, W, X)
    found = cut_schedules(problem)
    assert [w for _, w in ends(found)] == sorted(w for _, w in ends(found))
    assert len({(frozenset(p.saved), *e) for p, e in zip(found, ends(found), strict=True)}) == len(
        found
    )
    extremes = [problem.schedule(p) for p in (min_cut, MinCut(0.0, 0.0))]
    assert set(ends(extremes)) <= set(ends(found))
    assert min(n for n, _ in ends(found)) == saved_bytes(extremes[1])
    assert ends(cut_schedules(problem)) == ends(found)


def test_programs_with_nothing_to_recompute_yield_plans_without_work() -> None:
    for f, x in ((lambda x: jnp.sum(2 * x), X), (lambda x: jnp.sum(jnp.sin(x)), jnp.ones((0, 3))),
                 (lambda x: jnp.sin(x), jnp.float32(1))):  # fmt: skip
        found = cut_schedules(problem_of(f, x))
        assert {w for _, w in ends(found)} == {0}
        assert len({n for n, _ in ends(found)}) <= 2


def test_with_a_link_some_values_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(unrolled, W, X)
    fast = HostLink(1.0, float("inf"), latency_seconds=0.0)
    assert not any(map(offloaded_bytes, cut_schedules(problem)))
    monkeypatch.setattr("xform.planner.problem.link_of", lambda device: fast)
    found = cut_schedules(problem)
    assert any(map(offloaded_bytes, found))
    free = [p for p in found if not recompute_flops(p)]
    assert min(map(saved_bytes, free)) < saved_bytes(problem.schedule(MinCut()))


def test_between_two_prices_that_save_the_same_none_is_tried() -> None:
    problem, tried = problem_of(unrolled, W, X), list[float]()

    def of(price: float):
        tried.append(price)
        return problem.schedule(MinCut(price, price))

    prices = [math.inf, *(2.0**-k for k in range(60)), 0.0]
    found = _at_prices(of, prices)
    assert found == [problem.schedule(MinCut(p, p)) for p in prices]
    assert 1 < len(set(found)) < 8
    assert len(set(tried)) < len(prices) / 2
    assert _at_prices(of, [0.5]) == [of(0.5)]


def test_a_plan_recomputes_all_layers_but_not_a_large_last_product() -> None:
    n = 60

    def loss(ws, head, x):
        for w in ws:
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w) @ w
        return jnp.sum(jax.nn.log_softmax(x[:, :2] @ head)[:, 0])

    args, tree = jax.tree.flatten(([W] * n, jnp.ones((2, 512)), X))
    problem = problem_of(lambda *xs: loss(*tree.unflatten(xs)), *args)
    products = [e for e in problem.joint().forward if e.primitive is lax.dot_general_p]
    recomputed = [[id(e) in plan.recomputed for e in products] for plan in cut_schedules(problem)]
    assert any(sum(on) >= 2 * (n - 2) and not on[-1] for on in recomputed)
