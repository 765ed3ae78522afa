"""Run the derivative rules of custom functions when the functions are called, as JAX does.

A rule may read anything that Python can reach: a loop variable, an attribute, an iterator, the
current matmul precision. All of it may change after the call. So while a function is traced to be
differentiated, the rule of each custom function is traced at the call too. JAX runs a rule if an
argument of the call has a tangent. `ActivityTrace` finds out which arguments have one.

A value is *active* at a level if it has a tangent there. A level is a transform that is
differentiating. Nested transforms are several levels. The innermost one at which an argument is
active calls the rule. The operations of the rule are then differentiated at the other levels.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import (
    Primitive,
    Trace,
    current_trace,
    is_reference,
    jaxprs_in_params,
    set_current_trace,
    trace_of,
    value_inside,
)
from xform.errors import MissingRule, NotDifferentiable, UnsupportedParam
from xform.interpret.concrete import WatchedTracer
from xform.interpret.node import Structured
from xform.interpret.staged import Split
from xform.program.arithmetic import Value, differentiable
from xform.program.equation import EagerEquation
from xform.program.hijax import lower_operation
from xform.program.ir import Mask, Program, gather, program, trace
from xform.program.source import frame
from xform.registry.table import lookup, rule_of
from xform.rules.staged_rules import StagedCall, TraceRule, stage_jvp, stage_vjp
from xform.rules.user_rules import calls_custom, closes_over_active, indexable

# The depth of a level among nested transforms, and a number that identifies it.
Level = tuple[int, int]
Levels = frozenset[Level]
_NONE: Levels = frozenset()

# The ActivityTrace around a trace that records operations, by the `id` of the latter.
_AROUND: weakref.WeakValueDictionary[int, ActivityTrace] = weakref.WeakValueDictionary()


def trace_active(f: Callable[..., Any], args: Sequence[Any], active: Mask) -> Program:
    """Trace `f` at `args` to a Program, in order to differentiate it.

    `active` says which arguments are differentiated. The rules of custom functions that `f` calls
    are traced when it calls them, if an argument is active here or in a transform around.
    """
    outer = list(map(levels_of, args))

    def run(*xs: Value) -> Any:
        here = frozenset([_level(current_trace())])
        levels = [on | here if a else on for a, on in zip(active, outer, strict=True)]
        return _run_active(f, xs, levels)

    functools.update_wrapper(run, f, assigned=(), updated=())  # JAX's errors name the function
    return trace(run, *args)


def levels_of(x: Value) -> Levels:
    """Return the levels at which a value is active."""
    levels = _NONE
    while (owner := trace_of(x)) is not None:
        if (around := _AROUND.get(id(owner))) is not None:
            return levels | around.recorded_levels(x)
        if hasattr(x, "tangent") or isinstance(x, WatchedTracer):
            levels |= {_level(owner)}
        x = x.value if isinstance(x, WatchedTracer) else value_inside(x)
    return levels


def _level(trace: Trace) -> Level:
    """Return the level of the transform that a trace belongs to."""
    depth, around = 0, trace
    while around is not None:
        depth, around = depth + 1, getattr(around, "parent_trace", None)
    return depth, id(trace)


def _run_active(f: Callable[..., Any], xs: Sequence[Value], levels: Sequence[Levels],
                of_results: list[Levels] | None = None) -> Any:  # fmt: skip
    """Run `f` while its arguments `xs`, tracers of the current trace, are active at `levels`.

    If `of_results` is a list, it is filled with the levels at which the results are active.
    """
    with set_current_trace(ActivityTrace(current_trace(), xs, levels)):
        out = f(*xs)
        if of_results is not None:
            of_results[:] = map(levels_of, out)
        return out


class ActivityTrace(Split):
    """A trace that passes operations on to a trace that records them, and knows what is active.

    Attributes:
      outside: the trace that records operations.
    """

    def __init__(self, recorder: Trace, inputs: Sequence[Value], levels: Sequence[Levels]):
        super().__init__(recorder)
        self._levels = {id(x): (x, on) for x, on in zip(inputs, levels, strict=True) if on}
        # Operations whose outputs are not marked yet: primitive, inputs, parameters, outputs. Most
        # functions call no custom function, and then nobody asks which of their values are active.
        self._pending: list[tuple[Primitive, Sequence[Any], Any, Sequence[Any]]] = []
        _AROUND[id(recorder)] = self

    def recorded_levels(self, x: Value) -> Levels:
        """Return the levels at which a value of the recording trace is active."""
        self._mark_pending()
        return self._levels.get(id(x), (x, _NONE))[1]

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        out = self.outside.process_primitive(primitive, args, params)
        self._pending.append((primitive, args, params, out))
        if isinstance(rule_of(primitive), Structured) and any(
            calls_custom(program(j)) for j in jaxprs_in_params(params)
        ):
            self._mark_pending()
        return out

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        stage = functools.partial(stage_jvp, fun, jvp, options, args)
        process = self.outside.process_custom_jvp_call
        return self._call_custom(process, primitive, (fun, jvp), args, options, stage)

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, **options: Any) -> Any:  # fmt: skip
        stage = functools.partial(stage_vjp, fun, fwd, bwd, options, args)
        process = self.outside.process_custom_vjp_call
        return self._call_custom(process, primitive, (fun, fwd, bwd), args, options, stage)

    def _call_custom(self, process: Callable[..., Any], primitive: Primitive,
                     functions: tuple[Any, ...], args: Sequence[Value], options: dict[str, Any],
                     stage: Callable[[Mask, TraceRule], StagedCall]) -> Any:  # fmt: skip
        """Record a call of a custom function, with its rule traced if an argument is active.

        The rule gets a NumPy array that `vmap` passes on as it is. JAX refuses to record it.
        """
        levels = list(map(levels_of, args))
        if not any(levels):
            return process(primitive, *functions, self._arrays(args), **options)
        references = [x for x in args if is_reference(jax.typeof(x))]
        if references:  # the rule is for the content, see `program/references.py`
            out = process(primitive, *functions, self._arrays(args), **options)
            for x in (*out, *references):
                self._mark(x, _NONE.union(*levels))
            return out
        innermost = max(_NONE.union(*levels))
        of_results: list[Levels] = []

        def trace_rule(f: Callable[..., Any], tangents: Sequence[Any]) -> Program:
            around = [*(on - {innermost} for on in levels), *[_NONE] * len(tangents)]

            run = lambda *xs: _run_active(f, xs, around, of_results)
            return trace(run, *args, *tangents)

        with set_current_trace(self):
            staged = stage(tuple([innermost in on for on in levels]), trace_rule)
        if any(map(levels_of, staged.args[len(args) :])):
            raise closes_over_active(frame())
        out = process(primitive, *staged.functions, self._arrays(staged.args), **staged.options)
        here = [frozenset([innermost]) if on else _NONE for on in staged.has_tangent]
        around = of_results[staged.first_output :]
        for y, *levels in itertools.zip_longest(out, here, around[: len(out)], fillvalue=_NONE):
            self._mark(y, _NONE.union(*levels))
        return out

    def _arrays(self, args: Sequence[Value]) -> list[Value]:
        """Return arguments with JAX arrays in place of NumPy arrays."""
        with set_current_trace(self.outside):
            return indexable(args)

    def process_shard_map(self, primitive: Primitive, f: Any, args: Any, /, **options: Any) -> Any:
        levels, of_outputs = list(map(levels_of, args)), []
        recorder: Any = self.outside
        run = lambda *xs: _run_active(f, xs, levels, of_outputs)
        out = recorder.process_shard_map(primitive, run, args, **options)
        for y, on in zip(out, of_outputs, strict=False):
            self._mark(y, on)
        return out

    def _mark_pending(self) -> None:
        """Mark the outputs of the operations that were recorded since the last call."""
        pending, self._pending = self._pending, []
        for primitive, args, params, out in pending:
            outs = out if primitive.multiple_results else [out]
            self._mark_outputs(*lower_operation(primitive, params), args, outs)

    def _mark_outputs(self, primitive: Primitive, params: Any, args: Sequence[Any],
                      outs: Sequence[Any]) -> None:  # fmt: skip
        """Mark the outputs of an operation at the levels at which they are active.

        If programs of the operation call custom functions, this traces their rules.
        """
        found, recorder = self._levels, self.outside
        levels = [
            (found[id(x)][1] if id(x) in found else _NONE)
            if trace_of(x) is recorder
            else levels_of(x)
            for x in args
        ]
        if not any(levels):
            return
        eqn = EagerEquation(primitive, params, list(map(jax.typeof, args)), list(outs))
        written = [x for x, aval in zip(args, eqn.avals, strict=True) if is_reference(aval)]
        for level in _NONE.union(*levels):
            on = _active_outputs(eqn, tuple([level in of_arg for of_arg in levels]))
            for y in (*gather(outs, on), *written):
                self._mark(y, frozenset([level]))

    def _mark(self, x: Value, levels: Levels) -> None:
        """Mark a value as active at more levels, if it is one of the recording trace."""
        if levels and trace_of(x) is self.outside:
            self._levels[id(x)] = x, levels | self._levels.get(id(x), (x, _NONE))[1]


def _active_outputs(eqn: Any, active: Mask) -> Mask:
    """Return which outputs of an operation may have a tangent.

    If the operation has no rule, or the rule refuses it, the error is raised where the derivative
    is taken.
    """
    try:
        return lookup(eqn).active(eqn, active)
    except (MissingRule, NotDifferentiable, UnsupportedParam):
        return tuple(differentiable(v.aval) for v in eqn.outvars)
