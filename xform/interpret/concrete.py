"""Values that are known while Python runs: JAX's protocol of traces, all of it that xform uses.

A `Watch` sees each operation on the values it watches, which carry their value, so that Python's
`if`, `print` and `float` work between operations; all other operations run as if it were not there.
`stage` is the opposite: a trace of unknown values in which everything that is known stays a value.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import (
    JaxprEqn,
    Primitive,
    Trace,
    Tracer,
    Var,
    equation,
    perturbed,
    set_current_trace,
    staging,
    take_current_trace,
    trace_of,
)
from xform.arithmetic import Value, arrayed
from xform.interpret.reference import refer
from xform.ir import Mask, evaluate, trace
from xform.table import lookup, rule_of

Mark = Any
Results = tuple[Sequence[Value], Sequence[Mark]]


class Known(Tracer[Any]):
    """A watched value: `value` is what it is, `mark` what the trace knows of it."""

    __slots__ = ("mark", "value")

    def __init__(self, trace: Trace, value: Value, mark: Mark):
        super().__init__(trace, jax.typeof(value))
        self.value, self.mark = value, mark

    def to_concrete_value(self) -> Any:
        """The array itself, or None if it is being traced by someone else."""
        return self.value.to_concrete_value() if isinstance(self.value, Tracer) else self.value

    def _contents(self) -> list[tuple[str, Any]]:
        return [("value", self.value), ("tangent", perturbed(self.aval))]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.value).__array__(*args, **kwargs)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return self._trace.show(self.value, self.mark)

    def __str__(self) -> str:
        return str(self.value)

    def item(self, *args: Any) -> Any:
        """The element as a Python number."""
        return np.asarray(self.value).item(*args)

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return np.asarray(self.value).tolist()

    def tobytes(self, order: Any = "C") -> Any:
        """The elements as bytes."""
        return np.asarray(self.value).tobytes(order)


class Watch(Trace, abc.ABC):
    """A trace that hands operations on watched values to its methods; `below` is where they run."""

    def __init__(self, below: Trace):
        super().__init__()
        self.below = self.parent_trace = below
        self.requires_low = False  # `below` decides what is lowered

    @abc.abstractmethod
    def show(self, value: Value, mark: Mark) -> str:
        """A watched value as a debugger shows it: as JAX does."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], wanted: Mask
                 ) -> Results:  # fmt: skip
        """Outputs of an equation, some of them active, and their marks (None: not watched)."""

    @abc.abstractmethod
    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Outputs of a call with a rule of the user's, and their marks."""

    @abc.abstractmethod
    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Outputs of a call with a rule of the user's, and their marks."""

    def lift(self, value: Value, mark: Mark) -> Value:
        """A value as this trace hands it out: watched if it has a mark."""
        return value if mark is None else Known(self, value, mark)

    def lower(self, x: Value) -> tuple[Value, Mark]:
        """A value and its mark."""
        return (x.value, x.mark) if trace_of(x) is self else (x, None)

    def variable(self, x: Value, mark: Mark) -> Var:
        """The variable that stands for an input in an equation."""
        return Var(jax.typeof(x))

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        if (held := refer(self, primitive, args, params)) is not None:
            return held if primitive.multiple_results else held[0]
        xs, marks = self._lowered(args)
        with set_current_trace(self.below):
            found = self._active(primitive, xs, marks, params)
            if found is None:
                avals = [jax.typeof(x) for x in xs]
                return primitive.bind_with_trace(self.below, xs, avals, params)
            eqn, wanted = found
            xs = list(map(arrayed, xs))
            inner = lookup(eqn).inlined(eqn, staging())
            if inner is None:
                ys, marks = self.equation(eqn, xs, marks, wanted)
                out = [self.lift(y, m) for y, m in zip(ys, marks, strict=True)]
                return out if primitive.multiple_results else out[0]
        with set_current_trace(self):
            return evaluate(inner, [self.lift(x, m) for x, m in zip(xs, marks, strict=True)])

    def _active(self, primitive: Primitive, xs: Sequence[Value], marks: Sequence[Mark], params: Any
                ) -> tuple[JaxprEqn, Mask] | None:  # fmt: skip
        """The equation of an operation, and its active outputs; None if it has none."""
        on = tuple(m is not None for m in marks)
        if not any(on):
            return None
        eqn = equation(primitive, list(map(self.variable, xs, marks)), params)
        if not eqn.outvars and rule_of(primitive) is None:  # an effect may have no rule
            return None
        wanted = lookup(eqn).active(eqn, on)
        return (eqn, wanted) if any(wanted) else None

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /, *,
                                symbolic_zeros: bool) -> Any:  # fmt: skip
        xs, marks = self._lowered(args)
        with set_current_trace(self.below):
            if all(m is None for m in marks):
                return self.below.process_custom_jvp_call(
                    primitive, fun, jvp, xs, symbolic_zeros=symbolic_zeros
                )
            made = self.custom_jvp(primitive, jvp.call_wrapped, symbolic_zeros, xs, marks)
        return [self.lift(y, m) for y, m in zip(*made, strict=True)]

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, *, out_trees: Any, symbolic_zeros: bool) -> Any:  # fmt: skip
        xs, marks = self._lowered(args)
        with set_current_trace(self.below):
            if all(m is None for m in marks):
                return self.below.process_custom_vjp_call(
                    primitive, fun, fwd, bwd, xs, out_trees=out_trees, symbolic_zeros=symbolic_zeros
                )
            made = self.custom_vjp(primitive, (fwd, bwd, out_trees), symbolic_zeros, xs, marks)
        return [self.lift(y, m) for y, m in zip(*made, strict=True)]

    def process_call(self, primitive: Primitive, f: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self):
            return f.call_wrapped(*args)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, Tracer | jax.Array) else self.below.stage_value(val)

    def _lowered(self, args: Sequence[Value]) -> tuple[list[Value], list[Mark]]:
        pairs = [self.lower(x) for x in args]
        return [x for x, _ in pairs], [m for _, m in pairs]


class Split(Trace):
    """Operations on a staged value are staged; all others run in the trace outside."""

    def __init__(self, outside: Trace, staged: Trace | None = None):
        super().__init__()
        self.outside = self.parent_trace = outside
        self.staged = staged
        self.requires_low = False

    def where(self, args: Sequence[Any]) -> Trace:
        """The trace in which an operation on `args` runs."""
        on = self.staged is not None and any(trace_of(x) is self.staged for x in args)
        return self.staged if self.staged is not None and on else self.outside

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        with set_current_trace(trace := self.where(args)):
            return primitive.bind_with_trace(trace, args, [jax.typeof(x) for x in args], params)

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **how: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.where(args)):
            return trace.process_custom_jvp_call(primitive, fun, jvp, args, **how)

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, **how: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.where(args)):
            return trace.process_custom_vjp_call(primitive, fun, fwd, bwd, args, **how)

    def process_call(self, primitive: Primitive, f: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self):
            return f.call_wrapped(*args)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, Tracer | jax.Array) else self.outside.stage_value(val)


def stage(f: Callable[..., Any], avals: Sequence[Any], split: Callable[..., Split] = Split):
    """The Program of `f`, of which only the arguments are unknown.

    What `f` computes from other values is computed at once, where it would have been computed; the
    program holds the result as a constant.
    """
    with take_current_trace() as outside:

        def run(*args: Value) -> Any:
            with take_current_trace() as staged, set_current_trace(split(outside, staged)):
                return f(*args)

        return trace(run, *avals)
