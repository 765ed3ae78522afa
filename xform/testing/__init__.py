"""Checks for derivative rules: xform's own are tested with these, and users' rules can be.

What a check proves: the derivative pushed forward equals central differences and JAX's own; the
derivative pulled back is its transpose; both hold for every set of active inputs, for derivatives
of derivatives, and under `jit`, `vmap` and `scan`; and the rule under test is the one that ran.
At a kink differences prove nothing: `Case(differences=False)`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform
from xform.arithmetic import differentiable, float0_zeros
from xform.errors import WrongRule
from xform.testing.watch import watch

Fun = Callable[..., Any]
MODES = ("first", "eager", "second", "jit", "vmap", "scan")
TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 3e-4, "complex64": 1e-3}
STEP = 1e-5  # of central differences in 64 bits: they are then good to about 1e-9


@dataclasses.dataclass(frozen=True)
class Case:
    """One use of one primitive, at one point.

    Attributes:
      primitive: its name, as in a printed jaxpr; empty skips the check that its rule ran.
      fun: function of `args` to one array or a tuple of arrays.
      args: float64 arrays, cast to each dtype in turn; integers and bools stay as they are.
      label: what is special about this use.
      complex: whether to run with complex arguments also.
      bfloat16: whether to run in bfloat16 also.
      differences: whether central differences have a meaning here: False only at kinks.
      second: whether to check derivatives of derivatives.
      jax: whether JAX's own derivative is there, and right, to compare with.
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
        """The primitive and the label, as a test is named."""
        return "-".join(filter(None, (self.primitive, self.label)))


def check_rule(case: Case | Fun, *args: Any, dtypes: Sequence[str] = ("float64", "float32"),
               modes: Collection[str] = MODES, **fields: Any) -> None:  # fmt: skip
    """Check the rules that `case` uses, in all `dtypes` and `modes`.

    Args:
      case: a `Case`; or a function, and then `args` and `fields` are those of its `Case`.
      *args: where to check the function: float64 arrays, integers are held constant.
      dtypes: floating or complex dtypes, by name.
      modes: "first" derivatives, compiled, for each set of active inputs, and "eager", operation
        by operation; for all inputs together, "second" ones, and first ones through a function
        under "jit", under "vmap" and in a "scan".
      **fields: of the `Case`: `primitive="my_primitive"` also checks that its rule ran.

    Raises:
      WrongRule: with the primitive, the dtype, the active inputs and the check that failed.

    >>> check_rule(jnp.tanh, np.array([0.3, -2.0]), primitive="tanh")
    """
    if not isinstance(case, Case):
        case = Case(fields.pop("primitive", ""), case, args, **fields)
    for dtype in dtypes:
        with jax.enable_x64(True):
            _check(case, dtype, modes)


def check_grads(f: Fun, args: Sequence[Any], order: int = 2, modes: Sequence[str] = ("jvp", "vjp"),
                tolerance: float = 1e-5) -> None:  # fmt: skip
    """Compare derivatives of `f` with central differences, up to an order.

    Args:
      f: function of pytrees of arrays.
      args: the point, in float64 (`jax.enable_x64`): differences of float32 show little.
      order: how many times to differentiate.
      modes: "jvp", "vjp", or both: then each order mixes with each.
      tolerance: relative to the largest element, and absolute below 1.

    Raises:
      WrongRule: with the mode and order that failed.

    >>> with jax.enable_x64(True):
    ...     check_grads(lambda x: jnp.sin(x) * x, [jnp.array([0.3, 1.0])])
    """
    args = tuple(args)
    dxs = _direction(args, order)
    slope = _differences(f, args, dxs)
    say = _Say("derivative by", f"order {order}", tolerance)
    for mode in modes:
        if mode == "jvp":
            derivative = lambda *xs: xform.jvp(f, xs, dxs)[1]
            say.close("jvp against differences", derivative(*args), slope)
        else:
            ct = _direction(jax.eval_shape(f, *args), order)
            derivative = lambda *xs: xform.vjp(f, *xs)[1](ct)  # noqa: B023
            say.close("vjp against differences", _dot(derivative(*args), dxs), _dot(ct, slope))
        if order > 1:
            check_grads(derivative, args, order - 1, modes, tolerance)


# One case in one dtype.


def _check(case: Case, dtype: str, modes: Collection[str]) -> None:
    args = tuple(cast(x, dtype, i) for i, x in enumerate(case.args))
    inexact = [i for i, x in enumerate(args) if differentiable(jax.typeof(x))]
    sizes = range(1, len(inexact) + 1)
    subsets = [s for n in sizes for s in itertools.combinations(inexact, n)]  # the last: all
    for active in subsets if {"first", "eager"} & set(modes) else subsets[-1:]:
        say = _Say(case.id, f"{dtype}, active inputs {active}", TOLERANCE.get(dtype, 6e-2))
        f, xs = _held(case.fun, args, active), tuple(args[i] for i in active)
        d, all_active = _directions(f, xs), len(active) == len(inexact)
        first = None
        if {"first", "eager"} & set(modes):
            first = _check_first(case, f, xs, d, modes, say)
            if all_active and len(args) > len(active):  # integers: float0, and no change
                whole = functools.partial(_first, xform, case.fun)
                _check_types(_run(whole, args, _directions(case.fun, args)), args, say)
        if all_active and set(modes) - {"first", "eager"}:
            _check_compiled(case, f, xs, d, first, modes, say)


def _run(f: Fun, *xs: Any) -> Any:
    """In one computation, and not optimized: it is compiling that takes the time of a check."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*xs)


def _first(ad: Any, f: Fun, xs: Any, d: Any) -> dict[str, Any]:
    """All first derivatives, by `ad`: xform, or jax itself."""
    dxs, cts = d
    y, dy = ad.jvp(f, xs, dxs)
    y_of_vjp, pull = ad.vjp(f, *xs)
    return {"output of jvp": y, "output of vjp": y_of_vjp, "jvp": dy, "vjp": pull(cts)}


def _pulled(ad: Any, f: Fun, xs: Any) -> tuple[Fun, Any]:
    """The pullback as a function of cotangents and inputs, and a point to differentiate it at."""
    leaves, tree = jax.tree.flatten(_direction(jax.eval_shape(f, *xs), 3))
    on = [differentiable(jax.typeof(ct)) for ct in leaves]

    def pulled(live: Any, *xs: Any) -> Any:
        rest = iter(live)
        cts = [next(rest) if o else ct for ct, o in zip(leaves, on, strict=True)]
        return ad.vjp(f, *xs)[1](jax.tree.unflatten(tree, cts))

    return pulled, ([ct for ct, o in zip(leaves, on, strict=True) if o], *xs)


def _second(ad: Any, f: Fun, xs: Any) -> dict[str, Any]:
    """Forward over reverse and reverse over reverse, in the inputs and in the cotangent."""
    g, args = _pulled(ad, f, xs)
    dy = ad.jvp(g, args, _direction(args, 4))[1]
    return {"jvp of vjp": dy, "vjp of vjp": ad.vjp(g, *args)[1](_direction(xs, 5))}


def _check_first(case: Case, f: Fun, xs: Any, d: Any, modes: Collection[str], say: _Say) -> Any:
    """Compiled together with what it is compared with; and once more, eagerly, if asked."""
    dxs, cts = d

    def everything(*xs: Any) -> tuple[Any, ...]:
        by_jax = _first(jax, f, xs, d) if case.jax else None
        slope = _differences(f, xs, dxs) if case.differences and _in_64_bits(xs) else None
        return _first(xform, f, xs, d), f(*xs), by_jax, slope

    with watch(case.primitive, f, xs, say.fail):
        compiled, y, by_jax, slope = _run(everything, *xs)
    eager = [_first(xform, f, xs, d)] if "eager" in modes else []
    for results in eager:
        own = f(*xs)
        say.same(
            "output, bit for bit", [results["output of jvp"], results["output of vjp"]], [own] * 2
        )
    for results in [compiled, *eager]:
        say.close("output", [results["output of jvp"], results["output of vjp"]], [y, y])
        say.close("<pull, dx> and <ct, push>", _dot(results["vjp"], dxs), _dot(cts, results["jvp"]))
        if by_jax is not None:
            say.close("against JAX", results, by_jax)
        if slope is not None:
            loose = dataclasses.replace(say, tolerance=1e-6)
            loose.close("against differences: jvp", results["jvp"], slope)
        _check_types(results, xs, say)
    return compiled


def _check_types(results: Any, xs: Any, say: _Say) -> None:
    say.same_types("tangent of the output", results["jvp"], results["output of jvp"])
    say.same_types("cotangents of the inputs", results["vjp"], xs)


def _check_compiled(case: Case, f: Fun, xs: Any, d: Any, first: Any, modes: Collection[str],
                    say: _Say) -> None:  # fmt: skip
    """All other modes, in one computation.

    In vmap and scan, the second of two directions is -1/2 times the first.
    """
    in_scan = lambda *xs: lax.scan(lambda n, xs: (n + np.int32(1), f(*xs)), np.int32(0), xs)[1]
    one = lambda xs, d: _first(xform, f, xs, d)
    work: dict[str, Fun] = {
        "jit": lambda *xs: _first(xform, jax.jit(f), xs, d),
        "vmap": lambda *xs: jax.vmap(one)(_twice(xs, 1.0), _twice(d)),
        "scan": lambda *xs: _first(xform, in_scan, _twice(xs, 1.0), _twice(d)),
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
    twice = {key: _twice(once[key], factor) for key, factor in factors.items()}
    for m in wanted:
        if m != "second":
            say.close(f"under {m}", results[m], once if m == "jit" else twice)
            _check_types(results[m], xs if m == "jit" else _twice(xs), say)
        elif case.jax:
            say.close("against JAX", results[m], results["JAX, second"])
        elif case.differences and _in_64_bits(xs):
            g, args = _pulled(xform, f, xs)
            loose = dataclasses.replace(say, tolerance=1e-6)
            expected = _differences(g, args, _direction(args, 4))
            loose.close("against differences: jvp of vjp", results[m]["jvp of vjp"], expected)


# Points, directions, comparisons.


@dataclasses.dataclass(frozen=True)
class _Say:
    """Comparisons that fail with the case, the dtype and the active inputs in the message."""

    case: str
    setting: str
    tolerance: float

    def fail(self, check: str, problem: str) -> None:
        raise WrongRule(
            f"check of {self.case}, {self.setting}",
            f"{check}: {problem}",
            "",
            "correct the formula of the rule, or state in the Case what does not hold for it",
        )

    def close(self, check: str, actual: Any, expected: Any) -> None:
        leaves = jax.tree.leaves_with_path(actual)
        for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
            if b.dtype == jax.dtypes.float0:
                continue
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
            near = a.shape == b.shape and np.isclose(
                a, b, self.tolerance, self.tolerance * scale, equal_nan=True
            )
            if not np.all(near):
                self.fail(f"{check}{jax.tree_util.keystr(path)}", f"\n{a}\nis not\n{b}")

    def same(self, check: str, actual: Any, expected: Any) -> None:
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            if not np.array_equal(a, b, equal_nan=differentiable(jax.typeof(b))):
                self.fail(check, f"\n{a}\nis not\n{b}")

    def same_types(self, check: str, actual: Any, of: Any) -> None:
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(of), strict=True):
            dtype = b.dtype if differentiable(jax.typeof(b)) else jax.dtypes.float0
            if a.dtype != dtype or np.shape(a) != np.shape(b):
                self.fail(check, f"{a.dtype}{np.shape(a)} is not {dtype}{np.shape(b)}")


def cast(x: Any, dtype: str, i: int) -> jax.Array:
    """An argument in a dtype; made complex by a phase that depends on the place."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.inexact):
        return jnp.asarray(x)
    wanted = jnp.dtype(dtype)
    if np.iscomplexobj(x) and not np.issubdtype(wanted, np.complexfloating):
        wanted = np.dtype("complex64" if dtype == "float32" else "complex128")
    elif np.issubdtype(wanted, np.complexfloating) and not np.iscomplexobj(x):
        x = x + 0.25j * np.cos(1.0 + i + np.arange(x.size)).reshape(x.shape)
    return jnp.asarray(x, wanted)


def _held(fun: Fun, args: Sequence[Any], active: Sequence[int]) -> Fun:
    def f(*xs: Any) -> Any:
        moving = dict(zip(active, xs, strict=True))
        return fun(*(moving.get(i, x) for i, x in enumerate(args)))

    return f


def _direction(tree: Any, seed: int) -> Any:
    """A tangent or cotangent for a tree of arrays (or types): fixed random numbers, or float0.

    They are multiples of 1/16, which are exact in every dtype.
    """
    random = np.random.default_rng(seed)

    def one(x: Any) -> Any:
        if not differentiable(x):
            return float0_zeros(x.shape)
        re, im = np.round(16 * random.standard_normal((2, *x.shape))) / 16
        wave = np.issubdtype(x.dtype, np.complexfloating)
        return jnp.asarray(re + 1j * im if wave else re, x.dtype)

    return jax.tree.map(one, tree)


def _directions(f: Fun, xs: Any) -> tuple[Any, Any]:
    """A tangent for the inputs of a function, and a cotangent for its outputs."""
    return _direction(xs, 1), _direction(jax.eval_shape(f, *xs), 2)


def _twice(tree: Any, factor: float = -0.5) -> Any:
    """Each array, stacked with itself times a factor; others with themselves."""

    def one(x: Any) -> Any:
        if not differentiable(x):
            return np.stack([x, x])
        return jnp.stack([x, x * jnp.asarray(factor, x.dtype)])

    return jax.tree.map(one, tree)


def _in_64_bits(xs: Any) -> bool:
    """Whether differences show anything."""
    return all(jnp.finfo(x.dtype).bits == 64 for x in jax.tree.leaves(xs))


def _differences(f: Fun, xs: Any, dxs: Any) -> Any:
    """The slope of `f` along `dxs`, by central differences; zero for integer outputs."""

    def moved(h: float) -> Any:
        return f(*jax.tree.map(lambda x, dx: x + h * dx if differentiable(x) else x, xs, dxs))

    def slope(b: Any, a: Any) -> Any:
        return (b - a) / (2 * STEP) if differentiable(a) else float0_zeros(a.shape)

    return jax.tree.map(slope, moved(STEP), moved(-STEP))


def _dot(cts: Any, xs: Any) -> Any:
    """The pairing of cotangents and tangents: the real part of Σ ct·dx, without conjugation."""
    wide = lambda x: np.asarray(x).astype(complex)
    pairs = zip(jax.tree.leaves(cts), jax.tree.leaves(xs), strict=True)
    terms = [np.sum(wide(ct) * wide(dx)).real for ct, dx in pairs if differentiable(dx)]
    return np.asarray(sum(terms, 0.0))
