"""Apply a linear map to all unit vectors, or to the rows of a matrix, in chunks.

If the map begins with a product by a known matrix, nothing is multiplied: the product of a matrix
and a unit vector is a row or column of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, ShapedArray, Var, dot_general_p, weak_as
from xform.passes.inline import Inline
from xform.program.arithmetic import Value
from xform.program.ir import Program, bind, read, trace, write
from xform.transforms.linear_map import varying

# Maps the leaves of one vector to the leaves of its image.
Linear = Callable[[Sequence[Value]], Sequence[Value]]


def of_units(linear: Linear, avals: Sequence[Any], chunk: int | None = None) -> list[Value]:
    """Apply `linear` to each unit vector of the space `avals`; results have a leading batch axis.

    At most `chunk` vectors are computed at once; None: all.
    """
    sizes = [math.prod(a.shape) for a in avals]
    n = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = list(zip(avals, starts, strict=True))
    if chunk is not None and chunk < n:
        unit = lambda i: [_one_hot(i, aval, start) for aval, start in places]
        return lax.map(
            lambda i: list(linear(unit(i))), jnp.arange(n, dtype=jnp.int32), batch_size=chunk
        )
    every = lambda *rows: of_rows(linear, rows)
    prog = Inline().program(trace(every, *(stacked(n, a) for a in avals)))
    units = {
        v: _Units(n, start, aval) for v, (aval, start) in zip(prog.inputs, places, strict=True)
    }
    return _run(prog, units)


def of_rows(linear: Linear, rows: Sequence[Value], chunk: int | None = None) -> list[Value]:
    """Apply `linear` to a batch of vectors on a leading axis, at most `chunk` at once."""
    each = lambda xs: list(linear(xs))
    if chunk is not None and chunk < rows[0].shape[0]:
        return lax.map(each, list(rows), batch_size=chunk)
    return jax.vmap(each)(list(rows))


def vary(xs: Sequence[Value], avals: Sequence[Any]) -> list[Value]:
    """Cast vectors to vary over the same axes of a `shard_map` as the types `avals`."""
    axes = [tuple(sorted(varying(aval), key=str)) for aval in avals]
    return [lax.pcast(x, a, to="varying") if a and not varying(jax.typeof(x)) else x
            for x, a in zip(xs, axes, strict=True)]  # fmt: skip


def stacked(n: int, aval: Any) -> Any:
    """The type of `n` stacked values of type `aval`."""
    return ShapedArray((n, *aval.shape), aval.dtype, weak_type=aval.weak_type)


class _Units:
    """One leaf of all `n` unit vectors, not computed: an identity, with zeros before and after."""

    def __init__(self, n: int, start: int, aval: Any):
        self.n, self.start, self.aval = n, start, aval

    def array(self) -> Value:
        """The unit vectors as an array."""
        return jax.vmap(lambda i: _one_hot(i, self.aval, self.start))(
            jnp.arange(self.n, dtype=jnp.int32)
        )

    def times(self, eqn: JaxprEqn, matrix: Value, side: int) -> Value:
        """The result of a `dot_general` whose operand `side` are the unit vectors.

        It holds the elements of the other operand, `matrix`, and zeros; nothing is multiplied.
        """
        contract, batch = eqn.params["dimension_numbers"]
        shape = self.aval.shape
        own, other = [d - 1 for d in contract[side]], contract[1 - side]
        own_batch, other_batch = [d - 1 for d in batch[side]], batch[1 - side]
        alone = [d for d in range(len(shape)) if d not in (*own, *own_batch)]
        rest = [d for d in range(matrix.ndim) if d not in (*other, *other_batch)]
        # Axes of the result for now: batch; the unit vectors, as the axes of their leaf; the free
        # axes of the leaf (`alone`); the free axes of the matrix (`rest`).
        b, s, a = len(own_batch), len(shape), len(alone)
        full = (*(shape[d] for d in own_batch), *shape, *(shape[d] for d in alone),
                *(matrix.shape[d] for d in rest))  # fmt: skip
        to = {**{d: b + axis for d, axis in zip(other, own, strict=True)},
              **{d: i for i, d in enumerate(other_batch)},
              **{d: b + s + a + i for i, d in enumerate(rest)}}  # fmt: skip
        order = sorted(range(matrix.ndim), key=to.__getitem__)
        y = lax.broadcast_in_dim(lax.transpose(matrix, order), full, sorted(to.values()))
        pairs = [*enumerate(own_batch), *((b + s + i, d) for i, d in enumerate(alone))]
        for axis, d in pairs:
            same = lax.eq(lax.broadcasted_iota(jnp.int32, full, axis),
                          lax.broadcasted_iota(jnp.int32, full, b + d))  # fmt: skip
            y = lax.select(same, y, lax.full_like(y, 0))
        size = math.prod(shape)
        y = lax.reshape(y, (*full[:b], size, *full[b + s :]))
        y = lax.pad(y, lax.full_like(y, 0, shape=()), [
            (self.start, self.n - self.start - size, 0) if axis == b else (0, 0, 0)
            for axis in range(y.ndim)
        ])  # fmt: skip
        if side:  # the free axes of the left operand come first
            k = b + 1 + a
            y = lax.transpose(y, (*range(b), *range(k, y.ndim), *range(b, k)))
        out: Any = eqn.outvars[0].aval
        return lax.convert_element_type(y, out.dtype)


def meets_first(eqn: JaxprEqn, units: Any) -> int | None:
    """Which operand of a `dot_general` are unit vectors, if the other is not; None otherwise.

    `units` are the variables of unit vectors.
    """
    if eqn.primitive is not dot_general_p:
        return None
    sides = [isinstance(v, Var) and v in units for v in eqn.invars]
    return None if sides.count(True) != 1 else sides.index(True)


def _run(prog: Program, units: dict[Var, _Units]) -> list[Value]:
    """Run a program on unit vectors. They become arrays only if a product does not suffice."""
    env: dict[Any, Any] = dict(prog.consts)
    arrays: dict[Var, Value] = {}

    def value(v: Any) -> Value:
        if isinstance(v, Var) and v in units:
            if v not in arrays:
                arrays[v] = units[v].array()
            return arrays[v]
        return read(env, v)

    for eqn in prog.equations:
        side = meets_first(eqn, units)
        if side is not None:
            own: Any = eqn.invars[side]
            ys = [units[own].times(eqn, value(eqn.invars[1 - side]), side)]
        else:
            ys = bind(eqn, [value(v) for v in eqn.invars])
        write(env, eqn.outvars, ys)
    return [value(v) for v in prog.outputs]


def _one_hot(i: Value, aval: Any, start: int) -> Value:
    """The part of unit vector `i` in one leaf, which begins at element `start`."""
    at = lax.reshape(lax.iota(jnp.int32, math.prod(aval.shape)), aval.shape)
    return weak_as((at == i - start).astype(aval.dtype), aval)
