"""Where forward mode pays: sensitivities of an ODE, and a physics problem with few inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.timing import paired
from models.nets.ode import flow
from xform.interpret.cost import program_flops

SPECIES, STEPS = (1, 2, 4, 8), 200  # pairs of predator and prey: four rates each
GRID, HEAT_STEPS, SOURCES = 64, 100, (1, 2, 4, 8, 16)


def populations(steps: int) -> Callable[[jax.Array], jax.Array]:
    """Return the final populations by the rates `[pairs, 4]`: Lotka and Volterra's equations."""

    def final(rates: jax.Array) -> jax.Array:
        a, b, c, d = rates.T

        def field(t: Any, x: jax.Array) -> jax.Array:
            prey, predator = x
            return jnp.stack([a * prey - b * prey * predator, c * prey * predator - d * predator])

        return flow(field, jnp.ones((2, len(rates))), 5.0, steps).ravel()

    return final


def temperature(sources: jax.Array) -> jax.Array:
    """Compute the mean square of a heated plate's temperature after some explicit steps.

    Each source has one number, its strength.
    """
    places = jnp.linspace(0.2, 0.8, len(sources))
    axis = jnp.linspace(0, 1, GRID)
    bumps = jnp.exp(-100 * ((axis - places[:, None]) ** 2))
    heat = jnp.einsum("s,si,sj->ij", sources, bumps, bumps)

    def step(u: jax.Array, _: Any) -> Any:
        around = sum(jnp.roll(u, by, axis) for by in (-1, 1) for axis in (0, 1))
        return u + 0.2 * (around - 4 * u) * (1 + 0.1 * jnp.tanh(u)) + 0.01 * heat, None

    return jnp.mean(jax.lax.scan(step, jnp.zeros((GRID, GRID)), None, HEAT_STEPS)[0] ** 2)


def ratios(f: Any, x: jax.Array, n: int) -> tuple[float, float, float]:
    """Return FLOPs, temporary bytes and time of forward mode over those of reverse mode."""
    forward, reverse = xform.jacfwd(f), xform.jacrev(f)
    runs: Any = [jax.jit(g).lower(x).compile() for g in (forward, reverse)]
    np.testing.assert_allclose(runs[0](x), runs[1](x), rtol=1e-3, atol=1e-4)
    held = [r.memory_analysis().temp_size_in_bytes for r in runs]
    work = program_flops(forward, x) / program_flops(reverse, x)
    return work, held[0] / held[1], paired(*runs, (x,), n=n)[0]


def crossover(sizes: Sequence[int], by: Sequence[float]) -> str:
    """Return where a ratio passes 1, by linear interpolation in logarithms."""
    above = [i for i, r in enumerate(by) if r > 1]
    if not above:
        return f"more than {sizes[-1]}"
    if above[0] == 0:
        return f"fewer than {sizes[0]}"
    i = above[0]
    at = np.interp(0, np.log([by[i - 1], by[i]]), np.log([sizes[i - 1], sizes[i]]))
    return f"{np.exp(at):.1f}"


def measure(quick: bool) -> Finding:
    """Measure both problems with few and with many inputs, on a CPU."""
    n = 5 if quick else 11
    rates = lambda pairs: jnp.tile(jnp.array([1.1, 0.4, 0.1, 0.4]), (pairs, 1))
    inputs = [4 * pairs for pairs in SPECIES]
    ode = [ratios(populations(STEPS), rates(pairs), n) for pairs in SPECIES]
    heat = [ratios(temperature, jnp.linspace(1, 2, k), n) for k in SOURCES]
    (ode_flops, ode_bytes, ode_time), (flops, bytes_, time) = (
        zip(*rows, strict=True) for rows in (ode, heat)
    )
    of = ("FLOPs", "bytes", "time")
    columns = lambda rows: zip(of, zip(*rows, strict=True), strict=True)
    said = {name: ", ".join(f"{w} {spread(by)}" for w, by in columns(rows))
            for name, rows in (("ode", ode), ("heat", heat))}  # fmt: skip
    at = {w: crossover(SOURCES, by) for w, by in zip(of, (flops, bytes_, time), strict=True)}
    wins = [w for w, by in zip(of, (ode_flops, ode_bytes, ode_time), strict=True) if max(by) < 1]
    loses = [w for w in of if w not in wins]
    per_output = 2 / float(np.median(ode_flops))
    few = [w for w, by in zip(of, (flops, bytes_, time), strict=True) if by[0] < 1]
    return Finding(
        [
            Claim(
                "Forward mode pays for the sensitivities of an ODE",
                "Griewank and Walther, Evaluating Derivatives, chapter 3; Dickinson and Gelinas,"
                " Sensitivity analysis of ODE systems, 1976",
                "2 outputs for 4 inputs: forward mode holds no step, reverse mode all of them;"
                " FLOPs grow with inputs or with outputs",
                f"forward over reverse, predators and prey with {inputs[0]} to {inputs[-1]} rates"
                f" and half as many outputs, {STEPS} steps: {said['ode']}",
                verdict(
                    not loses,
                    f"holds in {' and '.join(wins)}; in {' and '.join(loses)} with less than"
                    f" {per_output:.1f} inputs for each output"
                    if wins
                    else "wrong",
                ),
            ),
            Claim(
                "Forward mode pays for a physics problem with few inputs and one output",
                "Griewank and Walther, Evaluating Derivatives, chapter 3",
                "k inputs: k forward passes that share the value, against a backward pass of about"
                " two, which stores all steps: FLOPs cross at 2 or 3 inputs",
                f"forward over reverse, a plate of {GRID} x {GRID} with {SOURCES[0]} to"
                f" {SOURCES[-1]} sources of heat, {HEAT_STEPS} steps: {said['heat']}; they cross"
                " at " + ", ".join(f"{n} inputs in {w}" for w, n in at.items()),
                f"holds if there are few inputs: {', '.join(f'{at[w]} in {w}' for w in few)}"
                if few
                else "wrong: reverse mode is cheaper with one input",
            ),
        ],
        lambda figure: draw(
            figure, {"rates of the ODE": (inputs, ode), "sources of heat": (SOURCES, heat)}
        ),
    )


def draw(figure: Figure, found: Any) -> None:
    """Draw the ratios by inputs."""
    for axes, (name, (sizes, rows)) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for i, what in enumerate(("FLOPs", "temporary bytes", "time")):
            axes.loglog(sizes, [row[i] for row in rows], "o-", label=what)
        axes.axhline(1, color="gray")
        axes.set_xticks(sizes, sizes)
        axes.minorticks_off()
        axes.set(xlabel=name, ylabel="forward / reverse")
        axes.legend(frameon=False, fontsize=8)
