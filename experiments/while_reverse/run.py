"""Time and bytes of reverse mode through a loop of unknown length, relative to a scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax import lax

import xform
from experiments.report import write_table
from experiments.timing import paired

HERE = Path(__file__).parent
STEPS, CHECKPOINTS = (32, 100, 320, 1000, 3200), (4, 32, 100)
LANES = (1.0, 0.5, 0.3, 0.1)  # the length of each lane, relative to the longest

Step = Callable[[jax.Array, Any], jax.Array]


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A recurrent layer: one product forward, two backward."""
    return jnp.tanh(x @ w)


def bend(x: jax.Array, w: jax.Array) -> jax.Array:
    """Apply an elementwise nonlinear function."""
    return jnp.sin(x) * w + x


def loop(step: Step, x: jax.Array, w: Any, n: Any) -> jax.Array:
    """Compute the mean square after `n` steps, where `n` is known only at run time."""
    return jnp.mean(lax.fori_loop(0, n, lambda _, x: step(x, w), x) ** 2)


def scan(step: Step, x: jax.Array, w: Any, n: int) -> jax.Array:
    """Compute the same for a number of steps that is known in advance."""
    return jnp.mean(lax.scan(lambda x, _: (step(x, w), None), x, None, length=n)[0] ** 2)


def compiled(f: Any, *args: Any, checkpoints: int = 32) -> Any:
    """Return a compiled function."""
    with xform.policies.checkpoints_per_while_loop(checkpoints):
        return jax.jit(f).lower(*args).compile()


def temp(run: Any) -> float:
    """Return the KiB of temporary memory."""
    return run.memory_analysis().temp_size_in_bytes / 1024


def against_scan(step: Step, args: Any, steps: int, checkpoints: int):
    """Return the time ratio with quartiles, and the KiB of both, after comparing gradients."""
    ours = compiled(
        xform.grad(lambda a, n: loop(step, *a, n)), args, steps, checkpoints=checkpoints
    )
    keep = xform.policies.save_everything
    theirs = compiled(xform.grad(lambda a, n: scan(step, *a, steps), policy=keep), args, steps)
    # Only in float32: tests/rules/test_while.py compares to 1e-12 in float64.
    chex.assert_trees_all_close(ours(args, steps), theirs(args, steps), rtol=1e-3, atol=1e-4)
    return (*paired(ours, theirs, (args, steps)), temp(ours), temp(theirs))


def against_longest(step: Step, args: Any, steps: int, checkpoints: int):
    """Compare lanes of several lengths under vmap with the longest loop on the same rows."""
    x, w = args
    xs, ns = jnp.stack([x] * len(LANES)), jnp.array([int(steps * part) for part in LANES])
    one = xform.grad(lambda x, n: loop(step, x, w, n))
    wide = xform.grad(lambda xs, ns: loop(jax.vmap(step, (0, None)), xs, w, ns[0]))
    ours = compiled(jax.vmap(one), xs, ns, checkpoints=checkpoints)
    theirs = compiled(wide, xs, ns, checkpoints=checkpoints)
    return (*paired(ours, theirs, (xs, ns)), temp(ours), temp(theirs))


def main() -> None:
    """Measure every row, and write the table and the plot."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (16, 128))
    w = jax.random.normal(key, (128, 128)) / 128**0.5
    small = x[0, :16], w[:16, :16] * 3
    cases: list[tuple[str, Step, Any]] = [
        ("layer, 16 x 128", layer, (x, w)),
        ("layer, 16 elements", layer, small),
        ("elementwise, 4096 elements", bend, (jnp.ones(4096), 0.01)),
        ("elementwise, 8 elements", bend, (jnp.ones(8), 0.01)),
    ]
    rows: list[list[str]] = []

    def add(name: str, steps: int, checkpoints: int, found: Any) -> None:
        middle, low, high, ours, theirs = found
        ratio = [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        rows.append([name, str(steps), str(checkpoints), *ratio, f"{ours:,.0f}", f"{theirs:,.0f}"])
        print(rows[-1], flush=True)

    curves: dict[int, list[Any]] = {}
    name, step, args = cases[0]
    for checkpoints in CHECKPOINTS:
        curves[checkpoints] = [against_scan(step, args, n, checkpoints) for n in STEPS]
        for n, found in zip(STEPS, curves[checkpoints], strict=True):
            add(f"{name} / scan", n, checkpoints, found)
    for name, step, args in cases[1:]:
        add(f"{name} / scan", 1000, 32, against_scan(step, args, 1000, 32))
    for name, step, args in cases:
        for checkpoints in (32, 128):
            found = against_longest(step, args, 1000, checkpoints)
            add(f"{name}, 4 lanes / longest", 1000, checkpoints, found)
    head = ["case", "steps", "checkpoints", "time ratio (median)", "quartiles", "temp KiB",
            "temp KiB of the other"]  # fmt: skip
    write_table(HERE, head, rows)
    plot(curves)


def plot(curves: dict[int, list[Sequence[float]]]) -> None:
    """Draw time and memory over the number of steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for checkpoints, found in curves.items():
        middle, low, high, ours, theirs = zip(*found, strict=True)
        (line,) = left.plot(STEPS, middle, "o-", label=f"{checkpoints} checkpoints")
        left.fill_between(STEPS, low, high, alpha=0.2, color=line.get_color())
        right.plot(STEPS, ours, "o-", color=line.get_color(), label=f"{checkpoints} checkpoints")
    right.plot(STEPS, theirs, "s--", color="black", label="scan")
    left.axhline(2.5, color="gray", linewidth=0.8)
    left.set(xscale="log", xlabel="steps", ylabel="time / time of a scan's gradient")
    right.set(xscale="log", yscale="log", xlabel="steps", ylabel="temporary memory, KiB")
    for axes in (left, right):
        axes.set_xticks(STEPS, [str(n) for n in STEPS], minor=False)
        axes.legend()
    figure.suptitle("Gradient of a while_loop over a recurrent layer (16 x 128)")
    figure.savefig(HERE / "while_reverse.png", dpi=150)


if __name__ == "__main__":
    main()
