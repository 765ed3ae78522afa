"""Where remat marks should stand in a transformer, compared with plans of the same bytes."""

from __future__ import annotations

from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding
from experiments.claims.programs import scanned, scanned_inputs
from xform.interpret.cost import program_flops

WIDTH, LENGTH, BATCH, DEPTH = 128, 256, 4, 6
MIB = 2**20


def measure(quick: bool) -> Finding:
    """Measure bytes and FLOPs of the marks, the default, and budgets at the marks' bytes."""
    args = jax.eval_shape(lambda: scanned_inputs(WIDTH, DEPTH, BATCH, LENGTH))
    base = program_flops(jax.grad(scanned()), *args)

    def row(gradient: Any) -> tuple[float, float]:
        memory: Any = jax.jit(gradient).lower(*args).compile().memory_analysis()
        flops = program_flops(gradient, *args) / base - 1
        return memory.temp_size_in_bytes / MIB, flops

    none, block, attention = (row(jax.grad(scanned(m))) for m in ("none", "block", "attention"))
    default = row(xform.grad(scanned()))
    outside = sum(x.size * 4 for x in jax.tree.leaves((args, args[0])))
    planned: dict[str, tuple[float, float]] = {}
    for name, (bytes_, _) in (("block", block), ("attention", attention)):
        policy = xform.policies.budget(int(bytes_ * MIB) + outside)
        plan = xform.plan(scanned(), *args, policy=policy)
        planned[name] = row(xform.grad(scanned(), policy=plan))
    win = (none[0] - attention[0]) / (none[0] - block[0])
    cost = attention[1] / block[1]
    source = "Korthikanti et al., Reducing activation recomputation, arXiv:2205.05198"
    return Finding(
        [
            Claim(
                "Checkpoints at block boundaries cost a forward pass, and save nearly all",
                "Chen et al., arXiv:1604.06174",
                "a third more FLOPs",
                f"{block[0] / none[0]:.2f} of the bytes for {block[1]:.0%} more FLOPs; at these"
                f" bytes xform runs {planned['block'][1]:.0%} more, and by default"
                f" {default[0] / none[0]:.2f} of the bytes for {default[1]:.0%}",
                "holds" if block[1] <= 0.36 and block[0] < 0.5 * none[0] else "wrong",
            ),
            Claim(
                "Attention alone: most of the win for half the cost",
                source,
                "scores and weights are most of the bytes, and little work",
                f"{win:.0%} of the bytes that blocks spare for {cost:.0%} of their FLOPs; at these"
                f" bytes xform runs {planned['attention'][1]:.0%} more for"
                f" {attention[1]:.0%}",
                "holds"
                if win > 0.5 and cost <= 0.5
                else f"holds if {win:.0%} is most and {cost:.0%} about half",
            ),
        ],
        lambda figure: draw(figure, none, block, attention, default, planned),
    )


def draw(figure: Figure, none: Any, block: Any, attention: Any, default: Any, plans: Any) -> None:
    """Draw bytes against recomputed FLOPs."""
    axes = figure.subplots()
    marks = {"jax.grad": none, "jax.checkpoint, blocks": block,
             "jax.checkpoint, attention": attention}  # fmt: skip
    for name, (mib, again) in marks.items():
        axes.plot(mib, 100 * again, "s", label=name)
    axes.plot(default[0], 100 * default[1], "o", label="xform's default")
    for name, (mib, again) in plans.items():
        axes.plot(mib, 100 * again, "*", markersize=10, label=f"xform, at the bytes of {name}")
    axes.set(xlabel="temporary MiB", ylabel="more FLOPs than jax.grad, %")
    axes.legend(frameon=False, fontsize=8)
