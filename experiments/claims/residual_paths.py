"""The gradient of a residual network as a sum over its paths, enumerated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from experiments.claims.programs import normal

WIDTH, LARGEST = 16, 10


def branches(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of `depth` branches."""
    first, second = (
        np.stack([normal(WIDTH, WIDTH, seed=2 * i + j) for i in range(depth)]) for j in (0, 1)
    )
    return first, second


def network(x: jax.Array, ws: Any) -> jax.Array:
    """Add a branch of a product, tanh and a product to each state; return the last state."""
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, ws)[0]


def paths(depth: int) -> tuple[float, list[float], list[float], int]:
    """Enumerate all paths of the gradient: each block is passed by its branch, or around it.

    Returns:
      How far the sum over paths is from xform's gradient; the norm of the sum of the paths of each
      length; the mean norm of one path of each length; and the number of paths.
    """
    ws = branches(depth)
    x, ct = (np.asarray(normal(WIDTH, seed=s)) for s in (70, 71))
    states = [x]
    for a, b in zip(*ws, strict=True):
        states.append(states[-1] + np.tanh(states[-1] @ a) @ b)
    jacobians = [a * (1 - np.tanh(h @ a) ** 2) @ b
                 for h, a, b in zip(states, *ws, strict=False)]  # fmt: skip
    sums = np.zeros((depth + 1, WIDTH))
    norms = np.zeros(depth + 1)
    count = 0
    for through in itertools.product((False, True), repeat=depth):
        row = ct
        for jacobian, taken in zip(jacobians[::-1], through[::-1], strict=True):
            row = jacobian @ row if taken else row
        sums[sum(through)] += row
        norms[sum(through)] += np.linalg.norm(row)
        count += 1
    gradient = np.asarray(xform.vjp(lambda x: network(x, ws), x)[1](ct)[0])
    apart = float(np.linalg.norm(sums.sum(0) - gradient) / np.linalg.norm(gradient))
    each = [float(n) / math.comb(depth, k) for k, n in enumerate(norms)]
    return apart, [float(np.linalg.norm(s)) for s in sums], each, count


def measure(quick: bool) -> Finding:
    """Measure networks of one to ten blocks in float64."""
    depths = range(1, (6 if quick else LARGEST) + 1)
    with jax.enable_x64():
        found = {depth: paths(depth) for depth in depths}
    deepest = depths[-1]
    apart = max(one[0] for one in found.values())
    counts = [one[3] for one in found.values()]
    _, sums, each, _ = found[deepest]
    shrinks = (each[-1] / each[0]) ** (1 / deepest)
    # Of all norms of paths, the part of those through at most half of the blocks.
    weights = [math.comb(deepest, k) * n for k, n in enumerate(each)]
    short = sum(weights[: deepest // 2 + 1]) / sum(weights)
    of_paths = sum(math.comb(deepest, k) for k in range(deepest // 2 + 1)) / 2**deepest
    return Finding(
        [
            Claim(
                "The gradient of a residual network of L blocks is a sum over 2^L paths",
                "Veit et al., arXiv:1605.06431, equation 6",
                "a product of (I + J) for each block, multiplied out",
                f"1 to {deepest} blocks, {counts[0]} to {counts[-1]:,} paths enumerated in NumPy:"
                f" their sum is {apart:.0e} from xform's gradient at most, relative",
                verdict(counts == [2**d for d in depths] and apart < 1e-12, "wrong"),
            ),
            Claim(
                "Most of the gradient comes through short paths",
                "Veit et al., arXiv:1605.06431, section 4.3",
                "a path's norm falls with each branch that it takes; the number of paths does not"
                " fall before half of the blocks",
                f"{deepest} blocks: a branch multiplies a path's norm by {shrinks:.2f}; of the sum"
                f" of norms {short:.0%} is of paths through at most half of the blocks, which are"
                f" {of_paths:.0%} of all paths",
                verdict(
                    shrinks < 1 and short > max(0.75, of_paths),
                    f"holds if branches shrink gradients more: here by {shrinks:.2f} only"
                    if shrinks < 1
                    else f"wrong: a branch multiplies a path's norm by {shrinks:.2f}",
                ),
            ),
        ],
        lambda figure: draw(figure, deepest, sums, each),
    )


def draw(figure: Figure, depth: int, sums: list[float], each: list[float]) -> None:
    """Draw the paths of each length of the deepest network."""
    axes = figure.subplots()
    lengths = range(depth + 1)
    axes.semilogy(lengths, [math.comb(depth, k) for k in lengths], "k:", label="number of paths")
    axes.semilogy(lengths, each, "o-", label="mean norm of one")
    axes.semilogy(lengths, sums, "s-", label="norm of their sum")
    axes.set(xlabel=f"branches on the path, of {depth} blocks")
    axes.legend(frameon=False)
