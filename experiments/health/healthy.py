"""Models without a fault: whether they train, and what a diagnosis reports before and after."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from experiments.health.planted import FAST
from experiments.health.presets import PRESETS, Preset
from xform.diagnosis.diagnosis import Diagnosis
from xform.diagnosis.row import LayerHealth

STEPS = 150


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result for a model: losses, and its rows before the first and after the last step."""

    first: float
    last: float
    before: list[LayerHealth]
    after: list[LayerHealth]

    @property
    def trains(self) -> bool:
        """Whether the loss on new batches fell by at least a third."""
        return self.last < 2 / 3 * self.first

    @property
    def silent(self) -> bool:
        """Whether every layer is fine, before and after."""
        return all(row.verdict == "fine" for row in (*self.before, *self.after))


@functools.cache
def compiled(name: str) -> tuple[Preset, Diagnosis, Callable[..., Any], Any]:
    """Return a preset, its diagnosis, its step with readings, and the optimizer.

    The step takes parameters, state, batch, and a factor of the updates.
    """
    preset, key = PRESETS[name](), jax.random.key(0)
    of = Diagnosis(preset.loss, preset.init(key), preset.batch(key))
    adam = optax.adam(preset.rate)

    def step(params: Any, state: Any, batch: Any, factor: Any = 1.0) -> Any:
        value, grads, read = of.value_and_grad(params, batch, key)
        moves, state = adam.update(grads, state, params)
        after = optax.apply_updates(params, jax.tree.map(lambda x: factor * x, moves))
        return after, state, value, of.updated(read, params, after)

    return preset, of, jax.jit(step, compiler_options=FAST), adam


def train(name: str, seed: int, steps: int = STEPS) -> Trained:
    """Train a preset on new batches, and diagnose it at the first and the last step."""
    preset, of, step, adam = compiled(name)
    key = jax.random.key(seed)
    params = preset.init(key)
    state, losses, readings = adam.init(params), list[float](), list[Any]()
    for i in range(steps):
        batch = preset.batch(jax.random.fold_in(key, i))
        params, state, value, read = step(params, state, batch)
        losses.append(float(value))
        if i in (0, steps - 1):
            readings.append(jax.device_get(read))
    last = sum(losses[-5:]) / len(losses[-5:])
    return Trained(losses[0], last, *map(of.with_verdicts, readings))
