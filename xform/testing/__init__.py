"""Checks for derivative rules, both xform's own and a user's: `check_rule` and `check_grads`.

`check_rule` compares the forward-mode derivative with central differences and with JAX's
derivative. It checks that the reverse-mode derivative is the transpose of the forward-mode one, and
that the rule under test is the rule that ran. All of this is checked for every set of active
inputs, for second derivatives, and under `jit`, `vmap` and `scan`. Active inputs are
differentiated, and all others are held constant. Differences are meaningless at a kink: use
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
from xform.testing.validate import check_names, check_outputs, check_point
from xform.testing.watch import watch

__all__ = ["CHECKS", "Case", "cast", "check_grads", "check_rule"]

CHECKS = ("first", "eager", "second", "jit", "vmap", "scan")
# Tolerances by dtype. The tolerance for any other dtype is 6e-2.
TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 3e-4, "complex64": 1e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A use of a primitive at a point, for `check_rule`.

    Attributes:
      primitive: its name, as in a printed jaxpr; empty skips the check that its rule ran.
      fun: function of `args` that returns one array or a tuple of arrays.
      args: float64 arrays, which are cast to each dtype in turn; integers and bools are not cast.
      label: a word for this use of the primitive, for the name of the test.
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
        """The name of a test: the primitive (or else the function), and the label."""
        return "-".join(filter(None, (self.primitive or function_name(self.fun), self.label)))


def check_rule(case: Case | Fun, *args: Any, dtypes: Sequence[str] = ("float64", "float32"),
               checks: Collection[str] = CHECKS, **fields: Any) -> None:  # fmt: skip
    """Check the derivative rules that a function uses, in all `dtypes`.

    Args:
      case: a function of arrays; or a `Case`, which holds a function and its arguments.
      *args: the point, as float64 arrays; integers are held constant. Leave them out if
        `case` is a `Case`.
      dtypes: floating or complex dtypes, by name.
      checks: what to check; by default everything. For each set of active inputs: "first"
        derivatives (compiled) and "eager" ones (operation by operation). For all inputs together:
        "second" derivatives, and first derivatives under "jit", under "vmap" and in a "scan".
      **fields: further fields of the `Case` that is made from a function. `primitive=` names the
        primitive whose rule must run.

    Raises:
      WrongRule: a check failed; the message names the primitive, the dtype, the active inputs and
        the check.
      WrongArgument: there is nothing to check: no function, no point, no dtype or no check.

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
    check_names(caller, "checks", checks, CHECKS, [k for k, out in left_out.items() if out])
    if not dtypes or isinstance(dtypes, str):
        raise WrongArgument(
            f"{caller} with dtypes={dtypes!r}", "it is not a list of dtypes", "",
            "give a list of names, such as ['float64']",
        )  # fmt: skip
    for dtype in dtypes:
        with jax.enable_x64(True):
            _check(case, dtype, checks)


@dataclasses.dataclass(frozen=True)
class _Subset:
    """A set of active inputs: the function of them alone, its point, and seeds.

    The seeds are a pair `(tangents, cotangents)`: a tangent for each active input, and a cotangent
    for the output. The derivatives are applied to them.
    """

    f: Fun
    xs: tuple[Any, ...]
    seeds: tuple[Any, Any]
    checker: CaseChecker


def _check(case: Case, dtype: str, checks: Collection[str]) -> None:
    """Check one case in one dtype."""
    args = tuple(cast(x, dtype, i) for i, x in enumerate(case.args))
    check_point(f"check_rule of {case.id} in {dtype}", args)
    check_outputs(f"check_rule of {case.id}", jax.eval_shape(case.fun, *args))
    inexact = [i for i, x in enumerate(args) if differentiable(jax.typeof(x))]

    def subset(active: Sequence[int]) -> _Subset:
        f, xs = with_fixed_arguments(case.fun, args, active), tuple(args[i] for i in active)
        setting, tolerance = f"{dtype}, active inputs {active}", TOLERANCE.get(dtype, 6e-2)
        return _Subset(f, xs, directions(f, xs), CaseChecker(case.id, setting, tolerance))

    whole, first = subset(tuple(inexact)), None
    if {"first", "eager"} & set(checks):
        sizes = range(1, len(inexact))
        parts = [subset(s) for n in sizes for s in itertools.combinations(inexact, n)]
        first = _check_first(case, [*parts, whole], checks)
        if len(args) > len(inexact):  # integers must get float0 derivatives
            run = functools.partial(_first, xform, case.fun)
            types = jax.eval_shape(run, args, directions(case.fun, args))
            _check_types(types, args, whole.checker)
    if set(checks) - {"first", "eager"}:
        _check_compiled(case, whole, first, checks)


def _run(f: Fun, *xs: Any) -> Any:
    """Run a function as one computation without optimization, since compile time dominates."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*xs)


def _first(library: Any, f: Fun, xs: Any, seeds: Any) -> dict[str, Any]:
    """Return all first derivatives of `f`, computed by `library`, which is xform or jax."""
    dxs, cts = seeds
    y, dy = library.jvp(f, xs, dxs)
    y_of_vjp, pull = library.vjp(f, *xs)
    return {"output of jvp": y, "output of vjp": y_of_vjp, "jvp": dy, "vjp": pull(cts)}


def _pullback(library: Any, f: Fun, xs: Any) -> tuple[Fun, Any]:
    """Return the pullback of `f` as a function `(cotangents, *xs)`, and a point for it.

    `cotangents` is the list of the output's cotangents that are not float0.
    """
    leaves, tree = jax.tree.flatten(direction(jax.eval_shape(f, *xs), 3))
    is_float = [differentiable(jax.typeof(ct)) for ct in leaves]

    def pullback(cotangents: Any, *xs: Any) -> Any:
        given = iter(cotangents)
        cts = [next(given) if is_f else ct for ct, is_f in zip(leaves, is_float, strict=True)]
        return library.vjp(f, *xs)[1](jax.tree.unflatten(tree, cts))

    return pullback, ([ct for ct, is_f in zip(leaves, is_float, strict=True) if is_f], *xs)


def _second(library: Any, f: Fun, xs: Any) -> dict[str, Any]:
    """Return second derivatives: forward over reverse, and reverse over reverse.

    These are derivatives of the pullback, with respect to the inputs and to the cotangent.
    """
    pullback, args = _pullback(library, f, xs)
    tangent = library.jvp(pullback, args, direction(args, 4))[1]
    cotangents = library.vjp(pullback, *args)[1](direction(xs, 5))
    return {"jvp of vjp": tangent, "vjp of vjp": cotangents}


def _check_first(case: Case, subsets: list[_Subset], checks: Collection[str]) -> Any:
    """Check first derivatives: compiled, and also eagerly (operation by operation) if requested.

    All compiled derivatives, JAX's and the differences are computed by one program, since each
    program takes a while to compile.

    Returns:
      The compiled derivatives of xform with respect to the last subset.
    """

    def everything(points: Any) -> list[tuple[Any, ...]]:
        results = []
        for at, xs in zip(subsets, points, strict=True):
            by_jax = _first(jax, at.f, xs, at.seeds) if case.jax else None
            smooth = case.differences and in_64_bits(xs)
            slope = differences(at.f, xs, at.seeds[0]) if smooth else None
            with watch(case.primitive, at.f, xs, at.checker.fail):
                by_xform = _first(xform, at.f, xs, at.seeds)
            results.append((by_xform, at.f(*xs), by_jax, slope))
        return results

    computed = _run(everything, [at.xs for at in subsets])
    for at, (compiled, y, by_jax, slope) in zip(subsets, computed, strict=True):
        checker, (dxs, cts) = at.checker, at.seeds
        eager = [_first(xform, at.f, at.xs, at.seeds)] if "eager" in checks else []
        for results in eager:
            outputs = [results["output of jvp"], results["output of vjp"]]
            checker.same("output, bit for bit", outputs, [at.f(*at.xs)] * 2)
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
            _check_types(results, at.xs, checker)
    return computed[-1][0]


def _check_types(results: Any, xs: Any, checker: CaseChecker) -> None:
    """Check that tangents and cotangents have the shapes and dtypes of their values."""
    checker.same_types("tangent of the output", results["jvp"], results["output of jvp"])
    checker.same_types("cotangents of the inputs", results["vjp"], xs)


def _check_compiled(case: Case, at: _Subset, first: Any, checks: Collection[str]) -> None:
    """Check the checks "jit", "vmap", "scan" and "second", in one compiled program.

    `first` are the first derivatives, if they are computed already. In vmap and scan the batch has
    two entries. Their tangents and cotangents differ by the factor -1/2.
    """
    f, xs, seeds, checker = at.f, at.xs, at.seeds, at.checker
    in_scan = lambda *xs: lax.scan(lambda n, xs: (n + np.int32(1), f(*xs)), np.int32(0), xs)[1]
    derivatives = lambda xs, seeds: _first(xform, f, xs, seeds)
    by_check: dict[str, Fun] = {
        "jit": lambda *xs: _first(xform, jax.jit(f), xs, seeds),
        "vmap": lambda *xs: jax.vmap(derivatives)(stack_pair(xs, 1.0), stack_pair(seeds)),
        "scan": lambda *xs: _first(xform, in_scan, stack_pair(xs, 1.0), stack_pair(seeds)),
        "second": lambda *xs: _second(xform, f, xs),
    }
    possible = {"second": case.second, "vmap": case.vmap}
    wanted = [m for m in by_check if m in checks and possible.get(m, True)]

    def everything(*xs: Any) -> dict[str, Any]:
        results = {m: by_check[m](*xs) for m in wanted}
        if case.jax:
            results["JAX"] = _first(jax, f, xs, seeds)
            results["JAX, second"] = _second(jax, f, xs) if "second" in wanted else None
        return results

    results = _run(everything, *xs)
    single = first or results.get("JAX") or _first(xform, f, xs, seeds)
    factors = {"output of jvp": 1.0, "output of vjp": 1.0, "jvp": -0.5, "vjp": -0.5}
    double = {key: stack_pair(single[key], factor) for key, factor in factors.items()}
    for m in wanted:
        if m != "second":
            checker.close(f"under {m}", results[m], single if m == "jit" else double)
            _check_types(results[m], xs if m == "jit" else stack_pair(xs), checker)
        elif case.jax:
            checker.close("against JAX", results[m], results["JAX, second"])
        elif case.differences and in_64_bits(xs):
            pullback, args = _pullback(xform, f, xs)
            loose = dataclasses.replace(checker, tolerance=1e-6)
            expected = differences(pullback, args, direction(args, 4))
            loose.close("against differences: jvp of vjp", results[m]["jvp of vjp"], expected)
