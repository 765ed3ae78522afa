"""Run one equation on one slice of its values.

Most primitives take their sizes from their operands. Some name the shape of the result or of a part
of the operand in a parameter: `_RESIZED` says how that parameter changes. Calls, loops and branches
run with their bodies on slices. The result of an equation that sums over the slices is one term of
the sum, in float32 if its type is narrower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import (
    JaxprEqn,
    Primitive,
    Var,
    custom_jvp_call_p,
    custom_vjp_call_p,
)
from xform.program.arithmetic import Value
from xform.program.dimensions import shape
from xform.program.equation import bind, context, read, write
from xform.program.flow import BodyFunction
from xform.program.ir import Program
from xform.program.source import name_stack, source
from xform.registry.table import rule_of, traits
from xform.slices.bodies import BodySlices, by_position
from xform.slices.custom_calls import SlicedBody, call_custom_jvp, call_custom_vjp
from xform.slices.draws import draw_slice, draws_each_element
from xform.slices.grow import bodies_of
from xform.slices.nested import has_body
from xform.slices.shards import merge, mesh_axes, split
from xform.slices.slicing import SlicedAxis, Slicing

Params = dict[str, Any]


class CurrentSlice(NamedTuple):
    """One slice: its number, which may be traced, of `n`.

    `shards` is the number of shards of each sliced axis that types do not tell. The slice has a
    part of each shard.
    """

    number: Value
    n: int
    shards: int = 1

    def offset(self, size: int) -> Value:
        """Return the first index of the slice on an axis of length `size`."""
        return self.number * (size // (self.n * self.shards))

    def place(self, i: Value, size: int) -> Value:
        """Return where the indices `i` of the slice are on the whole axis, of length `size`."""
        part, shard = size // (self.n * self.shards), size // self.shards
        start = lax.convert_element_type(self.offset(size), i.dtype)
        return i + start if self.shards == 1 else i + start + i // part * (shard - part)

    def cut(self, x: Value, axis: int) -> Value:
        """Return this slice of a value; of each of its shards, if the axis is sharded."""
        size = x.shape[axis]
        if self.shards > 1 or mesh_axes(jax.typeof(x), axis):
            parts = split(x, axis, self.n, self.shards)
            return merge(lax.dynamic_slice_in_dim(parts, self.number, 1, axis + 1), axis)
        return lax.dynamic_slice_in_dim(x, self.offset(size), size // self.n, axis)


def sum_dtype(dtype: Any) -> Any:
    """Return the type for sums of values of a type: float32 for narrower floats."""
    narrow = jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if narrow else dtype


def run_on_slice(eqn: JaxprEqn, slicing: Slicing, args: Sequence[Value], at: CurrentSlice,
                 outer: Any = None) -> list[Value]:  # fmt: skip
    """Run an equation on one slice of its operands; return that slice of its results.

    `args` are the operands, cut as `slicing` says. `outer` is the current name stack.
    """
    outer = name_stack() if outer is None else outer
    if has_body(eqn):
        with source(eqn, outer), context(eqn):
            return _run_nested(eqn, slicing, args, at)
    if slicing.summed:
        return _terms(eqn, args, outer)
    axis, params = slicing.results[0], _resized_params(eqn, slicing, at.n)
    if draws_each_element(eqn):
        assert axis is not None
        size = shape(eqn.outvars[0])[axis]
        with source(eqn, outer), context(eqn):
            place = functools.partial(at.place, size=size)
            return draw_slice(eqn.params["shape"], args[0], axis, place, size // at.n)
    if (counts := traits(eqn.primitive).counts) and axis == params[counts]:
        return _numbers(eqn, params, at, outer)
    results = bind(eqn.replace(params=params), args, outer)
    for y, v in zip(results, eqn.outvars, strict=True):
        assert y.shape == resized(shape(v), axis, at.n), (eqn, y.shape)
    return results


def resized(sizes: Sequence[int], axis: SlicedAxis, n: int) -> tuple[int, ...]:
    """Return the shape of one of `n` slices of a value; `axis` None: of the value itself."""
    return tuple(size // n if i == axis else size for i, size in enumerate(sizes))


def _numbers(eqn: JaxprEqn, params: Params, at: CurrentSlice, outer: Any) -> list[Value]:
    """Return the slice of an iota along its own dimension: the numbers of its places.

    The numbers are added as integers: a narrow float could not hold every number exactly.
    """
    dtype, size = params["dtype"], params["shape"][params["dimension"]] * at.n
    (numbers,) = bind(eqn.replace(params={**params, "dtype": np.dtype(np.int32)}), (), outer)
    return [lax.convert_element_type(at.place(numbers, size), dtype)]


def _terms(eqn: JaxprEqn, args: Sequence[Value], outer: Any) -> list[Value]:
    """Return the results of an equation that sums over the slices, for one slice."""
    aval: Any = eqn.outvars[0].aval
    dtype, params = sum_dtype(aval.dtype), eqn.params
    if dtype == aval.dtype:
        return bind(eqn, args, outer)
    if "preferred_element_type" in params:
        return bind(eqn.replace(params={**params, "preferred_element_type": dtype}), args, outer)
    if traits(eqn.primitive).adds:
        x, indices, updates = args
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        add = getattr(lax, eqn.primitive.name.replace("-", "_"))
        with source(eqn, outer), context(eqn):
            wide = [lax.convert_element_type(a, dtype) for a in (x, updates)]
            return [add(wide[0], indices, wide[1], *(params[name] for name in names[:1]),
                        **{name: params[name] for name in names[1:]})]  # fmt: skip
    return bind(eqn, [lax.convert_element_type(x, dtype) for x in args], outer)


def _resized_params(eqn: JaxprEqn, slicing: Slicing, n: int) -> Params:
    """Return the parameters of an equation for one of `n` slices.

    The shape of the result changes, and the shape of a part of operand 0. The part has the full
    length of the sliced axis, unless that axis is a batching axis.
    """
    known, params = traits(eqn.primitive), dict(eqn.params)
    if name := known.result_shape:
        params[name] = resized(params[name], slicing.results[0], n)
    if name := known.part_shape:
        sizes, axis = params[name], slicing.operands[0]
        whole = axis is not None and sizes[axis] == shape(eqn.invars[0])[axis]
        params[name] = resized(sizes, axis if whole else None, n)
    return params


# Equations with bodies.


def run_body(
    prog: Program, slices: BodySlices, args: Sequence[Value], at: CurrentSlice
) -> list[Value]:
    """Run a body on one slice of its inputs; return that slice of its outputs."""
    env: dict[Var, Value] = {
        v: x if slices.axes.get(v) is None else at.cut(jnp.asarray(x), slices.axes[v])
        for v, x in prog.consts
    }
    env.update(zip(prog.inputs, args, strict=True))
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        member = slices.members.get(i)
        ys = run_on_slice(eqn, member, xs, at, outer) if member else bind(eqn, xs, outer)
        if member and member.summed:
            avals: list[Any] = [v.aval for v in eqn.outvars]
            ys = [lax.convert_element_type(y, a.dtype) for y, a in zip(ys, avals, strict=True)]
        write(env, eqn.outvars, ys)
    return [read(env, v) for v in prog.outputs]


def _bodies(
    eqn: JaxprEqn, slicing: Slicing, at: CurrentSlice
) -> Sequence[tuple[Program, BodySlices]]:
    """Return the bodies of an equation and how they run in slices."""
    found = bodies_of(eqn, by_position(slicing.operands), by_position(slicing.results),
                      at.n * at.shards)  # fmt: skip
    assert found is not None, eqn
    assert found.slicing == slicing, eqn
    return found.parts


def _run_nested(
    eqn: JaxprEqn, slicing: Slicing, args: Sequence[Value], at: CurrentSlice
) -> list[Value]:
    """Run a loop, branch or call with its bodies on one slice."""
    if eqn.primitive in _CUSTOM:
        return _custom(_CUSTOM[eqn.primitive], eqn, slicing, args, at)
    rule = rule_of(eqn.primitive)
    assert rule is not None

    def on_slice(body: Program, slices: BodySlices) -> BodyFunction:
        return lambda xs, each: (run_body(body, slices, xs, at), None)

    functions = [on_slice(*part) for part in _bodies(eqn, slicing, at)]
    return rule.rebuild(eqn, args, functions)[0]


def _custom(
    call: Callable[..., list[Value]], eqn: JaxprEqn, slicing: Slicing, args: Sequence[Value],
    at: CurrentSlice,
) -> list[Value]:  # fmt: skip
    """Call a function with a custom rule by `call`; all its bodies run on the same slice."""
    run = lambda prog, slices, values, number, parts: run_body(
        prog, slices, values, CurrentSlice(number, *parts)
    )
    bodies = [SlicedBody(*part, at[1:], run) for part in _bodies(eqn, slicing, at)]
    return call(eqn, bodies, at.number, args)


_CUSTOM: dict[Primitive, Callable[..., list[Value]]] = {
    custom_jvp_call_p: call_custom_jvp,
    custom_vjp_call_p: call_custom_vjp,
}
