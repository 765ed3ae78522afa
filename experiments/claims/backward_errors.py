"""Backward errors of a chain of Jacobians, multiplied forward, in reverse and in mixed order."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.claims.claim import Claim, Finding, spread, verdict

WIDTH, SEEDS, DEPTHS = 12, 10, (2, 4, 8, 16, 32, 64)
UNIT = 2.0**-24
ORDERS = ("forward", "reverse", "mixed")


def product(matrices: Sequence[np.ndarray], order: str) -> np.ndarray:
    """Return the product of matrices; the first is applied last."""
    if order == "mixed" and len(matrices) > 1:
        half = len(matrices) // 2
        return product(matrices[:half], order) @ product(matrices[half:], order)
    if order == "forward":  # from the inputs: the last two first
        return functools.reduce(lambda p, m: m @ p, matrices[::-1])
    return functools.reduce(lambda p, m: p @ m, matrices)


def errors(depth: int, seed: int, rows: int) -> dict[str, tuple[float, float]]:
    """Return the forward and the backward error of each order in float32, in units of rounding.

    `rows` is the number of outputs. The backward error is the least change of the matrices, each
    relative to its norm, that makes the computed product exact to first order. It is the
    least-norm solution of an underdetermined linear system, as a root mean square over matrices.
    """
    random = np.random.default_rng([depth, seed])
    shapes = [(rows, WIDTH), *[(WIDTH, WIDTH)] * (depth - 1)]
    chain = [(random.normal(size=s) / WIDTH**0.5).astype(np.float32) for s in shapes]
    wide = [m.astype(np.float64) for m in chain]
    exact = product(wide, "reverse")
    # What a change of each matrix is multiplied with from the left, and from the right.
    lefts = [np.eye(rows)]
    for m in wide[:-1]:
        lefts.append(lefts[-1] @ m)
    rights = [np.eye(WIDTH)]
    for m in wide[:0:-1]:
        rights.append(m @ rights[-1])
    gram = sum(
        np.linalg.norm(m) ** 2 * np.kron(a @ a.T, b.T @ b)
        for m, a, b in zip(wide, lefts, rights[::-1], strict=True)
    )
    found = {}
    for order in ORDERS:
        error = (product(chain, order).astype(np.float64) - exact).ravel()
        least = np.linalg.lstsq(gram, error, rcond=None)[0]
        backward = np.sqrt(max(error @ least, 0) / depth)
        found[order] = (np.linalg.norm(error) / np.linalg.norm(exact) / UNIT, backward / UNIT)
    return found


def measure(quick: bool) -> Finding:
    """Measure random chains with one output and with as many outputs as inputs."""
    depths, seeds = (DEPTHS[:4], 3) if quick else (DEPTHS, SEEDS)
    found = {
        rows: {d: {o: np.median([errors(d, s, rows)[o] for s in range(seeds)], 0) for o in ORDERS}
               for d in depths} for rows in (1, WIDTH)
    }  # fmt: skip
    worst = lambda rows, order: max(by[order][1] for by in found[rows].values())
    said = lambda rows: ", ".join(
        f"{o} {spread([by[o][1] for by in found[rows].values()])}" for o in ORDERS
    )
    scalar = {o: worst(1, o) for o in ORDERS}
    full = {o: worst(WIDTH, o) for o in ORDERS}
    # A rounding of each entry of each factor would be 1 / sqrt(3) of a unit.
    stable = lambda by: [o for o, w in by.items() if w < 4]
    text = lambda by: f"wrong for {' and '.join(o for o in ORDERS if o not in stable(by))}: up to" \
        f" {max(by.values()):.0f} units"  # fmt: skip
    last = found[1][depths[-1]]
    return Finding(
        [
            Claim(
                "The gradient is backward stable in forward, reverse and mixed order",
                "Higham, Accuracy and stability of numerical algorithms, section 3.5",
                "the first factor alone could take the error of a row: its backward error stays"
                " near the unit of rounding, also where the forward error grows with depth",
                f"least relative change of the matrices, in units of {UNIT:.0e}, chains of"
                f" {depths[0]} to {depths[-1]}: {said(1)}; forward errors at {depths[-1]}: "
                + ", ".join(f"{o} {last[o][0]:.1f}" for o in ORDERS),
                verdict(len(stable(scalar)) == len(ORDERS), text(scalar)),
            ),
            Claim(
                "A Jacobian is backward stable in forward, reverse and mixed order",
                "Higham, Accuracy and stability of numerical algorithms, section 3.5",
                "each row or column has a change of its own; one change need not serve them all",
                f"the same, {WIDTH} outputs: {said(WIDTH)}",
                verdict(len(stable(full)) == len(ORDERS), text(full)),
            ),
        ],
        lambda figure: draw(figure, found),
    )


def draw(figure: Figure, found: dict[int, dict[int, dict[str, np.ndarray]]]) -> None:
    """Draw both errors by depth."""
    for axes, (rows, by) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for i, order in enumerate(ORDERS):
            for j, (kind, style) in enumerate((("forward error", "--"), ("backward error", "o-"))):
                axes.loglog([*by], [one[order][j] for one in by.values()], style, color=f"C{i}",
                            label=f"{kind}, {order}")  # fmt: skip
        axes.set_xticks([*by], [*by])
        axes.minorticks_off()
        axes.set(xlabel="matrices", title="one output" if rows == 1 else f"{rows} outputs")
    figure.axes[0].set_ylabel("units of rounding, float32, median")
    figure.axes[0].legend(frameon=False, fontsize=7)
