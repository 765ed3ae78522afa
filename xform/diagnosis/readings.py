"""Measure a layer while the loss is differentiated, without changing the loss or the gradient.

A *probe* is an identity function on a layer's result. For each probe the loss gets one more
argument, the *sink*: a vector of zeros. The probe's backward rule returns the *readings* as the
cotangent of the sink. The readings are measurements of the layer's result in the forward pass, and
of the result's cotangent in the backward pass. So reverse mode returns all readings along with the
gradients, also from inside loops (for each iteration), branches and remat regions.
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
from xform.diagnosis.thresholds import FLAT_SLOPE
from xform.program.arithmetic import Value
from xform.program.arrays import converted, filled

# Returns the value of a variable of a layer's program.
ValueOf = Callable[[Var], Value]
# Names of the readings of the result in the forward pass, and of its cotangent in the backward
# pass. "runs" counts how often the layer ran, "product" is the numerator of the gain, and
# `LayerHealth` (`row.py`) explains all others.
FORWARD = ("runs", "nonfinite", "activation", "input", "product", "dead", "saturated", "sigma",
           "least")  # fmt: skip
BACKWARD = ("gradient", "gradient_nonfinite", "correlation")
NAMES = (*FORWARD, *BACKWARD)
# Values are divided by this before they are squared, so that sums of millions of squares of values
# from 1e-25 to 1e10 stay within the range of float32.
_SCALE = 2.0**-20


def probe(x: Value, sink: Value, forward: Value, batch: int) -> Value:
    """Return `x`, and define the cotangent of `sink` as the readings of the layer.

    Args:
      x: the result of the layer.
      sink: a vector of zeros, of the length of NAMES.
      forward: the readings of `x`. The readings of the cotangent of `x` are appended to these.
      batch: the number of examples.
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
    square = jnp.square(jnp.abs(x).astype(jnp.float32) / _SCALE)
    return _SCALE * jnp.sqrt(jnp.sum(square, range(axes, x.ndim)))


def forward_readings(layer: Layer, env: ValueOf, key: Value, iterations: int) -> Value:
    """Return the readings of a layer's result, in the order of FORWARD.

    A reading that the layer does not have is zero.

    Args:
      layer: the layer.
      env: returns the value of a variable of the layer's program.
      key: random key for the start vector of the power iteration.
      iterations: number of power iterations; 0 leaves the singular value out.
    """
    constant: ValueOf = lambda v: lax.stop_gradient(env(v))
    result = constant(layer.result)
    values: dict[str, Value] = {
        "runs": jnp.ones((), jnp.float32),
        "nonfinite": jnp.sum(~jnp.isfinite(result), dtype=jnp.float32),
        "activation": rms(result),
    }
    if layer.kind == "layer":
        values["product"] = rms(constant(layer.product))
        if layer.input is not None and layer.function is not None:
            values["input"] = rms(constant(layer.input))
    else:  # a sum: `input` is the sum, `product` the input of its activation
        values["input"] = rms(constant(layer.product))
        activated = layer.product if layer.activation is None else layer.activation.inputs[0]
        values["product"] = rms(constant(activated))
        sizes = jnp.stack([rms(constant(v)) for v in layer.operands])
        least, most = jnp.min(sizes), jnp.max(sizes)
        values["least"] = jnp.where(most > 0, least / jnp.where(most > 0, most, 1), 1)
    if layer.activation is not None:
        values |= _dead_and_saturated(layer, constant)
    if layer.function is not None and iterations:
        values["sigma"] = largest_singular_value(layer, constant, key, iterations)
    return _as_vector(values, FORWARD)


def _as_vector(values: Mapping[str, Value], names: tuple[str, ...]) -> Value:
    """Return the values with these names as a float32 vector, with zero for a missing name."""
    zero = jnp.zeros((), jnp.float32)
    return jnp.stack([values.get(name, zero).astype(jnp.float32) for name in names])


def _dead_and_saturated(layer: Layer, value_of: ValueOf) -> dict[str, Value]:
    """Return the share of dead units, and the share of other elements that are saturated.

    A unit is dead if its activation and its slope are zero for the whole batch.
    """
    assert layer.activation is not None
    start = value_of(layer.activation.inputs[0])
    slope = layer.activation.push(value_of, [filled(jax.typeof(start), 1)])
    out = value_of(layer.activation.output)
    if not slope.size:
        return {}
    is_dead = (slope == 0) & (out == 0)
    batch_axes = tuple(range(is_dead.ndim - 1))  # a unit is an index of the last axis
    dead_units = jnp.all(is_dead, axis=batch_axes) if is_dead.ndim > 1 else is_dead
    flat = jnp.sum((jnp.abs(slope) < FLAT_SLOPE) & ~is_dead, dtype=jnp.float32)
    alive = jnp.sum(~is_dead, dtype=jnp.float32)
    return {
        "dead": jnp.mean(dead_units, dtype=jnp.float32),
        "saturated": flat / jnp.maximum(alive, 1),
    }


def _cotangent_readings(ct: Value, batch: int) -> Value:
    """Return the readings of a cotangent, in the order of BACKWARD."""
    values = {
        "gradient": rms(ct),
        "gradient_nonfinite": jnp.sum(~jnp.isfinite(ct), dtype=jnp.float32),
    }
    if has_example_axis(ct.shape, batch):
        values["correlation"] = _correlation(ct.reshape(batch, -1))
    return _as_vector(values, BACKWARD)


def has_example_axis(shape: tuple[int, ...], batch: int) -> bool:
    """Return whether a value's first axis is the axis of at least two examples."""
    return len(shape) > 1 and shape[0] == batch > 1


def _correlation(rows: Value) -> Value:
    """Return the mean absolute cosine between neighbouring rows."""
    if jnp.iscomplexobj(rows):
        rows = jnp.concatenate([jnp.real(rows), jnp.imag(rows)], -1)
    rows = rows.astype(jnp.float32) / _SCALE
    lengths = jnp.sqrt(jnp.sum(rows * rows, -1))
    products = lengths[1:] * lengths[:-1]
    dots = jnp.abs(jnp.sum(rows[1:] * rows[:-1], -1))
    pairs = jnp.sum(products > 0, dtype=jnp.float32)
    cosines = jnp.where(products > 0, dots / jnp.where(products > 0, products, 1), 0)
    return jnp.sum(cosines) / jnp.maximum(pairs, 1)


def largest_singular_value(layer: Layer, value_of: ValueOf, key: Value, iterations: int) -> Value:
    """Estimate the largest singular value of a layer's Jacobian, from below, by power iteration.

    `key` is the random key of the start vector.
    Source: Golub and Van Loan, "Matrix Computations", 4th edition, section 8.2.
    """
    assert layer.function is not None
    function = layer.function
    aval: Any = function.inputs[0].aval
    pull = function.pull(value_of)

    def power_iteration(_: Any, state: tuple[Value, Value]) -> tuple[Value, Value]:
        v, _ = state
        u = function.push(value_of, [_normalize(v)])
        return pull(_normalize(u)), rms(u) * jnp.sqrt(jnp.float32(u.size))

    start = converted(jax.random.normal(key, aval.shape, jnp.float32), aval)
    _, sigma = lax.fori_loop(0, iterations, power_iteration, (start, jnp.zeros((), jnp.float32)))
    return sigma


def _normalize(v: Value) -> Value:
    """Divide a vector by its Euclidean norm; a zero vector stays zero."""
    length = rms(v) * jnp.sqrt(jnp.float32(max(v.size, 1)))
    return (v / jnp.where(length > 0, length, 1).astype(v.dtype)).astype(v.dtype)
