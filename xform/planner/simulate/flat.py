"""Turn a traced program into a flat program: the operations that XLA sees before fusion.

The planner simulates the memory of a flat program (`liveness.py`). A flat program differs from the
jaxpr:

- Calls are inlined, and equal computations are merged.
- A view, such as a reshape, has no bytes of its own: it lies in the memory of another value.
- An offloaded value takes no device memory while it is on the host. A CPU has only one memory, so
  there an offloaded value is not moved at all.
- Operations that no output needs are left out, and so are barriers that the backend ignores.
- XLA's algebraic simplifications are applied, as far as they change memory.
- Loops and branches stay single steps. Their bodies are flattened when they are simulated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    Literal,
    broadcast_in_dim_p,
    conv_general_dilated_p,
    dot_general_p,
    jax_primitives,
)
from xform.interpret.cost import aval_bytes
from xform.interpret.lanes import final_p, keep_p, some_p, store_p
from xform.passes.erased import unchanged_operand
from xform.passes.structured import called_body, is_recomputation
from xform.planner.simulate.flat_products import ProductFlattener
from xform.planner.simulate.products import is_outer, shape
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatValue, repeat_p, wait_p
from xform.program.flow import Flow
from xform.program.ir import Program
from xform.registry.table import flow_of
from xform.registry.traits import Traits
from xform.steering.barrier import barrier_p, is_active
from xform.steering.materialize import materialize_p

add_any_p = jax_primitives.add_jaxvals_p
# The parameter `devices` of a `device_put` that moves a value between memories of one device.
_MEMORY_SPACES = ((jax.memory.Space.Host,), (jax.memory.Space.Device,))


def flatten(prog: Program, profile: Profile, n_cotangents: int = 0) -> FlatProgram:
    """Return the flat program of a Program.

    Args:
      prog: the program.
      profile: the facts about the compiler that the flat program is for.
      n_cotangents: how many of the last inputs are cotangents. A scalar cotangent is assumed to be
        the constant 1 that `grad` passes.

    Cost: linear in equations, including those of called programs.
    """
    flattener = Flattener(profile)
    n = len(prog.inputs) - n_cotangents
    inputs = flattener.inputs(prog.inputs[:n])
    inputs += flattener.cotangent_inputs(prog.inputs[n:])
    return flattener.build(inputs, flattener.add_program(prog, inputs))


def flatten_iteration(
    prog: Program, profile: Profile, eqn: JaxprEqn, n_slices: int, n_stacked: int
) -> FlatProgram:
    """Return the flat program of one iteration of the loop `eqn`.

    The last `n_slices` inputs of the body `prog` are slices of scanned arrays, and its last
    `n_stacked` outputs are written into stacks. A step is added for each slice and each update.
    """
    flattener = Flattener(profile)
    inputs = flattener.inputs(prog.inputs)
    first = len(inputs) - n_slices
    slices = [flattener.add_step(lax.dynamic_slice_p, x, eqn, [x], [x])[0] for x in inputs[first:]]
    outputs = flattener.add_program(prog, [*inputs[:first], *slices])
    first = len(outputs) - n_stacked
    for i, x in enumerate(outputs[first:]):
        update, result = lax.dynamic_update_slice_p, FlatValue(0, "computed", x.shape)
        outputs[first + i] = flattener.add_step(update, (x, i), eqn, [x], [result])[0]
    return flattener.build(inputs, outputs)


def kept_operands(flow: Flow) -> dict[int, int]:
    """Return for results of a conditional the operand that a branch returns unchanged.

    Results and operands are positions. An operand stands for one result only.
    """
    kept: dict[int, int] = {}
    for body in flow.bodies if flow.index is not None else ():
        operands = dict(zip(body.program.inputs, body.operands, strict=True))
        for r, v in zip(body.results, body.program.outputs, strict=True):
            k = None if isinstance(v, Literal) else operands.get(v)
            if k is not None and r not in kept and k not in kept.values():
                kept[r] = k
    return kept


class Flattener(ProductFlattener):
    """Turns each equation into the operations that XLA makes of it before fusion.

    Its base classes add products (`ProductFlattener`) and merge equal steps (`FlatBuilder`).
    """

    def add_equation(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add the steps that compute an equation from these operands, and return its results."""
        prim, known = eqn.primitive, self.traits(eqn.primitive)
        if known.call:
            if self.profile.keeps_regions and is_recomputation(eqn):
                operands = self._add_waits(eqn, operands)
            return self.add_program(called_body(eqn), operands)
        if known.lowered and self.profile.lowers:
            lowered = self.fact(eqn, "lowered", functools.partial(known.lowered, eqn))
            if lowered is not None:
                return self.add_program(lowered, operands)
        if prim is barrier_p:
            return self._add_barrier(eqn, operands)
        if prim is materialize_p:
            return [self.materialize(eqn, operands[0])]
        if self._is_identity(eqn, known):
            return operands
        if prim is keep_p:  # keeps a loop's old or new state; without `vmap` always the new one
            return [operands[1]]
        if known.view and self.fact(eqn, "same size", lambda: _has_same_size(eqn)):
            return [self.add_view(eqn, operands[0], shape(eqn.outvars[0].aval))]
        if known.fusion == "elementwise" or prim is lax.convert_element_type_p:
            return [self._add_elementwise(eqn, operands)]
        if prim is broadcast_in_dim_p and not operands[0].shape:
            return [self.add_broadcast(eqn, operands[0])]
        if prim is lax.split_p:
            key = operands[0], self.operation_key(eqn)
            return [
                self.add_step(lax.slice_p, (*key, i), eqn, operands, [v.aval])[0]
                for i, v in enumerate(eqn.outvars)
            ]
        if prim is lax.transpose_p:
            return [self.add_transpose(eqn, operands[0], eqn.params["permutation"])]
        if prim is lax.gather_p:
            return [self._add_gather(eqn, operands)]
        if prim is dot_general_p and self.fact(eqn, "outer", lambda: is_outer(eqn)):
            prim, operands = lax.mul_p, [self.add_broadcast(eqn, x) for x in operands]
            return self.add_step(prim, (tuple(operands), self.operation_key(eqn)), eqn, operands)
        if prim in (dot_general_p, conv_general_dilated_p):
            return self.add_product(eqn, operands)
        if prim is store_p:
            prim, operands = lax.dynamic_update_slice_p, operands[:2]
        if (flow := flow_of(eqn)) is not None and flow.is_loop:
            return self._add_loop(eqn, flow, operands)
        if flow is not None and flow.index is not None:
            return self._add_conditional(eqn, flow, operands)
        return self.add_step(prim, (tuple(operands), self.operation_key(eqn)), eqn, operands)

    def _add_loop(self, eqn: JaxprEqn, flow: Flow, operands: list[FlatValue]
                  ) -> list[FlatValue]:  # fmt: skip
        """Add a loop, and return its results.

        The arrays into which the loop stacks its results are first filled with zeros. XLA does
        this as early as possible, so each array has a step of its own for it.
        """
        operands = [self._copy_if_transposed_gather(x, eqn) for x in operands]
        key = tuple(operands), self.operation_key(eqn)
        stacks = [
            self.add_step(repeat_p, (key, i), eqn, [], [v.aval])[0]
            for i, v in enumerate(eqn.outvars[r] for r in sorted(flow.stacked))
        ]
        results = self.add_step(eqn.primitive, key, eqn, [*operands, *stacks])
        if results and results[0].maker is not None:
            initial = dict(zip(sorted(flow.stacked), stacks, strict=True))
            initial |= {r: operands[k] for k, r in flow.carried.items()}
            results[0].maker.initial_values = [initial[r] for r in range(len(results))]
        return results

    def _add_gather(self, eqn: JaxprEqn, operands: list[FlatValue]) -> FlatValue:
        """Add a gather, and return its result.

        XLA gathers slices along the first axes of an array, which it then transposes if the slices
        are along other axes of the result.
        Source: XLA's `gather_simplifier.cc`.
        """
        size = shape(eqn.outvars[0].aval)
        of_slices = eqn.params["dimension_numbers"].offset_dims
        order = (*(a for a in range(len(size)) if a not in of_slices), *of_slices)
        gathered = FlatValue(
            self.bytes(eqn.outvars[0].aval), "computed", tuple(size[a] for a in order)
        )
        key = tuple(operands), self.operation_key(eqn)
        (result,) = self.add_step(lax.gather_p, key, eqn, operands, [gathered])
        if order == tuple(range(len(size))):
            return result
        return self.add_transpose(eqn, result, [order.index(a) for a in range(len(size))])

    def _copy_if_transposed_gather(self, x: FlatValue, eqn: JaxprEqn) -> FlatValue:
        """Return an operand of the loop `eqn`, copied if it is a transposed gather.

        XLA writes such an operand in another layout first.
        """
        gathered, _ = self.transposed_from.get(x, (x, ()))
        if gathered is x or gathered.maker is None or gathered.maker.primitive is not lax.gather_p:
            return x
        written, result = self.materialize(eqn, x), FlatValue(x.bytes, "computed", x.shape)
        return self.add_step(lax.transpose_p, (x, "copy"), eqn, [written], [result])[0]

    def _add_conditional(self, eqn: JaxprEqn, flow: Flow, operands: list[FlatValue]
                         ) -> list[FlatValue]:  # fmt: skip
        """Add a conditional, and return its results."""
        key = tuple(operands), self.operation_key(eqn)
        results = self.add_step(eqn.primitive, key, eqn, operands)
        kept = kept_operands(flow)
        if kept and results[0].maker is not None:
            values = [operands[kept[r]] if r in kept else None for r in range(len(results))]
            results[0].maker.initial_values = values
        return results

    def _is_identity(self, eqn: JaxprEqn, known: Traits) -> bool:
        """Return whether the result of an equation is its operand, in the same memory."""
        prim = eqn.primitive
        if prim is lax.device_put_p and eqn.params["devices"] in _MEMORY_SPACES:
            return self.profile.host_is_device
        return known.identity or prim in (some_p, final_p)

    def materialize(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """Return the value `x`, written to memory. Its readers do not compute it again."""
        result = FlatValue(x.bytes, "computed", x.shape)
        return self.add_step(wait_p, (x,), eqn, [x], [result])[0]

    def _add_barrier(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add a barrier, which delays its first operands until the other operands are computed.

        Returns the delayed operands. There is one step for each, which is a select on a CPU. The
        operands themselves are returned if the backend ignores the barrier, or if it knows at
        compile time all values that they wait for.
        """
        n_delayed = eqn.params["n"]
        delayed, awaited = operands[:n_delayed], operands[n_delayed:]
        if not (self.profile.repeats or is_active(eqn.params["where"], self.profile.name)):
            return delayed
        if all(map(self.is_compile_time, awaited)):
            return delayed
        prim = barrier_p if self.profile.selects_barriers else wait_p
        return [
            self.add_step(prim, (x, tuple(awaited)), eqn, [x, *awaited], [v.aval])[0]
            for x, v in zip(operands, eqn.outvars, strict=False)
        ]

    def _add_waits(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Return the operands of a region, which all wait until the last of them is computed."""
        return [
            self.add_step(wait_p, (x, tuple(operands)), eqn, [x, *operands], [v.aval])[0]
            for x, v in zip(operands, eqn.invars, strict=True)
        ]

    def _add_elementwise(self, eqn: JaxprEqn, operands: list[FlatValue]) -> FlatValue:
        """Add an elementwise operation, with the simplifications of XLA, and return its result.

        Smaller operands are broadcast first. An operation on broadcast scalars runs on the scalars,
        and its result is broadcast.
        """
        prim, aval = eqn.primitive, eqn.outvars[0].aval
        if (i := unchanged_operand(eqn)) is not None:
            return operands[i]
        scalars = [self.scalar_of.get(x, x) for x in operands]
        if not any(x.shape for x in scalars):
            key, size = (tuple(scalars), self.operation_key(eqn)), self.bytes(aval)
            if all(x.kind == "constant" for x in scalars):
                result = self.constant(key, ())
            else:
                one_element = FlatValue(size // max(1, math.prod(shape(aval))), "computed")
                result = self.add_step(prim, key, eqn, scalars, [one_element])[0]
            return self.add_broadcast(eqn, result)
        if prim is lax.div_p and (reciprocal := self._add_reciprocal(eqn, operands[1])):
            prim, operands = lax.mul_p, [operands[0], reciprocal]
        if prim is not lax.select_n_p or operands[0].shape:
            size = shape(aval)
            operands = [x if x.shape == size else self.add_broadcast(eqn, x) for x in operands]
        if prim is add_any_p:
            prim = lax.add_p
        if prim is lax.add_p and (total := self._add_scatter_sum(operands)):
            return total
        if prim is lax.square_p or (prim is lax.mul_p and operands[0] is operands[1]):
            return self._add_power(operands[0], 2, eqn)
        if prim is lax.integer_pow_p and eqn.params["y"] > 1:
            return self._add_power(operands[0], eqn.params["y"], eqn)
        return self.add_step(prim, (tuple(operands), self.operation_key(eqn)), eqn, operands)[0]

    def _add_reciprocal(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue | None:
        """Return the reciprocal of the divisor `x` if XLA multiplies by it instead of dividing.

        It does so if the divisor is smaller than the result and is broadcast. For other divisions
        this returns None.
        Source: XLA's `algebraic_simplifier.cc`, `HandleDivide`.
        """
        broadcast = x.maker if x.maker and x.maker.primitive is broadcast_in_dim_p else None
        divisor = broadcast.operands[0] if broadcast else x
        if math.prod(divisor.shape) >= math.prod(shape(eqn.outvars[0].aval)):
            return None
        if divisor.kind == "constant":
            return x
        value = FlatValue(divisor.bytes, "computed", divisor.shape)
        reciprocal = self.add_step(lax.div_p, ("one over", divisor), eqn, [divisor], [value])[0]
        if broadcast is None:
            return reciprocal
        key = (reciprocal,), self.operation_key(broadcast.eqn)
        return self.add_step(broadcast_in_dim_p, key, broadcast.eqn, [reciprocal])[0]

    def _add_scatter_sum(self, operands: Sequence[FlatValue]) -> FlatValue | None:
        """Return the sum of a value and of updates that are scattered into zeros.

        XLA scatters the updates into the value instead. For other sums this returns None.
        Source: XLA's `algebraic_simplifier.cc`, `HandleAdd`.
        """
        for value, other in (operands, operands[::-1]):
            scatter = other.maker
            if scatter and scatter.primitive is lax.scatter_add_p and _is_zero(scatter.operands[0]):
                prim, updates = lax.scatter_add_p, scatter.operands[1:]
                return self.add_step(prim, (value, other), scatter.eqn, [value, *updates])[0]
        return None

    def _add_power(self, x: FlatValue, exponent: int, eqn: JaxprEqn) -> FlatValue:
        """Add repeated squarings that compute a power of `x`, and return it.

        Powers of one value share their products.
        """
        multiply = lambda a, b: self.add_step(lax.mul_p, (a, b), eqn, [a, b])[0]
        product = None
        while exponent:
            if exponent % 2:
                product = x if product is None else multiply(product, x)
            exponent //= 2
            x = multiply(x, x) if exponent else x
        return product or x


def _is_zero(x: FlatValue) -> bool:
    """Return whether a value is a literal zero that is broadcast."""
    if x.maker is None or x.maker.primitive is not repeat_p:
        return False
    (v, *_) = x.maker.eqn.invars
    return isinstance(v, Literal) and bool(v.val == 0)


def _has_same_size(eqn: JaxprEqn) -> bool:
    """Return whether the result of an equation has as many bytes as its operand."""
    return aval_bytes(eqn.invars[0].aval) == aval_bytes(eqn.outvars[0].aval)
