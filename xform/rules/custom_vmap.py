"""`jax.custom_batching.custom_vmap`: a function with its own rule for `vmap`.

Its derivative is such a function too. For a batch, the user's rule is differentiated, not the
function under `vmap`. In reverse mode, the backward part runs the function again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from xform._jax import JaxprEqn, cotangent_aval
from xform.interpret import emit
from xform.interpret.activity import path
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.node import (
    Node,
    NodeWithoutResiduals,
    Schedules,
    Structured,
    gather,
    present_mask,
    spread,
    submask,
)
from xform.program.arithmetic import Value, as_jax_values, differentiable, instantiate
from xform.program.ir import Mask, Program, apply, evaluate, program, trace
from xform.registry.table import declare
from xform.registry.traits import Traits


class CustomVmap(Structured):
    """The rule of `custom_vmap_call`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return path(program(eqn.params["call"]), active).outputs

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        return path(program(eqn.params["call"]), active, wanted).inputs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        active = tuple(dx is not None for dx in dxs)
        on = self.active(eqn, active)

        def derivative(prog: Program, xs: list[Value], dxs: list[Value]) -> list[Value]:
            ys, dys = jvp(prog, xs, spread(dxs, active))
            return [*ys, *instantiate(dys, prog.out_avals, on)]

        out = _pushed(eqn, derivative, active, on)(list(xs), gather(dxs, active))
        return out[: len(on)], spread(out[len(on) :], on)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        ys = apply(eqn, xs)
        return ys, self.jvp(eqn, xs, dxs)[1]

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        joint = analyze(program(eqn.params["call"]), active, wanted)
        return _CustomVmapNode(eqn, [joint], wanted, self.useful(eqn, active, wanted), push)


class _CustomVmapNode(NodeWithoutResiduals):
    """A node whose forward part is the call, and whose backward part calls both parts."""

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        active, wanted = self.results, submask(self.seeded, present_mask(seeds))
        present = self.present_results(present_mask(seeds))
        on = spread(present, active)

        def derivative(prog: Program, xs: list[Value], cts: list[Value]) -> list[Value]:
            schedule = schedules[0].plan_other(analyze(prog, active, wanted))
            _, kept = emit.forward(schedule, xs, (False,) * len(prog.outputs))
            in_cts = spread(emit.backward(schedule, kept, xs, cts, True), schedule.joint.results)
            return instantiate(in_cts, prog.in_avals, map(bool, on), cotangent_aval)

        given = [ct for ct in seeds if ct is not None]
        return spread(_derived(self.eqn, derivative, active)(list(xs), given), present)

    def dependent_results(self, given: Mask) -> Mask:
        prog = program(self.eqn.params["call"])
        moving = path(prog, self.results, submask(self.seeded, given)).inputs
        return tuple(gather(moving, self.results))


def _derived(eqn: JaxprEqn, derivative: Callable[..., list[Value]], active: Mask):
    """Return a derivative of the call as a function of (xs, seeds), with a rule for batches.

    `derivative(program, xs, seeds)` is called with the function's program, and for a batch with the
    program of the rule, to which all inexact inputs are given as batched. The rule takes no batched
    values that the function closes over. If such a value is active or batched, the derivative of
    the function is batched instead.
    """
    prog, closed = program(eqn.params["call"]), _closed(eqn.params["in_tree"])

    @custom_vmap
    def call(xs: list[Value], seeds: list[Value]) -> list[Value]:
        return derivative(prog, xs, seeds)

    @call.def_vmap
    def _(size: int, batched: Any, xs: list[Value], seeds: list[Value]):
        if any(gather(active, closed)) or any(gather(batched[0], closed)):
            return _mapped(lambda *args: derivative(prog, *args), size, batched, xs, seeds)
        on = [b or (not c and differentiable(jax.typeof(x)))
              for x, b, c in zip(xs, batched[0], closed, strict=True)]  # fmt: skip
        out_batched: list[bool] = []
        ruled = _ruled(eqn, size, on, out_batched)
        full = lambda *flat: _batch(ruled(*flat), size, out_batched)
        missing = [b or not o for b, o in zip(batched[0], on, strict=True)]
        whole = _batch(xs, size, missing)
        out = derivative(trace(full, *whole), whole, _batch(seeds, size, batched[1]))
        return out, [True] * len(out)

    return call


def _pushed(eqn: JaxprEqn, derivative: Callable[..., list[Value]], active: Mask, on: Mask):
    """Return the push of the call, like `_derived`; the rule gets its inputs batched as in JAX.

    An input is batched for the rule if both its primal and its tangent are batched. If only one of
    them is, it is mapped over outside the rule. If no primal is batched, no output is batched,
    whatever the rule says.
    """
    prog, closed = program(eqn.params["call"]), _closed(eqn.params["in_tree"])

    @custom_vmap
    def call(xs: list[Value], dxs: list[Value]) -> list[Value]:
        return derivative(prog, xs, dxs)

    @call.def_vmap
    def _(size: int, batched: Any, xs: list[Value], dxs: list[Value]):
        out, flags = lanes(size, batched, xs, dxs)
        if any(batched[0]):
            return out, flags
        ys = evaluate(prog, xs) if any(closed) else apply(eqn, xs)
        return [*ys, *out[len(on) :]], [*(False,) * len(on), *flags[len(on) :]]

    def lanes(size: int, batched: Any, xs: list[Value], dxs: list[Value]):
        if any(gather(active, closed)) or any(gather(batched[0], closed)):
            return _mapped(lambda *args: derivative(prog, *args), size, batched, xs, dxs)
        both, *outside = _split(batched, active)
        mutual: list[bool] = []

        def run(xs: list[Value], dxs: list[Value]) -> list[Value]:
            ruled = trace(_ruled(eqn, size, both, mutual), *xs)
            return derivative(ruled, as_jax_values(xs), as_jax_values(dxs))

        if all(axis is None for axes in outside for axis in axes):
            out = run(xs, dxs)
            return out, [*mutual, *gather(mutual, on)]
        # Outputs do not depend on tangents: if only tangents are mapped, outputs are not batched.
        lane = [any(axis is not None for axis in outside[0])] * len(on) + [True] * sum(on)
        axes = [0 if one else None for one in lane]
        out = jax.vmap(run, tuple(outside), axes, axis_size=size)(xs, dxs)
        own = [*mutual, *gather(mutual, on)]
        twice = zip(out, lane, own, strict=True)
        flags = [a or b for a, b in zip(lane, own, strict=True)]
        return [_diagonal(y) if a and b else y for y, a, b in twice], flags

    return call


def _split(batched: Any, active: Mask) -> tuple[list[bool], list[int | None], list[int | None]]:
    """Return the inputs batched for the rule, and the axes of those that are mapped outside it."""
    primals, tangents = batched
    moving = spread(tangents, active)
    both = [b and m is not False for b, m in zip(primals, moving, strict=True)]
    axes = lambda own, ruled: [0 if b and not r else None for b, r in zip(own, ruled, strict=True)]
    return both, axes(primals, both), axes(tangents, gather(both, active))


def _ruled(eqn: JaxprEqn, size: int, batched: list[bool], out_batched: list[bool]):
    """Return the user's rule for flat inputs; it fills `out_batched` with a bool per output."""
    params = eqn.params

    def ruled(*flat: Value) -> list[Value]:
        ins, flags = (jax.tree.unflatten(params["in_tree"], v) for v in (flat, batched))
        ys, ys_batched = params["rule"](size, list(flags), *ins)
        out_batched[:] = jax.tree.leaves(ys_batched)
        return jax.tree.leaves(ys)

    return ruled


def _closed(tree: Any) -> Mask:
    """Return which inputs the function closes over: they form a list before its arguments.

    JAX's own derivative of such a call has two such trees, of its primals and of its tangents.
    """
    first, rest = tree.children()
    if first.node_data()[0] is tuple:
        return (*_closed(first), *_closed(rest))
    return (*(True,) * first.num_leaves, *(False,) * rest.num_leaves)


def _mapped(f: Callable[..., list[Value]], size: int, batched: Any, *args: list[Value]):
    """Map a function over a batch without any rule; return outputs, and that all are batched."""
    axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
    out = jax.vmap(f, in_axes=axes, axis_size=size)(*args)
    return out, [True] * len(out)


def _diagonal(y: Value) -> Value:
    """Return the lanes of `y[i, i]`, on the first axis."""
    return jnp.moveaxis(jnp.diagonal(y, axis1=0, axis2=1), -1, 0)


def _batch(xs: Sequence[Value], size: int, batched: Sequence[bool]) -> list[Value]:
    """Return the values, with those that are not batched repeated."""
    return [x if b else lax.broadcast(x, (size,)) for x, b in zip(xs, batched, strict=True)]


declare(CustomVmap, "custom_vmap_call", "structured", (),
        Traits(call="call", calls="custom"),
        known=("call", "rule", "in_tree", "out_tree"))  # fmt: skip
