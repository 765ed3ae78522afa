"""Watch operations on concrete values outside `jit`, as a JAX trace.

A `Watch` is a trace whose methods JAX calls for each operation on a value that it watches. Each
watched value has a mark, such as its tangent, or its variable on a tape. A subclass defines what
the marks are, and which marks the results of an operation get (`transforms/eager.py`). The
operations themselves run in the trace around the `Watch`, its attribute `below`. So a watched value
also has a concrete value, and Python's `if`, `print` and `int` work on it. Operations on other
values run as without a `Watch`.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax

from xform._jax import (
    JaxprEqn,
    JVPTracer,
    Primitive,
    Trace,
    Tracer,
    Var,
    current_trace,
    equation,
    jax_primitives,
    set_current_trace,
    trace_of,
    tracer_of_type,
)
from xform._jax.contexts import wide_if_needed
from xform._jax.mutable import is_mutable
from xform.errors import DerivativeLost
from xform.interpret.reference import run_on_references
from xform.program.arithmetic import NUMPY, Value, as_jax_values
from xform.program.hijax import lower_operation
from xform.program.ir import Mask, apply, environment, evaluate, read, trace
from xform.program.references import MAKES_REFERENCES
from xform.program.source import frame
from xform.registry.table import Rule, lookup, rule_of
from xform.registry.words import Bilinear, Linear, Pointwise

# What a trace stores about a value that it watches. A value with the mark None is not watched.
Mark = Any
# The outputs of an operation and their marks.
Results = tuple[Sequence[Value], Sequence[Mark]]


def _refused(conversion: str) -> Callable[..., NoReturn]:
    """Return a method that raises DerivativeLost, because the conversion loses a derivative."""

    def refuse(self: WatchedTracer, *args: Any, **kwargs: Any) -> NoReturn:
        raise DerivativeLost(
            f"{conversion} of a value that is being differentiated, {self.aval.str_short()}",
            "the result carries no derivative: everything computed from it would count as constant",
            frame(),
            "compute with jax.numpy instead of numpy, scipy or math; or, if the value should be "
            "constant, convert jax.lax.stop_gradient(x); print, f-strings, comparisons and int(x) "
            "need neither",
        )

    return refuse


class WatchedTracer(Tracer[Any]):
    """A watched value: `value` is the concrete value, and `mark` is its mark.

    Python may look at the value: print, compare, branch, `int(x)`. Conversions that would lose the
    derivative, such as `float(x)`, raise DerivativeLost.
    """

    __slots__ = ()
    value: Value
    mark: Mark

    def __init__(self, trace: Trace, value: Value, mark: Mark, aval: Any):
        Tracer.__init__(self, trace, aval)
        self.value, self.mark = value, mark

    __array__ = _refused("a NumPy array")
    __float__ = _refused("float()")
    __complex__ = _refused("complex()")
    __dlpack__ = _refused("__dlpack__()")
    __reduce__ = _refused("a pickle")
    item = _refused("item()")
    tolist = _refused("tolist()")
    tobytes = _refused("tobytes()")

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def to_concrete_value(self) -> Any:
        """Return an array as it is, still watched; None for a scalar or an unknown value.

        JAX calls this before it looks at the values of an array. It also calls it before it passes
        a scalar to NumPy, as in `jnp.arange` or for the initial value of a reduction. There the
        derivative would be lost, so the result for a scalar is None.
        """
        value = self.value
        known = value.to_concrete_value() if isinstance(value, Tracer) else value
        return self if self.shape and known is not None else None

    def _origin_msg(self) -> str:
        return "\nIt is being differentiated. If it should be constant, pass stop_gradient of it."

    def _contents(self) -> list[tuple[str, Any]]:
        return [("value", self.value), ("tangent", tracer_of_type(self.aval))]

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return self._trace.show(self.value, self.mark)

    def __str__(self) -> str:
        return str(self.value)

    def full_lower(self) -> Self:
        return self


class MarkedTracer(WatchedTracer):
    """A watched value whose mark is not a tangent."""

    __slots__ = ("mark", "value")


class TangentTracer(WatchedTracer, JVPTracer):
    """A watched value whose mark is its tangent. Libraries that look for a JVPTracer find one."""

    __slots__ = ()
    value = JVPTracer.primal
    mark = JVPTracer.tangent


class Watch(Trace, abc.ABC):
    """A trace that runs operations in the trace `below` and marks their results.

    An operation with a watched input is differentiated by its rule (`registry.table`). There are
    four ways, each a method of the subclass. `formula` is for rules that need only the inputs and
    outputs of the operation; it is called after the operation has run. `equation` is for all other
    rules: it runs the operation itself. `custom_jvp` and `custom_vjp` are for calls of users'
    custom functions.

    In these methods `xs` are the inputs without marks, and `marks` are their marks, None for an
    input that is not watched.
    """

    tracer_type: type[WatchedTracer] = MarkedTracer

    def __init__(self, below: Trace):
        super().__init__()
        self.below = self.parent_trace = below
        # JAX does not lower hijax operations for this trace; it does for `below`, if that needs it.
        self.requires_low = False
        self.tag_was_read = False  # whether JAX or a library has read the tag
        self.has_references = False  # whether an operation has made a mutable reference

    @property
    def tag(self) -> Any:
        """The identity of this trace for JAX and libraries; reading it sets `tag_was_read`."""
        self.tag_was_read = True
        return self

    @abc.abstractmethod
    def show(self, value: Value, mark: Mark) -> str:
        """Return the text of a watched value in a debugger, as in JAX."""

    @abc.abstractmethod
    def formula(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value],
                marks: Sequence[Mark]) -> Sequence[Mark]:  # fmt: skip
        """Return the marks of `ys`, the outputs of an equation that has run."""

    @abc.abstractmethod
    def equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                 wanted: Mask) -> Results:  # fmt: skip
        """Run an equation; return its outputs and their marks. Only `wanted` marks are used."""

    @abc.abstractmethod
    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Run a `custom_jvp` call by the user's rule; return its outputs and their marks.

        `symbolic` says whether the rule takes symbolic zeros.
        """

    @abc.abstractmethod
    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Run a `custom_vjp` call by the user's rules; return its outputs and their marks.

        `rules` are the forward function, the backward function, and the trees of their results.
        `symbolic` says whether the forward function takes symbolic zeros.
        """

    def lift(self, value: Value, mark: Mark, aval: Any = None) -> Value:
        """Return a watched value; `value` itself if the mark is None. `aval` is its type."""
        if mark is None:
            return value
        return self.tracer_type(self, value, mark, jax.typeof(value) if aval is None else aval)

    def lower(self, x: Value) -> tuple[Value, Mark]:
        """Return the concrete value of `x` and its mark; the opposite of `lift`."""
        return (x.value, x.mark) if trace_of(x) is self else (x, None)

    def applied(self, primitive: Primitive, params: Any, avals: Sequence[Any],
                marks: Sequence[Mark], outputs: list[Var] | None = None) -> Any:  # fmt: skip
        """Return the equation of an operation on inputs of types `avals`.

        `outputs` are its output variables, known if the operation has run.
        """
        return equation(primitive, list(map(self.variable, avals, marks)), params, outputs)

    def variable(self, aval: Any, mark: Mark) -> Var:
        """Return the variable that stands for an input of type `aval` in an equation."""
        return Var(aval)

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        replaced, params = lower_operation(primitive, params)
        out = self._processed(replaced, args, params)
        return out if replaced.multiple_results == primitive.multiple_results else [out]

    def _processed(self, primitive: Primitive, args: Sequence[Any], params: Any) -> Any:
        """Run an operation; return its outputs, or its output if the primitive has only one."""
        self.has_references = self.has_references or primitive in MAKES_REFERENCES
        if self.has_references:
            outputs = run_on_references(self, primitive, args, params)
            if outputs is not None:
                return outputs if primitive.multiple_results else outputs[0]
        xs, marks, avals = self._lower_all(args)
        if primitive is jax_primitives.device_put_p:
            params = {**params, "srcs": tuple(map(_source_device, params["srcs"], xs))}
        on = tuple([m is not None for m in marks])
        rule = rule_of(primitive) if True in on else None
        with set_current_trace(self.below):
            if rule is not None and not isinstance(rule, _BY_FORMULA) and rule.word != "constant":
                # With mutable inputs, JAX can find the output types of its own operations only. An
                # operation of another library gets no outputs, so its rule raises an error.
                writes = rule.word == "foreign" and any(map(is_mutable, avals))
                eqn = self.applied(primitive, params, avals, marks, [] if writes else None)
                # Only the rule of `jit` takes Python numbers; others get them as arrays.
                xs = xs if rule.takes_python_numbers else as_jax_values(xs)
                with wide_if_needed(avals):
                    outputs = self._by_equation(rule, eqn, xs, marks, on)
                return outputs if primitive.multiple_results else outputs[0]
            if rule is None and True in on:
                eqn = self.applied(primitive, params, avals, marks)
                if eqn.outvars:  # without outputs, it has only an effect and needs no rule
                    lookup(eqn)  # raises MissingRule
            xs = as_jax_values(xs) if True in on else xs
            if any([isinstance(x, NUMPY) for x in xs]):
                out = primitive.bind(*xs, **params)  # converts NumPy arrays to JAX arrays
            else:
                out = primitive.bind_with_trace(self.below, xs, avals, params)
            if rule is None:
                return out
            ys = out if primitive.multiple_results else [out]
            outs = [Var(jax.typeof(y)) for y in ys]
            eqn = self.applied(primitive, params, avals, marks, outs)
            rule.check(eqn)
            wanted = rule.active(eqn, on)
            if True not in wanted:
                return out
            with wide_if_needed(avals):
                marks = self.formula(rule, eqn, xs, as_jax_values(ys), marks)
        outputs = [
            self.lift(y, m, v.aval) if w else y
            for y, m, w, v in zip(ys, marks, wanted, outs, strict=True)
        ]
        return outputs if primitive.multiple_results else outputs[0]

    def _by_equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                     on: Mask) -> list[Value]:  # fmt: skip
        """Run an equation by the method `equation`; return its outputs, marked.

        `on` says which inputs are watched.
        """
        rule.check(eqn)
        wanted = rule.active(eqn, on)
        if True not in wanted:
            return apply(eqn, xs)
        if (body := rule.inlined(eqn, False)) is not None:  # a call that is replaced by its body
            with set_current_trace(self):
                return evaluate(body, list(map(self.lift, xs, marks)))
        ys, marks = self.equation(rule, eqn, xs, marks, wanted)
        return [self.lift(y, m) if w else y for y, m, w in zip(ys, marks, wanted, strict=True)]

    def process_shard_map(self, primitive: Primitive, f: Any, args: Any, /, **options: Any) -> Any:
        """Differentiate a `shard_map` as one equation.

        Its body is traced, because it has types and axis names of its own.
        """
        structures: list[Any] = []

        def run(*xs: Value) -> list[Value]:
            params = {**options, "subfuns": (f,)}
            out = primitive.bind_with_trace(current_trace(), xs, list(map(jax.typeof, xs)), params)
            structures.append(out.map(lambda _: None))  # no tracer outlives its trace
            return list(out)

        prog = trace(run, *map(jax.typeof, args))
        (staged,) = prog.equations
        env = environment(prog, args)
        xs, marks, avals = self._lower_all([read(env, v) for v in staged.invars])
        on = tuple(m is not None for m in marks)
        with set_current_trace(self.below):
            eqn = self.applied(primitive, staged.params, avals, marks, list(staged.outvars))
            xs = as_jax_values(xs)
            outs = (
                self._by_equation(lookup(eqn), eqn, xs, marks, on) if any(on) else apply(staged, xs)
            )
        env.update(zip(staged.outvars, outs, strict=True))
        return structures[0].update([read(env, v) for v in prog.outputs])

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /, *,
                                symbolic_zeros: bool) -> Any:  # fmt: skip
        if self.has_references:
            params = {"subfuns": (fun, jvp), "symbolic_zeros": symbolic_zeros}
            if (outs := run_on_references(self, primitive, args, params)) is not None:
                return outs
        xs, marks, _ = self._lower_all(args)
        with set_current_trace(self.below):
            if all(m is None for m in marks):
                return self.below.process_custom_jvp_call(
                    primitive, fun, jvp, xs, symbolic_zeros=symbolic_zeros
                )
            ys, marks = self.custom_jvp(primitive, jvp.call_wrapped, symbolic_zeros, xs, marks)
        return [self.lift(y, m) for y, m in zip(ys, marks, strict=True)]

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, *, out_trees: Any, symbolic_zeros: bool) -> Any:  # fmt: skip
        if self.has_references:
            params = {"subfuns": (fun, fwd, bwd), "out_trees": out_trees,
                      "symbolic_zeros": symbolic_zeros}  # fmt: skip
            if (outs := run_on_references(self, primitive, args, params)) is not None:
                return outs
        xs, marks, _ = self._lower_all(args)
        with set_current_trace(self.below):
            if all(m is None for m in marks):
                return self.below.process_custom_vjp_call(
                    primitive, fun, fwd, bwd, xs, out_trees=out_trees, symbolic_zeros=symbolic_zeros
                )
            ys, marks = self.custom_vjp(primitive, (fwd, bwd, out_trees), symbolic_zeros, xs, marks)
        return [self.lift(y, m) for y, m in zip(ys, marks, strict=True)]

    def process_call(self, primitive: Primitive, f: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self):
            return f.call_wrapped(*args)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, Tracer | jax.Array) else self.below.stage_value(val)

    def cur_qdd(self, x: Value) -> Any:
        """Return the present contents of a JAX value that is mutable (a box, a list)."""
        below: Any = self.below
        return below.cur_qdd(self.lower(x)[0])

    def _lower_all(self, args: Sequence[Value]) -> tuple[list[Value], list[Mark], list[Any]]:
        """Return the concrete values, the marks and the types of arguments."""
        xs, marks, avals = [], [], []
        for x in args:
            if isinstance(x, Tracer) and x._trace is self:
                xs.append(x.value)
                marks.append(x.mark)
                avals.append(x.aval)
            else:
                xs.append(x)
                marks.append(None)
                avals.append(jax.typeof(x))
        return xs, marks, avals


def _source_device(source: Any, x: Value) -> Any:
    """Return where the pullback of `device_put` sends a cotangent: to the sharding of its input.

    JAX gives None as the `source` of a tracer, because it knows the sharding of arrays only.
    """
    while isinstance(x, WatchedTracer):
        x = x.value
    return getattr(x, "sharding", None) if source is None else source


# Rules for the method `formula`: they need only the inputs and outputs of an operation.
_BY_FORMULA = Pointwise, Linear, Bilinear
