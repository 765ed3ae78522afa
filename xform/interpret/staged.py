"""Trace values that are unknown, beside values that are known, in JAX's protocol of traces.

`stage` traces a function with unknown arguments. All other values stay concrete. This is the
opposite of `concrete.Watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import Primitive, Trace, Tracer, current_trace, set_current_trace, trace_of
from xform.program.arithmetic import Value
from xform.program.ir import trace


class Split(Trace):
    """A trace that stages operations on staged values; all others run in the trace outside."""

    def __init__(self, outside: Trace, staged: Trace | None = None):
        super().__init__()
        self.outside = self.parent_trace = outside
        self.staged = staged
        self.requires_low = False

    def where(self, args: Sequence[Any]) -> Trace:
        """Return the trace that runs an operation on `args`."""
        on = self.staged is not None and any(trace_of(x) is self.staged for x in args)
        return self.staged if self.staged is not None and on else self.outside

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        with set_current_trace(trace := self.where(args)):
            return primitive.bind_with_trace(trace, args, [jax.typeof(x) for x in args], params)

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.where(args)):
            return trace.process_custom_jvp_call(primitive, fun, jvp, args, **options)

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, **options: Any) -> Any:  # fmt: skip
        with set_current_trace(trace := self.where(args)):
            return trace.process_custom_vjp_call(primitive, fun, fwd, bwd, args, **options)

    def process_shard_map(self, primitive: Primitive, f: Any, args: Any, /, **options: Any) -> Any:
        return self.process_primitive(primitive, args, {**options, "subfuns": (f,)})

    def process_call(self, primitive: Primitive, f: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self):
            return f.call_wrapped(*args)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, Tracer | jax.Array) else self.outside.stage_value(val)

    def cur_qdd(self, x: Value) -> Any:
        """Return the present contents of a JAX value that is mutable."""
        trace: Any = self.where([x])
        return trace.cur_qdd(x)


def stage(f: Callable[..., Any], avals: Sequence[Any], split: Callable[..., Split] = Split):
    """Trace `f` into a Program; only its arguments are unknown.

    Operations of `f` on other values run at once, in the current trace. The program holds their
    results as constants.
    """
    outside = current_trace()

    def run(*args: Value) -> Any:
        with set_current_trace(split(outside, current_trace())):
            return f(*args)

    return trace(run, *avals)
