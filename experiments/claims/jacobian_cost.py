"""The cost of a Jacobian in forward and in reverse mode, by number of layers and by width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict
from experiments.claims.programs import normal
from xform.interpret.cost import program_flops

LAYERS, WIDTHS = (4, 8, 16, 32, 64), (16, 32, 64, 128, 256)
FIXED_LAYERS, FIXED_WIDTH = 16, 64
ROWS = 2**14


def loss(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Compute a number from layers of products."""
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


def layers(m: int, d: int) -> tuple[jax.Array, jax.Array]:
    """Return a point of `d` numbers, and `m` layers."""
    return jnp.ones(d), jnp.stack([normal(d, d, seed=i) for i in range(m)])


def rows(m: int, d: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return types with so many points that compiler-made copies of the weights do not matter."""
    f32 = jnp.float32
    return jax.ShapeDtypeStruct((ROWS, d), f32), jax.ShapeDtypeStruct((m, d, d), f32)


def waiting(f: Callable[..., Any], *args: Any) -> int:
    """Return the temporary bytes of a compiled function. Nothing is run."""
    memory: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes


def measure(quick: bool) -> Finding:
    """Measure the exponents of FLOPs and of bytes, in layers and in width."""
    sizes = [*((m, FIXED_WIDTH) for m in LAYERS), *((FIXED_LAYERS, d) for d in WIDTHS)]
    reverse, forward = xform.grad(loss), xform.jacfwd(loss)
    one = lambda x, ws: xform.jvp(lambda x: loss(x, ws), (x,), (x,))[1]
    work = {s: (program_flops(forward, *layers(*s)), program_flops(reverse, *layers(*s)))
            for s in sizes}  # fmt: skip
    held = {s: (waiting(one, *rows(*s)), waiting(reverse, *rows(*s))) for s in sizes}
    by = lambda table, i: (
        exponent(LAYERS, [table[m, FIXED_WIDTH][i] for m in LAYERS]),
        exponent(WIDTHS, [table[FIXED_LAYERS, d][i] for d in WIDTHS]),
    )
    (fm, fd), (rm, rd) = by(work, 0), by(work, 1)
    (hm, hd), (km, kd) = by(held, 0), by(held, 1)
    passes = passed()
    close = lambda a, b: abs(a - b) < 0.15
    source = "Griewank and Walther, Evaluating Derivatives, chapters 3 and 4"
    return Finding(
        [
            Claim(
                "A Jacobian takes n forward passes or m reverse passes",
                source,
                "FLOPs over those of one pass: n = 24, m = 10",
                f"{passes[0]:.1f} passes forward, {passes[1]:.1f} reverse",
                verdict(
                    20 <= passes[0] <= 24.5 and 8 <= passes[1] <= 10.5,
                    "wrong: the passes share what does not depend on the direction",
                ),
            ),
            Claim(
                "The gradient along m layers of width d costs O(m d³) by forward mode, O(m d²) by"
                " reverse mode",
                source,
                "exponents of FLOPs (m, d): forward (1, 3), reverse (1, 2)",
                f"forward ({fm:.2f}, {fd:.2f}), reverse ({rm:.2f}, {rd:.2f})",
                verdict(close(fm, 1) and close(fd, 3) and close(rm, 1) and close(rd, 2), "wrong"),
            ),
            Claim(
                "Forward mode holds O(d), reverse mode O(m d)",
                source,
                "exponents of compiled temporary bytes of many points (m, d): one forward pass"
                " (0, 1), reverse (1, 1)",
                f"forward ({hm:.2f}, {hd:.2f}), reverse ({km:.2f}, {kd:.2f})",
                verdict(
                    close(hm, 0) and close(hd, 1) and close(km, 1) and close(kd, 1),
                    "wrong: a compiler holds more than the theory counts",
                ),
            ),
        ],
        lambda figure: draw(figure, work, held),
    )


def passed() -> tuple[float, float]:
    """Return the FLOPs of a Jacobian from 24 to 10 numbers, in passes of each mode."""
    ws = normal(32, 24), normal(10, 32, seed=1)
    f = lambda x: jnp.tanh(ws[1] @ jnp.tanh(ws[0] @ x))
    x, value = jnp.ones(24), program_flops(lambda x: f(x), jnp.ones(24))
    push = program_flops(lambda x: xform.jvp(f, (x,), (x,)), x) - value
    pull = program_flops(lambda x: xform.vjp(f, x)[1](jnp.ones(10)), x) - value
    return (
        (program_flops(xform.jacfwd(f), x) - value) / push,
        (program_flops(xform.jacrev(f), x) - value) / pull,
    )


def draw(figure: Figure, work: Any, held: Any) -> None:
    """Draw FLOPs and bytes by layers and by width."""
    for axes, (table, name) in zip(
        figure.subplots(1, 2), ((work, "FLOPs"), (held, "temporary bytes")), strict=True
    ):
        for i, mode in enumerate(("forward", "reverse")):
            axes.loglog(LAYERS, [table[m, FIXED_WIDTH][i] for m in LAYERS], "o-",
                        label=f"{mode}, by layers")  # fmt: skip
            axes.loglog(WIDTHS, [table[FIXED_LAYERS, d][i] for d in WIDTHS], "s--",
                        label=f"{mode}, by width")  # fmt: skip
        axes.set(xlabel="layers, or width", ylabel=name)
        axes.legend(frameon=False, fontsize=8)
