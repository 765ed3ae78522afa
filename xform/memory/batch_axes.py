"""Prove which axes of a program's inputs are batches.

An axis is a batch if the differentiated result is a sum or mean over the axis, of independent
parts that each read one index of it. The traced program of the derivative proves this if all of the
following hold:

- no operation needs the axis whole, no value has it twice, and no loop runs along it;
- no value that has the axis depends on a sum over it, else the parts would depend on each other;
- every derivative is linear in such sums. Operations on the derivatives, as in an optimizer, are
  not restricted.

Unification (`axes`) finds the axes that run over the same indices, equation by equation, from how
each primitive maps the axes of its operands (`ends`). An unknown operation needs all its axes
whole, so nothing is proven about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.interpret.cost import shape
from xform.memory.attribute import pass_name
from xform.memory.axes import Axes, Factors, repeated_factors
from xform.memory.ends import ends
from xform.passes.structured import called_body
from xform.program.ir import Atom, Program, program
from xform.registry.dependence import Elementwise
from xform.registry.table import rule_of, traits
from xform.registry.words import Bilinear, Linear

_RESHAPES = frozenset(("reshape", "squeeze", "expand_dims"))
_SUMS = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("mul", "div"))
# Operations after which a sum of exponentials still counts as one.
_KEEPS = frozenset(("broadcast_in_dim", "convert_element_type", "abs", "stop_gradient"))
# How a value depends on the parts: on none or one of them; linearly on a sum of them; otherwise.
_NONE, _SUM, _MORE = 0, 1, 2


class BatchAxis(NamedTuple):
    """A batch: an axis of the inputs that is proven to be one.

    Attributes:
      size: its length.
      places: `(position of an input, axis)` wherever an input has it.
      has: shapes of the values with it.
      lacks: shapes of the values without it.
      sizes: lengths of the values' axes that contain it, alone or merged with other axes.
    """

    size: int
    places: tuple[tuple[int, int], ...]
    has: frozenset[tuple[int, ...]]
    lacks: frozenset[tuple[int, ...]]
    sizes: frozenset[int]


class _AxisOperation(NamedTuple):
    """One operation: the values that it reads and makes.

    Attributes:
      how: whether it is "linear" in all operands, a "product", a quotient ("over") or "other".
      summed: the factors that it sums over.
      derivative: whether it belongs to the backward pass.
    """

    reads: Sequence[int]
    makes: Sequence[int]
    how: str = "linear"
    summed: Factors = ()
    derivative: bool = False


class InputAxes(NamedTuple):
    """What a program shows about the axes of its inputs.

    Attributes:
      batches: the axes that are proven to be batches, in the order of the inputs.
      classes: lengths of the inputs' axes over which a loss computes a log-sum-exp: these are axes
        over classes.
    """

    batches: Sequence[BatchAxis] = ()
    classes: Sequence[int] = ()


def input_axes(prog: Program) -> InputAxes:
    """Find the batches and the classes in the program of a derivative.

    Cost: plain Python, a few operations for each pair of an equation and an axis that may be a
    batch.
    """
    walk = _AxisCollector()
    inputs = [walk.value(v) for v in prog.inputs]
    outputs = walk.run(prog, inputs, False)
    proof = _Proof(walk, inputs, outputs)
    return InputAxes([*proof.batches()], proof.classes())


class _AxisCollector:
    """Reads programs and collects the axes of every value and all operations.

    A value is identified by a number. A variable of a program that is called twice is two values.
    """

    def __init__(self) -> None:
        self.axes = Axes()
        self.values: list[tuple[Factors, ...]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[_AxisOperation] = []
        # For exponentials and sums of them: the factors that are summed over. `classes` has these
        # factors for the sums whose logarithm is taken.
        self._terms: dict[int, Factors] = {}
        self.classes: list[int] = []

    def value(self, v: Atom, axes: tuple[Factors, ...] | None = None) -> int:
        """Add a value with the type of a variable; its axes are new unless given."""
        sizes = shape(v)
        self.values.append(tuple(map(self.axes.new, sizes)) if axes is None else axes)
        self.shapes.append(sizes)
        return len(self.values) - 1

    def run(self, prog: Program, inputs: Sequence[int], derivative: bool) -> list[int]:
        """Read a program and return its outputs; `derivative`: the backward pass calls it."""
        env: dict[Var, int] = {v: self.value(v) for v, _ in prog.consts}
        env |= zip(prog.inputs, inputs, strict=True)
        read = lambda v: env[v] if isinstance(v, Var) else self.value(v)
        for eqn in prog.equations:
            of = derivative or pass_name(str(eqn.source_info.name_stack) + "/") != ""
            made = self._equation(eqn, [read(v) for v in eqn.invars], of)
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in prog.outputs]

    def _equation(self, eqn: JaxprEqn, xs: list[int], of: bool) -> list[int]:
        known = traits(eqn.primitive)
        if eqn.primitive is scan_p:
            return self._scan(eqn, xs, of)
        if eqn.primitive is while_p:
            return self._while(eqn, xs, of)
        if eqn.primitive is cond_p:
            return self._branches(eqn, xs, of)
        if known.call and len((inner := called_body(eqn)).inputs) == len(xs):
            return self.run(inner, xs, of)
        if (
            isinstance(known.dependence, Elementwise) and eqn.primitive.multiple_results
        ):  # identities
            return xs[: len(eqn.outvars)]
        ys = [self.value(v) for v in eqn.outvars]
        self._classes(eqn, xs, ys)
        if eqn.primitive.name in _RESHAPES:
            self.axes.same(*([f for axis in self.values[v] for f in axis] for v in (xs[0], ys[0])))
            self.steps.append(_AxisOperation(xs, ys, "linear", (), of))
        else:
            self.steps.append(_AxisOperation(xs, ys, _how(eqn), self._ends(eqn, xs, ys), of))
        return ys

    def _classes(self, eqn: JaxprEqn, xs: Sequence[int], ys: Sequence[int]) -> None:
        """Find log-sum-exps: follow exponentials to their sums, and sums to logarithms."""
        name = eqn.primitive.name
        if name == "exp":
            self._terms[ys[0]] = ()
        elif xs and xs[0] in self._terms:
            terms = self._terms[xs[0]]
            if name == "reduce_sum":
                axes = (self.values[xs[0]][i] for i in eqn.params["axes"])
                self._terms[ys[0]] = tuple(f for axis in axes for f in axis)
            elif name in _RESHAPES or name in _KEEPS:
                self._terms[ys[0]] = terms
            elif name == "log":
                self.classes += terms

    def _ends(self, eqn: JaxprEqn, xs: Sequence[int], ys: Sequence[int]) -> Factors:
        """Unify the axes of operands and results, and return the factors that are summed."""
        sums: dict[int, Factors] = {}
        for x, places in zip(xs, ends(eqn), strict=True):
            for axis, place in zip(self.values[x], places, strict=True):
                if place is None:
                    self.axes.mix(axis)
                elif place >= len(self.values[ys[0]]):
                    self.axes.same(sums.setdefault(place, axis), axis)
                elif axis:  # an axis of length 1 is repeated: nothing to unify
                    for y in ys:
                        self.axes.same(axis, self.values[y][place])
        return tuple(f for axis in sums.values() for f in axis)

    def _alike(self, a: int, b: int, of: bool) -> None:
        """Record that a value is passed on as another one of the same type."""
        for mine, other in zip(self.values[a], self.values[b], strict=True):
            self.axes.same(mine, other)
        self.steps.append(_AxisOperation([a], [b], derivative=of))

    def _looped(self, prog: Program, consts: Sequence[int], carry: Sequence[int],
                slices: Sequence[int], of: bool) -> tuple[list[int], list[int]]:  # fmt: skip
        """A loop's carry, which stands for all iterations, and the other outputs of its body."""
        states = [self.value(v) for v in prog.inputs[len(consts) :][: len(carry)]]
        for x, h in zip(carry, states, strict=True):
            self._alike(x, h, of)
        outs = self.run(prog, [*consts, *states, *slices], of)
        for y, h in zip(outs, states, strict=False):
            self._alike(y, h, of)
        return states, outs[len(states) :]

    def _scan(self, eqn: JaxprEqn, xs: list[int], of: bool) -> list[int]:
        consts, carried = scan_counts(eqn.params)
        prog = program(eqn.params["jaxpr"])
        first = consts + carried
        slices = [self.value(v, self.values[x][1:])
                  for v, x in zip(prog.inputs[first:], xs[first:], strict=True)]  # fmt: skip
        self.steps += [_AxisOperation([x], [s], derivative=of)
                       for x, s in zip(xs[first:], slices, strict=True)]  # fmt: skip
        states, made = self._looped(prog, xs[:consts], xs[consts:first], slices, of)
        stacked: list[int] = []
        for v, y in zip(eqn.outvars[carried:], made, strict=True):
            stacked.append(self.value(v, (self.axes.new(shape(v)[0]), *self.values[y])))
            self.steps.append(_AxisOperation([y], stacked[-1:], derivative=of))
        for x in (*xs[first:], *stacked):
            self.axes.mix(self.values[x][0])
        return [*states, *stacked]

    def _while(self, eqn: JaxprEqn, xs: list[int], of: bool) -> list[int]:
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        states, _ = self._looped(
            program(eqn.params["body_jaxpr"]), xs[n : n + m], xs[n + m :], (), of
        )
        condition = self.run(program(eqn.params["cond_jaxpr"]), [*xs[:n], *states], of)
        self.steps.append(_AxisOperation(condition, states, "other", (), of))
        return states

    def _branches(self, eqn: JaxprEqn, xs: list[int], of: bool) -> list[int]:
        ys = [self.value(v) for v in eqn.outvars]
        self.steps.append(_AxisOperation(xs[:1], ys, "other", (), of))
        for branch in eqn.params["branches"]:
            for made, y in zip(self.run(program(branch), xs[1:], of), ys, strict=True):
                self._alike(made, y, of)
        return ys


def _how(eqn: JaxprEqn) -> str:
    """How an operation depends on its operands, see `_AxisOperation`."""
    name, rule = eqn.primitive.name, rule_of(eqn.primitive)
    if name in _PRODUCTS or isinstance(rule, Bilinear):
        return "over" if name == "div" else "product"
    linear = name in _SUMS or isinstance(rule, Linear) or traits(eqn.primitive).identity
    return "linear" if linear else "other"


class _Proof:
    """Proofs about the axes of a program's inputs, from the values and steps of a walk."""

    def __init__(self, walk: _AxisCollector, inputs: Sequence[int], outputs: Sequence[int]):
        resolve = walk.axes.factors
        self._walk, self._inputs, self._outputs = walk, inputs, outputs
        self._values = [tuple(map(resolve, axes)) for axes in walk.values]
        self._mixed = walk.axes.mixed().union(*map(repeated_factors, self._values))
        self._steps = [s._replace(summed=resolve(s.summed)) for s in walk.steps]
        self._derivatives = self._results()

    def _results(self) -> set[int]:
        """The derivatives: values of the backward pass that are read outside it or returned."""
        made = {y for s in self._steps if s.derivative for y in s.makes}
        outside = {x for s in self._steps if not s.derivative for x in s.reads}
        return made & (outside | {*self._outputs})

    def batches(self) -> Iterator[BatchAxis]:
        """All axes that are proven to be batches, in the order of the inputs.

        Only axes of a single factor are tested.
        """
        seen = set[int]()
        if not self._derivatives:
            return
        for x in self._inputs:
            for axis in self._values[x]:
                if len(axis) == 1 and axis[0] not in seen:
                    seen.add(axis[0])
                    if axis[0] not in self._mixed and self._sums(axis[0]):
                        yield self._batch(axis[0])

    def classes(self) -> list[int]:
        """Lengths of the axes over classes that are axes of an input, largest first."""
        size, resolve = self._walk.axes.size, self._walk.axes.factors
        in_inputs = {f for x in self._inputs for axis in self._values[x] for f in axis}
        single = in_inputs - {f for axes in self._values for f in repeated_factors(axes)}
        return sorted({size(f) for f in resolve(self._walk.classes) if f in single}, reverse=True)

    def _sums(self, factor: int) -> bool:
        """Whether all derivatives are sums over this factor, of parts that each read one index."""
        has = [any(factor in axis for axis in axes) for axes in self._values]
        if any(has[x] for x in self._derivatives) or self._returned(has):
            return False
        status, moved = [_NONE] * len(has), True
        while moved:
            moved = False
            for step in self._steps:
                new = _status(step, [status[x] for x in step.reads], factor)
                for y in step.makes if new else ():
                    if has[y]:
                        return False
                    moved |= new > status[y]
                    status[y] = max(new, status[y])
        found = {status[x] for x in self._derivatives}
        return _SUM in found and _MORE not in found

    def _returned(self, has: Sequence[bool]) -> bool:
        """Whether an input with the factor is returned updated: then it is state and not data."""
        shapes = self._walk.shapes
        out = {shapes[y] for y in self._outputs if has[y]}
        return any(has[x] and shapes[x] in out for x in self._inputs)

    def _batch(self, factor: int) -> BatchAxis:
        places = ((k, i) for k, x in enumerate(self._inputs)
                  for i, axis in enumerate(self._values[x]) if axis == (factor,))  # fmt: skip
        shapes = self._walk.shapes
        has = [i for i, axes in enumerate(self._values) if any(factor in a for a in axes)]
        with_axis = frozenset(shapes[i] for i in has)
        rest = frozenset(s for i, s in enumerate(shapes) if i not in {*has})
        sizes = (n for i in has for n, a in zip(shapes[i], self._values[i], strict=True)
                 if factor in a)  # fmt: skip
        return BatchAxis(
            self._walk.axes.size(factor), tuple(places), with_axis, rest, frozenset(sizes)
        )


def _status(step: _AxisOperation, reads: Iterable[int], factor: int) -> int:
    """How the results of a step depend on the parts: `_NONE`, `_SUM` or `_MORE`."""
    on = [*reads]
    most = max(on, default=_NONE)
    if most == _SUM and step.how != "linear":
        one = sum(map(bool, on)) == 1
        linear = one if step.how == "product" else step.how == "over" and one and on[0] == _SUM
        most = _SUM if linear else _MORE
    if factor in step.summed:
        return max(most, _SUM if step.how in ("linear", "product") else _MORE)
    return most
