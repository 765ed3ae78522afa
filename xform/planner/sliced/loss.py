"""Compute the value and the gradient of a loss in one loop over slices.

If the only differentiable output of a region is one number, such as a sum of losses, its derivative
needs no second loop. Each slice computes its term of the sum and, right after, the gradient of that
term. The gradient of an input that is cut into slices is joined from slices, the gradient of any
other input is summed over them. So no slice is computed twice, and nothing of a slice is saved. The
gradients of layers in a scan are added to their sums in place (`passes/sum_in_loops.py`). The
pullback multiplies all these gradients by the cotangent.

This rule is a `custom_jvp`, so the region also has tangents and higher derivatives, by JAX and by
xform.

Other outputs may leave the region too, such as the logits that a loss returns besides its value.
No output of the program whose derivative is wanted depends on them outside the region. Their
tangents are those of the loop itself. A gradient does not need them, so they are dead code there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import SymbolicZero, Var, cotangent_aval, is_zero, tangent_aval
from xform.errors import NotDifferentiable
from xform.interpret import emit
from xform.interpret.activity import path
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.passes.sum_in_loops import SumInLoops
from xform.planner.sliced.slice_plan import plan_of_slice, slice_program
from xform.program.arithmetic import Value, differentiable, instantiate
from xform.program.arrays import filled, zeros
from xform.program.ir import Mask, Program, gather, spread, trace
from xform.registry.table import traits
from xform.rules.refused import refuse_push
from xform.slices.loop import SlicedInputs, run_in_slices
from xform.slices.loop_outputs import SumOfSlices, joined_along, outputs_after, region_outputs
from xform.slices.region import Region, is_number
from xform.slices.resize import CurrentSlice


def run_loss_in_slices(region: Region, sliced: Sequence[Value], full: Sequence[Value],
                       wanted: Mask | None = None, saved_bytes: int | None = None
                       ) -> list[Value]:  # fmt: skip
    """Run a region as a loop over slices; if it computes a loss, with the rule of this file.

    Args:
      region: the region.
      sliced: the values of `region.sliced`.
      full: the values of `region.full`.
      wanted: the outputs of the region's program whose derivatives are wanted; None: all.
      saved_bytes: the most bytes that a slice of a loss saves for its own backward pass; None: what
        a minimum cut saves.
    """
    loss = loss_position(region, wanted)
    if loss is None:
        return run_in_slices(region, sliced, full)
    n = len(sliced)

    @jax.custom_jvp
    def run(*inputs: Value) -> tuple[Value, ...]:
        return tuple(run_in_slices(region, inputs[:n], inputs[n:]))

    def push(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Any, Any]:
        active = tuple(not is_zero(dx) for dx in tangents)
        ys, gradients = value_and_gradients(
            region, loss, primals[:n], primals[n:], active, saved_bytes
        )
        dys = _other_tangents(region, loss, primals, tangents)
        dys[loss] = _tangent_of_loss(ys[loss], gradients, gather(tangents, active))
        zero = lambda y: SymbolicZero(tangent_aval(jax.typeof(y)))
        return tuple(ys), tuple(
            zero(y) if dy is None else dy for y, dy in zip(ys, dys, strict=True)
        )

    run.defjvp(push, symbolic_zeros=True)
    return list(run(*sliced, *full))


def _tangent_of_loss(y: Value, gradients: Sequence[Value], dxs: Sequence[Value]) -> Value | None:
    """Return the tangent of a loss, the sum of the products of gradients and tangents."""
    if not dxs:
        return None
    terms = [jnp.sum(g * dx, dtype=g.dtype) for g, dx in zip(gradients, dxs, strict=True)]
    total = sum(lax.convert_element_type(term, y.dtype) for term in terms)
    return lax.reshape(total, y.shape)


def _other_tangents(region: Region, loss: int, primals: Sequence[Value], tangents: Sequence[Value]
                    ) -> list[Value | None]:  # fmt: skip
    """Return the tangents of the outputs besides the loss; None is a tangent that is zero."""
    others = tuple(on and i != loss for i, on in enumerate(_differentiable_outputs(region)))
    if not any(others):
        return [None] * len(others)
    n = len(region.sliced)
    loop = trace(lambda *xs: run_in_slices(region, xs[:n], xs[n:]), *primals)
    dxs = [None if is_zero(dx) else dx for dx in tangents]
    try:
        _, dys = jvp(loop, primals, dxs, wanted=others)
    except NotDifferentiable as error:  # it has a `custom_vjp`, so only reverse mode
        dys = _tangents_of_pullback(loop, others, primals, dxs, error.where)
    return [dy if on else None for dy, on in zip(dys, others, strict=True)]


def _tangents_of_pullback(prog: Program, wanted: Mask, primals: Sequence[Value],
                          dxs: Sequence[Value], where: str) -> list[Value]:  # fmt: skip
    """Return tangents of a program without forward mode.

    They can be transposed, by the pullback. Evaluating them is an error, which names `where`.
    """
    active = tuple(dx is not None for dx in dxs)

    def pull(primals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        _, pull_all = pullback(prog, active, wanted, primals)
        return instantiate(pull_all(spread(gather(cts, wanted), wanted)), primals)

    outputs = list(map(zeros, prog.out_avals))
    return refuse_push(outputs, primals, pull, dxs, where)[1]


def loss_position(region: Region, wanted: Mask | None = None) -> int | None:
    """Return the position of the output of a region that is a loss.

    That is a sum with one element. Equations outside the region compute `wanted` outputs of the
    program (None: all outputs) from it, and from no other output that a derivative can reach. None
    if there is no such output, or if an input is complex. It is also None if another output adds to
    a value in place, which one slice alone does not compute.
    """
    if any(s.summed and traits(e.primitive).adds for e, s in region.equations):
        return None
    prog = slice_program(region)
    active = tuple(map(differentiable, prog.in_avals))
    if any(jnp.issubdtype(a.dtype, np.complexfloating) for a in gather(prog.in_avals, active)):
        return None
    used = _used_for(region, wanted)
    reached = [i for i, on in enumerate(_differentiable_outputs(region))
               if on and region.outputs[i][0] in used]  # fmt: skip
    if len(reached) != 1:
        return None
    return reached[0] if is_number(*region.outputs[reached[0]]) else None


def _differentiable_outputs(region: Region) -> Mask:
    """Return which outputs of a region depend differentiably on its inputs."""
    prog = slice_program(region)
    return path(prog, tuple(map(differentiable, prog.in_avals))).outputs


def _used_for(region: Region, wanted: Mask | None) -> set[Any]:
    """Return the values that equations outside a region need to compute the `wanted` outputs."""
    prog = region.program
    outputs = prog.outputs if wanted is None else gather(prog.outputs, wanted)
    used = {v for v in outputs if isinstance(v, Var)}
    for i in range(len(prog.equations) - 1, -1, -1):
        eqn = prog.equations[i]
        if i not in region.members and not used.isdisjoint(eqn.outvars):
            used.update(v for v in eqn.invars if isinstance(v, Var))
    return used


def value_and_gradients(region: Region, loss: int, sliced: Sequence[Value], full: Sequence[Value],
                        active: Mask, saved_bytes: int | None = None
                        ) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Run the loop; return the outputs of a region, and the gradients of the output `loss`.

    There is one gradient for each active input, of `sliced` first and then of `full`. Gradients
    that are sums over the slices are added in float32 if their type is narrower. A slice saves at
    most `saved_bytes` for its own backward pass; None: what a minimum cut saves.
    """
    prog = slice_program(region)
    wanted = tuple(i == loss for i in range(len(region.outputs)))
    planned = plan_of_slice(prog, (False, *active), wanted, saved_bytes)
    inputs = SlicedInputs(sliced, region)
    outputs = region_outputs(region, full)
    axes = [*(axis for _, axis in region.sliced), *[None] * len(full)]
    pairs = gather([*zip((*sliced, *full), axes, strict=True)], active)
    of_inputs = [
        SumOfSlices(jax.typeof(x)) if axis is None
        else joined_along(jax.typeof(x), axis, region)
        for x, axis in pairs
    ]  # fmt: skip
    both = [*outputs, *of_inputs]

    def step(carry: list[Value], x: tuple[Value, list[Value]]) -> tuple[list[Value], list[Value]]:
        at = CurrentSlice(x[0], region.n, region.shards)
        args = [at.number, *inputs.slices(at, x[1]), *full]
        ys, saved = emit.forward(planned, args)
        cts = [filled(cotangent_aval(jax.typeof(ys[loss])), 1)]
        results = emit.backward(planned, saved, args, cts, together=True, whole=True)
        of_args = spread(results, planned.joint.results)
        gradients = gather(instantiate(of_args, args), (False, *active))
        return outputs_after(both, carry, [*ys, *gradients], at)

    numbers = jnp.arange(region.n, dtype=np.int32)
    body = SumInLoops()(step)
    carry, stacked = lax.scan(body, [out.start for out in both], (numbers, inputs.scanned))
    values = [out.joined(*pair) for out, *pair in zip(both, carry, stacked, strict=True)]
    return values[: len(outputs)], values[len(outputs) :]
