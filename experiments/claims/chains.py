"""The cheapest order of a product of matrices, and when it is forward or reverse mode."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.claims.claim import Claim, Finding, verdict
from experiments.claims.programs import normal
from experiments.timing import paired
from xform.interpret.cost import program_flops

CHAINS, LONGEST, LARGEST = 3000, 12, 512
SOURCE = "Griewank and Naumann, Accumulating Jacobians as chained sparse matrix products, 2003"


def least(sizes: Sequence[int]) -> int:
    """Return the multiplications of the cheapest order of matrices `sizes[i] x sizes[i + 1]`."""

    @functools.cache
    def part(i: int, j: int) -> int:
        if j == i + 1:
            return 0
        return min(part(i, k) + part(k, j) + sizes[i] * sizes[k] * sizes[j]
                   for k in range(i + 1, j))  # fmt: skip

    return part(0, len(sizes) - 1)


def forward(sizes: Sequence[int]) -> int:
    """Return the multiplications from the input on; `sizes` go from outputs to inputs."""
    return sum(sizes[-1] * a * b for a, b in itertools.pairwise(sizes[:-1]))


def reverse(sizes: Sequence[int]) -> int:
    """Return the multiplications from the output back."""
    return sum(sizes[0] * a * b for a, b in itertools.pairwise(sizes[1:]))


def measure(quick: bool) -> Finding:
    """Measure random chains, chains with falling dimensions, and one product with a vector."""
    rng = np.random.default_rng(0)
    count = CHAINS // 10 if quick else CHAINS
    some = [rng.integers(1, LARGEST, rng.integers(4, LONGEST)).tolist() for _ in range(count)]
    falling = [sorted(sizes) for sizes in some]  # from few outputs to many inputs
    best = [least(sizes) for sizes in some]
    ratios = np.array([min(forward(s), reverse(s)) / b for s, b in zip(some, best, strict=True)])
    pure = int(np.sum(ratios == 1))
    beaten = sum(least(sizes) < reverse(sizes) for sizes in falling)
    n = 512 if quick else 1024
    a, b, x = normal(n, n), normal(n, n, seed=1), jnp.ones(n)
    orders = (lambda a, b, x: (a @ b) @ x), (lambda a, b, x: a @ (b @ x))
    flops = [program_flops(f, a, b, x) for f in orders]
    time, *_ = paired(jax.jit(orders[0]), jax.jit(orders[1]), (a, b, x), n=5 if quick else 9)
    return Finding(
        [
            Claim(
                "(AB)x costs more than A(Bx)",
                "linear algebra",
                f"n = {n}: (n + 1) / 2 = {(n + 1) / 2:.0f} times the FLOPs",
                f"{flops[0] / flops[1]:.0f} times the FLOPs, {time:.0f} times the time",
                verdict(flops[0] > flops[1] and time > 1, "wrong"),
            ),
            Claim(
                "Reverse mode is optimal where dimensions fall from inputs to outputs",
                SOURCE,
                "no order of the product is cheaper",
                f"of {count:,} random chains sorted so, another order is cheaper for {beaten}",
                verdict(beaten == 0, f"wrong for {beaten}"),
            ),
            Claim(
                "One of the two modes is optimal for a chain of any dimensions",
                "folklore",
                "the matrix chain's dynamic program may find a cheaper order",
                f"of {count:,} random chains one of the two is optimal for {pure / count:.0%}; the"
                f" better one costs {np.median(ratios):.2f} times the optimum at the median,"
                f" {ratios.max():.0f} times at worst",
                verdict(pure == count, "wrong: the matrix chain decides otherwise"),
            ),
        ],
        lambda figure: draw(figure, ratios),
    )


def draw(figure: Figure, ratios: np.ndarray) -> None:
    """Draw how many chains cost how much more than the optimum."""
    axes = figure.subplots()
    axes.hist(np.log10(ratios), bins=40, color="#2b6cb0")
    axes.set(xlabel="the better of forward and reverse mode / the optimum, as a power of ten",
             ylabel="random chains")  # fmt: skip
