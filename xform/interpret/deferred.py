"""The two passes of a derivative as equations, for a plan that is chosen after the trace.

    outputs = xform_deferred(inputs)                 the forward pass
    results = xform_deferred(inputs, cotangents)     the backward pass

No residuals stand between the two equations: which values these are depends on the plan.
`PlannedPasses` runs the equations under a plan. The caller holds the residuals from the first to
the second.

`jax.vmap` and `xform.jvp` may transform the equations before the plan is known. An equation then
has a *level* for each of these transforms, the innermost first: its inputs and outputs are those of
the transformed pass. The planned pass is transformed in the same way. If a level of the backward
pass transforms no input of the program, the forward pass does not have it. An example is the `vmap`
over the cotangents of a Jacobian.

Everywhere else, such as under `jax.jvp` or inside a function that is differentiated, the equation
is what `run` computes: its pass under the plan of the default policy. It shares no residuals.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import (
    JaxprEqn,
    Primitive,
    ad,
    batch_of,
    batching,
    cotangent_aval,
    is_zero,
    mlir,
    tangent_aval,
)
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.joint import Joint, Schedule
from xform.interpret.jvp import jvp
from xform.interpret.node import Pull, Structured, gather, present_mask, spread
from xform.interpret.pullback import pullback
from xform.program.arithmetic import Value, differentiable, instantiate
from xform.program.ir import Mask, Program, seldom_collected, trace
from xform.registry.table import declare


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """A derivative whose plan is chosen later.

    Attributes:
      key: a text that equal derivatives share.
      problem: the derivative as a planning problem.
      candidate: the plan that the default policy chose.
    """

    key: str
    problem: Any
    candidate: Any

    @property
    def schedule(self) -> Schedule:
        """The plan that the default policy chose."""
        return self.candidate.schedule

    @property
    def joint(self) -> Joint:
        """The forward and the backward pass as one program."""
        return self.schedule.joint


@dataclasses.dataclass(frozen=True)
class Batch:
    """A `vmap`.

    Attributes:
      axis: the size and the name of its axis.
      of_inputs: the batched axis of each input; None if it is not batched.
      of_outputs: which outputs are batched, at their first axis; None if that is not known yet.
    """

    axis: Any
    of_inputs: tuple[int | None, ...]
    of_outputs: Mask | None = None


@dataclasses.dataclass(frozen=True)
class Push:
    """A `jvp`: which inputs have tangents. These tangents are further inputs, after all others.

    The tangents of the outputs of float or complex type are further outputs.
    """

    of_inputs: Mask


Level = Batch | Push
# Which seeds of a backward pass are present; None for a forward pass.
Given = Mask | None

deferred_p = Primitive("xform_deferred")
deferred_p.multiple_results = True
deferred_p.def_abstract_eval(lambda *_, types, **params: list(types))


def forward(derivative: Derivative, args: Sequence[Value]) -> list[Value]:
    """Bind the forward pass of a derivative; return the outputs of its program."""
    types = tuple(v.aval for v in derivative.joint.outputs)
    return deferred_p.bind(*args, derivative=derivative, given=None, levels=(), types=types)


def backward(derivative: Derivative, args: Sequence[Value], seeds: Sequence[Value]) -> list[Value]:
    """Bind the backward pass; return a cotangent for each input of the program, None for zero.

    `seeds` has a cotangent for each seed of the Joint; None is absent.
    """
    given, joint = present_mask(seeds), derivative.joint
    present = present_derivatives(joint, given)
    types = tuple(cotangent_aval(v.aval) for v in gather(joint.inputs, present))
    out = deferred_p.bind(*args, *gather(seeds, given), derivative=derivative, given=given,
                          levels=(), types=types)  # fmt: skip
    return spread(out, present)


def shared_inputs(
    derivative: Derivative, given: Given, levels: Sequence[Level]
) -> tuple[list[int], list[Level | None]]:
    """Return what an equation shares with the other equation of its derivative.

    These are the positions of the inputs of the program, with their tangents, and what each level
    does to these; None if it does nothing to them.
    """
    positions = list(range(len(derivative.joint.inputs)))
    n, of_program = len(positions) + sum(given or ()), list[Level | None]()
    for level in levels:
        of_inputs: Any = tuple(level.of_inputs[i] for i in positions)
        if isinstance(level, Batch):
            shared = any(axis is not None for axis in of_inputs)
            of_program.append(Batch(level.axis, of_inputs) if shared else None)
            continue
        of_program.append(Push(of_inputs) if any(of_inputs) else None)
        active = [i for i, on in enumerate(level.of_inputs) if on]
        positions += [n + k for k, i in enumerate(active) if i in positions]
        n += len(active)
    return positions, of_program


@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """The values that a forward pass saves, behind its levels.

    Attributes:
      leaves: the leaves of the saved values, and then the tangents that the levels added.
      tree: the tree of the saved values.
      levels: for each level, the innermost first: the batched axis of each leaf, or whether each
        has a tangent.
    """

    leaves: Sequence[Value]
    tree: Any
    levels: tuple[tuple[Any, ...], ...] = ()


# Lists of outputs, each with the batched axis of each output, or with the tangent of each or None.
_Transformed = list[tuple[list[Value], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedPasses:
    """Runs the passes of a derivative under a plan, with the levels of their equations."""

    derivative: Derivative
    schedule: Schedule

    def forward(
        self, levels: Sequence[Level], args: Sequence[Value]
    ) -> tuple[list[Value], tuple[Any, ...], Residuals]:
        """Return outputs, the axis or tangent of each (see `_Transformed`), and residuals."""
        if not levels:
            with seldom_collected():
                outs, saved = emit.forward(self.schedule, args)
            leaves, tree = jax.tree.flatten(saved)
            return outs, (), Residuals(leaves, tree)
        *inner, level = levels
        behind: list[Residuals] = []

        def run(*xs: Value) -> list[list[Value]]:
            outs, _, residuals = self.forward(inner, xs)
            behind[:] = [residuals]
            return [outs, [*residuals.leaves]]

        (outs, of_outs), (leaves, of_leaves) = _apply(level, run, args)
        if isinstance(level, Push):
            leaves = [*leaves, *(dx for dx in of_leaves if dx is not None)]
            of_leaves = present_mask(of_leaves)
        (residuals,) = behind
        made = Residuals(leaves, residuals.tree, (*residuals.levels, of_leaves))
        return _outputs(level, outs, of_outs), of_outs, made

    def backward(self, levels: Sequence[Level], given: Mask, residuals: Residuals,
                 xs: Sequence[Value]) -> tuple[list[Value], tuple[Any, ...]]:  # fmt: skip
        """Return the results, and the axis or the tangent of each (see `_Transformed`).

        `xs` are the inputs of the program, the seeds, and the tangents that the levels added.
        """
        if not levels:
            return self._backward(given, residuals, xs), ()
        *inner, level = levels
        of_residuals = residuals.levels
        if shared_inputs(self.derivative, given, levels)[1][-1] is None:
            nothing = None if isinstance(level, Batch) else False
            of_leaves: tuple[Any, ...] = (nothing,) * len(residuals.leaves)
        else:
            of_residuals, of_leaves = of_residuals[:-1], of_residuals[-1]
        n, m = len(of_leaves), len(level.of_inputs)

        def run(*values: Value) -> list[list[Value]]:
            behind = Residuals(values[:n], residuals.tree, of_residuals)
            return [self.backward(inner, given, behind, values[n:])[0]]

        leaves, tangents = residuals.leaves[:n], residuals.leaves[n:]
        values = [*leaves, *xs[:m], *tangents, *xs[m:]]
        level = dataclasses.replace(level, of_inputs=(*of_leaves, *level.of_inputs))
        ((outs, of_outs),) = _apply(level, run, values)
        return _outputs(level, outs, of_outs), of_outs

    def _backward(self, given: Mask, residuals: Residuals, xs: Sequence[Value]) -> list[Value]:
        """Run the planned backward pass."""
        schedule, joint = self.schedule, self.schedule.joint
        saved = jax.tree.unflatten(residuals.tree, residuals.leaves)
        n = len(joint.inputs)
        read = spread(gather(xs[:n], schedule.reads), schedule.reads)
        with seldom_collected():
            results = emit.backward(schedule, saved, read, spread(xs[n:], given), together=True,
                                    whole=True)  # fmt: skip
        present = present_derivatives(self.derivative.joint, given)
        return instantiate(spread(results, joint.results), joint.inputs, present, cotangent_aval)


def _apply(level: Level, run: Callable[..., list[list[Value]]], xs: Sequence[Value]
           ) -> _Transformed:  # fmt: skip
    """Transform a function that returns several lists of values, and run it."""
    if isinstance(level, Batch):
        return _batched(level, run, xs)
    n, counts = len(level.of_inputs), list[int]()

    def flat(*xs: Value) -> list[Value]:
        lists = run(*xs)
        counts[:] = map(len, lists)
        return [x for values in lists for x in values]

    prog = trace(flat, *map(jax.typeof, xs[:n]))
    ys, dys = map(iter, jvp(prog, xs[:n], spread(xs[n:], level.of_inputs)))
    take = lambda values, count: list(itertools.islice(values, count))
    return [(take(ys, count), tuple(take(dys, count))) for count in counts]


def _batched(level: Batch, run: Callable[..., list[list[Value]]], xs: Sequence[Value]
             ) -> _Transformed:  # fmt: skip
    """Run a function that returns several lists of values under `vmap`."""
    found: list[list[tuple[Value, int | None]]] = []

    def in_batch(*xs: Value) -> tuple[()]:
        found[:] = [list(map(batch_of, values)) for values in run(*xs)]
        return ()

    jax.vmap(in_batch, in_axes=level.of_inputs, axis_name=level.axis.name,
             axis_size=level.axis.size, spmd_axis_name=level.axis.spmd_name)(*xs)  # fmt: skip
    return [([x for x, _ in pairs], tuple(axis for _, axis in pairs)) for pairs in found]


def _outputs(level: Level, ys: list[Value], of_outputs: Sequence[Any]) -> list[Value]:
    """Return the outputs of a transformed pass, as the equation returns them.

    `of_outputs` has the batched axis of each, or the tangent of each or None.
    """
    if isinstance(level, Push):
        types = list(map(jax.typeof, ys))
        return [*ys, *instantiate(of_outputs, types, map(differentiable, types))]
    if level.of_outputs is None:
        return ys
    triples = zip(ys, of_outputs, level.of_outputs, strict=True)
    return [_first(y, axis, level.axis.size) if on else _unbatched(y, axis)
            for y, axis, on in triples]  # fmt: skip


def _first(y: Value, axis: int | None, size: int) -> Value:
    """Return a value with its batched axis as the first one."""
    if axis is None:
        return jnp.broadcast_to(y, (size, *y.shape))
    return jnp.moveaxis(y, axis, 0)


def _unbatched(y: Value, axis: int | None) -> Value:
    """Return a value that does not depend on the batch, although a plan may compute a batch."""
    return y if axis is None else lax.index_in_dim(y, 0, axis, keepdims=False)


def run(*xs: Value, derivative: Derivative, given: Given, levels: Sequence[Level], types: Any
        ) -> tuple[list[Value], tuple[Any, ...]]:  # fmt: skip
    """Run one equation alone, under the plan of the default policy; return as `PlannedPasses` does.

    A backward pass runs the forward pass first.
    """
    passes = PlannedPasses(derivative, derivative.schedule)
    if given is None:
        return passes.forward(levels, xs)[:2]
    positions, of_program = shared_inputs(derivative, given, levels)
    shared = [level for level in of_program if level is not None]
    residuals = passes.forward(shared, [xs[i] for i in positions])[2]
    return passes.backward(levels, given, residuals, xs)


def _values(*xs: Value, **params: Any) -> list[Value]:
    return run(*xs, **params)[0]


def _batch(
    axis: Any, xs: Sequence[Value], axes: Sequence[Any], *, levels: tuple[Level, ...],
    types: Sequence[Any], **params: Any,
) -> tuple[list[Value], list[int | None]]:  # fmt: skip
    """Bind the equation with one more level, a `vmap`."""
    if all(a is None for a in axes):
        return deferred_p.bind(*xs, levels=levels, types=types, **params), [None] * len(types)
    level = Batch(axis, tuple(axes))
    found: list[tuple[Any, ...]] = []

    def flat(*xs: Value) -> list[Value]:
        ys, of_outputs = run(*xs, levels=(*levels, level), types=types, **params)
        found[:] = [of_outputs]
        return [_first(y, a, axis.size) for y, a in zip(ys, of_outputs, strict=True)]

    prog = trace(flat, *map(jax.typeof, xs))
    on = tuple(a is not None for a in found[0])
    level = dataclasses.replace(level, of_outputs=on)
    pairs = zip(prog.out_avals, types, on, strict=True)
    batched = tuple(new if is_batched else old for new, old, is_batched in pairs)
    ys = deferred_p.bind(*xs, levels=(*levels, level), types=batched, **params)
    return ys, [0 if is_batched else None for is_batched in on]


def _push_for_jax(primals: Sequence[Value], tangents: Sequence[Value], **params: Any) -> Any:
    """The rule for `jax.jvp`: run the equation alone, with tangents by xform's own rules."""
    prog = trace(functools.partial(_values, **params), *map(jax.typeof, primals))
    ys, dys = jvp(prog, primals, [None if is_zero(dx) else dx for dx in tangents])
    zero = lambda y: ad.Zero(tangent_aval(jax.typeof(y)))
    return ys, [zero(y) if dy is None else dy for y, dy in zip(ys, dys, strict=True)]


deferred_p.def_impl(_values)
mlir.register_lowering(deferred_p, mlir.lower_fun(_values, multiple_results=True))
batching.fancy_primitive_batchers[deferred_p] = _batch
ad.primitive_jvps[deferred_p] = _push_for_jax


class Deferred(Structured):
    """The rule of `xform_deferred`: `xform.jvp` adds a level; reverse mode differentiates `run`."""

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        params, types = eqn.params, eqn.params["types"]
        level, on = Push(present_mask(dxs)), [*map(differentiable, types)]
        pushed = (*types, *map(tangent_aval, gather(types, on)))
        new = {**params, "levels": (*params["levels"], level), "types": pushed}
        out = deferred_p.bind(*xs, *gather(dxs, level.of_inputs), **new)
        return out[: len(types)], spread(out[len(types) :], on)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
            ) -> tuple[list[Value], Pull]:  # fmt: skip
        return pullback(self._program(eqn), active, wanted, xs)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return jvp(self._program(eqn), xs, dxs, split=True, wanted=wanted)

    def _program(self, eqn: JaxprEqn) -> Program:
        return trace(functools.partial(_values, **eqn.params), *[v.aval for v in eqn.invars])


declare(Deferred, deferred_p, "structured", (), supported_params=None)
