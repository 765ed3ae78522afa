"""Four ways to compute the gradient of a neural differential equation: bytes and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict
from experiments.claims.programs import normal
from models.nets.ode import flow
from models.nets.symplectic import symplectic_flow

WIDTH, HIDDEN, ROWS, TIME = 16, 128, 128, 1.0
STEPS, STIFFNESS = (25, 50, 100, 200, 400), (0.0, 5.0, 10.0, 20.0, 40.0)
FEW = 100


def field(params: Any, t: Any, x: jax.Array) -> jax.Array:
    """Compute a network's slope plus a pull to the origin, which `params[2]` makes stiffer."""
    return jnp.tanh(x @ params[0]) @ params[1] - params[2] * x


def inputs(stiffness: float = 0.0) -> tuple[Any, jax.Array]:
    """Return parameters and states."""
    a, b = normal(WIDTH, HIDDEN), normal(HIDDEN, WIDTH, seed=1)
    return (a, b, jnp.asarray(stiffness)), normal(ROWS, WIDTH, seed=2)


def direct(steps: int) -> Any:
    """Return the loss, differentiated through the steps themselves."""
    return lambda p, x: jnp.mean(flow(lambda t, x: field(p, t, x), x, TIME, steps) ** 2)


def symplectic(steps: int) -> Any:
    """Return the same loss, differentiated by the symplectic adjoint."""
    return lambda p, x: jnp.mean(symplectic_flow(field, p, x, TIME, steps) ** 2)


def backsolve(steps: int) -> Any:
    """Return the gradient by integrating state, cotangent and sums backward from the end."""

    def gradient(params: Any, x: jax.Array) -> Any:
        last = flow(lambda t, x: field(params, t, x), x, TIME, steps)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def back(t: Any, state: Any) -> Any:
            x, ct, _ = state
            slope, pull = xform.vjp(lambda p, x: field(p, TIME - t, x), params, x)
            of_params, of_x = pull(ct)
            return -slope, of_x, of_params

        ct = xform.grad(lambda x: jnp.mean(x**2))(last)
        return flow(back, (last, ct, zeros), TIME, steps)[2]

    return gradient


def ways(steps: int) -> dict[str, Callable[..., Any]]:
    """Return the gradients by the parameters."""
    loss, everything = direct(steps), xform.policies.save_everything
    few = xform.policies.budget(ROWS * WIDTH * 4 * 12, of="saved")
    return {
        "direct": xform.grad(loss, policy=everything),
        "checkpointed": xform.grad(loss, policy=few),
        "backsolve": backsolve(steps),
        "symplectic": xform.grad(symplectic(steps), policy=everything),
    }


def temp(gradient: Any) -> int:
    """Return the temporary bytes of the compiled gradient."""
    memory: Any = jax.jit(gradient).lower(*inputs()).compile().memory_analysis()
    return memory.temp_size_in_bytes


def error(gradient: Any, reference: Any, stiffness: float) -> float:
    """Return the relative error in the weights."""
    args = inputs(stiffness)
    got, want = (
        np.concatenate([np.ravel(leaf) for leaf in jax.jit(g)(*args)[:2]])
        for g in (gradient, reference)
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(quick: bool) -> Finding:
    """Measure bytes by steps in float32, and errors against the direct gradient in float64."""
    steps, stiff = (STEPS[:3], STIFFNESS[::2]) if quick else (STEPS, STIFFNESS)
    held = {name: [temp(ways(n)[name]) for n in steps] for name in ways(1)}
    grows = {name: exponent(steps, sizes) for name, sizes in held.items()}
    with jax.enable_x64():
        wide = {
            name: [error(way, ways(FEW)["direct"], s) for s in stiff]
            for name, way in ways(FEW).items()
            if name != "direct"
        }
    grown = wide["backsolve"][-1] / wide["backsolve"][0]
    last = {name: sizes[-1] / held["direct"][-1] for name, sizes in held.items()}
    exact = max(wide["symplectic"] + wide["checkpointed"])
    return Finding(
        [
            Claim(
                "Of n steps the direct gradient of a neural ODE holds O(n), the checkpointed one"
                " less, backsolve and the symplectic adjoint what one step does",
                "Chen et al., arXiv:1806.07366; Matsubara et al., arXiv:2102.09750",
                "exponents of bytes in n: 1, below 1, 0, and 1 of the small states alone",
                "exponents "
                + ", ".join(f"{name} {p:.2f}" for name, p in grows.items())
                + f"; at {steps[-1]} steps of the direct one's bytes: "
                + ", ".join(f"{name} {r:.3f}" for name, r in last.items() if name != "direct"),
                verdict(
                    grows["direct"] > 0.85
                    and grows["backsolve"] < 0.1
                    and grows["checkpointed"] < 0.5
                    and last["symplectic"] < 0.25,
                    "wrong",
                ),
            ),
            Claim(
                "Backsolve is unstable",
                "Gholami et al., ANODE, arXiv:1902.10298",
                "what falls forward grows as exp(stiffness) backward",
                "relative error of the gradient in float64: "
                + ", ".join(
                    f"{e:.0e} at {s:.0f}" for s, e in zip(stiff, wide["backsolve"], strict=True)
                ),
                f"holds if the field contracts: at a rate of {stiff[-1]:.0f} the error is"
                f" {grown:.0e} times that at {stiff[0]:.0f}"
                if grown > 1e3
                else f"wrong: off by {max(wide['backsolve']):.0e} at most",
            ),
            Claim(
                "The symplectic adjoint is exact",
                "Matsubara et al., arXiv:2102.09750, theorem 2",
                "the gradient of the steps, to rounding",
                f"at most {max(wide['symplectic']):.0e} from the direct gradient in float64;"
                f" checkpointed {max(wide['checkpointed']):.0e}",
                verdict(exact < 1e-12, "wrong"),
            ),
        ],
        lambda figure: draw(figure, held, wide, steps, stiff),
    )


def draw(figure: Figure, held: Any, wide: Any, steps: Any, stiff: Any) -> None:
    """Draw bytes by steps, and errors by stiffness."""
    left, right = figure.subplots(1, 2)
    for name, sizes in held.items():
        left.loglog(steps, [n / 2**20 for n in sizes], "o-", label=name)
    left.set(xlabel="steps", ylabel="temporary MiB")
    left.legend(frameon=False, fontsize=8)
    for i, (name, errors) in enumerate(wide.items()):
        shown = [min(max(e, 1e-17), 1e20) if np.isfinite(e) else 1e20 for e in errors]
        right.semilogy(stiff, shown, "o-", color=f"C{i + 1}", label=name)
    right.set(xlabel="rate of contraction", ylabel="relative error of the gradient, float64")
