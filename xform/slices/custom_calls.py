"""Call functions with custom derivative rules on one slice of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn
from xform.program.arithmetic import Value, float0_zeros
from xform.program.arrays import zeros
from xform.program.fingerprint import fingerprint
from xform.program.ir import Program, gather, spread
from xform.slices.bodies import BodySlices
from xform.slices.custom_rules import differentiable_values


class SlicedBody:
    """A function of the number of a slice and of that slice of its inputs.

    Args:
      prog: the program of the function.
      slices: how it runs in slices.
      parts: the number of slices, and that of shards, as in `CurrentSlice`.
      run: runs it on a slice.

    Attributes:
      slices: how the program of the function runs in slices.
    """

    def __init__(self, prog: Program, slices: BodySlices, parts: tuple[int, ...],
                 run: Callable[..., list[Value]]):  # fmt: skip
        self.slices, self._prog, self._parts, self._run = slices, prog, parts, run

    def __call__(self, number: Value, values: Sequence[Value]) -> list[Value]:
        """Return this slice of the outputs."""
        return self._run(self._prog, self.slices, values, number, self._parts)

    def __fingerprint__(self) -> Any:
        """Return what decides about the outputs."""
        return fingerprint(self._prog), self._parts, self.slices.inputs, self.slices.outputs


def call_custom_jvp(eqn: JaxprEqn, bodies: Sequence[SlicedBody], number: Value,
                    args: Sequence[Value]) -> list[Value]:  # fmt: skip
    """Call a function with a `custom_jvp` rule; the rule runs on the same slice."""
    on, outs = map(differentiable_values, (eqn.invars, eqn.outvars))

    @jax.custom_jvp
    def run(number: Value, *xs: Value) -> tuple[Value, ...]:
        return tuple(bodies[0](number, xs))

    def push(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Any, Any]:
        values = bodies[1](primals[0], [*primals[1:], *gather(tangents[1:], on)])
        ys, dys = values[: len(outs)], spread(values[len(outs) :], outs)
        float0 = lambda y: float0_zeros(np.shape(y))
        pairs = zip(ys, dys, strict=True)
        return tuple(ys), tuple(float0(y) if dy is None else dy for y, dy in pairs)

    run.defjvp(push)
    return list(run(number, *args))


def call_custom_vjp(eqn: JaxprEqn, bodies: Sequence[SlicedBody], number: Value,
                    args: Sequence[Value]) -> list[Value]:  # fmt: skip
    """Call a function with a `custom_vjp` rule; the functions of its rule run on the same slice."""
    on, outs = map(differentiable_values, (eqn.invars, eqn.outvars))

    @jax.custom_vjp
    def run(number: Value, *xs: Value) -> tuple[Value, ...]:
        return tuple(bodies[0](number, xs))

    def forward(number: Value, *xs: Value) -> tuple[Any, Any]:
        values = bodies[1](number, xs)
        return tuple(values[: len(outs)]), (number, values[len(outs) :])

    def backward(saved: Any, cts: Sequence[Value]) -> tuple[Value | None, ...]:
        number, residuals = saved
        terms = bodies[2](number, [*residuals, *gather(cts, outs)])
        slices = bodies[2].slices
        rows = zip(terms, slices.outputs, slices.sums, strict=True)
        own = [ct if axis is not None or is_sum else _of_first_slice(number, ct)
               for ct, axis, is_sum in rows]  # fmt: skip
        return None, *spread(own, on)

    run.defvjp(forward, backward)
    return list(run(number, *args))


def _of_first_slice(number: Value, ct: Value) -> Value:
    """Return a cotangent that is the same in each slice, such that it counts once."""
    return jnp.where(number == 0, ct, zeros(jax.typeof(ct)))
