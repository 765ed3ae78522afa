"""The measurements of a layer during differentiation, without a change of the loss or gradient.

A probe is an identity function on a layer's result. For each probe the loss gets one more argument,
the sink: a vector of zeros. The probe's backward rule defines the sink's cotangent to be the
readings: of the layer's result in the forward pass, and of its cotangent in the backward pass. So
reverse mode returns all readings along with the gradients, from inside loops (one for each
iteration), branches and remat regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import Var
from xform.diagnosis.layers import Layer
from xform.diagnosis.thresholds import FLAT
from xform.program.arithmetic import Value

Read = Callable[[Var], Value]  # returns the value of a variable
# Readings of the result in the forward pass, and of its cotangent in the backward pass.
FORWARD = ("runs", "nonfinite", "activation", "input", "product", "dead", "saturated", "sigma",
           "least")  # fmt: skip
BACKWARD = ("gradient", "gradient_nonfinite", "correlation")
NAMES = (*FORWARD, *BACKWARD)
# Values are divided by this before they are squared, so that sums of millions of squares of values
# from 1e-25 to 1e10 stay within the range of float32.
UNIT = 2.0**-20


def probe(x: Value, sink: Value, forward: Value, batch: int) -> Value:
    """Return `x`, and define the cotangent of `sink` as the readings of the layer.

    These are the readings `forward`, followed by the readings of the cotangent of `x`. `batch` is
    the number of examples.
    """
    return _probe(batch, x, sink, forward)


def _primal(batch: int, x: Value, sink: Value, forward: Value) -> Value:
    return x


def _forward(batch: int, x: Value, sink: Value, forward: Value) -> tuple[Value, Value]:
    return x, forward


def _backward(batch: int, forward: Value, ct: Value) -> tuple[Value, Value, None]:
    return ct, jnp.concatenate([forward, _cotangent_readings(ct, batch)]), None


_probe: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_probe.defvjp(_forward, _backward)


def rms(x: Value) -> Value:
    """Return the root mean square of all elements, in float32."""
    return norm(x) / math.sqrt(max(x.size, 1))


def norm(x: Value, axes: int = 0) -> Value:
    """Return the Euclidean norm over all axes except the first `axes`, in float32."""
    square = jnp.square(jnp.abs(x).astype(jnp.float32) / UNIT)
    return UNIT * jnp.sqrt(jnp.sum(square, range(axes, x.ndim)))


def forward(layer: Layer, env: Read, key: Value, iterations: int) -> Value:
    """Return the readings of a layer's result, in the order of FORWARD; zero for a missing one.

    Args:
      layer: the layer.
      env: returns the value of a variable of the layer's program.
      key: random key for the start vector of the power iteration.
      iterations: number of power iterations; 0 leaves the singular value out.
    """
    stopped: Read = lambda v: lax.stop_gradient(env(v))
    out = stopped(layer.out)
    values: dict[str, Value] = {
        "runs": jnp.ones((), jnp.float32),
        "nonfinite": jnp.sum(~jnp.isfinite(out), dtype=jnp.float32),
        "activation": rms(out),
    }
    if layer.kind == "layer":
        values["product"] = rms(stopped(layer.product))
        if layer.x is not None and layer.body is not None:
            values["input"] = rms(stopped(layer.x))
    else:
        values["input"] = rms(stopped(layer.product))
        activated = layer.product if layer.slope is None else layer.slope.inputs[0]
        values["product"] = rms(stopped(activated))
        sizes = jnp.stack([rms(stopped(v)) for v in layer.operands])
        least, most = jnp.min(sizes), jnp.max(sizes)
        values["least"] = jnp.where(most > 0, least / jnp.where(most > 0, most, 1), 1)
    if layer.slope is not None:
        values |= _dead_and_saturated(layer, stopped)
    if layer.body is not None and iterations:
        values["sigma"] = largest_singular_value(layer, stopped, key, iterations)
    return _vector(values, FORWARD)


def _vector(values: Mapping[str, Value], names: tuple[str, ...]) -> Value:
    zero = jnp.zeros((), jnp.float32)
    return jnp.stack([values.get(name, zero).astype(jnp.float32) for name in names])


def _dead_and_saturated(layer: Layer, stopped: Read) -> dict[str, Value]:
    """Return the share of dead units, and the share of other elements that are saturated.

    A unit is dead if its activation and its slope are zero for the whole batch.
    """
    assert layer.slope is not None
    start = stopped(layer.slope.inputs[0])
    slope = layer.slope.push(stopped, [jnp.ones_like(start)])
    out = stopped(layer.slope.output)
    if not slope.size:
        return {}
    is_dead = (slope == 0) & (out == 0)
    units = jnp.all(is_dead, axis=tuple(range(is_dead.ndim - 1))) if is_dead.ndim > 1 else is_dead
    flat = jnp.sum((jnp.abs(slope) < FLAT) & ~is_dead, dtype=jnp.float32)
    on = jnp.sum(~is_dead, dtype=jnp.float32)
    return {"dead": jnp.mean(units, dtype=jnp.float32), "saturated": flat / jnp.maximum(on, 1)}


def _cotangent_readings(ct: Value, batch: int) -> Value:
    """Return the readings of a cotangent, in the order of BACKWARD."""
    values = {
        "gradient": rms(ct),
        "gradient_nonfinite": jnp.sum(~jnp.isfinite(ct), dtype=jnp.float32),
    }
    if neighbours(ct.shape, batch):
        values["correlation"] = _correlation(ct.reshape(batch, -1))
    return _vector(values, BACKWARD)


def neighbours(shape: tuple[int, ...], batch: int) -> bool:
    """Return whether a value's first axis is the axis of at least two examples."""
    return len(shape) > 1 and shape[0] == batch > 1


def _correlation(rows: Value) -> Value:
    """Return the mean absolute cosine between neighbouring rows."""
    if jnp.iscomplexobj(rows):
        rows = jnp.concatenate([jnp.real(rows), jnp.imag(rows)], -1)
    rows = rows.astype(jnp.float32) / UNIT
    length = jnp.sqrt(jnp.sum(rows * rows, -1))
    both = length[1:] * length[:-1]
    dots = jnp.abs(jnp.sum(rows[1:] * rows[:-1], -1))
    pairs = jnp.sum(both > 0, dtype=jnp.float32)
    cosines = jnp.where(both > 0, dots / jnp.where(both > 0, both, 1), 0)
    return jnp.sum(cosines) / jnp.maximum(pairs, 1)


def largest_singular_value(layer: Layer, stopped: Read, key: Value, iterations: int) -> Value:
    """Estimate the largest singular value of a layer's Jacobian, from below, by power iteration.

    Source: Golub and Van Loan, "Matrix Computations", 4th edition, section 8.2.
    """
    assert layer.body is not None
    function, aval = layer.body, layer.body.inputs[0].aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", jnp.float32)
    pull = function.pull(stopped)

    def step(_: Any, state: tuple[Value, Value]) -> tuple[Value, Value]:
        v, _ = state
        u = function.push(stopped, [_unit(v)])
        return pull(_unit(u)), rms(u) * jnp.sqrt(jnp.float32(u.size))

    start = jax.random.normal(key, shape, jnp.float32).astype(dtype)
    _, sigma = lax.fori_loop(0, iterations, step, (start, jnp.zeros((), jnp.float32)))
    return sigma


def _unit(v: Value) -> Value:
    length = rms(v) * jnp.sqrt(jnp.float32(max(v.size, 1)))
    return (v / jnp.where(length > 0, length, 1).astype(v.dtype)).astype(v.dtype)
