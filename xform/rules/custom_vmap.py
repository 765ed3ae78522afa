"""The rule of `jax.custom_batching.custom_vmap`, a function with its own rule for `vmap`.

The derivative of the function is again a `custom_vmap` function: under `vmap` it is the derivative
of the user's rule, not of the function. In reverse mode nothing is saved: the backward pass runs
the function again. A *seed* is a cotangent of an output; the backward pass starts from it. The base
classes `Structured` and `Node` describe the methods (`xform.interpret.node`).
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
from xform.interpret.repeat import check_repeatable
from xform.program.arithmetic import Value, as_jax_values, differentiable, instantiate
from xform.program.flow import Flow
from xform.program.ir import Mask, Program, apply, evaluate, program, trace
from xform.registry.table import declare
from xform.registry.traits import Traits


class CustomVmap(Structured):
    """The rule of `custom_vmap_call`."""

    def derivative_flow(self, eqn: JaxprEqn) -> Flow | None:
        return self.flow(eqn)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        active = tuple(dx is not None for dx in dxs)
        on = self.active(eqn, active)

        def derivative(prog: Program, xs: list[Value], dxs: list[Value]) -> list[Value]:
            ys, dys = jvp(prog, xs, spread(dxs, active))
            return [*ys, *instantiate(dys, prog.out_avals, on)]

        out = _custom_vmap_jvp(eqn, derivative, active, on)(list(xs), gather(dxs, active))
        return out[: len(on)], spread(out[len(on) :], on)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        _check_repeatable(eqn, "linearize", "the linear map runs the function again")
        ys = apply(eqn, xs)
        return ys, self.jvp(eqn, xs, dxs)[1]

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        reason = "the backward pass runs the function again"
        _check_repeatable(eqn, "reverse-mode derivative", reason)
        joint = analyze(program(eqn.params["call"]), active, wanted)
        return _CustomVmapNode(eqn, [joint], wanted, self.useful(eqn, active, wanted), push)


def _check_repeatable(eqn: JaxprEqn, request: str, reason: str) -> None:
    """Raise NotDifferentiable if the function must not run twice."""
    remedy = "pass that value to the function as an argument"
    check_repeatable([eqn], f"{request} of custom_vmap", "the function", reason, remedy)


class _CustomVmapNode(NodeWithoutResiduals):
    """The node of a call in reverse mode. Its backward part runs the function again."""

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        active, wanted = self.results, submask(self.seeded, present_mask(seeds))
        present = self.present_results(present_mask(seeds))
        on = spread(present, active)

        def derivative(prog: Program, xs: list[Value], cts: list[Value]) -> list[Value]:
            schedule = schedules[0].plan_other(analyze(prog, active, wanted))
            _, saved = emit.forward(schedule, xs, (False,) * len(prog.outputs))
            in_cts = spread(emit.backward(schedule, saved, xs, cts, True), schedule.joint.results)
            return instantiate(in_cts, prog.in_avals, map(bool, on), cotangent_aval)

        given = [ct for ct in seeds if ct is not None]
        return spread(_custom_vmap_pull(self.eqn, derivative, active)(list(xs), given), present)

    def dependent_results(self, given: Mask) -> Mask:
        prog = program(self.eqn.params["call"])
        has_cotangent = path(prog, self.results, submask(self.seeded, given)).inputs
        return tuple(gather(has_cotangent, self.results))


def _custom_vmap_pull(eqn: JaxprEqn, derivative: Callable[..., list[Value]], active: Mask):
    """Return the pullback of a call as a `custom_vmap` function of inputs and seeds.

    `derivative(program, xs, seeds)` computes the pullback of a program. Without `vmap` it gets the
    function's program. Under `vmap` it gets the program of the user's rule, and the rule gets all
    floating-point inputs as batched. The rule cannot get values that the function closes over as
    batched. If such a value is active or batched, `vmap` maps the derivative of the function
    instead.
    """
    prog, closed_over = program(eqn.params["call"]), _closed_over(eqn.params["in_tree"])

    @custom_vmap
    def call(xs: list[Value], seeds: list[Value]) -> list[Value]:
        return derivative(prog, xs, seeds)

    @call.def_vmap
    def _(size: int, batched: Any, xs: list[Value], seeds: list[Value]):
        if any(gather(active, closed_over)) or any(gather(batched[0], closed_over)):
            return _plain_vmap(lambda *args: derivative(prog, *args), size, batched, xs, seeds)
        rule_batched = [b or (not c and differentiable(jax.typeof(x)))
                        for x, b, c in zip(xs, batched[0], closed_over, strict=True)]  # fmt: skip
        out_batched: list[bool] = []
        rule = _flat_rule(eqn, size, rule_batched, out_batched)
        batched_rule = lambda *flat: _batch(rule(*flat), size, out_batched)
        as_given = [b or not r for b, r in zip(batched[0], rule_batched, strict=True)]
        rule_xs = _batch(xs, size, as_given)
        seeds = _batch(seeds, size, batched[1])
        out = derivative(trace(batched_rule, *rule_xs), rule_xs, seeds)
        return out, [True] * len(out)

    return call


def _custom_vmap_jvp(eqn: JaxprEqn, derivative: Callable[..., list[Value]], active: Mask, on: Mask):
    """Return the jvp of a call as a `custom_vmap` function of inputs and tangents.

    `derivative(program, xs, dxs)` computes the jvp of a program: of the function's program, and
    under `vmap` of the program of the user's rule. As in JAX, an input is batched for the rule if
    both its primal and its tangent are batched. If only one of them is, a plain `vmap` around the
    rule maps over it. If no primal is batched, no output is batched, whatever the rule says.
    `active` says which inputs have a tangent, `on` which outputs.
    """
    prog, closed_over = program(eqn.params["call"]), _closed_over(eqn.params["in_tree"])

    @custom_vmap
    def call(xs: list[Value], dxs: list[Value]) -> list[Value]:
        return derivative(prog, xs, dxs)

    @call.def_vmap
    def _(size: int, batched: Any, xs: list[Value], dxs: list[Value]):
        out, out_batched = batched_jvp(size, batched, xs, dxs)
        if any(batched[0]):
            return out, out_batched
        ys = evaluate(prog, xs) if any(closed_over) else apply(eqn, xs)
        return [*ys, *out[len(on) :]], [*(False,) * len(on), *out_batched[len(on) :]]

    def batched_jvp(size: int, batched: Any, xs: list[Value], dxs: list[Value]):
        if any(gather(active, closed_over)) or any(gather(batched[0], closed_over)):
            return _plain_vmap(lambda *args: derivative(prog, *args), size, batched, xs, dxs)
        rule_batched, *mapped_axes = _split_batched(batched, active)
        rule_out_batched: list[bool] = []

        def run(xs: list[Value], dxs: list[Value]) -> list[Value]:
            rule = trace(_flat_rule(eqn, size, rule_batched, rule_out_batched), *xs)
            return derivative(rule, as_jax_values(xs), as_jax_values(dxs))

        if all(axis is None for axes in mapped_axes for axis in axes):
            out = run(xs, dxs)
            return out, [*rule_out_batched, *gather(rule_out_batched, on)]
        # Outputs do not depend on tangents: if only tangents are mapped, outputs are not batched.
        mapped = [any(axis is not None for axis in mapped_axes[0])] * len(on) + [True] * sum(on)
        out_axes = [0 if m else None for m in mapped]
        out = jax.vmap(run, tuple(mapped_axes), out_axes, axis_size=size)(xs, dxs)
        by_rule = [*rule_out_batched, *gather(rule_out_batched, on)]
        out_batched = [m or r for m, r in zip(mapped, by_rule, strict=True)]
        # An output that is batched both by the plain `vmap` and by the rule has two batch axes.
        triples = zip(out, mapped, by_rule, strict=True)
        return [_diagonal(y) if m and r else y for y, m, r in triples], out_batched

    return call


def _split_batched(batched: Any, active: Mask
                   ) -> tuple[list[bool], list[int | None], list[int | None]]:  # fmt: skip
    """Divide the batched inputs of a jvp between the user's rule and a plain `vmap` around it.

    Returns:
      Which inputs are batched for the rule; and the axes of primals and of tangents for the plain
      `vmap`, None for values that it does not map.
    """
    primals, tangents = batched
    of_input = spread(tangents, active)  # None for an input without a tangent
    for_rule = [b and t is not False for b, t in zip(primals, of_input, strict=True)]
    axes = lambda own, rule: [0 if b and not r else None for b, r in zip(own, rule, strict=True)]
    return for_rule, axes(primals, for_rule), axes(tangents, gather(for_rule, active))


def _flat_rule(eqn: JaxprEqn, size: int, batched: list[bool], out_batched: list[bool]):
    """Return the user's rule as a function of flat inputs, which returns flat outputs.

    It fills `out_batched` with a bool for each output.
    """
    params = eqn.params

    def rule(*flat: Value) -> list[Value]:
        ins, flags = (jax.tree.unflatten(params["in_tree"], v) for v in (flat, batched))
        ys, ys_batched = params["rule"](size, list(flags), *ins)
        out_batched[:] = jax.tree.leaves(ys_batched)
        return jax.tree.leaves(ys)

    return rule


def _closed_over(tree: Any) -> Mask:
    """Return which inputs the function closes over, from the tree of its inputs.

    In the tree, the list of these inputs comes before the function's arguments. A call in a
    derivative that JAX made has two trees of this form: of its primals and of its tangents.
    """
    first, rest = tree.children()
    if first.node_data()[0] is tuple:
        return (*_closed_over(first), *_closed_over(rest))
    return (*(True,) * first.num_leaves, *(False,) * rest.num_leaves)


def _plain_vmap(f: Callable[..., list[Value]], size: int, batched: Any, *args: list[Value]):
    """Map a function over a batch without the user's rule; return outputs, and True for each."""
    axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
    out = jax.vmap(f, in_axes=axes, axis_size=size)(*args)
    return out, [True] * len(out)


def _diagonal(y: Value) -> Value:
    """Return the elements `y[i, i]` of the first two axes, with `i` as the first axis."""
    return jnp.moveaxis(jnp.diagonal(y, axis1=0, axis2=1), -1, 0)


def _batch(xs: Sequence[Value], size: int, batched: Sequence[bool]) -> list[Value]:
    """Repeat the values that are not batched along a new first axis of length `size`."""
    return [x if b else lax.broadcast(x, (size,)) for x, b in zip(xs, batched, strict=True)]


declare(CustomVmap, "custom_vmap_call", "structured", (),
        Traits(call="call", calls="custom"),
        supported_params=("call", "rule", "in_tree", "out_tree"))  # fmt: skip
