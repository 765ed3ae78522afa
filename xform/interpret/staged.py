"""Trace a function into a program of only those operations that depend on its arguments.

To *stage* an operation is to record it in a program instead of running it. JAX's `linearize` runs
the operations on primals at once and stages those on tangents. `stage` does the same for any
function: operations that depend on an argument are staged, all others run at once, and the program
holds their results as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform._jax import (
    Primitive,
    Trace,
    Tracer,
    current_trace,
    set_current_trace,
    trace_of,
    variable_of,
)
from xform.program.arithmetic import Value
from xform.program.ir import Program, trace


class Split(Trace):
    """A JAX trace that passes each operation on to one of two other traces.

    Attributes:
      staged: the trace that records operations; it gets those with an input that it has recorded.
        None if there is no such trace.
      outside: the trace that runs all other operations.
    """

    def __init__(self, outside: Trace, staged: Trace | None = None):
        super().__init__()
        self.outside = self.parent_trace = outside
        self.staged = staged
        self.requires_low = False

    def trace_for(self, args: Sequence[Any]) -> Trace:
        """Return the trace that gets an operation on `args`."""
        if self.staged is not None and any(trace_of(x) is self.staged for x in args):
            return self.staged
        return self.outside

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        with set_current_trace(trace := self.trace_for(args)):
            return primitive.bind_with_trace(trace, args, [jax.typeof(x) for x in args], params)

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.trace_for(args)):
            return trace.process_custom_jvp_call(primitive, fun, jvp, args, **options)

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, **options: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.trace_for(args)):
            return trace.process_custom_vjp_call(primitive, fun, fwd, bwd, args, **options)

    def process_shard_map(self, primitive: Primitive, f: Any, args: Any, /, **options: Any) -> Any:
        return self.process_primitive(primitive, args, {**options, "subfuns": (f,)})

    def process_call(self, primitive: Primitive, f: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self):
            return f.call_wrapped(*args)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, Tracer | jax.Array) else self.outside.stage_value(val)

    def cur_qdd(self, x: Value) -> Any:
        """Return the present contents of a JAX value that is mutable (a box, a list)."""
        trace: Any = self.trace_for([x])
        return trace.cur_qdd(x)


class Substitute(Split):
    """A trace that replaces the tracers of another trace, which has ended, by values.

    A user's function that is called later may close over such tracers. `values` maps their
    variables to values.
    """

    def __init__(self, outside: Trace, values: Mapping[Any, Value]):
        super().__init__(outside)
        self.values = values

    def value(self, x: Value) -> Value:
        """Return the value that `x` stands for, or `x` itself."""
        variable = variable_of(x)
        if variable is None or trace_of(x) is self.outside:
            return x
        return self.values.get(variable, x)

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        return super().process_primitive(primitive, list(map(self.value, args)), params)

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        args = list(map(self.value, args))
        return super().process_custom_jvp_call(primitive, fun, jvp, args, **options)

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, **options: Any) -> Any:  # fmt: skip
        args = list(map(self.value, args))
        return super().process_custom_vjp_call(primitive, fun, fwd, bwd, args, **options)


class SubstituteKnown(Substitute):
    """A trace that replaces known arrays by values. `values` maps the `id` of each to a value."""

    def value(self, x: Value) -> Value:
        """Return the value that `x` stands for, or `x` itself."""
        return self.values.get(id(x), x)


def stage(
    f: Callable[..., Any], avals: Sequence[Any], split: Callable[..., Split] = Split
) -> Program:
    """Trace `f`, a function of flat arguments of types `avals`, into a Program.

    Operations of `f` that depend on no argument run at once, in the current trace. The program
    holds their results as constants. `split(outside, staged)` makes the `Split` that separates the
    operations; `outside` is the current trace, and `staged` the trace that records.
    """
    outside = current_trace()

    def run(*args: Value) -> Any:
        with set_current_trace(split(outside, current_trace())):
            return f(*args)

    return trace(run, *avals)
