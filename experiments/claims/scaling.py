"""How time and memory of a network grow with width and depth, and when parameters dominate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict
from experiments.claims.programs import PROGRAMS, Made, types
from xform.interpret.cost import program_flops

WIDTHS, DEPTHS, BATCH = (64, 128, 256, 512), (2, 4, 8, 16), 32
KEEP = xform.policies.save_everything


def sizes(made: Made) -> tuple[int, int, int]:
    """Return the FLOPs of the gradient, the bytes saved for it, and the bytes of parameters."""
    loss, args = made
    w, x = types(args)
    saved = xform.plan(loss, w, x, policy=KEEP, verify=False).saved_bytes
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(w))
    return program_flops(xform.grad(loss), w, x), saved, weights


def measure(quick: bool) -> Finding:
    """Measure exponents for an MLP, and ratios of parameters to activations for three networks."""
    mlp: Callable[..., Made] = PROGRAMS["MLP"]
    wide = [sizes(mlp(width=w, depth=8, batch=BATCH)) for w in WIDTHS]
    deep = [sizes(mlp(width=256, depth=d, batch=BATCH)) for d in DEPTHS]
    by = [(exponent(WIDTHS, [s[i] for s in wide]), exponent(DEPTHS, [s[i] for s in deep]))
          for i in range(3)]  # fmt: skip
    (work_w, work_l), (saved_w, saved_l), _ = by
    ratios = {
        name: sizes(made)[2] / sizes(made)[1]
        for name, made in {
            "MLP, 32 rows": mlp(width=512, depth=8, batch=32),
            "MLP, 8,192 rows": mlp(width=512, depth=8, batch=8192),
            "convolutions, 8 pictures": PROGRAMS["CNN"](),
            "attention, 4 x 512": PROGRAMS["transformer"](length=512),
        }.items()
    }
    said = ", ".join(f"{name}: {ratio:.2g}" for name, ratio in ratios.items())
    few, many, convolutions, attention = ratios.values()
    close = lambda a, b: abs(a - b) < 0.15
    return Finding(
        [
            Claim(
                "An MLP of width w and depth L costs O(w² L) time and O(w L) activations",
                "lecture notes",
                "exponents (w, L): FLOPs (2, 1), saved bytes (1, 1)",
                f"FLOPs ({work_w:.2f}, {work_l:.2f}), saved bytes ({saved_w:.2f}, {saved_l:.2f})",
                verdict(
                    close(work_w, 2)
                    and close(work_l, 1)
                    and close(saved_w, 1)
                    and close(saved_l, 1),
                    "wrong",
                ),
            ),
            Claim(
                "Parameters outweigh activations in an MLP, not in convolutions or attention",
                "lecture notes",
                "w² parameters and b w activations of a layer: a ratio of w / b for b rows",
                f"bytes of parameters over saved bytes: {said}",
                verdict(
                    few > 1 and many > 1 and convolutions < 1 and attention < 1,
                    "holds if the batch has fewer rows than a layer has columns"
                    if few > 1 > many and convolutions < 1 and attention < 1
                    else "wrong",
                ),
            ),
        ],
        lambda figure: draw(figure, wide, deep, ratios),
    )


def draw(figure: Figure, wide: Any, deep: Any, ratios: dict[str, float]) -> None:
    """Draw FLOPs and bytes by size, and the ratios."""
    left, right = figure.subplots(1, 2)
    for xs, found, name, style in ((WIDTHS, wide, "width", "o-"), (DEPTHS, deep, "depth", "s--")):
        for i, what in enumerate(("FLOPs", "saved bytes")):
            left.loglog(xs, [s[i] for s in found], style, label=f"{what}, by {name}")
    left.set(xlabel="width, or depth")
    left.legend(frameon=False, fontsize=8)
    right.barh([*ratios][::-1], [*ratios.values()][::-1], color="#2b6cb0")
    right.axvline(1, color="gray")
    right.set(xscale="log", xlabel="parameters / activations, in bytes")
