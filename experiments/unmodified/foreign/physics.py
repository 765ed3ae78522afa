"""Physics: fields on lattices, fluids, particles, and rays of light."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.unmodified.foreign.parts import Made, Program, normal
from experiments.unmodified.programs import KEY
from experiments.unmodified.sources import package


def lattice(folder: Path) -> Made:
    """The action of a scalar field, of 32 lattices of 64 by 64, whose values a layer makes."""
    phi4 = package(folder / "continuous-flow-lft", "jaxlft.phi4", "jaxlft")
    theory = phi4.Phi4Theory(shape=(64, 64), m2=-4.0, lam=8.0)

    def loss(params: Any, noise: jax.Array) -> jax.Array:
        w, scale = params
        fields = jnp.tanh(noise @ w) * scale
        return theory.action(fields).mean()

    return loss, ((normal(64, 64) / 8, jnp.ones(())), normal(32, 64, 64, seed=2))


def fluid(folder: Path) -> Made:
    """The energy of a flow after ten steps of Navier-Stokes, by its first velocities."""
    cfd = package(folder / "jax-cfd", "jax_cfd.base")
    grid = cfd.grids.Grid((64, 64), domain=((0, 2 * jnp.pi),) * 2)
    start = cfd.initial_conditions.filtered_velocity_field(KEY, grid, 2.0, 4)
    step = cfd.equations.semi_implicit_navier_stokes(
        density=1.0, viscosity=1e-2, dt=0.01, grid=grid
    )
    many = cfd.funcutils.repeated(step, steps=10)

    def loss(start: Any) -> jax.Array:
        return sum(jnp.mean(v.array.data**4) for v in many(start))

    return loss, (start,)


def molecular(folder: Path) -> Made:
    """The potential energy of 256 soft spheres after 20 steps, by their first places."""
    md = package(folder / "jax-md", "jax_md")
    displacement, shift = md.space.periodic(8.0)
    energy = md.energy.soft_sphere_pair(displacement)
    init, step = md.simulate.nve(energy, shift, dt=1e-2)

    def loss(places: jax.Array) -> jax.Array:
        state = init(KEY, places, kT=0.1)
        state = jax.lax.fori_loop(0, 20, lambda _, s: step(s), state)
        return energy(state.position)

    return loss, (8 * jax.random.uniform(KEY, (256, 2)),)


PROGRAMS = {
    "lattice action": Program("mathisgerdes/continuous-flow-lft", "jaxlft/phi4.py", lattice),
    "Navier-Stokes": Program("google/jax-cfd", "jax_cfd/base", fluid),
    "soft spheres": Program("jax-md/jax-md", "jax_md", molecular),
}
