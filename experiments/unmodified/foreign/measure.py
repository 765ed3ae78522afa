"""What one program takes under `jax.grad` and under the default: bytes, and two kinds of time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.timing import paired, seconds
from experiments.unmodified.measure import differences, size
from experiments.unmodified.ways import JAX, XFORM, Loss, Way

BOTH = {"default": XFORM["default"], "jax.grad": JAX["jax.grad"]}
# No more pairs of compilations or steps are begun after as many seconds.
COMPILING, STEPPING = 12, 6
MOST_STEPS = 25


def measured(loss: Loss, args: Sequence[Any]) -> dict[str, Any]:
    """Temporary bytes, ratios of the times to compile and of a step, and differences, on a CPU."""
    for way in BOTH.values():  # so that neither of the two is the first to be compiled
        build(way, lambda x: jnp.sum(jnp.tanh(x)), (jnp.ones(8),))
    made, compiling, tracing = compilations(loss, args)
    sizes = {name: step.memory_analysis().temp_size_in_bytes for name, step in made.items()}
    mine, theirs = made.values()
    found = differences(mine, theirs, args)  # the first step of both
    both = seconds(mine, args) + seconds(theirs, args)
    pairs = int(min(max(STEPPING / both, 5), MOST_STEPS))
    return {"temp": sizes, "compile": compiling, "trace and lower": tracing,
            "time": paired(mine, theirs, args, n=pairs), "seconds of both steps": both,
            } | found  # fmt: skip


def elsewhere(loss: Loss, args: Sequence[Any], target: str) -> dict[str, Any]:
    """Temporary bytes of both on a device that is not here, by its compiler."""
    sizes = {name: size(way, loss, args, target) for name, way in BOTH.items()}
    for found in sizes.values():
        if "refused" in found:
            return {"failed": found["refused"].splitlines()[0]}
    return {"temp": {name: found["temp"] for name, found in sizes.items()}}


def compilations(loss: Loss, args: Sequence[Any]) -> tuple[dict[str, Any], Any, Any]:
    """Both ways compiled, with pairs of the seconds that XLA takes, and that it takes to lower.

    The two swap who goes first, and nothing that JAX has cached is used.
    """
    made: dict[str, Any] = {}
    lowering: dict[str, list[float]] = {name: [] for name in BOTH}
    compiling: dict[str, list[float]] = {name: [] for name in BOTH}
    begun = time.perf_counter()
    while not made or (len(compiling["default"]) < 3 and time.perf_counter() < begun + COMPILING):
        names = list(BOTH) if len(compiling["default"]) % 2 else list(BOTH)[::-1]
        for name in names:
            made[name], lower, compile_ = build(BOTH[name], loss, args)
            lowering[name].append(lower)
            compiling[name].append(compile_)
    return {name: made[name] for name in BOTH}, compiling, lowering


def build(way: Way, loss: Loss, args: Sequence[Any]) -> tuple[Any, float, float]:
    """A compiled gradient, the seconds to trace and lower it, and the seconds of XLA."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(lambda *args: way(loss)(*args)).lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return compiled, middle - start, time.perf_counter() - middle


def ratio(pairs: dict[str, list[float]]) -> float:
    """The median over pairs of the default's time to jax.grad's."""
    return statistics.median(map(lambda a, b: a / b, pairs["default"], pairs["jax.grad"]))


def whole(found: dict[str, Any]) -> float:
    """The same of all that a user waits for: tracing, lowering and compiling."""
    parts = found["trace and lower"], found["compile"]
    return ratio({name: [a + b for a, b in zip(*(part[name] for part in parts), strict=True)]
                  for name in BOTH})  # fmt: skip
