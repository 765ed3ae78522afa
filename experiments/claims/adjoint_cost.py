"""Memory of an ODE's adjoints by steps and dimension, their extra work, and backward errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, spread, verdict
from experiments.claims.ode_adjoints import backsolve, direct, field, symplectic
from experiments.claims.programs import normal
from models.nets.ode import flow
from xform.interpret.cost import program_flops

ROWS, WIDTH, STEPS = 512, 16, 50
ALL_STEPS, WIDTHS = (25, 50, 100, 200), (8, 16, 32, 64)
STIFFNESS = (0.0, 5.0, 10.0, 20.0, 40.0)
KEEP = xform.policies.save_everything
ADJOINTS = ("direct", "backsolve", "symplectic")


def inputs(width: int, rows: int, stiffness: float = 0.0) -> tuple[Any, jax.Array]:
    """Return parameters of a field with a hidden layer of twice the width, and states."""
    a, b = normal(width, 2 * width), normal(2 * width, width, seed=1)
    return (a, b, jnp.asarray(stiffness)), normal(rows, width, seed=2)


def way(name: str, steps: int) -> Any:
    """Return the gradient by the parameters."""
    if name == "backsolve":
        return backsolve(steps)
    return xform.grad({"direct": direct, "symplectic": symplectic}[name](steps), policy=KEEP)


def size(name: str, steps: int, width: int) -> tuple[int, int]:
    """Return the temporary bytes of the compiled gradient, and its FLOPs."""
    args = jax.eval_shape(lambda: inputs(width, ROWS))
    memory: Any = jax.jit(way(name, steps)).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes, program_flops(way(name, steps), *args)


def errors(gradient: Any, stiffness: float, steps: int = 50) -> tuple[float, float]:
    """Return the relative forward error of a gradient, and its backward error, in float64.

    The backward error is the least relative change of weights and states of which this gradient
    is the exact one, to first order: the least-norm solution `q` of `J q = error`, where `J` is
    the derivative of the gradient by relative changes.
    """
    args = inputs(4, 4, stiffness)
    weights, tree = jax.flatten_util.ravel_pytree((args[0][:2], args[1]))
    scale = jnp.linalg.norm(weights) / weights.size**0.5

    def exact(q: jax.Array) -> jax.Array:
        (a, b), x = tree(weights + scale * q)
        ends = lambda p: jnp.mean(
            flow(lambda t, x: field((*p, args[0][2]), t, x), x, 1.0, steps) ** 2
        )
        return jax.flatten_util.ravel_pytree(jax.grad(ends)((a, b)))[0]

    zero = jnp.zeros_like(weights)
    true, jacobian = jax.jit(exact)(zero), jax.jit(jax.jacfwd(exact))(zero)
    got = jax.flatten_util.ravel_pytree(jax.jit(gradient)(*args)[:2])[0]
    error = np.asarray(got - true)
    q, *_ = np.linalg.lstsq(np.asarray(jacobian), error, rcond=1e-14)
    relative = float(np.linalg.norm(error) / np.linalg.norm(true))
    return relative, float(np.linalg.norm(q) / weights.size**0.5)


def measure(quick: bool) -> Finding:
    """Measure bytes in float32, and errors in float64."""
    steps, widths = (ALL_STEPS[:3], WIDTHS[:3]) if quick else (ALL_STEPS, WIDTHS)
    stiff = STIFFNESS[::2] if quick else STIFFNESS
    by_steps = {name: [size(name, n, WIDTH) for n in steps] for name in ADJOINTS}
    by_width = {name: [size(name, STEPS, w) for w in widths] for name in ADJOINTS}
    grows = {
        name: (exponent(steps, [b for b, _ in by_steps[name]]),
               exponent(widths, [b for b, _ in by_width[name]]))
        for name in ADJOINTS
    }  # fmt: skip
    extra = {n: by_steps[n][-1][1] / by_steps["direct"][-1][1] for n in ADJOINTS[1:]}
    less = {n: by_steps[n][-1][0] / by_steps["direct"][-1][0] for n in ADJOINTS[1:]}
    # The bytes of the symplectic adjoint: those of one step, plus a state for each step.
    states = np.polyfit(steps, [b for b, _ in by_steps["symplectic"]], 1)[0] / (4 * ROWS * WIDTH)
    with jax.enable_x64():
        found = {
            name: [errors(way(name, 50), s) for s in stiff] for name in ("backsolve", "symplectic")
        }
    back, symplectic_errors = found["backsolve"], found["symplectic"]
    condition = [f / max(b, 1e-18) for f, b in back]
    unstable = max(b for _, b in back)
    said = lambda rows: ", ".join(
        f"{f:.0e} and {b:.0e} at {s:.0f}" for (f, b), s in zip(rows, stiff, strict=True)
    )
    close = lambda a, b: abs(a - b) < 0.2
    return Finding(
        [
            Claim(
                "Of n steps in dimension d the direct gradient holds O(n d), the adjoint O(d), the"
                " symplectic adjoint O(n d) with a state for each step in place of its residuals",
                "Chen et al., arXiv:1806.07366, table 1; Matsubara et al., arXiv:2102.09750, table"
                " 1",
                "exponents of compiled temporary bytes (n, d): (1, 1), (0, 1), and (below 1, 1)",
                ", ".join(f"{n} ({a:.2f}, {b:.2f})" for n, (a, b) in grows.items())
                + f"; at {steps[-1]} steps of the direct one's bytes: "
                + ", ".join(f"{n} {r:.3f}" for n, r in less.items())
                + f"; the symplectic one grows by {states:.2f} states a step",
                verdict(
                    close(grows["direct"][0], 1)
                    and close(grows["backsolve"][0], 0)
                    and grows["symplectic"][0] < 1
                    and close(states, 1)
                    and all(close(b, 1) for _, b in grows.values()),
                    "holds in steps; in dimension the exponents are "
                    + ", ".join(f"{b:.2f}" for _, b in grows.values())
                    if close(grows["direct"][0], 1)
                    and close(grows["backsolve"][0], 0)
                    and close(states, 1)
                    else "wrong",
                ),
            ),
            Claim(
                "The adjoint and the symplectic adjoint pay with computation for their memory",
                "Chen et al., arXiv:1806.07366; Matsubara et al., arXiv:2102.09750, table 1",
                "evaluations of the field, a pullback as two: direct 4 + 8 a step; backsolve 4 more"
                " for the state that runs back: 4 / 3; symplectic up to 8 more: at most 5 / 3",
                "FLOPs over the direct gradient's: "
                + ", ".join(f"{n} {r:.2f}" for n, r in extra.items()),
                verdict(
                    min(extra.values()) > 1.1 and max(extra.values()) < 2,
                    f"wrong: {spread([*extra.values()])}",
                ),
            ),
            Claim(
                "An adjoint that is far from the gradient is unstable",
                "Gholami et al., ANODE, arXiv:1902.10298; Higham, Accuracy and stability of"
                " numerical algorithms, section 1.5",
                "only if its backward error is large too: the change of weights and states whose"
                " exact gradient it is; a forward error alone may be the problem's condition",
                "forward and backward error by the rate of contraction, float64: backsolve "
                f"{said(back)}; symplectic {said(symplectic_errors)}; forward over backward"
                f" {spread(condition, 1)} for backsolve",
                verdict(
                    unstable > 1e-8 and max(b for _, b in symplectic_errors) < 1e-12,
                    "wrong: the backward error is at rounding",
                )
                + (
                    f" for backsolve: at {stiff[-1]:.0f} its backward error is {back[-1][1]:.0e};"
                    " the symplectic adjoint is stable by both"
                    if unstable > 1e-8
                    else ""
                ),
            ),
        ],
        lambda figure: draw(figure, (steps, by_steps), (widths, by_width), (stiff, found)),
    )


def draw(figure: Figure, by_steps: Any, by_width: Any, errors: Any) -> None:
    """Draw bytes by steps and by width, and both errors."""
    *panels, right = figure.subplots(1, 3)
    for axes, (sizes, by), name in zip(panels, (by_steps, by_width), ("steps", "width"),
                                       strict=True):  # fmt: skip
        for way, rows in by.items():
            axes.loglog(sizes, [b / 2**20 for b, _ in rows], "o-", label=way)
        axes.set_xticks(sizes, sizes)
        axes.minorticks_off()
        axes.set(xlabel=name)
    panels[0].set_ylabel("temporary MiB")
    panels[0].legend(frameon=False, fontsize=7)
    stiff, found = errors
    for i, (name, rows) in enumerate(found.items()):
        for j, (kind, style) in enumerate((("forward", "o-"), ("backward", "s--"))):
            right.semilogy(stiff, [max(row[j], 1e-18) for row in rows], style, color=f"C{i + 1}",
                           label=f"{name}, {kind}")  # fmt: skip
    right.set(xlabel="rate of contraction", ylabel="relative error")
    right.legend(frameon=False, fontsize=6)
