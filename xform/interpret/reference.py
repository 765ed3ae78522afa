"""Mutable references in a function that is differentiated outside `jit`.

`jax.new_ref` in such a function makes a `Reference`. It holds a `RefCell`, which has the current
content of the reference as an ordinary value. Operations that read or write the reference become
operations on that value, which have derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from xform._jax import Primitive, Trace, Tracer, set_current_trace, trace_of
from xform.errors import NotDifferentiable
from xform.program.reference_operations import RefCell
from xform.program.references import apply, uses_references


class Reference(Tracer[Any]):
    """The value that `jax.new_ref` returns to a function that is differentiated outside `jit`."""

    __slots__ = ("cell",)

    def __init__(self, trace: Trace, aval: Any, cell: RefCell):
        super().__init__(trace, aval)
        self.cell = cell

    @property
    def value(self) -> Any:
        """Raise NotDifferentiable: only operations on references may read a reference."""
        raise NotDifferentiable(
            "derivative of a call that uses a mutable reference",
            "the called function has a derivative rule of its own, which takes values",
            "",
            "read the reference before the call, pass the value, and write the result afterwards",
        )


def run_on_references(
    trace: Trace, primitive: Primitive, args: Sequence[Any], params: Any
) -> list[Any] | None:
    """Run an operation that makes or uses references of `trace`; return its outputs.

    Return None, and run nothing, if the operation neither makes nor uses a reference.
    """
    own = lambda x: isinstance(x, Reference) and trace_of(x) is trace
    xs = [x.cell if own(x) else x for x in args]
    if not uses_references(primitive, xs):
        return None
    with set_current_trace(trace):
        outs = apply(primitive, params, xs)
    if not any(isinstance(y, RefCell) for y in outs):
        return outs
    avals, _ = primitive.abstract_eval(*[jax.typeof(x) for x in args], **params)
    (aval,) = avals if primitive.multiple_results else [avals]
    return [Reference(trace, aval, y) for y in outs]
