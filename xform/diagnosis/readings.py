"""What is read of a layer while its loss is differentiated: numbers, with no change of the loss.

A probe stands on a layer's result and hands it on. Beside it the loss gets one more argument, a
vector of zeros, whose cotangent the probe defines to be what it read: of the result on the way
forward, of its cotangent on the way back. So a reverse sweep brings all readings out of loops,
branches and remat regions, one for each trip, as it does gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import Var
from xform.arithmetic import Value
from xform.diagnosis.layers import Layer
from xform.diagnosis.thresholds import FLAT

Read = Callable[[Var], Value]
# Of the result, going forward, and of its cotangent, going back.
FORWARD = ("runs", "nonfinite", "activation", "input", "product", "dead", "saturated", "sigma",
           "least")  # fmt: skip
BACKWARD = ("gradient", "gradient_nonfinite", "correlation")
NAMES = (*FORWARD, *BACKWARD)
# The unit in which squares are taken: of 1e-25 to 1e10 sums of millions are numbers of float32.
UNIT = 2.0**-20


def probe(x: Value, sink: Value, forward: Value, batch: int) -> Value:
    """`x`, whose readings become the cotangent of `sink`: `forward`, and those of its cotangent."""
    return _probe(batch, x, sink, forward)


def _run(batch: int, x: Value, sink: Value, forward: Value) -> Value:
    return x


def _forward(batch: int, x: Value, sink: Value, forward: Value) -> tuple[Value, Value]:
    return x, forward


def _backward(batch: int, forward: Value, ct: Value) -> tuple[Value, Value, None]:
    return ct, jnp.concatenate([forward, _of_cotangent(ct, batch)]), None


_probe: Any = jax.custom_vjp(_run, nondiff_argnums=(0,))
_probe.defvjp(_forward, _backward)


def rms(x: Value) -> Value:
    """The root of the mean square, in float32."""
    return norm(x) / math.sqrt(max(x.size, 1))


def norm(x: Value, axes: int = 0) -> Value:
    """The norm over all axes but the first few, in float32."""
    square = jnp.square(jnp.abs(x).astype(jnp.float32) / UNIT)
    return UNIT * jnp.sqrt(jnp.sum(square, range(axes, x.ndim)))


def forward(layer: Layer, env: Read, key: Value, iterations: int) -> Value:
    """What is read of a layer's result, as FORWARD names it; zero where there is nothing to read.

    Args:
      layer: the layer.
      env: the values of its program.
      key: for the first vector of the power iteration.
      iterations: of it; 0 leaves the singular value out.
    """
    held: Read = lambda v: lax.stop_gradient(env(v))
    out = held(layer.out)
    read: dict[str, Value] = {
        "runs": jnp.ones((), jnp.float32),
        "nonfinite": jnp.sum(~jnp.isfinite(out), dtype=jnp.float32),
        "activation": rms(out),
    }
    if layer.kind == "layer":
        read["product"] = rms(held(layer.product))
        if layer.x is not None and layer.body is not None:
            read["input"] = rms(held(layer.x))
    else:
        read["input"] = rms(held(layer.product))
        bent = layer.product if layer.slope is None else layer.slope.inputs[0]
        read["product"] = rms(held(bent))
        sizes = jnp.stack([rms(held(v)) for v in layer.operands])
        least, most = jnp.min(sizes), jnp.max(sizes)
        read["least"] = jnp.where(most > 0, least / jnp.where(most > 0, most, 1), 1)
    if layer.slope is not None:
        read |= _bends(layer, held)
    if layer.body is not None and iterations:
        read["sigma"] = largest_singular_value(layer, held, key, iterations)
    return _vector(read, FORWARD)


def _vector(read: Mapping[str, Value], names: tuple[str, ...]) -> Value:
    zero = jnp.zeros((), jnp.float32)
    return jnp.stack([read.get(name, zero).astype(jnp.float32) for name in names])


def _bends(layer: Layer, held: Read) -> dict[str, Value]:
    """Units whose activation is zero and stays zero for the whole batch, and flat elements."""
    assert layer.slope is not None
    start = held(layer.slope.inputs[0])
    slope = layer.slope.push(held, [jnp.ones_like(start)])
    out = held(layer.slope.output)
    if not slope.size:
        return {}
    off = (slope == 0) & (out == 0)
    units = jnp.all(off, axis=tuple(range(off.ndim - 1))) if off.ndim > 1 else off
    flat = jnp.sum((jnp.abs(slope) < FLAT) & ~off, dtype=jnp.float32)
    on = jnp.sum(~off, dtype=jnp.float32)
    return {"dead": jnp.mean(units, dtype=jnp.float32), "saturated": flat / jnp.maximum(on, 1)}


def _of_cotangent(ct: Value, batch: int) -> Value:
    """What is read of a cotangent, as BACKWARD names it."""
    read = {
        "gradient": rms(ct),
        "gradient_nonfinite": jnp.sum(~jnp.isfinite(ct), dtype=jnp.float32),
    }
    if neighbours(ct.shape, batch):
        read["correlation"] = _correlation(ct.reshape(batch, -1))
    return _vector(read, BACKWARD)


def neighbours(shape: tuple[int, ...], batch: int) -> bool:
    """Whether a value's first axis is that of the examples, of which there are two at least."""
    return len(shape) > 1 and shape[0] == batch > 1


def _correlation(rows: Value) -> Value:
    """The mean size of the cosine between the rows of neighbours."""
    if jnp.iscomplexobj(rows):
        rows = jnp.concatenate([jnp.real(rows), jnp.imag(rows)], -1)
    rows = rows.astype(jnp.float32) / UNIT
    length = jnp.sqrt(jnp.sum(rows * rows, -1))
    both = length[1:] * length[:-1]
    dots = jnp.abs(jnp.sum(rows[1:] * rows[:-1], -1))
    pairs = jnp.sum(both > 0, dtype=jnp.float32)
    cosines = jnp.where(both > 0, dots / jnp.where(both > 0, both, 1), 0)
    return jnp.sum(cosines) / jnp.maximum(pairs, 1)


def largest_singular_value(layer: Layer, held: Read, key: Value, iterations: int) -> Value:
    """The largest singular value of a layer's Jacobian, by power iteration: a lower bound.

    Source: Golub and Van Loan, "Matrix Computations", 4th edition, section 8.2.
    """
    assert layer.body is not None
    of, aval = layer.body, layer.body.inputs[0].aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", jnp.float32)
    pull = of.pull(held)

    def step(_: Any, state: tuple[Value, Value]) -> tuple[Value, Value]:
        v, _ = state
        u = of.push(held, [_unit(v)])
        return pull(_unit(u)), rms(u) * jnp.sqrt(jnp.float32(u.size))

    start = jax.random.normal(key, shape, jnp.float32).astype(dtype)
    _, sigma = lax.fori_loop(0, iterations, step, (start, jnp.zeros((), jnp.float32)))
    return sigma


def _unit(v: Value) -> Value:
    length = rms(v) * jnp.sqrt(jnp.float32(max(v.size, 1)))
    return (v / jnp.where(length > 0, length, 1).astype(v.dtype)).astype(v.dtype)
