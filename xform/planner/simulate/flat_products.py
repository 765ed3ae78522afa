"""Add matrix products and convolutions to a flat program, with the copies of their operands.

A flat program is the list of operations that XLA sees before fusion (`flat.py`). XLA can read an
operand of a product only in some axis orders, and copies it otherwise. To find out whether a copy
is needed, `ProductFlattener` remembers for each value whether it is a broadcast, a transpose or a
reshape of another value. It also adds the steps of broadcasts, transposes and reshapes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, conv_general_dilated_p, dot_general_p
from xform.planner.simulate.flat_builder import FlatBuilder
from xform.planner.simulate.products import (
    as_matrices,
    channels_last,
    is_16_bit,
    operand_layout,
    shape,
)
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatValue, repeat_p
from xform.program.fingerprint import type_text


class ProductFlattener(FlatBuilder, abc.ABC):
    """Adds products, and the broadcasts, transposes and reshapes around them.

    Attributes:
      scalar_of: for a broadcast scalar, the scalar.
      transposed_from: for a transposed value, the original value and the order of its axes.
      reshaped_from: for a reshaped value, the original value.
    """

    def __init__(self, profile: Profile):
        super().__init__(profile)
        self.scalar_of: dict[FlatValue, FlatValue] = {}
        self.transposed_from: dict[FlatValue, tuple[FlatValue, tuple[int, ...]]] = {}
        self.reshaped_from: dict[FlatValue, FlatValue] = {}

    def add_product(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add a product or convolution, and return its results.

        Steps that convert and transpose its operands are added if XLA needs them. Like XLA, this
        runs a product with several free or summed axes as a product of matrices.
        """
        is_product = eqn.primitive is dot_general_p
        if self.profile.widens_products and is_product:
            operands = [
                self._add_widened(eqn, x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)
            ]
        read, preferred = zip(
            *(self._add_reordered(eqn, i, x) for i, x in enumerate(operands)), strict=True
        )
        aval: Any = eqn.outvars[0].aval
        size = shape(aval)
        if is_product and (sizes := self.fact(eqn, "matrices", lambda: as_matrices(eqn))):
            *batch, rows, n_summed, columns = sizes
            left = (rows, n_summed) if preferred[0] else (n_summed, rows)
            right = (n_summed, columns) if preferred[1] else (columns, n_summed)
            read = [
                self.add_view(eqn, x, (*batch, *matrix))
                for x, matrix in zip(read, (left, right), strict=True)
            ]
            size = (*batch, rows, columns)
        elif eqn.primitive is conv_general_dilated_p:
            size = tuple(size[a] for a in channels_last(eqn))
        is_widened = self.profile.widens_products and is_product and is_16_bit(aval)
        value = FlatValue((1 + is_widened) * self.bytes(aval), "computed", size)
        key = tuple(read), preferred, self.operation_key(eqn)
        product = self.add_step(eqn.primitive, key, eqn, list(read), [value])[0]
        if product.maker is not None:
            product.maker.left_sums_last_axis, product.maker.right_sums_first_axis = preferred
        if eqn.primitive is conv_general_dilated_p:
            return [self._from_channels_last(eqn, product)]
        if is_widened:
            key = product, type_text(aval)
            rounded = FlatValue(self.bytes(aval), "computed", size)
            product = self.add_step(lax.convert_element_type_p, key, eqn, [product], [rounded])[0]
        return [product if size == shape(aval) else self.add_view(eqn, product, shape(aval))]

    def _add_widened(self, eqn: JaxprEqn, x: FlatValue, aval: Any) -> FlatValue:
        """Return an operand of type `aval`, converted to 32-bit floats if it has 16-bit floats.

        If the operand is a transposed value, the original is converted, and then transposed.
        """
        if not is_16_bit(aval):
            return x
        base, order = self.transposed_from.get(x, (x, None))
        wide = lambda y: FlatValue(2 * y.bytes, "computed", y.shape)
        prim = lax.convert_element_type_p
        widened = self.add_step(prim, (base, "wide"), eqn, [base], [wide(base)])[0]
        if order is None:
            return widened
        transposed = self.add_step(lax.transpose_p, (widened, order), eqn, [widened], [wide(x)])[0]
        self.transposed_from[transposed] = widened, order
        return transposed

    def _add_reordered(self, eqn: JaxprEqn, i: int, x: FlatValue) -> tuple[FlatValue, bool]:
        """Return operand `i` in an axis order that the product can read, copied if necessary.

        Also returns whether that is the preferred order: a left operand with its summed axis last,
        a right operand with its summed axis first.
        """
        # A copy of the original value instead of `x` avoids a second copy.
        base, axes = self.transposed_from.get(x, (x, None))
        layout = self.fact(eqn, ("layout", i, axes), lambda: operand_layout(eqn, i, axes))
        if not layout.copy_order:
            return x if layout.reads_operand else base, layout.preferred
        copy = FlatValue(x.bytes, "computed", layout.copy_shape)
        key = base, layout.copy_order
        return self.add_step(lax.transpose_p, key, eqn, [base], [copy])[0], True

    def _from_channels_last(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """Return the result `x` of a convolution, transposed to the axis order of the program."""
        order = channels_last(eqn)
        inverse = tuple(map(order.index, range(len(order))))
        if inverse == order == tuple(sorted(order)):
            return x
        aval = eqn.outvars[0].aval
        transposed = self.add_step(lax.transpose_p, (x, inverse), eqn, [x], [aval])[0]
        self.transposed_from[transposed] = x, inverse
        return transposed

    def add_view(self, eqn: JaxprEqn, x: FlatValue, size: tuple[int, ...]) -> FlatValue:
        """Return the value `x` in another shape with as many elements."""
        x = self.reshaped_from.get(x, x)
        if x.shape == size:
            return x
        if x.kind == "constant":
            return self.constant((x, size), size)
        if x in self.scalar_of:
            return self.add_broadcast(eqn, self.scalar_of[x])
        result = FlatValue(x.bytes, "computed", size)
        reshaped = self.add_step(lax.reshape_p, (x, size), eqn, [x], [result])[0]
        self.reshaped_from[reshaped] = x
        return reshaped

    def add_broadcast(self, eqn: JaxprEqn, x: FlatValue) -> FlatValue:
        """Return the value `x`, broadcast to the shape of the equation's result."""
        aval: Any = eqn.outvars[0].aval
        if math.prod(x.shape) >= math.prod(shape(aval)):
            return x
        if x.shape:
            return self.add_step(repeat_p, (x, shape(aval)), eqn, [x], [aval])[0]
        # The key includes the dtype, because scalars of different types may share a value.
        result = self.add_step(repeat_p, (x, str(aval)), eqn, [x], [aval])[0]
        self.scalar_of[result] = x
        return result

    def add_transpose(self, eqn: JaxprEqn, x: FlatValue, order: Sequence[int]) -> FlatValue:
        """Return the value `x` with its axes in this order.

        Two transposes in a row become one or none.

        A transposed matrix product is the product: XLA computes the transposed product directly.
        """
        order = tuple(order)
        if len(order) == 2 and x.maker is not None and x.maker.primitive is dot_general_p:
            return x
        if x in self.transposed_from:
            x, first_order = self.transposed_from[x]
            order = tuple(first_order[a] for a in order)
            if order == tuple(sorted(order)):
                return x
        transposed = self.add_step(lax.transpose_p, (x, order), eqn, [x])[0]
        self.transposed_from[transposed] = x, order
        return transposed
