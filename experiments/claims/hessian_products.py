"""The cost of a product with the Hessian, computed in two ways."""

from __future__ import annotations

from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.claims.programs import PROGRAMS, total_bytes
from experiments.timing import paired
from xform.interpret.cost import program_flops

FORWARD, TWICE = "forward over reverse", "reverse over reverse"


def products(loss: Any, w: Any, x: Any, v: Any) -> dict[str, Any]:
    """Return functions of `(w, x, v)` that compute a product with the Hessian in `w`."""

    def forward(w: Any, x: Any, v: Any) -> Any:
        return xform.hvp(lambda w: loss(w, x), (w,), (v,))

    def twice(w: Any, x: Any, v: Any) -> Any:
        def along(w: Any) -> Any:
            parts = jax.tree.map(lambda g, v: (g * v).sum(), xform.grad(loss)(w, x), v)
            return sum(jax.tree.leaves(parts))

        return xform.grad(along)(w)

    return {FORWARD: forward, TWICE: twice}


def measure(quick: bool) -> Finding:
    """Measure FLOPs, time and bytes relative to a gradient, for four programs."""
    work: dict[str, list[float]] = {FORWARD: [], TWICE: []}
    time: dict[str, list[float]] = {FORWARD: [], TWICE: []}
    held: dict[str, list[float]] = {FORWARD: [], TWICE: []}
    for make in PROGRAMS.values():
        loss, (w, x) = make()
        args, gradient = (w, x, w), lambda w, x, v, loss=loss: xform.grad(loss)(w, x)
        base = jax.jit(gradient).lower(*args).compile()
        for way, f in products(loss, w, x, w).items():
            run = jax.jit(f).lower(*args).compile()
            work[way].append(program_flops(f, *args) / program_flops(gradient, *args))
            time[way].append(paired(run, base, args, n=5 if quick else 9)[0])
            held[way].append(total_bytes(run) / total_bytes(base))
    cheaper = [f <= t for f, t in zip(work[FORWARD], work[TWICE], strict=True)]
    return Finding(
        [
            Claim(
                "A product with the Hessian costs one forward and one backward pass more: about two"
                " gradients",
                "Pearlmutter, Fast exact multiplication by the Hessian, 1994",
                "FLOPs over those of a gradient: 2 of linear maps, 3 of products whose factors both"
                " depend on the weights",
                f"FLOPs {spread(work[FORWARD])}, time {spread(time[FORWARD])}, bytes"
                f" {spread(held[FORWARD])}",
                verdict(
                    all(1.7 <= r <= 2.4 for r in work[FORWARD]),
                    f"holds if a constant of {max(work[FORWARD]):.1f} is allowed",
                ),
            ),
            Claim(
                "Forward over reverse is cheaper than reverse over reverse",
                "JAX's autodiff cookbook",
                "fewer FLOPs, fewer bytes",
                f"reverse over reverse: FLOPs {spread(work[TWICE])}, time {spread(time[TWICE])},"
                f" bytes {spread(held[TWICE])} of a gradient's",
                verdict(
                    all(cheaper)
                    and all(f <= t for f, t in zip(held[FORWARD], held[TWICE], strict=True)),
                    f"holds in FLOPs for {sum(cheaper)} of {len(cheaper)} programs, in bytes for"
                    f" {sum(f <= t for f, t in zip(held[FORWARD], held[TWICE], strict=True))}",
                ),
            ),
        ],
        lambda figure: draw(figure, work, held),
    )


def draw(figure: Figure, work: dict[str, list[float]], held: dict[str, list[float]]) -> None:
    """Draw bars of FLOPs and bytes for each program."""
    for axes, table, name in zip(
        figure.subplots(1, 2), (work, held), ("FLOPs", "bytes, with arguments"), strict=True
    ):
        for i, (way, ratios) in enumerate(table.items()):
            axes.bar([x + 0.38 * i for x in range(len(ratios))], ratios, 0.36, label=way)
        axes.set_xticks([x + 0.19 for x in range(len(PROGRAMS))], [*PROGRAMS], fontsize=8)
        axes.set(title=name, ylabel="product with the Hessian / gradient")
        axes.legend(frameon=False, fontsize=8)
