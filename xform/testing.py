"""Checks for derivative rules: xform's own are tested with these, and users' rules can be.

What a check proves: the derivative pushed forward equals central differences and JAX's own; the
derivative pulled back is its transpose; both hold for every set of active inputs, for derivatives
of derivatives, and under `jit`, `vmap` and `scan`; and the rule under test is the one that ran.
At a kink differences prove nothing: `Case(differences=False)`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform
from xform._jax import closed, float0_zeros
from xform.errors import WrongRule
from xform.table import RULES, Rule, differentiable

Fun = Callable[..., Any]
MODES = ("first", "second", "jit", "vmap", "scan")
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

    @property
    def id(self) -> str:
        """The primitive and the label, as a test is named."""
        return "-".join(filter(None, (self.primitive, self.label)))


def check_rule(
    case: Case | Fun,
    *args: Any,
    dtypes: Sequence[str] = ("float64", "float32"),
    modes: Collection[str] = MODES,
    **fields: Any,
) -> None:
    """Check the rules that `case` uses, in all `dtypes` and `modes`.

    Args:
      case: a `Case`; or a function, and then `args` and `fields` are those of its `Case`.
      *args: where to check the function: float64 arrays, integers are held constant.
      dtypes: floating or complex dtypes, by name.
      modes: some of "first" and "second" derivatives, and first ones under "jit", "vmap", "scan".
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


def check_grads(
    f: Fun,
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[str] = ("jvp", "vjp"),
    tolerance: float = 1e-5,
) -> None:
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
    dxs = _direction(args, seed=order)
    slope = _differences(f, args, dxs)
    say = _Say("derivative by", f"order {order}", tolerance)
    for mode in modes:
        if mode == "jvp":
            derivative = lambda *xs: xform.jvp(f, xs, dxs)[1]
            say.close("jvp against differences", derivative(*args), slope)
        else:
            ct = _direction(jax.eval_shape(f, *args), seed=order)
            derivative = lambda *xs: xform.vjp(f, *xs)[1](ct)  # noqa: B023
            say.close("vjp against differences", _dot(derivative(*args), dxs), _dot(ct, slope))
        if order > 1:
            check_grads(derivative, args, order - 1, modes, tolerance)


# One case in one dtype.


def _check(case: Case, dtype: str, modes: Collection[str]) -> None:
    args = [_cast(x, dtype, i) for i, x in enumerate(case.args)]
    inexact = [i for i, x in enumerate(args) if differentiable(jax.typeof(x))]
    tolerance = TOLERANCE.get(dtype, 6e-2)
    for n in range(1, len(inexact) + 1):
        for active in itertools.combinations(inexact, n):
            say = _Say(case.id, f"{dtype}, active inputs {active}", tolerance)
            f, xs = _held(case.fun, args, active), tuple(args[i] for i in active)
            full = n == len(inexact)
            with _watch(case, f, xs, say):
                found = _first(f, xs)
            _check_first(case, f, xs, found, say)
            if full and len(args) > n:
                _check_float0(case.fun, args, say)
            if full and case.second and "second" in modes:
                _check_second(case, f, xs, say)
            if full:
                _check_composed(f, xs, found, modes, say)


@dataclasses.dataclass(frozen=True)
class _First:
    """Point, directions and all first derivatives of one function."""

    dxs: Any
    cts: Any
    y: Any
    dy: Any
    y_again: Any
    ct_xs: Any


def _first(f: Fun, xs: Any) -> _First:
    dxs, cts = _direction(xs, seed=1), _direction(jax.eval_shape(f, *xs), seed=2)
    y, dy = xform.jvp(f, xs, dxs)
    y_again, pull = xform.vjp(f, *xs)
    return _First(dxs, cts, y, dy, y_again, pull(cts))


def _check_first(case: Case, f: Fun, xs: Any, found: _First, say: _Say) -> None:
    dxs, cts = found.dxs, found.cts
    y = f(*xs)
    say.close("output of jvp", found.y, y)
    say.close("output of vjp", found.y_again, y)
    say.same_types("tangent of the output", found.dy, y)
    say.same_types("cotangents of the inputs", found.ct_xs, xs)
    say.close("<ct, push> against <pull, dx>", _dot(found.ct_xs, dxs), _dot(cts, found.dy))
    if case.jax:
        say.close("jvp against jax.jvp", found.dy, jax.jvp(f, xs, dxs)[1])
        say.close("vjp against jax.vjp", found.ct_xs, jax.vjp(f, *xs)[1](cts))
    if case.differences and _wide(xs):
        loose = dataclasses.replace(say, tolerance=1e-6)
        loose.close("jvp against differences", found.dy, _differences(f, xs, dxs))


def _check_second(case: Case, f: Fun, xs: Any, say: _Say) -> None:
    """Forward over reverse and reverse over reverse, in the inputs and in the cotangent."""
    leaves, tree = jax.tree.flatten(_direction(jax.eval_shape(f, *xs), seed=3))
    on = [differentiable(jax.typeof(ct)) for ct in leaves]
    live = tuple(ct for ct, o in zip(leaves, on, strict=True) if o)
    if not live:
        return

    def pulled(vjp: Fun) -> Fun:
        def g(live: Any, *xs: Any) -> Any:
            rest = iter(live)
            cts = [next(rest) if o else ct for ct, o in zip(leaves, on, strict=True)]
            return vjp(f, *xs)[1](jax.tree.unflatten(tree, cts))

        return g

    args = (live, *xs)
    dargs, cts = _direction(args, seed=4), _direction(xs, seed=5)
    dy = xform.jvp(pulled(xform.vjp), args, dargs)[1]
    ct_args = xform.vjp(pulled(xform.vjp), *args)[1](cts)
    say.same_types("second cotangents", ct_args, args)
    say.close("second order <ct, push> against <pull, dx>", _dot(ct_args, dargs), _dot(cts, dy))
    if case.jax:
        say.close("jvp of vjp against JAX's", dy, jax.jvp(pulled(jax.vjp), args, dargs)[1])
        say.close("vjp of vjp against JAX's", ct_args, jax.vjp(pulled(jax.vjp), *args)[1](cts))
    elif case.differences and _wide(xs):
        loose = dataclasses.replace(say, tolerance=1e-6)
        expected = _differences(pulled(xform.vjp), args, dargs)
        loose.close("jvp of vjp against differences", dy, expected)


def _check_float0(fun: Fun, args: Sequence[Any], say: _Say) -> None:
    """Integer inputs: their tangents and cotangents are float0, and change nothing."""
    args = tuple(args)
    y, dy = xform.jvp(fun, args, _direction(args, seed=1))
    say.same_types("tangent, with integer inputs", dy, y)
    y, pull = xform.vjp(fun, *args)
    say.same_types("cotangents, with integer inputs", pull(_direction(y, seed=2)), args)


def _check_composed(f: Fun, xs: Any, found: _First, modes: Collection[str], say: _Say) -> None:
    """The same inside jit; and twice at once in vmap and scan, where the second is -1/2 times."""

    def derivatives(f: Fun, xs: Any, dxs: Any, cts: Any) -> Any:
        y, pull = xform.vjp(f, *xs)
        return y, xform.jvp(f, xs, dxs)[1], pull(cts)

    def in_scan(*xs: Any) -> Any:
        def body(count: Any, xs: Any) -> Any:
            return count + np.int32(1), f(*xs)

        return lax.scan(body, np.int32(0), xs)[1]

    once = (xs, found.dxs, found.cts)
    if "jit" in modes:
        results = jax.jit(lambda *once: derivatives(jax.jit(f), *once))(*once)
        say.close("under jit", results, (found.y, found.dy, found.ct_xs))
    twice = (_twice(xs, 1.0), _twice(found.dxs), _twice(found.cts))
    expected = (_twice(found.y, 1.0), _twice(found.dy), _twice(found.ct_xs))
    if "vmap" in modes:
        results = jax.vmap(lambda *one: derivatives(f, *one))(*twice)
        say.close("under vmap", results, expected)
    if "scan" in modes:
        say.close("in a scan", derivatives(in_scan, *twice), expected)


@contextmanager
def _watch(case: Case, f: Fun, xs: Any, say: _Say) -> Iterator[None]:
    """See that the primitive is in the program, and that its rule is asked for the derivative."""
    name, rule = case.primitive, RULES.get(case.primitive)
    if not name:
        yield
        return
    program = closed(jax.make_jaxpr(f)(*xs))[0]
    if name not in _names(program):
        say.fail("the program", f"it holds no primitive {name}: {sorted(_names(program))}")
    if rule is None:
        say.fail("the table", f"no rule is declared for {name}")
        return
    seen: set[str] = set()
    RULES[name] = _seen(rule, seen)
    try:
        yield
    finally:
        RULES[name] = rule
    inside = name not in {eqn.primitive.name for eqn in program.eqns}  # it may be analyzed already
    if not (inside or seen & ({"active"} if rule.word == "constant" else {"push", "pull", "call"})):
        say.fail("the rule that ran", f"the rule of {name} was not asked for a derivative")


def _seen(rule: Rule, seen: set[str]) -> Rule:
    """A copy of a rule, of a subclass of its class, that notes which attributes are read."""

    class Seen(type(rule)):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    copy = object.__new__(Seen)
    copy.__dict__.update(vars(rule))
    return copy


def _names(program: Any) -> set[str]:
    found: set[str] = set()
    for eqn in program.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if _is_program(value):
                found |= _names(closed(value)[0])
    return found


def _is_program(value: Any) -> bool:
    return hasattr(closed(value)[0], "eqns")


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

    def close(self, check: str, found: Any, expected: Any) -> None:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if b.dtype == jax.dtypes.float0:
                continue
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
            near = np.isclose(a, b, self.tolerance, self.tolerance * scale, equal_nan=True)
            if a.shape != b.shape or not near.all():
                self.fail(check, f"\n{a}\nis not\n{b}")

    def same_types(self, check: str, found: Any, of: Any) -> None:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(of), strict=True):
            dtype = b.dtype if differentiable(jax.typeof(b)) else jax.dtypes.float0
            if a.dtype != dtype or np.shape(a) != np.shape(b):
                self.fail(check, f"{a.dtype}{np.shape(a)} is not {dtype}{np.shape(b)}")


def _cast(x: Any, dtype: str, i: int) -> Any:
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
        given = dict(zip(active, xs, strict=True))
        return fun(*(given.get(i, x) for i, x in enumerate(args)))

    return f


def _direction(tree: Any, seed: int) -> Any:
    """A tangent or cotangent for a tree of arrays (or types): fixed random numbers, or float0."""
    random = np.random.default_rng(seed)

    def one(x: Any) -> Any:
        if not differentiable(x):
            return float0_zeros(x.shape)
        d = random.standard_normal(x.shape)
        if np.issubdtype(x.dtype, np.complexfloating):
            d = d + 1j * random.standard_normal(x.shape)
        return jnp.asarray(d, x.dtype)

    return jax.tree.map(one, tree)


def _twice(tree: Any, factor: float = -0.5) -> Any:
    """Each array, stacked with itself times a factor; others with themselves."""

    def one(x: Any) -> Any:
        if not differentiable(x):
            return np.stack([x, x])
        return jnp.stack([x, x * jnp.asarray(factor, x.dtype)])

    return jax.tree.map(one, tree)


def _wide(tree: Any) -> bool:
    return all(jnp.finfo(x.dtype).bits == 64 for x in jax.tree.leaves(tree))


def _differences(f: Fun, xs: Any, dxs: Any) -> Any:
    """The slope of `f` along `dxs`, by central differences; zero for integer outputs."""

    def moved(h: float) -> Any:
        return f(*jax.tree.map(lambda x, dx: x + h * dx if differentiable(x) else x, xs, dxs))

    def slope(b: Any, a: Any) -> Any:
        return (b - a) / (2 * STEP) if differentiable(a) else float0_zeros(a.shape)

    return jax.tree.map(slope, moved(STEP), moved(-STEP))


def _dot(cts: Any, xs: Any) -> Any:
    """The pairing of cotangents and tangents: the real part of Σ ct·dx, without conjugation."""
    pairs = zip(jax.tree.leaves(cts), jax.tree.leaves(xs), strict=True)
    wide = lambda x: np.asarray(x).astype(np.complex128)
    return np.asarray(
        sum(np.sum(wide(ct) * wide(dx)).real for ct, dx in pairs if differentiable(dx))
    )
