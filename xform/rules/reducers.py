"""Rules of reductions by a user's function: is the function associative and commutative?

`reduce` and `reduce_window` combine elements with a user's function f, the reducer. XLA chooses the
order. It depends on the backend, on sizes, and on the number of operands. xform may
combine elements in an order of its own only if the order does not matter: if f(f(a, b), c) =
f(a, f(b, c)) and f(a, b) = f(b, a).

Otherwise `reduce` has no derivative. `reduce_window` has one in forward mode, as in JAX: the values
and their tangents are combined together, as pairs, by one operation.

`any_order` compares both sides at random points. This decides the question for analytic functions,
because two of them that agree at random points agree everywhere. It also decides it for functions
that compare nothing but their inputs, because the points have all orders of the inputs. A reducer
that does anything else is not recognized, such as one that compares a sum with a constant. Ties and
NaN are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Literal, callee, custom_jvp_call_p
from xform.errors import NotDifferentiable
from xform.interpret.jvp import jvp
from xform.interpret.node import Structured
from xform.interpret.pullback import pull_of_jvp
from xform.passes.structured import called_body
from xform.program.arithmetic import Value, differentiable, instantiate
from xform.program.dimensions import shape
from xform.program.equation import Atom, apply
from xform.program.ir import Mask, Program, program, spread, trace
from xform.program.source import frame
from xform.registry.table import traits


class Reduction(Structured):
    """The rule of a reduction by a user's function, the parameter `jaxpr`.

    The first formula is the jvp if the order does not matter. The second formula, if there is one,
    returns the same reduction of other operands: `f(reducer, operands, initial_values, **params)`.
    """

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        known = any_order(program(eqn.params["jaxpr"]))
        dys = (
            self.call(self.formulas[0], eqn, xs, dxs)[1] if known else self._of_pairs(eqn, xs, dxs)
        )
        return apply(eqn, xs), dys

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if not any_order(program(eqn.params["jaxpr"])):
            raise _refused(eqn, "reverse-mode derivative")
        return pull_of_jvp(lambda xs, dxs: self.jvp(eqn, xs, dxs), xs, active, wanted)

    def _of_pairs(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        """Return the tangents of the outputs, from a reduction of pairs."""
        if len(self.formulas) == 1 or _one_window(eqn):
            raise _refused(eqn, "derivative")
        reducer, n = program(eqn.params["jaxpr"]), len(xs) // 2
        on = tuple(differentiable(v.aval) for v in eqn.outvars)
        tangents = instantiate(dxs, eqn.invars, (*on, *on))
        m = len(tangents) // 2

        def pairs(a: list[Any], b: list[Any]) -> list[Any]:
            da, db = spread(a[n:], on), spread(b[n:], on)
            ys, dys = jvp(reducer, [*a[:n], *b[:n]], [*da, *db])
            return [*ys, *instantiate(dys, reducer.outputs, on)]

        operands, starts = [*xs[:n], *tangents[:m]], [*xs[n:], *tangents[m:]]
        return spread(self.call(self.formulas[1], eqn, pairs, operands, starts)[n:], on)


def _one_window(eqn: JaxprEqn) -> bool:
    """Return whether windows are whole axes. XLA may replace that by `reduce`, in another order."""
    sizes = zip(eqn.params["window_dimensions"], shape(eqn.outvars[0]), strict=True)
    return {m for size, m in sizes if size > 1} == {1}


def _refused(eqn: JaxprEqn, what: str) -> NotDifferentiable:
    forward = "" if what == "derivative" else "use forward mode (jvp, jacfwd), or "
    return NotDifferentiable(
        f"{what} of {eqn.primitive.name}",
        "xform does not recognize the reducer as associative and commutative, and only XLA knows "
        "the order of the elements",
        frame(eqn),
        f"{forward}combine the elements in a jax.lax.scan, whose order is known",
    )


_MOST_COMPARED = 4  # operands of a reducer that compares inputs; it is evaluated at 6^n orders
_POINTS = 64  # at least


@dataclasses.dataclass(frozen=True)
class _Values:
    """Values of a variable at all points.

    Attributes:
      at: the values.
      operand: if the values are always inputs, chosen by comparisons: the operand that they belong
        to. None if they are computed.
    """

    at: np.ndarray
    operand: int | None = None


_ANALYTIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "square": np.square,
    "integer_pow": lambda x, *, y: x**y,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "logaddexp": np.logaddexp,
}
_COMPARING: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_CHOOSING: dict[str, Callable[..., Any]] = {"max": np.maximum, "min": np.minimum}
_LOGICAL: dict[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}


def any_order(reducer: Program) -> bool:
    """Return whether a reducer is recognized as associative and commutative.

    The inputs and outputs of `reducer` are scalars: an input a and an input b for each output.
    """
    if "any order" not in reducer.cache:
        reducer.cache["any order"] = _any_order(reducer)
    return reducer.cache["any order"]


def _any_order(reducer: Program) -> bool:
    a, b, c = _points(reducer.out_avals)
    f = lambda a, b: _evaluate(reducer, [*a, *b])
    with np.errstate(all="ignore"):
        pairs = [*zip(f(f(a, b), c), f(a, f(b, c)), strict=True),
                 *zip(f(a, b), f(b, a), strict=True)]  # fmt: skip
    on = [differentiable(aval) for aval in reducer.out_avals] * 2
    return all(
        x is not None and y is not None and np.allclose(x.at, y.at, 1e-9, 1e-12)
        for (x, y), matters in zip(pairs, on, strict=True)
        if matters
    )


def _points(avals: Sequence[Any]) -> list[list[_Values | None]]:
    """Return random values in [0.1, 0.9] of three elements, in all orders, for each operand.

    A boolean operand has no values.
    """
    draw, n = np.random.default_rng(0), len(avals)
    compared = n <= _MOST_COMPARED
    orders = np.array([*itertools.product(itertools.permutations(range(3)),
                                          repeat=n if compared else 1)])  # fmt: skip
    orders = np.repeat(orders, -(-_POINTS // len(orders)), 0)
    elements: list[list[_Values | None]] = [[], [], []]
    for i, aval in enumerate(avals):
        values = np.sort(draw.uniform(0.1, 0.9, (len(orders), 3)))
        values = np.take_along_axis(values, orders[:, i if compared else 0], 1)
        if jnp.issubdtype(aval.dtype, np.complexfloating):
            values = values + 1j * draw.uniform(0.1, 0.9, values.shape)
        for element, x in zip(elements, values.T, strict=True):
            known = aval.dtype != np.bool_
            element.append(_Values(x, i if compared else None) if known else None)
    return elements


def _evaluate(prog: Program, args: Sequence[_Values | None]) -> list[_Values | None]:
    """Return the outputs of a program; None for values that this module does not understand."""
    env: dict[Any, _Values | None] = dict(zip(prog.inputs, args, strict=True))

    def read(v: Atom) -> _Values | None:
        return _Values(np.asarray(v.val)) if isinstance(v, Literal) else env.get(v)

    for eqn in prog.equations:
        xs = [read(v) for v in eqn.invars]
        env.update(zip(eqn.outvars, _results(eqn, xs), strict=True))
    return [read(v) for v in prog.outputs]


def _results(eqn: JaxprEqn, xs: Sequence[_Values | None]) -> list[_Values | None]:
    if traits(eqn.primitive).call:
        return (
            [_analytic("logaddexp", xs)] if _is_logaddexp(eqn) else _evaluate(called_body(eqn), xs)
        )
    known = [x for x in xs if x is not None]
    return [_result(eqn, known) if len(known) == len(xs) else None for _ in eqn.outvars]


def _analytic(name: str, xs: Sequence[_Values | None], **params: Any) -> _Values | None:
    arrays = [x.at for x in xs if x is not None]
    complete = len(arrays) == len(xs) and not any(x.dtype == np.bool_ for x in arrays)
    return _Values(_ANALYTIC[name](*arrays, **params)) if complete else None


def _result(eqn: JaxprEqn, xs: Sequence[_Values]) -> _Values | None:
    """Return the result of an operation; None if it is neither analytic nor a comparison."""
    name, arrays, operands = eqn.primitive.name, [x.at for x in xs], {x.operand for x in xs}
    inputs_of_one_operand = len(operands) == 1 and None not in operands
    avals: list[Any] = [v.aval for v in eqn.invars]
    dtypes = [aval.dtype for aval in avals]
    if name in _ANALYTIC:
        return _analytic(name, xs, **({"y": eqn.params["y"]} if name == "integer_pow" else {}))
    if name == "div" and jnp.issubdtype(dtypes[0], np.inexact):
        return _Values(arrays[0] / arrays[1])
    if name in _LOGICAL and all(d == np.bool_ for d in dtypes):
        return _Values(_LOGICAL[name](*arrays))
    if name == "select_n" and dtypes[0] == np.bool_:
        chosen = {x.operand for x in xs[1:]}
        return _Values(np.where(arrays[0], arrays[2], arrays[1]),
                       chosen.pop() if len(chosen) == 1 else None)  # fmt: skip
    if name == "convert_element_type":
        to = eqn.params["new_dtype"]
        exact = jnp.issubdtype(to, np.inexact) and jnp.result_type(to, dtypes[0]) == to
        return dataclasses.replace(xs[0], at=arrays[0] * 1) if exact else None
    if inputs_of_one_operand and not any(jnp.issubdtype(d, np.complexfloating) for d in dtypes):
        if name in _COMPARING:
            return _Values(_COMPARING[name](*arrays))
        if name in _CHOOSING:
            return dataclasses.replace(xs[0], at=_CHOOSING[name](*arrays))
    return None


def _is_logaddexp(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of `jnp.logaddexp` for real numbers."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    if eqn.primitive is not custom_jvp_call_p or len(avals) != 2:
        return False
    if any(not jnp.issubdtype(aval.dtype, np.floating) for aval in avals):
        return False
    known = trace(lambda a, b: [jnp.logaddexp(a, b)], *avals).equations[-1]
    text = lambda eqn: str(callee(eqn.params, "call_jaxpr"))
    return known.primitive is eqn.primitive and text(known) == text(eqn)
