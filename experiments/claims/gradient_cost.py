"""The cost of a gradient relative to its function: FLOPs and time."""

from __future__ import annotations

from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.claims.programs import PROGRAMS
from experiments.timing import paired
from xform.interpret.cost import program_flops

BOTH, WEIGHTS = "weights and inputs", "weights only"
KEEP = xform.policies.save_everything


def measure(quick: bool) -> Finding:
    """Measure the ratio of value and gradient to value, for four programs."""
    work: dict[tuple[str, str], float] = {}
    time: dict[tuple[str, str], float] = {}
    for name, make in PROGRAMS.items():
        loss, args = make()
        for of, argnums in ((BOTH, (0, 1)), (WEIGHTS, (0,))):
            both = xform.value_and_grad(loss, argnums, policy=KEEP)
            work[name, of] = program_flops(both, *args) / program_flops(loss, *args)
            pair: Any = jax.jit(both), jax.jit(loss)
            time[name, of] = paired(*pair, args, n=5 if quick else 15)[0]
    products = [work[name, BOTH] - 1 for name in ("MLP", "CNN", "transformer")]
    some = [work[name, WEIGHTS] - 1 for name in PROGRAMS]
    source = "Griewank and Walther, Evaluating Derivatives, 2nd ed., section 4.6; lecture notes"
    one = [n for n in PROGRAMS if 0.75 <= work[n, WEIGHTS] - 1 <= 1.25]
    return Finding(
        [
            Claim(
                "Function and gradient cost at most five times the function",
                source,
                "FLOPs <= 5, of every program",
                f"FLOPs {spread([*work.values()])}, time {spread([*time.values()])}",
                bounded(work, time),
            ),
            Claim(
                "The backward pass costs twice the forward pass",
                "common rule, for products of matrices two for one",
                "FLOPs of the gradient, without the value: 2 of the function's",
                f"programs of products {spread(products)}; elementwise"
                f" {work['elementwise', BOTH] - 1:.2f}; of weights only {spread(some)}",
                verdict(
                    all(abs(r - 2) < 0.2 for r in products)
                    and abs(work["elementwise", BOTH] - 3) < 0.2,
                    "holds if products of matrices dominate and inputs are differentiated too",
                ),
            ),
            Claim(
                "The backward pass costs about as much as the forward pass",
                "lecture notes",
                "FLOPs of the gradient, without the value: 1 of the function's",
                f"{spread([r - 1 for r in work.values()])}",
                f"holds if it is of {', '.join(one)}, for weights only"
                if one
                else "wrong: it is at least "
                f"{min(work.values()) - 1:.2f} of them, in these four programs",
            ),
        ],
        lambda figure: draw(figure, work, time),
    )


def bounded(work: dict[tuple[str, str], float], time: dict[tuple[str, str], float]) -> str:
    """Return the verdict on the bound of five times."""
    over = sorted({name for (name, _), ratio in work.items() if ratio > 5})
    late = sorted({name for (name, _), ratio in time.items() if ratio > 5})
    if over:
        return f"wrong: {', '.join(over)}"
    if late:
        return f"holds if FLOPs are counted; in time it is wrong for {', '.join(late)}"
    return verdict(True, "")


def draw(figure: Figure, work: dict[tuple[str, str], float], time: Any) -> None:
    """Draw bars of both ratios for each program."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, ratios, title in ((left, work, "FLOPs"), (right, time, "time, paired on one CPU")):
        for i, of in enumerate((BOTH, WEIGHTS)):
            heights = [ratios[name, of] for name in PROGRAMS]
            axes.bar([x + 0.38 * i for x in range(len(heights))], heights, 0.36, label=of)
        axes.axhline(3, color="gray", linewidth=0.8)
        axes.axhline(5, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xticks([x + 0.19 for x in range(len(PROGRAMS))], [*PROGRAMS], fontsize=8)
        axes.set_title(title)
    left.set_ylabel("value and gradient / value")
    left.legend(frameon=False, fontsize=8)
