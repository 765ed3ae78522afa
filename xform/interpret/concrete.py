"""Watch operations on concrete values outside `jit`, in JAX's protocol of traces.

A `Watch` sees each operation on the values that it watches. A watched value carries its concrete
value, so Python's `if`, `print` and `int` work. All other operations run as without a `Watch`.
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
    perturbed,
    set_current_trace,
    trace_of,
)
from xform._jax.mutable import is_mutable
from xform.errors import DerivativeLost
from xform.interpret.reference import refer
from xform.program.arithmetic import NUMPY, Value, as_jax_values
from xform.program.hijax import lower_operation
from xform.program.ir import Mask, apply, environment, evaluate, read, trace
from xform.program.references import MAKES_REFERENCES
from xform.program.source import frame
from xform.registry.table import Rule, lookup, rule_of
from xform.registry.words import Bilinear, Linear, Pointwise

Mark = Any
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
    """A watched value: `value` is the concrete value, `mark` is the trace's data about it.

    Python may look at the value (print, compare, branch), but may not convert it to a number.
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

        JAX calls this before it computes with NumPy from scalars (`jnp.arange`, the initial value
        of a reduction), where a derivative would be lost, and before it looks at an array's values.
        """
        value = self.value
        known = value.to_concrete_value() if isinstance(value, Tracer) else value
        return self if self.shape and known is not None else None

    def _origin_msg(self) -> str:
        return "\nIt is being differentiated. If it should be constant, pass stop_gradient of it."

    def _contents(self) -> list[tuple[str, Any]]:
        return [("value", self.value), ("tangent", perturbed(self.aval))]

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return self._trace.show(self.value, self.mark)

    def __str__(self) -> str:
        return str(self.value)

    def full_lower(self) -> Self:
        return self


class MarkedTracer(WatchedTracer):
    """A watched value of any trace that does not push tangents."""

    __slots__ = ("mark", "value")


class TangentTracer(WatchedTracer, JVPTracer):
    """A watched value and its tangent. It is a JVPTracer, for libraries that look for tangents."""

    __slots__ = ()
    value = JVPTracer.primal
    mark = JVPTracer.tangent


class Watch(Trace, abc.ABC):
    """A trace that passes operations on watched values to its methods; they run in `below`."""

    tracer_type: type[WatchedTracer] = MarkedTracer

    def __init__(self, below: Trace):
        super().__init__()
        self.below = self.parent_trace = below
        self.requires_low = False  # `below` decides what is lowered
        self.tag_was_read = False  # whether JAX or a library has read the tag
        self.refers = False  # whether there may be references

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
        """Return the marks of `ys`, the outputs of an equation that has run, by its rule."""

    @abc.abstractmethod
    def equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                 wanted: Mask) -> Results:  # fmt: skip
        """Run an equation; return its outputs and their marks. Only `wanted` marks count."""

    @abc.abstractmethod
    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Run a `custom_jvp` call by the user's rule; return its outputs and their marks."""

    @abc.abstractmethod
    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        """Run a `custom_vjp` call by the user's rule; return its outputs and their marks."""

    def lift(self, value: Value, mark: Mark, aval: Any = None) -> Value:
        """Return a value for the user: watched if it has a mark."""
        if mark is None:
            return value
        return self.tracer_type(self, value, mark, jax.typeof(value) if aval is None else aval)

    def lower(self, x: Value) -> tuple[Value, Mark]:
        """Return a value and its mark."""
        return (x.value, x.mark) if trace_of(x) is self else (x, None)

    def applied(self, primitive: Primitive, params: Any, avals: Sequence[Any],
                marks: Sequence[Mark], outputs: list[Var] | None = None) -> Any:  # fmt: skip
        """Return the equation of an operation; `outputs` are given if it has already run."""
        return equation(primitive, list(map(self.variable, avals, marks)), params, outputs)

    def variable(self, aval: Any, mark: Mark) -> Var:
        """Return the variable of an input in an equation."""
        return Var(aval)

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        replaced, params = lower_operation(primitive, params)
        out = self._processed(replaced, args, params)
        return out if replaced.multiple_results == primitive.multiple_results else [out]

    def _processed(self, primitive: Primitive, args: Sequence[Any], params: Any) -> Any:
        """Run an operation; return its outputs as its primitive returns them."""
        self.refers = self.refers or primitive in MAKES_REFERENCES
        if self.refers and (held := refer(self, primitive, args, params)) is not None:
            return held if primitive.multiple_results else held[0]
        xs, marks, avals = self._lowered(args)
        if primitive is jax_primitives.device_put_p:
            params = {**params, "srcs": tuple(map(_place, params["srcs"], xs))}
        on = tuple([m is not None for m in marks])
        rule = rule_of(primitive) if True in on else None
        with set_current_trace(self.below):
            if rule is not None and not isinstance(rule, _BY_FORMULA) and rule.word != "constant":
                # Abstract evaluation of mutable values works only for JAX's own calls.
                writes = rule.word == "foreign" and any(map(is_mutable, avals))
                eqn = self.applied(primitive, params, avals, marks, [] if writes else None)
                # A traced rule gets a Python number as an array.
                xs = xs if rule.takes_python_numbers else as_jax_values(xs)
                outputs = self._by_equation(rule, eqn, xs, marks, on)
                return outputs if primitive.multiple_results else outputs[0]
            if rule is None and True in on:
                eqn = self.applied(primitive, params, avals, marks)
                if eqn.outvars:  # an effect may have no rule
                    lookup(eqn)
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
            marks = self.formula(rule, eqn, xs, as_jax_values(ys), marks)
        outputs = [
            self.lift(y, m, v.aval) if w else y
            for y, m, w, v in zip(ys, marks, wanted, outs, strict=True)
        ]
        return outputs if primitive.multiple_results else outputs[0]

    def _by_equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                     on: Mask) -> list[Value]:  # fmt: skip
        """Run an equation by its rule, in `below`; return the outputs."""
        rule.check(eqn)
        wanted = rule.active(eqn, on)
        if True not in wanted:
            return apply(eqn, xs)
        if (inner := rule.inlined(eqn, False)) is not None:
            with set_current_trace(self):
                return evaluate(inner, list(map(self.lift, xs, marks)))
        ys, marks = self.equation(rule, eqn, xs, marks, wanted)
        return [self.lift(y, m) if w else y for y, m, w in zip(ys, marks, wanted, strict=True)]

    def process_shard_map(self, primitive: Primitive, f: Any, args: Any, /, **options: Any) -> Any:
        """Trace the body, because it has types and axis names of its own."""
        structures: list[Any] = []

        def run(*xs: Value) -> list[Value]:
            params = {**options, "subfuns": (f,)}
            out = primitive.bind_with_trace(current_trace(), xs, list(map(jax.typeof, xs)), params)
            structures.append(out.map(lambda _: None))  # no tracer outlives its trace
            return list(out)

        prog = trace(run, *map(jax.typeof, args))
        (staged,) = prog.equations
        env = environment(prog, args)
        xs, marks, avals = self._lowered([read(env, v) for v in staged.invars])
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
        xs, marks, _ = self._lowered(args)
        with set_current_trace(self.below):
            if all(m is None for m in marks):
                return self.below.process_custom_jvp_call(
                    primitive, fun, jvp, xs, symbolic_zeros=symbolic_zeros
                )
            ys, marks = self.custom_jvp(primitive, jvp.call_wrapped, symbolic_zeros, xs, marks)
        return [self.lift(y, m) for y, m in zip(ys, marks, strict=True)]

    def process_custom_vjp_call(self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, args: Any,
                                /, *, out_trees: Any, symbolic_zeros: bool) -> Any:  # fmt: skip
        xs, marks, _ = self._lowered(args)
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

    def _lowered(self, args: Sequence[Value]) -> tuple[list[Value], list[Mark], list[Any]]:
        """Return the values, marks and types of arguments."""
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


def _place(target: Any, x: Value) -> Any:
    """Return where `device_put` sends a cotangent: JAX knows the sharding of plain values only."""
    while isinstance(x, WatchedTracer):
        x = x.value
    return getattr(x, "sharding", None) if target is None else target


# Rules that need the outputs, and that only run the primitive.
_BY_FORMULA = Pointwise, Linear, Bilinear
