"""Prove which axes of a program's inputs are batches.

An axis is a *batch* if the differentiated result is a sum or mean of independent parts, one for
each index of the axis. A part reads inputs that have the axis only at its own index. An example is
the first axis of `x` in `jnp.mean(jax.vmap(loss)(x))`. The traced program of the derivative proves
that an axis is a batch if all of the following hold:

- no operation mixes the indices of the axis, no value has the axis twice, and no loop runs along
  it;
- no value that has the axis depends on a sum over the axis. If one did, a part would depend on the
  other parts;
- every derivative is linear in sums over the axis. Operations on the derivatives, as in an
  optimizer, are not restricted.

`_AxisCollector` reads the program equation by equation. From how each primitive maps the axes of
its operands (`registry/ends.py`), it finds which axes run over the same indices (`axes.py`).
`_Proof` then tests the conditions for each axis of an input. An unknown operation counts as mixing
all its axes, so nothing is proven about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from xform._jax import JaxprEqn
from xform.interpret.emit import pass_name
from xform.memory.axes import Axes, Factors, repeated_factors
from xform.passes.dataflow import Forward
from xform.program.dimensions import shape
from xform.program.ir import Atom, Program
from xform.registry.table import flow_of, linear_groups, returns_operands

# How a value depends on sums over an axis: not at all, linearly, or in another way.
_NO_SUM, _LINEAR, _NONLINEAR = 0, 1, 2


class BatchAxis(NamedTuple):
    """An axis that is proven to be a batch.

    Attributes:
      size: its length.
      places: `(position of an input, axis)` wherever an input has it.
      shapes_with: shapes of the values that have it.
      shapes_without: shapes of the values that do not have it.
      axis_lengths: lengths of the values' axes that contain it, alone or merged with other axes.
    """

    size: int
    places: tuple[tuple[int, int], ...]
    shapes_with: frozenset[tuple[int, ...]]
    shapes_without: frozenset[tuple[int, ...]]
    axis_lengths: frozenset[int]


class _AxisOperation(NamedTuple):
    """What the proof needs to know about one operation.

    Attributes:
      reads, makes: the values that it reads and makes, by number.
      linear: groups of positions in `reads`. The operation is linear in the operands of a group
        together.
      summed: the factors that it sums over.
      is_backward: whether it belongs to the backward pass.
    """

    reads: Sequence[int]
    makes: Sequence[int]
    linear: tuple[frozenset[int], ...] = (frozenset((0,)),)
    summed: Factors = ()
    is_backward: bool = False


def batch_axes(prog: Program) -> list[BatchAxis]:
    """Return the axes of a derivative's inputs that are proven to be batches, in their order.

    Cost: plain Python, a few operations for each pair of an equation and an axis that may be a
    batch.
    """
    collector = _AxisCollector()
    inputs = [collector.value(v) for v in prog.inputs]
    outputs = collector.run(prog, inputs)
    return [*_Proof(collector, inputs, outputs).batches()]


class _AxisCollector(Forward[int]):
    """Reads programs and collects the axes of every value, and all operations.

    A value is identified by a number. A variable of a program that is called twice is two values.
    The carry of a loop is one value in all iterations.

    Attributes:
      axes: the factors of all axes.
      values: for each value, its axes.
      shapes: for each value, its shape.
      operations: the operations.
    """

    follows_control = True

    def __init__(self) -> None:
        self.axes = Axes()
        self.values: list[tuple[Factors, ...]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.operations: list[_AxisOperation] = []
        self._is_backward = False

    def value(self, v: Atom, axes: tuple[Factors, ...] | None = None) -> int:
        """Add a value with the type of a variable, and return its number.

        Its axes are new unless `axes` gives them.
        """
        sizes = shape(v)
        self.values.append(tuple(map(self.axes.new, sizes)) if axes is None else axes)
        self.shapes.append(sizes)
        return len(self.values) - 1

    def constant(self, v: Atom) -> int:
        return self.value(v)

    def equation(self, eqn: JaxprEqn, operands: list[int]) -> Sequence[int]:
        """Read an equation with these operands, and return its results.

        An equation of the backward pass has a scope that says so, and so do the equations inside.
        """
        outside = self._is_backward
        self._is_backward = outside or pass_name(f"{eqn.source_info.name_stack}/") != ""
        flow = flow_of(eqn)
        if flow is not None and flow.is_local:
            results = self.transfer(eqn, operands, None)
        else:
            results = super().equation(eqn, operands)
        self._is_backward = outside
        return results

    def transfer(self, eqn: JaxprEqn, operands: list[int], through: list[int] | None) -> list[int]:
        if through is not None:
            return through
        if returns_operands(eqn):
            return operands[: len(eqn.outvars)]
        ys = [self.value(v) for v in eqn.outvars]
        axes_of = lambda numbers: [self.values[x] for x in numbers]
        summed = self.axes.unify(eqn, axes_of(operands), axes_of(ys))
        linear = tuple(map(frozenset, linear_groups(eqn)))
        self.operations.append(_AxisOperation(operands, ys, linear, summed, self._is_backward))
        return ys

    def enter(self, x: int, v: Any) -> int:
        return self.join(self.value(v), x)

    def join(self, a: int, b: int) -> int:
        """Record that the value `b` may become the value `a`, of the same type."""
        for axis_a, axis_b in zip(self.values[a], self.values[b], strict=True):
            self.axes.same(axis_b, axis_a)
        self._pass_on(b, a)
        return a

    def slice(self, x: int, v: Any) -> int:
        """Return a slice. The axis of the iterations counts as mixed."""
        self.axes.mix(self.values[x][0])
        one = self.value(v, self.values[x][1:])
        self._pass_on(x, one)
        return one

    def stack(self, x: int, v: Any) -> int:
        """Return a stack. The axis of the iterations counts as mixed."""
        stacked = self.value(v, (self.axes.new(shape(v)[0]), *self.values[x]))
        self.axes.mix(self.values[stacked][0])
        self._pass_on(x, stacked)
        return stacked

    def control(self, predicate: int, x: int) -> int:
        self.operations.append(_AxisOperation([predicate], [x], (), (), self._is_backward))
        return x

    def _pass_on(self, a: int, b: int) -> None:
        """Record that the value `a` is passed on as the value `b`."""
        self.operations.append(_AxisOperation([a], [b], is_backward=self._is_backward))


class _Proof:
    """Proofs about the axes of a program's inputs, from the collected values and operations."""

    def __init__(self, collector: _AxisCollector, inputs: Sequence[int], outputs: Sequence[int]):
        resolve = collector.axes.factors
        self._collector, self._inputs, self._outputs = collector, inputs, outputs
        self._values = [tuple(map(resolve, axes)) for axes in collector.values]
        self._mixed = collector.axes.mixed().union(*map(repeated_factors, self._values))
        self._operations = [op._replace(summed=resolve(op.summed)) for op in collector.operations]
        self._derivatives = self._find_derivatives()

    def _find_derivatives(self) -> set[int]:
        """Return the values of the backward pass that are outputs or are read by other passes."""
        made = {y for op in self._operations if op.is_backward for y in op.makes}
        read_outside = {x for op in self._operations if not op.is_backward for x in op.reads}
        return made & (read_outside | {*self._outputs})

    def batches(self) -> Iterator[BatchAxis]:
        """Yield the axes that are proven to be batches, in the order of the inputs.

        Only axes of a single factor are tested.
        """
        seen = set[int]()
        if not self._derivatives:
            return
        for x in self._inputs:
            for axis in self._values[x]:
                if len(axis) == 1 and axis[0] not in seen:
                    seen.add(axis[0])
                    if axis[0] not in self._mixed and self._is_summed(axis[0]):
                        yield self._batch_axis(axis[0])

    def _is_summed(self, factor: int) -> bool:
        """Return whether every derivative is a sum of independent parts over this factor.

        There is one part for each index of the factor's axis.
        """
        has_factor = [any(factor in axis for axis in axes) for axes in self._values]
        if any(has_factor[x] for x in self._derivatives) or self._is_returned(has_factor):
            return False
        dependence, changed = [_NO_SUM] * len(has_factor), True
        while changed:
            changed = False
            for op in self._operations:
                new = _dependence(op, [dependence[x] for x in op.reads], factor)
                for y in op.makes if new else ():
                    if has_factor[y]:
                        return False
                    changed |= new > dependence[y]
                    dependence[y] = max(new, dependence[y])
        of_derivatives = {dependence[x] for x in self._derivatives}
        return _LINEAR in of_derivatives and _NONLINEAR not in of_derivatives

    def _is_returned(self, has_factor: Sequence[bool]) -> bool:
        """Return whether the program returns an update of an input that has the factor.

        Such an input is state, not data. An output that has the factor and the shape of the input
        counts as an update.
        """
        shapes = self._collector.shapes
        output_shapes = {shapes[y] for y in self._outputs if has_factor[y]}
        return any(has_factor[x] and shapes[x] in output_shapes for x in self._inputs)

    def _batch_axis(self, factor: int) -> BatchAxis:
        """Return the `BatchAxis` of a factor that is proven to be a batch."""
        places = ((k, i) for k, x in enumerate(self._inputs)
                  for i, axis in enumerate(self._values[x]) if axis == (factor,))  # fmt: skip
        shapes = self._collector.shapes
        values = [i for i, axes in enumerate(self._values) if any(factor in a for a in axes)]
        shapes_with = frozenset(shapes[i] for i in values)
        shapes_without = frozenset(s for i, s in enumerate(shapes) if i not in {*values})
        lengths = (n for i in values for n, a in zip(shapes[i], self._values[i], strict=True)
                   if factor in a)  # fmt: skip
        return BatchAxis(
            self._collector.axes.size(factor),
            tuple(places),
            shapes_with,
            shapes_without,
            frozenset(lengths),
        )


def _dependence(op: _AxisOperation, of_operands: Iterable[int], factor: int) -> int:
    """Return how the results of an operation depend on sums over a factor.

    `of_operands` says the same for each operand: `_NO_SUM`, `_LINEAR` or `_NONLINEAR`.
    """
    operands = [*of_operands]
    most = max(operands, default=_NO_SUM)
    if most == _LINEAR:
        depending = {i for i, of_operand in enumerate(operands) if of_operand}
        most = _LINEAR if any(depending <= group for group in op.linear) else _NONLINEAR
    return max(most, _LINEAR if op.linear else _NONLINEAR) if factor in op.summed else most
