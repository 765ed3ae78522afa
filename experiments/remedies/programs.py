"""Four programs whose memory people reduce by hand, with the change that they make.

They have the structure of programs in public reports, written anew. Each is a loss of one argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Loss = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, and the same loss as its author changed it.

    Attributes:
      loss: the loss as it is written first.
      by_hand: the same with less memory.
      change: what the author changed.
      x: the argument.
    """

    loss: Loss
    by_hand: Loss
    change: str
    x: jax.Array


def _in_chunks(f: Callable[[jax.Array], jax.Array], xs: jax.Array, chunks: int) -> jax.Array:
    """Map `f` over parts of `xs`, one after the other, and save none of their values."""
    parts = xs.reshape(chunks, -1, *xs.shape[1:])
    return lax.map(jax.checkpoint(f), parts).reshape(xs.shape[0], -1)


def beamformer() -> Program:
    """The speed of sound that focuses an ultrasound image: each pixel sums delayed channels."""
    channels, samples, side, rate = 64, 1024, 96, 2e7
    rng = np.random.default_rng(0)
    signals = jnp.asarray(rng.standard_normal((channels, samples)), jnp.float32)
    elements = jnp.linspace(-0.01, 0.01, channels)
    depth, across = jnp.linspace(0.005, 0.03, side), jnp.linspace(-0.01, 0.01, side)
    pixels = jnp.stack(jnp.meshgrid(depth, across, indexing="ij"), -1).reshape(-1, 2)

    def pixel(speed: jax.Array, place: jax.Array) -> jax.Array:
        path = jnp.hypot(place[0], place[1] - elements) + place[0]
        index = jnp.clip(path / speed * rate, 0, samples - 2)
        low = jnp.floor(index).astype(jnp.int32)
        part = index - low
        delayed = jax.vmap(lambda s, i, p: (1 - p) * s[i] + p * s[i + 1])(signals, low, part)
        window = jnp.cos(jnp.pi * elements / 0.025) ** 2
        return jnp.sum(window * delayed)

    def focus(image: jax.Array) -> jax.Array:
        return -jnp.mean(image**4) / jnp.mean(image**2) ** 2

    image = lambda speed, places: jax.vmap(lambda p: pixel(speed[0], p))(places)
    return Program(
        lambda speed: focus(image(speed, pixels)),
        lambda speed: focus(_in_chunks(lambda p: image(speed, p), pixels, 32)),
        "pixels in 32 chunks, each in jax.checkpoint",
        jnp.full(1, 1540.0),
    )


def shots() -> Program:
    """The speeds of a medium from seismic shots: each is a simulation of the wave equation."""
    n, steps, count, dt = 64, 120, 8, 0.1
    sources = jnp.arange(count) * (n // count) + 3
    seen = jnp.asarray(np.random.default_rng(0).standard_normal((count, steps, n)), jnp.float32)

    def shot(speed: jax.Array, source: jax.Array) -> jax.Array:
        def step(
            state: tuple[jax.Array, jax.Array], t: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            now, before = state
            laplacian = sum(jnp.roll(now, s, a) for s in (1, -1) for a in (0, 1)) - 4 * now
            after = 2 * now - before + (dt * speed) ** 2 * laplacian
            pulse = jnp.exp(-((t * dt - 2) ** 2)) * dt**2
            return (after.at[1, source].add(pulse), now), after[1]

        zeros = jnp.zeros((n, n))
        return lax.scan(step, (zeros, zeros), jnp.arange(steps))[1]

    def misfit(speed: jax.Array, source: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.sum((shot(speed, source) - seen) ** 2)

    def loss(speed: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(misfit, (None, 0, 0))(speed, sources, seen))

    def by_hand(speed: jax.Array) -> jax.Array:
        one = jax.checkpoint(lambda pair: misfit(speed, *pair))
        return jnp.sum(lax.map(one, (sources, seen)))

    return Program(loss, by_hand, "one shot at a time, in jax.checkpoint", jnp.full((n, n), 1.5))


def splats() -> Program:
    """The Gaussians that make an image: each pixel sums all of them by their opacity."""
    count, side = 256, 64
    rng = np.random.default_rng(0)
    target = jnp.asarray(rng.uniform(size=(side * side, 3)), jnp.float32)
    axis = jnp.linspace(0, 1, side)
    pixels = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)

    def color(splat: jax.Array, place: jax.Array) -> jax.Array:
        centre, scale, opacity, rgb = splat[:, :2], splat[:, 2:4], splat[:, 4], splat[:, 5:]
        near = jnp.exp(-jnp.sum(((place - centre) * jnp.exp(scale)) ** 2, -1))
        alpha = jax.nn.sigmoid(opacity) * near
        through = jnp.cumprod(1 - alpha + 1e-6) / (1 - alpha + 1e-6)
        return (alpha * through) @ jax.nn.sigmoid(rgb)

    image = lambda splat, places: jax.vmap(lambda p: color(splat, p))(places)
    return Program(
        lambda splat: jnp.mean((image(splat, pixels) - target) ** 2),
        lambda splat: jnp.mean((_in_chunks(lambda p: image(splat, p), pixels, 16) - target) ** 2),
        "pixels in 16 chunks, each in jax.checkpoint",
        jnp.asarray(rng.uniform(size=(count, 8)), jnp.float32) + jnp.r_[0, 0, 2, 2, 0, 0, 0, 0],
    )


def unitary() -> Program:
    """The pulses of a quantum gate: the product of the exponentials of many Hamiltonians."""
    size, steps = 32, 200
    rng = np.random.default_rng(0)

    def hermitian() -> jax.Array:
        a = rng.standard_normal((size, size)) + 1j * rng.standard_normal((size, size))
        return jnp.asarray((a + a.conj().T) / 2 / size, jnp.complex64)

    drift, *controls = (hermitian() for _ in range(3))
    gate = jnp.roll(jnp.eye(size, dtype=jnp.complex64), 1, 0)

    def step(whole: jax.Array, pulse: jax.Array) -> tuple[jax.Array, None]:
        generator = -0.1j * (drift + sum(p * c for p, c in zip(pulse, controls, strict=True)))
        term = total = jnp.eye(size, dtype=jnp.complex64)
        for k in range(1, 9):
            term = term @ generator / k
            total = total + term
        return total @ whole, None

    def infidelity(pulses: jax.Array, step: Callable[..., tuple[jax.Array, None]]) -> jax.Array:
        whole, _ = lax.scan(step, jnp.eye(size, dtype=jnp.complex64), pulses)
        return 1 - jnp.abs(jnp.vdot(gate, whole) / size) ** 2

    return Program(
        lambda pulses: infidelity(pulses, step),
        lambda pulses: infidelity(pulses, jax.checkpoint(step)),
        "jax.checkpoint of the step",
        jnp.asarray(rng.standard_normal((steps, 2)), jnp.float32),
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    "beamformer": beamformer,
    "shots": shots,
    "splats": splats,
    "unitary": unitary,
}
