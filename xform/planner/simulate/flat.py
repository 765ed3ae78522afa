"""A program as its compiler sees it, before fusion: calls opened, equal computations merged.

Views of a value are the value. What is sent to the host takes no bytes there, but on a CPU, which
has one memory, it is a view. What no output needs is left out, and so is a barrier that the backend
takes for nothing. Loops and branches stay single steps; their bodies are flattened where they are
looked into.
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
from xform.cost import aval_bytes
from xform.fingerprint import typed
from xform.interpret.barrier import barrier_p, holds
from xform.interpret.lanes import final_p, keep_p, some_p, store_p
from xform.interpret.materialize import materialize_p
from xform.ir import Program
from xform.passes.erased import erased
from xform.passes.structured import body
from xform.planner.simulate.adding import Adding
from xform.planner.simulate.products import (
    as_matrices,
    channels_last,
    narrow,
    outer,
    reading,
    shape,
)
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Cell, Flat, repeat_p, wait_p
from xform.traits import Traits

add_any_p = jax_primitives.add_jaxvals_p
# Of a `device_put` between memories of one device.
_SPACES = ((jax.memory.Space.Host,), (jax.memory.Space.Device,))


def flatten(prog: Program, profile: Profile, n_seeds: int = 0) -> Flat:
    """The steps that make a program's outputs. Linear in equations, those of calls included.

    The last `n_seeds` inputs are cotangents: one that is a scalar is the 1 that `grad` passes,
    which the compiler sees.
    """
    work = Flattening(profile)
    n = len(prog.inputs) - n_seeds
    inputs = [*work.inputs(prog.inputs[:n]), *work.seeds(prog.inputs[n:])]
    return work.flat(inputs, work.run(prog, inputs))


def flatten_trip(prog: Program, profile: Profile, eqn: JaxprEqn, n_slices: int, n_stacked: int
                 ) -> Flat:  # fmt: skip
    """The steps of one trip of a loop: a slice of each scanned input, an update of each stack."""
    work = Flattening(profile)
    inputs = work.inputs(prog.inputs)
    first = len(inputs) - n_slices
    slices = [work.step(lax.dynamic_slice_p, c, eqn, [c], [c])[0] for c in inputs[first:]]
    outputs = work.run(prog, [*inputs[:first], *slices])
    first = len(outputs) - n_stacked
    for i, c in enumerate(outputs[first:]):
        update = lax.dynamic_update_slice_p
        outputs[first + i] = work.step(update, (c, i), eqn, [c], [Cell(0, "made", c.shape)])[0]
    return work.flat(inputs, outputs)


def counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants a loop reads, and how many values it carries."""
    if eqn.primitive is scan_p:
        return scan_counts(eqn.params)
    return len(eqn.invars) - len(eqn.outvars), len(eqn.outvars)


class Flattening(Adding):
    """What a compiler makes of a program's equations before it fuses them."""

    def __init__(self, profile: Profile):
        super().__init__(profile)
        # Of a scalar that is repeated: the scalar.
        self.scalar: dict[Cell, Cell] = {}
        # Of a transposed value: the value, and the order of its axes.
        self.turned: dict[Cell, tuple[Cell, tuple[int, ...]]] = {}
        # Of a value in another shape: the value.
        self.viewed: dict[Cell, Cell] = {}

    def results(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """What an equation makes of what it reads."""
        prim, of = eqn.primitive, self.traits(eqn.primitive)
        if of.call:
            return self.run(body(eqn), reads)
        if of.lowered and self.profile.lowers:
            given = self.known(eqn, "lowered", functools.partial(of.lowered, eqn))
            if given is not None:
                return self.run(given, reads)
        if prim is barrier_p:
            return self._held_back(eqn, reads)
        if prim is materialize_p:
            return [self.written(eqn, reads[0])]
        if self._nothing(eqn, of):
            return reads
        if prim is keep_p:
            return [reads[1]]
        if of.view and self.known(eqn, "whole", lambda: _whole(eqn)):
            return [self._view(eqn, reads[0], shape(eqn.outvars[0].aval))]
        if of.fusion == "elementwise" or prim is lax.convert_element_type_p:
            return [self._pointwise(eqn, reads)]
        if prim is broadcast_in_dim_p and not reads[0].shape:
            return [self._repeated(eqn, reads[0])]
        if prim is lax.split_p:
            return [
                self.step(lax.slice_p, (reads[0], i, self.operation(eqn)), eqn, reads, [v.aval])[0]
                for i, v in enumerate(eqn.outvars)
            ]
        if prim is lax.transpose_p:
            return [self._transposed(eqn, reads[0])]
        if prim is dot_general_p and self.known(eqn, "outer", lambda: outer(eqn)):
            reads = [self._repeated(eqn, x) for x in reads]
            return self.step(lax.mul_p, (tuple(reads), self.operation(eqn)), eqn, reads)
        if prim in (dot_general_p, conv_general_dilated_p):
            return self._product(eqn, reads)
        if prim is store_p:
            prim, reads = lax.dynamic_update_slice_p, reads[:2]
        if prim in (scan_p, while_p):
            return self._loop(eqn, reads)
        return self.step(prim, (tuple(reads), self.operation(eqn)), eqn, reads)

    def _loop(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """A loop. What it stacks is zeros first, which are there as early as can be."""
        consts, carried = counts(eqn)
        key = tuple(reads), self.operation(eqn)
        stacks = [
            self.step(repeat_p, (key, i), eqn, [], [v.aval])[0]
            for i, v in enumerate(eqn.outvars[carried:])
        ]
        outputs = self.step(eqn.primitive, key, eqn, [*reads, *stacks])
        if outputs and outputs[0].maker is not None:
            outputs[0].maker.starts = [*reads[consts : consts + carried], *stacks]
        return outputs

    def _product(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """A product or a convolution: of matrices, as far as a product can be one of them."""
        if self.profile.widens and eqn.primitive is dot_general_p:
            reads = [self._wide(eqn, x, v.aval) for x, v in zip(reads, eqn.invars, strict=True)]
        read, by_rows = zip(*(self._ordered(eqn, i, x) for i, x in enumerate(reads)), strict=True)
        aval: Any = eqn.outvars[0].aval
        size = shape(aval)
        if eqn.primitive is dot_general_p and (
            sizes := self.known(eqn, "matrices", lambda: as_matrices(eqn))
        ):
            *batch, m, k, n = sizes
            a, b = (m, k) if by_rows[0] else (k, m), (k, n) if by_rows[1] else (n, k)
            read = [self._view(eqn, x, (*batch, *e)) for x, e in zip(read, (a, b), strict=True)]
            size = (*batch, m, n)
        elif eqn.primitive is conv_general_dilated_p:
            size = tuple(size[a] for a in channels_last(eqn))
        wide = self.profile.widens and eqn.primitive is dot_general_p and narrow(aval)
        value = Cell((1 + wide) * self.bytes(aval), "made", size)
        key = tuple(read), by_rows, self.operation(eqn)
        product = self.step(eqn.primitive, key, eqn, list(read), [value])[0]
        if product.maker is not None:
            product.maker.by_rows, product.maker.right_by_rows = by_rows
        if eqn.primitive is conv_general_dilated_p:
            return [self._from_channels_last(eqn, product)]
        if wide:
            key = product, typed(aval)
            half = Cell(self.bytes(aval), "made", size)
            product = self.step(lax.convert_element_type_p, key, eqn, [product], [half])[0]
        return [product if size == shape(aval) else self._view(eqn, product, shape(aval))]

    def _wide(self, eqn: JaxprEqn, x: Cell, aval: Any) -> Cell:
        """An operand of a product in the numbers that products are run with."""
        if not narrow(aval):
            return x
        base, order = self.turned.get(x, (x, None))
        wide = lambda y: Cell(2 * y.bytes, "made", y.shape)
        does = lax.convert_element_type_p
        widened = self.step(does, (base, "wide"), eqn, [base], [wide(base)])[0]
        if order is None:
            return widened
        turned = self.step(lax.transpose_p, (widened, order), eqn, [widened], [wide(x)])[0]
        self.turned[turned] = widened, order
        return turned

    def _from_channels_last(self, eqn: JaxprEqn, x: Cell) -> Cell:
        """A convolution's result with its axes in the order of the program."""
        order = channels_last(eqn)
        back = tuple(map(order.index, range(len(order))))
        if back == order == tuple(sorted(order)):
            return x
        moved = self.step(lax.transpose_p, (x, back), eqn, [x], [eqn.outvars[0].aval])[0]
        self.turned[moved] = x, back
        return moved

    def _nothing(self, eqn: JaxprEqn, of: Traits) -> bool:
        """Whether an equation's result is its operand, as it lies in memory."""
        prim = eqn.primitive
        if prim is lax.device_put_p and eqn.params["devices"] in _SPACES:
            return self.profile.host_is_device
        return of.identity or prim in (some_p, final_p)

    def _view(self, eqn: JaxprEqn, x: Cell, size: tuple[int, ...]) -> Cell:
        """A value in another shape, of as many elements."""
        x = self.viewed.get(x, x)
        if x.shape == size:
            return x
        if x.kind == "constant":
            return self.constant((x, size), size)
        if x in self.scalar:
            return self._repeated(eqn, self.scalar[x])
        viewed = self.step(lax.reshape_p, (x, size), eqn, [x], [Cell(x.bytes, "made", size)])[0]
        self.viewed[viewed] = x
        return viewed

    def written(self, eqn: JaxprEqn, x: Cell) -> Cell:
        """A value in memory, which is what it was; nobody computes it again from here on."""
        return self.step(wait_p, (x,), eqn, [x], [Cell(x.bytes, "made", x.shape)])[0]

    def _held_back(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """Values that wait for others: nothing, a select for each, or a barrier."""
        n = eqn.params["n"]
        if not (self.profile.repeats or holds(eqn.params["where"], self.profile.name)):
            return reads[:n]
        if all(map(self.known_early, reads[n:])):
            return reads[:n]
        does = barrier_p if self.profile.selects_barriers else wait_p
        waits = reads[n:]
        return [
            self.step(does, (x, tuple(waits)), eqn, [x, *waits], [v.aval])[0]
            for x, v in zip(reads, eqn.outvars, strict=False)
        ]

    def _pointwise(self, eqn: JaxprEqn, reads: list[Cell]) -> Cell:
        """What an operation on elements makes; smaller operands are repeated first."""
        prim, aval = eqn.primitive, eqn.outvars[0].aval
        if (i := erased(eqn)) is not None:
            return reads[i]
        ones = [self.scalar.get(c, c) for c in reads]
        if not any(c.shape for c in ones):  # of scalars alone: repeated in the end
            key, size = (tuple(ones), self.operation(eqn)), self.bytes(aval)
            if all(c.kind == "constant" for c in ones):
                one = self.constant(key, ())
            else:
                one = self.step(
                    prim, key, eqn, ones, [Cell(size // max(1, math.prod(shape(aval))), "made")]
                )[0]
            return self._repeated(eqn, one)
        if prim is lax.div_p and (reciprocal := self._reciprocal(eqn, reads[1])):
            prim, reads = lax.mul_p, [reads[0], reciprocal]
        if prim is not lax.select_n_p or reads[0].shape:
            size = shape(aval)
            reads = [c if c.shape == size else self._repeated(eqn, c) for c in reads]
        if prim is add_any_p:
            prim = lax.add_p
        if prim is lax.add_p and (total := self._scattered(reads)):
            return total
        if prim is lax.square_p or (prim is lax.mul_p and reads[0] is reads[1]):
            return self._power(reads[0], 2, eqn)
        if prim is lax.integer_pow_p and eqn.params["y"] > 1:
            return self._power(reads[0], eqn.params["y"], eqn)
        return self.step(prim, (tuple(reads), self.operation(eqn)), eqn, reads)[0]

    def _reciprocal(self, eqn: JaxprEqn, x: Cell) -> Cell | None:
        """By what a value is multiplied that is divided by a smaller, repeated one: one over that.

        Source: XLA's `algebraic_simplifier.cc`, of divisions.
        """
        repeat = x.maker if x.maker and x.maker.does is broadcast_in_dim_p else None
        small = repeat.reads[0] if repeat else x
        if math.prod(small.shape) >= math.prod(shape(eqn.outvars[0].aval)):
            return None
        if small.kind == "constant":
            return x
        value = Cell(small.bytes, "made", small.shape)
        one = self.step(lax.div_p, ("one over", small), eqn, [small], [value])[0]
        if repeat is None:
            return one
        key = (one,), self.operation(repeat.eqn)
        return self.step(broadcast_in_dim_p, key, repeat.eqn, [one])[0]

    def _scattered(self, reads: Sequence[Cell]) -> Cell | None:
        """The sum of a value and of what is scattered into zeros: that is scattered into the value.

        Source: XLA's `algebraic_simplifier.cc`, of additions.
        """
        for value, other in (reads, reads[::-1]):
            made = other.maker
            if made and made.does is lax.scatter_add_p and _is_zero(made.reads[0]):
                does, rest = lax.scatter_add_p, made.reads[1:]
                return self.step(does, (value, other), made.eqn, [value, *rest])[0]
        return None

    def _repeated(self, eqn: JaxprEqn, x: Cell) -> Cell:
        """An operand of an operation on elements, at the size of the result."""
        aval: Any = eqn.outvars[0].aval
        if math.prod(x.shape) >= math.prod(shape(aval)):
            return x
        if x.shape:
            return self.step(repeat_p, (x, shape(aval)), eqn, [x], [aval])[0]
        # The key has the type, as that of what is repeated may be another's.
        repeated = self.step(repeat_p, (x, str(aval)), eqn, [x], [aval])[0]
        self.scalar[repeated] = x
        return repeated

    def _power(self, x: Cell, y: int, eqn: JaxprEqn) -> Cell:
        """A power by squares and products, which powers of one value share."""
        times = lambda a, b: self.step(lax.mul_p, (a, b), eqn, [a, b])[0]
        product = None
        while y:
            if y % 2:
                product = x if product is None else times(product, x)
            y //= 2
            x = times(x, x) if y else x
        return product or x

    def _transposed(self, eqn: JaxprEqn, x: Cell) -> Cell:
        """A value with its axes in another order; of one that was made so, of that one's value."""
        order = tuple(eqn.params["permutation"])
        if _of_product(eqn, x):
            return x
        if x in self.turned:
            x, first = self.turned[x]
            order = tuple(first[a] for a in order)
            if order == tuple(sorted(order)):
                return x
        turned = self.step(lax.transpose_p, (x, order), eqn, [x])[0]
        self.turned[turned] = x, order
        return turned

    def _ordered(self, eqn: JaxprEqn, i: int, x: Cell) -> tuple[Cell, bool]:
        """An operand as a product reads it, maybe a copy; and whether it is in the first order."""
        base, axes = self.turned.get(x, (x, None))  # copied at most once
        layout = self.known(eqn, ("reading", i, axes), lambda: reading(eqn, i, axes))
        if not layout.order:
            return x if layout.as_given else base, layout.first
        value = Cell(x.bytes, "made", layout.sizes)
        return self.step(lax.transpose_p, (base, layout.order), eqn, [base], [value])[0], True


def _is_zero(x: Cell) -> bool:
    """Whether a value is a literal zero, repeated."""
    if x.maker is None or x.maker.does is not repeat_p:
        return False
    (v, *_) = x.maker.eqn.invars
    return isinstance(v, Literal) and bool(v.val == 0)


def _whole(eqn: JaxprEqn) -> bool:
    """Whether a view has all of what it is a view of, once."""
    return aval_bytes(eqn.invars[0].aval) == aval_bytes(eqn.outvars[0].aval)


def _of_product(eqn: JaxprEqn, x: Cell) -> bool:
    """Whether a transpose of a matrix product is the product of the transposes."""
    flat = len(eqn.params["permutation"]) == 2
    return flat and x.maker is not None and x.maker.does is dot_general_p
