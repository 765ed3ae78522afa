"""The order of a chain of Jacobians."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from xform.jacobians.chain import (
    ChainLink,
    Order,
    Product,
    cheapest_order,
    forward_order,
    link_of_matrix,
    reverse_order,
)

MODES = {"forward": forward_order, "reverse": reverse_order}


def cheapest(links: Sequence[ChainLink]) -> float:
    """Return the fewest FLOPs over all bracketings."""
    if len(links) == 1:
        return min(links[0].forward, links[0].reverse)
    found = []
    for k in range(1, len(links)):
        right, left = links[:k], links[k:]
        a, b = cheapest(left), cheapest(right)
        rows, columns = left[-1].rows, right[0].columns
        found += [
            a + b + 2 * rows * right[-1].rows * columns,
            a + rows * sum(link.pull for link in right),
            b + columns * sum(link.push for link in left),
        ]
    return min(found)


def counted(order: Order, links: Sequence[ChainLink]) -> float:
    """Return the FLOPs of an order, step by step."""
    if isinstance(order, Product):
        inside = counted(order.left, links) + counted(order.right, links)
        middle = links[order.right.high].rows
        return inside + 2 * links[order.high].rows * middle * links[order.low].columns
    n = links[order.low].columns if order.mode == "forward" else links[order.high].rows
    through = links[order.first : order.last + 1]
    flops = n * sum(k.push if order.mode == "forward" else k.pull for k in through)
    if order.operand is not None:
        return flops + counted(order.operand, links)
    return flops - n * (through[0].free_push if order.mode == "forward" else through[-1].free_pull)


def chain_of(sizes: Sequence[int]) -> list[ChainLink]:
    return [link_of_matrix(a, b) for a, b in itertools.pairwise(sizes)]


def any_chain(draw: random.Random, n: int, none: float = 0.0) -> list[ChainLink]:
    """Return links with random costs; some lack a mode."""
    links = []
    for a, b in itertools.pairwise(draw.randint(1, 40) for _ in range(n + 1)):
        push, pull = draw.randint(1, 2 * a * b), draw.randint(1, 2 * a * b)
        first, last = draw.choice([0, push]), draw.choice([0, pull])
        link = ChainLink(a, b, push, pull, first, last)
        if draw.random() < none:
            link = ChainLink(a, b, math.inf, pull, 0, last)
        elif draw.random() < none:
            link = ChainLink(a, b, push, math.inf, first)
        links.append(link)
    return links


def test_the_hourglass() -> None:
    links = chain_of((10, 512, 8, 512, 10))
    assert cheapest_order(links).flops == 2 * 82_720
    assert forward_order(links).flops == reverse_order(links).flops == 2 * 133_120
    assert isinstance(cheapest_order(links), Product)


@pytest.mark.parametrize("none", [0.0, 0.2])
def test_no_bracketing_is_cheaper(none: float) -> None:
    draw = random.Random(0)
    for _ in range(300):
        links = any_chain(draw, draw.randint(1, 6), none)
        order = cheapest_order(links)
        assert order.flops == cheapest(links)
        if order.flops < math.inf:
            assert counted(order, links) == order.flops
            assert (order.low, order.high) == (0, len(links) - 1)


@pytest.mark.parametrize("mode", MODES)
def test_of_3000_monotone_chains_one_mode_is_chosen_and_never_beaten(mode: str) -> None:
    draw = random.Random(1)
    for _ in range(3000):
        sizes = sorted(draw.randint(1, 1000) for _ in range(draw.randint(2, 9)))
        links = chain_of(sizes if mode == "forward" else sizes[::-1])
        order = cheapest_order(links)
        assert order == MODES[mode](links) or reverse_order(links).flops == order.flops
        assert order.flops == MODES[mode](links).flops
        if len(links) < 5:
            assert cheapest(links) == order.flops
