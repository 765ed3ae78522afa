"""Checks for derivative rules, both xform's own and a user's.

A check compares the forward-mode derivative with central differences and with JAX's derivative. It
compares the reverse-mode derivative with the transpose of the forward-mode one. It does both for
every set of active inputs, for second derivatives, and under `jit`, `vmap` and `scan`. It also
checks that the rule under test is the rule that ran. Differences are meaningless at a kink; use
`Case(differences=False)` there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

import xform
from xform.errors import WrongArgument
from xform.introspection.callables import check_callable, function_name
from xform.program.arithmetic import differentiable
from xform.testing.comparisons import (
    CaseChecker,
    Fun,
    cast,
    differences,
    direction,
    directions,
    dot,
    in_64_bits,
    stack_pair,
    with_fixed_arguments,
)
from xform.testing.grads import check_grads
from xform.testing.validate import check_modes, check_outputs, check_point
from xform.testing.watch import watch

__all__ = ["MODES", "Case", "cast", "check_grads", "check_rule"]

MODES = ("first", "eager", "second", "jit", "vmap", "scan")
TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 3e-4, "complex64": 1e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A use of a primitive at a point, for `check_rule`.

    Attributes:
      primitive: its name, as in a printed jaxpr; empty skips the check that its rule ran.
      fun: function of `args` that returns one array or a tuple of arrays.
      args: float64 arrays, which are cast to each dtype in turn; integers and bools are not cast.
      label: what is special about this use, for the name of the test.
      complex: whether to also run with complex arguments.
      bfloat16: whether to also run in bfloat16.
      differences: whether to compare with central differences; False only at kinks.
      second: whether to check second derivatives.
      jax: whether to compare with JAX's derivative; False if it is missing or wrong.
      vmap: whether JAX can batch the primitive.
    """

    primitive: str
    fun: Fun
    args: tuple[Any, ...]
    label: str = ""
    complex: bool = False
    bfloat16: bool = True
    differences: bool = True
    second: bool = True
    jax: bool = True
    vmap: bool = True

    @property
    def id(self) -> str:
        """The name of a test: the primitive, else the function, and the label."""
        return "-".join(filter(None, (self.primitive or function_name(self.fun), self.label)))


def check_rule(case: Case | Fun, *args: Any, dtypes: Sequence[str] = ("float64", "float32"),
               modes: Collection[str] = MODES, **fields: Any) -> None:  # fmt: skip
    """Check the derivative rules that `case` uses, in all `dtypes` and `modes`.

    Args:
      case: a `Case`; or a function, with the `args` and `fields` of its `Case`.
      *args: the point, as float64 arrays; integers are held constant.
      dtypes: floating or complex dtypes, by name.
      modes: for each set of active inputs, "first" derivatives (compiled) and "eager" ones
        (operation by operation). For all inputs together, "second" derivatives, and first
        derivatives under "jit", under "vmap" and in a "scan".
      **fields: fields of the `Case`. `primitive="my_primitive"` also checks that its rule ran.

    Raises:
      WrongRule: a check failed; the message names the primitive, the dtype, the active inputs and
        the check.
      WrongArgument: there is nothing to check: no function, no point, no dtype or no mode.

    >>> check_rule(jnp.tanh, np.array([0.3, -2.0]), primitive="tanh")
    """
    if isinstance(case, Case) and (args or fields):
        raise WrongArgument(
            f"check_rule of the Case {case.id}", "a Case already has its arguments and fields",
            "", "put them into the Case, or pass a function instead of a Case",
        )  # fmt: skip
    if not isinstance(case, Case):
        case = Case(fields.pop("primitive", ""), case, args, **fields)
    caller = f"check_rule of {case.id}"
    check_callable(case.fun, caller)
    left_out = {"second": not case.second, "vmap": not case.vmap}
    check_modes(caller, [m for m in modes if not left_out.get(m)], MODES)
    if not dtypes or isinstance(dtypes, str):
        raise WrongArgument(
            f"{caller} with dtypes={dtypes!r}", "it is not a list of dtypes", "",
            "give a list of names, such as ['float64']",
        )  # fmt: skip
    for dtype in dtypes:
        with jax.enable_x64(True):
            _check(case, dtype, modes)


def _check(case: Case, dtype: str, modes: Collection[str]) -> None:
    """Check one case in one dtype."""
    args = tuple(cast(x, dtype, i) for i, x in enumerate(case.args))
    check_point(f"check_rule of {case.id} in {dtype}", args)
    check_outputs(f"check_rule of {case.id}", jax.eval_shape(case.fun, *args))
    inexact = [i for i, x in enumerate(args) if differentiable(jax.typeof(x))]
    sizes = range(1, len(inexact) + 1)
    subsets = [s for n in sizes for s in itertools.combinations(inexact, n)]  # the last has all
    for active in subsets if {"first", "eager"} & set(modes) else subsets[-1:]:
        checker = CaseChecker(
            case.id, f"{dtype}, active inputs {active}", TOLERANCE.get(dtype, 6e-2)
        )
        f, xs = with_fixed_arguments(case.fun, args, active), tuple(args[i] for i in active)
        d, all_active = directions(f, xs), len(active) == len(inexact)
        first = None
        if {"first", "eager"} & set(modes):
            first = _check_first(case, f, xs, d, modes, checker)
            if all_active and len(args) > len(active):  # integers must get float0 derivatives
                run = functools.partial(_first, xform, case.fun)
                _check_types(_run(run, args, directions(case.fun, args)), args, checker)
        if all_active and set(modes) - {"first", "eager"}:
            _check_compiled(case, f, xs, d, first, modes, checker)


def _run(f: Fun, *xs: Any) -> Any:
    """Run a function as one computation without optimization, since compile time dominates."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*xs)


def _first(ad: Any, f: Fun, xs: Any, d: Any) -> dict[str, Any]:
    """All first derivatives, by `ad`, which is xform or jax."""
    dxs, cts = d
    y, dy = ad.jvp(f, xs, dxs)
    y_of_vjp, pull = ad.vjp(f, *xs)
    return {"output of jvp": y, "output of vjp": y_of_vjp, "jvp": dy, "vjp": pull(cts)}


def _pulled(ad: Any, f: Fun, xs: Any) -> tuple[Fun, Any]:
    """The pullback as a function of cotangents and inputs, and a point to differentiate at."""
    leaves, tree = jax.tree.flatten(direction(jax.eval_shape(f, *xs), 3))
    on = [differentiable(jax.typeof(ct)) for ct in leaves]

    def pulled(live: Any, *xs: Any) -> Any:
        rest = iter(live)
        cts = [next(rest) if o else ct for ct, o in zip(leaves, on, strict=True)]
        return ad.vjp(f, *xs)[1](jax.tree.unflatten(tree, cts))

    return pulled, ([ct for ct, o in zip(leaves, on, strict=True) if o], *xs)


def _second(ad: Any, f: Fun, xs: Any) -> dict[str, Any]:
    """Second derivatives: forward over reverse and reverse over reverse.

    They are derivatives by the inputs and by the cotangent.
    """
    g, args = _pulled(ad, f, xs)
    dy = ad.jvp(g, args, direction(args, 4))[1]
    return {"jvp of vjp": dy, "vjp of vjp": ad.vjp(g, *args)[1](direction(xs, 5))}


def _check_first(
    case: Case, f: Fun, xs: Any, d: Any, modes: Collection[str], checker: CaseChecker
) -> Any:
    """Check first derivatives, compiled together with their references, and eagerly if requested.

    Returns:
      The compiled derivatives.
    """
    dxs, cts = d

    def everything(*xs: Any) -> tuple[Any, ...]:
        by_jax = _first(jax, f, xs, d) if case.jax else None
        slope = differences(f, xs, dxs) if case.differences and in_64_bits(xs) else None
        return _first(xform, f, xs, d), f(*xs), by_jax, slope

    with watch(case.primitive, f, xs, checker.fail):
        compiled, y, by_jax, slope = _run(everything, *xs)
    eager = [_first(xform, f, xs, d)] if "eager" in modes else []
    for results in eager:
        own = f(*xs)
        checker.same(
            "output, bit for bit", [results["output of jvp"], results["output of vjp"]], [own] * 2
        )
    for results in [compiled, *eager]:
        checker.close("output", [results["output of jvp"], results["output of vjp"]], [y, y])
        checker.close(
            "<pull, dx> and <ct, push>", dot(results["vjp"], dxs), dot(cts, results["jvp"])
        )
        if by_jax is not None:
            checker.close("against JAX", results, by_jax)
        if slope is not None:
            loose = dataclasses.replace(checker, tolerance=1e-6)
            loose.close("against differences: jvp", results["jvp"], slope)
        _check_types(results, xs, checker)
    return compiled


def _check_types(results: Any, xs: Any, checker: CaseChecker) -> None:
    checker.same_types("tangent of the output", results["jvp"], results["output of jvp"])
    checker.same_types("cotangents of the inputs", results["vjp"], xs)


def _check_compiled(case: Case, f: Fun, xs: Any, d: Any, first: Any, modes: Collection[str],
                    checker: CaseChecker) -> None:  # fmt: skip
    """Check all other modes, in one computation.

    In vmap and scan there are two directions. The second one is -1/2 times the first.
    """
    in_scan = lambda *xs: lax.scan(lambda n, xs: (n + np.int32(1), f(*xs)), np.int32(0), xs)[1]
    one = lambda xs, d: _first(xform, f, xs, d)
    work: dict[str, Fun] = {
        "jit": lambda *xs: _first(xform, jax.jit(f), xs, d),
        "vmap": lambda *xs: jax.vmap(one)(stack_pair(xs, 1.0), stack_pair(d)),
        "scan": lambda *xs: _first(xform, in_scan, stack_pair(xs, 1.0), stack_pair(d)),
        "second": lambda *xs: _second(xform, f, xs),
    }
    has = {"second": case.second, "vmap": case.vmap}
    wanted = [m for m in work if m in modes and has.get(m, True)]

    def everything(*xs: Any) -> dict[str, Any]:
        results = {m: work[m](*xs) for m in wanted}
        if case.jax:
            results["JAX"] = _first(jax, f, xs, d)
            results["JAX, second"] = _second(jax, f, xs) if "second" in wanted else None
        return results

    results = _run(everything, *xs)
    once = first or results.get("JAX") or _first(xform, f, xs, d)
    factors = {"output of jvp": 1.0, "output of vjp": 1.0, "jvp": -0.5, "vjp": -0.5}
    double = {key: stack_pair(once[key], factor) for key, factor in factors.items()}
    for m in wanted:
        if m != "second":
            checker.close(f"under {m}", results[m], once if m == "jit" else double)
            _check_types(results[m], xs if m == "jit" else stack_pair(xs), checker)
        elif case.jax:
            checker.close("against JAX", results[m], results["JAX, second"])
        elif case.differences and in_64_bits(xs):
            g, args = _pulled(xform, f, xs)
            loose = dataclasses.replace(checker, tolerance=1e-6)
            expected = differences(g, args, direction(args, 4))
            loose.close("against differences: jvp of vjp", results[m]["jvp of vjp"], expected)
