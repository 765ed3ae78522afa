"""Flatten a program into the operations that its compiler sees before fusion.

- Calls are inlined, and equal computations are merged.
- A view is the same value, and needs no bytes of its own.
- A value that is offloaded to the host takes no bytes there. On a CPU, which has one memory, it is
  a view.
- Steps that no output needs are left out, and so are barriers that the backend ignores.
- Loops and branches stay single steps. Their bodies are flattened when they are simulated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    Literal,
    broadcast_in_dim_p,
    conv_general_dilated_p,
    dot_general_p,
    jax_primitives,
    scan_counts,
    scan_p,
    while_p,
)
from xform.interpret.barrier import barrier_p, is_active
from xform.interpret.cost import aval_bytes
from xform.interpret.lanes import final_p, keep_p, some_p, store_p
from xform.interpret.materialize import materialize_p
from xform.passes.erased import unchanged_operand
from xform.passes.structured import called_body
from xform.planner.simulate.flat_builder import FlatBuilder
from xform.planner.simulate.products import (
    as_matrices,
    channels_last,
    is_16_bit,
    is_outer,
    operand_layout,
    shape,
)
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatValue, repeat_p, wait_p
from xform.program.fingerprint import type_text
from xform.program.ir import Program
from xform.registry.traits import Traits

add_any_p = jax_primitives.add_jaxvals_p
# The `devices` of a `device_put` between memories of one device.
_SPACES = ((jax.memory.Space.Host,), (jax.memory.Space.Device,))


def flatten(prog: Program, profile: Profile, n_seeds: int = 0) -> FlatProgram:
    """Return the flat program of a Program. Linear in equations, including called programs.

    The last `n_seeds` inputs are cotangents. A scalar cotangent is taken for the 1 that `grad`
    passes, which the compiler knows.
    """
    work = Flattener(profile)
    n = len(prog.inputs) - n_seeds
    inputs = [*work.inputs(prog.inputs[:n]), *work.seeds(prog.inputs[n:])]
    return work.build(inputs, work.add_program(prog, inputs))


def flatten_iteration(prog: Program, profile: Profile, eqn: JaxprEqn, n_slices: int, n_stacked: int
                      ) -> FlatProgram:  # fmt: skip
    """Return the flat program of one iteration of a loop.

    The last `n_slices` inputs of the body `prog` are slices of scanned arrays, and its last
    `n_stacked` outputs are written into stacks. A step is added for each slice and each update.
    """
    work = Flattener(profile)
    inputs = work.inputs(prog.inputs)
    first = len(inputs) - n_slices
    slices = [work.add_step(lax.dynamic_slice_p, c, eqn, [c], [c])[0] for c in inputs[first:]]
    outputs = work.add_program(prog, [*inputs[:first], *slices])
    first = len(outputs) - n_stacked
    for i, c in enumerate(outputs[first:]):
        update, result = lax.dynamic_update_slice_p, FlatValue(0, "made", c.shape)
        outputs[first + i] = work.add_step(update, (c, i), eqn, [c], [result])[0]
    return work.build(inputs, outputs)


def loop_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many constants a loop reads, and how many values it carries."""
    if eqn.primitive is scan_p:
        return scan_counts(eqn.params)
    return len(eqn.invars) - len(eqn.outvars), len(eqn.outvars)


class Flattener(FlatBuilder):
    """Turns equations into the operations that a compiler has before fusion."""

    def __init__(self, profile: Profile):
        super().__init__(profile)
        # For a scalar that was broadcast: the scalar.
        self.scalar: dict[FlatValue, FlatValue] = {}
        # For a transposed value: the original value, and the order of its axes.
        self.turned: dict[FlatValue, tuple[FlatValue, tuple[int, ...]]] = {}
        # For a reshaped value: the original value.
        self.viewed: dict[FlatValue, FlatValue] = {}

    def add_equation(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add the steps of an equation with these operands, and return its results."""
        prim, of = eqn.primitive, self.traits(eqn.primitive)
        if of.call:
            return self.add_program(called_body(eqn), operands)
        if of.lowered and self.profile.lowers:
            lowered = self.fact(eqn, "lowered", functools.partial(of.lowered, eqn))
            if lowered is not None:
                return self.add_program(lowered, operands)
        if prim is barrier_p:
            return self._delay(eqn, operands)
        if prim is materialize_p:
            return [self.materialize(eqn, operands[0])]
        if self._is_identity(eqn, of):
            return operands
        if prim is keep_p:
            return [operands[1]]
        if of.view and self.fact(eqn, "same size", lambda: _same_size(eqn)):
            return [self._view(eqn, operands[0], shape(eqn.outvars[0].aval))]
        if of.fusion == "elementwise" or prim is lax.convert_element_type_p:
            return [self._pointwise(eqn, operands)]
        if prim is broadcast_in_dim_p and not operands[0].shape:
            return [self._broadcast(eqn, operands[0])]
        if prim is lax.split_p:
            key = operands[0], self.operation_key(eqn)
            return [
                self.add_step(lax.slice_p, (*key, i), eqn, operands, [v.aval])[0]
                for i, v in enumerate(eqn.outvars)
            ]
        if prim is lax.transpose_p:
            return [self._transpose(eqn, operands[0])]
        if prim is dot_general_p and self.fact(eqn, "outer", lambda: is_outer(eqn)):
            prim, operands = lax.mul_p, [self._broadcast(eqn, x) for x in operands]
            return self.add_step(prim, (tuple(operands), self.operation_key(eqn)), eqn, operands)
        if prim in (dot_general_p, conv_general_dilated_p):
            return self._product(eqn, operands)
        if prim is store_p:
            prim, operands = lax.dynamic_update_slice_p, operands[:2]
        if prim in (scan_p, while_p):
            return self._loop(eqn, operands)
        return self.add_step(prim, (tuple(operands), self.operation_key(eqn)), eqn, operands)

    def _loop(self, eqn: JaxprEqn, reads: list[FlatValue]) -> list[FlatValue]:
        """Add a loop. Its stacks start as zeros, which a compiler makes as early as possible."""
        consts, carried = loop_counts(eqn)
        key = tuple(reads), self.operation_key(eqn)
        stacks = [
            self.add_step(repeat_p, (key, i), eqn, [], [v.aval])[0]
            for i, v in enumerate(eqn.outvars[carried:])
        ]
        outputs = self.add_step(eqn.primitive, key, eqn, [*reads, *stacks])
        if outputs and outputs[0].maker is not None:
            outputs[0].maker.starts = [*reads[consts : consts + carried], *stacks]
        return outputs

    def _product(self, eqn: JaxprEqn, reads: list[FlatValue]) -> list[FlatValue]:
        """Add a product or convolution, with the steps that convert and transpose its operands.

        Like XLA, it runs a product with several free or summed axes as a product of matrices.
        """
        if self.profile.widens_products and eqn.primitive is dot_general_p:
            reads = [self._wide(eqn, x, v.aval) for x, v in zip(reads, eqn.invars, strict=True)]
        read, by_rows = zip(*(self._reorder(eqn, i, x) for i, x in enumerate(reads)), strict=True)
        aval: Any = eqn.outvars[0].aval
        size = shape(aval)
        if eqn.primitive is dot_general_p and (
            sizes := self.fact(eqn, "matrices", lambda: as_matrices(eqn))
        ):
            *batch, m, k, n = sizes
            a, b = (m, k) if by_rows[0] else (k, m), (k, n) if by_rows[1] else (n, k)
            read = [self._view(eqn, x, (*batch, *e)) for x, e in zip(read, (a, b), strict=True)]
            size = (*batch, m, n)
        elif eqn.primitive is conv_general_dilated_p:
            size = tuple(size[a] for a in channels_last(eqn))
        wide = self.profile.widens_products and eqn.primitive is dot_general_p and is_16_bit(aval)
        value = FlatValue((1 + wide) * self.bytes(aval), "made", size)
        key = tuple(read), by_rows, self.operation_key(eqn)
        product = self.add_step(eqn.primitive, key, eqn, list(read), [value])[0]
        if product.maker is not None:
            product.maker.by_rows, product.maker.right_by_rows = by_rows
        if eqn.primitive is conv_general_dilated_p:
            return [self._from_channels_last(eqn, product)]
        if wide:
            key = product, type_text(aval)
            half = FlatValue(self.bytes(aval), "made", size)
            product = self.add_step(lax.convert_element_type_p, key, eqn, [product], [half])[0]
        return [product if size == shape(aval) else self._view(eqn, product, shape(aval))]

    def _wide(self, eqn: JaxprEqn, x: FlatValue, aval: Any) -> FlatValue:
        """An operand of a product, converted from 16-bit to 32-bit floats.

        If the operand is a transposed value, the original is converted, and then transposed.
        """
        if not is_16_bit(aval):
            return x
        base, order = self.turned.get(x, (x, None))
        wide = lambda y: FlatValue(2 * y.bytes, "made", y.shape)
        prim = lax.convert_element_type_p
        widened = self.add_step(prim, (base, "wide"), eqn, [base], [wide(base)])[0]
        if order is None:
            return widened
        turned = self.add_step(lax.transpose_p, (widened, order), eqn, [widened], [wide(x)])[0]
        self.turned[turned] = widened, order
        return turned

    def _from_channels_last(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """The result of a convolution, transposed to the axis order of the program."""
        order = channels_last(eqn)
        back = tuple(map(order.index, range(len(order))))
        if back == order == tuple(sorted(order)):
            return x
        moved = self.add_step(lax.transpose_p, (x, back), eqn, [x], [eqn.outvars[0].aval])[0]
        self.turned[moved] = x, back
        return moved

    def _is_identity(self, eqn: JaxprEqn, of: Traits) -> bool:
        """Whether the result of an equation is its operand, in the same memory."""
        prim = eqn.primitive
        if prim is lax.device_put_p and eqn.params["devices"] in _SPACES:
            return self.profile.host_is_device
        return of.identity or prim in (some_p, final_p)

    def _view(self, eqn: JaxprEqn, x: FlatValue, size: tuple[int, ...]) -> FlatValue:
        """A value in another shape with as many elements."""
        x = self.viewed.get(x, x)
        if x.shape == size:
            return x
        if x.kind == "constant":
            return self.constant((x, size), size)
        if x in self.scalar:
            return self._broadcast(eqn, self.scalar[x])
        result = FlatValue(x.bytes, "made", size)
        viewed = self.add_step(lax.reshape_p, (x, size), eqn, [x], [result])[0]
        self.viewed[viewed] = x
        return viewed

    def materialize(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """Return the same value, written to memory. Its readers do not compute it again."""
        return self.add_step(wait_p, (x,), eqn, [x], [FlatValue(x.bytes, "made", x.shape)])[0]

    def _delay(self, eqn: JaxprEqn, reads: list[FlatValue]) -> list[FlatValue]:
        """The results of a barrier that delays values until others are computed.

        The values themselves if the backend ignores the barrier, or knows all awaited values at
        compile time. Otherwise one step for each value, which is a select on a CPU.
        """
        n = eqn.params["n"]
        if not (self.profile.repeats or is_active(eqn.params["where"], self.profile.name)):
            return reads[:n]
        if all(map(self.is_compile_time, reads[n:])):
            return reads[:n]
        prim = barrier_p if self.profile.selects_barriers else wait_p
        waits = reads[n:]
        return [
            self.add_step(prim, (x, tuple(waits)), eqn, [x, *waits], [v.aval])[0]
            for x, v in zip(reads, eqn.outvars, strict=False)
        ]

    def _pointwise(self, eqn: JaxprEqn, reads: list[FlatValue]) -> FlatValue:
        """Add an elementwise operation, with the simplifications of XLA.

        Smaller operands are broadcast first. An operation on broadcast scalars runs on the scalars,
        and its result is broadcast.
        """
        prim, aval = eqn.primitive, eqn.outvars[0].aval
        if (i := unchanged_operand(eqn)) is not None:
            return reads[i]
        scalars = [self.scalar.get(c, c) for c in reads]
        if not any(c.shape for c in scalars):
            key, size = (tuple(scalars), self.operation_key(eqn)), self.bytes(aval)
            if all(c.kind == "constant" for c in scalars):
                one = self.constant(key, ())
            else:
                result = FlatValue(size // max(1, math.prod(shape(aval))), "made")
                one = self.add_step(prim, key, eqn, scalars, [result])[0]
            return self._broadcast(eqn, one)
        if prim is lax.div_p and (reciprocal := self._reciprocal(eqn, reads[1])):
            prim, reads = lax.mul_p, [reads[0], reciprocal]
        if prim is not lax.select_n_p or reads[0].shape:
            size = shape(aval)
            reads = [c if c.shape == size else self._broadcast(eqn, c) for c in reads]
        if prim is add_any_p:
            prim = lax.add_p
        if prim is lax.add_p and (total := self._scatter_sum(reads)):
            return total
        if prim is lax.square_p or (prim is lax.mul_p and reads[0] is reads[1]):
            return self._power(reads[0], 2, eqn)
        if prim is lax.integer_pow_p and eqn.params["y"] > 1:
            return self._power(reads[0], eqn.params["y"], eqn)
        return self.add_step(prim, (tuple(reads), self.operation_key(eqn)), eqn, reads)[0]

    def _reciprocal(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue | None:
        """The reciprocal of a divisor that is smaller than the result and is broadcast.

        XLA multiplies by it instead of dividing. None for other divisors.
        Source: XLA's `algebraic_simplifier.cc`, `HandleDivide`.
        """
        broadcast = x.maker if x.maker and x.maker.primitive is broadcast_in_dim_p else None
        small = broadcast.operands[0] if broadcast else x
        if math.prod(small.shape) >= math.prod(shape(eqn.outvars[0].aval)):
            return None
        if small.kind == "constant":
            return x
        value = FlatValue(small.bytes, "made", small.shape)
        one = self.add_step(lax.div_p, ("one over", small), eqn, [small], [value])[0]
        if broadcast is None:
            return one
        key = (one,), self.operation_key(broadcast.eqn)
        return self.add_step(broadcast_in_dim_p, key, broadcast.eqn, [one])[0]

    def _scatter_sum(self, reads: Sequence[FlatValue]) -> FlatValue | None:
        """The sum of a value and of updates scattered into zeros.

        XLA scatters the updates into the value instead. None for other sums.
        Source: XLA's `algebraic_simplifier.cc`, `HandleAdd`.
        """
        for value, other in (reads, reads[::-1]):
            scatter = other.maker
            if scatter and scatter.primitive is lax.scatter_add_p and _is_zero(scatter.operands[0]):
                prim, updates = lax.scatter_add_p, scatter.operands[1:]
                return self.add_step(prim, (value, other), scatter.eqn, [value, *updates])[0]
        return None

    def _broadcast(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """An operand of an elementwise operation, broadcast to the shape of the result."""
        aval: Any = eqn.outvars[0].aval
        if math.prod(x.shape) >= math.prod(shape(aval)):
            return x
        if x.shape:
            return self.add_step(repeat_p, (x, shape(aval)), eqn, [x], [aval])[0]
        # The key includes the dtype, because scalars of different types may share a value.
        result = self.add_step(repeat_p, (x, str(aval)), eqn, [x], [aval])[0]
        self.scalar[result] = x
        return result

    def _power(self, x: FlatValue, y: int, eqn: JaxprEqn) -> FlatValue:
        """An integer power by repeated squaring. Powers of one value share their products."""
        times = lambda a, b: self.add_step(lax.mul_p, (a, b), eqn, [a, b])[0]
        product = None
        while y:
            if y % 2:
                product = x if product is None else times(product, x)
            y //= 2
            x = times(x, x) if y else x
        return product or x

    def _transpose(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """A transposed value. Two transpositions in a row become one, or none."""
        order = tuple(eqn.params["permutation"])
        if _of_product(eqn, x):
            return x
        if x in self.turned:
            x, first = self.turned[x]
            order = tuple(first[a] for a in order)
            if order == tuple(sorted(order)):
                return x
        turned = self.add_step(lax.transpose_p, (x, order), eqn, [x])[0]
        self.turned[turned] = x, order
        return turned

    def _reorder(self, eqn: JaxprEqn, i: int, x: FlatValue) -> tuple[FlatValue, bool]:
        """An operand in an axis order that a product can read, copied if necessary.

        Also returns whether that is the preferred order, see `products.operand_orders`.
        """
        base, axes = self.turned.get(x, (x, None))  # copied at most once
        layout = self.fact(eqn, ("reading", i, axes), lambda: operand_layout(eqn, i, axes))
        if not layout.order:
            return x if layout.as_given else base, layout.first
        value = FlatValue(x.bytes, "made", layout.sizes)
        return self.add_step(lax.transpose_p, (base, layout.order), eqn, [base], [value])[0], True


def _is_zero(x: FlatValue) -> bool:
    """Whether a value is a literal zero that is broadcast."""
    if x.maker is None or x.maker.primitive is not repeat_p:
        return False
    (v, *_) = x.maker.eqn.invars
    return isinstance(v, Literal) and bool(v.val == 0)


def _same_size(eqn: JaxprEqn) -> bool:
    """Whether a view has as many bytes as the value that it is a view of."""
    return aval_bytes(eqn.invars[0].aval) == aval_bytes(eqn.outvars[0].aval)


def _of_product(eqn: JaxprEqn, x: FlatValue) -> bool:
    """Whether an equation transposes a matrix product.

    The compiler computes the transposed product directly.
    """
    flat = len(eqn.params["permutation"]) == 2
    return flat and x.maker is not None and x.maker.primitive is dot_general_p
