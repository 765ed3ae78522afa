"""The symplectic adjoint: the exact gradient of a flow, holding one evaluation of a field at once.

A flow by Runge and Kutta's fourth order keeps its states alone. On the way back each step makes its
four stages again, and then pulls the cotangent through the field at one stage after another, so
that what a single evaluation keeps is all that is live besides. The result is the gradient of the
steps that were taken, not of the equation. Source: Matsubara, Miyatake, Yaguchi, "Symplectic
adjoint method for exact gradient of neural ODE with minimal memory", arXiv:2102.09750, section 3;
Sanz-Serna, "Symplectic Runge-Kutta schemes for adjoint equations", SIAM Review 58(1), 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import xform

Field = Callable[[Any, Any, Any], Any]

# Where a stage is in its step, and how far from its start it goes along the stage before.
_PLACES = (0.0, 1 / 2, 1 / 2, 1.0)
_WEIGHTS = (1 / 6, 1 / 3, 1 / 3, 1 / 6)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def symplectic_flow(field: Field, params: Any, x: Any, time: float, steps: int) -> Any:
    """Follow `dx/dt = field(params, t, x)` for a time, by equal steps of fourth order.

    Its value is that of `models.nets.ode.flow`, its gradient that of `flow` to rounding.

    Args:
      field: a pure function of parameters, a time and a state.
      params: a pytree of arrays.
      x: the state at time 0, a pytree of arrays.
      time: how long; a number.
      steps: how many, at least 1.

    Cost: backward, each step runs the field eight times and pulls through it four times. Held are
    `steps + 5` states, and what one evaluation of the field keeps.
    """
    return _states(field, params, x, time, steps)[0]


def _states(field: Field, params: Any, x: Any, time: float, steps: int) -> tuple[Any, Any]:
    """The last state, and a stack of the states before each step."""
    h = time / steps

    def step(x: Any, i: jax.Array) -> tuple[Any, Any]:
        _, slopes = _stages(field, params, i * h, h, x)
        return _ahead(x, h, _WEIGHTS, slopes), x

    return jax.lax.scan(step, x, jnp.arange(steps))


def _ahead(x: Any, h: float, weights: tuple[float, ...], slopes: list[Any]) -> Any:
    """A state moved along slopes."""
    for weight, slope in zip(weights, slopes, strict=True):
        x = jax.tree.map(lambda x, k, w=weight: x + w * h * k, x, slope)
    return x


def _stages(field: Field, params: Any, t: Any, h: float, x: Any) -> tuple[list[Any], list[Any]]:
    """The states of a step's four stages, and the slopes there."""
    states, slopes = [x], [field(params, t, x)]
    for place in _PLACES[1:]:
        states.append(_ahead(x, h, (place,), slopes[-1:]))
        slopes.append(field(params, t + place * h, states[-1]))
    return states, slopes


def _forward(field: Field, params: Any, x: Any, time: float, steps: int) -> tuple[Any, Any]:
    last, states = _states(field, params, x, time, steps)
    return last, (params, states)


def _backward(field: Field, time: float, steps: int, kept: Any, ct: Any) -> tuple[Any, Any]:
    params, before = kept
    h = time / steps

    def step(carry: tuple[Any, Any], of: tuple[Any, Any]) -> tuple[tuple[Any, Any], None]:
        (ct, sums), (i, x) = carry, of
        states, _ = _stages(field, params, i * h, h, x)
        total, later = ct, None
        for place, after, weight, state in zip(
            _PLACES[::-1], (0.0, *_PLACES[:0:-1]), _WEIGHTS[::-1], states[::-1], strict=True
        ):
            # What comes to this stage's slope: from the step's end, and from the next stage.
            seed = jax.tree.map(lambda c, w=weight: w * h * c, ct)
            if later is not None:
                seed = jax.tree.map(lambda s, c, a=after: s + a * h * c, seed, later)
            at = functools.partial(lambda place, p, x: field(p, i * h + place * h, x), place)
            _, pull = xform.vjp(at, params, state)
            more, later = pull(seed)
            sums = jax.tree.map(jnp.add, sums, more)
            total = jax.tree.map(jnp.add, total, later)
        return (total, sums), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (ct, sums), _ = jax.lax.scan(step, (ct, zeros), (jnp.arange(steps), before), reverse=True)
    return sums, ct


symplectic_flow.defvjp(_forward, _backward)
