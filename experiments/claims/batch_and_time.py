"""How much larger a batch can be with remat, and what it costs."""

from __future__ import annotations

from typing import Any

import jax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from experiments.claims.programs import transformer, types
from experiments.timing import seconds
from xform.memory.targets import missing, parse_target

WIDTH, DEPTH, LENGTH = 128, 8, 256
CAPACITY = "512 MiB"
TARGETS = ("tpu:v5e:1x1", "gpu:h100")
POLICIES: dict[str, Any] = {
    "save_everything": xform.policies.save_everything,
    "default": None,
    "save_nothing": xform.policies.save_nothing,
}


def made(batch: int) -> Any:
    """Return a transformer, and a batch for it."""
    return transformer(WIDTH, DEPTH, batch, LENGTH)


def largest(target: str, policy: Any, capacity: str | None) -> Any:
    """Return the largest batch whose gradient fits."""

    def gradient(w: Any, x: jax.Array) -> Any:
        return xform.value_and_grad(made(x.shape[0])[0], policy=policy)(w, x)

    inputs = lambda batch: types(made(batch)[1])
    return xform.memory.max_batch(gradient, inputs=inputs, target=target, capacity=capacity)


def rate(batch: int, policy: Any) -> float:
    """Return samples per second on this machine, the best of three runs."""
    loss, args = made(batch)
    run = jax.jit(xform.value_and_grad(loss, policy=policy)).lower(*args).compile()
    seconds(run, args)
    return batch / min(seconds(run, args) for _ in range(3))


def measure(quick: bool) -> Finding:
    """Measure times on a CPU with a capacity of a GiB, and estimate chips by the roofline."""
    sizes = {n: largest("cpu", p, CAPACITY).size for n, p in POLICIES.items()}
    rates = {n: rate(sizes[n], p) for n, p in POLICIES.items()}
    base = "save_everything"
    rows = {"cpu": {n: (sizes[n] / sizes[base], rates[base] / rates[n]) for n in POLICIES}}
    absent: list[str] = []
    for target in TARGETS if not quick else ():
        if missing(parse_target(target)):
            absent.append(target)
            continue
        found = {n: largest(target, p, None) for n, p in POLICIES.items()}
        each = {n: b.fits.seconds / b.size for n, b in found.items() if b.fits.seconds}
        rows[target] = {n: (b.size / found[base].size, each[n] / each[base])
                        for n, b in found.items() if n in each}  # fmt: skip
    said = "; ".join(
        f"{target}: " + ", ".join(f"{n} {size:.1f} times the batch, {time:.2f} of the time a sample"
                                  for n, (size, time) in by.items() if n != base)
        for target, by in rows.items()
    )  # fmt: skip
    inside = [by[n][0] >= 2 and by[n][1] <= 1.35 for by in rows.values()
              for n in ("default", "save_nothing") if n in by]  # fmt: skip
    larger = [size for by in rows.values() for n, (size, _) in by.items() if n != base]
    return Finding(
        [
            Claim(
                "Remat allows two to three times the batch for about 30% more time",
                "Chen et al., arXiv:1604.06174; practitioners' guides",
                "one more forward pass is a third; how much larger the batch is depends on the"
                " model",
                said + (f"; not measured here: {', '.join(absent)}" if absent else ""),
                verdict(
                    all(inside) and max(larger) <= 3.5,
                    f"holds if more is expected: the batch is {spread(larger, 1)} times as large"
                    if all(inside)
                    else f"wrong: {sum(inside)} of {len(inside)} are so",
                ),
            )
        ],
        lambda figure: draw(figure, rows),
    )


def draw(figure: Figure, rows: dict[str, dict[str, tuple[float, float]]]) -> None:
    """Draw batch against time, for each target."""
    axes = figure.subplots()
    for i, (target, by) in enumerate(rows.items()):
        for (name, (size, time)), marker in zip(by.items(), "so^", strict=False):
            axes.plot(size, time, marker, color=f"C{i}", label=f"{target}, {name}")
    axes.axhline(1.3, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="batch / that of saving everything",
             ylabel="time of a sample / that of saving everything")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
