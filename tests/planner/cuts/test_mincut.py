"""Cuts are as cheap as the best of all cuts, found by trying them."""

import itertools
import math

import numpy as np
import pytest

from xform.planner.cuts.mincut import minimum_cut


def best(n, edges):
    """Return the cheapest cut between vertices 0 and n - 1, and the smallest side of one."""
    found = {}
    for bits in itertools.product([False, True], repeat=n - 2):
        side = (False, *bits, True)
        cost = sum(c for a, b, c in edges if not side[a] and side[b])
        found.setdefault(cost, []).append(side)
    cost = min(found)
    return cost, min(found[cost], key=sum)


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 10))
    edges = []
    for _ in range(int(random.integers(1, 30))):
        a, b = (int(v) for v in random.integers(0, n, 2))
        if a != b:
            edges.append((a, b, float(random.choice([0, 1, 2, 5, 1e6, 3e9]))))
    edges.append((0, n - 1, 1.0))
    side = minimum_cut(n, *map(list, zip(*edges, strict=True)), source=0, sink=n - 1)
    cost, smallest = best(n, edges)
    assert side[-1]
    assert not side[0]
    found = sum(c for a, b, c in edges if not side[a] and side[b])
    total = sum(c for _, _, c in edges)
    assert found <= cost + len(edges) * total * 2**-30
    if total < 2**20:  # then rounding changes no capacity by one
        assert tuple(side) == smallest


def test_edges_that_must_not_be_cut() -> None:
    side = minimum_cut(4, [0, 1, 2], [1, 2, 3], [5.0, math.inf, 7.0], source=0, sink=3)
    assert side.tolist() == [False, True, True, True]


def test_large_capacities_and_nothing_to_cut() -> None:
    side = minimum_cut(3, [0, 1], [1, 2], [2.0**60, 2.0**50], source=0, sink=2)
    assert side.tolist() == [False, False, True]
    assert minimum_cut(3, [1], [2], [math.inf], source=0, sink=2).tolist() == [False, True, True]
