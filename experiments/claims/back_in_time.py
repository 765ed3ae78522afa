"""Back-propagation through time in a twentieth of the memory."""

from __future__ import annotations

from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread
from experiments.planner.zoo import lstm
from experiments.timing import paired
from xform.interpret.slots import steps_run

STEPS = (100, 1000, 10_000)
SHARE = 0.05


def measure(quick: bool) -> Finding:
    """Measure an LSTM under a budget of 5% of saving everything, at several lengths."""
    found: dict[int, tuple[float, float, float]] = {}
    for steps in STEPS[:2] if quick else STEPS:
        loss, args = lstm(steps=steps, width=64, batch=16)
        everything = xform.policies.save_everything
        all_of_it = xform.plan(loss, *args, policy=everything)
        budget = xform.policies.budget(int(SHARE * all_of_it.saved_bytes), of="saved")
        plan = xform.plan(loss, *args, policy=budget)
        ours, theirs = (jax.jit(xform.grad(loss, policy=p)).lower(*args).compile()
                        for p in (plan, everything))  # fmt: skip
        held: Any = [run.memory_analysis().temp_size_in_bytes for run in (ours, theirs)]
        time, *_ = paired(ours, theirs, args, n=3 if quick or steps > 1000 else 7)
        found[steps] = held[0] / held[1], time, plan.recompute_flops / plan.forward_flops
    times, shares = [f[1] for f in found.values()], [f[0] for f in found.values()]
    optimal = {n: steps_run(n, max(1, int(SHARE * n))) / n - 1 for n in found}
    again = ", ".join(f"{f[2]:.2f} at {n:,} (revolve: {optimal[n]:.2f})" for n, f in found.items())
    late = [n for n, f in found.items() if f[1] > 1.4]
    return Finding(
        [
            Claim(
                "Back-propagation through time needs 5% of the memory for a third more time",
                "Gruslys et al., arXiv:1606.03401",
                "with 5% of the states stored, revolve runs each step again less than twice",
                f"LSTM, {spread([*found], 0)} steps: {spread(shares)} of the temporary bytes,"
                f" {spread(times)} of the time; forward passes run again: {again}",
                "holds" if not late else f"wrong at {', '.join(map(str, late))} steps",
            )
        ],
        lambda figure: draw(figure, found),
    )


def draw(figure: Figure, found: dict[int, tuple[float, float, float]]) -> None:
    """Draw bytes and time by the number of steps."""
    axes = figure.subplots()
    for i, name in enumerate(("temporary bytes", "time")):
        axes.plot([*found], [f[i] for f in found.values()], "o-", label=name)
    axes.axhline(SHARE, color="gray", linewidth=0.8)
    axes.axhline(4 / 3, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="with 5% / saving everything")
    axes.legend(frameon=False)
