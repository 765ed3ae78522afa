"""Orders of low memory: valid, with the reported peak, the best of those tried."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.calls import counted
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.gain import GainFusion
from xform.planner.simulate.orders import _Orders, least_memory_order
from xform.planner.simulate.profiles import GPU
from xform.program.ir import trace


def groups_of(f, *args):
    flat = flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), GPU)
    fusion = GainFusion(flat, GPU)
    return fusion.groups, fusion.base_of, flat.outputs


def program(seed: int):
    """Products of earlier values, of several sizes; unread values are returned."""
    random = np.random.default_rng(seed)

    def f(*xs):
        values = list(xs)
        for _ in range(6):
            a, b = (values[int(i)] for i in random.integers(0, len(values), 2))
            n = int(random.integers(1, 4))
            values.append((a @ b.T)[:, : 16 * n] @ jnp.ones((min(16 * n, a.shape[0]), 64)))
        return values[-2:]

    return f, [jnp.ones((64, 64)) for _ in range(2)]


def peak(order, base_of, outputs) -> int:
    """Return the most live bytes: each group's result, and earlier values that are still read."""
    made = [[c for c in g.root.results if c not in base_of] for g in order]
    reads = [{base_of.get(c, c) for c in g.reads} for g in order]
    stay = {base_of.get(c, c) for c in outputs}
    most = 0
    for i in range(len(order)):
        live = [c for values in made[:i] for c in values
                if c in stay or any(c in later for later in reads[i:])]  # fmt: skip
        most = max(most, sum(c.bytes for c in (*live, *made[i])))
    return most


def valid(order) -> bool:
    there: set = set()
    makers = {c for g in order for c in g.root.results}
    for g in order:
        if not {c for c in g.reads if c in makers} <= there:
            return False
        there.update(g.root.results)
    return True


@pytest.mark.parametrize("seed", range(6))
def test_an_order_is_valid_and_the_best_of_three(seed: int) -> None:
    f, args = program(seed)
    groups, base_of, outputs = groups_of(f, *args)
    work = _Orders(groups, base_of, outputs, lambda g: 0)
    ways = [work.list_schedule(), work.depth_first(weighted=True), work.depth_first(weighted=False)]
    for way in ways:
        assert sorted(way) == list(range(len(groups)))
        order = [groups[i] for i in way]
        assert valid(order)
        assert work.peak(way) == peak(order, base_of, outputs)
    chosen = least_memory_order(groups, base_of, outputs, lambda g: 0)
    assert valid(chosen)
    assert peak(chosen, base_of, outputs) == min(map(work.peak, ways))


def test_order_of_a_small_program_has_the_least_peak_of_all_orders() -> None:
    def f(x):
        large = [(x * k) @ x.T for k in (1.0, 2.0)]
        return [(a @ a)[:, :1] for a in large]

    groups, base_of, outputs = groups_of(f, jnp.ones((64, 64)))
    assert len(groups) < 10
    every = (p for p in itertools.permutations(groups) if valid(p))
    least = min(peak(order, base_of, outputs) for order in itertools.islice(every, 3_000))
    assert (
        peak(least_memory_order(groups, base_of, outputs, lambda g: 0), base_of, outputs) <= least
    )


def test_the_peak_includes_bytes_used_inside_a_group() -> None:
    f, args = program(0)
    groups, base_of, outputs = groups_of(f, *args)
    work = _Orders(groups, base_of, outputs, lambda g: 10**9 if g is groups[0] else 0)
    assert work.peak(work.list_schedule()) > 10**9


def test_least_memory_order_takes_near_linear_work() -> None:
    def work(n: int) -> int:
        def f(x):
            for _ in range(n):
                x = jnp.sin(x @ x)
            return x

        groups, base_of, outputs = groups_of(f, jnp.ones((8, 8)))
        return counted(lambda: least_memory_order(groups, base_of, outputs, lambda g: 0))[0]

    assert work(400) < 6 * work(100)
