"""Values that are not known yet beside values that are, in JAX's protocol of traces.

`stage` traces a function with unknown arguments. Everything that is known stays a value. It is the
opposite of `concrete.Watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import Primitive, Trace, Tracer, current_trace, set_current_trace, trace_of
from xform.arithmetic import Value
from xform.ir import trace


class Split(Trace):
    """Operations on a staged value are staged; all others run in the trace outside."""

    def __init__(self, outside: Trace, staged: Trace | None = None):
        super().__init__()
        self.outside = self.parent_trace = outside
        self.staged = staged
        self.requires_low = False

    def where(self, args: Sequence[Any]) -> Trace:
        """The trace that runs an operation on `args`."""
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
        """The present contents of a mutable value of JAX's."""
        trace: Any = self.where([x])
        return trace.cur_qdd(x)


def stage(f: Callable[..., Any], avals: Sequence[Any], split: Callable[..., Split] = Split):
    """Trace `f` into a Program; only its arguments are unknown.

    What `f` computes from other values is computed at once, where it would have been computed; the
    program holds the result as a constant.
    """
    outside = current_trace()

    def run(*args: Value) -> Any:
        with set_current_trace(split(outside, current_trace())):
            return f(*args)

    return trace(run, *avals)
