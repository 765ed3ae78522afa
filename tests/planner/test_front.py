"""The Pareto front: fewer bytes never mean less work, whatever was requested before."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.planner.candidates.as_written import cut_schedules
from xform.planner.decide import schedule
from xform.planner.front import Front, LazyCandidates, front
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness
from xform.policies import min_cut
from xform.program.ir import trace

W, X = jnp.ones((24, 8, 8)) / 9, jnp.ones((256, 8))


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ jnp.tile(w, 2)) @ jnp.tile(w, 2).T)


def unrolled(w, x):
    for i in range(6):
        x = layer(x, w[i])
    return jnp.sum(x**2)


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def two_loops(w, x):
    half = lambda x, w: lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w)
    x, sums = half(x, w)
    return jnp.sum(half(jnp.sin(x), w[:8])[0]) + jnp.sum(sums)


def ends(f):
    return Problem(trace(lambda *xs: [f(*xs)], W, X), (True, True), (True,))


def peak(whole) -> int:
    return liveness(whole.schedule, "cpu").total_bytes


def budgets(at) -> list[int]:
    most = liveness(schedule(at.joint(), min_cut, backend="cpu"), "cpu").total_bytes
    return [int(n) for n in np.linspace(most, peak(front(at).smallest()[0]), 20)]


@pytest.mark.parametrize("f", [unrolled, scanned, two_loops])
def test_twenty_budgets_are_kept_and_work_rises(f) -> None:
    at = ends(f)
    found = [front(at).least_recompute(lambda w, n=n: peak(w) <= n) for n in budgets(at)]
    whole = [w for w in found if w is not None]
    assert len(whole) == 20
    sizes, works = [peak(w) for w in whole], [w.work for w in whole]
    assert works == sorted(works)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(works)) > 2


@pytest.mark.parametrize("f", [unrolled, scanned, two_loops])
def test_plans_are_the_same_for_rising_and_falling_budgets(f) -> None:
    forwards, backwards = ends(f), ends(f)
    said = lambda at, n: [(w.work, peak(w), w.shapes) for w in [front(at).least_recompute(
        lambda w: peak(w) <= n)] if w]  # fmt: skip
    sizes = budgets(forwards)[::3]
    falling = [said(forwards, n) for n in sizes]
    rising = [said(backwards, n) for n in reversed(sizes)]
    assert falling == rising[::-1]


def test_the_lowest_are_below_all_others() -> None:
    at = ends(scanned)
    low = [peak(w) for w in front(at).smallest()]
    assert low == sorted(low)
    assert low[0] < min(liveness(how, "cpu").total_bytes for how in cut_schedules(at))
    assert front(at).least_recompute(lambda w: peak(w) < low[0]) is None


def test_plans_are_made_as_far_as_they_are_asked_for() -> None:
    made = []
    at = ends(unrolled)

    def flat():
        found = cut_schedules(at)
        made.append(len(found))
        return found

    here = Front(at, flat, lambda how: liveness(how, "cpu").total_bytes)
    assert not made
    assert here.least_recompute(lambda w: True) is here.least_recompute(lambda w: True)
    assert len(made) == 1


def test_a_list_is_made_once() -> None:
    asked = []
    items = listed(asked.append(i) or i for i in range(4))
    assert [next(iter(items)), *items, *items] == [0, *range(4), *range(4)]
    assert asked == [0, 1, 2, 3]


def test_lazy_candidates_resume_after_an_interrupt_or_memory_error() -> None:
    stops = [KeyboardInterrupt, MemoryError]

    def make():
        for i in range(4):
            if i == 2 and stops:
                raise stops.pop()
            yield i

    items = LazyCandidates(make)  # pyright: ignore[reportArgumentType]
    for error in (MemoryError, KeyboardInterrupt):
        with pytest.raises(error):
            list(items)
    assert list(items) == list(items) == [0, 1, 2, 3]


def test_threads_share_a_list() -> None:
    items = listed(time.sleep(0.01) or i for i in range(20))
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: list(items), range(4))]
    assert found == [[*range(20)]] * 4


def listed(items) -> LazyCandidates:
    return LazyCandidates(lambda: iter(items))
